//! What each command of our own protocol does, a file for a topic.
//!
//! A handler finds the disk in the [`Table`] and does the work. What asks for the data plane alone is a handler of
//! `Table<Host>`; what also changes what the table says of the disk works on any [`Plane`](crate::table::Plane), and is
//! tried without data.

mod disks;
mod fronts;
mod grow;
mod images;
mod mirror;
mod settings;

use tapio_control::{Blkif, DiskHost, Result, VbdStats};

use crate::host::Host;
use crate::table::Table;

impl DiskHost for Table<Host> {
    fn stats(&self, minor: u16) -> Result<VbdStats> {
        self.stats(minor)
    }

    fn connect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        self.connect_ring(minor, ring)
    }

    fn disconnect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        self.disconnect_ring(minor, ring)
    }

    fn is_empty(&self) -> bool {
        self.is_empty()
    }

    fn log(&self, line: &str) {
        crate::log::line(line);
    }
}
