//! A note about a device that outlives its process, so that the next process of the same disk finds it: one small file
//! in the directory of devices, written whole or not at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// The device's number: `/dev/ublkbN`, `/dev/nbdN`.
    pub device: u32,
    /// Bytes of the disk.
    pub len: u64,
    /// The process that serves it: see [`super::stale::own_name`].
    pub owner: String,
    /// What tells the device from another that got its number: the name of the process that made it.
    pub token: String,
    /// The disk, by its serial number: whose requests wait must not be answered by another disk.
    pub disk: String,
}

/// Where a note is.
#[derive(Clone, Debug)]
pub(super) struct Place(PathBuf);

impl Place {
    /// The note about the device of `kind` of disk `minor`.
    pub(super) fn new(dir: &Path, kind: &str, minor: u16) -> Self {
        Self(dir.join(format!("{kind}.{minor}")))
    }

    /// The note, if there is one that can be read.
    pub(super) fn read(&self) -> Option<Note> {
        let text = fs::read_to_string(&self.0).ok()?;
        let mut fields = text.strip_suffix('\n')?.splitn(5, ' ');
        Some(Note {
            device: fields.next()?.parse().ok()?,
            len: fields.next()?.parse().ok()?,
            owner: fields.next()?.to_owned(),
            token: fields.next()?.to_owned(),
            disk: fields.next()?.to_owned(),
        })
    }

    /// Writes it anew.
    pub(super) fn write(&self, note: &Note) -> io::Result<()> {
        if let Some(dir) = self.0.parent() {
            fs::create_dir_all(dir)?;
        }
        let fresh = self.0.with_extension("new");
        let disk = note.disk.replace(char::is_control, " ");
        let Note { device, len, owner, token, .. } = note;
        fs::write(&fresh, format!("{device} {len} {owner} {token} {disk}\n"))?;
        fs::rename(&fresh, &self.0)
    }

    /// Removes it.
    pub(super) fn remove(&self) {
        // One that stays names a device that is gone, which the next process notices.
        let _ = fs::remove_file(&self.0);
    }

    /// Every note of `kind` in `dir`.
    pub(super) fn all(dir: &Path, kind: &str) -> Vec<(Self, Note)> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        let is_note = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let minor = name.strip_prefix(kind).and_then(|rest| rest.strip_prefix('.'));
            minor.is_some_and(|minor| minor.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let places = entries.flatten().map(|entry| entry.path()).filter(|path| is_note(path)).map(Self);
        places.filter_map(|place| place.read().map(|note| (place, note))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_and_nonsense_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path(), "ublk", 3);
        assert_eq!(place.read(), None);
        let (owner, token) = ("7-8.3".to_string(), "5-6.3".to_string());
        let note = Note { device: 7, len: 1 << 30, owner, token, disk: "a disk\nwith lines".into() };
        place.write(&note).unwrap();
        let kept = Note { disk: "a disk with lines".into(), ..note };
        assert_eq!(place.read().as_ref(), Some(&kept));
        fs::write(dir.path().join("ublk.9"), "7 x 1-1.1 1-1.1 y\n").unwrap();
        fs::write(dir.path().join("ublk.10"), "7 4096 1-1.1 1-1.1 torn").unwrap();
        fs::write(dir.path().join("ublkx.1"), "7 4096 1-1.1 1-1.1 y\n").unwrap();
        assert_eq!(
            Place::all(dir.path(), "ublk").into_iter().map(|(_, note)| note).collect::<Vec<_>>(),
            [kept]
        );
        place.remove();
        assert_eq!(place.read(), None);
    }
}
