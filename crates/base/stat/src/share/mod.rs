//! How disks on one device share its throughput.
//!
//! The kernel gives a device's time to the process that has the most requests in its queue, unless its scheduler is
//! fair. So a disk that keeps 1408 KiB in flight gets sixteen times what a disk with 88 KiB gets. Here a disk that is
//! ahead of another one by more than a quantum of bytes, by weight, sends no more than one small piece at a time until
//! the other one has caught up or has nothing to do; and never so that the device as a whole does less.
//!
//! ```text
//!   disk process A                    tapio-share/8-0                                 disk process B
//!   seat: counts ──relaxed stores──▶ [A: cost, bytes, busy, until, weight]
//!   leads: with the pieces ◀────────── [B: cost, bytes, busy, until, weight] ◀──relaxed stores── seat
//!   control: once in a period ◀───────
//! ```
//!
//! Every word of a slot has one writer, the disk that has the slot. There is no lock, and no process wakes another. A
//! disk that is alone on its device reads one word. [`leads`] says how far a disk is ahead, [`control`] who
//! competes and what that may cost, [`seat`] what the path of a request does, [`segment`] the file.

mod control;
mod layout;
mod leads;
mod sample;
mod seat;
mod segment;

#[cfg(test)]
mod tests;

pub use control::PERIOD_NS;
pub use sample::{PIECE_MIN, WEIGHT_DEFAULT, WEIGHT_MAX};
pub use seat::{ShareFacts, ShareMember, ShareSeat, join};
pub use segment::clean_shares;

use crate::pool::PoolName;

/// The name of what is shared: numbers of devices, `8-0_8-16`.
pub type DeviceName = PoolName;
