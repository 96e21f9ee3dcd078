//! Pools of hosts.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod crossing;
mod groups;
mod guest;
mod ha;
mod kills;
mod members;
mod motion;
mod motion_failures;
mod partitions;
mod rig;
mod transfers;
mod upgrade;
