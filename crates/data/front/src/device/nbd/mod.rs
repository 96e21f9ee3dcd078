//! A disk as `/dev/nbdN`, by the kernel's own NBD client on a socket pair.
//!
//! The connection needs no handshake: both ends know the disk. When it breaks, because the process died, the client
//! keeps requests waiting for [`RECONNECT_S`] and goes on with the next socket it is given: by the process itself
//! ([`Keeper`]), or by the next process of the same disk. What was sent on the old socket and has no answer is sent
//! again within [`LOST_MS`].

mod keeper;
#[doc(hidden)]
pub mod netlink;

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_block::{DiskHandle, Geometry};
use tapio_sys::poll::{self, PollFd, PollFlags};

use super::aside::aside;
use super::note::{Note, Place};
use super::{CALL_MAX, DeviceError, DeviceOptions, stale};
use keeper::Keeper;
use netlink::{Netlink, attribute, command};

/// The kind's name in notes.
pub(super) const KIND: &str = "nbd";
/// The client gives no socket up because a request has no answer: one that waits for a full storage may wait for days.
/// With zero it still looks at each such request from time to time, and sends it again if its socket has been replaced.
const REQUEST_S: u64 = 0;
/// Between two of these looks. The client notes each look at each request in the kernel's log.
const LOST_MS: u64 = 10_000;
/// How long requests wait for another connection.
const RECONNECT_S: u64 = 60;
/// How long a device may take to appear or to go.
const SETTLE_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK_TIME: Duration = Duration::from_millis(10);

/// Of `linux/nbd.h`: what the server can do.
mod flag {
    pub const HAS_FLAGS: u64 = 1 << 0;
    pub const READ_ONLY: u64 = 1 << 1;
    pub const SEND_FLUSH: u64 = 1 << 2;
    pub const SEND_FUA: u64 = 1 << 3;
    pub const SEND_TRIM: u64 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u64 = 1 << 6;
}

/// The NBD server's side of a device.
pub trait Server: Send + Sync {
    /// Serves the disk on a connected socket, past any handshake, with simple replies.
    ///
    /// # Errors
    /// The server takes no more connections.
    fn serve(&self, socket: OwnedFd) -> Result<(), DeviceError>;
    /// Ends the connections there are, when all their requests have ended: what is asked again on
    /// another connection must not be overtaken by its former self.
    ///
    /// # Errors
    /// Not within the time.
    fn drain(&self, within: Duration) -> Result<(), DeviceError>;
}

/// Whether the kernel has the client.
///
/// # Errors
/// It has not, or does not talk to us.
pub(super) fn usable() -> Result<(), DeviceError> {
    Netlink::open().map(drop).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => {
            DeviceError::new(libc::ENOENT, "the kernel has no NBD client, or has not loaded it")
        }
        _ => DeviceError::io("asking for the kernel's NBD client", &error),
    })
}

/// A device of the kernel's NBD client.
pub struct NbdDevice {
    remote: DiskHandle,
    index: u32,
    path: PathBuf,
    place: Place,
    keeper: Keeper,
}

impl std::fmt::Debug for NbdDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdDevice").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Two connected ends: the kernel's and ours.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = UnixStream::pair()?;
    Ok((theirs.into(), ours.into()))
}

fn own_copy(fd: &OwnedFd) -> Result<OwnedFd, DeviceError> {
    fd.as_fd().try_clone_to_owned().map_err(|error| DeviceError::io("copying a socket", &error))
}

/// Gives a device of the client another connection.
fn reconnect(index: u32, token: &str, server: &dyn Server) -> Result<OwnedFd, DeviceError> {
    let failed = |error: &io::Error| DeviceError::io(format_args!("reconnecting /dev/nbd{index}"), error);
    let (theirs, ours) = pair().map_err(|error| failed(&error))?;
    let watched = own_copy(&ours)?;
    server.serve(ours)?;
    let netlink = Netlink::open().map_err(|error| failed(&error))?;
    let message = netlink.command(command::RECONFIGURE).u32(attribute::INDEX, index);
    let message = message.text(attribute::BACKEND_IDENTIFIER, token).socket(&theirs);
    netlink.run(message).map_err(|error| failed(&error))?;
    Ok(watched)
}

fn block_dir(index: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/nbd{index}"))
}

/// Has the client look for requests whose socket has been replaced every [`LOST_MS`]. Where the kernel or its rights do
/// not allow it, it looks every 30 s.
fn look_often(index: u32) {
    let _ = fs::write(block_dir(index).join("queue/io_timeout"), LOST_MS.to_string());
}

/// Whether a device has a connection or waits for one.
fn is_connected(index: u32) -> bool {
    block_dir(index).join("pid").exists()
}

/// Whether a device was connected under this name: its number may have been given to another since. Kernels before 5.14
/// do not say.
fn is_made_by(index: u32, token: &str) -> bool {
    fs::read_to_string(block_dir(index).join("backend")).map_or(true, |backend| backend.trim() == token)
}

fn settle(what: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + SETTLE_MAX;
    while !what() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOOK_TIME);
    }
    true
}

/// Ends a device's connection; what had no answer fails. Tells whether the device is free.
fn disconnect(index: u32) -> io::Result<bool> {
    aside(SETTLE_MAX * 2, move || {
        let netlink = Netlink::open()?;
        netlink.run(netlink.command(command::DISCONNECT).u32(attribute::INDEX, index))?;
        Ok(settle(|| !is_connected(index)))
    })
}

impl NbdDevice {
    /// Makes a device for the disk behind `remote`, or takes over the one that its former process left.
    ///
    /// # Errors
    /// The kernel has no client or no free device, or the device that was left belongs to another disk.
    pub fn attach(
        options: &DeviceOptions,
        remote: DiskHandle,
        server: Arc<dyn Server>,
    ) -> Result<Self, DeviceError> {
        usable().map_err(|error| {
            error.next("load the driver (modprobe nbd), or choose another kind: 'tapio disk device probe'")
        })?;
        let geometry = remote
            .call(CALL_MAX, |data_thread| data_thread.port.geometry())
            .map_err(|gone| DeviceError::gone(&gone))?;
        let place = Place::new(&options.dir, KIND, options.minor);
        let found =
            place.read().filter(|note| is_connected(note.device) && is_made_by(note.device, &note.token));
        if let Some(note) = &found {
            Self::check(note, options, &geometry)?;
        }
        let owner = stale::own_name(options.minor);
        let token = found.as_ref().map_or_else(|| owner.clone(), |note| note.token.clone());
        let (index, watched) = match &found {
            Some(note) => (note.device, reconnect(note.device, &token, &*server)?),
            None => Self::connect(options, &geometry, &token, &*server)?,
        };
        look_often(index);
        let note = Note { device: index, len: geometry.len, owner, token, disk: options.disk.clone() };
        let appeared = place.write(&note).map_err(|error| DeviceError::io("cannot note the device", &error));
        let path = PathBuf::from(format!("/dev/nbd{index}"));
        let keeper = appeared.and_then(|()| Keeper::start(index, note.token.clone(), watched, server));
        match keeper {
            Ok(keeper) if settle(|| path.exists()) => Ok(Self { remote, index, path, place, keeper }),
            other => {
                let _ = disconnect(index);
                place.remove();
                Err(other.err().unwrap_or_else(|| {
                    DeviceError::new(libc::ENOENT, format!("{} does not appear", path.display()))
                        .next("is /dev a devtmpfs?")
                }))
            }
        }
    }

    /// A device that a former process left goes on with the same disk only.
    fn check(note: &Note, options: &DeviceOptions, geometry: &Geometry) -> Result<(), DeviceError> {
        if (note.len, note.disk.as_str()) == (geometry.len, options.disk.as_str()) {
            return Ok(());
        }
        let message = format!(
            "/dev/nbd{} still has requests waiting for disk '{}' of {} bytes, which had minor {} before",
            note.device, note.disk, note.len, options.minor
        );
        Err(DeviceError::new(libc::EBUSY, message)
            .next("start that disk again, or give its device up: 'tapio disk device clean --waiting'"))
    }

    fn connect(
        options: &DeviceOptions,
        geometry: &Geometry,
        token: &str,
        server: &dyn Server,
    ) -> Result<(u32, OwnedFd), DeviceError> {
        let failed = |error: &io::Error| DeviceError::io("the kernel's NBD client refuses the disk", error);
        let (theirs, ours) = pair().map_err(|error| failed(&error))?;
        let watched = own_copy(&ours)?;
        server.serve(ours)?;
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA;
        flags |= match options.read_only || geometry.read_only {
            true => flag::READ_ONLY,
            false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES,
        };
        // No index: the kernel looks for a free device, or makes one.
        let netlink = Netlink::open().map_err(|error| failed(&error))?;
        let message = netlink
            .command(command::CONNECT)
            .u64(attribute::SIZE_BYTES, geometry.len)
            .u64(attribute::BLOCK_SIZE_BYTES, geometry.logical_block_len.into())
            .u64(attribute::TIMEOUT, REQUEST_S)
            .u64(attribute::DEAD_CONN_TIMEOUT, RECONNECT_S)
            .u64(attribute::SERVER_FLAGS, flags)
            .text(attribute::BACKEND_IDENTIFIER, token)
            .socket(&theirs);
        let answer = netlink.run(message).map_err(|error| failed(&error))?;
        let index = netlink::index(&answer)
            .ok_or_else(|| DeviceError::new(libc::EPROTO, "the kernel does not say which device it made"))?;
        Ok((index, watched))
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the client has a connection.
    pub fn is_alive(&self) -> bool {
        self.keeper.is_connected() && is_connected(self.index)
    }

    /// Lets the device take the size that the disk has now.
    ///
    /// # Errors
    /// The kernel does not follow.
    pub fn resize(&self) -> Result<(), DeviceError> {
        let geometry = self
            .remote
            .call(CALL_MAX, |data_thread| data_thread.port.geometry())
            .map_err(|gone| DeviceError::gone(&gone))?;
        let index = self.index;
        let token = self.place.read().map(|note| note.token).unwrap_or_default();
        aside(SETTLE_MAX, move || {
            let netlink = Netlink::open()?;
            let message = netlink.command(command::RECONFIGURE).u32(attribute::INDEX, index);
            let message = message.text(attribute::BACKEND_IDENTIFIER, &token);
            netlink.run(message.u64(attribute::SIZE_BYTES, geometry.len)).map(drop)
        })
        .map_err(|error| {
            DeviceError::io(format_args!("{} does not take the new size", self.path.display()), &error)
        })?;
        if let Some(note) = self.place.read() {
            let _ = self.place.write(&Note { len: geometry.len, ..note });
        }
        Ok(())
    }

    /// The disk has another name from now on: its leaf changed.
    pub fn rename(&self, disk: &str) {
        if let Some(note) = self.place.read() {
            let _ = self.place.write(&Note { disk: disk.to_owned(), ..note });
        }
    }

    /// Detaches the device. Returns whether it is free.
    pub fn detach(self) -> bool {
        self.keeper.stop();
        let free = disconnect(self.index).unwrap_or(false);
        self.place.remove();
        free
    }
}

/// Gives up devices whose processes died and whose disks were not started again: their users get errors.
pub(super) fn clean(dir: &Path) -> Vec<PathBuf> {
    let mut cleaned = Vec::new();
    for (place, note) in
        Place::all(dir, KIND).into_iter().filter(|(_, note)| stale::is_left_over(&note.owner))
    {
        let waits = is_connected(note.device) && is_made_by(note.device, &note.token);
        if waits && disconnect(note.device).unwrap_or(false) {
            cleaned.push(PathBuf::from(format!("/dev/nbd{}", note.device)));
        }
        place.remove();
    }
    cleaned
}

/// Whether the other end of a socket is gone; waits for that for a while.
fn wait_for_end(socket: &OwnedFd, also: &OwnedFd) -> bool {
    let mut entries = [PollFd::new(socket, PollFlags::RDHUP), PollFd::new(also, PollFlags::IN)];
    loop {
        match poll::any(&mut entries, None) {
            Ok(_) => return entries[1].revents().is_empty(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}
