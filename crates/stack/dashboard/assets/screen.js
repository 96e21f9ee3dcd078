// A screen of a VM on a canvas, with keyboard and pointer.

import { h } from "./dom.js";
import { Rfb } from "./rfb.js";
import { ALT, CONTROL, DELETE, leaves, symbolOf } from "./keysyms.js";

export class Screen {
  /** `leave` is called by the keys that leave the console. */
  constructor(title, send, leave) {
    this.canvas = h("canvas", { class: "screen", tabindex: 0, role: "application", "aria-describedby": "console-help",
      "aria-label": `Screen of ${title}. A picture; keys that are pressed here go to the guest.` });
    this.node = this.canvas;
    this.down = new Map();
    this.dirty = null;
    this.image = null;
    this.isIdle = true;
    this.rfb = new Rfb({ send, painted: (...area) => this.mark(area), resized: (w, h) => this.resize(w, h) });
    this.leave = leave;
    for (const type of ["keydown", "keyup"]) this.canvas.addEventListener(type, (event) => this.key(event, type === "keydown"));
    for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) this.canvas.addEventListener(type, (event) => this.point(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    this.canvas.addEventListener("blur", () => this.release());
  }

  push(bytes) { this.rfb.push(bytes); }
  end() { this.rfb.end(); this.isIdle = true; }
  focus() { this.canvas.focus(); }

  /** Shows until the connection ends. A page that is not visible asks for nothing. */
  async run() {
    this.isIdle = false;
    await this.rfb.run(() => new Promise((done) => requestAnimationFrame(() => { this.draw(); done(); })));
  }

  resize(width, height) {
    this.canvas.width = width;
    this.canvas.height = height;
    this.canvas.setAttribute("data-size", `${width}x${height}`);
    this.image = new ImageData(new Uint8ClampedArray(this.rfb.pixels.buffer), width, height);
    this.dirty = [0, 0, width, height];
  }

  mark([x, y, width, height]) {
    const [left, top, right, bottom] = this.dirty ?? [x, y, x, y];
    this.dirty = [Math.min(left, x), Math.min(top, y), Math.max(right, x + width), Math.max(bottom, y + height)];
  }

  draw() {
    if (!this.dirty) return;
    const [left, top, right, bottom] = this.dirty;
    this.dirty = null;
    this.canvas.getContext("2d").putImageData(this.image, 0, 0, left, top, right - left, bottom - top);
  }

  key(event, isDown) {
    if (isDown && leaves(event)) {
      event.preventDefault();
      this.leave();
      return;
    }
    if (this.isIdle || event.isComposing) return;
    event.preventDefault();
    if (event.key === "AltGraph") {
      // A browser on Windows presses Control with it, which is not meant.
      this.up("ControlLeft");
      return;
    }
    const place = event.code || event.key;
    if (!isDown) return this.up(place);
    const symbol = symbolOf(event);
    if (symbol === undefined) return;
    // A key may have another symbol when it is let go than when it was pressed.
    if (this.down.has(place) && this.down.get(place) !== symbol) this.up(place);
    this.down.set(place, symbol);
    this.rfb.key(symbol, true);
  }

  up(place) {
    const symbol = this.down.get(place);
    this.down.delete(place);
    if (symbol !== undefined && !this.isIdle) this.rfb.key(symbol, false);
  }

  release() { [...this.down.keys()].forEach((place) => this.up(place)); }

  /** Control, Alt and Delete, which a browser's system keeps for itself. */
  secureAttention() {
    if (this.isIdle) return;
    const keys = [CONTROL, ALT, DELETE];
    keys.forEach((symbol) => this.rfb.key(symbol, true));
    keys.reverse().forEach((symbol) => this.rfb.key(symbol, false));
  }

  /** Where an event is on the guest's screen: the picture may be scaled, and have margins. */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const { width, height } = this.canvas;
    const scale = Math.min(box.width / width, box.height / height) || 1;
    return [(event.clientX - box.left - (box.width - width * scale) / 2) / scale, (event.clientY - box.top - (box.height - height * scale) / 2) / scale];
  }

  point(event) {
    if (this.isIdle) return;
    event.preventDefault();
    if (event.type === "pointerdown") {
      this.focus();
      this.canvas.setPointerCapture(event.pointerId);
    }
    const buttons = (event.buttons & 1) | (event.buttons & 4) >> 1 | (event.buttons & 2) << 1;
    this.rfb.pointer(buttons, ...this.place(event));
  }

  wheel(event) {
    if (this.isIdle) return;
    event.preventDefault();
    const place = this.place(event);
    const button = event.deltaY < 0 ? 8 : 16;
    this.rfb.pointer(button, ...place);
    this.rfb.pointer(0, ...place);
  }
}
