// What a terminal of a guest shows: rows of cells, changed by text and by the sequences of a VT102 and of xterm that
// programs use. The bytes are the guest's: numbers, rows and what is remembered are bounded, and nothing is ever sent
// back but a place and a name of two fixed forms.

export const COLUMNS = 80, ROWS = 24;
const PAST_MAX = 1000, NUMBERS_MAX = 16, NUMBER_MAX = 9999;
/** No colour of its own. */
const PLAIN = 16;
const BOLD = 1 << 10, UNDER = 1 << 11, INVERSE = 1 << 12;
const DEFAULT = PLAIN | PLAIN << 5;
// From '`' to '~' in the graphic set of a VT100.
const GRAPHICS = "◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·";

const blank = (style = DEFAULT) => Array.from({ length: COLUMNS }, () => [" ", style]);
const clamp = (number, most) => Math.max(0, Math.min(number, most));

/** Foreground, background, weight and line of a style. */
export function styleOf(style) {
  const [ink, ground] = [style & 31, style >> 5 & 31];
  const isInverse = Boolean(style & INVERSE);
  return { ink: isInverse ? ground : ink, ground: isInverse ? ink : ground, isInverse, isBold: Boolean(style & BOLD), isUnder: Boolean(style & UNDER) };
}

export class Vt {
  /** `reply` sends an answer to the guest. */
  constructor(reply = () => {}) {
    this.reply = reply;
    this.decoder = new TextDecoder();
    this.past = [];
    /** Rows that have scrolled away in all. */
    this.gone = 0;
    this.reset();
  }

  reset() {
    this.rows = Array.from({ length: ROWS }, () => blank());
    this.other = null;
    Object.assign(this, { x: 0, y: 0, style: DEFAULT, top: 0, bottom: ROWS - 1, saved: null, wraps: true, isShown: true,
      cursorKeys: false, isGraphic: false, state: "text", numbers: [], mark: "", isPending: false });
    this.changed = new Set(this.rows.keys());
  }

  write(bytes) {
    for (const letter of this.decoder.decode(bytes, { stream: true })) this.take(letter);
  }

  take(letter) {
    const code = letter.codePointAt(0);
    // These work in the middle of a sequence, too.
    if (code === 24 || code === 26) this.state = "text";
    else if (code === 27) this.state = this.state === "string" ? "stringEnd" : "escape";
    else if (this.state === "string") { if (code === 7) this.state = "text"; }
    else if (this.state === "stringEnd") this.state = letter === "\\" ? "text" : "string";
    else if (code < 32) this.control(code);
    else this[this.state](letter, code);
  }

  control(code) {
    if (code === 8) { this.x = Math.max(0, this.x - 1); this.isPending = false; }
    else if (code === 9) this.x = clamp((this.x >> 3) * 8 + 8, COLUMNS - 1);
    else if (code >= 10 && code <= 12) this.feed();
    else if (code === 13) { this.x = 0; this.isPending = false; }
  }

  text(letter, code) {
    if (code === 127) return;
    if (this.isPending && this.wraps) { this.x = 0; this.feed(); }
    this.isPending = false;
    const shown = this.isGraphic && code >= 96 && code <= 126 ? GRAPHICS[code - 96] : letter;
    this.rows[this.y][this.x] = [shown, this.style];
    this.changed.add(this.y);
    if (this.x === COLUMNS - 1) this.isPending = true;
    else this.x += 1;
  }

  /** Down a row; the rows scroll at the end. */
  feed() {
    this.isPending = false;
    if (this.y === this.bottom) this.scroll(1);
    else this.y = Math.min(this.y + 1, ROWS - 1);
  }

  scroll(count, top = this.top) {
    const all = this.bottom - top + 1;
    for (let index = 0; index < Math.min(Math.abs(count), all); index += 1) {
      if (count > 0) {
        const [row] = this.rows.splice(top, 1);
        if (top === 0 && !this.other) this.remember(row);
        this.rows.splice(this.bottom, 0, blank(this.style & ~INVERSE));
      } else {
        this.rows.splice(this.bottom, 1);
        this.rows.splice(top, 0, blank(this.style & ~INVERSE));
      }
    }
    for (let row = top; row <= this.bottom; row += 1) this.changed.add(row);
  }

  remember(row) {
    this.past.push(row);
    this.gone += 1;
    if (this.past.length > PAST_MAX) this.past.shift();
  }

  escape(letter) {
    this.state = "text";
    if (letter === "[") Object.assign(this, { state: "sequence", numbers: [0], mark: "" });
    else if ("]P^_X".includes(letter)) this.state = "string";
    else if ("()*+#% ".includes(letter)) Object.assign(this, { state: "charset", mark: letter });
    else if (letter === "7") this.save();
    else if (letter === "8") this.restore();
    else if (letter === "D") this.feed();
    else if (letter === "E") { this.x = 0; this.feed(); }
    else if (letter === "M") { if (this.y === this.top) this.scroll(-1); else this.y = Math.max(0, this.y - 1); }
    else if (letter === "c") this.reset();
  }

  charset(letter) {
    this.state = "text";
    if (this.mark === "(") this.isGraphic = letter === "0";
  }

  save() { this.saved = { x: this.x, y: this.y, style: this.style, isGraphic: this.isGraphic }; }
  restore() { Object.assign(this, this.saved ?? { x: 0, y: 0, style: DEFAULT, isGraphic: false }, { isPending: false }); }

  sequence(letter, code) {
    if (letter >= "0" && letter <= "9") this.numbers.push(Math.min(this.numbers.pop() * 10 + Number(letter), NUMBER_MAX));
    else if (letter === ";" || letter === ":") { if (this.numbers.length < NUMBERS_MAX) this.numbers.push(0); }
    else if ("<=>?!\"$' ".includes(letter)) this.mark = letter;
    else if (code >= 64 && code <= 126) { this.state = "text"; this.obey(letter); }
    else this.state = "text";
  }

  obey(letter) {
    const [first, second = 0] = this.numbers, count = Math.max(1, first);
    if (this.mark === "?") { if (letter === "h" || letter === "l") this.numbers.forEach((mode) => this.setMode(mode, letter === "h")); return; }
    if (this.mark) { if (this.mark === "!" && letter === "p") this.reset(); return; }
    this.isPending = this.isPending && "mn".includes(letter);
    const move = (x, y) => { this.x = clamp(x, COLUMNS - 1); this.y = clamp(y, ROWS - 1); };
    switch (letter) {
      case "A": move(this.x, Math.max(this.y - count, this.y >= this.top ? this.top : 0)); break;
      case "B": case "e": move(this.x, Math.min(this.y + count, this.y <= this.bottom ? this.bottom : ROWS)); break;
      case "C": case "a": move(this.x + count, this.y); break;
      case "D": move(this.x - count, this.y); break;
      case "E": move(0, this.y + count); break;
      case "F": move(0, this.y - count); break;
      case "G": case "`": move(count - 1, this.y); break;
      case "H": case "f": move(Math.max(1, second) - 1, count - 1); break;
      case "d": move(this.x, count - 1); break;
      case "J": this.eraseScreen(first); break;
      case "K": this.erase(this.y, first === 0 ? this.x : 0, first === 1 ? this.x : COLUMNS - 1); break;
      case "X": this.erase(this.y, this.x, clamp(this.x + count - 1, COLUMNS - 1)); break;
      case "L": if (this.isInside()) this.scroll(-count, this.y); break;
      case "M": if (this.isInside()) this.scroll(count, this.y); break;
      case "S": this.scroll(count); break;
      case "T": this.scroll(-count); break;
      case "P": this.shift(-count); break;
      case "@": this.shift(count); break;
      case "m": this.paint(); break;
      case "r": this.setRegion(first, second); break;
      case "s": this.save(); break;
      case "u": this.restore(); break;
      case "n": if (first === 6) this.reply(`\x1b[${this.y + 1};${this.x + 1}R`); else if (first === 5) this.reply("\x1b[0n"); break;
      case "c": if (first === 0) this.reply("\x1b[?6c"); break;
      default:
    }
  }

  isInside() { return this.y >= this.top && this.y <= this.bottom; }

  setRegion(first, second) {
    const [top, bottom] = [Math.max(1, first) - 1, clamp((second || ROWS) - 1, ROWS - 1)];
    if (top < bottom) Object.assign(this, { top, bottom, x: 0, y: 0 });
  }

  setMode(mode, isOn) {
    if (mode === 1) this.cursorKeys = isOn;
    else if (mode === 7) this.wraps = isOn;
    else if (mode === 25) { this.isShown = isOn; this.changed.add(this.y); }
    else if (mode === 47 || mode === 1047 || mode === 1049) this.swap(isOn);
  }

  /** The other screen, which editors have. */
  swap(isOther) {
    if (isOther === Boolean(this.other)) return;
    if (isOther) {
      this.save();
      this.other = this.rows;
      this.rows = Array.from({ length: ROWS }, () => blank());
    } else {
      this.rows = this.other;
      this.other = null;
      this.restore();
    }
    this.changed = new Set(this.rows.keys());
  }

  erase(y, from, to) {
    for (let x = from; x <= to; x += 1) this.rows[y][x] = [" ", this.style & ~(INVERSE | UNDER)];
    this.changed.add(y);
  }

  eraseScreen(how) {
    if (how > 3) return;
    const [from, to] = how === 0 ? [this.y + 1, ROWS - 1] : [0, how === 1 ? this.y - 1 : ROWS - 1];
    for (let y = from; y <= to; y += 1) this.erase(y, 0, COLUMNS - 1);
    if (how === 0) this.erase(this.y, this.x, COLUMNS - 1);
    if (how === 1) this.erase(this.y, 0, this.x);
    if (how === 3) this.past = [];
  }

  shift(count) {
    const row = this.rows[this.y];
    for (let index = 0; index < Math.min(Math.abs(count), COLUMNS - this.x); index += 1) {
      if (count > 0) { row.splice(this.x, 0, [" ", this.style]); row.pop(); }
      else { row.splice(this.x, 1); row.push([" ", this.style]); }
    }
    this.changed.add(this.y);
  }

  paint() {
    const set = (bits, off = 0) => { this.style = this.style & ~off | bits; };
    for (let index = 0; index < this.numbers.length; index += 1) {
      const number = this.numbers[index];
      if (number === 0) this.style = DEFAULT;
      else if (number === 1) set(BOLD);
      else if (number === 4) set(UNDER);
      else if (number === 7) set(INVERSE);
      else if (number === 22) set(0, BOLD);
      else if (number === 24) set(0, UNDER);
      else if (number === 27) set(0, INVERSE);
      else if (number >= 30 && number <= 37) set(number - 30, 31);
      else if (number >= 90 && number <= 97) set(number - 82, 31);
      else if (number === 39) set(PLAIN, 31);
      else if (number >= 40 && number <= 47) set(number - 40 << 5, 31 << 5);
      else if (number >= 100 && number <= 107) set(number - 92 << 5, 31 << 5);
      else if (number === 49) set(PLAIN << 5, 31 << 5);
      else if (number === 38 || number === 48) {
        // Of the 256 colours the first 16 are known; the others stay as they are.
        const [kind, colour] = [this.numbers[index + 1], this.numbers[index + 2]];
        if (kind === 5 && colour < 16) set(number === 38 ? colour : colour << 5, number === 38 ? 31 : 31 << 5);
        index += kind === 5 ? 2 : kind === 2 ? 4 : 0;
      }
    }
  }

  /** The text of a row. */
  static textOf(row) { return row.map(([letter]) => letter).join("").trimEnd(); }
}
