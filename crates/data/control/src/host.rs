//! What a disk process can be asked to do, without saying how.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tapio_stat::{Snapshot, VbdId};
use tapio_types::IoLimits;
use zeroize::Zeroize;

use crate::blkif::BlkifReport;
use crate::disk_info::DiskInfo;
use crate::front::Front;
use crate::image_source::ImageSource;
use crate::images::{ImageAnswer, ImageWork};
use crate::limits::{LimitsReport, PoolSpec};
use crate::message::Blkif;
use crate::mirror::{MirrorPivoted, MirrorReport, MirrorRequest};
use crate::polling::Polling;
use crate::stats_text::VbdStats;
use crate::trace::TraceReport;
use crate::{ControlError, Errno, Result};

/// Life of a disk as the tapdisk protocol shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VbdState {
    /// Attached, or open and serving.
    Running,
    /// A pause waits for the requests in flight.
    Pausing,
    /// Paused; the images are closed.
    Paused,
    /// A resume failed: the images are closed and may be resumed again.
    ResumeFailed,
    /// Being closed.
    Closing,
    /// Attached, and its image was closed.
    Closed,
}

impl VbdState {
    /// The bits of the tapdisk protocol.
    pub const fn bits(self) -> i32 {
        match self {
            Self::Running => 0,
            // PAUSE_REQUESTED
            Self::Pausing => 0x10,
            // PAUSED, QUIESCED and CLOSED
            Self::Paused => 0x2a,
            // the same and RESUME_FAILED
            Self::ResumeFailed => 0x22a,
            // SHUTDOWN_REQUESTED
            Self::Closing => 0x40,
            // CLOSED
            Self::Closed => 0x2,
        }
    }
}

/// One disk in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskEntry {
    /// Minor number.
    pub minor: u16,
    /// Where it stands.
    pub state: VbdState,
    /// `type:/path` as it was opened; `None` when nothing is open.
    pub image: Option<String>,
    /// Writes are refused.
    pub read_only: bool,
    /// How it is reached.
    pub fronts: Vec<FrontEntry>,
}

/// The full statistics of a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskReport {
    /// Minor number.
    pub minor: u16,
    /// Where it stands.
    pub state: VbdState,
    /// Counters and histograms; `None` when nothing is open.
    pub counters: Option<Snapshot>,
    /// Requests taken and not yet answered.
    pub in_flight: u64,
    /// Of these, requests that have taken longer than they may and that the storage does not give back.
    pub stuck: u64,
    /// Images, leaf first, with the sectors each served.
    pub images: Vec<ImageReport>,
    /// What the disk has beside its images: a second image, a log of changed blocks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<String>,
    /// Xen guests' devices: rings, requests in flight, what moving data costs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blkif: Vec<BlkifReport>,
}

/// One image of a chain in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageReport {
    /// `type:/path`.
    pub image: String,
    /// Sectors read here.
    pub sectors_read: u64,
    /// Sectors written here.
    pub sectors_written: u64,
}

/// A way to reach a disk, as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontEntry {
    /// Name by which it is removed.
    pub id: u32,
    /// How.
    pub front: Front,
    /// Numbers under which it is published for xsiostat.
    pub vbd: VbdId,
    /// Clients at this moment.
    pub connections: u32,
}

/// A key of an encrypted image. Never printed, and wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(pub Vec<u8>);

impl Drop for Key {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl Key {
    /// Reads a key and nothing behind it.
    ///
    /// # Errors
    /// `EINVAL` unless there are exactly 32 or 64 bytes; why it cannot be read.
    pub fn read(from: impl Read) -> Result<Self> {
        // Room for all of it at once: a vector that grows leaves copies behind.
        let mut key = Self(Vec::with_capacity(80));
        from.take(65).read_to_end(&mut key.0).map_err(|error| ControlError::io("reading the key", &error))?;
        if matches!(key.0.len(), 32 | 64) {
            return Ok(key);
        }
        Err(ControlError::new(Errno::EINVAL, "unsupported key size")
            .next("give a key of exactly 32 or 64 bytes"))
    }

    /// Reads the key in a file.
    ///
    /// # Errors
    /// As [`Key::read`], naming the file.
    pub fn in_file(path: &Path) -> Result<Self> {
        // A pipe must not make whoever asks wait for its writer.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let opened =
            OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| {
                ControlError::io(format_args!("opening the key {}", path.display()), &error)
            })?;
        Self::read(opened).map_err(|error| ControlError {
            message: format!("{}: {}", path.display(), error.message),
            ..error
        })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.0.len())
    }
}

/// OPEN, from either protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// The image or the chain.
    pub image: ImageSource,
    /// Refuse writes.
    pub read_only: bool,
    /// Mirror, or with `standby` the place to go on when the image is full.
    pub secondary: Option<String>,
    /// See `secondary`.
    pub standby: bool,
    /// Time after which a request fails.
    pub request_timeout: Option<Duration>,
    /// Log of changed blocks.
    pub log_path: Option<String>,
    /// Key of an encrypted image.
    pub key: Option<Key>,
    /// Serve NBD on the socket that clients of tapdisk expect, `nbd<pid>.<minor>`.
    pub default_nbd: bool,
    /// Share this page pool.
    pub pool: Option<PoolSpec>,
}

impl OpenRequest {
    /// The plain case.
    pub fn of(image: ImageSource) -> Self {
        Self {
            image,
            read_only: false,
            secondary: None,
            standby: false,
            request_timeout: None,
            log_path: None,
            key: None,
            default_nbd: false,
            pool: None,
        }
    }
}

/// RESUME, from either protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResumeRequest {
    /// Another image or chain; `None` opens the same again.
    pub image: Option<ImageSource>,
    /// As in [`OpenRequest`].
    pub secondary: Option<String>,
    /// As in [`OpenRequest`].
    pub log_path: Option<String>,
}

/// A front end to add.
#[derive(Debug)]
pub struct FrontRequest {
    /// How.
    pub front: Front,
    /// Numbers to publish it under; domain 0 and the minor number without.
    pub vbd: Option<VbdId>,
    /// Descriptors that came with the request, which `front` names by index.
    pub fds: Vec<OwnedFd>,
}

/// Who asks. An operation that waits looks here now and then.
pub trait Caller {
    /// The client has hung up, or the process is asked to end: the wait is in vain.
    fn gone(&self) -> bool;
}

/// A disk process, as the control socket sees it.
///
/// `list`, `stats`, `report` and `fronts` may be called while another operation is under way, by several threads at
/// once, and must not wait for it. All other calls come one at a time.
pub trait DiskHost: Sync {
    /// The disks, by minor number.
    fn list(&self) -> Vec<DiskEntry>;
    /// Statistics in tapdisk's form.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn stats(&self, minor: u16) -> Result<VbdStats>;
    /// Full statistics.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn report(&self, minor: u16) -> Result<DiskReport>;
    /// How the disk is reached.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn fronts(&self, minor: u16) -> Result<Vec<FrontEntry>>;
    /// Makes a disk of that number, with nothing open.
    ///
    /// # Errors
    /// `EEXIST` if there is one, `ENOENT` if the number was not given out, `EAGAIN` if another process has it.
    fn attach(&self, minor: u16) -> Result<()>;
    /// Forgets a disk. The process ends when its last disk is gone: see [`DiskHost::is_empty`].
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EBUSY` while an image is open.
    fn detach(&self, minor: u16) -> Result<()>;
    /// Whether the last disk was detached.
    fn is_empty(&self) -> bool;
    /// Opens an image chain.
    ///
    /// # Errors
    /// `EINVAL` without such a disk, `EALREADY` if one is open, or why the chain cannot be opened.
    fn open(&self, minor: u16, request: &OpenRequest) -> Result<DiskInfo>;
    /// Closes it; `force` does not wait for requests in flight.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why closing failed.
    fn close(&self, minor: u16, force: bool, caller: &dyn Caller) -> Result<()>;
    /// Stops taking requests, waits for those in flight, writes back and closes the images.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `ECANCELED` when the caller went away before it was done.
    fn pause(&self, minor: u16, caller: &dyn Caller) -> Result<()>;
    /// Opens the images again, or others, and goes on.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EINVAL` if it is not paused, or why the chain cannot be opened.
    fn resume(&self, minor: u16, request: &ResumeRequest) -> Result<()>;
    /// Makes the disk at least `len` bytes long while guests use it; says what it looks like then.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EINVAL` if it is longer already or not running, or why it cannot grow.
    fn grow(&self, minor: u16, len: u64) -> Result<DiskInfo>;
    /// What the disk looks like.
    ///
    /// # Errors
    /// `ENODEV` without such a disk or without an image.
    fn disk_info(&self, minor: u16) -> Result<DiskInfo>;
    /// Adds a way to reach the disk.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why it cannot be served.
    fn front_add(&self, minor: u16, request: FrontRequest) -> Result<FrontEntry>;
    /// Takes one away; with `force` also a device of this host that is in use.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `ENOENT` without such a front end, `EBUSY` for a device in use.
    fn front_remove(&self, minor: u16, id: u32, force: bool) -> Result<()>;
    /// Writes a byte into `news` whenever the disk may have another size, as long as there is the front end. Answers
    /// what the disk is now.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `ENOENT` without such a front end.
    fn front_follow(&self, _minor: u16, _id: u32, _news: UnixStream) -> Result<DiskInfo> {
        Err(ControlError::new(Errno::ENOSYS, "this process cannot tell of its disks"))
    }
    /// Sets polling.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn set_polling(&self, minor: u16, polling: Polling) -> Result<()>;
    /// Begins a mirror.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why it cannot begin.
    fn mirror_start(&self, minor: u16, _request: &MirrorRequest) -> Result<MirrorReport> {
        Err(no_mirrors(minor))
    }
    /// Where the mirror stands; `None` without one. As `stats`, it may be called beside another operation.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn mirror_status(&self, minor: u16) -> Result<Option<MirrorReport>> {
        Err(no_mirrors(minor))
    }
    /// Goes on with a mirror whose second side was lost.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why it cannot go on.
    fn mirror_resume(&self, minor: u16) -> Result<()> {
        Err(no_mirrors(minor))
    }
    /// Limits the copy.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EINVAL` without a mirror.
    fn mirror_rate(&self, minor: u16, _rate: u64) -> Result<()> {
        Err(no_mirrors(minor))
    }
    /// Switches over to the second side.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, or why it stays where it is.
    fn mirror_pivot(&self, minor: u16) -> Result<MirrorPivoted> {
        Err(no_mirrors(minor))
    }
    /// Ends the mirror and keeps the first side.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EINVAL` without a mirror.
    fn mirror_cancel(&self, minor: u16) -> Result<()> {
        Err(no_mirrors(minor))
    }
    /// Does something with the images of a disk that goes on being used, or with the jobs that do so.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `ENOENT` without such an image or job, `EBUSY` while another change is at work,
    /// `ENOSPC` where the space would not suffice, or why it cannot be done.
    fn image_work(&self, minor: u16, work: &ImageWork) -> Result<ImageAnswer>;
    /// Limits the disk from now on.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn set_limits(&self, _minor: u16, _limits: &IoLimits) -> Result<()> {
        Err(no_limits())
    }
    /// What the disk is limited to. May be called beside other operations.
    ///
    /// # Errors
    /// `ENODEV` without such a disk.
    fn limits(&self, _minor: u16) -> Result<LimitsReport> {
        Err(no_limits())
    }
    /// Notes when requests pass where, in a ring of `events` events in shared memory.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `ENOMEM` where the ring has no room.
    fn trace_start(&self, _minor: u16, _events: u32) -> Result<TraceReport> {
        Err(no_traces())
    }
    /// Notes nothing more; the ring stays readable unless it is to be forgotten.
    ///
    /// # Errors
    /// `ENODEV` without such a disk, `EINVAL` without a trace.
    fn trace_stop(&self, _minor: u16, _forget: bool) -> Result<TraceReport> {
        Err(no_traces())
    }
    /// Connects a Xen guest's ring.
    ///
    /// # Errors
    /// `ENOSYS` unless this process can.
    fn connect_ring(&self, _minor: u16, _ring: &Blkif) -> Result<()> {
        Err(no_rings())
    }
    /// Disconnects it.
    ///
    /// # Errors
    /// `ENOSYS` unless this process can.
    fn disconnect_ring(&self, _minor: u16, _ring: &Blkif) -> Result<()> {
        Err(no_rings())
    }
    /// Closes everything, cleanly unless `force`.
    ///
    /// # Errors
    /// Why a disk could not be closed; the process ends all the same.
    fn quit(&self, force: bool) -> Result<()>;
    /// Something an operator may want to know.
    fn log(&self, _line: &str) {}
}

fn no_limits() -> ControlError {
    ControlError::new(Errno::ENOSYS, "this process cannot limit its disks")
}

fn no_traces() -> ControlError {
    ControlError::new(Errno::ENOSYS, "this process cannot trace its disks")
}

fn no_mirrors(minor: u16) -> ControlError {
    ControlError::new(Errno::EOPNOTSUPP, format!("this process has no mirrors, so none for disk {minor}"))
}

fn no_rings() -> ControlError {
    ControlError::new(Errno::ENOSYS, "this disk process has no Xen block rings")
        .next("reach it by NBD or vhost-user")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_of_two_lengths_and_are_not_printed() {
        for len in [32, 64] {
            let key = Key::read(&vec![1; len][..]).expect("valid");
            assert_eq!(key.0.len(), len);
            assert_eq!(format!("{key:?}"), format!("Key({len} bytes)"));
        }
        for len in [0, 31, 33, 65, 1000] {
            assert_eq!(Key::read(&vec![1; len][..]).expect_err("invalid").errno, Errno::EINVAL, "{len}");
        }
        let missing = Key::in_file(Path::new("/nonexistent/key")).expect_err("not there");
        assert!(missing.to_string().contains("/nonexistent/key"), "{missing}");
    }
}
