//! Block devices of this host: which there are, what each is, who uses it, and how their queues are set.
//!
//! Everything is read below a root directory, which is `/` but for tests: `sys`, `dev` and `proc`. No part of this
//! needs udev; the links that udev makes are used where they are.
//!
//! ```text
//! host       devices by name, by number, by node      identity   what stays the same when names change
//! marks      what is written on a device by others    usage      mounted, swap, held by another device
//! below      the disks that a device is made of       settings   what an SR wants of their queues
//! queue      queues are set, and put back as they were
//! ```

mod below;
mod host;
mod identity;
pub mod marks;
mod queue;
mod settings;
mod usage;

pub use below::{Layer, layers};
pub use host::{BlockDevice, Host, Kind};
pub use identity::{Identity, identity, links};
pub use queue::{Applied, Queue, Queues};
pub use settings::{KEYS, Refused, Settings};
pub use usage::{is_claimed, usage};
