//! The ways to reach a disk, as commands name them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tapio_stat::VbdId;
use tapio_types::DeviceHow;

use crate::blkif::BlkifFront;
use crate::plain_path::plain_path;
use crate::tls::TlsSettings;
use crate::{ControlError, Errno, Result};

/// Room in a socket's address, its NUL included.
const SOCKET_PATH_MAX: usize = 108;
/// Longest export name of the NBD protocol.
const EXPORT_LEN_MAX: usize = 4096;

/// What keeps clients out of an export that do not have a name for it, and those out that have stopped using it.
///
/// Names are given by `front-admit`; none is valid before. The export is in no list and is never the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NbdGuard {
    /// Seconds after which a client is disconnected that neither sends a request nor takes a byte of a reply.
    pub client_time_s: u32,
}

/// A way to reach a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Front {
    /// NBD on a UNIX socket.
    NbdUnix {
        /// The socket; made by the process unless `listener` is given.
        path: PathBuf,
        /// Index of a passed descriptor that already listens.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        listener: Option<u32>,
        /// Name of the export; any name is served when empty.
        #[serde(default)]
        export: String,
        /// Refuse writes over this front end.
        #[serde(default)]
        read_only: bool,
    },
    /// NBD on a TCP port.
    NbdTcp {
        /// Where to listen.
        addr: SocketAddr,
        /// How clients begin TLS; none without.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tls: Option<TlsSettings>,
        /// Name of the export; any name is served when empty.
        #[serde(default)]
        export: String,
        /// Refuse writes over this front end.
        #[serde(default)]
        read_only: bool,
        /// Clients need a secret name; none without: then `export` is the name for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guard: Option<NbdGuard>,
    },
    /// vhost-user-blk.
    VhostUser {
        /// The socket; made by the process unless a descriptor is given.
        socket: PathBuf,
        /// Index of a passed descriptor that already listens.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        listener: Option<u32>,
        /// Index of a passed descriptor that is already connected.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        connection: Option<u32>,
        /// Queues offered to the guest.
        #[serde(default = "one")]
        queues: u16,
        /// Entries of a queue, a power of two.
        #[serde(default = "queue_size")]
        queue_size: u16,
        /// Refuse writes over this front end.
        #[serde(default)]
        read_only: bool,
    },
    /// A block device of this host.
    Block {
        /// How it is made.
        #[serde(default)]
        how: DeviceHow,
        /// Where it is: said in answers, not in requests.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<PathBuf>,
        /// Refuse writes over this front end.
        #[serde(default)]
        read_only: bool,
        /// User and group of an exported file (`fuse-file`); root without. Nodes of devices are the kernel's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<(u32, u32)>,
    },
    /// A block device of a Xen guest.
    Blkif(Box<BlkifFront>),
}

fn one() -> u16 {
    1
}

/// The front end chooses; this only bounds it.
fn queue_size() -> u16 {
    1024
}

impl Front {
    /// The kind's name.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NbdUnix { .. } => "nbd-unix",
            Self::NbdTcp { .. } => "nbd-tcp",
            Self::VhostUser { .. } => "vhost-user",
            Self::Block { .. } => "block",
            Self::Blkif(_) => "blkif",
        }
    }

    /// Where clients connect.
    pub fn address(&self) -> String {
        match self {
            Self::NbdUnix { path, .. } => path.display().to_string(),
            Self::NbdTcp { addr, .. } => addr.to_string(),
            Self::VhostUser { socket, .. } => socket.display().to_string(),
            Self::Block { device: Some(device), .. } => device.display().to_string(),
            Self::Block { how, device: None, .. } => format!("device:{how}"),
            Self::Blkif(front) => front.address(),
        }
    }

    /// The directory in which its socket is made, if it is made in one.
    pub fn directory(&self) -> Option<PathBuf> {
        match self {
            Self::NbdUnix { path, .. } | Self::VhostUser { socket: path, connection: None, .. } => {
                path.parent().map(Path::to_path_buf)
            }
            Self::NbdTcp { .. } | Self::VhostUser { .. } | Self::Block { .. } | Self::Blkif(_) => None,
        }
    }

    /// The numbers by which a guest knows it: those under which it is published when no others are given.
    pub fn vbd(&self) -> Option<VbdId> {
        match self {
            Self::Blkif(front) => Some(VbdId { domid: front.domid, devid: front.devid }),
            _ => None,
        }
    }

    /// The index of the connected descriptor it wants, if it wants one.
    pub const fn connection_index(&self) -> Option<u32> {
        match self {
            Self::VhostUser { connection, .. } => *connection,
            Self::NbdUnix { .. } | Self::NbdTcp { .. } | Self::Block { .. } | Self::Blkif(_) => None,
        }
    }

    /// Whether it is reached by NBD.
    pub const fn is_nbd(&self) -> bool {
        matches!(self, Self::NbdUnix { .. } | Self::NbdTcp { .. })
    }

    /// Whether it is a device of this host.
    pub const fn is_block(&self) -> bool {
        matches!(self, Self::Block { .. })
    }

    /// Whether it can be served at all, given how many descriptors came along.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self, fds: usize) -> Result<()> {
        let invalid = |message: String| Err(ControlError::new(Errno::EINVAL, message));
        let given = |index: &Option<u32>| match index {
            Some(index) if *index as usize >= fds => {
                invalid(format!("descriptor {index} was named but {fds} came with the request"))
            }
            _ => Ok(()),
        };
        match self {
            Self::NbdUnix { path, listener, export, .. } => {
                plain_path(path, "socket", SOCKET_PATH_MAX - 1)?;
                given(listener)?;
                check_export(export)
            }
            Self::NbdTcp { export, tls, .. } => {
                tls.as_ref().map_or(Ok(()), TlsSettings::check)?;
                check_export(export)
            }
            Self::Block { device: None, .. } => Ok(()),
            Self::Blkif(front) => front.check(fds),
            Self::Block { device: Some(_), .. } => {
                invalid("the name of a device is not for the asker to choose".into())
            }
            Self::VhostUser { socket, listener, connection, queues, queue_size, .. } => {
                plain_path(socket, "socket", SOCKET_PATH_MAX - 1)?;
                given(listener)?;
                given(connection)?;
                if listener.is_some() && connection.is_some() {
                    return invalid("give a listening or a connected descriptor, not both".into());
                }
                if !(1..=64).contains(queues) {
                    return invalid(format!("{queues} queues: a disk has 1 to 64"));
                }
                if !queue_size.is_power_of_two() || !(2..=1024).contains(queue_size) {
                    return invalid(format!("queue size {queue_size}: a power of two from 2 to 1024"));
                }
                Ok(())
            }
        }
    }
}

pub(crate) fn check_export(export: &str) -> Result<()> {
    if export.len() > EXPORT_LEN_MAX || export.chars().any(char::is_control) {
        return Err(ControlError::new(
            Errno::EINVAL,
            format!("an export's name has at most {EXPORT_LEN_MAX} bytes and no control characters"),
        ));
    }
    Ok(())
}
