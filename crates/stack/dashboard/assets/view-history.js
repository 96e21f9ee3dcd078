// Curves of what VMs, SRs and hosts did, in four ranges of time.

import { h } from "./dom.js";
import { bytes, count, perSecond, seconds } from "./format.js";
import { RANGES, columnsOf, combine } from "./history.js";
import { chart } from "./charts.js";

let range = 0, disk = "";
const share = (number) => `${(number * 100).toFixed(0)} %`;
const micro = (number) => seconds(number / 1e6);
const sum = (a, b) => a + b;
const most = Math.max;

const section = (title, tools, charts) => h("section", { class: "history", "aria-label": title }, h("h2", {}, title),
  h("div", { class: "tools" }, tools), h("div", { class: "grid wide" }, charts));

const choose = (label, name, options, chosen, take, redraw) => h("label", {}, label, h("select", { name, onchange: (event) => { take(event.target.value); redraw(); } },
  options.map(([value, title]) => h("option", { value, selected: value === chosen }, title))));

const ranges = (redraw) => choose("Range", "range", RANGES.map(([name], place) => [String(place), name]), String(range), (value) => { range = Number(value); }, redraw);

/** The four charts of disks; `of` answers the values of a key. */
function disks(of, draw) {
  const curve = (name, kind, text, key, with_ = sum, factor = 1) => ({ name, kind, text, values: of(key, with_).map((value) => (value === null ? null : value * factor)) });
  return [
    draw("Throughput", [curve("read", "read", perSecond, "io_throughput_read", sum, 1048576), curve("written", "write", perSecond, "io_throughput_write", sum, 1048576)]),
    draw("Requests a second", [curve("reads", "read", count, "iops_read"), curve("writes", "write", count, "iops_write")]),
    draw("Mean latency", [curve("reads", "read", micro, "read_latency", most), curve("writes", "write", micro, "write_latency", most)]),
    draw("Average queue size", [curve("requests", "all", count, "avgqu_sz")]),
  ];
}

const drawIn = ([name, , , rows]) => (title, curves) => chart(title, curves, rows, `${name} ago`);

export function vmHistory(uuid, redraw) {
  const columns = columnsOf({ vm_uuid: uuid }, RANGES[range], redraw);
  const devices = [...columns.keys()].map((key) => /^vm:vbd_(.+)_iops_total$/.exec(key)?.[1]).filter(Boolean).sort();
  if (!devices.length) return section("History", ranges(redraw), h("p", { class: "empty" }, "Nothing was measured yet: disks are measured while they are plugged."));
  const shown = devices.includes(disk) ? [disk] : devices;
  const of = (key, with_) => combine(shown.map((device) => columns.get(`vm:vbd_${device}_${key}`) ?? []), with_);
  const devicesOf = choose("Disks", "disk", [["", "all"], ...devices.map((device) => [device, device])], disk, (value) => { disk = value; }, redraw);
  return section("History", [ranges(redraw), devicesOf], disks(of, drawIn(RANGES[range])));
}

export function srHistory(uuid, redraw) {
  const columns = columnsOf({ vm_uuid: "none", sr_uuid: uuid, host: "true" }, RANGES[range], redraw);
  const draw = drawIn(RANGES[range]);
  const of = (key) => columns.get(`host:${key}_${uuid.slice(0, 8)}`) ?? [];
  const room = (name, kind, key) => ({ name, kind, text: bytes, values: columns.get(`sr:${key}`) ?? [] });
  return section("History", ranges(redraw), [
    draw("Room", [room("in use", "write", "physical_utilisation"), room("of", "all", "size")]), ...disks(of, draw)]);
}

export function hostHistory(redraw) {
  const columns = columnsOf({ vm_uuid: "none", host: "true" }, RANGES[range], redraw);
  const draw = drawIn(RANGES[range]);
  const values = (key, factor = 1) => (columns.get(`host:${key}`) ?? []).map((value) => (value === null ? null : value * factor));
  return section("Host over time", ranges(redraw), [
    draw("Processors", [{ name: "at work", kind: "write", text: share, values: values("cpu_avg") }]),
    draw("Load", [{ name: "of the last minute", kind: "all", text: count, values: values("loadavg") }]),
    draw("Memory", [{ name: "free", kind: "read", text: bytes, values: values("memory_free_kib", 1024) }, { name: "of", kind: "all", text: bytes, values: values("memory_total_kib", 1024) }]),
    draw("Sessions and tasks", [{ name: "sessions", kind: "read", text: count, values: values("pool_session_count") }, { name: "tasks", kind: "write", text: count, values: values("pool_task_count") }]),
  ]);
}
