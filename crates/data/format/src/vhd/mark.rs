//! The mark of a writer: a number in the copy of the footer, from opening an image for writing until it is closed.
//!
//! Every other program that writes an image destroys the mark: XenServer's tapdisk and tools write the copy anew from
//! the footer at the end, which has none, and a process of ours writes a mark of its own. So a mark that is still
//! there says that the image is as the process left it that drew the mark, and the records that it left in its intent
//! log may be believed. The mark stands in the field for the creator's operating system: nothing depends on that field,
//! and the rules of `vhd-util check` do not look at it.

use super::Footer;

/// No system has a name that begins with this byte.
const SIGN: u32 = 0xa7 << 24;
/// The system of images by Microsoft's tools and by QEMU.
const WINDOWS: u32 = u32::from_be_bytes(*b"Wi2k");

/// The mark of one opening for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    /// A mark that is not `last`.
    pub fn draw(last: Option<Self>) -> Self {
        let random = uuid::Uuid::new_v4().as_u128() as u32;
        let mark = Self(SIGN | random & 0x00ff_ffff);
        if last == Some(mark) { Self(mark.0 ^ 1) } else { mark }
    }

    /// The mark on `footer`, if there is one.
    pub fn on(footer: &Footer) -> Option<Self> {
        Self::of_number(footer.creator_os)
    }

    /// The mark with this number.
    pub fn of_number(number: u32) -> Option<Self> {
        (number & 0xff00_0000 == SIGN).then_some(Self(number))
    }

    /// Its number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// `footer` with this mark.
    #[must_use]
    pub fn put_on(self, footer: &Footer) -> Footer {
        Footer { creator_os: self.0, ..*footer }
    }
}

/// `footer` without a mark, its own or one that another program took over with the copy.
#[must_use]
pub fn unmarked(footer: &Footer) -> Footer {
    match Mark::on(footer) {
        None => *footer,
        Some(_) => Footer { creator_os: if footer.is_by_tapdisk() { 0 } else { WINDOWS }, ..*footer },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhd::DiskType;

    #[test]
    fn a_mark_goes_on_and_off_a_footer_and_changes_nothing_else() {
        let footer = Footer::new(DiskType::Dynamic, 64 << 20);
        let first = Mark::draw(None);
        let marked = Footer::decode(&first.put_on(&footer).encode()).expect("it decodes").0;
        assert_eq!((Mark::on(&marked), Mark::on(&footer)), (Some(first), None));
        assert_eq!(unmarked(&marked).encode(), footer.encode());
        assert_eq!(unmarked(&footer), footer);
        assert!((0..1000).all(|_| Mark::draw(Some(first)) != first));
        let foreign = Footer { creator_app: *b"win ", creator_os: WINDOWS, ..footer };
        assert_eq!(unmarked(&first.put_on(&foreign)).encode(), foreign.encode());
        assert_eq!([0, WINDOWS, u32::from_be_bytes(*b"Mac ")].map(Mark::of_number), [None; 3]);
    }
}
