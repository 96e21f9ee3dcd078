//! How large volumes are. sm-layout.md section 2, vhd.md section 12.

use tapio_format::vhd::{Layout, SECTOR_LEN, layout};

/// Volumes are whole multiples of this.
pub(crate) const EXTENT: u64 = 4 << 20;
/// A block table has room for a disk of this size, so that none has to be moved when the disk grows. 2 TiB.
pub(crate) const TABLE_FOR: u64 = 2 << 40;
/// Bytes of a VHD's block.
const BLOCK: u64 = 2 << 20;
/// What a block takes beside its data, bitmap and gap.
const BLOCK_MORE: u64 = layout::DATA_ALIGN;
/// Metadata of an empty image with such a table, by the rule of XenServer's storage manager.
const EMPTY: u64 = 3072 + (TABLE_FOR >> 20) / 2 * 4 + (TABLE_FOR >> 20) / 2 / 8;
/// Of three parent locators, and the gap before the first block.
const LOCATORS: u64 = 3 * SECTOR_LEN + layout::DATA_ALIGN;

/// As a volume has it.
pub(crate) const fn rounded(len: u64) -> u64 {
    match len.checked_next_multiple_of(EXTENT) {
        Some(len) => len,
        None => u64::MAX - EXTENT + 1,
    }
}

/// Of the volume of a VHD that holds nothing. 8 MiB.
pub(crate) const fn empty() -> u64 {
    rounded(EMPTY + LOCATORS)
}

/// Of the volume of a VHD that can be written in full.
pub(crate) fn full(virtual_size: u64) -> u64 {
    let blocks = virtual_size.div_ceil(BLOCK);
    let theirs = virtual_size.saturating_add(EMPTY).saturating_add(blocks * BLOCK_MORE);
    // Theirs lacks the locators of a child, for which rounding leaves no room at some sizes.
    let ours = Layout::new(virtual_size, TABLE_FOR).map_or(u64::MAX, |layout| {
        (layout.locators_offset + LOCATORS).saturating_add(blocks * (BLOCK + BLOCK_MORE)) + SECTOR_LEN
    });
    rounded(theirs.max(ours))
}

#[cfg(test)]
mod tests {
    use tapio_format::Medium;
    use tapio_format::vhd::offline::{Image, OpenOptions, ParentFacts, Shape, create_on};
    use uuid::Uuid;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_are_those_of_the_layout() {
        assert_eq!(empty(), 8 * MIB);
        assert_eq!(full(64 * MIB), 72 * MIB);
        assert_eq!(full(2 * MIB), 8 * MIB);
    }

    /// A device of a length, in memory.
    struct Device(Vec<u8>);

    impl Medium for Device {
        fn len(&self) -> std::io::Result<u64> {
            Ok(self.0.len() as u64)
        }
        fn is_device(&self) -> bool {
            true
        }
        fn read_at(&self, at: u64, into: &mut [u8]) -> std::io::Result<()> {
            self.0.read_at(at, into)
        }
        fn write_at(&mut self, at: u64, from: &[u8]) -> std::io::Result<()> {
            assert!(at + from.len() as u64 <= self.0.len() as u64, "behind the end");
            self.0.write_at(at, from)
        }
        fn set_len(&mut self, _: u64) -> std::io::Result<()> {
            Err(std::io::Error::other("a device"))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_volume_takes_every_block() {
        for virtual_size in [2 * MIB, 64 * MIB, 66 * MIB] {
            let parent = ParentFacts {
                uuid: Uuid::from_u128(1),
                timestamp: 0,
                name: "VG-VHD".into(),
                relative_path: format!("./{}", "x".repeat(110)),
                key_hash: tapio_format::vhd::KeyHash::default(),
            };
            let mut device = Device(vec![0; full(virtual_size) as usize]);
            create_on(&mut device, &Shape::Differencing(parent), virtual_size, TABLE_FOR).unwrap();
            let path = std::path::Path::new("memory");
            let mut image = Image::open_on(device, path, OpenOptions::WRITE).unwrap();
            for block in 0..virtual_size / BLOCK {
                image.write_at(block * BLOCK, &[7; 512]).unwrap();
            }
            image.finish().unwrap();
        }
        let mut small = Device(vec![0; empty() as usize]);
        create_on(&mut small, &Shape::Dynamic, 2 << 30, TABLE_FOR).unwrap();
    }
}
