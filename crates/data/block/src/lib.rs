//! Chains of images, requests and their stages, the life of a plugged disk.
//!
//! ```text
//!  front end ── Port ──▶ admission ──▶ Inbox ──▶ serve(request) ──▶ stages ──▶ chain walk ──▶ storages
//!      ▲                                                                             │
//!      └────────────────────── Completion::complete(tag, result) ◀───────────────────┘
//!  control thread ── DiskHandle ──▶ DataThread (the data thread's own view)
//! ```
//!
//! A disk is a [`Core`], and each part of it has its own room:
//!
//! | part | what belongs there |
//! |---|---|
//! | `host` | the ring, the options, the log; `open` opens images by them |
//! | `life` | the states between plug and unplug; `core` leads from one to the next |
//! | `stages` | what a request passes: gate, admission, accounting, time limits, images, taps; `serve` is the walk |
//! | `change` | what replaces the images: snapshot, commit, growth, a standby, notes of moves |
//! | `mirror` | the second side of a disk, and the leaf's commit, which is one |
//! | `shared` | queue threads beside this one |
//! | `transfers` | how data goes to the storages: split, merged |
//!
//! Back-pressure: a front end takes requests from its guest only while [`Port::room`] has room for them; the others
//! stay in the guest's ring or the client's socket.
//!
//! Must never depend on: a front end, the control plane, tokio.

mod chain;
mod change;
mod core;
mod data_thread;
mod disk;
mod disk_handle;
mod front;
mod host;
mod io;
mod job;
mod life;
mod lineage;
mod meter;
mod mirror;
mod notes;
mod open;
mod options;
mod port;
mod request;
mod sectors;
mod serve;
mod shared;
mod stages;
mod taken;
#[cfg(test)]
mod task_len;
mod trace;
mod transfers;
mod window;

pub use chain::{Chain, LayerCounters, Link};
pub use change::{Forecast, LeafFacts, Swapped};
pub use core::Core;
pub use data_thread::{DataThread, Gone, Handle, Owner, Place};
pub use disk::{Disk, DiskFailure, DiskOptions, DiskStatus};
pub use disk_handle::DiskHandle;
pub use front::{FrontEnd, FrontId, Fronts};
pub use io::{DiskIo, DiskStore};
pub use job::{Job, JobInfo, JobKind, JobState, Jobs};
pub use life::DiskState;
pub use meter::{Meter, StageTimes};
pub use mirror::{CopyWhat, GRANULE_LEN, MirrorOptions, MirrorPhase, MirrorStatus, Pivoted};
pub use notes::Notes;
pub use open::CHAIN_MAX;
pub use options::{CoreOptions, NoSpace, Signal, StandbyOptions, TapOptions};
pub use port::{AllocationMap, Extent, Geometry, Port};
pub use request::{Completion, Data, DiskError, Op, Request};
pub use shared::{Exchange, QUEUE_THREADS_MAX, QueueCore, QueueHandle, QueueOptions, Shared, Wake};
pub use stages::{Admission, Delays, InFlight, Observer, PageSeat, Pages, PoolFacts, REQUEST_TIMEOUT};
pub use taken::{Origin, Taken};
pub use tapio_stat::trace::Point;
pub use trace::Trace;
