//! tapback: brings the disks of Xen guests and their disk processes together, through xenstore.
//!
//! ```text
//!   toolstack ──writes──▶ /local/domain/0/backend/vbd3/DOMID/DEVID ◀──watches── Tapback ──jobs──▶ disk process
//!   guest     ──writes──▶ /local/domain/DOMID/device/vbd/DEVID     ◀──watches──    │     Front::Blkif, or what a
//!                                                                                  │     foreign tapdisk understands
//!                                   features, properties, state ◀──one transaction─┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `table` | what is to be done, from where both sides stand: a pure function |
//! | `keys`, `values` | the nodes that others write, and what they hold, read with suspicion |
//! | `device` | what is remembered of a device, and what it is offered |
//! | `locate`, `disks` | which disk process it belongs to, and how that takes and gives up a ring |
//! | `plan` | one look at xenstore: read, decide and write in one transaction |
//! | `engine` | the loop: events, looks, jobs |
//!
//! Nothing here is on the path of a request: when this program ends, disks go on, and the next one finds them again.

/// Says a line in the program's log.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { tapio_log::say("tapio-tapback", format_args!($($words)*)) };
}

mod device;
mod disks;
mod engine;
mod jobs;
mod keys;
mod locate;
mod lock;
mod plan;
mod table;
mod values;

pub use device::Offer;
pub use disks::{Disks, Link, Linked, Order, Processes, Trouble};
pub use engine::{Plugged, Settings, Tapback};
pub use locate::{DiskAt, Wanted};
pub use lock::{Lock, serving};
pub use values::Fault;
