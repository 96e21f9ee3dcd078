//! A disk that is moved to other images while a guest uses it, by its process's mirror.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_control::{MirrorCopy, MirrorReport};
use tapio_model::ApiError;
use tapio_sm::OpenSpec;
use tapio_types::ChainSpec;
use uuid::Uuid;

use super::busy::{Busy, Why};
use super::{Disks, Note, Process, Table, ids};
use crate::plan::steps::step;

/// How long a question may take that the process answers from memory.
const ASK: Duration = Duration::from_secs(15);
/// How long opening the images of a mirror, or the switch to them, may take.
const CHANGE: Duration = Duration::from_secs(120);

/// Where a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// On the images that it had.
    Source,
    /// On those of its mirror.
    Target,
    /// Its process is gone, or does not say.
    Unknown,
}

/// The mirror of one disk, in the process that it was begun in.
pub(crate) struct Mirror {
    table: Arc<Table>,
    vbd: Uuid,
    process: Process,
    minor: u16,
}

/// Whether a path names the image of this VDI.
fn is_image(path: &Path, image: Uuid) -> bool {
    path.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| stem == image.to_string())
}

impl Disks {
    /// The mirror that the disk of a VBD may have; none where it has no process.
    pub(crate) fn mirror(&self, vbd: Uuid) -> Option<Mirror> {
        let (process, minor) = self.of_vbd(vbd).and_then(|note| ids(&note).ok())?;
        Some(Mirror { table: Arc::clone(&self.0), vbd, process, minor })
    }

    /// Writes down that a disk is another VDI's now, with these images: its process has them open, or the next one
    /// opens them.
    ///
    /// # Errors
    /// The note cannot be written.
    pub(crate) fn is_moved(
        &self,
        vbd: Uuid,
        (vdi, uuid, sr): (&str, Uuid, Uuid),
        with: &OpenSpec,
    ) -> Result<(), ApiError> {
        self.0.update(vbd, |note| {
            note.opens(with);
            (note.vdi, note.vdi_uuid, note.sr) = (vdi.to_owned(), uuid, sr);
        })?;
        step("disk:moved");
        Ok(())
    }
}

impl Mirror {
    /// Begins it; the copy moves `rate` bytes a second at most, 0 is no limit.
    ///
    /// # Errors
    /// See [`super::Backend::mirror_start`].
    pub(crate) fn start(&self, target: &ChainSpec, copy: MirrorCopy, rate: u64) -> Result<(), ApiError> {
        let until = Instant::now() + CHANGE;
        self.table.backend.mirror_start(self.process, self.minor, target, (copy, rate), until)
    }

    /// Whether the disk still has the process that the mirror is in.
    pub(crate) fn is_there(&self) -> bool {
        let now = self.table.lock().get(&self.vbd).map(|note| (note.process, note.minor));
        now == Some((Some(self.process), Some(self.minor))) && self.table.backend.is_alive(self.process)
    }

    /// Where it stands.
    ///
    /// # Errors
    /// The process does not answer.
    pub(crate) fn status(&self) -> Result<Option<MirrorReport>, ApiError> {
        self.table.backend.mirror_status(self.process, self.minor, Instant::now() + ASK)
    }

    /// Ends it; the disk stays where it is.
    ///
    /// # Errors
    /// The process does not answer.
    pub(crate) fn cancel(&self) -> Result<(), ApiError> {
        if !self.table.backend.is_alive(self.process) {
            return Ok(());
        }
        self.table.backend.mirror_cancel(self.process, self.minor, Instant::now() + CHANGE)
    }

    /// Which images the process has open: `target` is the VDI of those of the mirror.
    pub(crate) fn side(&self, target: Uuid) -> Side {
        let backend = &self.table.backend;
        if !backend.is_alive(self.process) {
            return Side::Unknown;
        }
        match backend.leaf(self.process, self.minor, Instant::now() + ASK) {
            Ok(Some(leaf)) if is_image(&leaf, target) => Side::Target,
            Ok(Some(_)) => Side::Source,
            Ok(None) | Err(_) => Side::Unknown,
        }
    }

    /// The disk goes on on the images of the mirror. No process takes the place of this one until `moved` has been
    /// done, which is told where the disk is then and writes that down.
    ///
    /// # Errors
    /// The disk is on its old images still, or what `moved` answers.
    pub(crate) fn pivot(
        &self,
        target: Uuid,
        moved: impl FnOnce(Side) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let until = Instant::now() + CHANGE;
        let _busy = Busy::begin(&self.table, self.vbd, Why::Paused, until)?;
        let pivoted = self.table.backend.mirror_pivot(self.process, self.minor, until);
        let side = if pivoted.is_ok() { Side::Target } else { self.side(target) };
        match (pivoted, side) {
            (Err(error), Side::Source) => Err(error),
            (pivoted, _) => {
                if let Err(error) = pivoted {
                    tracing::warn!(vbd = %self.vbd, %error, "the end of a switch-over is not known");
                }
                step("disk:pivoted");
                moved(side)
            }
        }
    }
}

impl Note {
    /// Whether the disk has the image of this VDI as its leaf.
    pub(crate) fn is_on(&self, image: Uuid) -> bool {
        self.chain
            .as_ref()
            .and_then(|chain| chain.layers.first())
            .is_some_and(|leaf| is_image(&leaf.path, image))
    }
}
