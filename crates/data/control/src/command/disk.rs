//! Commands about disks as wholes: made, opened, paused, closed, looked at.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{DiskCommand, Done};
use crate::disk_report::{DiskEntry, DiskReports};
use crate::image_source::ImageSource;
use crate::key::Key;
use crate::limits::PoolSpec;
use crate::own::{self, FEATURES, PROTOCOL_VERSION};
use crate::plain_path::plain_path;
use crate::share::ShareSpec;
use crate::{ControlError, Errno, Result};

/// Names the version of the client; comes first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// Version of the client.
    pub version: u32,
}

impl DiskCommand for Hello {
    type Reply = own::Hello;
    const IS_CONCURRENT: bool = true;
}

impl Hello {
    /// What the process says of itself.
    pub(super) fn answer(&self) -> Result<own::Hello> {
        if self.version < PROTOCOL_VERSION {
            let why = format!(
                "version {} of the protocol is too old: this process speaks {PROTOCOL_VERSION}",
                self.version
            );
            return Err(
                ControlError::new(Errno::EPROTO, why).next("use the tapio that came with the disk process")
            );
        }
        Ok(own::Hello {
            version: PROTOCOL_VERSION,
            features: FEATURES.iter().map(ToString::to_string).collect(),
            program: "tapio-disk".into(),
            program_version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
        })
    }
}

/// The disks of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {}

impl DiskCommand for List {
    type Reply = Vec<DiskEntry>;
    const IS_CONCURRENT: bool = true;
}

/// Full statistics of one disk, or of all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Minor number; all without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u16>,
}

impl DiskCommand for Stats {
    type Reply = DiskReports;
    const IS_CONCURRENT: bool = true;
}

/// Makes a disk of that number, with nothing open: `EEXIST` if there is one, `ENOENT` if the number was not given out,
/// `EAGAIN` if another process has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for Attach {
    type Reply = Done;
}

/// Forgets a disk: `EBUSY` while an image is open. The process ends when its last disk is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detach {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for Detach {
    type Reply = Done;
}

/// Opens an image: `EINVAL` without such a disk, `EALREADY` if one is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    /// Minor number.
    pub minor: u16,
    /// The image.
    pub image: ImageSource,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Seconds after which a request fails; the default without, and for 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u16>,
    /// Serve NBD on the socket that clients of tapdisk expect, `nbd<pid>.<minor>`.
    #[serde(default)]
    pub default_nbd: bool,
    /// Share this page pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolSpec>,
    /// A second image: every change goes there too, or with `standby` writes once the first is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secondary: Option<String>,
    /// See `secondary`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standby: bool,
    /// The log of changed blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// Index of a passed descriptor that the key of an encrypted image is read from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<u32>,
    /// A file with the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// Bytes of a sector as guests are told, 512 or 4096; those of the image without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector_size: Option<u32>,
    /// How it shares its device; by the default weight without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareSpec>,
}

impl Open {
    /// The plain case.
    pub fn of(minor: u16, image: ImageSource) -> Self {
        Self {
            minor,
            image,
            read_only: false,
            timeout_s: None,
            default_nbd: false,
            pool: None,
            secondary: None,
            standby: false,
            log: None,
            key: None,
            key_file: None,
            sector_size: None,
            share: None,
        }
    }

    /// Reads the key that is named, of descriptors that were counted.
    pub(crate) fn read_key(&self, fds: Vec<OwnedFd>) -> Result<Option<Key>> {
        match (self.key.and_then(|index| fds.into_iter().nth(index as usize)), &self.key_file) {
            (Some(fd), _) => Key::read(File::from(fd)).map(Some),
            (None, Some(path)) => Key::in_file(path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

impl DiskCommand for Open {
    type Reply = crate::DiskInfo;

    fn check(&self, fds: usize) -> Result<()> {
        self.pool.as_ref().map_or(Ok(()), |pool| pool.check().map(drop))?;
        self.share.as_ref().map_or(Ok(()), ShareSpec::check)?;
        self.image.check()?;
        check_log(self.log.as_deref())?;
        if let Some(size) = self.sector_size.filter(|size| !matches!(size, 512 | 4096)) {
            let why = format!("sectors of {size} bytes: 512 or 4096 are possible");
            return Err(ControlError::new(Errno::EINVAL, why));
        }
        match (self.key, &self.key_file) {
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
}

fn check_log(log: Option<&Path>) -> Result<()> {
    log.map_or(Ok(()), |path| plain_path(path, "log", usize::MAX))
}

/// Makes the disk longer while guests use it: `EINVAL` if it is longer already or not running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grow {
    /// Minor number.
    pub minor: u16,
    /// Bytes it shall have at least.
    pub len: u64,
}

impl DiskCommand for Grow {
    type Reply = crate::DiskInfo;
}

/// Closes the image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Close {
    /// Minor number.
    pub minor: u16,
    /// Do not wait for requests in flight.
    #[serde(default)]
    pub force: bool,
}

impl DiskCommand for Close {
    type Reply = Done;
}

/// Drains and closes the images; the guest waits. `ECANCELED` when the caller went away before it was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for Pause {
    type Reply = Done;
}

/// Goes on, with another image if one is given: `EINVAL` if the disk is not paused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Minor number.
    pub minor: u16,
    /// Another image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSource>,
    /// A second image to which every change goes too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secondary: Option<String>,
    /// The log of changed blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
}

impl Resume {
    /// With the image that it had.
    pub const fn of(minor: u16) -> Self {
        Self { minor, image: None, secondary: None, log: None }
    }
}

impl DiskCommand for Resume {
    type Reply = Done;

    fn check(&self, _fds: usize) -> Result<()> {
        self.image.as_ref().map_or(Ok(()), ImageSource::check)?;
        check_log(self.log.as_deref())
    }
}

/// Size and kind of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskInfo {
    /// Minor number.
    pub minor: u16,
}

impl DiskCommand for DiskInfo {
    type Reply = crate::DiskInfo;
}

/// Closes everything and ends the process, whatever came of the closing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quit {
    /// Do not wait for requests in flight.
    #[serde(default)]
    pub force: bool,
}

impl DiskCommand for Quit {
    type Reply = Done;
}
