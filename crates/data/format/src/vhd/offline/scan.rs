//! What a list of images says about each of them.

use std::path::{Path, PathBuf};

use tapio_types::{Access, Span};

use super::image::{Image, OpenOptions};
use super::parent::{resolve_parent, unresolved_parent};
use crate::error::{FormatError, corrupt, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::{BatmapHeader, DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, KeyHash, batmap};

/// One image in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanEntry {
    /// Virtual size in bytes.
    pub capacity: u64,
    /// Length of the file or device in bytes.
    pub size: u64,
    /// The hidden flag.
    pub hidden: u8,
    /// The marker.
    pub marker: u8,
    /// The key of an encrypted image.
    pub key_hash: KeyHash,
    /// The parent: its path where it was looked for, else what the image says.
    pub parent: Option<PathBuf>,
    /// Whether the parent is raw.
    pub raw_parent: bool,
}

/// Why an image cannot be listed, and at which step.
#[derive(Clone, Debug)]
pub struct ScanFailure {
    /// The step, in the words that XenServer's tools print.
    pub step: &'static str,
    /// The failure.
    pub error: FormatError,
}

/// Looks at one image. With `fast` the parent is what the header calls it and is not looked for.
///
/// # Errors
/// The step that failed and why. A parent that is not there is no failure: its recorded path is given.
pub fn scan_image(path: &Path, fast: bool) -> Result<ScanEntry, ScanFailure> {
    let failed = |step| move |error| ScanFailure { step, error };
    let medium = FileMedium::open(path, Access::ReadOnly).map_err(failed("opening file"))?;
    let size = medium
        .len()
        .map_err(|error| FormatError::io("cannot find the length", error).with_path(path))
        .map_err(failed("getting physical size"))?;
    let image = Image::open_on(medium, path, OpenOptions::LOOK).map_err(failed("opening file"))?;
    let parent = match image.footer().disk_type {
        DiskType::Differencing => Some(parent_of(&image, fast).map_err(failed("getting parent"))?),
        _ => None,
    };
    let batmap = image.batmap();
    Ok(ScanEntry {
        capacity: image.virtual_len(),
        size,
        hidden: image.footer().hidden,
        marker: batmap.map_or(0, |batmap| batmap.header.marker),
        key_hash: batmap.map_or_else(KeyHash::default, |batmap| batmap.header.key_hash),
        parent,
        raw_parent: image.has_raw_parent(),
    })
}

fn parent_of(image: &Image<FileMedium>, fast: bool) -> Result<PathBuf, FormatError> {
    if fast {
        if let Some(name) = image.parent_name() {
            return Ok(PathBuf::from(name));
        }
    } else if let Ok(link) = resolve_parent(image)
        && let Some(path) = link.path()
    {
        return Ok(path.to_path_buf());
    }
    unresolved_parent(image).map(PathBuf::from)
}

/// Looks at an image in a logical volume that need not be active: at the copies of footer and header at the start of
/// the volume's first segment, `segment_len` bytes at `start` of a physical volume. The parent is the name on record.
///
/// # Errors
/// The step that failed and why.
pub fn scan_volume<M: Medium>(
    medium: &M,
    start: u64,
    segment_len: u64,
    volume_len: u64,
) -> Result<ScanEntry, ScanFailure> {
    let failed = |step| move |error| ScanFailure { step, error };
    if segment_len < 4096 {
        return Err(failed("device too small")(invalid(
            "a VHD does not fit a segment of less than 4096 bytes",
        )));
    }
    let read = |at: u64, into: &mut [u8]| {
        if !Span::new(at, into.len() as u64).fits(segment_len) {
            return Err(corrupt(format!("byte {at} lies outside of the volume's first segment")));
        }
        let at = start.saturating_add(at);
        medium.read_at(at, into).map_err(|error| FormatError::io("cannot read", error).with_offset(at))
    };
    let mut bytes = [0; FOOTER_LEN];
    read(0, &mut bytes).map_err(failed("reading headers"))?;
    let (footer, _) = Footer::decode(&bytes).map_err(failed("invalid footer"))?;
    let mut entry = ScanEntry {
        capacity: footer.current_len,
        size: volume_len,
        hidden: footer.hidden,
        marker: 0,
        key_hash: KeyHash::default(),
        parent: None,
        raw_parent: false,
    };
    if !footer.disk_type.is_dynamic() {
        return Ok(entry);
    }
    let mut bytes = [0; HEADER_LEN];
    read(footer.data_offset, &mut bytes).map_err(failed("reading header"))?;
    let header = Header::decode(&bytes).map_err(failed("reading header"))?;
    if footer.disk_type == DiskType::Differencing {
        let name = header.parent_name().filter(|name| !name.is_empty());
        let name =
            name.ok_or_else(|| failed("getting parent")(corrupt("the parent's name cannot be read")))?;
        entry.parent = Some(PathBuf::from(volume_of(&name)));
        entry.raw_parent = header.parent_uuid.is_nil();
    }
    let mut bytes = [0; batmap::HEADER_LEN];
    if footer.may_have_batmap()
        && read(batmap::header_offset(&header), &mut bytes).is_ok()
        && let Ok(batmap) = BatmapHeader::decode(&bytes, &header)
    {
        entry.marker = batmap.marker;
        entry.key_hash = batmap.key_hash;
    }
    Ok(entry)
}

/// The volume's own name in the device mapper's name for it: single dashes part group and volume, double ones are
/// one. A name without a single dash is a volume's name already.
fn volume_of(name: &str) -> String {
    const DASH: char = '\u{0}';
    let single = name.replace("--", &DASH.to_string());
    match single.rsplit_once('-') {
        // `VHD-<uuid>` has single dashes only: it is no mapped name.
        Some((_, volume)) if single.contains(DASH) => volume.replace(DASH, "-"),
        _ => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_names_give_the_volume() {
        assert_eq!(volume_of("VG_XenStorage--1--2-VHD--3--4"), "VHD-3-4");
        assert_eq!(volume_of("VHD-3-4"), "VHD-3-4");
        assert_eq!(volume_of("plain"), "plain");
    }
}
