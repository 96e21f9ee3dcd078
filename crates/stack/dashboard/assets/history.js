// What was measured over time: rows of /rrd_updates, by the call behind it, read again while they are shown.

import { call } from "./api.js";

/** Ranges that rows go back: name, seconds, seconds of a row, rows. */
export const RANGES = [["10 minutes", 600, 5, 120], ["2 hours", 7200, 60, 120], ["a week", 604800, 3600, 168], ["a year", 31622400, 86400, 366]];
const AGAIN_MS = 5000;
const KEPT = 8;
/** Answers by what was asked: `{at, columns: Map(source -> values), isAsked}`. */
const answers = new Map();

const valueOf = (value) => (typeof value === "number" ? value : null);

function read(text) {
  const { meta, data } = JSON.parse(text);
  const columns = new Map();
  meta.legend.forEach((entry, place) => {
    // FUNCTION:class:uuid:source
    const [name, owner, , ...source] = entry.split(":");
    if (name === "AVERAGE") columns.set(`${owner}:${source.join(":")}`, data.map((row) => valueOf(row.values[place])).reverse());
  });
  return columns;
}

/** Columns of what `options` name, as far as they are known; `redraw` is called when there are newer ones. */
export function columnsOf(options, [, seconds, step], redraw) {
  const key = JSON.stringify([options, seconds]);
  const known = answers.get(key) ?? { at: -Infinity, columns: new Map(), isAsked: false };
  // The last that was asked for stays the longest.
  answers.delete(key);
  answers.set(key, known);
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  if (!known.isAsked && performance.now() - known.at > AGAIN_MS) {
    known.isAsked = true;
    call("host.export_history", "updates", { json: "true", cf: "AVERAGE", start: `-${seconds}`, interval: String(step), ...options })
      .then((text) => { known.columns = read(text); })
      // The header says that the connection is lost; curves that are there stay.
      .catch(() => {})
      .finally(() => { known.isAsked = false; known.at = performance.now(); redraw(); });
  }
  return known.columns;
}

export const forgetHistory = () => answers.clear();

/** Sums, or other combinations, of columns row by row; a row of which nothing is known stays so. */
export function combine(columns, with_) {
  const rows = Math.max(0, ...columns.map((values) => values.length));
  return Array.from({ length: rows }, (_, row) => {
    const known = columns.map((values) => values[row]).filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce(with_) : null;
  });
}
