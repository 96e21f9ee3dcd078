//! A disk on a real ring and real files.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used)]

mod on_files;
mod rig;
mod slow;
