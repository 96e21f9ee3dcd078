//! Byte ranges.

/// Bytes in a sector. Every format and protocol here counts in these, whatever the device below does.
pub const SECTOR_LEN: u64 = 512;

/// A range of bytes in one address space: a guest's disk, or a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// `len` bytes from `start`.
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }

    /// The first byte after the range, or `None` where that does not fit 64 bits: a client may ask for anything.
    pub const fn end(&self) -> Option<u64> {
        self.start.checked_add(self.len)
    }

    /// Whether the range is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the whole range lies below `limit`.
    pub const fn fits(&self, limit: u64) -> bool {
        match self.end() {
            Some(end) => end <= limit,
            None => false,
        }
    }

    /// Whether the two have a byte in common. What does not fit 64 bits ends there.
    pub const fn overlaps(&self, other: Self) -> bool {
        self.start < other.start.saturating_add(other.len)
            && other.start < self.start.saturating_add(self.len)
    }

    /// Whether both ends are multiples of `unit` (a power of two).
    pub const fn is_aligned(&self, unit: u64) -> bool {
        (self.start | self.len) & (unit - 1) == 0
    }

    /// The first `len` bytes at most.
    pub const fn prefix(&self, len: u64) -> Self {
        Self { start: self.start, len: if len < self.len { len } else { self.len } }
    }

    /// What is left after the first `len` bytes.
    pub const fn skip(&self, len: u64) -> Self {
        let len = if len < self.len { len } else { self.len };
        Self { start: self.start + len, len: self.len - len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_at_the_end_of_the_address_space_has_no_end() {
        assert_eq!(Span::new(u64::MAX, 1).end(), None);
        assert!(!Span::new(u64::MAX, 1).fits(u64::MAX));
        assert!(Span::new(u64::MAX - 1, 1).fits(u64::MAX));
    }

    #[test]
    fn spans_overlap_where_they_share_a_byte() {
        let span = Span::new(100, 50);
        for (other, shares) in [
            (Span::new(0, 100), false),
            (Span::new(0, 101), true),
            (Span::new(149, 1), true),
            (Span::new(150, 1), false),
            (Span::new(120, 10), true),
            (Span::new(0, u64::MAX), true),
        ] {
            assert_eq!((span.overlaps(other), other.overlaps(span)), (shares, shares), "{other:?}");
        }
        assert!(Span::new(u64::MAX - 1, 10).overlaps(Span::new(u64::MAX - 2, 2)));
    }

    #[test]
    fn prefix_and_skip_cut_a_span_in_two() {
        let span = Span::new(100, 50);
        assert_eq!((span.prefix(20), span.skip(20)), (Span::new(100, 20), Span::new(120, 30)));
        assert_eq!((span.prefix(80), span.skip(80)), (span, Span::new(150, 0)));
    }
}
