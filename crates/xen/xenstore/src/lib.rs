//! xenstore: the tree of small values that a Xen host and its guests share.
//!
//! [`wire`] has the messages of both sides (`xen/include/public/io/xs_wire.h`), [`Client`] speaks them, and
//! [`domains`] reads what a host has in one transaction.

pub mod domains;
pub mod wire;

mod client;
mod path;
mod xenbus;

pub use client::{Answer, Client, Counts, Nodes, Transaction, Watch, WatchEvent, XsError};
pub use path::{ABSOLUTE_LEN_MAX, Path, PathError, RELATIVE_LEN_MAX, Special};
pub use xenbus::XenbusState;
