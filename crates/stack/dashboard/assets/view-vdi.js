// One disk: what it is, where it is plugged, its chain.

import { h } from "./dom.js";
import { byUuid, get } from "./store.js";
import { bytes, when } from "./format.js";
import { table } from "./table.js";
import { families, rootOf, tree } from "./chains.js";
import { button, cloneVdi, destroyVdi, plugVbd, plugVdi, resizeVdi, snapshotVdi, unplugVbd } from "./actions.js";
import { kindOf } from "./view-storage.js";

const unless = (vdi, operation, what) => ((vdi.allowed_operations ?? []).includes(operation) ? "" : `This ${what} does not allow it now: it is in use, or its storage does not offer it.`);

/** VBDs with a button to plug or unplug each. */
export const vbdTable = (vbds, title, nameOf) => table(title, [
  ["Disk", nameOf], ["Device", (vbd) => vbd.device || vbd.userdevice], ["Mode", (vbd) => (vbd.mode === "RO" ? "read only" : "read and write")],
  ["State", (vbd) => h("span", { class: `badge ${vbd.currently_attached ? "good" : ""}` }, vbd.currently_attached ? "plugged" : "not plugged")],
  ["", (vbd) => { const name = get("VDI", vbd.VDI)?.name_label ?? "the disk";
    const off = get("VM", vbd.VM)?.power_state !== "Running" ? "The VM does not run." : "";
    return vbd.currently_attached ? button("Unplug", () => unplugVbd(vbd, name), { why: off }) : button("Plug", () => plugVbd(vbd, name), { why: off }); }],
], vbds);

export function vdi(uuid) {
  const here = byUuid("VDI", uuid);
  if (!here) return { title: "Disk", body: [h("p", {}, "There is no such disk; it may have been removed."), h("a", { href: "#/storage" }, "All storage repositories")] };
  const home = get("SR", here.SR);
  const { children } = families(here.SR);
  const vbds = (here.VBDs ?? []).map((ref) => get("VBD", ref)).filter(Boolean);
  const base = here.managed ? "" : "A base copy belongs to other disks.";
  const facts = [["Kind", kindOf(here)], ["Storage repository", h("a", { href: `#/sr/${home?.uuid}` }, home?.name_label ?? "?")], ["Size", bytes(here.virtual_size)],
    ["In use", bytes(here.physical_utilisation)], ["Changed blocks", here.cbt_enabled ? "tracked" : "not tracked"],
    ...(here.is_a_snapshot ? [["Snapshot of", get("VDI", here.snapshot_of)?.name_label ?? "–"], ["Taken", when(here.snapshot_time)]] : []), ["UUID", h("code", {}, here.uuid)]];
  return { title: here.name_label || (here.managed ? uuid.slice(0, 8) : "Base copy"), about: here.name_description,
    actions: [button("Snapshot", () => snapshotVdi(here), { first: true, why: base || unless(here, "snapshot", "disk") }), button("Clone", () => cloneVdi(here), { why: base || unless(here, "clone", "disk") }),
      button("Grow", () => resizeVdi(here), { why: base || (here.is_a_snapshot ? "A snapshot keeps its size." : "") }), button("Plug into a VM", () => plugVdi(here), { why: base }),
      button("Destroy", () => destroyVdi(here), { danger: true, why: base || unless(here, "destroy", "disk") })],
    body: [h("section", { class: "card" }, h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))),
      h("section", { class: "card" }, h("h2", {}, "VMs that have it"), vbdTable(vbds, "VMs that have it", (vbd) => h("a", { href: `#/vm/${get("VM", vbd.VM)?.uuid}` }, get("VM", vbd.VM)?.name_label ?? "?"))),
      h("section", { class: "card" }, h("h2", {}, "Chain"), tree(rootOf(here), children, here))] };
}
