//! Drivers in a process of their own, so that a storage which does not answer holds nothing but that process.
//!
//! Whatever may wait for a storage without end (a mount, a scan, an open) is done by a worker: one process for each
//! attached SR, and one for each probe and each SR that is made. The daemon knows it as an [`crate::SrDriver`] and an
//! [`crate::Sr`] like any other ([`remote`]); the worker runs the real driver ([`serve()`]).
//!
//! ```text
//! daemon                                   worker (a fresh program, standard input is the control socket)
//!   control socket ── descriptors ──────▶    a thread for each descriptor
//!   link: call ─────────────────────────▶      the driver works
//!         ◀── progress, questions about running disks, images of a scan
//!         answer to a question, cancel ─▶
//!         ◀────────────────────── done
//! ```
//!
//! A link carries one call at a time and is used again, so an idle worker costs a call one round trip. Both sides bound
//! what they read ([`FRAME_LEN_MAX`]); the daemon bounds how long it waits. A worker that is silent for too long is
//! killed. What it had begun is what any kill leaves: the SR's journals finish or undo it when the next worker attaches
//! the SR. One that does not die, because the kernel waits for its storage, is left behind: it holds the SR's lock, so
//! nothing else changes that SR, and no other worker is started for the SR until it is gone. A worker ends when its
//! control socket does, that is with its daemon.

mod frame;
mod link;
mod message;
mod process;
mod remote;
mod rights;
mod serve;
#[cfg(test)]
mod tests;

use tapio_types::ApiError;

pub use frame::{FRAME_LEN_MAX, Frames, encode};
pub use message::{Answer, FromWorker, Question, Reply, Task, ToWorker};
pub use process::{Launch, Process, Program};
pub use remote::{Options, Workers, drivers};
pub use serve::serve;

/// The third parameter of an error after which it is not known how far the storage came.
pub(crate) const UNFINISHED: &str = "unfinished";

/// Whether an operation was broken off with its worker: part of it may be done, and is finished or undone when the SR
/// is attached by the next one. Any other error says that nothing was changed.
pub fn is_unfinished(error: &ApiError) -> bool {
    matches!(&*error.code, "SR_BACKEND_FAILURE_47" | "TASK_CANCELLED")
        && error.params.get(2).is_some_and(|word| word == UNFINISHED)
}
