// The client's side of RFB (VNC; RFC 6143). What comes is written by a guest's emulator, and through it by the guest:
// every length is bounded before anything is held, and every rectangle lies on the screen.

import { Bytes } from "./bytes.js";

const SIDE_MAX = 8192, PIXELS_MAX = 2 ** 24, NAME_MAX = 2 ** 16, CUT_MAX = 2 ** 20;
/** Pixels that one update may paint, in screens: each is painted once or twice by an honest server. */
const PAINT_MAX = 16;
const RAW = 0, COPY = 1, HEXTILE = 5, RESIZE = -223;
const OPAQUE = 0xff000000;

const text = (bytes) => String.fromCharCode(...bytes);
const be16 = (number) => [(number >> 8) & 255, number & 255];
const be32 = (number) => [(number >>> 24) & 255, (number >>> 16) & 255, (number >>> 8) & 255, number & 255];

/** A screen at the other end: `send` takes bytes; `painted` and `resized` are told what has changed. */
export class Rfb {
  constructor({ send, painted, resized }) {
    Object.assign(this, { send, painted, resized });
    this.bytes = new Bytes();
    this.width = this.height = 0;
    this.pixels = new Uint32Array(0);
    this.name = "";
    this.left = 0;
  }

  /** What has come. */
  push(chunk) { this.bytes.push(chunk); }

  end() { this.bytes.end(); }

  /** Speaks until the other end goes away. Throws what is wrong with what it says. `pause` returns when the next update is wanted. */
  async run(pause) {
    await this.greet();
    for (;;) {
      this.ask(this.isFresh ? 0 : 1);
      this.isFresh = false;
      while (!(await this.message())) ;
      await pause();
    }
  }

  async greet() {
    const version = /^RFB (\d{3})\.(\d{3})\n$/.exec(text(await this.bytes.take(12)));
    if (!version) throw new Error("the other end does not speak RFB");
    const minor = Number(version[1]) > 3 ? 8 : Number(version[2]);
    const spoken = minor >= 8 ? 8 : minor >= 7 ? 7 : 3;
    this.say(`RFB 003.00${spoken}\n`);
    if (spoken === 3) {
      if ((await this.u32()) !== 1) throw new Error("the screen asks for a password, which a console of Tapio has not");
    } else {
      const offered = await this.bytes.take(await this.u8());
      if (!offered.includes(1)) throw new Error("the screen asks for a password, which a console of Tapio has not");
      this.send(Uint8Array.of(1));
      if (spoken === 8 && (await this.u32()) !== 0) throw new Error("the screen refuses the connection");
    }
    this.send(Uint8Array.of(1));
    const [width, height] = [await this.u16(), await this.u16()];
    await this.bytes.take(16);
    this.name = text((await this.bytes.take(bounded(await this.u32(), NAME_MAX, "its name"))).slice(0, 200));
    this.resize(width, height);
    // 32 bits for a pixel, lowest byte first, red in the lowest: as a canvas has them.
    this.send(Uint8Array.of(0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 0, 8, 16, 0, 0, 0));
    const encodings = [HEXTILE, COPY, RAW, RESIZE];
    this.send(Uint8Array.of(2, 0, ...be16(encodings.length), ...encodings.flatMap(be32)));
  }

  say(words) { this.send(Uint8Array.from(words, (letter) => letter.charCodeAt(0))); }
  ask(incremental) { this.send(Uint8Array.of(3, incremental, 0, 0, 0, 0, ...be16(this.width), ...be16(this.height))); }
  key(symbol, isDown) { this.send(Uint8Array.of(4, isDown ? 1 : 0, 0, 0, ...be32(symbol))); }
  pointer(buttons, x, y) {
    const on = (at, size) => be16(Math.max(0, Math.min(Math.round(at), size - 1)));
    this.send(Uint8Array.of(5, buttons & 255, ...on(x, this.width), ...on(y, this.height)));
  }

  async u8() { return (await this.bytes.take(1))[0]; }
  async u16() { const [a, b] = await this.bytes.take(2); return a << 8 | b; }
  async u32() { const [a, b, c, d] = await this.bytes.take(4); return (a << 24 | b << 16 | c << 8 | d) >>> 0; }

  resize(width, height) {
    if (!width || !height || width > SIDE_MAX || height > SIDE_MAX || width * height > PIXELS_MAX) {
      throw new Error(`a screen of ${width} by ${height} is not shown`);
    }
    this.width = width;
    this.height = height;
    this.pixels = new Uint32Array(width * height).fill(OPAQUE);
    this.isFresh = true;
    this.resized(width, height);
  }

  /** One message; whether it was an update. */
  async message() {
    const kind = await this.u8();
    if (kind === 0) { await this.update(); return true; }
    if (kind === 1) {
      await this.bytes.take(3);
      await this.bytes.skip(6 * (await this.u16()));
    } else if (kind === 3) {
      await this.bytes.take(3);
      await this.bytes.skip(bounded(await this.u32(), CUT_MAX, "its clipboard"));
    } else if (kind !== 2) throw new Error(`a message of kind ${kind} was not asked for`);
    return false;
  }

  async update() {
    await this.bytes.take(1);
    const count = await this.u16();
    this.left = PAINT_MAX * this.width * this.height;
    for (let index = 0; index < count; index += 1) {
      const [x, y, width, height] = [await this.u16(), await this.u16(), await this.u16(), await this.u16()];
      const kind = (await this.u32()) | 0;
      if (kind === RESIZE) {
        this.resize(width, height);
        this.left = PAINT_MAX * width * height;
        continue;
      }
      if (x + width > this.width || y + height > this.height) throw new Error("a rectangle is not on the screen");
      if (kind === RAW) await this.raw(x, y, width, height);
      else if (kind === COPY) await this.copy(x, y, width, height);
      else if (kind === HEXTILE) await this.hextile(x, y, width, height);
      else throw new Error(`an encoding (${kind}) was not asked for`);
      this.painted(x, y, width, height);
    }
  }

  /** Counts pixels before they are painted. */
  spend(width, height) {
    this.left -= width * height;
    if (this.left < 0) throw new Error("an update paints more than there is to see");
  }

  fill(x, y, width, height, pixel) {
    this.spend(width, height);
    for (let row = y; row < y + height; row += 1) this.pixels.fill(pixel, row * this.width + x, row * this.width + x + width);
  }

  async raw(x, y, width, height) {
    this.spend(width, height);
    for (let row = y; row < y + height; row += 1) {
      const bytes = await this.bytes.take(4 * width);
      let at = row * this.width + x;
      for (let next = 0; next < bytes.length; next += 4) this.pixels[at++] = pixelOf(bytes, next);
    }
  }

  async copy(x, y, width, height) {
    const [fromX, fromY] = [await this.u16(), await this.u16()];
    if (fromX + width > this.width || fromY + height > this.height) throw new Error("a copied rectangle is not on the screen");
    this.spend(width, height);
    for (let index = 0; index < height; index += 1) {
      const row = fromY < y ? height - 1 - index : index;
      const from = (fromY + row) * this.width + fromX;
      this.pixels.copyWithin((y + row) * this.width + x, from, from + width);
    }
  }

  async hextile(x, y, width, height) {
    let ground = OPAQUE, ink = OPAQUE;
    const pixel = async () => pixelOf(await this.bytes.take(4), 0);
    for (let top = y; top < y + height; top += 16) {
      for (let left = x; left < x + width; left += 16) {
        const [wide, high] = [Math.min(16, x + width - left), Math.min(16, y + height - top)];
        const mask = await this.u8();
        if (mask & 1) { await this.raw(left, top, wide, high); continue; }
        if (mask & 2) ground = await pixel();
        this.fill(left, top, wide, high, ground);
        if (mask & 4) ink = await pixel();
        const each = mask & 16 ? 6 : 2;
        const parts = mask & 8 ? await this.bytes.take(each * (await this.u8())) : [];
        for (let at = 0; at < parts.length; at += each) {
          const colour = mask & 16 ? pixelOf(parts, at) : ink;
          const [place, size] = [parts[at + each - 2], parts[at + each - 1]];
          const [right, down, w, h] = [place >> 4, place & 15, (size >> 4) + 1, (size & 15) + 1];
          if (right + w > wide || down + h > high) throw new Error("a part of a tile is not in it");
          this.fill(left + right, top + down, w, h, colour);
        }
      }
    }
  }
}

function pixelOf(bytes, at) {
  return (bytes[at] | bytes[at + 1] << 8 | bytes[at + 2] << 16 | OPAQUE) >>> 0;
}

function bounded(length, most, what) {
  if (length > most) throw new Error(`${what} has ${length} bytes; ${most} are allowed`);
  return length;
}
