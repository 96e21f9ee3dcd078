//! Keys: from symbols of X, which viewers send, to keys of a keyboard, which guests have.
//!
//! The guest is taken to have an American keyboard, as QEMU's VNC server does. A symbol says what the viewer's keyboard
//! made of all its keys, so Shift is pressed or released around a key as its symbol needs it, and keys that only choose
//! among symbols (Caps Lock, Num Lock, AltGr) do not reach the guest.

use std::collections::BTreeSet;

/// A key of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// By what QEMU calls it (`QKeyCode`).
    Named(&'static str),
    /// By its scan code on a PC: at most [`CODE_MAX`].
    Code(u16),
}

/// Scan codes: seven bits, and one for those with the prefix 0xe0.
pub const CODE_MAX: u16 = 0xff;

const SHIFTS: [Key; 2] = [Key::Named("shift"), Key::Named("shift_r")];

/// Keys with two symbols: without Shift and with it.
const PAIRS: &[(char, char, &str)] = &[
    ('1', '!', "1"),
    ('2', '@', "2"),
    ('3', '#', "3"),
    ('4', '$', "4"),
    ('5', '%', "5"),
    ('6', '^', "6"),
    ('7', '&', "7"),
    ('8', '*', "8"),
    ('9', '(', "9"),
    ('0', ')', "0"),
    ('-', '_', "minus"),
    ('=', '+', "equal"),
    ('[', '{', "bracket_left"),
    (']', '}', "bracket_right"),
    (';', ':', "semicolon"),
    ('\'', '"', "apostrophe"),
    ('`', '~', "grave_accent"),
    ('\\', '|', "backslash"),
    (',', '<', "comma"),
    ('.', '>', "dot"),
    ('/', '?', "slash"),
];

const LETTERS: [&str; 26] = [
    "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t", "u",
    "v", "w", "x", "y", "z",
];

const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

const FUNCTIONS: [&str; 12] = ["f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "f9", "f10", "f11", "f12"];

/// Keys for which Shift stays as it is.
const OTHERS: &[(u32, &str)] = &[
    (0x20, "spc"),
    (0xfe20, "tab"),
    (0xff08, "backspace"),
    (0xff09, "tab"),
    (0xff0d, "ret"),
    (0xff13, "pause"),
    (0xff14, "scroll_lock"),
    (0xff15, "sysrq"),
    (0xff1b, "esc"),
    (0xff50, "home"),
    (0xff51, "left"),
    (0xff52, "up"),
    (0xff53, "right"),
    (0xff54, "down"),
    (0xff55, "pgup"),
    (0xff56, "pgdn"),
    (0xff57, "end"),
    (0xff61, "print"),
    (0xff63, "insert"),
    (0xff67, "menu"),
    (0xff8d, "kp_enter"),
    (0xff95, "home"),
    (0xff96, "left"),
    (0xff97, "up"),
    (0xff98, "right"),
    (0xff99, "down"),
    (0xff9a, "pgup"),
    (0xff9b, "pgdn"),
    (0xff9c, "end"),
    (0xff9e, "insert"),
    (0xff9f, "delete"),
    (0xffaa, "kp_multiply"),
    (0xffab, "kp_add"),
    (0xffad, "kp_subtract"),
    (0xffae, "dot"),
    (0xffaf, "kp_divide"),
    (0xffe1, "shift"),
    (0xffe2, "shift_r"),
    (0xffe3, "ctrl"),
    (0xffe4, "ctrl_r"),
    (0xffe7, "meta_l"),
    (0xffe8, "meta_r"),
    (0xffe9, "alt"),
    (0xffea, "alt_r"),
    (0xffeb, "meta_l"),
    (0xffec, "meta_r"),
    (0xffff, "delete"),
];

/// The key of a symbol, and whether Shift must be held for it, where that matters.
fn key_of(symbol: u32) -> Option<(&'static str, Option<bool>)> {
    let letter = |first: u32| LETTERS[(symbol - first) as usize];
    match symbol {
        0x61..=0x7a => return Some((letter(0x61), Some(false))),
        0x41..=0x5a => return Some((letter(0x41), Some(true))),
        // The digits of a keypad, whatever the guest's Num Lock is.
        0xffb0..=0xffb9 => return Some((DIGITS[(symbol - 0xffb0) as usize], None)),
        0xffbe..=0xffc9 => return Some((FUNCTIONS[(symbol - 0xffbe) as usize], None)),
        _ => {}
    }
    if let Some((_, name)) = OTHERS.iter().find(|(known, _)| *known == symbol) {
        return Some((name, None));
    }
    let letter = char::from_u32(symbol)?;
    let (plain, _, name) = PAIRS.iter().find(|(plain, with, _)| [*plain, *with].contains(&letter))?;
    Some((name, Some(*plain != letter)))
}

/// The keys that a viewer holds.
#[derive(Debug, Default)]
pub struct Keyboard {
    held: BTreeSet<Key>,
}

impl Keyboard {
    /// What to do for a symbol that is pressed or released; nothing for one that no key has. `true` is pressed.
    pub fn symbol(&mut self, symbol: u32, is_down: bool) -> Vec<(Key, bool)> {
        let Some((name, shift)) = key_of(symbol) else { return Vec::new() };
        let key = Key::Named(name);
        let mut strokes = Vec::new();
        let held: Vec<Key> = SHIFTS.into_iter().filter(|shift| self.held.contains(shift)).collect();
        // The keys of Shift that are not as the symbol needs them, for as long as the key is pressed.
        let turned: &[Key] = match shift {
            Some(true) if is_down && held.is_empty() => &SHIFTS[..1],
            Some(false) if is_down => &held,
            _ => &[],
        };
        let is_pressed = held.is_empty();
        strokes.extend(turned.iter().map(|shift| (*shift, is_pressed)));
        strokes.extend(self.press(key, is_down));
        strokes.extend(turned.iter().map(|shift| (*shift, !is_pressed)));
        strokes
    }

    /// What to do for a key that is pressed or released; nothing for a code that no keyboard has.
    pub fn code(&mut self, code: u32, is_down: bool) -> Vec<(Key, bool)> {
        let code = u16::try_from(code).ok().filter(|code| (1..=CODE_MAX).contains(code));
        code.and_then(|code| self.press(Key::Code(code), is_down)).into_iter().collect()
    }

    /// A key that is held and pressed again repeats; one that is not held cannot be released.
    fn press(&mut self, key: Key, is_down: bool) -> Option<(Key, bool)> {
        let was_held = if is_down { !self.held.insert(key) } else { self.held.remove(&key) };
        (is_down || was_held).then_some((key, is_down))
    }

    /// Releases all keys: their viewer has gone.
    pub fn release(&mut self) -> Vec<(Key, bool)> {
        std::mem::take(&mut self.held).into_iter().map(|key| (key, false)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(strokes: &[(Key, bool)]) -> String {
        let word = |(key, is_down): &(Key, bool)| match key {
            Key::Named(name) => format!("{}{name}", if *is_down { '+' } else { '-' }),
            Key::Code(code) => format!("{}{code:#x}", if *is_down { '+' } else { '-' }),
        };
        strokes.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn shift_is_as_the_symbol_needs_it() {
        let mut keyboard = Keyboard::default();
        let mut type_it = |symbol: u32, is_down| named(&keyboard.symbol(symbol, is_down));
        assert_eq!((type_it(0x61, true), type_it(0x61, false)), ("+a".into(), "-a".into()));
        assert_eq!((type_it(0x41, true), type_it(0x41, false)), ("+shift +a -shift".into(), "-a".into()));
        assert_eq!(type_it(0xffe1, true), "+shift");
        assert_eq!((type_it(0x21, true), type_it(0x21, false)), ("+1".into(), "-1".into()));
        // A keyboard on which the slash is above the seven.
        assert_eq!(
            (type_it(0x2f, true), type_it(0x2f, false)),
            ("-shift +slash +shift".into(), "-slash".into())
        );
        assert_eq!(type_it(0xff51, true), "+left");
        // It was pressed with Shift and is released without.
        assert_eq!((type_it(0x41, true), type_it(0xffe1, false)), ("+a".into(), "-shift".into()));
        assert_eq!((type_it(0x61, false), type_it(0x61, false)), ("-a".into(), String::new()));
        for lock in [0xffe5, 0xff7f, 0xfe03, 0x0100_20ac, 0xe4, 0xffff_ffff] {
            assert_eq!(type_it(lock, true), "", "{lock:#x}");
        }
        assert_eq!(named(&keyboard.release()), "-left");
        assert_eq!(named(&keyboard.release()), "");
    }

    #[test]
    fn every_letter_of_ascii_has_a_key() {
        for symbol in 0x20..0x7f {
            assert!(key_of(symbol).is_some(), "{symbol:#x}");
        }
    }

    #[test]
    fn codes_are_bounded() {
        let mut keyboard = Keyboard::default();
        assert_eq!(named(&keyboard.code(0x1c, true)), "+0x1c");
        for none in [0, 0x100, u32::MAX] {
            assert_eq!(named(&keyboard.code(none, true)), "");
        }
        assert_eq!(named(&keyboard.release()), "-0x1c");
    }
}
