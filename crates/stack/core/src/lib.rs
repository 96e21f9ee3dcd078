//! The toolstack: objects, sessions, tasks, events, plans, operations.
//!
//! [`Toolstack`] is everything a daemon holds. A call comes in through [`Toolstack::call`], is checked against the
//! object table and goes to the handler registered under its name; generic messages (getters, setters, records) have
//! one handler for all classes.

mod accounts;
mod answers;
mod args;
mod basics;
pub mod call;
mod caller;
pub mod check;
pub mod config;
pub mod dates;
pub mod db;
pub mod disks;
mod dispatch;
pub mod events;
mod generic;
pub mod machines;
pub mod plan;
mod progress;
pub mod query;
pub mod roles;
pub mod sessions;
mod start;
pub mod storage;
mod subscriptions;
pub mod tasks;
mod toolstack;

pub use accounts::{Accounts, Credential, Login, NoAccounts, Peer};
pub use basics::messages::tell;
pub use dispatch::Methods;
pub use toolstack::Toolstack;
