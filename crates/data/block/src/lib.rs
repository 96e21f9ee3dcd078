//! Chains of images, requests and their stages, the life of a plugged disk.
//!
//! ```text
//!  front end ── Port ──▶ admission ──▶ Inbox ──▶ serve(request) ──▶ gate ──▶ tap ──▶ chain walk ──▶ storages
//!      ▲                                                                                  │
//!      └─────────────────────── Completion::complete(tag, result) ◀───────────────────────┘
//!  control thread ── DiskHandle ──▶ DataThread (the data thread's own view)
//! ```
//!
//! Back-pressure: a front end takes requests from its guest only while [`Port::room`] has room for them; the others
//! stay in the guest's ring or the client's socket.
//!
//! Must never depend on: a front end, the control plane, tokio.

mod admission;
mod chain;
mod change;
mod changes;
mod commit;
mod core;
mod data_thread;
mod disk;
mod disk_handle;
mod front;
mod grow;
mod io;
mod job;
mod lineage;
mod meter;
mod mirror;
mod moves;
mod notes;
mod open;
mod parent;
mod port;
mod request;
mod sectors;
mod shared;
mod standby;
mod swap;
mod takeover;
mod tap;
mod taps;
#[cfg(test)]
mod task_len;
mod timeouts;
mod trace;
mod window;

pub use admission::{Admission, Delays, Origin, PageSeat, Pages, PoolFacts, Taken};
pub use chain::{Chain, LayerCounters, Link};
pub use commit::Forecast;
pub use core::{Core, CoreOptions, DiskState, NoSpace, Observer};
pub use data_thread::{DataThread, Gone, Handle, Owner, Place};
pub use disk::{Disk, DiskFailure, DiskOptions, DiskStatus};
pub use disk_handle::DiskHandle;
pub use front::{FrontEnd, FrontId, Fronts};
pub use io::{DiskIo, DiskStore};
pub use job::{Job, JobInfo, JobKind, JobState, Jobs};
pub use meter::{Meter, StageTimes};
pub use mirror::{CopyWhat, GRANULE_LEN, MirrorOptions, MirrorPhase, MirrorStatus, Pivoted};
pub use notes::Notes;
pub use open::CHAIN_MAX;
pub use port::{AllocationMap, Extent, Geometry, Port};
pub use request::{Completion, DiskError, Op, Request};
pub use shared::{Exchange, QUEUE_THREADS_MAX, QueueCore, QueueHandle, QueueOptions, Shared, Wake};
pub use swap::{LeafFacts, Swapped};
pub use tap::{Signal, StandbyOptions, TapOptions};
pub use tapio_stat::trace::Point;
pub use timeouts::REQUEST_TIMEOUT;
pub use trace::Trace;
