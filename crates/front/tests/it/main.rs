//! Front ends on real disks, with real and with hostile clients.

// Helpers of tests are tests too.
#![allow(clippy::unwrap_used)]

mod counting;
mod nbd;
