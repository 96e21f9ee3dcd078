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
mod room;
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

    /// Closes the disks as at any end, those whose storage hangs by force, and ends the process: its threads that the
    /// kernel holds end when the storage answers.
    fn abandon(&self, conversations: usize) {
        crate::log::line(&format!("ends without {conversations} commands that a storage does not answer"));
        let code = match crate::start::finish(self) {
            Ok(()) => 0,
            Err(error) => {
                crate::log::line(&error.to_string());
                i32::from(u8::try_from(error.errno.raw()).unwrap_or(1))
            }
        };
        std::process::exit(code)
    }

    fn log(&self, line: &str) {
        crate::log::line(line);
    }
}
