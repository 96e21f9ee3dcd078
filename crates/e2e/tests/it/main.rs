//! End-to-end tests, by lane: `host` (real clients), `uml` and `qemu` (real guests).
//!
//! The lanes are modules so that `cargo test -p tapio-e2e -- host::` runs one of them.

mod host;
mod qemu;
mod uml;
