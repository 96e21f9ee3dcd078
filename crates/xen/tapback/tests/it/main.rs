//! tapback against our xenstored, with doubles of the toolstack, the guest and the disk processes.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cost;
mod hostile;
mod life;
mod orders;
mod programs;
mod world;
