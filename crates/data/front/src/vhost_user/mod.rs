//! vhost-user-blk: a virtio disk for a guest whose memory is shared with us.
//!
//! ```text
//!   front end (QEMU, UML, ...)                    guest memory
//!        │ UNIX socket, messages + descriptors        │ rings, data
//!  ┌─────▼──────────── control thread ──┐      ┌──────▼───────── data thread ───────────┐
//!  │ VhostUserServer ─ Channel ─ Session ├─────▶ Device ─ Queue ─── Ring ─── blk::plan │
//!  └────────────────────────────────────┘Remote│            └── Port::submit ──▶ disk   │
//!                                              └────────────────────────────────────────┘
//! ```
//!
//! Requests carry pointers into the guest's memory: data is moved by the kernel alone, between there and the image.
//! Everything that a guest or a front end can write is copied once, checked, and only then used.

mod blk;
mod chain;
mod channel;
mod device;
mod dirty;
#[cfg(feature = "doubles")]
pub mod driver;
mod event;
mod inflight;
mod inflight_packed;
mod listener;
mod memory;
mod message;
mod packed;
mod queue;
mod ring;
mod ring_error;
mod session;
mod vring;

/// What takes apart the bytes of a front end and its guest, for fuzzers and no one else.
#[doc(hidden)]
pub mod foreign {
    pub use super::blk::{Plan, Range, SERIAL_LEN, Status, plan};
    pub use super::chain::{CHAIN_MAX, Chain, DESC_F_NEXT, Descriptor};
    pub use super::device::DataSide;
    pub use super::dirty::Logging;
    pub use super::event::{Kick, Notifier};
    pub use super::inflight::Recovered;
    pub use super::inflight::{InflightPart, InflightRegion};
    pub use super::memory::{GuestMemory, Region};
    pub use super::message::{HEADER_LEN, PAYLOAD_MAX, RingAddresses, config_payload, id};
    pub use super::packed::{DESC_F_AVAIL, DESC_F_USED, PackedRing, Position};
    pub use super::queue::QueueSetup;
    pub use super::ring::{Ring, RingSetup, Ticket};
    pub use super::ring_error::RingError;
    pub use super::session::{Session, SessionConfig};
    pub use super::vring::SplitRing;
}

pub use blk::{RANGE_SECTORS_MAX, RANGES_MAX, SEG_MAX, feature};
pub use listener::{Listen, QUEUES_MAX, VhostUserOptions, VhostUserServer, VhostUserState, mode_in};
pub use message::{Header, Message, MessageError, RegionSpec, protocol};

/// Where lines for the operator go.
pub type Log = std::sync::Arc<dyn Fn(&str) + Send + Sync>;
