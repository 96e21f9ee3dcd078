//! Front ends over real sockets, on real disks.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod vhost_user;
