//! Where the pieces of a disk lie.

use crate::error::XvaError;

/// Where the pieces of one disk lie, told from their numbers and lengths in order.
#[derive(Clone, Debug)]
pub struct Places {
    len: u64,
    offset: u64,
    last: Option<u32>,
    /// Of the first piece that has bytes.
    first_len: u64,
}

impl Places {
    /// The places on a disk of `len` bytes.
    pub fn new(len: u64) -> Self {
        Self { len, offset: 0, last: None, first_len: 0 }
    }

    /// The place of the next piece; one of no bytes has none.
    ///
    /// # Errors
    /// The numbers do not increase, or the piece lies behind the end of the disk.
    pub fn place(&mut self, number: u32, len: u64) -> Result<Option<u64>, XvaError> {
        let next = self.last.map_or(0, |last| u64::from(last) + 1);
        let gap = u64::from(number).checked_sub(next).ok_or_else(|| {
            XvaError::Wrong(format!("piece {number} of a disk comes behind piece {}", next.saturating_sub(1)))
        })?;
        if gap > 0 && self.first_len == 0 {
            return Err(XvaError::Wrong(format!(
                "the first piece of a disk is missing: piece {number} is there"
            )));
        }
        let offset = self.offset.saturating_add(gap.saturating_mul(self.first_len));
        let end = offset.saturating_add(len);
        if end > self.len {
            let what =
                format!("piece {number} of a disk ends at byte {end}, and the disk has {} bytes", self.len);
            return Err(XvaError::Wrong(what));
        }
        (self.last, self.offset) = (Some(number), end);
        if len == 0 {
            return Ok(None);
        }
        if self.first_len == 0 {
            self.first_len = len;
        }
        Ok(Some(offset))
    }

    /// Whether all of the disk was placed. Its size may have been rounded up to `unit` bytes, its last piece not.
    pub fn is_whole(&self, unit: u64) -> bool {
        self.offset.next_multiple_of(unit) == self.len.next_multiple_of(unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_from_the_pieces_before() {
        let mut places = Places::new(10 << 20);
        let mib = 1 << 20;
        assert_eq!(places.place(0, mib).unwrap(), Some(0));
        assert_eq!(places.place(3, mib).unwrap(), Some(3 * mib));
        // A sign of life: numbers stay shifted behind it.
        assert_eq!(places.place(4, 0).unwrap(), None);
        assert_eq!(places.place(5, mib).unwrap(), Some(4 * mib));
        assert!(!places.is_whole(512));
        assert!(places.clone().place(5, mib).is_err(), "the number again");
        assert!(places.clone().place(11, mib).is_err(), "behind the end");
        assert!(places.clone().place(u32::MAX, mib).is_err());
        assert_eq!(places.place(10, mib).unwrap(), Some(9 * mib));
        assert!(places.is_whole(512));
        assert!(Places::new(mib).place(1, mib).is_err(), "without the first");
    }
}
