//! A disk on several threads: its owner, which is the data thread, and queue threads beside it.
//!
//! ```text
//!   queue or connection ── Port ── Inbox ── QueueCore::serve ─┬─ gate open, block known ──▶ own ring ──▶ storage
//!                                             (queue thread)  └─ Mailbox ──▶ QueueFront ── Port ── Core::serve
//!                                                                               (owner)
//! ```
//!
//! A queue thread has a ring, a buffer pool and clients of its own, and no metadata. What it may do by itself it reads
//! from the view: the storages of the images and a map of the blocks that are present as a whole. Everything else goes
//! to the owner as a letter, and comes back as one. docs/design/queue-threads.md has the states and their reasons.

mod atomic;
mod counts;
mod exchange;
mod gate;
mod handed;
mod mailbox;
mod owner;
mod queue;
mod queue_front;
mod sharing;
mod thread;
mod view;

pub use exchange::{Exchange, Wake};
pub use gate::QUEUE_THREADS_MAX;
pub use queue::{QueueCore, QueueOptions};
pub(crate) use sharing::SharingSlot;
pub use thread::QueueHandle;
pub(crate) use thread::{QueueThreads, ThreadOptions};
pub use view::Shared;
