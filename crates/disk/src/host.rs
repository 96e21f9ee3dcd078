//! The one place that knows the data plane.
//!
//! NOT DONE: the engine is not connected yet, so opening an image is refused. Everything around it is real.

use tapio_control::{ControlError, DiskInfo, Errno, FrontRequest, ImageSource, Polling, Result};
use tapio_stat::{DiskStats, VbdPages};

use crate::table::{OpenSpec, Plane, PlaneDisk, PlaneStatus};

/// The data plane of this process.
pub struct Host;

/// A disk of the data plane: none can exist yet.
pub enum HostDisk {}

impl Plane for Host {
    type Disk = HostDisk;

    fn open(&self, spec: &OpenSpec<'_>, _stats: DiskStats) -> Result<HostDisk> {
        Err(ControlError::new(
            Errno::ENOSYS,
            format!("{} cannot be opened: this build has no engine", spec.image.text()),
        ))
    }
}

impl PlaneDisk for HostDisk {
    fn info(&self) -> DiskInfo {
        match *self {}
    }

    fn status(&self) -> Result<PlaneStatus> {
        match *self {}
    }

    fn pause(&self, _in_vain: &dyn Fn() -> bool) -> Result<()> {
        match *self {}
    }

    fn resume(&self, _image: &ImageSource) -> Result<()> {
        match *self {}
    }

    fn close(&self, _force: bool, _in_vain: &dyn Fn() -> bool) -> Result<()> {
        match *self {}
    }

    fn publish(&self, _pages: Box<VbdPages>) -> Result<usize> {
        match *self {}
    }

    fn withdraw(&self, _slot: usize) -> Option<Box<VbdPages>> {
        match *self {}
    }

    fn front_add(&self, _id: u32, _request: FrontRequest, _slot: usize) -> Result<()> {
        match *self {}
    }

    fn front_remove(&self, _id: u32) -> Result<()> {
        match *self {}
    }

    fn connections(&self, _id: u32) -> u32 {
        match *self {}
    }

    fn set_polling(&self, _polling: Polling) -> Result<()> {
        match *self {}
    }
}
