// A terminal of a VM: its rows as text, a field that takes what is typed, and a log for screen readers.

import { h } from "./dom.js";
import { COLUMNS, ROWS, styleOf, Vt } from "./vt.js";
import { leaves } from "./keysyms.js";

const KEYS = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Insert: "\x1b[2~", Delete: "\x1b[3~", PageUp: "\x1b[5~", PageDown: "\x1b[6~",
  F1: "\x1bOP", F2: "\x1bOQ", F3: "\x1bOR", F4: "\x1bOS", F5: "\x1b[15~", F6: "\x1b[17~", F7: "\x1b[18~", F8: "\x1b[19~", F9: "\x1b[20~",
  F10: "\x1b[21~", F11: "\x1b[23~", F12: "\x1b[24~",
};
const ARROWS = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D", Home: "H", End: "F" };
/** Lines that a screen reader is told at a time. */
const TOLD_MAX = 24;
const SPOKEN_AFTER = 500;

/** What a key sends; none where the field takes it as text. */
export function wordOf(event, cursorKeys = false) {
  const { key } = event;
  if (event.metaKey || key === "Unidentified") return undefined;
  if (ARROWS[key]) return `\x1b${cursorKeys ? "O" : "["}${ARROWS[key]}`;
  if (KEYS[key] && !(event.ctrlKey || event.altKey)) return event.shiftKey && key === "Tab" ? "\x1b[Z" : KEYS[key];
  const isText = [...key].length === 1;
  // AltGr is both of them on Windows, and makes letters.
  if (!isText || (event.ctrlKey && event.altKey) || event.getModifierState?.("AltGraph")) return undefined;
  if (event.ctrlKey) {
    // Copying what is marked stays the browser's, and so does pasting.
    if (event.shiftKey && /^[cv]$/i.test(key)) return undefined;
    const code = key === " " ? 0 : key.toUpperCase().charCodeAt(0) - 64;
    return code >= 0 && code < 32 ? String.fromCharCode(code) : undefined;
  }
  return event.altKey ? `\x1b${key}` : undefined;
}

export class Terminal {
  constructor(title, send, leave) {
    const encoder = new TextEncoder();
    this.type = (text) => { if (!this.isIdle) send(encoder.encode(text)); };
    this.vt = new Vt(this.type);
    this.isIdle = true;
    this.past = h("pre", { class: "past" });
    this.rows = Array.from({ length: ROWS }, () => h("div", { class: "row" }));
    this.shown = h("div", { class: "text", tabindex: -1, "aria-hidden": "true" }, this.past, h("pre", { class: "rows" }, this.rows));
    this.field = h("textarea", { class: "hidden", "aria-label": `Terminal of ${title}. What you type goes to the guest.`, "aria-describedby": "console-help",
      autocapitalize: "none", autocomplete: "off", spellcheck: "false", rows: 1, name: "typed" });
    this.log = h("div", { class: "hidden", role: "log", "aria-label": `What the terminal of ${title} shows` });
    this.node = h("div", { class: "terminal" }, this.shown, this.field, this.log);
    this.spoken = this.written = 0;
    this.leave = leave;
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("input", (event) => this.input(event));
    this.field.addEventListener("compositionend", () => this.input({}));
    // Whoever looks at the end goes on doing so, whatever size the window gets.
    this.isAtEnd = true;
    this.shown.addEventListener("scroll", () => { if (this.shown.clientHeight === this.height) this.isAtEnd = this.shown.scrollTop + this.height >= this.shown.scrollHeight - 4; });
    this.sizes = new ResizeObserver(() => { this.height = this.shown.clientHeight; this.toEnd(); });
    this.sizes.observe(this.shown);
    this.shown.addEventListener("click", () => { if (getSelection().isCollapsed) this.focus(); });
  }

  focus() { this.field.focus({ preventScroll: true }); }
  end() { this.isIdle = true; this.onEnd?.(); this.sizes.disconnect(); }
  toEnd() { if (this.isAtEnd) this.shown.scrollTop = this.shown.scrollHeight; }

  async run() {
    this.isIdle = false;
    await new Promise((done) => { this.onEnd = done; });
  }

  push(bytes) {
    this.vt.write(bytes);
    if (!this.due) this.due = requestAnimationFrame(() => { this.due = 0; this.draw(); });
    this.timer ??= setTimeout(() => { this.timer = undefined; this.speak(); }, SPOKEN_AFTER);
  }

  key(event) {
    if (leaves(event)) {
      event.preventDefault();
      this.leave();
      return;
    }
    // Without a guest the keys are the page's.
    if (this.isIdle || event.isComposing) return;
    if (event.shiftKey && (event.key === "PageUp" || event.key === "PageDown")) {
      event.preventDefault();
      this.shown.scrollBy(0, (event.key === "PageUp" ? -0.9 : 0.9) * this.shown.clientHeight);
      return;
    }
    const word = wordOf(event, this.vt.cursorKeys);
    if (word === undefined) return;
    event.preventDefault();
    this.type(word);
  }

  /** Letters, what an input method made, and what was pasted. */
  input(event) {
    if (event.isComposing) return;
    const text = this.field.value.replace(/\r?\n/g, "\r");
    this.field.value = "";
    if (text) this.type(text);
  }

  draw() {
    const { vt } = this;
    const fresh = Math.min(vt.gone - this.written, vt.past.length);
    if (fresh > 0) this.past.append(...vt.past.slice(-fresh).map((row) => rowOf(h("div", { class: "row" }), row, -1)));
    this.written = vt.gone;
    while (this.past.childElementCount > vt.past.length) this.past.firstChild.remove();
    if (this.marked !== undefined) vt.changed.add(this.marked);
    this.marked = vt.y;
    vt.changed.add(vt.y);
    for (const y of vt.changed) rowOf(this.rows[y], vt.rows[y], y === vt.y && vt.isShown ? vt.x : -1);
    vt.changed.clear();
    this.toEnd();
  }

  /** Adds what has come to the log: whole lines, and the one where the cursor is. */
  speak() {
    const { vt } = this;
    const above = vt.gone + vt.y;
    const all = [...vt.past, ...vt.rows.slice(0, vt.y + 1)].slice(-Math.min(TOLD_MAX, Math.max(1, above - this.spoken + 1)));
    this.spoken = above;
    this.log.append(...all.map(Vt.textOf).filter(Boolean).map((line) => h("p", {}, line)));
    while (this.log.childElementCount > TOLD_MAX) this.log.firstChild.remove();
  }
}

/** Fills an element with the cells of a row, a piece for each style; `cursor` is a column, or -1. */
function rowOf(element, row, cursor) {
  const pieces = [];
  let last = null;
  for (let x = 0; x < COLUMNS; x += 1) {
    const [letter, style] = row[x];
    const kind = x === cursor ? -1 : style;
    if (last?.kind === kind) last.text += letter;
    else pieces.push(last = { kind, style, text: letter });
  }
  element.replaceChildren(...pieces.map(({ kind, style, text }) => {
    const { ink, ground, isInverse, isBold, isUnder } = styleOf(style);
    const names = [ink < 16 && `ink-${ink}`, ground < 16 && `ground-${ground}`, ink === 16 && isInverse && "ink-ground", ground === 16 && isInverse && "ground-ink",
      isBold && "bold", isUnder && "under", kind === -1 && "cursor"].filter(Boolean);
    return names.length ? h("span", { class: names.join(" ") }, text) : document.createTextNode(text);
  }));
  return element;
}
