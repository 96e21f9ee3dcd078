//! Where a database lies in its VDI: in two halves, which are written in turn.
//!
//! ```text
//!   byte 0        head of half 0, a sector: "TapioDb1", generation (8), bytes of the text (8), their SHA-256 (32),
//!                 UUID of the pool (16), SHA-256 of these 72 bytes (32); numbers little endian, zeros behind
//!   byte 4096     text of half 0: a dump
//!   byte 128 MiB  half 1, the same
//! ```
//!
//! Generation G goes into the half that does not have the newest head: (1) its text is written, and durable; (2) its
//! head is written, and durable. Until 2 is over the other half has the newest generation whole; while 1 runs, the head
//! of this half belongs to a text that is not there any more, which its sum tells. So a reader finds one whole
//! generation whatever was cut off where: the newest whose sums are right.

use sha2::{Digest, Sha256};
use uuid::Uuid;

const MAGIC: [u8; 8] = *b"TapioDb1";

/// Bytes of a VDI that holds a database.
pub(crate) const VDI_LEN: u64 = 256 << 20;

/// Where the second half begins.
const HALF: u64 = VDI_LEN / 2;

/// Where the text begins in its half.
const TEXT_AT: u64 = 4096;

/// Bytes of a head, and what everything is padded to.
const SECTOR: usize = 512;

/// What of a head has a sum.
const SUMMED: usize = 72;

/// Longest text, in bytes.
pub(crate) const TEXT_LEN_MAX: u64 = HALF - TEXT_AT;

/// The head of a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaHead {
    /// Counts from 1.
    pub generation: u64,
    /// Bytes of the text.
    pub len: u64,
    digest: [u8; 32],
    /// Of the database.
    pub pool: Uuid,
}

/// The heads of both halves; none for one that was never written, or was cut off.
type Heads = [Option<ReplicaHead>; 2];

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

impl ReplicaHead {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SECTOR);
        bytes.extend(MAGIC);
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.digest);
        bytes.extend(self.pool.as_bytes());
        let sum = Sha256::digest(&bytes);
        bytes.extend(sum);
        bytes.resize(SECTOR, 0);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = (bytes.get(..SUMMED)?, bytes.get(SUMMED..)?);
        let is_ours = head.starts_with(&MAGIC) && rest.starts_with(&Sha256::digest(head));
        let (generation, len) = (number(&head[8..16]), number(&head[16..24]));
        if !is_ours || generation == 0 || len > TEXT_LEN_MAX {
            return None;
        }
        let (mut digest, mut pool) = ([0; 32], [0; 16]);
        digest.copy_from_slice(&head[24..56]);
        pool.copy_from_slice(&head[56..72]);
        Some(Self { generation, len, digest, pool: Uuid::from_bytes(pool) })
    }
}

/// Reads bytes of the VDI: as many, from there on.
pub(crate) type Read<'a, E> = &'a mut dyn FnMut(u64, usize) -> Result<Vec<u8>, E>;

/// The heads of a VDI.
///
/// # Errors
/// Those of `read`.
pub(crate) fn heads<E>(read: Read<'_, E>) -> Result<Heads, E> {
    Ok([ReplicaHead::decode(&read(0, SECTOR)?), ReplicaHead::decode(&read(HALF, SECTOR)?)])
}

/// The newest text that is whole, with its head; none: there is none.
///
/// # Errors
/// Those of `read`.
pub fn newest<E>(read: Read<'_, E>) -> Result<Option<(ReplicaHead, Vec<u8>)>, E> {
    let [first, second] = heads(read)?;
    let mut found: Vec<_> =
        [(0, first), (HALF, second)].into_iter().filter_map(|(at, head)| Some((at, head?))).collect();
    found.sort_by_key(|(_, head)| std::cmp::Reverse(head.generation));
    for (at, head) in found {
        // A head is of at most half of the VDI.
        let Ok(len) = usize::try_from(head.len) else { continue };
        let text = read(at + TEXT_AT, len)?;
        if text.len() == len && head.digest[..] == Sha256::digest(&text)[..] {
            return Ok(Some((head, text)));
        }
    }
    Ok(None)
}

/// What is written, in this order, each durable before the next: places and whole sectors.
///
/// # Errors
/// A sentence: the text is too long.
pub(crate) fn writes(heads: Heads, pool: Uuid, text: &[u8]) -> Result<[(u64, Vec<u8>); 2], String> {
    let len = text.len() as u64;
    if len > TEXT_LEN_MAX {
        return Err(format!("the database has {len} bytes, and a VDI for it has room for {TEXT_LEN_MAX}"));
    }
    let generations = heads.map(|head| head.map_or(0, |head| head.generation));
    let at = if generations[0] > generations[1] { HALF } else { 0 };
    let generation = generations[0].max(generations[1]).saturating_add(1);
    let head = ReplicaHead { generation, len, digest: Sha256::digest(text).into(), pool };
    let mut body = text.to_vec();
    body.resize(text.len().next_multiple_of(SECTOR), 0);
    Ok([(at + TEXT_AT, body), (at, head.encode())])
}

/// A VDI that was written once: reads bytes of it. For tests.
#[doc(hidden)]
pub fn replica_of(text: &[u8]) -> impl Fn(u64, usize) -> Vec<u8> {
    let written = writes([None, None], Uuid::nil(), text).unwrap_or_default();
    move |at, len| {
        let found = written.iter().find(|(start, _)| *start == at);
        let mut bytes = found.map_or_else(Vec::new, |(_, bytes)| bytes[..len.min(bytes.len())].to_vec());
        bytes.resize(len, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use super::*;

    /// Sectors that were written.
    #[derive(Clone, Default)]
    struct Image(BTreeMap<u64, Vec<u8>>);

    impl Image {
        fn read(&self, at: u64, len: usize) -> Vec<u8> {
            let sectors = (at / 512..(at + len as u64).div_ceil(512))
                .map(|sector| self.0.get(&sector).cloned().unwrap_or_else(|| vec![0; SECTOR]));
            let mut bytes: Vec<u8> = sectors.flatten().collect();
            bytes.truncate(len);
            bytes
        }

        fn heads(&self) -> Heads {
            let Ok(heads) = heads::<Infallible>(&mut |at, len| Ok(self.read(at, len)));
            heads
        }

        fn newest(&self) -> Option<(u64, Vec<u8>)> {
            let Ok(found) = newest::<Infallible>(&mut |at, len| Ok(self.read(at, len)));
            found.map(|(head, text)| (head.generation, text))
        }

        fn write(&self, text: &[u8]) -> Vec<Vec<(u64, Vec<u8>)>> {
            let writes = writes(self.heads(), Uuid::from_u128(7), text).expect("short");
            let sectors = writes.into_iter().map(|(at, bytes)| {
                assert!(at.is_multiple_of(512) && bytes.len().is_multiple_of(512));
                let sectors = bytes.chunks(512).enumerate();
                sectors.map(|(number, bytes)| (at / 512 + number as u64, bytes.to_vec())).collect()
            });
            sectors.collect()
        }
    }

    #[test]
    fn a_reader_finds_a_whole_generation_wherever_a_writer_was_cut_off() {
        let mut image = Image::default();
        assert_eq!(image.newest(), None);
        let text = |generation: u64| vec![generation as u8; 300 + 700 * generation as usize % 2500];
        for generation in 1..=6 {
            let before = image.newest();
            assert_eq!(before.as_ref().map(|found| found.0), (generation > 1).then_some(generation - 1));
            let writes = image.write(&text(generation));
            for (which, sectors) in writes.iter().enumerate() {
                // Within a write, sectors may have come in any order: from the front, from the back, every other one.
                let count = sectors.len();
                let orders: [Vec<usize>; 3] = [
                    (0..count).collect(),
                    (0..count).rev().collect(),
                    (0..count).step_by(2).chain((1..count).step_by(2)).collect(),
                ];
                for order in orders {
                    for cut in 0..=count {
                        let mut cut_off = image.clone();
                        cut_off.0.extend(order[..cut].iter().map(|number| sectors[*number].clone()));
                        let found = cut_off.newest();
                        let is_written = which == 1 && cut == count;
                        let expected =
                            if is_written { Some((generation, text(generation))) } else { before.clone() };
                        assert!(found == expected, "generation {generation}, write {which}, {cut} sectors");
                        // The next writer leaves what a reader would find, too.
                        if let Some((known, _)) = found {
                            let next = cut_off.write(b"next");
                            cut_off.0.extend(next[0].iter().cloned());
                            assert_eq!(cut_off.newest().map(|found| found.0), Some(known));
                        }
                    }
                }
                image.0.extend(sectors.iter().cloned());
            }
        }
    }

    #[test]
    fn a_torn_or_foreign_head_is_none() {
        let head = ReplicaHead { generation: 3, len: 9, digest: [1; 32], pool: Uuid::from_u128(5) };
        let bytes = head.encode();
        assert_eq!(ReplicaHead::decode(&bytes), Some(head));
        for at in 0..SUMMED + 32 {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(ReplicaHead::decode(&other), None, "byte {at}");
        }
        let long = ReplicaHead { len: TEXT_LEN_MAX + 1, ..head };
        assert_eq!(ReplicaHead::decode(&long.encode()), None);
        assert!(writes([None, None], Uuid::nil(), &vec![0; TEXT_LEN_MAX as usize + 1]).is_err());
    }
}
