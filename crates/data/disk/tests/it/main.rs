//! The process as its starters see it: the handshake, the end, and what a death leaves behind.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod process;
