//! Front ends on real disks over real sockets, with real and with hostile clients.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]
// Helpers of tests are tests too.
#![allow(clippy::unwrap_used)]

mod nbd;
mod vhost_user;
