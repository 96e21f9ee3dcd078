//! NBD: the words of the protocol, the client's side of the handshake, and a remote export as a storage.
//!
//! ```text
//!   "nbd://host/disk?connections=4" ──▶ Target
//!                                         │ dial: a thread of its own resolves, connects, greets
//!   chain ──▶ NbdStore ── slots ──▶ sender ──sendmsg──▶ socket ──recvmsg──▶ receiver ──▶ the request's own memory
//!                 ▲                     one pair of tasks for each connection                        │
//!                 └──────────────────────────── wake ────────────────────────────────────────────────┘
//! ```
//!
//! * [`wire`]: numbers and headers, as pure functions on bytes; the server of `tapio-front` uses them too.
//! * [`client`]: the handshake, and a blocking client for tests, tools and load.
//! * [`Target`]: how an export is named.
//! * [`NbdStore`]: a [`tapio_ring::Storage`] on the ring of a data thread.
//!
//! Source: `doc/proto.md` and `doc/uri.md` of the NetworkBlockDevice project. Must never depend on: a disk, a front
//! end, the control plane.

pub mod client;
pub mod socket;
pub mod tls;
pub mod wire;

mod store;
mod target;

pub use store::NbdStore;
pub use target::{Endpoint, Target, TargetError, Unflushed};
