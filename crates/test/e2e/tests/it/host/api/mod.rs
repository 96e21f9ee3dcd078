//! The toolstack's doors: real clients, wrong ones, and the daemon's own life.

mod accounts;
mod clients;
mod daemon;
mod doors;
mod memory;
