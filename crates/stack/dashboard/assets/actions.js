// What can be done with objects. Each action is a call, made as a task, which is shown until it ends.

import { call } from "./api.js";
import { ask } from "./dialog.js";
import { h } from "./dom.js";
import { all, get, onChange } from "./store.js";
import { bytes, byName } from "./format.js";
import { lacks } from "./roles.js";
import { ApiError } from "./api.js";
import * as notices from "./notices.js";

const GIB = 2 ** 30;
const running = new Map();
const ENDED = ["success", "failure", "cancelled"];

function look() {
  for (const [ref, { title, shown, done }] of running) {
    const task = get("task", ref);
    if (!task) continue;
    shown.progress(task.progress);
    if (!ENDED.includes(task.status)) continue;
    running.delete(ref);
    shown.end();
    if (task.status === "success") { notices.good(`Done: ${title}`); done?.(task); continue; }
    const [code, ...params] = task.error_info?.length ? task.error_info : ["TASK_CANCELLED", ref];
    notices.bad(new ApiError(code, params), title);
  }
}
onChange(look);

/** Begins a call as a task. */
async function begin(title, method, params, done) {
  const ref = await call(`Async.${method}`, ...params);
  const cancel = () => call("task.cancel", ref).catch((error) => notices.bad(error, title));
  running.set(ref, { title, done, shown: notices.working(title, cancel) });
  look();
}

/** A button that says why it cannot be used. */
export function button(text, act, { role = "vm-admin", why = "", danger, first, key } = {}) {
  const reason = lacks(role) || why;
  return h("button", { type: "button", "data-key": key ?? text, class: danger ? "danger" : first ? "first" : undefined,
    "aria-disabled": reason ? "true" : undefined, title: reason || undefined,
    "aria-label": reason ? `${text}. Not available: ${reason}` : undefined,
    onclick: () => (reason ? notices.bad(new ApiError(lacks(role) ? "RBAC_PERMISSION_DENIED" : "OPERATION_NOT_ALLOWED", [reason]), text)
      : Promise.resolve(act()).catch((error) => notices.bad(error, text))) }, text);
}

const naming = (value) => ({ name: "name", label: "Name", value });
const named = (object) => object.name_label || object.uuid;

export const createVdi = (sr) => ask({ title: `New disk in ${named(sr)}`, button: "Create", subject: `SR "${named(sr)}"`,
  fields: [naming(""), { name: "size", label: "Size in GiB", type: "number", min: "0.001", step: "any", value: "1", hint: "Thin: it takes room only where something is written." }],
  act: ({ name, size }) => begin(`Create disk ${name}`, "VDI.create", [{ name_label: name, name_description: "", SR: sr.ref,
    virtual_size: Math.ceil(Number(size) * GIB / 512) * 512, type: "user", sharable: false, read_only: false, other_config: {} }]) });

export const resizeVdi = (vdi) => ask({ title: `Grow ${named(vdi)}`, button: "Grow", subject: `VDI "${named(vdi)}"`,
  fields: [{ name: "size", label: "New size in GiB", type: "number", min: "0.001", step: "any", value: String(vdi.virtual_size / GIB), hint: `It has ${bytes(vdi.virtual_size)}; disks only grow.` }],
  act: ({ size }) => begin(`Grow ${named(vdi)}`, "VDI.resize", [vdi.ref, Math.ceil(Number(size) * GIB / 512) * 512]) });

export const snapshotVdi = (vdi) => begin(`Snapshot of ${named(vdi)}`, "VDI.snapshot", [vdi.ref, {}]);
export const cloneVdi = (vdi) => begin(`Clone of ${named(vdi)}`, "VDI.clone", [vdi.ref, {}]);

const sure = (title, text, act, word) => ask({ title, text, button: word, danger: true, act });

export const destroyVdi = (vdi) => sure(`Destroy ${named(vdi)}?`, "Its contents are lost.", () =>
  begin(`Destroy ${named(vdi)}`, "VDI.destroy", [vdi.ref]), "Destroy");

export const plugVdi = (vdi) => ask({ title: `Plug ${named(vdi)} into a VM`, button: "Plug", subject: `VDI "${named(vdi)}"`,
  fields: [{ name: "vm", label: "VM", options: all("VM").filter((vm) => !vm.is_a_template && !vm.is_a_snapshot).sort(byName).map((vm) => [vm.ref, `${named(vm)} (${vm.power_state})`]) },
    { name: "mode", label: "Access", options: [["RW", "Read and write"], ["RO", "Read only"]] }],
  act: async ({ vm, mode }) => {
    const vbd = await call("VBD.create", { VM: vm, VDI: vdi.ref, userdevice: "autodetect", bootable: false, mode: vdi.read_only ? "RO" : mode,
      type: "Disk", empty: false, unpluggable: true, other_config: {}, qos_algorithm_type: "", qos_algorithm_params: {} });
    if (get("VM", vm)?.power_state === "Running") return begin(`Plug ${named(vdi)}`, "VBD.plug", [vbd]);
    notices.good("The disk belongs to the VM now and is plugged when it starts.");
  } });

export const plugVbd = (vbd, title) => begin(`Plug ${title}`, "VBD.plug", [vbd.ref]);
export const unplugVbd = (vbd, title) => begin(`Unplug ${title}`, "VBD.unplug", [vbd.ref]);

export const startVm = (vm) => begin(`Start ${named(vm)}`, "VM.start", [vm.ref, false, false]);
export const shutdownVm = (vm) => begin(`Shut down ${named(vm)}`, "VM.clean_shutdown", [vm.ref]);
export const powerOffVm = (vm) => sure(`Switch ${named(vm)} off?`, "The guest is not asked; what it has not written is lost.", () =>
  begin(`Switch off ${named(vm)}`, "VM.hard_shutdown", [vm.ref]), "Switch off");
export const snapshotVm = (vm) => ask({ title: `Snapshot of ${named(vm)}`, button: "Snapshot", fields: [naming(`${named(vm)} ${new Date().toISOString().slice(0, 16)}`)],
  subject: `VM "${named(vm)}"`, act: ({ name }) => begin(`Snapshot ${name}`, "VM.snapshot", [vm.ref, name]) });
export const cloneVm = (vm) => ask({ title: `Clone of ${named(vm)}`, button: "Clone", fields: [naming(`${named(vm)} clone`)],
  subject: `VM "${named(vm)}"`, act: ({ name }) => begin(`Clone ${name}`, "VM.clone", [vm.ref, name]) });
export const revertVm = (snapshot) => sure(`Go back to ${named(snapshot)}?`, "What the disks hold now is lost, and the VM is halted.", () =>
  begin(`Go back to ${named(snapshot)}`, "VM.revert", [snapshot.ref]), "Go back");

export const scanSr = (sr) => begin(`Scan of ${named(sr)}`, "SR.scan", [sr.ref]);
export const cancelTask = (task) => call("task.cancel", task.ref);
