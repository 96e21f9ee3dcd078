//! The NBD server.
//!
//! ```text
//!   control side                                        data thread of an export's disk
//!   listener ─accept─▶ handshake thread ── socket ──▶ Connection: receiver ─▶ Port ─▶ disk
//!      exports, bounds, deadlines        and what              ▲                      │
//!                                        was agreed            └─ sender ◀─ complete ─┘
//! ```
//!
//! * [`wire`]: numbers and headers; [`Handshake`], `plan`, `reply`: pure functions and a state machine on bytes.
//! * `socket`, `listener`, `exports`, `server`: what runs before transmission, with deadlines.
//! * `connection`, `receiver`, `sender`, `input`, `slots`, `memory`: transmission, with no lock and no allocation a
//!   request.
//! * [`limits`]: every bound.
//! * [`load`]: the other side, for benchmarks; [`client`] is that of `tapio_nbd`.
//!
//! # A disk that grows
//!
//! The protocol has no word from the server on a new size. What it has under the name RESIZE (request type 8,
//! transmission flag 9) is an experimental extension, kept in a branch of its document, by which a *client* asks for
//! another size; it is neither offered nor done here, because the size of a disk is not its guest's business. What is
//! done: INFO and GO tell the size that the disk has at that moment, and every request is checked against the size at
//! *its* moment, so that a client that learns of the growth in any way, by asking on a second connection or from its
//! own administrator, can use the new range on the connection it has. Our own client takes over a larger size when it
//! connects again.
//!
//! Errors on the way of a session end that session alone. A client that vanishes, floods or stalls costs what
//! [`limits`] says and nothing more.

pub mod limits;
#[cfg(feature = "doubles")]
pub mod load;

/// The words of the protocol and the blocking client, which the other side of a connection shares.
pub use tapio_nbd::{client, tls, wire};

mod connection;
mod exports;
mod guard;
mod handshake;
mod input;
mod listener;
mod memory;
mod plan;
mod receiver;
mod reply;
mod sender;
mod server;
mod session;
mod slots;
mod socket;
mod state;

/// The checks of a client's requests, for fuzzers and no one else.
#[doc(hidden)]
pub mod foreign {
    pub use super::plan::{Action, Session, check, payload_len};
    pub use super::reply::Failure;
}

pub use exports::{Export, ExportError};
pub use guard::Guard;
pub use handshake::{Agreed, Catalog, Described, Handshake, HandshakeError, Listed, Refusal, Step};
pub use listener::ListenerId;
pub use server::{DrainError, Drained, NbdServer};
pub use session::{ConnectionInfo, ServerCounters};
