//! Journals of changes of several steps, as volumes with a tag. sm-layout.md sections 1 and 5.
//!
//! ```text
//! inflate_<vdi>_<len>             the volume becomes longer; it had this length
//! clear_<vdi>_<len>               the same of a raw one, and what comes is not cleared yet; known here only
//! clone_<vdi>_<base>_<new>        a fork: see `fork`
//! relink_<image>_<parent>         the image's children come to stand on its parent: see `relink`
//! cbt_<vdi>_closed                a running disk is closed while its log of changed blocks changes; known here only
//! leaf_<vdi>_<parent>             the disk goes into its parent, which takes its name: see `leaf`
//! ```
//!
//! The others mean what it means to XenServer's storage manager, so that either finishes what the other began.
//! Where the
//! name would be too long for the device mapper, the value is in the volume, and the name ends with `1`.
//!
//! A volume is made with its name and its tag in one step. One with a value inside becomes a journal by its name: it is
//! filled under another one.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use tapio_types::{ApiError, SECTOR_LEN};
use uuid::Uuid;

use super::group::{Group, Listed, Volume};
use super::{names, size};
use crate::dir::facts::plain_uuid;
use crate::errors;

/// The tag of a journal.
const TAG: &str = "journaler";
/// The longest name that the device mapper takes.
const NAME_MAX: usize = 127;
/// Stands for a value that is inside.
const INSIDE: &str = "1";

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Inflate,
    Clone,
    Relink,
    Leaf,
    /// A merge that another storage manager began; its copy can be begun anew.
    Coalesce,
    /// The volume of a raw image became longer, and what came is not cleared: known here only.
    Clear,
    /// A disk is closed while its log of changed blocks changes: known here only.
    Cbt,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Inflate, Self::Clone, Self::Relink, Self::Leaf, Self::Coalesce, Self::Clear, Self::Cbt];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Inflate => "inflate",
            Self::Clone => "clone",
            Self::Relink => "relink",
            Self::Leaf => "leaf",
            Self::Coalesce => "coalesce",
            Self::Clear => "clear",
            Self::Cbt => "cbt",
        }
    }
}

/// A journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Journal {
    pub(crate) kind: Kind,
    /// What it is about.
    pub(crate) image: Uuid,
    pub(crate) value: String,
}

/// The base copy and the new VDI of a fork.
pub(crate) fn of_clone(value: &str) -> Option<(Uuid, Option<Uuid>)> {
    let (base, new) = value.split_once('_')?;
    let new = if new.is_empty() { None } else { Some(plain_uuid(new)?) };
    Some((plain_uuid(base)?, new))
}

/// The kind, the image and the value in a name.
fn parsed(name: &str) -> Option<(Kind, Uuid, &str)> {
    let (word, rest) = name.split_once('_')?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.word() == word)?;
    let (image, value) = rest.split_once('_')?;
    Some((kind, plain_uuid(image)?, value))
}

/// The value inside of a volume: its length, a blank, and it.
pub fn inside(sector: &[u8]) -> Option<String> {
    let (len, rest) = std::str::from_utf8(sector).ok()?.split_once(' ')?;
    rest.get(..len.parse().ok()?).map(str::to_owned)
}

/// A sector with a value.
fn sector_of(value: &str) -> Vec<u8> {
    let mut sector = format!("{} {value}", value.len()).into_bytes();
    sector.resize(SECTOR_LEN as usize, b' ');
    sector
}

impl Journal {
    pub(crate) fn new(kind: Kind, image: Uuid, value: impl ToString) -> Self {
        Self { kind, image, value: value.to_string() }
    }

    fn plain_name(&self, value: &str) -> String {
        format!("{}_{}_{value}", self.kind.word(), self.image)
    }

    /// The volume's name.
    fn name(&self, group: &Group) -> String {
        let name = self.plain_name(&self.value);
        if names::mapper(&group.name, &name).len() <= NAME_MAX { name } else { self.plain_name(INSIDE) }
    }

    /// Writes it, durably.
    ///
    /// # Errors
    /// 50, 54.
    pub(crate) fn write(&self, group: &Group) -> Result<(), ApiError> {
        let name = self.name(group);
        if name == self.plain_name(&self.value) {
            return group.create_away(&name, size::EXTENT, TAG);
        }
        let fresh = format!("{}-{name}", names::METADATA);
        let path = group.create(&fresh, size::EXTENT, Some(TAG))?;
        let written = File::options().write(true).open(&path).and_then(|file| {
            file.write_all_at(&sector_of(&self.value), 0)?;
            file.sync_all()
        });
        let done = written
            .map_err(|error| errors::io(54, "cannot write the journal", &path, &error))
            .and_then(|()| group.rename(&fresh, &name));
        if done.is_err() {
            let _ = group.remove(&[&fresh]);
        }
        done
    }

    /// The volume's name, and the command that writes it; none where its value is inside.
    pub(crate) fn line(&self, group: &Group) -> Option<(String, Vec<String>)> {
        let name = self.name(group);
        let is_plain = name == self.plain_name(&self.value);
        is_plain.then(|| (name.clone(), group.line_create_away(&name, size::EXTENT, TAG)))
    }

    /// Removes it.
    ///
    /// # Errors
    /// 51.
    pub(crate) fn remove(&self, group: &Group) -> Result<(), ApiError> {
        group.remove(&[&self.name(group)])
    }

    /// Removes several at once.
    ///
    /// # Errors
    /// 51.
    pub(crate) fn remove_all(group: &Group, all: &[Self]) -> Result<(), ApiError> {
        let names: Vec<String> = all.iter().map(|journal| journal.name(group)).collect();
        group.remove(&names.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// Journals that were begun and are none yet: nothing of what they announce was.
pub(crate) fn unfinished(listed: &Listed) -> Vec<String> {
    let prefix = format!("{}-", names::METADATA);
    let is = |name: &&String| name.strip_prefix(&prefix).is_some_and(|name| parsed(name).is_some());
    listed.volumes.keys().filter(is).cloned().collect()
}

/// Whether there is one.
pub(crate) fn any(listed: &Listed) -> bool {
    listed.volumes.values().any(|volume| volume.tags.iter().any(|tag| tag == TAG))
}

/// Whether a volume is one.
pub(super) fn is(volume: &Volume) -> bool {
    volume.tags.iter().any(|tag| tag == TAG)
}

/// The name of a journal when its image is called otherwise; none where its value leads to others.
pub(super) fn of_another(name: &str, image: impl FnOnce(Uuid) -> Uuid) -> Option<String> {
    let (kind, old, value) = parsed(name)?;
    let is_plain =
        matches!(kind, Kind::Inflate | Kind::Clear) && value.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| Journal::new(kind, image(old), value).plain_name(value))
}

/// The journals of a group.
///
/// # Errors
/// 117: one with its value inside cannot be read.
pub(crate) fn all(group: &Group, listed: &Listed) -> Result<Vec<Journal>, ApiError> {
    let mut found = Vec::new();
    for volume in listed.volumes.values().filter(|volume| volume.tags.iter().any(|tag| tag == TAG)) {
        let Some((kind, image, value)) = parsed(&volume.name) else { continue };
        let value = if value == INSIDE && !matches!(kind, Kind::Inflate | Kind::Clear) {
            read(group, &volume.name)?
        } else {
            value.to_owned()
        };
        found.push(Journal { kind, image, value });
    }
    Ok(found)
}

fn read(group: &Group, name: &str) -> Result<String, ApiError> {
    group.activate([name].into_iter())?;
    let path = group.path(name);
    let mut sector = [0; SECTOR_LEN as usize];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut sector));
    let read = read.map_err(|error| errors::io(117, "cannot read the journal", &path, &error));
    let _ = group.deactivate([name].into_iter());
    read?;
    inside(&sector)
        .ok_or_else(|| errors::fail(117, format_args!("the journal {} holds no value", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_of_journals_come_back() {
        let group = Group::of(Uuid::from_u128(1));
        let (vdi, base, new) = (Uuid::from_u128(2), Uuid::from_u128(3), Uuid::from_u128(4));
        let short = Journal::new(Kind::Inflate, vdi, 8 << 20);
        assert_eq!(parsed(&short.name(&group)), Some((Kind::Inflate, vdi, "8388608")));
        let long = Journal::new(Kind::Clone, vdi, format!("{base}_{new}"));
        assert_eq!(parsed(&long.name(&group)), Some((Kind::Clone, vdi, "1")));
        assert_eq!(inside(&sector_of(&long.value)).as_deref(), Some(long.value.as_str()));
        assert_eq!(of_clone(&long.value), Some((base, Some(new))));
        assert_eq!(of_clone(&format!("{base}_")), Some((base, None)));
        for bad in ["", "_", "x_", &base.to_string(), &format!("{base}_x")] {
            assert_eq!(of_clone(bad), None, "{bad}");
        }
        for bad in [&b""[..], b"5", b"9 short", b"x y", b"\xff 1"] {
            assert_eq!(inside(bad), None, "{bad:?}");
        }
        for name in [&short, &long].map(|journal| names::mapper(&group.name, &journal.name(&group))) {
            assert!(name.len() <= NAME_MAX, "{name}");
        }
    }
}
