// A question with fields, by the browser's own dialog: it keeps the focus inside and ends with Escape.

import { h } from "./dom.js";
import { errorBox } from "./errors.js";

function field(of) {
  const shared = { name: of.name, required: of.required !== false, "aria-describedby": of.hint && `hint-${of.name}` };
  const input = of.options
    ? h("select", shared, of.options.map(([value, text]) => h("option", { value, selected: value === of.value }, text)))
    : h("input", { ...shared, type: of.type ?? "text", value: of.value ?? "", min: of.min, step: of.step, autocomplete: "off" });
  return h("label", {}, of.label, input, of.hint && h("span", { id: `hint-${of.name}`, class: "small soft" }, of.hint));
}

/** Asks; `act` gets the values, and its error is shown in the dialog. */
export function ask({ title, text, fields = [], button, danger, subject, act }) {
  const before = document.activeElement;
  const wrong = h("div", {});
  const submit = h("button", { type: "submit", class: danger ? "danger" : "first" }, button);
  const box = h("dialog", { "aria-labelledby": "dialog-title" });
  async function send(event) {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    submit.disabled = true;
    try {
      await act(values);
      box.close();
    } catch (error) {
      wrong.replaceChildren(errorBox(error, subject));
    }
    submit.disabled = false;
  }
  box.append(h("form", { onsubmit: send },
    h("h2", { id: "dialog-title" }, title), text && h("p", {}, text), fields.map(field), wrong,
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => box.close() }, "Back"), submit)));
  box.addEventListener("close", () => { box.remove(); before?.focus?.(); });
  document.body.append(box);
  box.showModal();
  box.querySelector("input, select")?.focus();
}
