//! The toolstack: objects, sessions, tasks, events, plans, operations.
//!
//! [`Toolstack`] is all that a daemon holds. A call comes in through [`Toolstack::call`], is checked against the object
//! table and goes to the handler registered under its name; generic messages (getters, setters, records) have one
//! handler for all classes. A handler works with the part it was registered for and has no other ([`call`]); a part is
//! given the parts below it when it is made:
//!
//! ```text
//!   motion -> pool, vms               exports -> sessions, storage         groups, backup -> pool
//!   vms -> storage -> disks, db      events -> sessions -> tasks -> db
//! ```

mod accounts;
mod answers;
mod args;
pub mod backup;
mod basics;
pub mod call;
mod caller;
pub mod check;
pub mod config;
mod consoles;
pub mod dates;
pub mod db;
pub mod disks;
mod dispatch;
pub mod events;
pub mod exports;
mod generic;
mod groups;
mod ha;
pub mod history;
mod methods;
pub mod metrics;
pub mod motion;
pub mod operations;
mod parallel;
pub mod plan;
pub mod pool;
mod progress;
pub mod query;
pub mod replica;
pub mod rings;
mod roles;
pub mod sessions;
mod start;
pub mod storage;
mod subscriptions;
pub mod tasks;
mod toolstack;
mod transfers;
pub mod vms;

pub use accounts::{Accounts, Credential, Login, NoAccounts, Peer};
pub use basics::address as host_address;
pub use basics::messages::tell;
pub use basics::total_memory as host_memory;
pub use methods::Methods;
pub use toolstack::Toolstack;
