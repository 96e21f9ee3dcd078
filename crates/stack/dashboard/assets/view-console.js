// The console of a VM: its screen or its terminal.

import { h } from "./dom.js";
import { all, byUuid, get } from "./store.js";
import { button } from "./actions.js";
import { consolePlace, fullScreen, secureAttention } from "./console.js";
import { lacks } from "./roles.js";

const ROLE = "vm-operator";
const titleOf = (console) => (console.protocol === "rfb" ? "Screen" : "Terminal");
const isFar = (console) => console.location.startsWith("tty:");

/** Buttons that lead to the consoles that a VM has. */
export const consoleButtons = (vm, except) => all("console").filter((one) => one.VM === vm.ref && one.ref !== except)
  .sort((a, b) => a.protocol.localeCompare(b.protocol))
  .map((one) => button(titleOf(one), () => { location.hash = `#/console/${one.uuid}`; }, { role: ROLE, key: one.uuid,
    why: isFar(one) ? "This terminal is reached on its host alone ('xl console')." : "" }));

export function consoleView(uuid) {
  const here = byUuid("console", uuid);
  const vm = here && get("VM", here.VM);
  if (!vm) return { title: "Console", body: [h("p", {}, "There is no such console; its VM does not run any more. "), h("a", { href: "#/vms" }, "All VMs")] };
  const isScreen = here.protocol === "rfb";
  const why = lacks(ROLE) || (isFar(here) && "This terminal is reached on its host alone ('xl console').");
  return { title: `${titleOf(here)} of ${vm.name_label || vm.uuid}`, about: h("a", { href: `#/vm/${vm.uuid}` }, "The VM with its disks"),
    actions: [...consoleButtons(vm, here.ref), isScreen && button("Send Ctrl-Alt-Del", secureAttention, { role: ROLE }), button("Full screen", fullScreen, { role: ROLE })],
    body: [h("section", { class: "card" }, h("h2", { class: "hidden" }, "Console"), why ? h("p", {}, why) : consolePlace(uuid))] };
}
