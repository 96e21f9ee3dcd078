//! The block devices of Xen guests: the back end of `blkif`, in the process of the disk.
//!
//! ```text
//!    control thread                         each thread of the disk that serves rings of the device
//!   BlkifServer::connect ── rings, grants ──▶ Device ── Queue ── BackRing ─┐
//!     maps the rings' pages                     │   │                      │ shared pages
//!     opens the record of requests in flight    │   ├── Mover: copies,     │ of the guest
//!                                               │   │   mapped pages ──────┘
//!                                               │   └── RecordQueue: what is repeated after a death
//!                                               └── Port ──▶ the disk
//! ```
//!
//! Ring `n` is served by thread `n` modulo the disk's threads, and has everything that its requests need there: grants,
//! pages that stay mapped, event channel, record. Ends, reports and statistics are of all rings together.
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
mod standing;

pub use mover::MoveCounts;
pub use persistent::{PERSISTENT_MAX, PersistentCounts};
pub use report::{Broken, QueueCounts, QueueReport, UnderWay};
pub use server::{BlkifOptions, BlkifRing, BlkifServer, BlkifState, Start};

use std::sync::Arc;

use tapio_types::RingState;

/// Where a line goes that an operator should see.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Told on the disk's owner where the rings of a device stand, all together: after each batch, with the time in
/// nanoseconds, so it must cost next to nothing, and a tenth of a second later of rings that other threads serve; and
/// without a time when a report is asked for.
pub type OnRing = Box<dyn Fn(&RingState, Option<u64>) + Send>;
