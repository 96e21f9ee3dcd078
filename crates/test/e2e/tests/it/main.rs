//! End-to-end tests, by lane: `host` (real clients), `uml` and `qemu` (real guests), `vm` (a VM
//! of our own with the drivers that hosts lack), `xen` (a real hypervisor with real guests).
//!
//! The lanes are modules so that `cargo test -p tapio-e2e -- host::` runs one of them.

mod browser;
mod conformance;
mod consoles;
mod host;
mod machines;
mod media;
mod qemu;
mod suspended;
mod uml;
mod vm;
mod xen;
