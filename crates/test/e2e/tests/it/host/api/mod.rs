//! The servers of the toolstack's API: real clients, wrong ones, and the daemon's own life.

mod accounts;
mod clients;
mod daemon;
mod doors;
mod handlers;
mod memory;
mod metrics;
mod published;
mod storms;
