//! The storage against real servers and false ones.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod hostile;
mod loss;
mod rig;
mod servers;
mod tls;
