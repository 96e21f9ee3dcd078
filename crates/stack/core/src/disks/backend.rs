//! What a disk process is asked, apart from how.

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tapio_control::command::SecretName;
use tapio_control::{DiskInfo, MirrorCopy, MirrorReport, Polling, PoolSpec, RoomReport, ShareSpec};
use tapio_model::ApiError;
use tapio_sm::{LeafSwap, OpenSpec, Shortened};
use tapio_stat::pool::PoolInfo;
use tapio_stat::{Snapshot, VbdId};
use tapio_types::{Access, ChainSpec, ImageKind, IoLimits, RingTuning, TransferSizes};
use tapio_vm::FrontSpec;
use uuid::Uuid;

use super::place::ExportNote;

/// A process, told apart from a later one with the same number by when it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// When it was started, in clock ticks after the host was.
    pub started: u64,
}

/// How a disk shall behave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Requests and bytes a second.
    pub limits: IoLimits,
    /// Longest spin in microseconds, and least idle share of the host in percent.
    pub polling: (u32, u8),
    /// Pages of the SR's pool, where a number is set.
    pub pool_pages: Option<u32>,
    /// Class and level of the kernel's I/O scheduler, as `ioprio_set` takes it.
    pub io_priority: Option<u16>,
    /// Bytes of a sector as the guest is told: what is wanted, and what it was told once the disk is open.
    #[serde(default)]
    pub sector_size: Option<u32>,
    /// Its part of the device beside other disks.
    #[serde(default)]
    pub share: ShareSpec,
    /// The rings of a guest of Xen.
    #[serde(default)]
    pub rings: RingTuning,
    /// How its requests go to its storage.
    #[serde(default)]
    pub transfers: TransferSizes,
}

/// What a disk process may do beyond reading and writing images of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// It makes block devices of this host.
    pub devices: bool,
    /// It opens images of Ceph.
    pub rbd: bool,
}

impl Rights {
    /// The type of the SRs whose images need librbd.
    const RBD: &'static str = "rbd";

    /// For a VDI of an SR of this type.
    pub fn of(sr_type: &str, devices: bool) -> Self {
        Self { devices, rbd: sr_type == Self::RBD }
    }

    /// For these images.
    pub fn of_chain(chain: &ChainSpec, devices: bool) -> Self {
        Self { devices, rbd: chain.layers.iter().any(|layer| layer.kind == ImageKind::Rbd) }
    }
}

/// Where a disk is offered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The front end's number in its process.
    pub id: Option<u32>,
    /// The node, for a block device of this host.
    pub node: Option<PathBuf>,
}

/// Disk processes, or what stands for them.
///
/// Every method ends at `until` at the latest, with an error if need be.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Starts a process without disks, for this VBD.
    ///
    /// # Errors
    /// It does not start.
    fn start(&self, vbd: Uuid, rights: Rights, until: Instant) -> Result<Process, ApiError>;

    /// A minor number that is not in `used`, nor taken by another process. Nothing is taken yet.
    ///
    /// # Errors
    /// All are taken.
    fn free_minor(&self, used: &dyn Fn(u16) -> bool) -> Result<u16, ApiError>;

    /// Takes a minor number for the process; false when another process was quicker. Undone by [`Self::end`].
    ///
    /// # Errors
    /// The process does not answer.
    fn take_minor(&self, _process: Process, _minor: u16, _until: Instant) -> Result<bool, ApiError> {
        // A backend with numbers of its own shares them with no other process.
        Ok(true)
    }

    /// Opens images as disk `minor`, which the process has taken; answers its size and kind. Undone by [`Self::end`].
    ///
    /// # Errors
    /// An image is missing, damaged, or open elsewhere.
    fn open(
        &self,
        process: Process,
        minor: u16,
        with: &OpenSpec,
        pool: &PoolSpec,
        tuning: &Tuning,
        until: Instant,
    ) -> Result<DiskInfo, ApiError>;

    /// Offers the disk.
    ///
    /// # Errors
    /// The socket or the device cannot be made.
    fn offer(
        &self,
        process: Process,
        minor: u16,
        front: &FrontSpec,
        access: Access,
        id: Option<VbdId>,
        until: Instant,
    ) -> Result<Offer, ApiError>;

    /// Offers the disk by NBD under secret names, none of which is valid yet; answers a front end for each place, and
    /// none where another program has the port at one of them.
    ///
    /// # Errors
    /// A place cannot be listened on, or the process does not answer.
    fn export(
        &self,
        _process: Process,
        _minor: u16,
        _name: &str,
        _export: &ExportNote,
        _until: Instant,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        Err(ApiError::internal("this kind of disk processes exports nothing"))
    }

    /// Says by which names clients may connect to front ends from now on, and disconnects those that came by a name of
    /// `cut`.
    ///
    /// # Errors
    /// The process does not answer.
    fn admit(
        &self,
        _process: Process,
        _minor: u16,
        _fronts: &[u32],
        (_names, _cut): (&[SecretName], &[SecretName]),
        _until: Instant,
    ) -> Result<(), ApiError> {
        Ok(())
    }

    /// Clients of all front ends of a disk.
    ///
    /// # Errors
    /// The process does not answer.
    fn clients(&self, _process: Process, _minor: u16, _until: Instant) -> Result<u32, ApiError> {
        Ok(0)
    }

    /// No longer offers it. Without `force` a device in use stays.
    ///
    /// # Errors
    /// It is in use, or the process does not answer.
    fn withdraw(
        &self,
        process: Process,
        minor: u16,
        offer: &Offer,
        force: bool,
        until: Instant,
    ) -> Result<(), ApiError>;

    /// Closes the images and ends the process; one that is gone already is fine. With `force` it is killed where it
    /// does not end by itself.
    ///
    /// # Errors
    /// Requests are still in flight.
    fn end(&self, process: Process, minor: Option<u16>, force: bool, until: Instant) -> Result<(), ApiError>;

    /// The page pools of this host.
    fn pools(&self) -> Vec<PoolInfo> {
        Vec::new()
    }

    /// Drains and closes the images; guests wait.
    ///
    /// # Errors
    /// Not in time; the disk goes on.
    fn pause(&self, process: Process, minor: u16, until: Instant) -> Result<(), ApiError>;

    /// Goes on with these images.
    ///
    /// # Errors
    /// They cannot be opened.
    fn resume(&self, process: Process, minor: u16, with: &OpenSpec, until: Instant) -> Result<(), ApiError>;

    /// Whether the process can go on with a new leaf, and a new log of changed blocks, without a pause. If so, nothing
    /// keeps it from answering [`Self::swap_leaf`] soon.
    fn swaps_leaf(&self, _process: Process, _with_log: bool, _until: Instant) -> bool {
        false
    }

    /// Goes on with these images without a pause; see [`LiveDisk::swap_leaf`](tapio_sm::LiveDisk::swap_leaf).
    ///
    /// # Errors
    /// The process does not answer.
    fn swap_leaf(
        &self,
        _process: Process,
        _minor: u16,
        _with: &OpenSpec,
        _new_log: bool,
        _until: Instant,
    ) -> Result<LeafSwap, ApiError> {
        Err(ApiError::internal("this kind of disk processes goes on with other images after a pause only"))
    }

    /// Begins to mirror the disk onto images that nothing else uses: what `copy` says goes there, at so many
    /// bytes a second at most (0: no limit), and every change from now on.
    ///
    /// # Errors
    /// The images cannot be opened, or have another length; the disk has a mirror already.
    fn mirror_start(
        &self,
        _process: Process,
        _minor: u16,
        _target: &ChainSpec,
        (_copy, _rate): (MirrorCopy, u64),
        _until: Instant,
    ) -> Result<(), ApiError> {
        Err(ApiError::internal("this kind of disk processes mirrors nothing"))
    }

    /// Where the mirror of the disk stands; none without one.
    ///
    /// # Errors
    /// The process does not answer.
    fn mirror_status(
        &self,
        _process: Process,
        _minor: u16,
        _until: Instant,
    ) -> Result<Option<MirrorReport>, ApiError> {
        Ok(None)
    }

    /// The disk goes on on the images of its mirror; guests wait for a moment.
    ///
    /// # Errors
    /// The two sides are not the same: nothing has changed. Or the process does not answer.
    fn mirror_pivot(&self, _process: Process, _minor: u16, _until: Instant) -> Result<(), ApiError> {
        Err(ApiError::internal("this kind of disk processes mirrors nothing"))
    }

    /// Ends the mirror; the disk stays where it is. That there is none is fine.
    ///
    /// # Errors
    /// The process does not answer.
    fn mirror_cancel(&self, _process: Process, _minor: u16, _until: Instant) -> Result<(), ApiError> {
        Ok(())
    }

    /// The leaf that the disk has open, as the process names it; none while it has none.
    ///
    /// # Errors
    /// The process does not answer.
    fn leaf(&self, _process: Process, _minor: u16, _until: Instant) -> Result<Option<PathBuf>, ApiError> {
        Ok(None)
    }

    /// Makes the disk longer.
    ///
    /// # Errors
    /// The image has no room for it.
    fn grow(&self, process: Process, minor: u16, bytes: u64, until: Instant) -> Result<(), ApiError>;

    /// Looks whether the volume of the disk has become longer; how its room stands, where it asks for room.
    ///
    /// # Errors
    /// The process does not answer.
    fn look_for_room(
        &self,
        _process: Process,
        _minor: u16,
        _until: Instant,
    ) -> Result<Option<RoomReport>, ApiError> {
        Ok(None)
    }

    /// Ends the leaf at the byte `to` of its volume, which the disk knows to have `from` bytes.
    ///
    /// # Errors
    /// The process does not answer, or its storage fails: it may have done it, or do so later.
    fn shorten(
        &self,
        _process: Process,
        _minor: u16,
        _from: u64,
        _to: u64,
        _until: Instant,
    ) -> Result<Shortened, ApiError> {
        Ok(Shortened::Refused(ApiError::internal("disks of this kind keep their volumes as they are")))
    }

    /// Behaves like this from now on.
    ///
    /// # Errors
    /// The process does not answer.
    fn tune(&self, process: Process, minor: u16, tuning: &Tuning, until: Instant) -> Result<(), ApiError>;

    /// Whether it lives.
    fn is_alive(&self, process: Process) -> bool;

    /// Whether it serves this disk, with images open.
    fn serves(&self, process: Process, minor: u16, until: Instant) -> bool;

    /// What the disk has counted, read where its process publishes it; none where it publishes nothing, or not yet.
    fn counters(&self, _process: Process, _minor: u16) -> Option<Snapshot> {
        None
    }

    /// The processes that this toolstack started, with their VBDs.
    fn ours(&self) -> Vec<(Process, Uuid)>;

    /// Clears away what processes left that died.
    fn clean_up(&self) {}

    /// The highest domain number that a disk of this host is published under, also by others than this toolstack.
    fn domid_max(&self) -> u32 {
        0
    }

    /// The last disk of an SR went: what its disks shared is cleared away.
    fn pool_ended(&self) {}
}

/// What polling the control program takes.
pub(super) const fn polling((max_us, idle_percent): (u32, u8)) -> Polling {
    Polling { max_us, idle_percent }
}
