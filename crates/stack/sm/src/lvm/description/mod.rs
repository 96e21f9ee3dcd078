//! What LVM's own description says is in a group, read from the devices themselves: a millisecond in place of the tens
//! to hundreds that a program of LVM takes.
//!
//! LVM writes a new description beside the one in force, and then the sector that says where the one in force is, with
//! checksums of both. So what is read here is whole and in force, or it is refused. Everything that is not plain is
//! refused too: a group whose devices are not all known or disagree, volumes that are more than pieces of devices, a
//! state or a flag that is not known here. The caller asks LVM then.
//!
//! It says nothing of the kernel: whether a volume is reachable on this host, or open.

mod area;
mod text;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tapio_format::PageBuffer;

use super::group::{Group, Listed, Segment, Volume};
use super::resign::label::{Id, id_of};
use crate::dir::facts::ReadAt;
use area::Described;
use text::{Section, Value};

/// LVM's sizes are in sectors of so many bytes.
const SECTOR: u64 = 512;
/// Reads past the page cache begin and end on a multiple of this.
const ALIGN: u64 = 4096;

/// A device, past the page cache: another host may have written it.
struct Direct(File);

impl Direct {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = libc::O_DIRECT | libc::O_CLOEXEC;
        Ok(Self(OpenOptions::new().read(true).custom_flags(flags).open(path)?))
    }
}

impl ReadAt for Direct {
    fn read_at_once(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let (from, within) = (at / ALIGN * ALIGN, (at % ALIGN) as usize);
        let mut buffer = PageBuffer::new((within + into.len()).next_multiple_of(ALIGN as usize));
        self.0.read_exact_at(&mut buffer, from)?;
        into.copy_from_slice(&buffer[within..within + into.len()]);
        Ok(())
    }
}

/// What is in a group, read from its devices without a program of LVM, and without what the kernel knows. None where
/// LVM has to be asked. The SR's lock is held.
pub(super) fn of(group: &Group) -> Option<Listed> {
    #[cfg(feature = "doubles")]
    if super::double::is_there() {
        return None;
    }
    match read(&group.names(), &group.name) {
        Ok(listed) => Some(listed),
        Err(why) => {
            tracing::debug!("{}: LVM is asked what is in it: {why}", group.name);
            None
        }
    }
}

/// What is in a group, by the descriptions on all of its devices. No volume looks reachable or open.
///
/// # Errors
/// A sentence: why LVM has to be asked.
fn read(devices: &[String], group: &str) -> Result<Listed, String> {
    let mut found = Vec::new();
    for name in devices {
        let failed = |why: String| format!("{name}: {why}");
        let device = Direct::open(Path::new(name)).map_err(|error| failed(error.to_string()))?;
        found.push((name.as_str(), area::read(&device).map_err(failed)?));
    }
    merged(&found, group)
}

/// The one description of all devices.
fn merged(found: &[(&str, Described)], group: &str) -> Result<Listed, String> {
    let mut texts = found.iter().filter_map(|(_, described)| described.text.as_deref());
    let said = texts.next().ok_or("no device has a description")?;
    if texts.any(|other| other != said) {
        return Err("the descriptions on its devices differ".into());
    }
    let said = std::str::from_utf8(said).map_err(|error| error.to_string())?;
    let names = found.iter().map(|(name, described)| (described.id, *name)).collect();
    listed(&text::parse(said)?, group, &names)
}

/// Refuses words that are not among `known`.
fn check_words(words: &[&str], known: &[&str], what: &str) -> Result<(), String> {
    match words.iter().find(|word| !known.contains(word)) {
        Some(word) => Err(format!("{what} is {word}")),
        None => Ok(()),
    }
}

/// A device of the group.
struct Member<'a> {
    name: &'a str,
    /// The first byte of its extents.
    start: u64,
    extents: u64,
}

fn members<'a>(
    group: &Section<'a>,
    names: &BTreeMap<Id, &'a str>,
) -> Result<BTreeMap<&'a str, Member<'a>>, String> {
    let mut members = BTreeMap::new();
    for (name, said) in &group.section("physical_volumes")?.sections {
        let id = said.text("id")?;
        let device = id_of(id).and_then(|id| names.get(&id)).ok_or(format!("device {id} is not known"))?;
        check_words(&said.texts("flags")?, &[], "a device")?;
        if said.texts("status")? != ["ALLOCATABLE"] {
            return Err(format!("{device} takes no volumes"));
        }
        let start = said.number("pe_start")?.checked_mul(SECTOR).ok_or("a device begins nowhere")?;
        members.insert(*name, Member { name: device, start, extents: said.number("pe_count")? });
    }
    if members.len() != names.len() {
        return Err("a device is not one of the group".into());
    }
    Ok(members)
}

fn segment(said: &Section<'_>, extent: u64, members: &BTreeMap<&str, Member<'_>>) -> Result<Segment, String> {
    if said.text("type")? != "striped" || said.number("stripe_count")? != 1 {
        return Err("a volume is no plain one".into());
    }
    let [Value::Text(device), Value::Number(first)] = said.list("stripes")? else {
        return Err("a volume lies nowhere".into());
    };
    let member = members.get(device.as_str()).ok_or("a volume lies on another device")?;
    let count = said.number("extent_count")?;
    if first.checked_add(count).is_none_or(|end| end > member.extents) {
        return Err("a volume lies behind the end of its device".into());
    }
    let bytes = |extents: u64| extents.checked_mul(extent).ok_or("a volume is too long");
    let at = member.start.checked_add(bytes(*first)?).ok_or("a volume lies nowhere")?;
    Ok(Segment {
        start: bytes(said.number("start_extent")?)?,
        len: bytes(count)?,
        place: Some((PathBuf::from(member.name), at)),
    })
}

fn volume(
    (name, said): (&str, &Section<'_>),
    extent: u64,
    members: &BTreeMap<&str, Member<'_>>,
) -> Result<Volume, String> {
    if name.starts_with(['-', '.']) || name.contains('/') {
        return Err(format!("'{name}' is no name of a volume"));
    }
    let status = said.texts("status")?;
    check_words(&status, &["READ", "WRITE", "VISIBLE"], name)?;
    check_words(&said.texts("flags")?, &[], name)?;
    if !status.contains(&"VISIBLE") {
        return Err(format!("{name} is a part of another volume"));
    }
    let mut segments = Vec::new();
    for (_, said) in &said.sections {
        segments.push(segment(said, extent, members)?);
    }
    segments.sort_by_key(|segment| segment.start);
    let mut size = 0_u64;
    for segment in &segments {
        if segment.start != size {
            return Err(format!("a part of {name} is missing"));
        }
        size = size.checked_add(segment.len).ok_or("a volume is too long")?;
    }
    if segments.is_empty() || said.number("segment_count")? != segments.len() as u64 {
        return Err(format!("a part of {name} is missing"));
    }
    let mut tags: Vec<String> = said.texts("tags")?.into_iter().map(str::to_owned).collect();
    // As LVM prints them.
    tags.sort();
    Ok(Volume {
        name: name.to_owned(),
        uuid: said.text("id")?.to_owned(),
        size,
        tags,
        is_active: false,
        is_open: false,
        is_writable: status.contains(&"WRITE"),
        segments,
    })
}

/// What a description says; `names` are the devices that were found, by their UUIDs.
fn listed(root: &Section<'_>, name: &str, names: &BTreeMap<Id, &str>) -> Result<Listed, String> {
    let group = root.section(name)?;
    check_words(&group.texts("status")?, &["RESIZEABLE", "READ", "WRITE"], "the group")?;
    check_words(&group.texts("flags")?, &[], "the group")?;
    let sections: Vec<&str> = group.sections.iter().map(|(name, _)| *name).collect();
    check_words(&sections, &["physical_volumes", "logical_volumes"], "a part of the group")?;
    let extent = group.number("extent_size")?.checked_mul(SECTOR).ok_or("its extents are too long")?;
    let members = members(group, names)?;
    let extents = members.values().try_fold(0_u64, |sum, member| sum.checked_add(member.extents));
    let size = extents.and_then(|extents| extents.checked_mul(extent)).ok_or("the group is too large")?;
    let mut volumes = BTreeMap::new();
    let mut used = 0_u64;
    // A group without volumes has no such section.
    if sections.contains(&"logical_volumes") {
        for (name, said) in &group.section("logical_volumes")?.sections {
            let volume = volume((*name, said), extent, &members)?;
            used = used.checked_add(volume.size).ok_or("its volumes are too long")?;
            if volumes.insert(volume.name.clone(), volume).is_some() {
                return Err(format!("two volumes are called {name}"));
            }
        }
    }
    let free = size.checked_sub(used).ok_or("its volumes are longer than its devices")?;
    Ok(Listed { size, free, volumes })
}

/// What the first bytes of a device say, and a description; for tests with bytes of others.
#[doc(hidden)]
pub fn check_bytes(bytes: &[u8]) {
    struct Bytes<'a>(&'a [u8]);
    impl ReadAt for Bytes<'_> {
        fn read_at_once(&self, into: &mut [u8], at: u64) -> io::Result<()> {
            let from = usize::try_from(at).ok().filter(|at| *at <= self.0.len());
            let found = from.and_then(|from| self.0[from..].get(..into.len()));
            into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }
    let _ = area::read(&Bytes(bytes));
    let _ = area::read(&Bytes(&area::with_checksums(bytes)));
    let said = String::from_utf8_lossy(bytes);
    let Ok(root) = text::parse(&said) else { return };
    for (name, group) in &root.sections {
        let devices = group.section("physical_volumes").map_or(&[][..], |devices| &devices.sections);
        let ids = devices.iter().filter_map(|(name, device)| Some((id_of(device.text("id").ok()?)?, *name)));
        if let Ok(listed) = listed(&root, name, &ids.collect()) {
            let used = listed.volumes.values().fold(0, |sum, volume| sum + volume.size);
            assert_eq!(used + listed.free, listed.size, "what is used and what is free");
        }
    }
}

#[cfg(test)]
mod tests;
