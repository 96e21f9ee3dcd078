//! xenstored: the tree that a Xen host and its guests share, with transactions that copy nothing.
//!
//! ```text
//!   sockets ──┐                                   ┌─ Tree       values that never change, shared between versions
//!   rings ────┤ event loop ── Server ── Store ────┤─ Transaction   what was looked at, what was changed
//!             │ (program)      │                  └─ Op         every change, for commits and for the log on disk
//!             │                └─ Watches, Domains, Limits
//!             └─ state: all of it in bytes, for another program to go on with
//! ```
//!
//! One thread does everything: a request takes a microsecond, and what is decided in one place needs no lock.

pub mod domains;
pub mod journal;
/// Says a line in the program's log.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { tapio_log::say("tapio-xenstored", format_args!($($words)*)) };
}

mod kept;
pub mod quota;
pub mod serve;
pub mod server;
pub mod session;
pub mod state;
pub mod store;
pub mod tree;
pub mod watches;

pub use kept::Kept;
pub use server::Server;
pub use tree::Caller;
