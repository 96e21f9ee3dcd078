//! Journals of merges: `<kind>_<image>`, under the names that XenServer's storage manager gives its own.
//! sm-layout.md section 6.
//!
//! ```text
//! coalesce_<image> = <parent>    the parent becomes larger, disks above the image are closed
//! relink_<image>   = <parent>    the parent has all that the image has; the image's children come to stand on it
//! leaf_<vdi>       = <parent>    the disk is closed and goes into the parent, which takes its name
//! ```
//!
//! Each means there what it means here, so an SR that moves to XenServer is put in order by it. A second line tells
//! ours from those that only the other storage manager can finish.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use uuid::Uuid;

use super::facts::plain_uuid;
use crate::mount::sync_directory;

/// A journal longer than this is none of ours.
const LEN_MAX: u64 = 4096;
/// The second line of ours.
const SIGN: &str = "tapio";

/// What a merge is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeKind {
    /// The parent becomes larger.
    Grow,
    /// Children of the image come to stand on its parent.
    Relink,
    /// A disk goes into its parent.
    Leaf,
}

impl MergeKind {
    const ALL: [Self; 3] = [Self::Grow, Self::Relink, Self::Leaf];

    const fn word(self) -> &'static str {
        match self {
            Self::Grow => "coalesce",
            Self::Relink => "relink",
            Self::Leaf => "leaf",
        }
    }
}

/// An unfinished merge of an image into its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeJournal {
    /// What it is at.
    pub kind: MergeKind,
    /// The image that goes.
    pub image: Uuid,
    /// The one that it goes into.
    pub parent: Uuid,
}

/// A file that has the name of such a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Ours, whole.
    Ours(MergeJournal),
    /// It was being written when its writer died: nothing had begun.
    NotWhole,
    /// Another storage manager's, which must finish it.
    Foreign,
}

/// The image whose merge a file of this name is about.
pub(crate) fn image_of(name: &str) -> Option<Uuid> {
    kind_of(name).map(|(_, image)| image)
}

fn kind_of(name: &str) -> Option<(MergeKind, Uuid)> {
    let (word, image) = name.split_once('_')?;
    let kind = MergeKind::ALL.into_iter().find(|kind| kind.word() == word)?;
    Some((kind, plain_uuid(image)?))
}

impl MergeJournal {
    /// The file's name.
    pub fn file_name(&self) -> String {
        format!("{}_{}", self.kind.word(), self.image)
    }

    /// The file's content.
    pub fn encode(&self) -> String {
        format!("{}\n{SIGN}\n", self.parent)
    }

    /// What a file of this name and content is; none where the name is of something else.
    pub fn decode(name: &str, content: &[u8]) -> Option<Found> {
        let (kind, image) = kind_of(name)?;
        // A power cut leaves a file without bytes, or with zeros.
        if content.iter().all(|&byte| byte == 0) {
            return Some(Found::NotWhole);
        }
        let ours = || {
            let (parent, rest) = std::str::from_utf8(content).ok()?.split_once('\n')?;
            let parent = plain_uuid(parent).filter(|parent| *parent != image)?;
            (rest == format!("{SIGN}\n")).then_some(Self { kind, image, parent })
        };
        Some(ours().map_or(Found::Foreign, Found::Ours))
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
}

/// Reads the file of this name; none where it is gone, or is of something else.
pub(crate) fn read(directory: &Path, name: &str) -> io::Result<Option<Found>> {
    let mut content = Vec::new();
    let file = match File::open(directory.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    file.take(LEN_MAX).read_to_end(&mut content)?;
    Ok(MergeJournal::decode(name, &content))
}

/// The journals of this image that are there, by name. One that cannot be read counts as another storage manager's.
pub(crate) fn of_image(directory: &Path, image: Uuid) -> impl Iterator<Item = (String, Found)> {
    MergeKind::ALL.into_iter().filter_map(move |kind| {
        let name = format!("{}_{image}", kind.word());
        let found = read(directory, &name).unwrap_or(Some(Found::Foreign));
        found.map(|found| (name, found))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_comes_back_and_one_that_was_cut_off_is_none_of_ours() {
        let dir = tempfile::tempdir().unwrap();
        let (image, parent) = (Uuid::from_u128(1), Uuid::from_u128(2));
        for kind in MergeKind::ALL {
            let journal = MergeJournal { kind, image, parent };
            journal.write(dir.path()).unwrap();
            assert!(journal.write(dir.path()).is_err(), "one at a time");
            let name = journal.file_name();
            assert_eq!(read(dir.path(), &name).unwrap(), Some(Found::Ours(journal)));
            assert_eq!(
                of_image(dir.path(), image).collect::<Vec<_>>(),
                [(name.clone(), Found::Ours(journal))]
            );
            assert_eq!(image_of(&name), Some(image));
            let whole = journal.encode();
            for len in 1..whole.len() {
                assert_eq!(
                    MergeJournal::decode(&name, &whole.as_bytes()[..len]),
                    Some(Found::Foreign),
                    "{len}"
                );
            }
            for empty in [&[][..], &[0; 43]] {
                assert_eq!(MergeJournal::decode(&name, empty), Some(Found::NotWhole));
            }
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        let same = MergeJournal { kind: MergeKind::Leaf, image, parent: image };
        for (content, what) in
            [("1\n", "sm's relink"), (&same.encode(), "into itself"), ("x\ntapio\n", "no UUID")]
        {
            assert_eq!(
                MergeJournal::decode(&same.file_name(), content.as_bytes()),
                Some(Found::Foreign),
                "{what}"
            );
        }
        assert_eq!(MergeJournal::decode("leaf_x", b"1\n"), None);
        assert_eq!(MergeJournal::decode(&format!("clone_{image}"), b"1\n"), None);
    }
}
