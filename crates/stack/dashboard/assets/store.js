// All objects that are shown, kept current by event.from.

import { callUntil } from "./api.js";

const CLASSES = ["pool", "host", "SR", "PBD", "VDI", "VM", "VBD", "task", "message", "console", "SM"];
const SECONDS = 30;
const tables = new Map(CLASSES.map((name) => [name.toLowerCase(), new Map()]));
const listeners = new Set();
let ending = null;
/** Whether events come in; null before the first. */
export const link = { live: null };

const table = (name) => tables.get(name.toLowerCase());
export const all = (name) => [...table(name).values()];
export const get = (name, ref) => table(name).get(ref);
export const byUuid = (name, uuid) => all(name).find((object) => object.uuid === uuid);
export const onChange = (listener) => listeners.add(listener);
const changed = () => listeners.forEach((listener) => listener());

/** The name of the object behind a reference or a UUID, or the text itself. */
export function nameOf(text) {
  for (const [name, objects] of tables) {
    const found = objects.get(text) ?? (/^[0-9a-f-]{36}$/.test(text) && all(name).find((o) => o.uuid === text));
    if (found) return `${name.toUpperCase()} "${found.name_label || found.uuid}"`;
  }
  return text;
}

function take(event) {
  const objects = table(event.class);
  if (!objects) return;
  if (event.operation === "del" || !event.snapshot) objects.delete(event.ref);
  else objects.set(event.ref, { ...event.snapshot, ref: event.ref, class: event.class.toLowerCase() });
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Listens until `stop`. */
export async function listen() {
  const mine = ending = new AbortController();
  let token = "";
  while (!mine.signal.aborted) {
    try {
      const batch = await callUntil(mine.signal, "event.from", CLASSES, token, SECONDS);
      if (token === "") tables.forEach((objects) => objects.clear());
      batch.events.forEach(take);
      token = batch.token;
      if (batch.events.length || !link.live) { link.live = true; changed(); }
    } catch (error) {
      if (mine.signal.aborted || error.code === "SESSION_INVALID") return;
      if (error.code === "EVENTS_LOST") token = "";
      link.live = false;
      changed();
      await pause(2000);
    }
  }
}

export function stop() {
  ending?.abort();
  tables.forEach((objects) => objects.clear());
  link.live = null;
}
