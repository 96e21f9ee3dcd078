//! A disk as the control side holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tapio_block::{Disk, DiskFailure, DiskHandle, DiskStatus, Geometry, Gone, Owner, StandbyOptions};
use tapio_control::{ControlError, Errno, ImageSource, Polling, Result, ShareSpec};
use tapio_format::FormatError;
use tapio_ring::PollingConfig;
use tapio_types::Access;

use crate::counter::Counter;
use crate::failure::{bad_image, failure, unreachable_thread};
use crate::fronts::Fronts;
use crate::limits::REPLY_TIMEOUT;
use crate::memory::{Budget, Share};
use crate::moved::Moved;
use crate::room::Room;
use crate::trace::Tracing;

/// A disk with its data thread and its front ends.
pub struct HostDisk {
    /// Taken away when it is closed.
    pub(crate) disk: RwLock<Option<Arc<Disk>>>,
    pub(crate) remote: DiskHandle,
    /// As it was when it was opened, but for its length.
    pub(crate) geometry: Geometry,
    pub(crate) len: AtomicU64,
    pub(crate) access: Access,
    /// What guests read as the disk's serial number.
    pub(crate) serial: String,
    pub(crate) fronts: Fronts,
    pub(crate) memory: Budget,
    /// What the images that are open may take.
    pub(crate) shares: Mutex<Vec<Share>>,
    pub(crate) moved: Moved,
    /// The standby that it was opened with the last time that it had one.
    pub(crate) standby: Mutex<Option<StandbyOptions>>,
    pub(crate) minor: u16,
    pub(crate) trace: Tracing,
    /// How it shares its device.
    pub(crate) share: Mutex<ShareSpec>,
    /// Why it shares none.
    pub(crate) not_shared: Mutex<Option<String>>,
    /// Where it asks for room.
    pub(crate) room: Room,
}

impl HostDisk {
    pub fn with<T>(&self, run: impl FnOnce(&Disk) -> std::result::Result<T, DiskFailure>) -> Result<T> {
        // The lock is not held meanwhile: opening images may hang, and the disk is to be closed by force then.
        let disk = self.disk.read().clone();
        match disk {
            Some(disk) => run(&disk).map_err(|error| failure(&error)),
            None => Err(ControlError::new(Errno::ENODEV, "the disk is closed")),
        }
    }

    /// What the disk does now, with fresh counters.
    pub(crate) fn ask_status(&self) -> Result<DiskStatus> {
        let asked = self.remote.call(REPLY_TIMEOUT, |data_thread| {
            Counter::refresh(data_thread);
            data_thread.status()
        });
        asked.map_err(unreachable_thread)
    }

    /// Asks the data thread for something that takes no time.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Owner) -> std::result::Result<T, FormatError> + Send + 'static,
    ) -> Result<T> {
        self.remote
            .call(REPLY_TIMEOUT, question)
            .map_err(unreachable_thread)?
            .map_err(|error| bad_image(&error))
    }

    /// Has the data thread do something that may wait for the storage.
    pub(crate) fn order<T, F>(
        &self,
        within: Duration,
        work: impl FnOnce(Owner) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = std::result::Result<T, FormatError>> + 'static,
    {
        self.remote.call_async(within, work).map_err(unreachable_thread)?.map_err(|error| bad_image(&error))
    }

    /// Adaptive polling.
    pub(crate) fn set_polling(&self, polling: Polling) -> Result<()> {
        let config = PollingConfig {
            max_ns: u64::from(polling.max_us) * 1_000,
            idle_min_percent: polling.idle_percent,
        };
        self.remote.threads().iter().try_for_each(|thread| {
            thread
                .call(REPLY_TIMEOUT, move |data_thread| data_thread.set_polling(config))
                .map_err(unreachable_thread)
        })
    }

    /// Takes note of how long the disk is now.
    pub(crate) fn look_at_length(&self) {
        if let Ok(geometry) = self.remote.call(REPLY_TIMEOUT, |data_thread| data_thread.port.geometry()) {
            self.len.store(geometry.len, Ordering::Relaxed);
        }
    }

    /// Takes note of what the leaf is called now: devices that outlive this process go on with a disk of that name
    /// only.
    pub(crate) fn look_at_leaf(&self) {
        let asked = self.remote.call(REPLY_TIMEOUT, |data_thread| {
            data_thread.core().leaf_facts().map(|facts| facts.image.to_string())
        });
        if let Ok(Ok(leaf)) = asked {
            self.fronts.renamed(&serial(&ImageSource::Leaf(leaf)));
        }
    }

    /// What the process may still take, for an image that is to be added.
    pub(crate) const fn memory(&self) -> &Budget {
        &self.memory
    }

    /// Where it is noted when the disk moves to other images by itself.
    pub(crate) fn notebook(&self) -> Moved {
        self.moved.clone()
    }

    /// An image was added that may take this.
    pub(crate) fn keep(&self, share: Share) {
        self.shares.lock().push(share);
    }

    /// Drains in ever longer waits; between them the caller may cancel. A drain that has begun goes on,
    /// and asking again joins it.
    pub(crate) fn drain(&self, is_cancelled: &dyn Fn() -> bool) -> Result<()> {
        let mut timeout = Duration::from_millis(50);
        loop {
            let error = match self.with(|disk| Ok(disk.pause(timeout)))? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !matches!(error, DiskFailure::Gone(Gone::TimedOut)) {
                return Err(failure(&error));
            }
            if is_cancelled() {
                return Err(ControlError::new(
                    Errno::ECANCELED,
                    "requests are still in flight, and no caller waits for them",
                )
                .next("the drain goes on; ask again"));
            }
            timeout = (timeout * 2).min(Duration::from_secs(2));
        }
    }
}

/// The serial number of a disk: its image's file name without the ending, which for images of a storage repository
/// is the uuid
/// of the VDI. It stays while the process serves the disk, whatever images come to stand on top of the first.
pub(crate) fn serial(image: &ImageSource) -> String {
    let text = image.text();
    let path = text.split_once(':').map_or(text.as_str(), |(_, path)| path);
    // The options of a remote export's name are not part of it.
    let path = if text.starts_with("nbd:") { path.split('?').next().unwrap_or(path) } else { path };
    let stem = std::path::Path::new(path).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}
