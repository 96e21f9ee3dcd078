// Keys as X names them, which RFB has (RFC 6143, 7.5.4).

const NAMED = {
  Backspace: 0xff08, Tab: 0xff09, Enter: 0xff0d, Pause: 0xff13, ScrollLock: 0xff14, Escape: 0xff1b, Delete: 0xffff,
  Home: 0xff50, ArrowLeft: 0xff51, ArrowUp: 0xff52, ArrowRight: 0xff53, ArrowDown: 0xff54, PageUp: 0xff55, PageDown: 0xff56,
  End: 0xff57, PrintScreen: 0xff61, Insert: 0xff63, ContextMenu: 0xff67, NumLock: 0xff7f, CapsLock: 0xffe5,
};
const SIDES = { Shift: [0xffe1, 0xffe2], Control: [0xffe3, 0xffe4], Alt: [0xffe9, 0xffea], Meta: [0xffeb, 0xffec] };
export const CONTROL = 0xffe3, ALT = 0xffe9, DELETE = 0xffff;

/** The symbol of a key event; none for keys that have none. */
export function symbolOf({ key, location }) {
  if (SIDES[key]) return SIDES[key][location === 2 ? 1 : 0];
  if (NAMED[key]) return NAMED[key];
  const number = /^F(\d{1,2})$/.exec(key);
  if (number) return 0xffbd + Number(number[1]);
  if ([...key].length !== 1) return undefined;
  const point = key.codePointAt(0);
  return point < 0x100 ? point : 0x01000000 | point;
}

/** Whether a key leaves the console, as it leaves 'xe console'. */
export const leaves = (event) => event.ctrlKey && !event.altKey && (event.key === "]" || event.code === "BracketRight");
