//! Virtual machines.
//!
//! A driver ([`VmDriver`]) starts guests of one kind and gives them disks. It is synchronous, knows neither the
//! database of objects nor its clients, and keeps what it needs to find its guests again below a directory of its
//! own, so that guests outlive the toolstack's daemon.

mod traits;

pub use traits::{DiskSpec, FrontSpec, PluggedDisk, ShutdownKind, VmDriver, VmEvent, VmSpec, VmState};
