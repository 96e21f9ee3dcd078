//! The guest that machines run which bring none: busybox and a first program ([`INIT`]) in an initramfs.

pub mod initramfs;

/// First program: drivers, agent, then a shell on the console or the root on a disk.
pub(crate) const INIT: &str = include_str!("init.sh");
