//! VMDKs in one file: stream-optimised ones, as packages have them, and sparse ones without compression.
//!
//! ```text
//!   header           512 bytes; of a stream-optimised one it does not say where the directory is
//!   description      text: kind of image, geometry
//!   grain marker     place on the disk, length; then a grain of 64 KiB, compressed by zlib, up to a whole sector
//!   ...
//!   table marker     then 512 entries: the sector of each grain's marker, 0 for one that is not there
//!   ...
//!   directory marker then the sector of each table
//!   footer marker    then the header once more, which says where the directory is
//!   end marker       512 zeros
//! ```
//!
//! Numbers have the lowest byte first. VMware's Virtual Disk Format 5.0 has the details.

mod read;
mod write;

pub(crate) use read::Vmdk;
pub(crate) use write::VmdkWriter;

const SECTOR: u64 = 512;
const MAGIC: &[u8; 4] = b"KDMV";
/// The directory is named by the footer.
const AT_END: u64 = u64::MAX;

const COMPRESSED: u32 = 1 << 16;
const MARKERS: u32 = 1 << 17;

/// Places of fields in the header.
mod field {
    pub(super) const VERSION: usize = 4;
    pub(super) const FLAGS: usize = 8;
    pub(super) const CAPACITY: usize = 12;
    pub(super) const GRAIN: usize = 20;
    pub(super) const DESCRIPTION: usize = 28;
    pub(super) const DESCRIPTION_LEN: usize = 36;
    pub(super) const TABLE_ENTRIES: usize = 44;
    pub(super) const DIRECTORY: usize = 56;
    pub(super) const OVERHEAD: usize = 64;
    pub(super) const LINE_ENDS: usize = 73;
    pub(super) const ALGORITHM: usize = 77;
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::image::Image;
    use crate::span::Span;

    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed | 1;
        let step = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        (0..len).map(step).collect()
    }

    /// A disk of this length with noise at these places, and its image.
    fn made(len: u64, places: &[(u64, usize)]) -> (Vec<u8>, Vec<u8>) {
        let mut disk = vec![0; len as usize];
        let mut writer = VmdkWriter::new(Vec::new(), "a.vmdk", len).unwrap();
        for (at, len) in places {
            let data = noise(*at + 3, *len);
            disk[*at as usize..][..*len].copy_from_slice(&data);
            writer.write(*at, &data).unwrap();
        }
        (disk, writer.finish().unwrap())
    }

    fn read(image: &[u8]) -> Result<Vec<u8>, crate::OvaError> {
        let mut input = Cursor::new(image);
        let mut opened = Image::open(&mut input, Span { offset: 0, len: image.len() as u64 })?;
        let mut disk = vec![0; opened.len() as usize];
        let mut at = 0;
        // Not on the borders of grains.
        for part in disk.chunks_mut(50_000) {
            let len = part.len() as u64;
            opened.read(&mut input, at, part)?;
            if opened.next_held(&mut input, at)?.is_none_or(|held| held >= at + len) {
                assert!(part.iter().all(|byte| *byte == 0), "what is not held is zero");
            }
            at += len;
        }
        Ok(disk)
    }

    #[test]
    fn an_image_is_read_as_it_was_written() {
        let mib = 1 << 20;
        for (len, places) in [
            (mib, vec![]),
            (70 * mib + 512, vec![(0, 1), (65_535, 3), (40 * mib, 200_000), (70 * mib, 512)]),
            (200 * 1024 + 1024, vec![(100, 150_000)]),
        ] {
            let (disk, image) = made(len, &places);
            assert!(image.len().is_multiple_of(512));
            assert!(read(&image).unwrap() == disk, "{len}");
        }
    }

    #[test]
    fn pieces_come_in_the_order_of_the_disk() {
        let mut writer = VmdkWriter::new(Vec::new(), "a.vmdk", 1 << 20).unwrap();
        writer.write(70_000, &[1]).unwrap();
        assert!(writer.write(0, &[1]).is_err());
        assert!(writer.write(1 << 20, &[1]).is_err(), "behind the end");
    }

    #[test]
    fn images_that_contradict_themselves_are_refused() {
        let (_, image) = made(3 << 20, &[(0, 70_000), (2 << 20, 10)]);
        let footer = image.len() - 1024;
        let changed = |at: usize, bytes: &[u8]| {
            let mut image = image.clone();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            read(&image)
        };
        let far = u64::MAX.to_le_bytes();
        assert!(changed(footer, b"XXXX").is_err(), "no footer");
        assert!(changed(footer + field::DIRECTORY, &(1_u64 << 40).to_le_bytes()).is_err(), "no directory");
        assert!(changed(footer + field::CAPACITY, &far).is_err(), "too large");
        assert!(changed(footer + field::GRAIN, &3_u64.to_le_bytes()).is_err(), "an odd grain");
        assert!(changed(footer + field::TABLE_ENTRIES, &0_u32.to_le_bytes()).is_err());
        assert!(changed(footer + field::ALGORITHM, &[7, 0]).is_err(), "another compression");
        // The first grain's marker: another place, and a length that cannot be.
        let grain = 128 * 512;
        assert!(changed(grain, &5_u64.to_le_bytes()).is_err());
        assert!(changed(grain + 8, &u32::MAX.to_le_bytes()).is_err());
        assert!(changed(grain + 12, &[0; 8]).is_err(), "no zlib");
        assert!(read(&image[..image.len() - 512]).is_err(), "cut");
    }
}
