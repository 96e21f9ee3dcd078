//! Front ends on real disks over real sockets, with real and with hostile clients.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod blkif;
mod blkif_advisories;
mod blkif_threads;
mod nbd;
mod vhost_user;
mod vhost_user_log;
mod vhost_user_packed;

use tapio_fixtures::counting::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
