//! Our own protocol: a line of JSON each way, on the socket of the tapdisk protocol.
//!
//! ```text
//!   → {"id":1,"command":"hello","version":1}
//!   ← {"id":1,"ok":{"version":1,"features":["fronts",…],"program":"tapio-disk","program_version":"0.1.0","pid":4711}}
//!   → {"id":2,"command":"front-add","minor":0,"front":{"kind":"nbd-unix","path":"/run/d.sock"}}
//!   ← {"id":2,"ok":{"id":1,"front":{…},"vbd":{"domid":0,"devid":0},"connections":0}}
//!   → {"id":3,"command":"pause","minor":9}
//!   ← {"id":3,"error":{"code":"ENODEV","errno":19,"message":"there is no disk 9","next":"…"}}
//! ```
//!
//! `hello` comes first and says which version and features the process has; commands follow in any number, each
//! answered before the next is read. Descriptors ride on the bytes of the line that names them by index. A field
//! that is not known is an error: a misspelt option must not be taken for none.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tapio_stat::VbdId;
use tapio_types::IoLimits;

use crate::front::Front;
use crate::image_source::ImageSource;
use crate::images::{self, ImageWork};
use crate::limits::{PoolSpec, check_limits};
use crate::mirror::{self, MirrorCopy, MirrorRequest};
use crate::plain_path::plain_path;
use crate::polling::Polling;
use crate::trace;
use crate::{ControlError, Errno, Result};

/// Version of the protocol.
pub const PROTOCOL_VERSION: u32 = 1;
/// What this version can do, as `hello` answers it.
pub const FEATURES: &[&str] = &[
    "tapdisk",
    "chain",
    "fronts",
    "nbd-unix",
    "nbd-tcp",
    "nbd-tls",
    "vhost-user",
    "fd-passing",
    "block",
    "histograms",
    "polling",
    "mirror",
    "changed-block-log",
    "snapshot",
    "commit",
    "key",
    "grow",
    "limits",
    "page-pool",
    "blkif",
    "trace",
    "follow",
];
/// Longest line, its newline included. A chain of 30 images with long paths fits many times.
pub const LINE_LEN_MAX: usize = 256 * 1024;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Says who speaks; comes first.
    Hello {
        /// Version of the client.
        version: u32,
    },
    /// The disks of the process.
    List {},
    /// Full statistics of one disk, or of all.
    Stats {
        /// Minor number; all without.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        minor: Option<u16>,
    },
    /// Makes a disk.
    Attach {
        /// Minor number.
        minor: u16,
    },
    /// Forgets a disk.
    Detach {
        /// Minor number.
        minor: u16,
    },
    /// Opens an image.
    Open {
        /// Minor number.
        minor: u16,
        /// The image.
        image: ImageSource,
        /// Refuse writes.
        #[serde(default)]
        read_only: bool,
        /// Seconds after which a request fails.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_s: Option<u16>,
        /// Serve NBD where clients of tapdisk expect it.
        #[serde(default)]
        default_nbd: bool,
        /// Share this page pool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pool: Option<PoolSpec>,
        /// A second image: every change goes there too, or with `standby` writes once the first is full.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        secondary: Option<String>,
        /// See `secondary`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        standby: bool,
        /// The log of changed blocks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        log: Option<PathBuf>,
        /// Index of a passed descriptor that the key of an encrypted image is read from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<u32>,
        /// A file with the key.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key_file: Option<PathBuf>,
    },
    /// Makes the disk longer while guests use it.
    Grow {
        /// Minor number.
        minor: u16,
        /// Bytes it shall have at least.
        len: u64,
    },
    /// Closes the image.
    Close {
        /// Minor number.
        minor: u16,
        /// Do not wait for requests in flight.
        #[serde(default)]
        force: bool,
    },
    /// Drains and closes the images; the guest waits.
    Pause {
        /// Minor number.
        minor: u16,
    },
    /// Goes on, with another image if one is given.
    Resume {
        /// Minor number.
        minor: u16,
        /// Another image.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<ImageSource>,
        /// A second image to which every change goes too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        secondary: Option<String>,
        /// The log of changed blocks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        log: Option<PathBuf>,
    },
    /// Size and kind of the disk.
    DiskInfo {
        /// Minor number.
        minor: u16,
    },
    /// Adds a way to reach the disk.
    FrontAdd {
        /// Minor number.
        minor: u16,
        /// How.
        front: Front,
        /// Numbers to publish it under.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vbd: Option<VbdId>,
    },
    /// Takes one away.
    FrontRemove {
        /// Minor number.
        minor: u16,
        /// Its id.
        front: u32,
        /// Also a device of this host that is in use.
        #[serde(default)]
        force: bool,
    },
    /// Tells who serves a front end when the disk may have another size, by a byte on the socket that comes along, as
    /// long as there is the front end or until another socket comes. Answers size and kind of the disk.
    FrontFollow {
        /// Minor number.
        minor: u16,
        /// Its id.
        front: u32,
    },
    /// How the disk is reached.
    FrontList {
        /// Minor number.
        minor: u16,
    },
    /// Adaptive polling.
    SetPolling {
        /// Minor number.
        minor: u16,
        /// Longest spin in microseconds; 0 is off.
        max_us: u32,
        /// Spin only while this percentage of the host is idle.
        idle_percent: u8,
    },
    /// Begins a mirror: every change goes to a second storage too, and what is there already is copied.
    MirrorStart {
        /// Minor number.
        minor: u16,
        /// The second storage.
        target: ImageSource,
        /// What is copied.
        #[serde(default)]
        copy: MirrorCopy,
        /// Bytes a second that the copy may move; 0 is no limit.
        #[serde(default)]
        rate: u64,
        /// Milliseconds that the second storage may take for an answer before it is lost.
        #[serde(default = "mirror::patience_ms")]
        patience_ms: u32,
    },
    /// Where the mirror stands; null without one.
    MirrorStatus {
        /// Minor number.
        minor: u16,
    },
    /// Goes on with a mirror whose second storage was lost.
    MirrorResume {
        /// Minor number.
        minor: u16,
    },
    /// Lets the copy move so many bytes a second.
    MirrorRate {
        /// Minor number.
        minor: u16,
        /// Bytes a second; 0 is no limit.
        rate: u64,
    },
    /// Switches over to the second storage.
    MirrorPivot {
        /// Minor number.
        minor: u16,
    },
    /// Ends the mirror and keeps the first storage.
    MirrorCancel {
        /// Minor number.
        minor: u16,
    },
    /// A new image becomes the leaf, and the present one its parent.
    Snapshot {
        /// Minor number.
        minor: u16,
        /// Where the new image is made.
        leaf: PathBuf,
        /// How long requests may be held back, in milliseconds.
        #[serde(default = "images::stall_ms")]
        stall_ms: u32,
    },
    /// Merges an image into its parent.
    Commit {
        /// Minor number.
        minor: u16,
        /// Which image.
        image: PathBuf,
        /// Bytes a second that the copy may move; 0 is no limit.
        #[serde(default)]
        rate: u64,
        /// Begin also where the space may not suffice.
        #[serde(default)]
        force: bool,
    },
    /// Long work on a disk.
    JobList {
        /// Minor number.
        minor: u16,
    },
    /// Stops a job.
    JobCancel {
        /// Minor number.
        minor: u16,
        /// The job.
        job: u32,
    },
    /// Sets the speed of a job.
    JobRate {
        /// Minor number.
        minor: u16,
        /// The job.
        job: u32,
        /// Bytes a second; 0 is no limit.
        rate: u64,
    },
    /// What the disk may do, from now on.
    SetLimits {
        /// Minor number.
        minor: u16,
        /// All limits; those left out are none.
        limits: IoLimits,
    },
    /// What the disk may do, and what that has cost.
    Limits {
        /// Minor number.
        minor: u16,
    },
    /// Notes when requests pass where, from now on.
    TraceStart {
        /// Minor number.
        minor: u16,
        /// How many events are kept, a power of two.
        #[serde(default = "trace::events")]
        events: u32,
    },
    /// Notes nothing more; what was noted stays readable.
    TraceStop {
        /// Minor number.
        minor: u16,
        /// It does not stay, and its memory is given back.
        #[serde(default)]
        forget: bool,
    },
    /// Ends the process.
    Quit {
        /// Do not wait for requests in flight.
        #[serde(default)]
        force: bool,
    },
}

impl Command {
    /// The disk and what is to be done with its images, where it is that.
    pub fn image_work(&self) -> Option<(u16, ImageWork)> {
        Some(match self {
            Self::Snapshot { minor, leaf, stall_ms } => {
                (*minor, ImageWork::Snapshot { leaf: leaf.clone(), stall_ms: *stall_ms })
            }
            Self::Commit { minor, image, rate, force } => {
                (*minor, ImageWork::Commit { image: image.clone(), rate: *rate, force: *force })
            }
            Self::JobList { minor } => (*minor, ImageWork::Jobs),
            Self::JobCancel { minor, job } => (*minor, ImageWork::JobCancel { job: *job }),
            Self::JobRate { minor, job, rate } => (*minor, ImageWork::JobRate { job: *job, rate: *rate }),
            _ => return None,
        })
    }

    /// Whether it may run beside another command.
    pub const fn is_reentrant(&self) -> bool {
        matches!(
            self,
            Self::Hello { .. }
                | Self::List {}
                | Self::Stats { .. }
                | Self::FrontList { .. }
                | Self::MirrorStatus { .. }
                | Self::JobList { .. }
                | Self::Limits { .. }
        )
    }

    /// Checks everything that can be wrong without looking at a disk.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self, fds: usize) -> Result<()> {
        match self {
            Self::Open { image, log, key, key_file, pool, .. } => {
                pool.as_ref().map_or(Ok(()), |pool| pool.check().map(drop))?;
                image.check()?;
                check_log(log.as_ref())?;
                check_key(*key, key_file.as_deref(), fds)
            }
            Self::SetLimits { limits, .. } => check_limits(limits),
            Self::TraceStart { events, .. } => trace::check_events(*events),
            Self::Resume { image, log, .. } => {
                image.as_ref().map_or(Ok(()), ImageSource::check).and_then(|()| check_log(log.as_ref()))
            }
            Self::MirrorStart { target, copy, rate, patience_ms, .. } => {
                let (target, patience_ms) = (target.clone(), *patience_ms);
                MirrorRequest { target, copy: *copy, rate: *rate, patience_ms }.check()
            }
            Self::FrontAdd { front, .. } => front.check(fds),
            Self::FrontFollow { .. } if fds != 1 => Err(ControlError::new(
                Errno::EINVAL,
                format!(
                    "who follows a disk is told by one socket, and {fds} descriptors came with the request"
                ),
            )),
            Self::Snapshot { leaf: path, .. } | Self::Commit { image: path, .. } => {
                plain_path(path, "image", usize::MAX)
            }
            Self::SetPolling { max_us, idle_percent, .. } => {
                Polling { max_us: *max_us, idle_percent: *idle_percent }.check()
            }
            _ => Ok(()),
        }
    }
}

fn check_log(log: Option<&PathBuf>) -> Result<()> {
    log.map_or(Ok(()), |path| plain_path(path, "log", usize::MAX))
}

fn check_key(index: Option<u32>, file: Option<&Path>, fds: usize) -> Result<()> {
    match (index, file) {
        (Some(_), Some(_)) => {
            Err(ControlError::new(Errno::EINVAL, "give a key by a descriptor or by a file, not both"))
        }
        (Some(index), None) if index as usize >= fds => Err(ControlError::new(
            Errno::EINVAL,
            format!("descriptor {index} was named as the key but {fds} came with the request"),
        )),
        (None, Some(path)) => plain_path(path, "key", usize::MAX),
        _ => Ok(()),
    }
}

/// A command with the number that its answer repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the client.
    pub id: u64,
    /// What is asked.
    pub command: Command,
}

/// An error on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Name of the error number.
    pub code: String,
    /// The number.
    pub errno: i32,
    /// A sentence.
    pub message: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl From<&ControlError> for ErrorBody {
    fn from(error: &ControlError) -> Self {
        Self {
            code: error.errno.name().to_owned(),
            errno: error.errno.raw(),
            message: error.message.clone(),
            next: error.next.clone(),
        }
    }
}

impl From<ErrorBody> for ControlError {
    fn from(body: ErrorBody) -> Self {
        Self { errno: Errno::new(body.errno), message: body.message, next: body.next }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Of the request.
    pub id: u64,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<Value>,
    /// Or why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

impl Reply {
    /// The line.
    pub fn line(&self) -> String {
        // Only maps with keys that are not strings cannot be written, and there are none.
        let mut line =
            serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"id\":0,\"error\":\"{error}\"}}"));
        line.push('\n');
        line
    }
}

/// The answer to `hello`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the process.
    pub version: u32,
    /// See [`FEATURES`].
    pub features: Vec<String>,
    /// Its name.
    pub program: String,
    /// Its version.
    pub program_version: String,
    /// Its number.
    pub pid: u32,
}

/// Reads a line without its newline. The number of a request that is not understood is given with the error where
/// it can be found, so that the answer reaches whoever waits for it.
///
/// # Errors
/// `EPROTO` for what is not JSON of this shape.
pub fn parse_request(line: &[u8]) -> std::result::Result<Request, (u64, ControlError)> {
    let bad = |id: u64, why: String| {
        let error = ControlError::new(Errno::EPROTO, format!("the request was not understood: {why}"));
        (id, error.next("compare it with 'tapio disk --help' of the same version"))
    };
    let mut value: Value = serde_json::from_slice(line).map_err(|error| bad(0, error.to_string()))?;
    let Some(fields) = value.as_object_mut() else { return Err(bad(0, "it is not an object".into())) };
    let id = match fields.remove("id") {
        None => 0,
        Some(id) => id.as_u64().ok_or_else(|| bad(0, "its id is not a whole number".into()))?,
    };
    let command = Command::deserialize(value).map_err(|error| bad(id, error.to_string()))?;
    Ok(Request { id, command })
}

#[cfg(test)]
mod tests;
