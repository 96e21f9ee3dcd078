//! Journals of changes of several steps, as files of the SR's directory: `<type>_<uuid>`, the value in the first line.
//! sm-layout.md sections 1 and 5.
//!
//! A journal is whole and durable before the first step of what it announces, and goes after the last. One that
//! cannot be read was being written when its writer died: nothing had begun.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use uuid::Uuid;

use super::facts::{FileKind, plain_uuid};
use super::merge_journal::{self, Found};
use crate::mount::sync_directory;

/// A journal longer than this is none.
const LEN_MAX: u64 = 4096;
/// What a fork is called in a journal's name.
const CLONE: &str = "clone";
/// What a change of a log of changed blocks is called in a journal's name.
const CBT: &str = "cbt";
/// Behind the UUID in the name of a log of changed blocks.
const LOG: &str = ".cbtlog";

/// An unfinished fork: `clone_<vdi>` holds `<base>_<new>`, or `<base>` alone where nothing new is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneJournal {
    /// The VDI that is forked.
    pub vdi: Uuid,
    /// Its base copy.
    pub base: Uuid,
    /// The new VDI.
    pub new: Option<Uuid>,
}

impl CloneJournal {
    /// The file's name.
    pub fn file_name(&self) -> String {
        format!("{CLONE}_{}", self.vdi)
    }

    /// The file's content.
    pub fn encode(&self) -> String {
        match self.new {
            Some(new) => format!("{}_{new}\n", self.base),
            None => format!("{}\n", self.base),
        }
    }

    /// From a file's name and content; none where that is no whole journal.
    pub fn decode(name: &str, content: &[u8]) -> Option<Self> {
        let vdi = plain_uuid(name.strip_prefix(CLONE)?.strip_prefix('_')?)?;
        // Without the end of the line it may have been cut off.
        let end = content.iter().position(|&byte| byte == b'\n')?;
        let value = std::str::from_utf8(&content[..end]).ok()?;
        let (base, new) = match value.split_once('_') {
            Some((base, new)) => (base, Some(plain_uuid(new)?)),
            None => (value, None),
        };
        let base = plain_uuid(base)?;
        (base != vdi && new != Some(vdi) && new != Some(base)).then_some(Self { vdi, base, new })
    }

    /// Writes it, durable with its name.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let path = directory.join(self.file_name());
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .and_then(|mut file| file.write_all(self.encode().as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| sync_directory(directory));
        if let Err(error) = &written
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            let _ = std::fs::remove_file(&path);
        }
        written
    }

    /// Removes it, durably.
    pub(crate) fn remove(&self, directory: &Path) -> io::Result<()> {
        std::fs::remove_file(directory.join(self.file_name()))?;
        sync_directory(directory)
    }

    /// Reads the one of this name. Outer error: the system's; none: it is not whole.
    pub(crate) fn read(directory: &Path, name: &str) -> io::Result<Option<Self>> {
        let mut content = Vec::new();
        File::open(directory.join(name))?.take(LEN_MAX).read_to_end(&mut content)?;
        Ok(Self::decode(name, &content))
    }
}

/// What a name in the directory stands for that changes leave behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// A fork's journal.
    Clone,
    /// The journal of a merge of this image: ours, or another storage manager's.
    Merge(Uuid),
    /// A resize's journal, beside the image of this VDI.
    Resize(Uuid),
    /// A fork's leaf that did not get its name.
    NewLeaf(Uuid),
    /// The journal of a change of a VDI's log of changed blocks, while a running disk is closed.
    Cbt(Uuid),
    /// A log of changed blocks that did not get its name.
    NewLog,
    /// A file that its maker, of this process number, had not finished.
    Partial(u32),
    /// The same for a raw image, whose makers hold the SR's lock.
    PartialRaw,
}

/// The name of a fork's leaf before it gets its own.
pub(crate) fn new_leaf_name(vdi: Uuid) -> String {
    format!("{vdi}.vhd.new")
}

/// The name of a VDI's log of changed blocks.
pub(crate) fn log_name(vdi: Uuid) -> String {
    format!("{vdi}{LOG}")
}

/// The VDI whose log of changed blocks has this name.
pub(crate) fn log_of_file(name: &str) -> Option<Uuid> {
    plain_uuid(name.strip_suffix(LOG)?)
}

/// The name of a log of changed blocks before it gets its own.
pub(crate) fn new_log_name(vdi: Uuid) -> String {
    format!("{vdi}{LOG}.new")
}

/// The journal of a change of a VDI's log of changed blocks.
pub(crate) fn cbt_journal_name(vdi: Uuid) -> String {
    format!("{CBT}_{vdi}")
}

/// The name of a raw image before it gets its own.
pub(crate) fn partial_raw_name(vdi: Uuid) -> String {
    format!(".{vdi}.raw.partial")
}

/// What the name stands for.
pub(crate) fn leftover(name: &str) -> Option<Leftover> {
    if let Some((kind, uuid)) = name.split_once('_') {
        if kind == CLONE {
            return plain_uuid(uuid).map(|_| Leftover::Clone);
        }
        if kind == CBT {
            return plain_uuid(uuid).map(Leftover::Cbt);
        }
        if let Some(image) = merge_journal::image_of(name) {
            return Some(Leftover::Merge(image));
        }
    }
    if let Some(image) = name.strip_suffix(".resize-journal") {
        return FileKind::of_file(image)
            .filter(|(_, kind)| *kind == FileKind::Vhd)
            .map(|(vdi, _)| Leftover::Resize(vdi));
    }
    if let Some(vdi) = name.strip_suffix(".vhd.new") {
        return plain_uuid(vdi).map(Leftover::NewLeaf);
    }
    if let Some(vdi) = name.strip_suffix(".cbtlog.new") {
        return plain_uuid(vdi).map(|_| Leftover::NewLog);
    }
    let hidden = name.strip_prefix('.')?.strip_suffix(".partial")?;
    if let Some(vdi) = hidden.strip_suffix(".raw") {
        return plain_uuid(vdi).map(|_| Leftover::PartialRaw);
    }
    let (process, number) = hidden.strip_prefix("vhd-")?.split_once('-')?;
    number.parse::<u32>().ok()?;
    process.parse().ok().map(Leftover::Partial)
}

/// Whether the name is one that changes leave behind.
pub(crate) fn is_leftover(name: &str) -> bool {
    leftover(name).is_some()
}

/// The journal that another storage manager left of this VDI.
pub(super) fn foreign_journal(directory: &Path, vdi: Uuid) -> Option<String> {
    merge_journal::of_image(directory, vdi).find(|(_, found)| *found == Found::Foreign).map(|(name, _)| name)
}

/// Why a VDI with such a journal cannot be used.
pub(super) fn unfinished(journal: &str) -> String {
    format!(
        "a merge by another storage manager was broken off ('{journal}'): attach the SR there once to finish it"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let (vdi, base, new) = (Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3));
        for new in [None, Some(new)] {
            let journal = CloneJournal { vdi, base, new };
            journal.write(dir.path()).unwrap();
            assert!(journal.write(dir.path()).is_err(), "one at a time");
            assert_eq!(CloneJournal::read(dir.path(), &journal.file_name()).unwrap(), Some(journal));
            journal.remove(dir.path()).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn one_that_was_cut_off_is_none() {
        let journal =
            CloneJournal { vdi: Uuid::from_u128(1), base: Uuid::from_u128(2), new: Some(Uuid::from_u128(3)) };
        let whole = journal.encode();
        for len in 0..whole.len() {
            assert_eq!(CloneJournal::decode(&journal.file_name(), &whole.as_bytes()[..len]), None, "{len}");
        }
        let same = format!("{0}_{0}\n", journal.base);
        assert_eq!(CloneJournal::decode(&journal.file_name(), same.as_bytes()), None);
        assert_eq!(CloneJournal::decode("clone_x", whole.as_bytes()), None);
    }

    #[test]
    fn names_of_leftovers_are_known() {
        let vdi = Uuid::from_u128(5);
        assert_eq!(leftover(&format!("clone_{vdi}")), Some(Leftover::Clone));
        assert_eq!(leftover(&format!("leaf_{vdi}")), Some(Leftover::Merge(vdi)));
        assert_eq!(leftover(&format!("{vdi}.vhd.resize-journal")), Some(Leftover::Resize(vdi)));
        assert_eq!(leftover(&new_leaf_name(vdi)), Some(Leftover::NewLeaf(vdi)));
        assert_eq!(leftover(&cbt_journal_name(vdi)), Some(Leftover::Cbt(vdi)));
        assert_eq!(leftover(&new_log_name(vdi)), Some(Leftover::NewLog));
        assert_eq!((leftover(&log_name(vdi)), log_of_file(&log_name(vdi))), (None, Some(vdi)));
        assert_eq!(leftover(&partial_raw_name(vdi)), Some(Leftover::PartialRaw));
        assert_eq!(leftover(".vhd-12-3.partial"), Some(Leftover::Partial(12)));
        for other in ["clone_x", "leaf_", ".vhd-a-3.partial", ".partial", "notes.partial", "x.vhd.new", "_"] {
            assert_eq!(leftover(other), None, "{other}");
        }
    }
}
