//! Pools of hosts.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod ha;
mod kills;
mod members;
mod partitions;
mod rig;
mod transfers;
