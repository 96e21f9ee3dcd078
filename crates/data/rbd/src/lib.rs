//! Ceph's RADOS block devices, through the C interface of librados and librbd.
//!
//! ```text
//!   "pool/namespace/image?conf=/etc/ceph/ceph.conf" ──▶ Target
//!                                                         │ Cluster::shared: one connection for all images
//!   chain ──▶ RbdStore ── rbd_aio_* ──▶ librbd's threads ──▶ monitors, OSDs
//!                 ▲                          │ a result into a queue, a count into an eventfd
//!                 └── one poll on the ring ◀─┘
//!   SR driver ──▶ Pool, Image: blocking calls
//! ```
//!
//! * [`library`]: the declarations. The libraries are opened at run time (`dlopen`), never linked: a host without them
//!   lacks nothing but this, and says so in one sentence. They are Ceph's, under the LGPL, versions 2.1 or 3.
//! * [`Target`]: how an image is named. A secret is no part of a name: it stands in a keyring file.
//! * [`Cluster`], [`Pool`], [`Image`]: connections, pools and images, by calls that block.
//! * [`Image::take_lock`]: Ceph's exclusive lock as the fence between hosts.
//! * [`RbdStore`]: a [`tapio_ring::Storage`] on the ring of a data thread.
//!
//! Names, sizes and metadata come from the cluster, which other hosts write to: they are checked before they are used.
//!
//! Sources: `rbd/librbd.h` and `rados/librados.h` of Ceph 16. Must never depend on: a disk, a front end, the control
//! plane.

mod cluster;
mod error;
mod image;
pub mod library;
mod lock;
mod owner;
mod snapshots;
mod store;
mod target;

pub use cluster::{Cluster, Pool};
pub use error::RbdError;
pub use image::{Diff, Image, Mode};
pub use snapshots::{Parent, Snapshot};
pub use store::{RbdStore, closed, is_closing};
pub use target::{Connect, Target, TargetError, check_name};

#[doc(hidden)]
pub use cluster::texts;

/// What is read of a note of a lock's owner: for fuzzers alone.
#[doc(hidden)]
pub fn note(text: &str) -> Option<String> {
    owner::Owner::parse(text).map(|owner| owner.text())
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, RbdError>;
