//! LVM's label of a device: which device it is, in one sector. LVM2's `lib/format_text/layout.h` and
//! `lib/label/label.h`.
//!
//! ```text
//! byte  0   "LABELONE"          one of the first four sectors
//!       8   the sector's number, 8 bytes
//!      16   checksum of the rest of the sector, from byte 20 on
//!      20   where the header is in this sector, 4 bytes
//!      24   "LVM2 001"
//! header: 32 letters of the UUID, ...
//! ```
//!
//! Numbers have their lowest byte first.

use std::io;

use tapio_format::Medium;
use uuid::Uuid;

/// Bytes of a sector.
pub(in crate::lvm) const SECTOR: usize = 512;
/// Sectors that may have it.
pub(in crate::lvm) const SECTORS: usize = 4;
/// What a label begins with.
pub(in crate::lvm) const MAGIC: &[u8; 8] = b"LABELONE";
const KIND: &[u8; 8] = b"LVM2 001";
const CHECKED_FROM: usize = 20;
/// Letters of a UUID, without dashes.
pub(in crate::lvm) const ID_LEN: usize = 32;
/// What LVM's checksum begins with.
const SEED: u32 = 0xf597_a6cf;

/// Letters of a UUID.
pub(in crate::lvm) type Id = [u8; ID_LEN];

/// The checksum of LVM: the polynomial of Ethernet, the lowest bit first, not inverted.
pub(in crate::lvm) fn checksum(bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new_with_initial(!SEED);
    sum.update(bytes);
    !sum.finalize()
}

fn number(sector: &[u8; SECTOR], at: usize) -> u32 {
    u32::from_le_bytes([sector[at], sector[at + 1], sector[at + 2], sector[at + 3]])
}

/// Where the UUID is in a sector that is a label.
pub(in crate::lvm) fn id_at(sector: &[u8; SECTOR]) -> Option<usize> {
    let is_label = sector.starts_with(MAGIC)
        && &sector[24..32] == KIND
        && number(sector, 16) == checksum(&sector[CHECKED_FROM..]);
    let at = usize::try_from(number(sector, 20)).ok()?;
    (is_label && (32..=SECTOR - ID_LEN).contains(&at)).then_some(at)
}

fn found(device: &impl Medium) -> io::Result<(u64, [u8; SECTOR], usize)> {
    for at in 0..SECTORS as u64 {
        let mut sector = [0; SECTOR];
        device.read_at(at * SECTOR as u64, &mut sector)?;
        if let Some(id) = id_at(&sector) {
            return Ok((at * SECTOR as u64, sector, id));
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "it has no label of LVM"))
}

/// The UUID in a device's label.
///
/// # Errors
/// It has none; those of the device.
pub(super) fn read(device: &impl Medium) -> io::Result<Id> {
    let (_, sector, at) = found(device)?;
    let mut id = [0; ID_LEN];
    id.copy_from_slice(&sector[at..at + ID_LEN]);
    Ok(id)
}

/// Puts another UUID into a device's label, by the write of one sector.
///
/// # Errors
/// As [`read`].
pub(super) fn write(device: &mut impl Medium, id: &Id) -> io::Result<()> {
    let (place, mut sector, at) = found(device)?;
    sector[at..at + ID_LEN].copy_from_slice(id);
    let sum = checksum(&sector[CHECKED_FROM..]);
    sector[16..20].copy_from_slice(&sum.to_le_bytes());
    device.write_at(place, &sector)?;
    device.flush()
}

/// The letters of a UUID as LVM prints it, with dashes.
pub(in crate::lvm) fn id_of(text: &str) -> Option<Id> {
    let letters: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    letters.try_into().ok()
}

/// A UUID as LVM writes it.
pub(in crate::lvm) fn fresh_id() -> String {
    const LETTERS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let bytes = [Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4()].map(Uuid::into_bytes).concat();
    let mut id = String::new();
    for (at, byte) in bytes.iter().take(ID_LEN).enumerate() {
        if [6, 10, 14, 18, 22, 26].contains(&at) {
            id.push('-');
        }
        id.push(char::from(LETTERS[usize::from(*byte) % LETTERS.len()]));
    }
    id
}

/// A label with this UUID: of a device of the double of LVM.
#[cfg(feature = "doubles")]
pub(in crate::lvm) fn label_of(id: &Id) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    sector[..8].copy_from_slice(MAGIC);
    sector[8] = 1;
    sector[20] = 32;
    sector[24..32].copy_from_slice(KIND);
    sector[32..32 + ID_LEN].copy_from_slice(id);
    let sum = checksum(&sector[CHECKED_FROM..]);
    sector[16..20].copy_from_slice(&sum.to_le_bytes());
    sector
}

/// The UUID in the first bytes of a device.
///
/// # Errors
/// They have none.
#[cfg(feature = "doubles")]
pub(in crate::lvm) fn read_from(bytes: &[u8]) -> io::Result<Id> {
    read(&bytes.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `pvcreate` of LVM 2.03.16 wrote on a device of 200 MiB: the places of its data and of its metadata behind
    /// the UUID.
    fn by_lvm(sum: u32) -> Vec<u8> {
        let mut device = vec![0; 2048];
        let sector = &mut device[512..1024];
        sector[..8].copy_from_slice(MAGIC);
        sector[8] = 1;
        sector[16..20].copy_from_slice(&sum.to_le_bytes());
        sector[20] = 32;
        sector[24..32].copy_from_slice(KIND);
        sector[32..64].copy_from_slice(b"cngw9DibPCAefmJAdr2f2t0YL581cVKY");
        for (at, value) in [(64, 200 << 20), (72, 0xb0_0000), (104, 0x1000), (112, 0xaf_f000_u64)] {
            sector[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        (sector[136], sector[140]) = (2, 1);
        device
    }

    #[test]
    fn a_uuid_is_read_and_changed_by_one_sector() {
        let first = *b"cngw9DibPCAefmJAdr2f2t0YL581cVKY";
        assert!(read(&by_lvm(0)).is_err(), "a label whose checksum is wrong is none");
        let mut device = by_lvm(0x5fc2_9771);
        assert_eq!(read(&device).unwrap(), first);
        let before = device.clone();
        let second = id_of("U81d0g-w0BL-ACm7-Vqdz-VTcp-0goG-86WR8P").unwrap();
        write(&mut device, &second).unwrap();
        assert_eq!(read(&device).unwrap(), second);
        let changed: Vec<usize> = before
            .chunks(512)
            .zip(device.chunks(512))
            .enumerate()
            .filter(|(_, (a, b))| a != b)
            .map(|(at, _)| at)
            .collect();
        assert_eq!(changed, [1]);
        write(&mut device, &first).unwrap();
        assert_eq!(device, before);
        assert_eq!(id_of("short"), None);
        assert!(read(&vec![0; 2048]).is_err() && read(&Vec::new()).is_err());
    }
}
