//! Disks of a guest that goes from one host to another: they are there while their images are the other host's.
//!
//! At the host that sends, the process closes the images and waits: a device whose process ends while its guest is
//! stopped is not connected again by QEMU before version 9. Should the guest stay, the process goes on with them.
//!
//! At the host that receives, they are there before their images may be opened.
//! The guest's devices are made before its memory comes, and need their disks then. The images belong to the other host
//! until its guest has stopped. So the process opens an empty file of the same length, offers it, and is paused: it
//! answers what a device asks when it is made, and no request. Then it goes on with the images.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_sm::OpenSpec;
use tapio_stat::VbdId;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use tapio_vm::{FrontSpec, PluggedDisk};
use uuid::Uuid;

use super::{Disks, Note, Phase, ids, noted};

/// How long a process that does not answer may take to be gone.
const DEATH: Duration = Duration::from_secs(2);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(10);

impl Disks {
    fn stand_in_of(&self, vbd: Uuid) -> PathBuf {
        self.0.run_dir.join("disks").join(format!("{vbd}.stand-in"))
    }

    /// Offers a disk of `len` bytes without images, in the process that was started. The note names no images: nothing
    /// takes it for a disk that is used.
    ///
    /// # Errors
    /// The run directory's; the process does not take it.
    pub fn stand_in(
        &self,
        vbd: Uuid,
        len: u64,
        front: &FrontSpec,
        id: Option<VbdId>,
        until: Instant,
    ) -> Result<PluggedDisk, ApiError> {
        let path = self.stand_in_of(vbd);
        let made = File::create(&path).and_then(|file| file.set_len(len));
        made.map_err(|error| ApiError::internal(format!("cannot make {}: {error}", path.display())))?;
        let offered = self.offer_empty(vbd, &path, front, id, until);
        // It is closed by now, or its process ends.
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "an empty file stays");
        }
        offered
    }

    fn offer_empty(
        &self,
        vbd: Uuid,
        path: &std::path::Path,
        front: &FrontSpec,
        id: Option<VbdId>,
        until: Instant,
    ) -> Result<PluggedDisk, ApiError> {
        let note = noted(&self.0.lock(), vbd)?;
        let (process, minor) = ids(&note)?;
        let layers = vec![LayerSpec { kind: ImageKind::Raw, path: path.to_path_buf() }];
        let with = OpenSpec { chain: ChainSpec { layers, access: Access::ReadWrite }, log: None };
        let pool = self.pool(vbd, &note, minor)?;
        let info = self.0.backend.open(process, minor, &with, &pool, &note.tuning, until)?;
        self.0.update_of(vbd, process, |note| {
            note.size = info.len();
            note.tuning.sector_size = Some(info.sector_size);
        })?;
        let offered = self.offer(vbd, front, id, until)?;
        self.0.backend.pause(process, minor, until)?;
        Ok(offered)
    }

    /// Closes the images; the process waits. The note names none before that: nothing takes it for a disk that is used,
    /// and no process takes its place. A process that died has closed them too: its guest has stopped, and has the
    /// answer to all that it asked for.
    ///
    /// # Errors
    /// Requests do not end in time: it goes on, or is still about to close them.
    pub fn give_up_images(&self, vbd: Uuid, until: Instant) -> Result<(), ApiError> {
        self.check_not_paused(vbd)?;
        let note = self.0.busy.after_replacement(vbd, until, || {
            self.0.unwatch(vbd);
            self.0.update(vbd, |note: &mut Note| {
                (note.phase, note.chain, note.log) = (Phase::Starting, None, None);
            })
        })?;
        let Some(process) = note.process else { return Ok(()) };
        let (_, minor) = ids(&note)?;
        let Err(error) = self.0.backend.pause(process, minor, until) else { return Ok(()) };
        let until = until.min(Instant::now() + DEATH);
        while self.0.backend.is_alive(process) {
            if Instant::now() >= until {
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
        tracing::warn!(%vbd, %error, "a disk process died while its guest was to move");
        Ok(())
    }

    /// Whether its process lives.
    pub fn is_alive(&self, vbd: Uuid) -> bool {
        let process = self.of_vbd(vbd).and_then(|note| note.process);
        process.is_some_and(|process| self.0.backend.is_alive(process))
    }

    /// Goes on with the images, which are this host's from now on.
    ///
    /// # Errors
    /// They cannot be opened, or have another length: the disk serves nothing then.
    pub fn take_images(&self, vbd: Uuid, with: &OpenSpec, until: Instant) -> Result<(), ApiError> {
        let note = noted(&self.0.lock(), vbd)?;
        let (process, minor) = ids(&note)?;
        // A daemon may have died before it had closed what it was to give up.
        self.0.backend.pause(process, minor, until)?;
        self.0.update_of(vbd, process, |note| note.opens(with))?;
        self.0.backend.resume(process, minor, with, until)
    }
}
