//! Pools of hosts.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod guest;
mod ha;
mod members;
mod motion;
mod rig;
mod transfers;
