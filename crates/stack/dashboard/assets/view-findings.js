// What a check of the storage found, where the daemon has one.

import { call } from "./api.js";
import { h } from "./dom.js";
import { me } from "./roles.js";
import { errorBox } from "./errors.js";
import { table } from "./table.js";

const METHODS = ["host.diagnose", "host.doctor", "pool.diagnose"];
let state = {};

/** The message that gives findings; none where this daemon has no such message. */
export const findingsMethod = () => METHODS.find((method) => me.methods.has(method));

export function findings(redraw) {
  const method = findingsMethod();
  if (method && !state.asked) {
    state = { asked: true };
    call(method).then((text) => { state.found = typeof text === "string" ? JSON.parse(text) : text; }).catch((error) => { state.error = error; }).finally(redraw);
  }
  const list = Array.isArray(state.found) ? state.found : state.found?.findings ?? [];
  return { title: "Findings", body: [h("section", { class: "card" }, state.error ? errorBox(state.error, "Check of the storage")
    : table("Findings", [["Severity", (found) => String(found.severity ?? "")], ["Object", (found) => String(found.object ?? found.subject ?? "")],
      ["Cause", (found) => String(found.cause ?? found.what ?? "")], ["Next step", (found) => String(found.next ?? found.repair ?? "")]], list))] };
}
