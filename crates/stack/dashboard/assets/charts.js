// Curves and heat maps as SVG, with a sentence for those who do not see them.

import { h, s } from "./dom.js";

const WIDTH = 460, HEIGHT = 150, LEFT = 70, BOTTOM = 18;
const x = (place, places) => LEFT + (place + 1) * ((WIDTH - LEFT - 6) / places);

/** A round number that is not below `top`: of bytes, a round number of the unit that they are written in. */
function roundUp(top, base) {
  if (top <= 0) return 1;
  if (base && top >= base) {
    const unit = base ** Math.floor(Math.log(top) / Math.log(base));
    return roundUp(top / unit) * unit;
  }
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= top);
}

/** The newest value in words. */
const nowOf = (values, text) => (values.at(-1) === null ? "–" : text(values.at(-1) ?? 0));

const key = (curves) => h("div", { class: "key" }, curves.map(({ name, kind, values, text }) => h("span", {},
  s("svg", { width: 10, height: 10, "aria-hidden": "true" }, s("rect", { width: 10, height: 10, rx: 3, class: `fill-${kind}` })),
  `${name} ${nowOf(values, text)}`)));

/** Runs of values that are known, as `[place, value]`; null is not known. */
function runs(values) {
  const all = [];
  values.forEach((value, place) => {
    if (value === null) return;
    if (place === 0 || values[place - 1] === null) all.push([]);
    all.at(-1).push([place, value]);
  });
  // A line from a point to itself is drawn as a dot.
  return all.map((run) => (run.length === 1 ? [run[0], run[0]] : run));
}

/** A card with curves: `[{name, kind, values, text}]`, the newest value last; a value that is null is a gap. */
export function chart(title, curves, places = 90, begin = "3 min ago") {
  const top = roundUp(Math.max(...curves.flatMap(({ values }) => values), 0), curves[0].text.base);
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 10);
  const text = curves[0].text;
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img",
    "aria-label": `${title}: ${curves.map((curve) => `${curve.name} ${nowOf(curve.values, curve.text)}`).join(", ")}` },
    [0, 0.5, 1].map((part) => [
      s("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: y(top * part), y2: y(top * part) }),
      s("text", { x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, text(top * part))]),
    s("text", { x: LEFT, y: HEIGHT - 3 }, begin), s("text", { x: WIDTH - 4, y: HEIGHT - 3, "text-anchor": "end" }, "now"),
    curves.map(({ kind, values }) => runs(values).map((run) => s("polyline", { class: `curve ${kind}`, points: run.map(([place, value]) =>
      `${x(places - values.length + place, places).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }))));
  return h("section", { class: "card" }, h("h2", {}, title), picture, key(curves));
}

/** A card with a heat map: a column a sample, a row a bucket of latency, the darker the more requests. */
export function heatMap(title, columns, limits, nameOf, places = 90) {
  const high = (HEIGHT - BOTTOM - 6) / Math.max(1, limits.length);
  const top = Math.max(1e-9, ...columns.flatMap((column) => limits.map((limit) => column[limit] ?? 0)));
  const wide = (WIDTH - LEFT - 6) / places;
  const row = (place) => HEIGHT - BOTTOM - (place + 1) * high;
  const last = columns.at(-1) ?? {};
  const most = limits.reduce((best, limit) => ((last[limit] ?? 0) > (last[best] ?? 0) ? limit : best), limits[0]);
  const says = (last[most] ?? 0) > 0 ? `most requests now take up to ${nameOf(most)}` : "no requests now";
  return h("section", { class: "card" }, h("h2", {}, title),
    s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": `${title}: ${says}` },
      limits.map((limit, place) => place % 2 === 0 && s("text", { x: LEFT - 6, y: row(place) + high - 1, "text-anchor": "end" }, nameOf(limit))),
      s("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      columns.map((column, at) => limits.map((limit, place) => (column[limit] ?? 0) > 0 && s("rect", { class: "heat",
        x: (x(places - columns.length + at, places) - wide).toFixed(1), y: row(place).toFixed(1), width: wide.toFixed(2), height: high.toFixed(1),
        "fill-opacity": (0.15 + 0.85 * Math.sqrt(column[limit] / top)).toFixed(2) }))),
      s("text", { x: LEFT, y: HEIGHT - 3 }, "3 min ago"), s("text", { x: WIDTH - 4, y: HEIGHT - 3, "text-anchor": "end" }, "now")),
    h("p", { class: "key" }, `Rows are upper bounds of latency; ${says}.`));
}
