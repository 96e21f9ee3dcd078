//! What the end-to-end tests stand on: starting programs with deadlines, scratch directories, the disk process and
//! its tools, and two guests.
//!
//! ```text
//!   tests/it/*.rs          one story each: a real client, a real guest, a fault
//!        |
//!   disk  guest  client    our programs under test; UML and QEMU; nbdsh
//!        |
//!   process  scratch  tools
//! ```
//!
//! The tests run the programs that were built beside them (`target/debug/tapio`, `target/debug/tapio-disk`), or those
//! in `TAPIO_BIN_DIR`. They talk to them as a user does: arguments, sockets, exit codes. This crate therefore
//! depends on no crate that it tests so, only on `vm` for the guests' root file systems (its tests also borrow our
//! vhost-user driver, the double of a guest, and the drivers of `vm`), and it panics freely: a broken set-up is a
//! failed test.

pub mod ceph;
pub mod client;
pub mod disk;
pub mod faulty;
pub mod guest;
pub mod hanging;
pub mod left_behind;
pub mod local;
pub mod process;
pub mod quiet_time;
pub mod scratch;
pub mod slots;
pub mod tools;
pub mod toolstack;
pub mod world;
pub mod xen;
