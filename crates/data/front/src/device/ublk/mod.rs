//! A disk as `/dev/ublkbN`, by the kernel's user-space block driver (Linux 6.5 or later).
//!
//! The device outlives its process: when that dies, the driver keeps requests waiting, and those in flight are asked
//! again as soon as a process of the same disk takes the device over ([`Note`] is how it finds it). The device's
//! users notice a pause.

mod control;
mod queue;
mod uapi;

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_block::{DiskHandle, Geometry};

use super::note::{Note, Place};
use super::{CALL_MAX, DeviceError, DeviceOptions, stale};
use control::Driver;
use uapi::{Info, feature, state};

/// The control device.
pub(super) const CONTROL: &str = "/dev/ublk-control";
/// The kind's name in notes.
pub(super) const KIND: &str = "ublk";
/// What a kernel must be able to do.
const NEEDED: u64 = feature::USER_RECOVERY | feature::RECOVERY_REISSUE | feature::IOCTL_ENCODE;
/// How long the nodes of a new device may take to appear.
const NODE_MAX: Duration = Duration::from_secs(5);
/// How long the driver may take to notice that a process has died.
const NOTICE_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK_TIME: Duration = Duration::from_millis(10);
/// How long requests in flight may delay the end of a device.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long stopping a device may take once everything is refused.
const STOP_MAX: Duration = Duration::from_secs(10);

/// Whether the driver can do what is needed.
///
/// # Errors
/// It cannot, or does not answer.
pub(super) fn usable() -> Result<(), DeviceError> {
    let offered = Driver::features().map_err(|error| DeviceError::io("asking the ublk driver", &error))?;
    match offered & NEEDED {
        NEEDED => Ok(()),
        _ => Err(DeviceError::new(libc::EOPNOTSUPP, "the kernel's ublk driver cannot recover devices")),
    }
}

/// A device of the driver.
#[derive(Debug)]
pub struct UblkDevice {
    remote: DiskHandle,
    id: u32,
    path: PathBuf,
    place: Place,
    resizable: bool,
}

fn failed(doing: impl std::fmt::Display) -> impl FnOnce(io::Error) -> DeviceError {
    move |error| DeviceError::io(doing, &error)
}

impl UblkDevice {
    /// Makes a device for the disk behind `remote`, or takes over the one that its former process left.
    ///
    /// # Errors
    /// There is no such driver, it refuses, or the device that was left belongs to another disk.
    pub fn attach(options: &DeviceOptions, remote: DiskHandle) -> Result<Self, DeviceError> {
        let offered = Driver::features().map_err(|error| {
            DeviceError::io(CONTROL, &error).next(
                "load the driver (modprobe ublk_drv), or choose another kind: 'tapio disk device probe'",
            )
        })?;
        usable()?;
        let geometry = remote
            .call(CALL_MAX, |data_thread| data_thread.port.geometry())
            .map_err(|gone| DeviceError::gone(&gone))?;
        let place = Place::new(&options.dir, KIND, options.minor);
        let found = place.read();
        let left = found.as_ref().map(|note| Self::left(note, options, &geometry)).transpose()?.flatten();
        let id = match left {
            Some(id) => id,
            None => {
                let flags = NEEDED | offered & feature::UPDATE_SIZE;
                Self::add(options, &geometry, flags)?
            }
        };
        let owner = stale::own_name(options.minor);
        let token = found.filter(|_| left.is_some()).map_or_else(|| owner.clone(), |note| note.token);
        let note = Note { device: id, len: geometry.len, owner, token, disk: options.disk.clone() };
        let made = Self {
            remote,
            id,
            path: PathBuf::from(format!("/dev/ublkb{id}")),
            place,
            resizable: offered & feature::UPDATE_SIZE != 0,
        };
        let begun = made
            .place
            .write(&note)
            .map_err(failed("cannot note the device"))
            .and_then(|()| made.begin(left.is_some()));
        match begun {
            Ok(()) => Ok(made),
            // What waits for its disk goes on waiting.
            Err(error) if left.is_some() => {
                made.end();
                Err(error)
            }
            Err(error) => {
                made.take_away();
                Err(error)
            }
        }
    }

    /// The device that a former process of this disk left, if it waits.
    fn left(note: &Note, options: &DeviceOptions, geometry: &Geometry) -> Result<Option<u32>, DeviceError> {
        let deadline = Instant::now() + NOTICE_MAX;
        loop {
            match Driver::info(note.device) {
                // No such device any more.
                Err(_) => return Ok(None),
                Ok(info) if info.state == state::QUIESCED => break,
                Ok(info) if info.state == state::DEAD => {
                    Driver::delete(note.device).map_err(failed("taking a dead device away"))?;
                    return Ok(None);
                }
                // The process has died just now, and the driver has not noticed; or the number is another device's.
                Ok(_) if Instant::now() >= deadline => return Ok(None),
                Ok(_) => std::thread::sleep(LOOK_TIME),
            }
        }
        if (note.len, note.disk.as_str()) == (geometry.len, options.disk.as_str()) {
            return Ok(Some(note.device));
        }
        let message = format!(
            "/dev/ublkb{} still has requests waiting for disk '{}' of {} bytes, which had minor {} before",
            note.device, note.disk, note.len, options.minor
        );
        Err(DeviceError::new(libc::EBUSY, message)
            .next("start that disk again, or give its device up: 'tapio disk device clean --waiting'"))
    }

    fn add(options: &DeviceOptions, geometry: &Geometry, flags: u64) -> Result<u32, DeviceError> {
        let wanted = Info {
            queues: 1,
            depth: queue::DEPTH,
            state: state::DEAD,
            buffer_len: queue::REQUEST_LEN_MAX,
            device: u32::from(options.minor),
            server_pid: 0,
            flags,
        };
        let added = match Driver::add(wanted) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                // Any number will do.
                Driver::add(Info { device: u32::MAX, ..wanted })
            }
            result => result,
        };
        let info = added.map_err(failed("the ublk driver makes no device"))?;
        let params = uapi::params(
            geometry.len,
            geometry.logical_block_len,
            geometry.physical_block_len,
            options.read_only || geometry.read_only,
            queue::REQUEST_LEN_MAX,
        );
        if info.depth != queue::DEPTH || info.buffer_len < queue::REQUEST_LEN_MAX {
            let _ = Driver::delete(info.device);
            return Err(DeviceError::new(
                libc::EOPNOTSUPP,
                "the ublk driver offers shorter queues than asked for",
            ));
        }
        match Driver::set_params(info.device, &params) {
            Ok(()) => Ok(info.device),
            Err(error) => {
                let _ = Driver::delete(info.device);
                Err(failed("the ublk driver refuses the disk's parameters")(error))
            }
        }
    }

    /// Serves the device, and lets it appear or go on.
    fn begin(&self, recover: bool) -> Result<(), DeviceError> {
        if recover {
            Driver::recover(self.id).map_err(failed(format_args!("taking over {}", self.path.display())))?;
        }
        let node = format!("/dev/ublkc{}", self.id);
        let file = open_node(Path::new(&node)).map_err(failed(&node))?;
        let id = self.id;
        self.remote
            .call(CALL_MAX, move |data_thread| queue::start(data_thread, id, file))
            .map_err(|gone| DeviceError::gone(&gone))?
            .map_err(failed("no memory for a device"))?;
        let begun = if recover { Driver::recovered(id) } else { Driver::start(id) };
        begun.map_err(failed(format_args!("starting {}", self.path.display())))?;
        wait_for(&self.path).map_err(failed(self.path.display()))
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the driver still talks to us.
    pub fn is_alive(&self) -> bool {
        let id = self.id;
        self.remote.call(CALL_MAX, move |_| queue::is_alive(id)).unwrap_or(false)
    }

    /// Lets the device take the size that the disk has now.
    ///
    /// # Errors
    /// The driver cannot (before Linux 6.16).
    pub fn resize(&self) -> Result<(), DeviceError> {
        if !self.resizable {
            return Err(DeviceError::new(
                libc::EOPNOTSUPP,
                format!(
                    "{} keeps its old size: this kernel's ublk devices cannot change theirs",
                    self.path.display()
                ),
            )
            .next("detach the device and attach it again"));
        }
        let geometry = self
            .remote
            .call(CALL_MAX, |data_thread| data_thread.port.geometry())
            .map_err(|gone| DeviceError::gone(&gone))?;
        Driver::resize(self.id, geometry.len / 512)
            .map_err(failed(format_args!("{} does not take the new size", self.path.display())))?;
        if let Some(note) = self.place.read() {
            let _ = self.place.write(&Note { len: geometry.len, ..note });
        }
        Ok(())
    }

    /// Removes the device. Returns whether that succeeded.
    pub fn detach(self) -> bool {
        self.take_away()
    }

    fn take_away(&self) -> bool {
        let id = self.id;
        let stop = Driver::stop(id);
        let stopped = stop.and_then(|stop| {
            let first = stop.wait(TIMEOUT);
            // What the disk has no room for, because it is paused, must not hold the end up.
            let _ = self.remote.call(CALL_MAX, move |_| queue::refuse(id));
            first.or_else(|| stop.wait(STOP_MAX)).unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
        });
        self.end();
        let gone = Driver::delete(id);
        if gone.is_ok() {
            self.place.remove();
        }
        stopped.is_ok() && gone.is_ok()
    }

    fn end(&self) {
        let id = self.id;
        let _ = self.remote.call(CALL_MAX, move |data_thread| queue::end(data_thread, id));
    }

    /// The disk has another name from now on: its leaf changed.
    pub fn rename(&self, disk: &str) {
        if let Some(note) = self.place.read() {
            let _ = self.place.write(&Note { disk: disk.to_owned(), ..note });
        }
    }
}

fn wait_for(path: &Path) -> io::Result<()> {
    let deadline = Instant::now() + NODE_MAX;
    while !path.exists() {
        if Instant::now() >= deadline {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the node does not appear: is /dev a devtmpfs?",
            ));
        }
        std::thread::sleep(LOOK_TIME);
    }
    Ok(())
}

fn open_node(path: &Path) -> io::Result<File> {
    wait_for(path)?;
    OpenOptions::new().read(true).write(true).open(path)
}

/// Gives up devices whose processes died and whose disks were not started again: their users get errors.
pub(super) fn clean(dir: &Path) -> Vec<PathBuf> {
    let mut cleaned = Vec::new();
    for (place, note) in
        Place::all(dir, KIND).into_iter().filter(|(_, note)| stale::is_left_over(&note.owner))
    {
        match Driver::info(note.device) {
            Ok(info) if info.state == state::QUIESCED || info.state == state::DEAD => {
                let stopped = Driver::stop(note.device).map(|stop| stop.wait(STOP_MAX));
                if stopped.is_ok() && Driver::delete(note.device).is_ok() {
                    cleaned.push(PathBuf::from(format!("/dev/ublkb{}", note.device)));
                    place.remove();
                }
            }
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => place.remove(),
            Err(_) => {}
        }
    }
    cleaned
}
