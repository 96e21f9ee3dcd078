//! Which image the parent is: locators to paths, paths to locators, whole chains.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

use super::footer::read_footer;
use super::image::{Image, OpenOptions};
use super::names::{canonical, directory_of};
use crate::error::{FormatError, FormatErrorKind, Result, corrupt, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::locator::decode_path;
use crate::vhd::{CHAIN_DEPTH_MAX, DiskType, LocatorEntry};

/// What an image's data continue in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParentLink {
    /// Nothing: not a differencing disk.
    None,
    /// A raw file or device.
    Raw(PathBuf),
    /// Another VHD.
    Vhd(PathBuf),
}

impl ParentLink {
    /// The path, if there is a parent.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::None => None,
            Self::Raw(path) | Self::Vhd(path) => Some(path),
        }
    }
}

/// The path in one of the image's locators, as it is recorded.
///
/// # Errors
/// `Corrupt` and `Unsupported` as the decoder says; those of the medium.
pub fn locator_path<M: Medium>(image: &Image<M>, entry: &LocatorEntry) -> Result<String> {
    let (at, len) = entry.path_span().map_err(|error| error.with_path(image.path()))?;
    let mut bytes = vec![0; len];
    image.read_bytes(at, &mut bytes)?;
    decode_path(entry.code, &bytes).map_err(|error| error.with_offset(at).with_path(image.path()))
}

/// The bytes of one of the image's locators and the space that it takes, whole sectors.
///
/// # Errors
/// As [`locator_path`].
pub(super) fn locator_bytes<M: Medium>(image: &Image<M>, entry: &LocatorEntry) -> Result<(Vec<u8>, u32)> {
    let wrap = |error: FormatError| error.with_path(image.path());
    let (space, (at, len)) = (entry.space_len().map_err(wrap)?, entry.path_span().map_err(wrap)?);
    let mut bytes = vec![0; len];
    image.read_bytes(at, &mut bytes)?;
    bytes.resize(space as usize, 0);
    Ok((bytes, u32::try_from(space).unwrap_or(u32::MAX)))
}

/// The path in the first locator that can be read, without looking whether anything is there.
///
/// # Errors
/// `InvalidArgument` for an image without a parent, `Corrupt` where no locator can be read.
pub fn unresolved_parent<M: Medium>(image: &Image<M>) -> Result<String> {
    readable_locators(image)?
        .next()
        .unwrap_or_else(|| Err(corrupt("no parent locator can be read").with_path(image.path())))
}

fn readable_locators<'a, M: Medium>(
    image: &'a Image<M>,
) -> Result<impl Iterator<Item = Result<String>> + 'a> {
    let header = image
        .header()
        .filter(|_| image.footer().disk_type == DiskType::Differencing)
        .ok_or_else(|| invalid("is not a differencing disk and has no parent").with_path(image.path()))?;
    Ok(header
        .locators
        .iter()
        .filter(|entry| entry.code.is_readable())
        .map(|entry| locator_path(image, entry))
        .filter(Result::is_ok))
}

/// Where `recorded`, a path from a locator of the image at `child`, leads: as it is if it is absolute and there, else
/// from the child's directory.
///
/// # Errors
/// `Missing` where nothing is there.
pub(super) fn find_parent(child: &Path, recorded: &str) -> Result<PathBuf> {
    let path = Path::new(recorded);
    if path.is_absolute() && path.exists() {
        return Ok(path.to_path_buf());
    }
    // An absolute path is tried below the child's directory too: its first slash counts for nothing there.
    let below = directory_of(child)?.join(recorded.trim_start_matches('/'));
    canonical(&below)
}

/// The parent of an image: of its locators the first that leads to the image whose UUID it recorded, else the first
/// that leads somewhere. They differ where a change of the parent was broken off.
///
/// # Errors
/// `Missing` where none does, naming the last path tried.
pub fn resolve_parent<M: Medium>(image: &Image<M>) -> Result<ParentLink> {
    if image.footer().disk_type != DiskType::Differencing {
        return Ok(ParentLink::None);
    }
    let link = if image.has_raw_parent() { ParentLink::Raw } else { ParentLink::Vhd };
    let (mut last, mut first) = (None, None);
    for recorded in readable_locators(image)?.flatten() {
        match find_parent(image.path(), &recorded) {
            Ok(path) if is_meant(image, &path) => return Ok(link(path)),
            Ok(path) => first = first.or(Some(path)),
            Err(error) => last = Some((recorded, error)),
        }
    }
    if let Some(path) = first {
        return Ok(link(path));
    }
    Err(match last {
        Some((recorded, _)) => FormatError::new(
            FormatErrorKind::Missing,
            format!("its parent '{recorded}' is not there: bring it back, or name another with 'vhd-util modify -p'"),
        ),
        None => corrupt("no parent locator can be read: name the parent with 'vhd-util modify -p'"),
    }
    .with_path(image.path()))
}

/// Whether the image at `path` is the one that `child` recorded as its parent: by its UUID, and a raw one, which has
/// none, by its name.
fn is_meant<M: Medium>(child: &Image<M>, path: &Path) -> bool {
    if child.has_raw_parent() {
        return path
            .file_name()
            .is_some_and(|name| child.parent_name().is_some_and(|known| name == known.as_str()));
    }
    let Ok(medium) = FileMedium::open(path, Access::ReadOnly) else { return false };
    read_footer(&medium, false)
        .is_ok_and(|(footer, ..)| child.header().is_some_and(|header| header.parent_uuid == footer.uuid))
}

/// The chain of the VHD at `path`, leaf first, base last.
///
/// # Errors
/// Those of opening each image; `Missing`, `Loop`; `TooDeep` beyond [`CHAIN_DEPTH_MAX`]; `Corrupt` where a parent is
/// not the image whose UUID the child recorded.
pub fn resolve_chain(path: &Path, access: Access) -> Result<ChainSpec> {
    let mut layers = Vec::new();
    walk(path, OpenOptions::READ, |layer| layers.push(layer))?;
    Ok(ChainSpec { layers, access })
}

/// How many images the chain of the VHD at `path` has, a raw parent included.
///
/// # Errors
/// As [`resolve_chain`].
pub fn chain_depth(path: &Path) -> Result<usize> {
    let mut depth = 0;
    walk(path, OpenOptions::LOOK, |_| depth += 1)?;
    Ok(depth)
}

/// Visits the images of a chain; `leaf` says how the first one is opened.
fn walk(path: &Path, leaf: OpenOptions, mut visit: impl FnMut(LayerSpec)) -> Result<()> {
    let mut seen = HashSet::new();
    let mut next = path.to_path_buf();
    let mut expected: Option<(uuid::Uuid, PathBuf)> = None;
    for depth in 1.. {
        if depth > CHAIN_DEPTH_MAX {
            return Err(FormatError::new(
                FormatErrorKind::TooDeep,
                format!("its chain has more than {CHAIN_DEPTH_MAX} images: coalesce some"),
            )
            .with_path(path));
        }
        let facts = std::fs::metadata(&next)
            .map_err(|error| FormatError::io("cannot open", error).with_path(&next))?;
        if !seen.insert((facts.dev(), facts.ino())) {
            return Err(FormatError::new(
                FormatErrorKind::Loop,
                format!("is its own ancestor, in the chain of {}", path.display()),
            )
            .with_path(&next));
        }
        let image = Image::open(&next, if depth == 1 { leaf } else { OpenOptions::READ })?;
        if let Some((uuid, child)) = expected.filter(|(uuid, _)| *uuid != image.footer().uuid) {
            return Err(corrupt(format!(
                "is not the parent that {} recorded: its UUID is {} and not {uuid}",
                child.display(),
                image.footer().uuid
            ))
            .with_path(&next));
        }
        visit(LayerSpec { kind: ImageKind::Vhd, path: next.clone() });
        match resolve_parent(&image)? {
            ParentLink::None => return Ok(()),
            ParentLink::Raw(path) => {
                visit(LayerSpec { kind: ImageKind::Raw, path });
                return Ok(());
            }
            ParentLink::Vhd(parent) => {
                expected = image.header().map(|header| (header.parent_uuid, next));
                next = parent;
            }
        }
    }
    Ok(())
}
