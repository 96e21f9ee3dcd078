// VMs, and one of them with its disks and snapshots.

import { h } from "./dom.js";
import { all, byUuid, get } from "./store.js";
import { bytes, byName, when } from "./format.js";
import { paged, table } from "./table.js";
import { button, cloneVm, powerOffVm, revertVm, shutdownVm, snapshotVm, startVm } from "./actions.js";
import { vbdTable } from "./view-vdi.js";
import { vmsOf } from "./view-overview.js";
import { consoleButtons } from "./view-console.js";
import { vmHistory } from "./view-history.js";

const state = (vm) => h("span", { class: `badge ${vm.power_state === "Running" ? "good" : ""}` }, vm.power_state.toLowerCase());

export function vms(redraw) {
  const rows = paged("vms", vmsOf(), redraw, { noun: "VM" });
  return { title: "VMs", body: [h("section", { class: "card" }, h("div", { class: "tools" }, rows.filter), table("VMs", [
    ["Name", (vm) => h("a", { href: `#/vm/${vm.uuid}` }, vm.name_label || vm.uuid)], ["State", state],
    ["Memory", (vm) => bytes(vm.memory_static_max), true], ["Processors", (vm) => String(vm.VCPUs_max), true],
    ["Disks", (vm) => String(all("VBD").filter((vbd) => vbd.VM === vm.ref).length), true], ["Snapshots", (vm) => String((vm.snapshots ?? []).length), true],
  ], rows.rows), rows.pages)] };
}

export function vm(uuid, redraw) {
  const here = byUuid("VM", uuid);
  if (!here) return { title: "VM", body: [h("p", {}, "There is no such VM; it may have been removed."), h("a", { href: "#/vms" }, "All VMs")] };
  const on = here.power_state === "Running";
  const why = (operation) => ((here.allowed_operations ?? []).includes(operation) ? "" : `The VM is ${here.power_state.toLowerCase()} and does not allow it now.`);
  const vbds = all("VBD").filter((vbd) => vbd.VM === here.ref).sort((a, b) => Number(a.userdevice) - Number(b.userdevice));
  const snapshots = all("VM").filter((vm) => vm.is_a_snapshot && vm.snapshot_of === here.ref).sort(byName);
  return { title: here.name_label || uuid, about: here.name_description,
    actions: [on ? button("Shut down", () => shutdownVm(here), { role: "vm-operator", why: why("clean_shutdown") }) : button("Start", () => startVm(here), { role: "vm-operator", first: true, why: why("start") }),
      ...consoleButtons(here),
      button("Snapshot", () => snapshotVm(here), { role: "vm-power-admin", why: why("snapshot") }), button("Clone", () => cloneVm(here), { why: why("clone") }),
      button("Switch off", () => powerOffVm(here), { role: "vm-operator", danger: true, why: why("hard_shutdown") })],
    body: [h("section", { class: "card" }, h("dl", { class: "facts" }, [["State", state(here)], ["Memory", bytes(here.memory_static_max)], ["Processors", String(here.VCPUs_max)],
      ["Host", get("host", here.resident_on)?.name_label ?? "–"], ["UUID", h("code", {}, uuid)]].map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))),
    h("section", { class: "card" }, h("h2", {}, "Disks"), vbdTable(vbds, "Disks", (vbd) => { const vdi = get("VDI", vbd.VDI);
      return vdi ? h("a", { href: `#/vdi/${vdi.uuid}` }, vdi.name_label || vdi.uuid.slice(0, 8)) : "empty drive"; })),
    vmHistory(uuid, redraw),
    h("section", { class: "card" }, h("h2", {}, "Snapshots"), table("Snapshots", [
      ["Name", (snapshot) => snapshot.name_label], ["Taken", (snapshot) => when(snapshot.snapshot_time)],
      ["", (snapshot) => button("Go back to it", () => revertVm(snapshot), { role: "vm-power-admin" })],
    ], snapshots))] };
}
