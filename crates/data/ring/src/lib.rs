//! The io_uring engine: executor, storages, buffers, adaptive polling, and the seeded simulator.
//!
//! ```text
//!   service tasks (connections, jobs) ─┐                        ┌─ UringFile ── io_uring ── kernel
//!   request tasks (fixed slab) ────────┼─ Tasks ── op table ────┤
//!   front ends (shared memory) ── Hooks┘                        └─ SimFile ──── SimDisk (seeded)
//! ```
//!
//! One thread owns everything here: nothing is `Send`, nothing is locked. A task that waits for the kernel holds
//! an operation in the op table; a completion wakes the task by its index, without a `Waker` and without an
//! allocation. The same tasks run on [`uring::Uring`] and on [`sim::Sim`].
//!
//! Must never depend on: a format, a front end, tokio.

mod blocks;
mod buffer;
pub mod dropped;
mod executor;
mod foreign;
mod hooks;
mod lent;
mod polling;
mod segments;
mod storage;
mod tasks;

#[cfg(feature = "doubles")]
pub mod sim;
pub mod uring;

pub use blocks::InBlocks;
pub use buffer::{Buffer, Pool};
pub use dropped::Dropped;
pub use executor::{Driver, Executor, Inbox};
pub use foreign::{Foreign, PIECES_MAX};
pub use hooks::Hooks;
pub use lent::{Memory, MemoryMut, lend};
pub use polling::{Polling, PollingConfig, PollingCounters};
pub use segments::{PageBuf, Segments};
pub use storage::{Io, Storage, StorageInfo, Zeroing};
pub use tasks::{Notify, TaskId, Tasks};
