// The first page: hosts, room, VMs, load.

import { h } from "./dom.js";
import { all } from "./store.js";
import { bytes, byName, count, pluralOf, when } from "./format.js";
import { latest } from "./figures.js";
import { table } from "./table.js";
import { hostHistory } from "./view-history.js";

const card = (title, figure, more) => h("section", { class: "card" }, h("h2", {}, title), h("div", { class: "figure" }, figure), h("div", { class: "soft small" }, more));
export const vmsOf = () => all("VM").filter((vm) => !vm.is_a_template && !vm.is_a_snapshot && !vm.is_control_domain).sort(byName);

export function overview(redraw) {
  const vms = vmsOf(), srs = all("SR"), disks = all("VDI").filter((vdi) => vdi.managed);
  const used = srs.reduce((sum, sr) => sum + Math.max(0, sr.physical_utilisation), 0), size = srs.reduce((sum, sr) => sum + Math.max(0, sr.physical_size), 0);
  const now = latest()?.sum;
  const messages = all("message").sort((a, b) => String(b.timestamp).localeCompare(String(a.timestamp))).slice(0, 5);
  return { title: "Overview", body: [
    h("div", { class: "grid" },
      card("VMs", String(vms.length), `${vms.filter((vm) => vm.power_state === "Running").length} running`),
      card("Disks", String(disks.length), `${disks.filter((vdi) => vdi.is_a_snapshot).length} of them snapshots`),
      card("Storage in use", bytes(used), `of ${bytes(size)} in ${pluralOf(srs.length, "storage repository", "storage repositories")}`),
      card("Requests a second", now ? count(now.iops.read + now.iops.write + now.iops.flush) : "…", now ? `${bytes(now.bytes.read + now.bytes.write)}/s` : "measuring")),
    h("section", { class: "card" }, h("h2", {}, "Hosts"), table("Hosts", [
      ["Name", (host) => h("strong", {}, host.name_label)], ["Address", (host) => host.address || "–"],
      ["State", (host) => h("span", { class: `badge ${host.enabled ? "good" : "warn"}` }, host.enabled ? "enabled" : "disabled")],
      ["Version", (host) => host.software_version?.product_version ?? "–"],
      ["VMs", (host) => String(vms.filter((vm) => vm.resident_on === host.ref).length), true],
    ], all("host").sort(byName))),
    h("section", { class: "card" }, h("h2", {}, "Storage repositories"), srTable(srs)),
    messages.length > 0 && h("section", { class: "card" }, h("h2", {}, "Messages"), table("Messages", [
      ["When", (message) => when(message.timestamp)], ["What", (message) => message.name], ["Text", (message) => String(message.body).slice(0, 200)],
    ], messages)),
    hostHistory(redraw),
  ] };
}

/** SRs with their room. */
export const srTable = (srs) => table("Storage repositories", [
  ["Name", (sr) => h("a", { href: `#/sr/${sr.uuid}` }, sr.name_label || sr.uuid)], ["Type", (sr) => sr.type],
  ["Attached", (sr) => { const on = all("PBD").some((pbd) => pbd.SR === sr.ref && pbd.currently_attached); return h("span", { class: `badge ${on ? "good" : "warn"}` }, on ? "yes" : "no"); }],
  ["Disks", (sr) => String(all("VDI").filter((vdi) => vdi.SR === sr.ref && vdi.managed).length), true],
  ["In use", (sr) => (sr.physical_size > 0 ? h("div", { class: "bar" }, h("progress", { max: sr.physical_size, value: sr.physical_utilisation, "aria-label": `Room of ${sr.name_label} in use` }),
    h("span", { class: "small soft" }, `${bytes(sr.physical_utilisation)} of ${bytes(sr.physical_size)}`)) : bytes(Math.max(0, sr.physical_utilisation)))],
], srs.sort(byName));
