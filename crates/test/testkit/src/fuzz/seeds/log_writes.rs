//! Logs of a device's writes.

use super::Shelf;

/// A log of sectors of so many bytes: for each entry sector, sectors, flags, and the name of a mark.
fn log(sector_len: u32, entries: &[(u64, u64, u64, &str)]) -> Vec<u8> {
    let numbers = |numbers: &[u64]| -> Vec<u8> {
        let mut sector: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        sector.resize(sector_len as usize, 0);
        sector
    };
    let mut bytes = numbers(&[0x006a_7366_7773_6872, 1, entries.len() as u64, sector_len.into()]);
    for (at, sectors, flags, name) in entries {
        let mut sector = numbers(&[*at, *sectors, *flags, name.len() as u64]);
        sector[32..32 + name.len()].copy_from_slice(name.as_bytes());
        bytes.extend(sector);
        if flags & 12 == 0 {
            bytes.resize(bytes.len() + *sectors as usize * sector_len as usize, 7);
        }
    }
    bytes
}

pub fn put_into(shelf: &mut Shelf) {
    let entries = [(0, 2, 0, ""), (0, 0, 1, ""), (0, 0, 8, "begin"), (3, 1, 2, ""), (1 << 30, 64, 4, "")];
    shelf.put("log_writes", "small-sectors", log(512, &entries));
    shelf.put("log_writes", "large-sectors", log(4096, &entries[..4]));
    shelf.put("log_writes", "empty", log(512, &[]));
}
