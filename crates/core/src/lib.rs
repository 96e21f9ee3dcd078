//! The toolstack: objects, sessions, tasks, events, plans, operations.
//!
//! [`Toolstack`] is everything a daemon holds. A call comes in through [`Toolstack::call`], is checked against the
//! object table and goes to the handler registered under its name; generic messages (getters, setters, records) have
//! one handler for all classes.

pub mod call;
pub mod config;
pub mod db;
pub mod disks;
pub mod machines;
pub mod plan;
pub mod storage;
mod toolstack;

pub use toolstack::Toolstack;
