//! A disk as a file, exported by FUSE, and a loop device over that file.
//!
//! Our own end of the protocol, because the data thread itself reads the requests: `/dev/fuse` is polled on its ring,
//! and nothing lies between a request of the kernel and the disk. Needs nothing of the host but FUSE and loop, which
//! every kernel has.

mod server;
#[doc(hidden)]
pub mod wire;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tapio_block::DiskHandle;

use super::aside::{Aside, aside};
use super::fuse_mount::{FS_TYPE, mount, unmount};
use super::{CALL_MAX, DeviceError, DeviceOptions, loop_device, stale};

/// How long making a device may take.
const ATTACH_MAX: Duration = Duration::from_secs(15);
/// How long requests in flight may delay a detach.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long it may take once everything is refused.
const DETACH_MAX: Duration = Duration::from_secs(10);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// An exported file and, if it was asked for, the loop device over it.
#[derive(Debug)]
pub struct FuseDevice {
    remote: DiskHandle,
    id: u64,
    dir: PathBuf,
    file: PathBuf,
    device: Option<PathBuf>,
}

/// Opens a connection to the kernel.
pub(super) fn open_fuse() -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/fuse")
}

impl FuseDevice {
    /// Exports the disk behind `remote` as a file, and puts a loop device over that where `with_loop` is set.
    ///
    /// # Errors
    /// There is no FUSE or no loop device to be had, or the data thread does not answer.
    pub fn attach(options: &DeviceOptions, with_loop: bool, remote: DiskHandle) -> Result<Self, DeviceError> {
        let fuse = open_fuse().map_err(|error| {
            DeviceError::io("cannot open /dev/fuse", &error)
                .next("run as root on a host with FUSE ('modprobe fuse'), or serve the disk by NBD")
        })?;
        let dir = options.dir.join(stale::own_name(options.minor));
        // A left-over of the same name can only be our own.
        let _ = unmount(&dir);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|error| DeviceError::io(format_args!("cannot make {}", dir.display()), &error))?;
        let read_only = options.read_only;
        mount(&fuse, &dir, read_only).map_err(|error| {
            let _ = fs::remove_dir(&dir);
            DeviceError::io(format_args!("cannot mount {FS_TYPE} on {}", dir.display()), &error)
                .next("run as root (CAP_SYS_ADMIN), or serve the disk by NBD")
        })?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let mut made = Self { remote, id, file: dir.join(wire::FILE_NAME), dir, device: None };
        match made.begin(fuse, with_loop, (read_only, options.owner)) {
            Ok(device) => {
                made.device = device;
                Ok(made)
            }
            Err(error) => {
                made.end();
                Err(error)
            }
        }
    }

    fn begin(
        &self,
        fuse: File,
        with_loop: bool,
        (read_only, owner): (bool, Option<(u32, u32)>),
    ) -> Result<Option<PathBuf>, DeviceError> {
        let id = self.id;
        self.remote
            .call(CALL_MAX, move |data_thread| {
                server::start(data_thread, id, fuse, (read_only, owner))
                    .map(|()| data_thread.port.geometry().logical_block_len)
            })
            .map_err(|gone| DeviceError::gone(&gone))?
            .map_err(|error| DeviceError::io("no memory for a device", &error))
            .and_then(|sector_len| {
                let file = self.file.clone();
                let made = aside(ATTACH_MAX, move || {
                    File::open(&file)?;
                    if with_loop {
                        loop_device::attach(&file, sector_len, read_only).map(Some)
                    } else {
                        Ok(None)
                    }
                });
                made.map_err(|error| {
                    DeviceError::io("cannot put a loop device over the exported file", &error).next(
                        "'tapio disk device probe' says what this host has; 'fuse-file' needs no loop device",
                    )
                })
            })
    }

    /// The device, or the file where there is none.
    pub fn path(&self) -> &Path {
        self.device.as_deref().unwrap_or(&self.file)
    }

    /// The exported file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether there is a loop device over the file.
    pub fn has_loop(&self) -> bool {
        self.device.is_some()
    }

    /// Whether the kernel still talks to us.
    pub fn is_alive(&self) -> bool {
        let id = self.id;
        self.remote.call(CALL_MAX, move |_| server::is_alive(id)).unwrap_or(false)
    }

    /// Lets the device take the size that the disk has now.
    ///
    /// # Errors
    /// The kernel does not follow.
    pub fn resize(&self) -> Result<(), DeviceError> {
        let id = self.id;
        self.remote
            .call(CALL_MAX, move |_| server::announce_size(id))
            .map_err(|gone| DeviceError::gone(&gone))?;
        let (file, device) = (self.file.clone(), self.device.clone());
        aside(ATTACH_MAX, move || {
            // Asking is what makes the kernel learn the new size.
            fs::metadata(&file)?;
            device.map_or(Ok(()), |device| loop_device::resize(&device))
        })
        .map_err(|error| {
            DeviceError::io(format_args!("{} does not take the new size", self.path().display()), &error)
        })
    }

    /// Detaches the device and unmounts the file. Requests in flight may end if that does not take long; otherwise they
    /// fail. Returns whether no program used it any more.
    pub fn detach(self) -> bool {
        let free = self.detach_loop();
        self.end();
        free
    }

    fn detach_loop(&self) -> bool {
        let Some(device) = self.device.clone() else { return true };
        let file = self.file.clone();
        let work = Aside::start(move || loop_device::detach(&device, &file, TIMEOUT));
        let Ok(work) = work else { return false };
        let first = work.wait(TIMEOUT);
        let id = self.id;
        // Whatever comes from now on, from a last user or for want of room in a paused disk, fails.
        let _ = self.remote.call(CALL_MAX, move |_| server::refuse(id));
        let result = match first {
            Some(result) => Some(result),
            None => work.wait(DETACH_MAX),
        };
        matches!(result, Some(Ok(true)))
    }

    fn end(&self) {
        // A program that still uses the file keeps it, and gets errors; the name is gone.
        let dir = self.dir.clone();
        let _ = aside(DETACH_MAX, move || unmount(&dir));
        let id = self.id;
        let _ = self.remote.call(CALL_MAX, move |data_thread| server::end(data_thread, id));
        let _ = fs::remove_dir(&self.dir);
    }
}
