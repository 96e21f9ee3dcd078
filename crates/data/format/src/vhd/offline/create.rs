//! New images.
//!
//! A file is made under a name that no scan sees, flushed, and renamed into place, so that its name either does not
//! exist or names a whole image. On a device, which cannot be renamed, the footers go first and come last: until the
//! very last write there is no image to open.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use tapio_types::{Access, Span};
use uuid::Uuid;

use super::image::{Image, OpenOptions};
use super::names::{canonical, relative};
use super::parent::{ParentLink, chain_depth, resolve_parent};
use crate::continuation::check_not_below_standby;
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::locator::encode_path;
use crate::vhd::{
    Bat, DiskType, FOOTER_LEN, Footer, Header, KeyHash, Layout, LocatorEntry, PlatformCode, SECTOR_LEN,
    VIRTUAL_LEN_MAX, time,
};

/// The codes of the locators written into a differencing disk, in this order.
pub(super) const LOCATOR_CODES: [PlatformCode; 3] =
    [PlatformCode::MacX, PlatformCode::W2ku, PlatformCode::W2ru];

/// What kind of image to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// All space set aside at once.
    Fixed,
    /// Grows as it is written.
    Dynamic,
    /// Grows as it is written, over a parent.
    Differencing(ParentFacts),
}

/// What a child records about its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentFacts {
    /// The parent's UUID; nil for a raw parent.
    pub uuid: Uuid,
    /// The parent's time of modification, as the format stores it.
    pub timestamp: u32,
    /// The parent's file name.
    pub name: String,
    /// The parent's path seen from the child's directory.
    pub relative_path: String,
    /// The key that an encrypted parent needs, and then the child too.
    pub key_hash: KeyHash,
}

impl ParentFacts {
    /// What a child at `child` records about the parent at `parent`, and the parent's size in bytes, to the letter: a
    /// child keeps it.
    ///
    /// # Errors
    /// `Missing` without a parent; those of opening it; `InvalidArgument` for a path that is not UTF-8.
    pub fn gather(child: &Path, parent: &Path, is_raw: bool) -> Result<(Self, u64)> {
        let parent = canonical(parent)?;
        let wrap = |error| FormatError::io("cannot examine the parent", error).with_path(&parent);
        let facts = std::fs::metadata(&parent).map_err(wrap)?;
        if !facts.is_file() && !facts.file_type().is_block_device() {
            return Err(invalid("a parent must be a file or a block device").with_path(&parent));
        }
        check_not_below_standby(&parent)?;
        let (uuid, len, key_hash) = if is_raw {
            let medium = FileMedium::open(&parent, Access::ReadOnly)?;
            (Uuid::nil(), medium.len().map_err(wrap)?, KeyHash::default())
        } else {
            let image = Image::open(&parent, OpenOptions::READ)?;
            image.check_settled()?;
            if image.footer().uuid.is_nil() {
                return Err(
                    invalid("the parent has no UUID: give it one with 'vhd-util repair'").with_path(&parent)
                );
            }
            let key_hash = image.batmap().map_or_else(KeyHash::default, |batmap| batmap.header.key_hash);
            (image.footer().uuid, image.footer().current_len, key_hash)
        };
        Ok((Self { uuid, key_hash, ..Self::names(child, &parent)? }, len))
    }

    /// The part of it that the parent's place in the file system tells: its names and its time. The UUID is nil.
    ///
    /// # Errors
    /// `Missing` without a parent; `InvalidArgument` for a path that is not UTF-8.
    pub fn names(child: &Path, parent: &Path) -> Result<Self> {
        let parent = canonical(parent)?;
        let wrap = |error| FormatError::io("cannot examine the parent", error).with_path(&parent);
        let facts = std::fs::metadata(&parent).map_err(wrap)?;
        let not_text = || invalid("the parent's path is not UTF-8 and cannot be recorded").with_path(&parent);
        let name = parent.file_name().and_then(|name| name.to_str()).ok_or_else(not_text)?.to_string();
        let relative_path = relative(child, &parent)?.to_str().ok_or_else(not_text)?.to_string();
        if !relative_path.is_ascii() {
            return Err(invalid(format!(
                "the path '{relative_path}', which its child would record, is not ASCII: XenServer's programs could
  not \
                 open the child; rename the parent or its directory"
            ))
            .with_path(&parent)
            .with_errno(libc::EILSEQ));
        }
        let timestamp = time::from_unix(facts.mtime());
        Ok(Self { uuid: Uuid::nil(), timestamp, name, relative_path, key_hash: KeyHash::default() })
    }
}

/// Makes an image of `len` bytes at `path`, with room in its table to grow to `len_max`. A file that is there is
/// replaced.
///
/// The size is kept as it is: a child has its parent's, to the byte, and a copy its source's. A caller that wants whole
/// blocks asks for them, see [`whole_blocks`](crate::vhd::layout::whole_blocks).
///
/// # Errors
/// `InvalidArgument` for sizes out of range, `OutOfSpace` and others of the system.
pub fn create(path: &Path, shape: &Shape, len: u64, len_max: u64) -> Result<()> {
    if len_max != 0 && len_max < len {
        return Err(
            invalid("the size to reserve metadata for must not be less than the size").with_path(path)
        );
    }
    write_new(path, |medium| create_on(medium, shape, len, len_max).map_err(|error| error.with_path(path)))
}

/// How to make a child.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotOptions {
    /// The parent is a raw file or device.
    pub raw_parent: bool,
    /// Room in the table to grow to this many bytes, 0 for none.
    pub len_max: u64,
    /// The most images that the chain may have with the child, 0 for any number.
    pub depth_max: usize,
    /// Link to the parent given even if it holds nothing of its own.
    pub keep_empty: bool,
}

/// Makes a child at `child` of the image at `parent`, and says which image became the parent.
///
/// A parent without a single block adds nothing: by default the child is linked to the parent's own parent.
///
/// # Errors
/// `TooDeep` beyond the depth allowed; those of the parent and of [`create`].
pub fn snapshot(child: &Path, parent: &Path, options: &SnapshotOptions) -> Result<PathBuf> {
    let given = canonical(parent)?;
    if canonical(child).is_ok_and(|child| child == given) {
        return Err(invalid("an image cannot be its own parent").with_path(&given));
    }
    check_not_below_standby(&given)?;
    let (target, is_raw) = if options.raw_parent || options.keep_empty {
        (given.clone(), options.raw_parent)
    } else {
        snapshot_target(&given)?
    };
    if options.depth_max > 0 && !is_raw {
        let depth = chain_depth(&target)?;
        if depth + 1 > options.depth_max {
            return Err(FormatError::new(
                FormatErrorKind::TooDeep,
                format!("snapshot depth exceeded: current depth: {depth}, limit: {}", options.depth_max),
            )
            .with_path(&target));
        }
    }
    let (facts, target_len) = ParentFacts::gather(child, &target, is_raw)?;
    // Sizes in a chain may differ: the child has that of the image it is a snapshot of.
    let len = if target == given {
        target_len
    } else {
        Image::open(&given, OpenOptions::READ)?.footer().current_len
    };
    if len < target_len {
        return Err(invalid(format!(
            "a child of {len} bytes would be smaller than its parent {} of {target_len} bytes",
            target.display()
        ))
        .with_path(child));
    }
    create(child, &Shape::Differencing(facts), len, options.len_max)?;
    Ok(target)
}

/// The nearest image from `path` on that holds a block or has no parent.
fn snapshot_target(path: &Path) -> Result<(PathBuf, bool)> {
    let mut target = path.to_path_buf();
    for _ in 0..crate::vhd::CHAIN_DEPTH_MAX {
        let image = Image::open(&target, OpenOptions::READ)?;
        if image.footer().disk_type != DiskType::Differencing || image.allocated_blocks() > 0 {
            return Ok((target, false));
        }
        match resolve_parent(&image)? {
            ParentLink::None => return Ok((target, false)),
            ParentLink::Raw(path) => return Ok((path, true)),
            ParentLink::Vhd(path) => target = path,
        }
    }
    Err(FormatError::new(FormatErrorKind::TooDeep, "the chain of empty parents does not end").with_path(path))
}

/// Makes an image on a medium that is an empty file or a device.
///
/// # Errors
/// `InvalidArgument` for sizes out of range, `OutOfSpace` on a device too small, those of the medium.
pub fn create_on<M: Medium>(medium: &mut M, shape: &Shape, len: u64, len_max: u64) -> Result<()> {
    if !(1..=VIRTUAL_LEN_MAX).contains(&len) {
        return Err(invalid(format!(
            "a VHD cannot have {len} bytes: 1 to {VIRTUAL_LEN_MAX} bytes ({} GiB) are possible",
            VIRTUAL_LEN_MAX >> 30
        )));
    }
    if *shape == Shape::Fixed {
        // The footer stands behind the data, on a sector.
        return create_fixed(medium, len.next_multiple_of(SECTOR_LEN));
    }
    let layout = Layout::new(len, len_max)?;
    let mut header = Header::new(layout.entries);
    let mut batmap = layout.batmap_header();
    let mut disk_type = DiskType::Dynamic;
    let mut locators = Vec::new();
    let mut end = layout.locators_offset;
    if let Shape::Differencing(parent) = shape {
        disk_type = DiskType::Differencing;
        header.parent_uuid = parent.uuid;
        header.parent_timestamp = parent.timestamp;
        header.set_parent_name(&parent.name)?;
        batmap.key_hash = parent.key_hash;
        for (entry, code) in header.locators.iter_mut().zip(LOCATOR_CODES) {
            let path = encode_path(code, &parent.relative_path)?;
            *entry = locator_entry(code, &path, end);
            locators.push((end, path));
            end += u64::from(entry.data_space);
        }
    }
    let footer = Footer::new(disk_type, len).encode();

    let io = |error| FormatError::io("cannot write the new image", error);
    let footer_at = if medium.is_device() {
        let device_len = medium.len().map_err(io)?;
        if device_len < end + FOOTER_LEN as u64 {
            return Err(FormatError::new(
                FormatErrorKind::OutOfSpace,
                format!(
                    "a device of {device_len} bytes has no room for {} bytes of metadata",
                    end + FOOTER_LEN as u64
                ),
            ));
        }
        let footer_at = device_len - FOOTER_LEN as u64;
        for at in [footer_at, 0] {
            medium.write_at(at, &[0; FOOTER_LEN]).map_err(io)?;
            medium.flush().map_err(io)?;
        }
        footer_at
    } else {
        end
    };
    write_table(medium, &layout).map_err(io)?;
    medium.write_at(layout.batmap_header_offset, &batmap.encode()).map_err(io)?;
    medium.zero(Span::new(layout.batmap_offset, layout.batmap_len)).map_err(io)?;
    for (at, mut path) in locators {
        path.resize(path.len().next_multiple_of(SECTOR_LEN as usize), 0);
        medium.write_at(at, &path).map_err(io)?;
    }
    medium.write_at(FOOTER_LEN as u64, &header.encode()).map_err(io)?;
    medium.flush().map_err(io)?;
    medium.write_at(0, &footer).map_err(io)?;
    medium.flush().map_err(io)?;
    medium.write_at(footer_at, &footer).map_err(io)?;
    medium.flush().map_err(io)
}

/// The table of a new image: nothing allocated, and zeros from the last entry to the end of its sector.
fn write_table<M: Medium>(medium: &mut M, layout: &Layout) -> std::io::Result<()> {
    const PIECE_ENTRIES: u32 = 256 << 10;
    let mut first = 0;
    while first < layout.entries {
        let count = (layout.entries - first).min(PIECE_ENTRIES);
        let mut bytes = Bat::new(count).encode();
        if first + count == layout.entries {
            bytes[count as usize * 4..].fill(0);
        }
        medium.write_at(layout.bat_offset + u64::from(first) * 4, &bytes)?;
        first += count;
    }
    Ok(())
}

fn create_fixed<M: Medium>(medium: &mut M, len: u64) -> Result<()> {
    let io = |error| FormatError::io("cannot write the new image", error);
    let footer = Footer::new(DiskType::Fixed, len).encode();
    let mut footer_at = len;
    if medium.is_device() {
        let device_len = medium.len().map_err(io)?;
        footer_at = device_len.saturating_sub(FOOTER_LEN as u64);
        if footer_at < len {
            return Err(FormatError::new(
                FormatErrorKind::OutOfSpace,
                format!(
                    "a device of {device_len} bytes has no room for a disk of {len} bytes and its footer"
                ),
            ));
        }
        medium.write_at(footer_at, &[0; FOOTER_LEN]).map_err(io)?;
    }
    medium.reserve(Span::new(0, len)).map_err(io)?;
    medium.flush().map_err(io)?;
    medium.write_at(footer_at, &footer).map_err(io)?;
    medium.flush().map_err(io)
}

/// A locator for the encoded `path` at byte `at`, with just enough space.
pub(super) fn locator_entry(code: PlatformCode, path: &[u8], at: u64) -> LocatorEntry {
    let data_len = path.len() as u32;
    LocatorEntry {
        code,
        data_space: data_len.next_multiple_of(SECTOR_LEN as u32),
        data_len,
        reserved: 0,
        data_offset: at,
    }
}

/// Lets `fill` write a new file, and gives it its name once it is whole and safe. A device is written in place.
pub(super) fn write_new(path: &Path, fill: impl FnOnce(&mut FileMedium) -> Result<()>) -> Result<()> {
    // A symbolic link stays one: what it points to is replaced.
    let target = canonical(path).unwrap_or_else(|_| path.to_path_buf());
    if std::fs::metadata(&target).is_ok_and(|facts| !facts.is_file()) {
        return fill(&mut FileMedium::open(&target, Access::ReadWrite)?);
    }
    if target.file_name().is_none() {
        return Err(invalid("names no file").with_path(path));
    }
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let partial = target.with_file_name(super::partial::name(number));
    // One left behind by a killed process of the same number.
    let _ = std::fs::remove_file(&partial);
    let made = FileMedium::create_new(&partial).and_then(|mut medium| {
        fill(&mut medium)?;
        // With the lock still held, by which others see that it is not left behind.
        std::fs::rename(&partial, &target)
            .map_err(|error| FormatError::io("cannot give the new image its name", error))
    });
    if let Err(error) = made {
        let _ = std::fs::remove_file(&partial);
        return Err(error.with_path(path));
    }
    sync_directory_of(&target)
}

/// Makes the names in the directory of `path` safe.
pub(super) fn sync_directory_of(path: &Path) -> Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let wrap = |error| FormatError::io("cannot flush the directory", error).with_path(directory);
    File::open(directory).map_err(wrap)?.sync_all().map_err(wrap)
}
