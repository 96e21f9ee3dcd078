//! What SRs of files and of logical volumes have in common about logs of changed blocks: errors, VDIs of which the log
//! alone is left, and the list of what changed from one VDI to a later one. What the logs mean is said in `dir::cbt`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tapio_format::FormatError;
use tapio_format::cbt::{BLOCK_LEN, Log, bitmap_len, set_blocks};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use crate::errors;
use crate::traits::{Ctx, VdiInfo};

/// The largest disk whose changed blocks are listed: the list is text in one answer.
pub(crate) const LISTED_MAX: u64 = 4 << 40;

/// The error of a log.
pub(crate) fn failed(path: &Path) -> impl Fn(FormatError) -> ApiError {
    move |error| match error.errno() {
        libc::EBUSY => errors::fail(46, error.with_path(path)),
        _ => errors::image(459, &error.with_path(path)),
    }
}

/// Whether a log cannot be used only now.
pub(crate) fn is_busy(error: &ApiError) -> bool {
    error.code == "SR_BACKEND_FAILURE_46"
}

/// A VDI of which the log alone is there; `size` is that of its disk, or why it is not known.
pub(crate) fn info_of_log(vdi: Uuid, size: Result<u64, String>) -> VdiInfo {
    let (virtual_size, damage) = size.map_or_else(|error| (0, Some(error)), |size| (size, None));
    VdiInfo {
        uuid: vdi,
        location: vdi.to_string(),
        virtual_size,
        physical_utilisation: 0,
        managed: true,
        read_only: false,
        parent: None,
        name_label: None,
        sm_config: damage.map(|error| ("damaged".to_owned(), error)).into_iter().collect::<BTreeMap<_, _>>(),
        cbt_enabled: true,
        is_metadata: true,
        told: None,
    }
}

fn untracked(vdi: Uuid) -> ApiError {
    errors::fail(460, format_args!("changed blocks of {vdi} are not tracked"))
}

/// Refuses to list what changed between two VDIs that are the same, in use or not tracked.
///
/// # Errors
/// 460; `VDI_IN_USE` while the later one is written.
pub(crate) fn check(
    ctx: &dyn Ctx,
    from: Uuid,
    to: Uuid,
    has_log: impl Fn(Uuid) -> bool,
) -> Result<(), ApiError> {
    if from == to {
        return Err(errors::fail(460, "source and target are the same VDI"));
    }
    if ctx.live(to).is_some_and(|disk| disk.access() == Access::ReadWrite) {
        return Err(errors::vdi_in_use(to, "list_changed_blocks"));
    }
    [from, to].into_iter().find(|vdi| !has_log(*vdi)).map_or(Ok(()), |vdi| Err(untracked(vdi)))
}

/// What changed from one VDI to a later one: base64 of a bit for each block of 64 KiB, the first in the highest bit of
/// the first byte. `log_of` is the path of a VDI's log, which can be read; none where it has none.
///
/// # Errors
/// 459, 460 where the two have nothing to do with each other.
pub(crate) fn between(
    from: Uuid,
    to: Uuid,
    log_of: impl Fn(Uuid) -> Option<PathBuf>,
) -> Result<String, ApiError> {
    let path = log_of(from).ok_or_else(|| untracked(from))?;
    let first = Log::open_header(&path, Access::ReadOnly).map_err(failed(&path))?;
    let (mut size, mut next) = (first.header().size, first.header().child);
    let (mut bitmap, mut seen) = (Vec::new(), BTreeSet::from([from]));
    let unrelated = || {
        let text = format!("{to} is no later VDI of {from}: source and target are unrelated");
        errors::fail(460, text)
    };
    loop {
        let path = log_of(next).filter(|_| !next.is_nil() && seen.insert(next)).ok_or_else(unrelated)?;
        let log = Log::open(&path, Access::ReadOnly).map_err(failed(&path))?;
        let header = *log.header();
        // A log that was begun anew has nothing of what came before it.
        if header.parent == next || !seen.contains(&header.parent) {
            return Err(unrelated());
        }
        if header.size < size || header.size > LISTED_MAX {
            let text = format!(
                "{next} has {} bytes after one of {size}: a disk grows, and up to {LISTED_MAX} bytes are listed",
                header.size
            );
            return Err(errors::fail(459, text));
        }
        size = header.size;
        bitmap.resize(usize::try_from(bitmap_len(size)).unwrap_or(usize::MAX), 0);
        if header.consistent == 0 {
            set_blocks(&mut bitmap, 0..size.div_ceil(BLOCK_LEN));
        } else {
            let mut at = 0;
            log.read_bitmap(|piece| {
                bitmap[at..].iter_mut().zip(piece).for_each(|(all, bits)| *all |= bits);
                at += piece.len();
                Ok(())
            })
            .map_err(failed(&path))?;
        }
        if next == to {
            break;
        }
        next = header.child;
    }
    bitmap.iter_mut().for_each(|byte| *byte = byte.reverse_bits());
    Ok(STANDARD.encode(bitmap))
}
