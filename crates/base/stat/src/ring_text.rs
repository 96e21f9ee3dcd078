//! The text of a ring's state in `vbd3-<domid>-<devid>/io_ring`.
//!
//! The file begins with a CRC-32 of the text as one 64-bit number in the host's byte order, then come three lines:
//!
//! ```text
//! nr_ents 32
//! req prod 120 cons 120 event 121
//! rsp prod 118 pvt 118 event 119
//! ```
//!
//! Readers take a ring whose `rsp` numbers stand still while `req prod` differs from `rsp prod` for stalled.

use std::fmt::{self, Write};

use tapio_types::RingState;

/// Longest file: the checksum and the three lines with the largest numbers.
pub const RING_TEXT_LEN_MAX: usize = 192;

/// A text in a fixed buffer: the data thread writes it and must not allocate.
struct Fixed {
    bytes: [u8; RING_TEXT_LEN_MAX],
    len: usize,
}

impl Write for Fixed {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len.checked_add(text.len()).ok_or(fmt::Error)?;
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The file's content and its length.
pub fn ring_text(ring: &RingState) -> ([u8; RING_TEXT_LEN_MAX], usize) {
    let mut text = Fixed { bytes: [0; RING_TEXT_LEN_MAX], len: 8 };
    // The buffer holds the longest text (checked by a test), so this cannot fail; a short text would only be a
    // short text, and the checksum would still be its own.
    let _ = write!(
        text,
        "nr_ents {}\nreq prod {} cons {} event {}\nrsp prod {} pvt {} event {}\n",
        ring.size,
        ring.req_prod,
        ring.req_cons as i32,
        ring.req_event,
        ring.rsp_prod,
        ring.rsp_pvt as i32,
        ring.rsp_event,
    );
    let crc = u64::from(crc32(&text.bytes[8..text.len]));
    text.bytes[..8].copy_from_slice(&crc.to_ne_bytes());
    (text.bytes, text.len)
}

/// Reads an `io_ring` file. The checksum is not compared: a writer may be between the two.
pub fn parse_ring_text(bytes: &[u8]) -> Option<RingState> {
    let text = std::str::from_utf8(bytes.get(8..)?).ok()?;
    let mut words = text.trim_end_matches('\0').split_ascii_whitespace();
    let mut after = |label: &[&str]| -> Option<u32> {
        for expected in label {
            if words.next()? != *expected {
                return None;
            }
        }
        let number = words.next()?;
        number.parse().ok().or_else(|| number.parse::<i32>().ok().map(|signed| signed as u32))
    };
    Some(RingState {
        size: after(&["nr_ents"])?,
        req_prod: after(&["req", "prod"])?,
        req_cons: after(&["cons"])?,
        req_event: after(&["event"])?,
        rsp_prod: after(&["rsp", "prod"])?,
        rsp_pvt: after(&["pvt"])?,
        rsp_event: after(&["event"])?,
    })
}

/// The CRC-32 of IEEE 802.3 bit by bit: at most 184 bytes once in five seconds need no table.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn the_text_has_three_lines() {
        let ring = RingState {
            size: 32,
            req_prod: 120,
            req_cons: 119,
            req_event: 121,
            rsp_prod: 118,
            rsp_pvt: 118,
            rsp_event: 119,
        };
        let (bytes, len) = ring_text(&ring);
        assert_eq!(
            &bytes[8..len],
            b"nr_ents 32\nreq prod 120 cons 119 event 121\nrsp prod 118 pvt 118 event 119\n"
        );
        assert_eq!(parse_ring_text(&bytes[..len]), Some(ring));
        assert_eq!(ring.used(), 2);
    }

    #[test]
    fn the_largest_numbers_fit() {
        let ring = RingState {
            size: u32::MAX,
            req_prod: u32::MAX,
            req_cons: 0x8000_0000,
            req_event: u32::MAX,
            rsp_prod: u32::MAX,
            rsp_pvt: 0x8000_0000,
            rsp_event: u32::MAX,
        };
        let (bytes, len) = ring_text(&ring);
        assert!(bytes[..len].ends_with(b"event 4294967295\n"));
        assert_eq!(parse_ring_text(&bytes[..len]), Some(ring));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_give_a_state_or_nothing(bytes in proptest::collection::vec(0u8..=255, 0..256)) {
            let _ = parse_ring_text(&bytes);
        }
    }
}
