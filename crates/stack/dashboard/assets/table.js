// Tables in pages, with a filter: a thousand rows stay usable.

import { h } from "./dom.js";
import { pluralOf } from "./format.js";

const ROWS = 50;
const places = new Map();

/** What the person chose for the table `id`. */
export function placeOf(id) {
  if (!places.has(id)) places.set(id, { page: 0, filter: "" });
  return places.get(id);
}

/** The part of `all` that is shown, and the controls around it. */
export function paged(id, all, redraw, { rows = ROWS, textOf = (row) => `${row.name_label} ${row.uuid}`, noun = "row" } = {}) {
  const place = placeOf(id);
  const wanted = place.filter.toLowerCase();
  const found = wanted ? all.filter((row) => textOf(row).toLowerCase().includes(wanted)) : all;
  const last = Math.max(0, Math.ceil(found.length / rows) - 1);
  place.page = Math.min(place.page, last);
  const turn = (by) => () => { place.page += by; redraw(); };
  const filter = h("label", {}, `Filter ${noun}s by name or UUID`, h("input", {
    type: "search", id: `filter-${id}`, value: place.filter, oninput: (event) => { place.filter = event.target.value; place.page = 0; redraw(); } }));
  const pages = last > 0 && h("nav", { class: "pages", "aria-label": `Pages of ${noun}s` },
    h("button", { type: "button", disabled: place.page === 0, onclick: turn(-1) }, "Previous"),
    h("span", { role: "status" }, `Page ${place.page + 1} of ${last + 1}`),
    h("button", { type: "button", disabled: place.page === last, onclick: turn(1) }, "Next"),
    h("span", { class: "soft small" }, pluralOf(found.length, noun)));
  return { rows: found.slice(place.page * rows, (place.page + 1) * rows), filter: all.length > 8 && filter, pages };
}

/** A table: `columns` are `[title, cell, isNumber]`. */
export function table(caption, columns, rows) {
  if (!rows.length) return h("p", { class: "empty" }, "Nothing here yet.");
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map(([title, , isNumber]) => h("th", { scope: "col", class: isNumber && "number" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", { "data-key": row.ref },
      columns.map(([, cell, isNumber]) => h("td", { class: isNumber && "number" }, cell(row))))))));
}
