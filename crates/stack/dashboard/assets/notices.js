// Short messages at the corner: operations in progress, and their end.

import { h } from "./dom.js";
import { errorBox } from "./errors.js";

const place = () => document.getElementById("notices");

function notice(title, kind) {
  const box = h("div", { class: `notice ${kind ?? ""}` });
  const close = h("button", { type: "button", "aria-label": `Close: ${title}`, onclick: () => box.remove() }, "×");
  box.append(h("header", {}, h("strong", {}, title), close));
  const old = [...place().children].filter((other) => !other.matches(".bad") && !other.querySelector("progress"));
  if (old.length > 1) old[0].remove();
  place().append(box);
  return box;
}

/** Says that something is done; goes away by itself. */
export function good(title) {
  const box = notice(title);
  setTimeout(() => box.remove(), 6000);
}

/** Says what failed; stays until it is closed. */
export function bad(error, subject) {
  notice("That did not work", "bad").append(errorBox(error, subject));
}

/** A bar while a task works. */
export function working(title, onCancel) {
  const box = notice(title);
  const bar = h("progress", { max: 1, "aria-label": `Progress: ${title}` });
  box.append(bar);
  if (onCancel) box.append(h("div", {}, h("button", { type: "button", onclick: onCancel }, "Cancel")));
  return { progress: (part) => { bar.value = part; }, end: () => box.remove() };
}
