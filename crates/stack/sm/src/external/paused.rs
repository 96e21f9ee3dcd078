//! Running disks wait while a plugin changes what they have open.
//!
//! A plugin knows nothing of disk processes: it may copy an image, or put another one in its place. So the disk's
//! requests end and its images are closed before, and afterwards it opens what the plugin says then. That a disk waits
//! is noted in the run directory first. A worker that is killed in between leaves the note, and whatever attaches the
//! SR next lets the disk go on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tapio_types::{Access, ApiError};
use uuid::Uuid;

use crate::dir::facts::plain_uuid;
use crate::errors;
use crate::traits::{Ctx, LiveDisk, OpenSpec};
use crate::worker::UNFINISHED;

/// The notes of one SR.
#[derive(Clone, Debug)]
pub(super) struct Paused {
    sr: Uuid,
    dir: PathBuf,
}

/// Asks the plugin what the disk opens now.
type Reopen<'a> = &'a dyn Fn(Uuid, Access) -> Result<OpenSpec, ApiError>;

impl Paused {
    pub(super) fn new(run_dir: &Path, sr: Uuid) -> Self {
        Self { sr, dir: run_dir.join("external").join(sr.to_string()) }
    }

    fn note(&self, vdi: Uuid) -> PathBuf {
        self.dir.join(vdi.to_string())
    }

    /// Does `work` while the disk of the VDI, if one runs, waits. The disk goes on whatever comes of the work.
    ///
    /// # Errors
    /// Those of `work`. The disk does not pause: nothing was done. It does not go on: it is tried again when the SR is
    /// attached, or asked for its sizes.
    pub(super) fn while_paused<T>(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        reopen: Reopen<'_>,
        work: impl FnOnce() -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let Some(disk) = ctx.live(vdi) else { return work() };
        let note = self.note(vdi);
        let written = fs::create_dir_all(&self.dir).and_then(|()| fs::write(&note, ""));
        written.map_err(|error| errors::io(202, "cannot write", &note, &error))?;
        ctx.step("external:noted");
        if let Err(error) = disk.pause() {
            // It goes on by itself.
            self.forget(vdi);
            return Err(error);
        }
        ctx.step("external:paused");
        let done = work();
        ctx.step("external:changed");
        self.go_on(vdi, &*disk, reopen)?;
        ctx.step("external:resumed");
        self.forget(vdi);
        done
    }

    fn go_on(&self, vdi: Uuid, disk: &dyn LiveDisk, reopen: Reopen<'_>) -> Result<(), ApiError> {
        let resumed = reopen(vdi, disk.access()).and_then(|with| disk.resume(&with));
        resumed.map_err(|error| {
            let text = format!(
                "SR {}: the disk of VDI {vdi} waits: it cannot go on with what the plugin says ({error}); see to the \
                 plugin, it is tried again",
                self.sr
            );
            tracing::error!("{text}");
            errors::fail_with(47, text, UNFINISHED)
        })
    }

    /// Lets disks go on that a killed worker left waiting.
    pub(super) fn recover(&self, ctx: &dyn Ctx, reopen: Reopen<'_>) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let noted = entries.flatten().filter_map(|entry| plain_uuid(entry.file_name().to_str()?));
        for vdi in noted.take(10_000) {
            if let Some(disk) = ctx.live(vdi) {
                tracing::info!("SR {}: the disk of VDI {vdi} was left waiting, and goes on", self.sr);
                // It waits already, or was going to.
                let _ = disk.pause();
                if self.go_on(vdi, &*disk, reopen).is_err() {
                    continue;
                }
            }
            self.forget(vdi);
        }
    }

    fn forget(&self, vdi: Uuid) {
        let note = self.note(vdi);
        match fs::remove_file(&note) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "a note stays: {}", note.display());
            }
            _ => {}
        }
        let _ = fs::remove_dir(&self.dir);
    }
}
