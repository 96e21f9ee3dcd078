//! Changed blocks, as the cluster knows them from its snapshots.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tapio_format::cbt::{BLOCK_LEN, bitmap_len, blocks_of, set_blocks};
use tapio_rbd::{Image, Mode};
use tapio_types::{Access, ApiError, Span};
use uuid::Uuid;

use super::failed;
use super::layout::{About, Place, TRACKED, plain_uuid};
use super::repository::Repository;
use crate::changed_blocks::LISTED_MAX;
use crate::errors;
use crate::traits::Ctx;

impl Repository {
    /// What changed from one VDI to a later one: base64 of a bit for each block of 64 KiB, the first in the highest bit
    /// of the first byte. The earlier one is a snapshot; the later one is a later snapshot of the same VDI, the VDI
    /// itself, or a clone of the snapshot.
    ///
    /// # Errors
    /// 460: they have nothing to do with each other; 459: the later one is smaller, or larger than 4 TiB.
    pub(super) fn list_changed(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        if from == to {
            return Err(errors::fail(460, "source and target are the same VDI"));
        }
        if ctx.live(to).is_some_and(|disk| disk.access() == Access::ReadWrite) {
            return Err(errors::vdi_in_use(to, "list_changed_blocks"));
        }
        let unrelated = || {
            let text = format!("{to} is no later VDI of {from}: source and target are unrelated");
            errors::fail(460, text)
        };
        let Place::SnapshotOf(earlier) = self.find(from)? else { return Err(unrelated()) };
        let origin = self.inside.open(&earlier, None, Mode::Read).map_err(failed(460))?;
        let untracked =
            |vdi: Uuid| errors::fail(460, format_args!("changed blocks of {vdi} are not tracked"));
        if !About::read(&origin, from).map_err(failed(460))?.is_tracked {
            return Err(untracked(from));
        }
        let snapshots = origin.snapshots().map_err(failed(460))?;
        let place = |vdi: Uuid| snapshots.iter().position(|known| plain_uuid(&known.name) == Some(vdi));
        let first = place(from).ok_or_else(unrelated)?;
        let before = snapshots[first].len;
        let since = from.to_string();
        let (later, since) = match self.find(to)? {
            Place::SnapshotOf(name) if name == earlier && place(to).is_some_and(|later| later > first) => {
                if !About::read(&origin, to).map_err(failed(460))?.is_tracked {
                    return Err(untracked(to));
                }
                let at = to.to_string();
                (
                    self.inside.open(&earlier, Some(&at), Mode::Read).map_err(failed(460))?,
                    Some(since.as_str()),
                )
            }
            Place::SnapshotOf(_) => return Err(unrelated()),
            Place::Image => {
                let image = self.inside.open(&to.to_string(), None, Mode::Read).map_err(failed(460))?;
                if image.metadata(TRACKED).map_err(failed(460))?.is_none() {
                    return Err(untracked(to));
                }
                let begins = image.parent().map_err(failed(460))?;
                let is_clone = begins.is_some_and(|parent| {
                    parent.image.as_deref() == Some(&*earlier) && parent.snapshot == since
                });
                match to.to_string() == earlier {
                    true => (image, Some(since.as_str())),
                    // What a clone holds of its own was written since.
                    false if is_clone => (image, None),
                    false => return Err(unrelated()),
                }
            }
        };
        changed(&later, since, before)
    }
}

/// The blocks in which an image differs from one of its snapshots, or that it holds of its own.
fn changed(image: &Image, since: Option<&str>, before: u64) -> Result<String, ApiError> {
    let len = image.length().map_err(failed(460))?;
    if len < before || len > LISTED_MAX {
        let text = format!(
            "the later VDI has {len} bytes after {before}: a disk grows, and up to {LISTED_MAX} bytes are listed"
        );
        return Err(errors::fail(459, text));
    }
    let mut bitmap = vec![0; usize::try_from(bitmap_len(len)).unwrap_or(usize::MAX)];
    image
        .diff(since, (0, len), false, false, |diff| {
            set_blocks(&mut bitmap, blocks_of(Span::new(diff.start, diff.len)));
        })
        .map_err(failed(460))?;
    if len > before {
        // What was added counts as changed, as the lists of other SRs have it.
        set_blocks(&mut bitmap, before / BLOCK_LEN..len.div_ceil(BLOCK_LEN));
    }
    bitmap.iter_mut().for_each(|byte| *byte = byte.reverse_bits());
    Ok(STANDARD.encode(bitmap))
}
