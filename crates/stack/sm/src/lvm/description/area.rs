//! Where a device has LVM's description of its group. LVM2's `lib/format_text/layout.h`.
//!
//! ```text
//! label    the device's UUID and length; data areas {start, length}... 0; metadata areas {start, length}... 0
//! area     byte  0   checksum of the next 508 bytes
//!                4   " LVM2 x[5A%r0N*>"
//!               20   version, 4 bytes; start and length of the area, 8 bytes each
//!               40   the text in force: where in the area, how long, its checksum, flags; then one that is being put
//!                    into force
//!              512   texts, one behind the other; one that reaches the end of the area goes on here
//! ```
//!
//! Numbers have their lowest byte first.

use crate::dir::facts::ReadAt;
use crate::lvm::resign::label::{self, Id, SECTOR, SECTORS};

/// What an area begins with, behind its checksum.
const MAGIC: &[u8; 16] = b" LVM2 x[5A%r0N*>";
/// Where the place of the text in force is.
const PLACE: usize = 40;
/// A description that is longer is left to LVM.
const TEXT_MAX: u64 = 32 << 20;

/// What a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Described {
    /// The UUID in its label.
    pub(super) id: Id,
    /// The text in force; none on a device that has no area for one.
    pub(super) text: Option<Vec<u8>>,
}

fn number<const LEN: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut all = [0; 8];
    all[..LEN].copy_from_slice(bytes.get(at..at.checked_add(LEN)?)?);
    Some(u64::from_le_bytes(all))
}

/// A list of places from byte `at` on, and where it ends.
fn places(sector: &[u8], mut at: usize) -> Option<(Vec<(u64, u64)>, usize)> {
    let mut found = Vec::new();
    loop {
        let place = (number::<8>(sector, at)?, number::<8>(sector, at + 8)?);
        at += 16;
        if place.0 == 0 {
            return Some((found, at));
        }
        found.push(place);
    }
}

/// What is on a device.
///
/// # Errors
/// A sentence: it has no label, or an area that is not whole or not as it is known here; it cannot be read.
pub(super) fn read(device: &impl ReadAt) -> Result<Described, String> {
    let mut first = [0; SECTORS * SECTOR];
    device.read_at_once(&mut first, 0).map_err(|error| format!("its label cannot be read: {error}"))?;
    let mut sectors = first.chunks_exact(SECTOR).filter_map(|sector| sector.try_into().ok());
    let (sector, at) = sectors
        .find_map(|sector: &[u8; SECTOR]| Some((sector, label::id_at(sector)?)))
        .ok_or("it has no label of LVM")?;
    let mut id = [0; label::ID_LEN];
    id.copy_from_slice(&sector[at..at + label::ID_LEN]);
    let areas = places(sector, at + label::ID_LEN + 8).and_then(|(_, next)| places(sector, next));
    match areas.ok_or("its label is not whole")?.0.as_slice() {
        [] => Ok(Described { id, text: None }),
        [area] => Ok(Described { id, text: Some(text(device, *area)?) }),
        // LVM makes both alike, and a kill between them leaves two that differ.
        _ => Err("it has two areas of metadata".into()),
    }
}

/// The text in force of an area.
fn text(device: &impl ReadAt, (start, len): (u64, u64)) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("its metadata cannot be read: {error}");
    let mut head = [0; SECTOR];
    device.read_at_once(&mut head, start).map_err(failed)?;
    let of = |at: usize| number::<8>(&head, at).unwrap_or(0);
    let word = |at: usize| number::<4>(&head, at).unwrap_or(0);
    let is_whole = word(0) == u64::from(label::checksum(&head[4..]))
        && &head[4..20] == MAGIC
        && word(20) == 1
        && (of(24), of(32)) == (start, len);
    let (at, text_len) = (of(PLACE), of(PLACE + 8));
    let (sum, flags) = (word(PLACE + 16), word(PLACE + 20));
    let room = len.checked_sub(SECTOR as u64).ok_or("its area of metadata is too short")?;
    if !is_whole || flags != 0 {
        return Err("its area of metadata is not as it is known here".into());
    }
    if at < SECTOR as u64 || at >= len || text_len == 0 || text_len > room.min(TEXT_MAX) {
        return Err("its area of metadata has no text of a possible length".into());
    }
    let mut text = vec![0; usize::try_from(text_len).map_err(|error| error.to_string())?];
    // What is behind the end of the area is at its beginning.
    let (before, after) = text.split_at_mut(text_len.min(len - at) as usize);
    let place = |at: u64| start.checked_add(at).ok_or("its area of metadata is nowhere");
    device.read_at_once(before, place(at)?).map_err(failed)?;
    device.read_at_once(after, place(SECTOR as u64)?).map_err(failed)?;
    if u64::from(label::checksum(&text)) != sum {
        return Err("its metadata have another checksum than they should".into());
    }
    Ok(text)
}

/// The bytes of a device with the checksums that its label and its area should have; for tests with bytes of others,
/// which would not get past them.
pub(super) fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for sector in bytes.chunks_exact_mut(SECTOR) {
        let at = if sector[4..20] == *MAGIC { 0 } else { 16 };
        let sum = label::checksum(&sector[at + 4..]);
        if at == 0 || sector.starts_with(label::MAGIC) {
            sector[at..at + 4].copy_from_slice(&sum.to_le_bytes());
        }
    }
    bytes
}
