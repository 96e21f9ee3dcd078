//! Storage repositories.
//!
//! A driver ([`SrDriver`]) knows one type of SR; an attached one is an [`Sr`]. Both are synchronous, because mounts
//! and renames block; their caller has a pool of threads. They keep what must survive on the SR itself, in the
//! layout of XenServer's storage manager, and know neither the database of objects nor its clients.
//!
//! ```text
//! traits    what a driver is                        errors   backend numbers, names and texts
//! file ext network iso rbd udev lun    the drivers      probe    their answers in XML
//! lvm       the driver whose VDIs are logical volumes, and what others on such groups use
//! dir       an SR whose VDIs are files of a directory: what `file` and `ext` have in common
//!   facts index    what is there, at the least cost     create fork resize remove activate merge    what changes it
//!   journal recover    what a kill left
//! external  drivers of others, as scripts and programs
//! block_device   devices of this host: what each is, who uses it, how its queue is set
//! collect   what the collection of an SR does next
//! from_config    what attaches a VDI without a database
//! fill      contents of one disk into another       steps    the names at which a test may end the process
//! transfer  contents of a disk to a socket, and from one
//! scsi iscsi              LUNs of this host, and how it gets at those of a target
//! lock mount command in_place    the host below                closed   what other users could reach
//! lease     several hosts on one SR
//! worker    drivers in processes of their own, which a storage that hangs can keep
//! ```

pub mod block_device;
mod changed_blocks;
pub mod closed;
pub mod collect;
mod command;
mod dir;
pub mod errors;
mod ext;
pub mod external;
mod file;
mod fill;
mod from_config;
mod in_place;
mod iscsi;
mod iso;
pub mod lease;
mod links;
mod lock;
mod lun;
pub mod lvm;
mod mount;
mod network;
mod probe;
mod rbd;
mod scsi;
mod steps;
mod traits;
mod transfer;
mod udev;
pub mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use dir::journal::CloneJournal;
pub use dir::merge_journal::{Found, MergeJournal, MergeKind};
pub use from_config::attach_call;
pub use iscsi::name::{Node, Portal, is_iscsi_name, parse_discovery};
pub use probe::{SrEntry, parse_blkid, sr_list};
pub use scsi::vpd::{Pages, is_scsi_id};
pub use steps::STEPS;
pub use traits::{
    ApiSession, Config, Ctx, DriverInfo, Fork, ForkKind, Fragmentation, LeafSwap, LiveDisk, Merge, MergeCost,
    Merged, NewSr, NewVdi, Notice, Oddity, OddityKind, OpenSpec, Origin, ProbeAnswer, ProbeResult, RoomMade,
    RoomSpare, RoomTaken, RoomWanted, Shortened, Sr, SrDriver, SrStat, Told, VdiInfo,
};
pub use transfer::{Export, HEAD_LEN, Import, StreamFormat};

/// Where drivers keep things on this host.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// SRs are mounted below it, each under its UUID. `/run/sr-mount`.
    pub(crate) mount_dir: PathBuf,
    /// Locks are below it. `/run/tapio`.
    pub(crate) run_dir: PathBuf,
    /// What must survive a reboot. `/var/lib/tapio`.
    pub(crate) state_dir: PathBuf,
}

/// Every driver there is, by the name of its type. SRs are mounted below `mount_dir`, locks are below `run_dir`, and so
/// is what must survive a reboot: see [`registry_with_state`].
pub fn registry(mount_dir: &Path, run_dir: &Path) -> Vec<Arc<dyn SrDriver>> {
    registry_with_state(mount_dir, run_dir, run_dir)
}

/// [`registry`], with a directory for what must survive a reboot.
pub fn registry_with_state(mount_dir: &Path, run_dir: &Path, state_dir: &Path) -> Vec<Arc<dyn SrDriver>> {
    let places = Places {
        mount_dir: mount_dir.to_path_buf(),
        run_dir: run_dir.to_path_buf(),
        state_dir: state_dir.to_path_buf(),
    };
    vec![
        Arc::new(lvm::Lvm::new(places.clone())),
        Arc::new(lvm::resign::Resign),
        Arc::new(ext::Ext::new(places.clone(), ext::FileSystem::Ext4)),
        Arc::new(file::FileDriver::new(places.clone())),
        Arc::new(lun::HbaDriver::new()),
        Arc::new(lun::IscsiDriver::new(&places)),
        Arc::new(lun::OverHba::new(places.clone())),
        Arc::new(lun::OverIscsi::new(places.clone())),
        Arc::new(lun::ResignOverHba::new(places.clone())),
        Arc::new(lun::ResignOverIscsi::new(places.clone())),
        Arc::new(iso::IsoDriver::new(places.clone())),
        udev::driver(places.clone()),
        Arc::new(network::NetworkDriver {
            places: places.clone(),
            info: &network::nfs::INFO,
            share: network::nfs::of,
        }),
        Arc::new(network::NetworkDriver {
            places: places.clone(),
            info: &network::smb::INFO,
            share: network::smb::of,
        }),
        Arc::new(rbd::RbdDriver::new(places.clone())),
        Arc::new(ext::Ext::new(places.clone(), ext::FileSystem::Xfs)),
        Arc::new(ext::Ext::new(places, ext::FileSystem::Btrfs)),
    ]
}
