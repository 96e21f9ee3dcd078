//! Devices that come and go are noticed: an SR that offers devices is scanned when the kernel tells of one.
//!
//! The kernel tells by netlink, with udev or without. A container may hear nothing of that; there the directories that
//! get the nodes and links are watched. What happened is found out by scanning; the messages only say when.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tapio_sys::poll::{self, PollFd, PollFlags};

use super::attached::{Attached, HOT_PLUG};
use super::{Call, Storage, scan};

/// The kernel's own messages; those of udev are another group.
const KERNEL: u32 = 1;
/// Links of udev, and partitions, come soon after a device: so long it must be quiet before a scan.
const QUIET: Duration = Duration::from_millis(200);
/// A scan is not put off any longer than this.
const PUT_OFF_MAX: Duration = Duration::from_secs(2);
/// How often it is looked at whether the SR is still attached.
const LOOK: Duration = Duration::from_secs(5);
/// Another operation has the SR: tried again then.
const AGAIN: Duration = Duration::from_millis(500);
/// Directories that get nodes and links.
const DIRECTORIES: [&str; 2] = ["/dev", "/dev/disk/by-id"];
/// A message of the kernel, or some events of a directory.
const BUFFER_LEN: usize = 16 << 10;

/// Watches for an SR that has just been attached, if its driver wants that, until it is attached no more.
pub(super) fn watch(call: &Call, attached: &Arc<Attached>) {
    if !attached.can(HOT_PLUG) {
        return;
    }
    let db = &call.part.db;
    let pbds = db.find("PBD", "SR", &attached.reference);
    let location = pbds.first().and_then(|pbd| pbd.map("device_config").get("location").map(PathBuf::from));
    let (storage, sr) = (Arc::downgrade(&call.part), Arc::downgrade(attached));
    let watch = match Watch::new(location) {
        Ok(watch) => watch,
        Err(error) => {
            tracing::warn!(sr = %attached.uuid, %error, "devices that come and go are noticed by sr-scan only");
            return;
        }
    };
    let run = move || follow(watch, &storage, &sr);
    if let Err(error) = std::thread::Builder::new().name("hot-plug".to_owned()).spawn(run) {
        tracing::warn!(sr = %attached.uuid, %error, "no thread to notice devices that come and go");
    }
}

fn follow(mut watch: Watch, storage: &Weak<Storage>, sr: &Weak<Attached>) {
    loop {
        let told = watch.wait(LOOK);
        let (Some(storage), Some(attached)) = (storage.upgrade(), sr.upgrade()) else { return };
        let is_here =
            storage.state().attached.get(&attached.reference).is_some_and(|now| Arc::ptr_eq(now, &attached));
        if !is_here {
            return;
        }
        match told {
            Ok(true) => watch.settle(),
            Ok(false) => continue,
            Err(error) => {
                tracing::error!(sr = %attached.uuid, %error, "devices that come and go are noticed by sr-scan only");
                return;
            }
        }
        let call = Call::own(&storage);
        loop {
            match scan::scan(&call, &attached) {
                Err(error) if error.code == "OTHER_OPERATION_IN_PROGRESS" => std::thread::sleep(AGAIN),
                Err(error) => {
                    tracing::warn!(sr = %attached.uuid, %error, "it could not be scanned after a device came or went");
                    break;
                }
                Ok(()) => break,
            }
        }
    }
}

/// What tells of devices.
#[derive(Debug)]
struct Watch {
    kernel: Option<OwnedFd>,
    directories: Option<File>,
}

impl Watch {
    /// Hears the kernel, and watches the directories of nodes and links, `location` as well.
    ///
    /// # Errors
    /// Neither works.
    fn new(location: Option<PathBuf>) -> io::Result<Self> {
        let kernel = kernel();
        let directories = directories(location);
        match (kernel, directories) {
            (Err(error), Err(_)) => Err(error),
            (kernel, directories) => Ok(Self { kernel: kernel.ok(), directories: directories.ok() }),
        }
    }

    /// Whether something about a block device was told within `limit`.
    fn wait(&mut self, limit: Duration) -> io::Result<bool> {
        let mut fds = Vec::new();
        fds.extend(self.kernel.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        fds.extend(self.directories.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        match poll::any(&mut fds, Some(limit)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(false),
            Ok(false) => return Ok(false),
            told => told?,
        };
        drop(fds);
        let mut buffer = [0; BUFFER_LEN];
        let mut is_block = false;
        if let Some(kernel) = &self.kernel {
            loop {
                match recv(kernel, &mut buffer, RecvFlags::DONTWAIT) {
                    Ok((len, _)) if len > 0 => is_block |= is_of_block_device(&buffer[..len.min(BUFFER_LEN)]),
                    // Messages were lost: anything may have happened.
                    Err(rustix::io::Errno::NOBUFS) => is_block = true,
                    _ => break,
                }
            }
        }
        if let Some(directories) = &mut self.directories {
            while matches!(directories.read(&mut buffer), Ok(len) if len > 0) {
                is_block = true;
            }
        }
        Ok(is_block)
    }

    /// Waits until it is quiet.
    fn settle(&mut self) {
        let until = Instant::now() + PUT_OFF_MAX;
        while Instant::now() < until && matches!(self.wait(QUIET), Ok(true)) {}
    }
}

/// Whether a message of the kernel, words that end with a zero, is about a block device.
fn is_of_block_device(message: &[u8]) -> bool {
    message.split(|&byte| byte == 0).any(|word| word == b"SUBSYSTEM=block")
}

fn kernel() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
    Ok(socket)
}

fn directories(location: Option<PathBuf>) -> io::Result<File> {
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let kinds = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_TO | WatchFlags::MOVED_FROM;
    let mut watched = 0;
    for directory in DIRECTORIES.map(PathBuf::from).into_iter().chain(location) {
        // One that is not there has nothing, and the one above tells of it.
        watched += usize::from(inotify::add_watch(&events, &directory, kinds).is_ok());
    }
    if watched == 0 { Err(io::ErrorKind::NotFound.into()) } else { Ok(events.into()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_block_devices_are_heard() {
        assert!(is_of_block_device(b"add@/devices/x\0ACTION=add\0SUBSYSTEM=block\0SEQNUM=1\0"));
        assert!(!is_of_block_device(b"add@/devices/x\0SUBSYSTEM=net\0NAME=SUBSYSTEM=block2\0"));
        assert!(!is_of_block_device(b""));
    }

    #[test]
    fn a_link_in_the_directory_is_heard() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let mut watch = Watch::new(Some(dir.path().to_path_buf())).expect("inotify");
        symlink("/dev/null", dir.path().join("sdx")).expect("room");
        // Devices of the host that runs the test may come and go as well.
        assert!(watch.wait(Duration::from_secs(60)).expect("it is open"));
    }
}
