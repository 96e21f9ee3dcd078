// Bytes that come in pieces of any length, and are taken in others.

/** What may wait to be taken: two screens, as they are. A server that sends more without being asked is cut off. */
const HELD_MAX = 2 ** 27;

export class Bytes {
  constructor() {
    this.pieces = [];
    this.at = 0;
    this.held = 0;
    this.hasEnded = false;
    this.wake = () => {};
  }

  push(piece) {
    if (this.hasEnded || !piece.length) return;
    this.held += piece.length;
    if (this.held > HELD_MAX) { this.pieces = []; this.hasEnded = true; } else this.pieces.push(piece);
    this.wake();
  }

  end() {
    this.hasEnded = true;
    this.wake();
  }

  async need(length) {
    while (this.held < length) {
      if (this.hasEnded) throw new Error("the other end has gone");
      await new Promise((done) => { this.wake = done; });
    }
    if (this.hasEnded && !this.pieces.length && length) throw new Error("more came than can be shown");
  }

  /** The next bytes, when they have come. */
  async take(length) {
    if (this.held < length || !this.pieces.length) await this.need(length);
    const [first] = this.pieces;
    if (length && first.length - this.at >= length) return this.cut(first, length);
    const whole = new Uint8Array(length);
    for (let done = 0; done < length;) {
      const part = this.cut(this.pieces[0], Math.min(length - done, this.pieces[0].length - this.at));
      whole.set(part, done);
      done += part.length;
    }
    return whole;
  }

  cut(piece, length) {
    const part = piece.subarray(this.at, this.at + length);
    this.at += length;
    this.held -= length;
    if (this.at === piece.length) { this.pieces.shift(); this.at = 0; }
    return part;
  }

  /** Drops the next bytes, however many, a piece at a time. */
  async skip(length) {
    for (let left = length; left > 0;) {
      await this.need(1);
      left -= this.cut(this.pieces[0], Math.min(left, this.pieces[0].length - this.at)).length;
    }
  }
}
