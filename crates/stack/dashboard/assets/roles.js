// What the role of the session allows. The server checks each call; this says so before it is tried.

const ORDER = ["read-only", "vm-admin", "pool-operator", "pool-admin"];
export const me = { name: "", role: "", methods: new Set() };

/** Why the session may not do what needs `role`; empty when it may. */
export function lacks(role) {
  if (ORDER.indexOf(me.role) >= ORDER.indexOf(role)) return "";
  return `Your role is ${me.role || "unknown"}; this needs ${role}.`;
}
