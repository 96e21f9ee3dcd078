//! Text in a place of fixed size.

/// Bytes that are put together. What does not fit is left out, and known.
#[derive(Debug)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
    is_cut: bool,
}

impl<const N: usize> Text<N> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { bytes: [0; N], len: 0, is_cut: false }
    }

    /// These parts, one after the other.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut text = Self::new();
        parts.iter().for_each(|part| text.push(part));
        text
    }

    /// Adds some.
    pub fn push(&mut self, more: &[u8]) {
        for byte in more {
            match self.bytes.get_mut(self.len) {
                Some(place) => {
                    *place = *byte;
                    self.len += 1;
                }
                None => self.is_cut = true,
            }
        }
    }

    /// Adds a number.
    pub fn push_number(&mut self, number: usize) {
        if number >= 10 {
            self.push_number(number / 10);
        }
        self.push(&[b'0' + (number % 10) as u8]);
    }

    /// Nothing again.
    pub fn clear(&mut self) {
        (self.len, self.is_cut) = (0, false);
    }

    /// What there is.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// What there is, ending with NUL, as the kernel takes names; none when something was left out.
    pub fn name(&mut self) -> Option<&[u8]> {
        let end = self.bytes.get_mut(self.len).filter(|_| !self.is_cut)?;
        *end = 0;
        self.bytes.get(..=self.len)
    }
}

/// The first word, and what follows it.
pub fn word(line: &[u8]) -> (&[u8], &[u8]) {
    let begin = line.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(line.len());
    let (_, line) = line.split_at(begin);
    let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    line.split_at(end)
}

/// The word of this number, counted from 0; empty where there are fewer.
pub fn nth_word(line: &[u8], number: usize) -> &[u8] {
    let mut rest = line;
    for _ in 0..number {
        rest = word(rest).1;
    }
    word(rest).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_is_between_spaces() {
        assert_eq!(word(b"  bind  virtio-uml.3 \r"), (&b"bind"[..], &b"  virtio-uml.3 \r"[..]));
        assert_eq!(nth_word(b"36 35 254:0 / /mnt/a rw", 2), b"254:0");
        assert_eq!(nth_word(b"36 35 254:0 / /mnt/a rw", 4), b"/mnt/a");
        assert_eq!(nth_word(b"one", 1), b"");
        assert_eq!(nth_word(b"", 0), b"");
    }

    #[test]
    fn a_name_that_does_not_fit_is_none() {
        let mut text: Text<8> = Text::of(&[b"/sys/", b"a"]);
        assert_eq!(text.name(), Some(&b"/sys/a\0"[..]));
        text.push(b"b");
        assert_eq!(text.name(), Some(&b"/sys/ab\0"[..]));
        text.push(b"cd");
        assert_eq!(text.bytes(), b"/sys/abc");
        assert_eq!(text.name(), None);
        text.clear();
        text.push_number(10_203);
        assert_eq!(text.bytes(), b"10203");
    }
}
