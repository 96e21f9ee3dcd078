//! What programs of others wrote on a device: partition tables, and the marks of LVM and of software RAID.
//!
//! Bytes are foreign, and are read with bounds: what is no table is none.

use uuid::Uuid;

/// The start of a disk, as much as the table of GPT's first entries takes: see [`partition_uuid`].
pub const TABLE_LEN: usize = 128 << 10;
/// The start of a device that may belong to LVM or to software RAID.
pub const HEAD_LEN: usize = 16 << 10;
/// Where a superblock of software RAID in format 1.0 lies at the earliest, from the end.
pub const TAIL_LEN: usize = 16 << 10;

const MD_MAGIC: u32 = 0xa92b_4efc;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The partition's own UUID in the table of its disk, whose first bytes these are: that of GPT, or signature and number
/// of an MBR, as the kernel's `PARTUUID` has them.
pub fn partition_uuid(table: &[u8], sector_len: usize, number: u32) -> Option<String> {
    if let Some(uuid) = gpt(table, sector_len, number) {
        return Some(uuid.to_string());
    }
    let is_mbr = table.get(510..512)? == [0x55, 0xaa];
    let signature = u32_at(table, 440).filter(|signature| is_mbr && *signature != 0)?;
    let kinds: Vec<u8> = (0..4).filter_map(|entry| table.get(446 + 16 * entry + 4).copied()).collect();
    let is_there = match number {
        0 => false,
        1..=4 => kinds.get(number as usize - 1).is_some_and(|kind| *kind != 0),
        // Logical partitions are counted from five on.
        _ => kinds.iter().any(|kind| EXTENDED.contains(kind)),
    };
    is_there.then(|| format!("{signature:08x}-{number:02x}"))
}

fn gpt(table: &[u8], sector_len: usize, number: u32) -> Option<Uuid> {
    let header = table.get(sector_len..sector_len.checked_add(512)?)?;
    if !header.starts_with(b"EFI PART") {
        return None;
    }
    let first = usize::try_from(u64_at(header, 72)?).ok()?.checked_mul(sector_len)?;
    let (count, len) = (u32_at(header, 80)?, u32_at(header, 84)? as usize);
    if number == 0 || number > count || !(128..=4096).contains(&len) {
        return None;
    }
    let at = first.checked_add((number as usize - 1).checked_mul(len)?)?;
    let entry = table.get(at..at.checked_add(len)?)?;
    let uuid = Uuid::from_bytes_le(entry.get(16..32)?.try_into().ok()?);
    (!uuid.is_nil() && entry[..16] != [0; 16]).then_some(uuid)
}

/// The UUID of the array whose member has this superblock at the start of `bytes`, which is a copy of format 1.
fn md_at(bytes: &[u8], at: usize) -> Option<Uuid> {
    let block = bytes.get(at..at.checked_add(256)?)?;
    let is_one = u32_at(block, 0)? == MD_MAGIC && u32_at(block, 4)? == 1;
    is_one.then(|| Some(Uuid::from_bytes(block.get(16..32)?.try_into().ok()?))).flatten()
}

/// The UUID of the array that a device is a member of, by its first bytes and its last ones, which end with the device.
pub fn raid_member(head: &[u8], tail: &[u8]) -> Option<Uuid> {
    // Formats 1.1 and 1.2 lie at the start; 1.0 at least 8 KiB before the end, at a multiple of 4 KiB.
    md_at(head, 0)
        .or_else(|| md_at(head, 4096))
        .or_else(|| (0..tail.len()).step_by(512).find_map(|at| md_at(tail, at)))
}

/// Whether a device with these first bytes belongs to LVM.
pub fn is_physical_volume(head: &[u8]) -> bool {
    let label = |at: usize| {
        head.get(at..at + 32)
            .is_some_and(|label| label.starts_with(b"LABELONE") && &label[24..32] == b"LVM2 001")
    };
    (0..4).any(|sector| label(512 * sector))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A table of GPT whose partitions have these UUIDs.
    pub fn gpt_table(sector_len: usize, uuids: &[Uuid]) -> Vec<u8> {
        let mut table = vec![0; TABLE_LEN];
        let header = &mut table[sector_len..];
        header[..8].copy_from_slice(b"EFI PART");
        header[72..80].copy_from_slice(&2_u64.to_le_bytes());
        header[80..84].copy_from_slice(&128_u32.to_le_bytes());
        header[84..88].copy_from_slice(&128_u32.to_le_bytes());
        for (entry, uuid) in uuids.iter().enumerate() {
            let at = 2 * sector_len + 128 * entry;
            table[at..at + 16].fill(7);
            table[at + 16..at + 32].copy_from_slice(&uuid.to_bytes_le());
        }
        table
    }

    #[test]
    fn a_partition_has_the_uuid_that_the_kernel_shows() {
        let uuid = Uuid::from_u128(0x1234_5678_9abc_def0_1122_3344_5566_7788);
        for sector_len in [512, 4096] {
            let table = gpt_table(sector_len, &[Uuid::from_u128(1), uuid]);
            assert_eq!(partition_uuid(&table, sector_len, 2), Some(uuid.to_string()));
            for number in [0, 3, 129, u32::MAX] {
                assert_eq!(partition_uuid(&table, sector_len, number), None, "{number}");
            }
            assert_eq!(partition_uuid(&table[..sector_len + 600], sector_len, 2), None, "a short table");
        }
        let mut mbr = vec![0; 512];
        mbr[510..].copy_from_slice(&[0x55, 0xaa]);
        mbr[440..444].copy_from_slice(&0xdead_beef_u32.to_le_bytes());
        mbr[446 + 4] = 0x83;
        assert_eq!(partition_uuid(&mbr, 512, 1).as_deref(), Some("deadbeef-01"));
        assert_eq!((partition_uuid(&mbr, 512, 2), partition_uuid(&mbr, 512, 5)), (None, None));
        mbr[446 + 16 + 4] = 0x05;
        assert_eq!(partition_uuid(&mbr, 512, 5).as_deref(), Some("deadbeef-05"));
        assert_eq!(partition_uuid(&[], 512, 1), None);
    }

    #[test]
    fn members_of_groups_and_arrays_are_known() {
        let mut head = vec![0; HEAD_LEN];
        assert!(!is_physical_volume(&head) && raid_member(&head, &[]).is_none());
        head[512..520].copy_from_slice(b"LABELONE");
        head[536..544].copy_from_slice(b"LVM2 001");
        assert!(is_physical_volume(&head));
        let mut block = vec![0; 256];
        block[..4].copy_from_slice(&MD_MAGIC.to_le_bytes());
        block[4] = 1;
        block[16..32].fill(9);
        let uuid = Some(Uuid::from_bytes([9; 16]));
        head[4096..4352].copy_from_slice(&block);
        assert_eq!(raid_member(&head, &[]), uuid);
        let mut tail = vec![0; TAIL_LEN];
        tail[4096..4352].copy_from_slice(&block);
        assert_eq!(raid_member(&[], &tail), uuid);
    }
}
