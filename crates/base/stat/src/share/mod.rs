//! How disks on one device share its throughput.
//!
//! The kernel gives a device's time to the process that has the most requests in its queue, unless its scheduler is
//! fair. So a disk that keeps 1408 KiB in flight gets sixteen times what a disk with 88 KiB gets. Here disks on the
//! same device limit what they have in flight while others compete: each to its part, by weights, and never so far that
//! the device as a whole does less.
//!
//! ```text
//!   disk process A                    tapio-share/8-0                       disk process B
//!   seat: counts ──relaxed stores──▶ [A: bytes, busy, weight]
//!   control: once in a period ◀─────── [B: bytes, busy, weight] ◀──relaxed stores── seat
//! ```
//!
//! Every word of a slot has one writer, the disk that has the slot. There is no lock, and no process wakes another. A
//! disk that is alone on its device reads one word. [`control`] has the rule, [`seat`] what the path of a request
//! does, [`segment`] the file.

mod control;
mod layout;
mod seat;
mod segment;

#[cfg(test)]
mod tests;

pub use control::{PERIOD_NS, PIECE_MIN, WEIGHT_DEFAULT, WEIGHT_MAX};
pub use seat::{ShareFacts, ShareMember, ShareSeat, join};
pub use segment::clean_shares;

use crate::pool::PoolName;

/// The name of what is shared: numbers of devices, `8-0_8-16`.
pub type DeviceName = PoolName;
