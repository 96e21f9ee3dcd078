//! What the kernel's target `log-writes` of device-mapper has recorded of a device, put back up to any moment at which
//! the device had been told to make everything durable.
//!
//! ```text
//! sector 0       magic, version (1), count of entries: 8 bytes each; bytes of a sector: 4 bytes
//! each entry     in a sector of its own: sector, sectors, flags, bytes of what follows inside (a mark's name): 8 bytes
//!                each, then that; after that sector the data, unless it is a discard or a mark
//! ```
//!
//! Numbers have their lowest byte first; sectors are counted in the size that the first one names. The target writes an
//! entry down once the device has it: plain writes before the flush that made them durable.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// drivers/md/dm-log-writes.c.
const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// Entries that are read at most.
const ENTRIES_MAX: u64 = 1 << 20;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// Something that was done to the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first byte on the device.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    flags: u64,
    /// Where the data are in the log.
    data: u64,
    /// The name of a mark.
    pub mark: Option<String>,
}

impl Entry {
    /// Whether everything up to here was durable when it had ended.
    pub fn is_durable(&self) -> bool {
        self.flags & (FLUSH | FUA) != 0
    }
}

/// A log.
#[derive(Debug)]
pub struct Log {
    file: File,
    /// In their order.
    pub entries: Vec<Entry>,
}

fn odd(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

impl Log {
    /// Reads a log.
    ///
    /// # Errors
    /// It is none, or is cut off.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let entries = parsed(&file, file.metadata()?.len())?;
        Ok(Self { file, entries })
    }

    /// Does to `device` what was done up to and with the entry of this number.
    ///
    /// # Errors
    /// Those of the files.
    pub fn replay(&self, upto: usize, device: &Path) -> io::Result<()> {
        let device = File::options().write(true).open(device)?;
        let mut piece = vec![0; 1 << 20];
        for entry in self.entries.iter().take(upto + 1).filter(|entry| entry.mark.is_none()) {
            let mut done = 0;
            while done < entry.len {
                let now = usize::try_from(entry.len - done).unwrap_or(usize::MAX).min(piece.len());
                let bytes = &mut piece[..now];
                match entry.flags & DISCARD {
                    0 => self.file.read_exact_at(bytes, entry.data + done)?,
                    _ => bytes.fill(0),
                }
                device.write_all_at(bytes, entry.at + done)?;
                done += now as u64;
            }
        }
        Ok(())
    }

    /// Numbers of entries after the mark up to which everything was durable: `count` of them at most, the last among
    /// them.
    pub fn moments(&self, after: &str, count: usize) -> Vec<usize> {
        let begin = self.entries.iter().position(|entry| entry.mark.as_deref() == Some(after));
        let all: Vec<usize> = (begin.unwrap_or(usize::MAX)..self.entries.len())
            .filter(|at| self.entries[*at].is_durable())
            .collect();
        if all.len() <= count {
            return all;
        }
        (1..=count).map(|part| all[(all.len() * part / count).saturating_sub(1)]).collect()
    }
}

fn parsed(file: &impl FileExt, len: u64) -> io::Result<Vec<Entry>> {
    let mut first = [0; 28];
    file.read_exact_at(&mut first, 0)?;
    let sector_len = u64::from(u32::from_le_bytes(std::array::from_fn(|index| first[24 + index])));
    let (magic, version, count) = (number(&first, 0), number(&first, 8), number(&first, 16));
    if magic != MAGIC || version != VERSION {
        return Err(odd(format!("no log of writes: {magic:#x}, version {version}")));
    }
    if !(512..=65536).contains(&sector_len) || !sector_len.is_power_of_two() || count > ENTRIES_MAX {
        return Err(odd(format!("{count} entries in sectors of {sector_len} bytes")));
    }
    let mut entries = Vec::new();
    let mut at = sector_len;
    let mut sector = vec![0; sector_len as usize];
    for entry in 0..count {
        let begins = at;
        let cut_off = || odd(format!("entry {entry} at byte {begins} is cut off, or is none"));
        if at.checked_add(sector_len).is_none_or(|end| end > len) {
            return Err(cut_off());
        }
        file.read_exact_at(&mut sector, at)?;
        let [place, sectors, flags, inside] = [0, 8, 16, 24].map(|at| number(&sector, at));
        let bytes = |count: u64| count.checked_mul(sector_len).filter(|len| i64::try_from(*len).is_ok());
        let (Some(place), Some(bytes)) = (bytes(place), bytes(sectors)) else { return Err(cut_off()) };
        let data = at + sector_len;
        let mark = match flags & MARK {
            0 => None,
            _ => {
                let name = usize::try_from(inside).ok().and_then(|len| sector.get(32..32 + len.min(4096)));
                Some(String::from_utf8_lossy(name.ok_or_else(cut_off)?).trim_end_matches('\0').to_owned())
            }
        };
        at = if flags & DISCARD != 0 || mark.is_some() { data } else { data + bytes };
        if at > len {
            return Err(cut_off());
        }
        entries.push(Entry { at: place, len: bytes, flags, data, mark });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of sectors of 512 bytes: entries as sector, sectors, flags, what is inside, data.
    fn log(entries: &[(u64, u64, u64, &str, &[u8])]) -> Vec<u8> {
        let numbers = |numbers: &[u64]| -> Vec<u8> {
            let mut sector: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            sector.resize(512, 0);
            sector
        };
        let mut bytes = numbers(&[MAGIC, VERSION, entries.len() as u64, 512]);
        for (at, sectors, flags, inside, data) in entries {
            let mut sector = numbers(&[*at, *sectors, *flags, inside.len() as u64]);
            sector[32..32 + inside.len()].copy_from_slice(inside.as_bytes());
            bytes.extend(sector);
            bytes.extend(*data);
        }
        bytes
    }

    #[test]
    fn writes_come_back_up_to_a_moment() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, device) = (dir.path().join("log"), dir.path().join("device"));
        let (one, two) = ([1; 512], [2; 1024]);
        let entries = [
            (0, 1, 0, "", &one[..]),
            (0, 0, FLUSH, "", &[]),
            (0, 0, MARK, "begin", &[]),
            (1, 2, FUA, "", &two),
            (2, 1, DISCARD, "", &[]),
            (0, 0, FLUSH, "", &[]),
        ];
        std::fs::write(&path, log(&entries)).expect("a log");
        let log = Log::open(&path).expect("it is one");
        assert_eq!(log.moments("begin", 10), [3, 5]);
        assert_eq!(log.moments("begin", 1), [5]);
        assert!(log.moments("other", 10).is_empty());
        for (upto, expected) in [(1, [1, 0, 0]), (3, [1, 2, 2]), (5, [1, 2, 0])] {
            std::fs::write(&device, [0; 1536]).expect("a device");
            log.replay(upto, &device).expect("it is put back");
            let found = std::fs::read(&device).expect("the device");
            assert_eq!([found[0], found[512], found[1024]], expected, "{upto}");
        }
    }

    #[test]
    fn what_is_no_log_is_refused() {
        let whole = log(&[(0, 1, 0, "", &[1; 512])]);
        let parse = |bytes: &[u8]| {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("log");
            std::fs::write(&path, bytes).expect("a file");
            Log::open(&path).map(|log| log.entries.len()).map_err(|error| error.kind())
        };
        assert_eq!(parse(&whole), Ok(1));
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).is_err(), "{len} bytes");
        }
        // Any byte of the head and of the entry may be wrong: an error or other entries, and no panic.
        for at in (0..28).chain(512..544) {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let _ = parse(&bytes);
            }
        }
        assert!(parse(&[0xff; 4096]).is_err());
    }
}
