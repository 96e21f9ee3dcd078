//! Finding and reading counters, ours and those of a foreign tapdisk.
//!
//! Files are read, not mapped: a file that its owner truncates would end a reader that maps it, and one read a
//! second costs nothing.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::Snapshot;
use crate::page::{GENERATION_AT, PAGE_LEN, ParsePageError, parse_page};
use crate::published::{
    PUBLISHED_LEN, PublishedStats, STATISTICS_LEN, VbdStatistics, parse_published, parse_statistics,
};
use tapio_types::RingState;

use crate::ring_text::{RING_TEXT_LEN_MAX, parse_ring_text};
use crate::shm::{FileState, ShmRoot, is_ours};
use crate::vbd::VbdId;

/// Entries of a directory that are looked at: far more disks than a host has, but not without end.
const ENTRIES_MAX: usize = 65_536;

/// Why counters could not be read.
#[derive(Debug)]
pub enum ReadError {
    /// The file system said no.
    Io(io::Error),
    /// The page is not one of ours.
    Page(ParsePageError),
    /// Fewer bytes than the layout has.
    Short,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Page(error) => error.fmt(f),
            Self::Short => f.write_str("the file is shorter than its layout"),
        }
    }
}

impl std::error::Error for ReadError {}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Opens a plain file of root's or our own, without following a link.
pub(crate) fn open_plain(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && is_ours(&metadata) {
        Ok(file)
    } else {
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} is not a file of ours", path.display()),
        ))
    }
}

/// The first bytes of a file, at most `N`; the rest of the array stays zero.
pub(crate) fn head<const N: usize>(file: &File) -> io::Result<([u8; N], usize)> {
    let mut bytes = [0; N];
    let mut len = 0;
    while len < N {
        match file.read_at(&mut bytes[len..], len as u64) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((bytes, len))
}

fn state_of(file: &File) -> FileState {
    match file.metadata() {
        Ok(metadata) if metadata.nlink() > 0 => FileState::Linked,
        _ => FileState::Unlinked,
    }
}

/// A page of ours, open for reading.
#[derive(Debug)]
pub struct DiskFile {
    name: String,
    file: File,
}

impl DiskFile {
    /// Opens the page of that name.
    ///
    /// # Errors
    /// There is none, or it has another owner.
    pub fn open(root: &ShmRoot, name: &str) -> io::Result<Self> {
        Ok(Self { name: name.to_owned(), file: open_plain(&root.pages().join(name))? })
    }

    /// The page's file name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the disk is still there.
    pub fn state(&self) -> FileState {
        state_of(&self.file)
    }

    /// Everything at this moment.
    ///
    /// # Errors
    /// The file cannot be read or is no page of the known layout.
    pub fn read(&self) -> Result<Snapshot, ReadError> {
        let (mut bytes, mut len) = head::<PAGE_LEN>(&self.file)?;
        // The image's name is only whole if its generation was the same before and after; it changes once a resume.
        for _ in 0..8 {
            let mut after = [0; 8];
            self.file.read_exact_at(&mut after, GENERATION_AT as u64).map_err(|_| ReadError::Short)?;
            if after == bytes[GENERATION_AT..GENERATION_AT + 8] {
                break;
            }
            (bytes, len) = head::<PAGE_LEN>(&self.file)?;
        }
        parse_page(&bytes[..len]).map_err(ReadError::Page)
    }
}

/// The pages of all disks of ours on this host, by name. Those that vanish meanwhile are left out.
///
/// # Errors
/// The directory exists and cannot be listed.
pub fn disks(root: &ShmRoot) -> io::Result<Vec<DiskFile>> {
    let mut found: Vec<_> = names(&root.pages())?
        .into_iter()
        .filter(|name| !name.starts_with('.'))
        .filter_map(|name| DiskFile::open(root, &name).ok())
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Names in a directory; none when there is no such directory.
pub(crate) fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries.take(ENTRIES_MAX) {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

/// Where a virtual disk publishes its counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbdDir {
    /// Its numbers.
    pub id: VbdId,
    /// Process that serves it.
    pub pid: u32,
}

/// `<prefix><a>-<b>` with two plain numbers.
pub(crate) fn two_numbers(name: &str, prefix: &str) -> Option<VbdId> {
    let (domid, devid) = name.strip_prefix(prefix)?.split_once('-')?;
    let plain = |text: &str| -> Option<u32> {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
    };
    Some(VbdId { domid: plain(domid)?, devid: plain(devid)? })
}

/// The highest domain number that any disk of this host is published under; 0 where there is none.
///
/// # Errors
/// The root cannot be listed.
pub fn domid_max(root: &ShmRoot) -> io::Result<u32> {
    let published = names(root.path())?;
    let domids = published.iter().filter_map(|name| two_numbers(name, "vbd3-")).map(|id| id.domid);
    // Beyond are numbers with a meaning of their own (Xen's DOMID_FIRST_RESERVED).
    Ok(domids.filter(|domid| *domid < 0x7ff0).max().unwrap_or(0))
}

/// All virtual disks that publish counters, by their numbers. Where a dead process left files of the same numbers
/// behind, the youngest count.
///
/// # Errors
/// The root cannot be listed.
pub fn vbds(root: &ShmRoot) -> io::Result<Vec<VbdDir>> {
    let mut found: Vec<(VbdId, std::time::SystemTime, u32)> = Vec::new();
    for name in names(root.path())? {
        let Some(pid) = name.strip_prefix("td3-").and_then(|pid| pid.parse().ok()) else { continue };
        let dir = root.process(pid);
        let trusted = fs::symlink_metadata(&dir).is_ok_and(|found| found.is_dir() && is_ours(&found));
        if !trusted {
            continue;
        }
        // A process may end between the two listings.
        for file in names(&dir).unwrap_or_default() {
            let Some(id) = two_numbers(&file, "vbd-") else { continue };
            let Ok(made) = fs::symlink_metadata(dir.join(&file)).and_then(|found| found.modified()) else {
                continue;
            };
            match found.iter_mut().find(|(known, ..)| *known == id) {
                Some(known) if known.1 < made => *known = (id, made, pid),
                Some(_) => {}
                None => found.push((id, made, pid)),
            }
        }
    }
    let mut found: Vec<_> = found.into_iter().map(|(id, _, pid)| VbdDir { id, pid }).collect();
    found.sort_by_key(|found| found.id);
    Ok(found)
}

/// The files of one virtual disk, open for reading.
#[derive(Debug)]
pub struct VbdFiles {
    /// Numbers and process.
    pub vbd: VbdDir,
    published: File,
    ring: PathBuf,
    statistics: PathBuf,
}

impl VbdFiles {
    /// Opens them.
    ///
    /// # Errors
    /// The counters are gone or have another owner.
    pub fn open(root: &ShmRoot, vbd: &VbdDir) -> io::Result<Self> {
        let VbdId { domid, devid } = vbd.id;
        let dir = root.vbd(domid, devid);
        Ok(Self {
            vbd: vbd.clone(),
            published: open_plain(&root.process(vbd.pid).join(format!("vbd-{domid}-{devid}")))?,
            ring: dir.join("io_ring"),
            statistics: dir.join("statistics"),
        })
    }

    /// Whether the disk is still plugged.
    pub fn state(&self) -> FileState {
        state_of(&self.published)
    }

    /// The counters.
    ///
    /// # Errors
    /// The file cannot be read or is too short.
    pub fn counters(&self) -> Result<PublishedStats, ReadError> {
        let (bytes, len) = head::<PUBLISHED_LEN>(&self.published)?;
        parse_published(&bytes[..len]).ok_or(ReadError::Short)
    }

    /// Where the ring stands; `None` when the process publishes no ring.
    pub fn ring(&self) -> Option<RingState> {
        let (bytes, len) = head::<{ RING_TEXT_LEN_MAX * 2 }>(&open_plain(&self.ring).ok()?).ok()?;
        parse_ring_text(&bytes[..len])
    }

    /// The seven numbers beside the ring.
    pub fn statistics(&self) -> Option<VbdStatistics> {
        let (bytes, len) = head::<STATISTICS_LEN>(&open_plain(&self.statistics).ok()?).ok()?;
        parse_statistics(&bytes[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_pairs_of_numbers_name_a_virtual_disk() {
        assert_eq!(two_numbers("vbd-5-51728", "vbd-"), Some(VbdId { domid: 5, devid: 51728 }));
        for name in ["vbd-5", "vbd--5-1", "vbd-5-", "vbd-5-1~", "vbd-+5-1", "vdi-5-1", "vbd-5-99999999999"] {
            assert_eq!(two_numbers(name, "vbd-"), None, "{name}");
        }
    }
}
