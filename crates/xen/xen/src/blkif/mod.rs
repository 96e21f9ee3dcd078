//! The block interface of Xen's guests (`xen/include/public/io/blkif.h`): requests, responses, rings.
//!
//! [`BackRing`] and [`FrontRing`] are the two sides of a ring and hand out [`Slot`]s of bytes; [`Request::decode`]
//! understands those.

mod abi;
mod front_ring;
mod ring;
mod ring_error;
mod shared;
pub mod split;

pub use abi::{
    Abi, DIRECT_SEGMENTS_MAX, DISCARD_SECURE, INDIRECT_PAGES_MAX, INDIRECT_PER_PAGE, INDIRECT_SEGMENTS_MAX,
    Malformed, REQUEST_LEN_MAX, RESPONSE_LEN_MAX, Request, RequestError, Response, SEGMENT_LEN, Segment,
    Slot, op, status,
};
pub use front_ring::FrontRing;
pub use ring::BackRing;
pub use ring_error::RingError;
pub use shared::ring_slots;

/// Pages of a ring as a power of two, at most.
pub const RING_ORDER_MAX: u32 = 3;

/// The largest power of two that is not above `count`.
const fn floor_power(count: usize) -> u32 {
    if count == 0 { 0 } else { 1 << count.ilog2() }
}

#[cfg(test)]
mod at_once;
#[cfg(test)]
mod every_order;
