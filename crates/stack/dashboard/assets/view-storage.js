// Storage repositories: their disks, and the chains of images below them.

import { h } from "./dom.js";
import { all, byUuid, get } from "./store.js";
import { bytes, byName, pluralOf } from "./format.js";
import { paged, table } from "./table.js";
import { families, tree } from "./chains.js";
import { button, createVdi, scanSr } from "./actions.js";
import { srTable } from "./view-overview.js";
import { srHistory } from "./view-history.js";

export const storage = () => ({ title: "Storage", body: [h("section", { class: "card" }, srTable(all("SR")))] });

/** The VMs that have a disk, as words. */
export const usersOf = (vdi) => (vdi.VBDs ?? []).map((ref) => get("VBD", ref)).filter(Boolean)
  .map((vbd) => `${get("VM", vbd.VM)?.name_label ?? "?"}${vbd.currently_attached ? "" : " (not plugged)"}`).join(", ");

export const kindOf = (vdi) => h("span", { class: `badge ${vdi.missing ? "bad" : ""}` }, vdi.missing ? "missing" : !vdi.managed ? "base copy" : vdi.is_a_snapshot ? "snapshot" : "disk");

export function sr(uuid, redraw) {
  const here = byUuid("SR", uuid);
  if (!here) return { title: "Storage repository", body: [h("p", {}, "There is no such storage repository; it may have been removed. "), h("a", { href: "#/storage" }, "All storage repositories")] };
  const disks = all("VDI").filter((vdi) => vdi.SR === here.ref && vdi.managed).sort(byName);
  const rows = paged(`sr-${uuid}`, disks, redraw, { noun: "disk" });
  const { children, roots } = families(here.ref);
  const trees = paged(`chains-${uuid}`, roots, redraw, { rows: 5, noun: "chain" });
  return { title: here.name_label || uuid, about: `${here.type}, ${bytes(here.physical_utilisation)} of ${bytes(here.physical_size)} in use`,
    actions: [button("New disk", () => createVdi(here), { first: true }), button("Scan", () => scanSr(here), { role: "vm-power-admin" })],
    body: [
      h("section", { class: "card" }, h("h2", {}, pluralOf(disks.length, "disk")), h("div", { class: "tools" }, rows.filter), table("Disks", [
        ["Name", (vdi) => h("a", { href: `#/vdi/${vdi.uuid}` }, vdi.name_label || vdi.uuid.slice(0, 8))], ["Kind", kindOf],
        ["Size", (vdi) => bytes(vdi.virtual_size), true], ["In use", (vdi) => bytes(vdi.physical_utilisation), true], ["VM", (vdi) => usersOf(vdi) || "–"],
      ], rows.rows), rows.pages),
      h("section", { class: "card" }, h("h2", {}, "Chains"), roots.length ? trees.rows.map((root) => tree(root, children))
        : h("p", { class: "empty" }, "No disk shares an image with another; snapshots and clones make chains."), trees.pages),
      srHistory(uuid, redraw)] };
}
