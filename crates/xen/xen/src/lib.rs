//! Xen for programs of a driver domain.
//!
//! ```text
//!   blkif back end, blkfront        xenstored, tapback, VM driver
//!        │ rings, requests               │ nodes, watches, transactions
//!   ┌────▼─────┐  ┌────────────┐    ┌────▼────┐
//!   │  blkif   │  │  Domain    │    │   xs    │  wire, client
//!   └──────────┘  │  Channel   │    └────┬────┘
//!                 └──┬──────┬──┘         │ UNIX socket, /dev/xen/xenbus
//!                  sys    double
//!        /dev/xen/gntdev  a memfd and eventfds: a domain whose memory can be attacked
//! ```
//!
//! Everything is made of plain ioctls and bytes; no library of Xen's is needed. Nothing here may know a disk.

pub mod blkfront;
pub mod blkif;
pub mod channel;
pub mod domain;
pub mod double;
pub mod sys;
pub mod xs;

pub use channel::Channel;
pub use domain::{CopyBatch, Direction, Domain, GrantRef, Mapped, Rights};
