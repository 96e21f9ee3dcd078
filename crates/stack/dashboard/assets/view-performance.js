// Live curves of all plugged disks, or of one.

import { h } from "./dom.js";
import { count, perSecond, seconds } from "./format.js";
import { limitOf, samples, latest } from "./figures.js";
import { chart, heatMap } from "./charts.js";
import { paged, table } from "./table.js";

let chosen = "";
const LAYERS = [["queued", "front end", "read"], ["image", "image layer", "flush"], ["kernel", "kernel and storage", "write"], ["completing", "answering", "all"]];
// A queue of one request is held by all layers together: most of them hold a part of it.
const queueSize = (number) => (number > 0 && number < 10 ? number.toFixed(2) : count(number));
const mean = (row) => (row.done > 0 ? row.time / row.done : 0);

export function performance(redraw) {
  const rowOf = (sample) => (chosen ? sample.disks.get(chosen) : sample.sum);
  const rows = samples.map(rowOf).filter(Boolean);
  const curve = (name, kind, text, of) => ({ name, kind, text, values: rows.map(of) });
  const disks = [...(latest()?.disks ?? [])].map(([vbd, row]) => ({ ref: vbd, uuid: vbd, ...row, name_label: `${row.info.vm_name} ${row.info.vdi_name}` }));
  const total = (row) => row.iops.read + row.iops.write + row.iops.flush;
  disks.sort((a, b) => total(b) - total(a));
  const limits = [...new Set(rows.flatMap((row) => Object.keys(row.heat)))].sort((a, b) => limitOf(a) - limitOf(b));
  const shown = paged("performance", disks, redraw, { noun: "disk" });
  const name = (disk) => `${disk.info.vm_name || "VM"} · ${disk.info.vdi_name || disk.info.device || disk.uuid.slice(0, 8)}`;
  const choose = h("label", {}, "Disks in the curves", h("select", { id: "chosen", onchange: (event) => { chosen = event.target.value; redraw(); } },
    h("option", { value: "", selected: !chosen }, "all plugged disks"), disks.slice(0, 200).map((disk) => h("option", { value: disk.uuid, selected: disk.uuid === chosen }, name(disk)))));
  return { title: "Performance", about: "Sampled every two seconds while this page is open", body: [
    h("div", { class: "tools" }, choose),
    h("div", { class: "grid wide" },
      chart("Requests a second", [curve("reads", "read", count, (row) => row.iops.read), curve("writes", "write", count, (row) => row.iops.write), curve("flushes", "flush", count, (row) => row.iops.flush)]),
      chart("Throughput", [curve("read", "read", perSecond, (row) => row.bytes.read), curve("written", "write", perSecond, (row) => row.bytes.write)]),
      heatMap("Latency", rows.map((row) => row.heat), limits, (limit) => (limit === "+Inf" ? "longer" : seconds(limitOf(limit)))),
      chart("Average queue size by layer", LAYERS.map(([layer, title, kind]) => curve(title, kind, queueSize, (row) => row.queue[layer])))),
    h("section", { class: "card" }, h("h2", {}, "Plugged disks"), h("div", { class: "tools" }, shown.filter), table("Plugged disks", [
      ["Disk", name], ["Reads/s", (disk) => count(disk.iops.read), true], ["Writes/s", (disk) => count(disk.iops.write), true],
      ["Read", (disk) => perSecond(disk.bytes.read), true], ["Written", (disk) => perSecond(disk.bytes.write), true],
      ["Mean latency", (disk) => (disk.done > 0 ? seconds(mean(disk)) : "–"), true], ["In flight", (disk) => String(disk.inFlight), true], ["Held back", (disk) => String(disk.waiting), true],
    ], shown.rows), shown.pages)] };
}
