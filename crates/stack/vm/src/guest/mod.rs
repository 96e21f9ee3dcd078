//! The guest of a VM that brings no ramdisk: busybox, a first program ([`INIT`]) and an agent ([`AGENT`]) in an
//! initramfs.

pub mod initramfs;

// The agent is a program of its own, made by build.rs. Here are its parts for their tests, which do not need all.
#[cfg(test)]
#[path = "agent/facts.rs"]
mod facts;
#[cfg(test)]
#[path = "agent/files.rs"]
mod files;
#[cfg(test)]
#[allow(dead_code)]
#[path = "agent/serve.rs"]
mod serve;
#[cfg(test)]
#[allow(dead_code)]
#[path = "agent/sys.rs"]
mod sys;
#[cfg(test)]
#[path = "agent/text.rs"]
mod text;

/// First program: drivers, agent, then a shell on the console or the root on a disk.
pub(crate) const INIT: &str = include_str!("init.sh");

/// The agent: answers on a serial line.
pub(crate) const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent"));
