//! Where the words and slots of a ring lie in shared memory.
//!
//! Both kinds of rings, the ordinary one and the [split] one, are this: five words and two arrays. The ring's
//! arithmetic is written once, on it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::abi::{Abi, REQUEST_LEN_MAX, RESPONSE_LEN_MAX};
use super::ring_error::RingError;
use super::{RING_ORDER_MAX, floor_power, split};
use crate::domain::PAGE_LEN;

/// Bytes before the first slot of an ordinary ring.
const HEADER_LEN: usize = 64;

/// A word that both sides look at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word(NonNull<AtomicU32>);

impl Word {
    /// # Safety
    /// `base + at` is aligned to four and stays valid, for atomic access alone, as long as the word is used.
    unsafe fn at(base: NonNull<u8>, at: usize) -> Self {
        // SAFETY: inside the memory, by the caller's promise.
        Self(unsafe { base.byte_add(at).cast() })
    }

    #[inline]
    pub(super) fn load(self) -> u32 {
        // SAFETY: valid as long as the ring, by the promise at its making.
        unsafe { self.0.as_ref() }.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn store(self, value: u32) {
        // SAFETY: as in `load`.
        unsafe { self.0.as_ref() }.store(value, Ordering::Release);
    }
}

/// A ring's places. Numbers of requests and responses run freely modulo 2^32; a slot is the number modulo the array's
/// length, a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    pub abi: Abi,
    pub req_prod: Word,
    pub req_event: Word,
    pub rsp_prod: Word,
    pub rsp_event: Word,
    /// Where the back end says which requests it has taken. Of a split ring alone: in an ordinary one a slot is free
    /// when its response was taken.
    pub req_cons: Option<Word>,
    /// Slots of requests.
    pub requests: u32,
    /// Slots of responses, and so requests in flight at most. In an ordinary ring the same slots.
    pub responses: u32,
    request_at: NonNull<u8>,
    response_at: NonNull<u8>,
    request_len: usize,
    response_len: usize,
}

/// Slots of an ordinary ring of `pages` pages.
pub const fn ring_slots(abi: Abi, pages: usize) -> u32 {
    floor_power((pages * PAGE_LEN - HEADER_LEN) / abi.request_len())
}

/// The pages of an area of a ring: 1, 2, 4 or 8.
fn pages_of(len: usize) -> Result<usize, RingError> {
    let pages = len / PAGE_LEN;
    if !len.is_multiple_of(PAGE_LEN) || !pages.is_power_of_two() || pages > 1 << RING_ORDER_MAX {
        return Err(RingError::Pages { len });
    }
    Ok(pages)
}

impl Shared {
    /// An ordinary ring.
    ///
    /// # Safety
    /// `base` is page-aligned and valid for `len` bytes as long as the value and its copies are used; others access
    /// that memory by atomic or volatile operations, or are another domain.
    pub(super) unsafe fn ordinary(base: NonNull<u8>, len: usize, abi: Abi) -> Result<Self, RingError> {
        let slots = ring_slots(abi, pages_of(len)?);
        // SAFETY: the header of 64 bytes lies in the first page, aligned as that is.
        let word = |at| unsafe { Word::at(base, at) };
        // SAFETY: inside, too.
        let first = unsafe { base.byte_add(HEADER_LEN) };
        Ok(Self {
            abi,
            req_prod: word(0),
            req_event: word(4),
            rsp_prod: word(8),
            rsp_event: word(12),
            req_cons: None,
            requests: slots,
            responses: slots,
            request_at: first,
            response_at: first,
            request_len: abi.request_len(),
            response_len: abi.request_len(),
        })
    }

    /// A split ring: one area for requests, one for responses, both of the 64-bit layout.
    ///
    /// # Safety
    /// As of [`Shared::ordinary`], for both areas.
    pub(super) unsafe fn split(
        requests: (NonNull<u8>, usize),
        responses: (NonNull<u8>, usize),
    ) -> Result<Self, RingError> {
        let (request_pages, response_pages) = (pages_of(requests.1)?, pages_of(responses.1)?);
        // SAFETY: the headers lie in the first page of each area, aligned as those are.
        let (ours, theirs) = unsafe { (|at| Word::at(requests.0, at), |at| Word::at(responses.0, at)) };
        // SAFETY: inside, too.
        let (request_at, response_at) =
            unsafe { (requests.0.byte_add(split::HEADER_LEN), responses.0.byte_add(split::HEADER_LEN)) };
        Ok(Self {
            abi: Abi::X86_64,
            req_prod: ours(split::REQ_PROD_AT),
            req_cons: Some(ours(split::REQ_CONS_AT)),
            req_event: ours(split::REQ_EVENT_AT),
            rsp_prod: theirs(split::RSP_PROD_AT),
            rsp_event: theirs(split::RSP_EVENT_AT),
            requests: split::request_slots(request_pages),
            responses: split::response_slots(response_pages),
            request_at,
            response_at,
            request_len: REQUEST_LEN_MAX,
            response_len: RESPONSE_LEN_MAX,
        })
    }

    /// The same ring with fewer slots: what both sides do in every order can then be tried to the end.
    #[cfg(test)]
    pub(super) fn shrunk(mut self, requests: u32, responses: u32) -> Self {
        assert!(requests.is_power_of_two() && requests <= self.requests, "{requests}");
        assert!(responses.is_power_of_two() && responses <= self.responses, "{responses}");
        (self.requests, self.responses) = (requests, responses);
        self
    }

    /// Where request `number` lies: [`Abi::request_len`] bytes.
    #[inline]
    pub(super) fn request(&self, number: u32) -> *mut u8 {
        let slot = (number & (self.requests - 1)) as usize;
        // SAFETY: the slot is below the count that fits into the area.
        unsafe { self.request_at.as_ptr().add(slot * self.request_len) }
    }

    /// Where response `number` lies: 12 bytes, aligned to four.
    #[inline]
    pub(super) fn response(&self, number: u32) -> *mut u8 {
        let slot = (number & (self.responses - 1)) as usize;
        // SAFETY: as in `request`.
        unsafe { self.response_at.as_ptr().add(slot * self.response_len) }
    }
}
