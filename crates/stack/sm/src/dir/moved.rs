//! Disks that left an image of this SR for another one: the target of a mirror, in this SR or elsewhere.
//!
//! The disk process notes that beside the image, durably and before it writes there. So the note is the truth about
//! where the disk is when its process has died.

use std::path::Path;

use tapio_format::continuation::{self, Reason};
use tapio_types::{ApiError, ImageKind, LayerSpec};
use uuid::Uuid;

use super::ImageDir;
use super::facts::FileKind;
use crate::errors;
use crate::lvm::names::image_of_recorded;

fn layer(kind: FileKind, path: &Path) -> LayerSpec {
    let kind = match kind {
        FileKind::Vhd => ImageKind::Vhd,
        FileKind::Raw => ImageKind::Raw,
    };
    LayerSpec { kind, path: path.to_path_buf() }
}

impl ImageDir {
    /// The image that a disk went on with which had this one open; see [`crate::Sr::continued`].
    pub(super) fn continued_by(&self, vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        let facts = self.image(vdi)?;
        continued_by(&layer(facts.kind, &self.file(facts.kind, vdi)))
    }
}

/// The image that a disk went on with which had this one open; see [`crate::Sr::continued`].
pub(crate) fn continued_by(own: &LayerSpec) -> Result<Option<Uuid>, ApiError> {
    let note = continuation::read(own).map_err(|error| errors::image(46, &error))?;
    let Some(note) = note.filter(|note| note.reason == Reason::Mirror) else { return Ok(None) };
    // A note of another image that had this name says nothing of this one.
    if continuation::Identity::of(own).map_err(|error| errors::image(46, &error))? != note.identity {
        return Ok(None);
    }
    let name = note.by.path.file_name().and_then(|name| name.to_str());
    let image = name.and_then(|name| FileKind::of_file(name).or_else(|| image_of_recorded(name)));
    match image {
        Some((uuid, _)) => Ok(Some(uuid)),
        None => {
            let text = format!(
                "the disk went on with {}, which is no image of an SR: name it by 'tapio disk', or introduce it",
                note.by.path.display()
            );
            Err(errors::fail(46, text))
        }
    }
}

/// Takes away what said which image continues this one, which is gone.
///
/// # Errors
/// The directory cannot be changed.
pub(crate) fn forget(kind: FileKind, path: &Path) -> Result<(), ApiError> {
    continuation::remove(&layer(kind, path)).map_err(|error| errors::image(64, &error))
}
