//! Split rings: requests and responses in memory of their own. An extension of ours.
//!
//! In an ordinary ring a response is written over a request, so that a slot of 112 bytes carries 12, a request's slot
//! is taken until its answer was seen, and both sides write to the same cache lines all the time. Split, the request's
//! slot is free as soon as the back end has copied it, requests in flight are bounded by the responses' 16-byte slots,
//! and each cache line has one writer.
//!
//! # Negotiation
//! The back end offers [`FEATURE`] = `1`. A front end that wants it writes the same key, as `1`, beside `ring-ref` in
//! the directory of the queue (its own directory with one queue, `queue-N` with several); the ordinary keys `ring-ref`
//! and `ring-page-order` then name the area of requests, [`RESPONSE_REF`] and [`RESPONSE_ORDER`] the one of responses,
//! by the same rules (`-ref` alone with order 0, `-ref0`, `-ref1` ... with a higher one). `protocol` must be
//! `x86_64-abi`. A front end that does not know the key is served as ever: off unless both sides say so.
//!
//! # Layout
//! Each area has 1, 2, 4 or 8 pages. All words are `u32`, little-endian; every word not named is zero.
//!
//! ```text
//!   area of requests                               area of responses
//!     0  req_prod    front end writes                0  rsp_prod    back end writes
//!    64  req_cons    back end writes                64  rsp_event   front end writes
//!    68  req_event   back end writes
//!   128  requests, 112 bytes each                  128  responses, 16 bytes each
//! ```
//!
//! As many slots as fit, rounded down to a power of two: 32, 64, 128 or 256 requests, and 128, 256, 512 or 1024
//! responses. One page for each carries 32 requests that wait and 128 that are in flight.
//!
//! # Rules
//! - Numbers run freely modulo 2^32; a slot is the number modulo the slots of its area. The front end starts all
//!   producers and consumers at 0 and both events at 1.
//! - `req_prod - req_cons` is never above the slots of requests, `req_prod - rsp_prod` never above those of responses.
//!   The back end checks both against its own numbers and stops at once if they are broken.
//! - The back end moves `req_cons` after it has copied the requests before it, and before it shows a response to any of
//!   them: a front end that waits for room can wait for a response.
//! - The front end checks `rsp_prod`: no more responses than requests in flight.
//! - Events are those of the ordinary ring: a side that moves a producer from `old` to `new` notifies if
//!   `new - event < new - old` (all modulo 2^32) with the other side's event; a side that goes to sleep sets its event
//!   to its consumer plus one and looks once more.

use super::abi::{REQUEST_LEN_MAX, RESPONSE_LEN_MAX};
use super::floor_power;
use crate::domain::PAGE_LEN;

/// The key by which both sides say that they can.
pub const FEATURE: &str = "tapio-feature-split-rings";
/// The key of the grants of the responses' pages, as `ring-ref` names those of the requests.
pub const RESPONSE_REF: &str = "tapio-response-ring-ref";
/// The key of the responses' pages as a power of two, as `ring-page-order`.
pub const RESPONSE_ORDER: &str = "tapio-response-ring-page-order";

pub(super) const HEADER_LEN: usize = 128;
pub(super) const REQ_PROD_AT: usize = 0;
pub(super) const REQ_CONS_AT: usize = 64;
pub(super) const REQ_EVENT_AT: usize = 68;
pub(super) const RSP_PROD_AT: usize = 0;
pub(super) const RSP_EVENT_AT: usize = 64;

/// Slots of an area of requests of `pages` pages.
pub const fn request_slots(pages: usize) -> u32 {
    floor_power((pages * PAGE_LEN - HEADER_LEN) / REQUEST_LEN_MAX)
}

/// Slots of an area of responses of `pages` pages.
pub const fn response_slots(pages: usize) -> u32 {
    floor_power((pages * PAGE_LEN - HEADER_LEN) / RESPONSE_LEN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_powers_of_two_that_fit() {
        assert_eq!([1, 2, 4, 8].map(request_slots), [32, 64, 128, 256]);
        assert_eq!([1, 2, 4, 8].map(response_slots), [128, 256, 512, 1024]);
    }
}
