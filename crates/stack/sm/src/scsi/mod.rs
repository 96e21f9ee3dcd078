//! SCSI disks of this host, and their identities, as sysfs has them: neither udev nor a program is asked.
//!
//! ```text
//! tree    the files of sysfs, counted       vpd     from pages of a disk to its SCSIid
//! disk    one path to a LUN                 lun     all paths to one, and the device over them
//! adapter host bus adapters
//! ```

pub(crate) mod adapter;
pub(crate) mod disk;
pub(crate) mod lun;
pub(crate) mod tree;
pub(crate) mod vpd;

pub(crate) use adapter::Adapters;
pub(crate) use disk::Disk;
pub(crate) use lun::{Lun, Seen, group, has_multipathd};
pub(crate) use tree::Tree;
pub(crate) use vpd::is_scsi_id;
