// Rates from counters: the daemon's metrics are read every two seconds while the page is seen.

import { call } from "./api.js";

export const EVERY_MS = 2000;
const KEPT = 90;
const LAYERS = ["queued", "image", "kernel", "completing"];
/** Samples, the oldest first: `{at, disks: Map(vbd -> row), sum: row}`. */
export const samples = [];
let before = null;
let timer = null;

/** Figures of a Prometheus text: `[name, labels, number]`. */
export function* parse(text) {
  for (const line of text.split("\n")) {
    const found = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    yield [found[1], labels, Number(found[3])];
  }
}

function read(text) {
  const disks = new Map();
  for (const [name, labels, number] of parse(text)) {
    if (!labels.vbd || !name.startsWith("tapio_vbd_")) continue;
    if (!disks.has(labels.vbd)) disks.set(labels.vbd, { info: {}, counters: {} });
    const disk = disks.get(labels.vbd);
    if (name === "tapio_vbd_info") disk.info = labels;
    else disk.counters[[name.slice(10), labels.kind ?? labels.stage, labels.le].filter(Boolean).join(" ")] = number;
  }
  return { at: performance.now(), disks };
}

const empty = () => ({ iops: { read: 0, write: 0, flush: 0 }, bytes: { read: 0, write: 0 }, inFlight: 0, waiting: 0,
  queue: Object.fromEntries(LAYERS.map((layer) => [layer, 0])), time: 0, done: 0, heat: {} });

function rates(now, then, span) {
  const row = { ...empty(), info: now.info };
  const rate = (key) => Math.max(0, (now.counters[key] ?? 0) - (then.counters[key] ?? 0)) / span;
  for (const kind of ["read", "write", "flush"]) row.iops[kind] = rate(`requests_total ${kind}`);
  for (const kind of ["read", "write"]) row.bytes[kind] = rate(`bytes_total ${kind}`);
  for (const layer of LAYERS) row.queue[layer] = rate(`stage_seconds_total ${layer}`);
  row.inFlight = now.counters.in_flight ?? 0;
  row.waiting = now.counters.waiting ?? 0;
  for (const kind of ["read", "write", "flush"]) {
    row.time += rate(`latency_seconds_sum ${kind}`);
    row.done += rate(`latency_seconds_count ${kind}`);
    let below = 0;
    const limits = Object.keys(now.counters).filter((key) => key.startsWith(`latency_seconds_bucket ${kind} `))
      .map((key) => [key, key.split(" ")[2]]).sort((a, b) => limitOf(a[1]) - limitOf(b[1]));
    for (const [key, limit] of limits) {
      const sum = rate(key);
      row.heat[limit] = (row.heat[limit] ?? 0) + Math.max(0, sum - below);
      below = sum;
    }
  }
  return row;
}

/** Seconds of a bucket's limit. */
export const limitOf = (text) => (text === "+Inf" ? Infinity : Number(text));

function add(sum, row) {
  for (const part of ["iops", "bytes", "queue", "heat"]) {
    for (const [key, number] of Object.entries(row[part])) sum[part][key] = (sum[part][key] ?? 0) + number;
  }
  for (const key of ["inFlight", "waiting", "time", "done"]) sum[key] += row[key];
  return sum;
}

async function sample(onSample) {
  if (!document.hidden) {
    try {
      const now = read(await call("host.export_metrics"));
      if (before) {
        const span = (now.at - before.at) / 1000;
        const disks = new Map();
        for (const [vbd, disk] of now.disks) disks.set(vbd, rates(disk, before.disks.get(vbd) ?? disk, span));
        samples.push({ at: Date.now(), disks, sum: [...disks.values()].reduce(add, empty()) });
        if (samples.length > KEPT) samples.shift();
        onSample();
      }
      before = now;
    } catch {
      // The line in the header says that the connection is lost; a gap in the curve is the rest.
      before = null;
    }
  }
  timer = setTimeout(() => sample(onSample), EVERY_MS);
}

export function start(onSample) {
  stop();
  sample(onSample);
}

export function stop() {
  clearTimeout(timer);
  samples.length = 0;
  before = null;
}

export const latest = () => samples.at(-1);
