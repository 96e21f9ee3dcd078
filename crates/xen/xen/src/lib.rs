//! Xen for programs of a driver domain.
//!
//! ```text
//!   blkif back end, blkfront
//!        │ rings, requests
//!   ┌────▼─────┐  ┌────────────┐
//!   │  blkif   │  │  Domain    │
//!   └──────────┘  │  Channel   │
//!                 └──┬──────┬──┘
//!                  sys    double (feature `doubles`)
//!        /dev/xen/gntdev  a memfd and eventfds: a domain whose memory can be attacked
//! ```
//!
//! Everything is made of plain ioctls and bytes; no library of Xen's is needed. Nothing here may know a disk.

#[cfg(feature = "doubles")]
pub mod blkfront;
pub mod blkif;
pub mod channel;
pub mod domain;
#[cfg(feature = "doubles")]
pub mod double;
pub mod sys;

pub use channel::Channel;
pub use domain::{CopyBatch, Direction, Domain, GrantRef, Mapped, Rights};

#[cfg(not(feature = "doubles"))]
fn without_doubles() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::Unsupported, "this program was built without doubles of domains")
}
