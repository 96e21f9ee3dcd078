// Errors as three sentences: what it is about, what is the cause, what to do next.

import { h } from "./dom.js";
import { nameOf } from "./store.js";

const KNOWN = {
  SESSION_AUTHENTICATION_FAILED: ["The account name or the password is wrong.", "Check both and log in again. On the host, 'tapiod user list' shows the accounts and 'tapiod user passwd NAME' sets a password."],
  SESSION_AUTHORIZATION_FAILED: ["The account has no role.", "On the host, give it one with 'tapiod user role'."],
  SESSION_INVALID: ["The session has ended: it was idle for too long, or the account changed.", "Log in again."],
  RBAC_PERMISSION_DENIED: ["The role of this account does not include the operation.", "Log in with an account of a higher role, or ask an administrator for it."],
  CONNECTION_LOST: ["The daemon did not answer.", "Check that tapiod runs ('systemctl status tapiod') and that the network to it works; the page connects again by itself."],
  HTTP_FAILURE: ["The server refused the request.", "Wait a second and try again; then look at the daemon's log ('journalctl -u tapiod')."],
  HANDLE_INVALID: ["The object is no longer there; another client or the daemon removed it meanwhile.", "Go back to the list and choose another."],
  VDI_IN_USE: ["The disk is in use by a VM or by another operation.", "Unplug it first, or wait until the operation in the list of tasks has ended."],
  SR_FULL: ["The storage repository has no room for it.", "Remove disks or snapshots, or choose another storage repository."],
  VM_BAD_POWER_STATE: ["The VM is not in the state that the operation needs.", "Start it or shut it down first."],
  OTHER_OPERATION_IN_PROGRESS: ["Another operation works on the object.", "Wait until it has ended (see Tasks), or cancel it there."],
  OPERATION_NOT_ALLOWED: ["The object does not allow the operation now.", "The details say why; change that first."],
  TASK_CANCELLED: ["The task was cancelled.", "What it had done was taken back. Begin it again if it is still wanted."],
  SR_HAS_NO_PBDS: ["The storage repository is not attached to this host.", "Plug its PBD: 'xe pbd-plug'."],
  SR_NOT_ATTACHED: ["The storage repository is not attached to this host.", "Plug its PBD: 'xe pbd-plug'."],
  DEVICE_DETACH_REJECTED: ["The guest still uses the disk.", "Unmount it inside the guest, then unplug it again."],
  SR_BACKEND_FAILURE_79: ["The size is not allowed; the details say why.", "Choose another size: disks only grow."],
  INVALID_VALUE: ["A value is not allowed.", "Correct the field that the details name."],
};

/** What an error says: object, cause, next step, and the original words. */
export function explain(error, subject) {
  const code = error.code ?? "UNEXPECTED";
  const params = error.params ?? [error.message];
  const details = [code, ...params.map(nameOf)].join(": ");
  const named = params.map(nameOf).find((text) => /^[A-Z]+ "/.test(text));
  const [cause, next] = KNOWN[code] ?? [
    params.filter((text) => text && !text.startsWith("OpaqueRef:")).at(-1) ?? "The daemon refused it.",
    "Look at the daemon's log ('journalctl -u tapiod'), put the cause in order and try again."];
  return { object: subject ?? named ?? "The request", cause, next, details };
}

/** The same as a box. */
export function errorBox(error, subject) {
  const said = explain(error, subject);
  return h("div", { class: "error", role: "alert" },
    h("strong", {}, said.object), h("span", {}, said.cause), h("span", {}, h("b", {}, "Next: "), said.next),
    h("code", { class: "small" }, said.details));
}
