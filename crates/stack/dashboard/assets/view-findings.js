// What a check of hosts and SRs found: the same as `tapio doctor` prints.

import { call } from "./api.js";
import { h } from "./dom.js";
import { errorBox } from "./errors.js";
import { lacks, me } from "./roles.js";
import { all, nameOf } from "./store.js";
import { table } from "./table.js";

const SEVERITIES = { error: "bad", warning: "warn", note: "" };
const ORDER = Object.keys(SEVERITIES);
let state = {};

/** Whether this daemon has the check. */
export const hasFindings = () => me.methods.has("host.diagnose");

/** Forgets what was found, for another session. */
export function forgetFindings() { state = {}; }

async function check(redraw) {
  state = { running: true };
  redraw();
  const hosts = all("host").map((host) => ["host.diagnose", host]);
  const srs = all("SR").map((sr) => ["SR.diagnose", sr]);
  // A host's findings have those of the SRs that are attached there.
  const known = new Map(), errors = [];
  for (const [method, object] of [...hosts, ...srs]) {
    try {
      for (const finding of JSON.parse(await call(method, object.ref))) known.set(JSON.stringify([finding.kind, finding.sr, finding.object, finding.detail]), finding);
    } catch (error) {
      errors.push([error, nameOf(object.ref)]);
    }
  }
  const found = [...known.values()];
  found.sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity));
  state = { found, errors, at: new Date() };
  redraw();
}

const nextStep = (finding) => (finding.repair ? `${finding.suggests} "tapio doctor --repair" does this by ${finding.repair}.` : finding.suggests);

function results() {
  if (state.running) return h("p", { role: "status" }, "Hosts and SRs are looked at.");
  if (!state.found) return h("p", { class: "soft" }, "Compares records, images, processes and settings. It changes nothing.");
  return [
    h("p", { role: "status" }, state.found.length ? `${state.found.length} found at ${state.at.toLocaleTimeString()}.` : `Nothing found at ${state.at.toLocaleTimeString()}.`),
    state.errors.map(([error, subject]) => errorBox(error, subject)),
    state.found.length > 0 && table("Findings", [
      ["Severity", (finding) => h("span", { class: `badge ${SEVERITIES[finding.severity] ?? ""}` }, finding.severity)],
      ["Object", (finding) => nameOf(finding.object)],
      ["What was seen", (finding) => [h("div", {}, finding.detail), h("div", { class: "soft small" }, finding.means)]],
      ["Next step", nextStep],
    ], state.found),
  ];
}

export function findings(redraw) {
  const reason = lacks("pool-operator");
  const start = h("button", { type: "button", class: "first", "aria-disabled": reason ? "true" : false, title: reason || false,
    onclick: () => { if (!reason && !state.running) check(redraw); } }, "Check now");
  return { title: "Findings", body: [h("section", { class: "card" }, h("p", {}, start), reason && h("p", { class: "soft" }, reason), results())] };
}
