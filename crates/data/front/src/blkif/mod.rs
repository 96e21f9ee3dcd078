//! The block devices of Xen guests: the back end of `blkif`, in the process of the disk.
//!
//! ```text
//!    control thread                              data thread
//!   BlkifServer::connect ── rings, grants ──▶ Device ── Queue ── BackRing ─┐
//!     maps the rings' pages                     │   │                      │ shared pages
//!     opens the record of requests in flight    │   ├── Mover: copies,     │ of the guest
//!                                               │   │   mapped pages ──────┘
//!                                               │   └── RecordQueue: what is repeated after a death
//!                                               └── Port ──▶ the disk
//! ```
//!
//! A guest is hostile. What it can write is copied once and then checked ([`check`]); what it shares is reached by the
//! hypervisor or by the kernel alone; what it breaks is its own device. Classes of published mistakes of such back ends
//! have a test each (`tests/it/blkif_advisories.rs`).

pub mod check;
pub mod record;

mod core;
mod device;
mod mover;
mod persistent;
mod queue;
mod report;
mod server;
mod slots;

pub use mover::MoveCounts;
pub use persistent::{PERSISTENT_MAX, PersistentCounts};
pub use report::{Broken, QueueCounts, QueueReport, UnderWay};
pub use server::{BlkifOptions, BlkifRing, BlkifServer, BlkifState, Start};

use std::sync::Arc;

use tapio_types::RingState;

/// Where a line goes that an operator should see.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Told on the data thread where the rings of a device stand, all together: after each batch, with the time in
/// nanoseconds, so it must cost next to nothing; and without a time when a report is asked for.
pub type OnRing = Box<dyn Fn(&RingState, Option<u64>) + Send>;
