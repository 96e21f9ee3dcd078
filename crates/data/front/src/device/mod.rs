//! The disk as a block device of this host.
//!
//! ```text
//!   /dev/ublkbN ── kernel ── io_uring commands ────────┐
//!   /dev/nbdN ──── kernel ── socket pair ── NBD server ─┼─▶ Port ──▶ disk
//!   /dev/loopN ─── kernel ── file ── /dev/fuse ─────────┘
//! ```
//!
//! Three ways, by what the kernel has; [`probe()`] says what works here and why the rest does not. All are made and
//! detached within a time limit, and none leaves the host hanging when the process dies: what is left is either
//! waited for ([`ublk`], [`nbd`]: a restarted process goes on with it) or cleaned up by the next process ([`stale`]).

pub mod aside;
mod error;
pub mod fuse;
mod fuse_mount;
mod loop_device;
pub mod nbd;
mod note;
pub mod probe;
pub mod stale;
pub mod ublk;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tapio_block::DiskHandle;
use tapio_types::DeviceHow;

pub use error::DeviceError;
pub use fuse::FuseDevice;
pub use nbd::NbdDevice;
pub use probe::{Found, probe};
pub use ublk::UblkDevice;

/// The data thread answers questions within this time, or it is gone.
pub(crate) const CALL_MAX: Duration = Duration::from_secs(10);

/// What kind of device, and for which disk.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// How the device is made.
    pub how: DeviceHow,
    /// Writes are refused.
    pub read_only: bool,
    /// User and group of an exported file; root without.
    pub owner: Option<(u32, u32)>,
    /// Where exported files are mounted and notes about devices are kept; made where it is missing.
    pub dir: PathBuf,
    /// The disk's minor number: part of names, and what tells a restarted process which device is its own.
    pub minor: u16,
    /// The disk's name: a device that waits for one disk is never given to another.
    pub disk: String,
}

/// A disk as a device of this host. [`LocalDevice::detach`] ends it; a value that is dropped leaves the device to
/// the next clean-up.
#[derive(Debug)]
pub enum LocalDevice {
    /// A file exported by FUSE, with or without a loop device.
    Fuse(FuseDevice),
    /// The kernel's user-space block driver.
    Ublk(UblkDevice),
    /// The kernel's NBD client.
    Nbd(NbdDevice),
}

impl LocalDevice {
    /// Makes a device. `server` makes the NBD server that a device by NBD is a client of.
    ///
    /// # Errors
    /// The kind does not work here, or the device was not made in time: then nothing of it is left.
    pub fn attach(
        options: &DeviceOptions,
        remote: DiskHandle,
        server: impl FnOnce() -> Result<Arc<dyn nbd::Server>, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let how = match options.how {
            DeviceHow::Auto => probe::choose()
                .map_err(|missing| DeviceError::new(libc::ENODEV, missing.why).next(missing.next))?,
            how => how,
        };
        match how {
            DeviceHow::Ublk => UblkDevice::attach(options, remote).map(Self::Ublk),
            DeviceHow::Nbd => NbdDevice::attach(options, remote, server()?).map(Self::Nbd),
            DeviceHow::Fuse => FuseDevice::attach(options, true, remote).map(Self::Fuse),
            DeviceHow::FuseFile | DeviceHow::Auto => {
                FuseDevice::attach(options, false, remote).map(Self::Fuse)
            }
        }
    }

    /// How it was made.
    pub fn how(&self) -> DeviceHow {
        match self {
            Self::Ublk(_) => DeviceHow::Ublk,
            Self::Nbd(_) => DeviceHow::Nbd,
            Self::Fuse(fuse) if fuse.has_loop() => DeviceHow::Fuse,
            Self::Fuse(_) => DeviceHow::FuseFile,
        }
    }

    /// Where it is: a block device, or a file for [`DeviceHow::FuseFile`].
    pub fn path(&self) -> &Path {
        match self {
            Self::Fuse(fuse) => fuse.path(),
            Self::Ublk(ublk) => ublk.path(),
            Self::Nbd(nbd) => nbd.path(),
        }
    }

    /// Whether the kernel still talks to us.
    pub fn is_alive(&self) -> bool {
        match self {
            Self::Fuse(fuse) => fuse.is_alive(),
            Self::Ublk(ublk) => ublk.is_alive(),
            Self::Nbd(nbd) => nbd.is_alive(),
        }
    }

    /// Lets it take the size that the disk has now.
    ///
    /// # Errors
    /// The kernel does not follow, or cannot.
    pub fn resize(&self) -> Result<(), DeviceError> {
        match self {
            Self::Fuse(fuse) => fuse.resize(),
            Self::Ublk(ublk) => ublk.resize(),
            Self::Nbd(nbd) => nbd.resize(),
        }
    }

    /// The disk has another name from now on: its leaf changed.
    pub fn rename(&self, disk: &str) {
        match self {
            Self::Fuse(_) => {}
            Self::Ublk(ublk) => ublk.rename(disk),
            Self::Nbd(nbd) => nbd.rename(disk),
        }
    }

    /// Detaches it, in bounded time whatever its users do. Returns whether it had no user any more; one that stays
    /// gets errors.
    pub fn detach(self) -> bool {
        match self {
            Self::Fuse(fuse) => fuse.detach(),
            Self::Ublk(ublk) => ublk.detach(),
            Self::Nbd(nbd) => nbd.detach(),
        }
    }
}

/// Whether a block device is claimed for exclusive use: by a mount, a volume manager. True also where that cannot be
/// found out in time.
pub fn is_claimed(device: &Path) -> bool {
    let device = device.to_path_buf();
    aside::aside(CALL_MAX, move || Ok(loop_device::is_claimed(&device))).unwrap_or(true)
}

/// Removes what processes that died left: mounts and loop devices at once; with `waiting` also devices that wait for
/// their process to come back, whose users then get errors. `dir` is [`DeviceOptions::dir`].
///
/// # Errors
/// The kernel's lists cannot be read, or it takes too long.
pub fn clean(dir: &Path, waiting: bool) -> Result<Vec<PathBuf>, DeviceError> {
    let mut cleaned =
        stale::clean(dir).map_err(|error| DeviceError::io("cleaning up after dead processes", &error))?;
    if waiting {
        cleaned.extend(ublk::clean(dir));
        cleaned.extend(nbd::clean(dir));
    }
    Ok(cleaned)
}
