//! Strings that end with a NUL each, which payloads consist of, and the numbers among them.

/// Strings that each end with a NUL.
#[derive(Clone, Debug)]
pub struct Pieces<'a>(&'a [u8]);

impl<'a> Pieces<'a> {
    /// `None` if the last one does not end. No bytes are no strings.
    pub fn new(payload: &'a [u8]) -> Option<Self> {
        payload.last().is_none_or(|last| *last == 0).then_some(Self(payload))
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let (piece, rest) = (&self.0[..end], &self.0[end + 1..]);
        self.0 = rest;
        Some(piece)
    }
}

/// Strings with a NUL after each: names of children, permissions.
pub fn strings<I: IntoIterator<Item = T>, T: AsRef<[u8]>>(pieces: I) -> Vec<u8> {
    let mut payload = Vec::new();
    for piece in pieces {
        payload.extend_from_slice(piece.as_ref());
        payload.push(0);
    }
    payload
}

/// A decimal number of digits alone: no sign, no space, and not so long that it overflows.
pub fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}
