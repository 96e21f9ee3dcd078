//! SRs on real directories and devices, through the traits alone.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod basic;
mod cbt;
mod cbt_failures;
mod changes;
mod copies;
mod devices;
mod kills;
mod kills_of_srs;
mod library;
mod links;
mod live_logs;
mod merges;
mod support;
mod swaps;
mod volumes;
