//! The arithmetic of shared rings: the front end's side.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use tapio_types::RingState;

use super::abi::{Abi, Response, Slot};
use super::ring_error::RingError;
use super::shared::Shared;

/// The front end's side of a ring, ordinary or split, in memory that the caller keeps.
#[derive(Debug)]
pub struct FrontRing {
    shared: Shared,
    req_pvt: u32,
    req_shown: u32,
    rsp_cons: u32,
    rsp_event: u32,
    /// Responses that the last look found, as the producer's number.
    seen: u32,
}

// SAFETY: as of `BackRing`.
unsafe impl Send for FrontRing {}

impl FrontRing {
    /// Makes an ordinary ring in this memory: nothing asked, nothing answered, both sides to be notified of the first.
    ///
    /// # Errors
    /// The length is not that of 1, 2, 4 or 8 pages.
    ///
    /// # Safety
    /// `base` is page-aligned and valid for `len` bytes as long as the ring lives; others access that memory by atomic
    /// or volatile operations alone, or are another domain.
    pub unsafe fn new(base: NonNull<u8>, len: usize, abi: Abi) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        Ok(Self::start(unsafe { Shared::ordinary(base, len, abi)? }, 0))
    }

    /// Makes a split ring: the area of requests, the area of responses.
    ///
    /// # Errors
    /// The lengths.
    ///
    /// # Safety
    /// As of [`FrontRing::new`], for both areas.
    pub unsafe fn new_split(
        requests: (NonNull<u8>, usize),
        responses: (NonNull<u8>, usize),
    ) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        Ok(Self::start(unsafe { Shared::split(requests, responses)? }, 0))
    }

    /// As [`FrontRing::new`] with all numbers beginning at `first`: rings run for years, tests do not.
    ///
    /// # Errors
    /// The length.
    ///
    /// # Safety
    /// As of [`FrontRing::new`].
    pub unsafe fn new_at(base: NonNull<u8>, len: usize, abi: Abi, first: u32) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        Ok(Self::start(unsafe { Shared::ordinary(base, len, abi)? }, first))
    }

    fn start(shared: Shared, first: u32) -> Self {
        shared.req_prod.store(first);
        shared.rsp_prod.store(first);
        if let Some(word) = shared.req_cons {
            word.store(first);
        }
        let event = first.wrapping_add(1);
        shared.req_event.store(event);
        shared.rsp_event.store(event);
        Self { shared, req_pvt: first, req_shown: first, rsp_cons: first, rsp_event: event, seen: first }
    }

    /// The layout.
    pub fn abi(&self) -> Abi {
        self.shared.abi
    }

    /// Requests in flight at most.
    pub fn size(&self) -> u32 {
        self.shared.responses
    }

    /// Requests that can be put now.
    ///
    /// In a split ring the back end says which requests it has taken; a number that makes no sense gives no room.
    #[inline]
    pub fn room(&self) -> u32 {
        let under_way = self.req_pvt.wrapping_sub(self.rsp_cons);
        let answers = self.shared.responses - under_way;
        let Some(word) = self.shared.req_cons else {
            return answers;
        };
        let waiting = self.req_pvt.wrapping_sub(word.load());
        answers.min(self.shared.requests.saturating_sub(waiting))
    }

    /// Writes a request into the ring; false if there is no room. The back end sees it after [`FrontRing::publish`].
    #[inline]
    pub fn put(&mut self, slot: &Slot) -> bool {
        if self.room() == 0 {
            return false;
        }
        let at = self.shared.request(self.req_pvt).cast::<u32>();
        let (words, _) = slot.0[..self.shared.abi.request_len()].as_chunks::<4>();
        for (index, word) in words.iter().enumerate() {
            // SAFETY: a slot is as long as a request of this layout and aligned to four.
            unsafe { at.add(index).write_volatile(u32::from_ne_bytes(*word)) };
        }
        self.req_pvt = self.req_pvt.wrapping_add(1);
        true
    }

    /// Shows all requests to the back end. True: it wants to be notified.
    #[inline]
    #[must_use = "a back end that is not notified waits for ever"]
    pub fn publish(&mut self) -> bool {
        let old = self.show();
        self.wants_notification(old)
    }

    /// The first half of [`FrontRing::publish`]; what was shown before.
    #[inline]
    pub(super) fn show(&mut self) -> u32 {
        let old = self.req_shown;
        if old != self.req_pvt {
            self.shared.req_prod.store(self.req_pvt);
            self.req_shown = self.req_pvt;
        }
        old
    }

    /// The second half, as of the other side.
    #[inline]
    pub(super) fn wants_notification(&self, old: u32) -> bool {
        let new = self.req_shown;
        if old == new {
            return false;
        }
        fence(Ordering::SeqCst);
        let event = self.shared.req_event.load();
        new.wrapping_sub(event) < new.wrapping_sub(old)
    }

    /// Whether the back end has moved its producer since the last look: one load.
    #[inline]
    pub fn peek(&self) -> bool {
        self.shared.rsp_prod.load() != self.seen
    }

    /// Responses that wait to be taken. Reads the back end's producer once.
    ///
    /// # Errors
    /// More than there are requests in flight.
    #[inline]
    pub fn look(&mut self) -> Result<u32, RingError> {
        let rsp_prod = self.shared.rsp_prod.load();
        let waiting = rsp_prod.wrapping_sub(self.rsp_cons);
        if waiting > self.req_shown.wrapping_sub(self.rsp_cons) {
            return Err(RingError::Responses { rsp_prod, rsp_cons: self.rsp_cons });
        }
        self.seen = rsp_prod;
        Ok(waiting)
    }

    /// Copies the next response that the last look found out of the ring.
    #[inline]
    pub fn take(&mut self) -> Option<Response> {
        if self.seen == self.rsp_cons {
            return None;
        }
        let at = self.shared.response(self.rsp_cons).cast::<u32>();
        let mut bytes = [0; 12];
        for (index, four) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // SAFETY: a slot of responses has at least 12 bytes and is aligned to four.
            *four = unsafe { at.add(index).read_volatile() }.to_ne_bytes();
        }
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Some(Response::decode(&bytes))
    }

    /// Asks to be notified when `count` more responses are there, at least one. True: one has slipped in already.
    ///
    /// # Errors
    /// As of [`FrontRing::look`].
    pub fn arm(&mut self, count: u32) -> Result<bool, RingError> {
        self.set_event(count);
        Ok(self.look()? > 0)
    }

    /// The first half of [`FrontRing::arm`]; the second is a look.
    pub(super) fn set_event(&mut self, count: u32) {
        self.rsp_event = self.rsp_cons.wrapping_add(count.max(1));
        self.shared.rsp_event.store(self.rsp_event);
        fence(Ordering::SeqCst);
    }

    /// Requests that have no response yet, as far as taken.
    pub fn under_way(&self) -> u32 {
        self.req_pvt.wrapping_sub(self.rsp_cons)
    }

    /// Where it stands, with the same names as on the other side; `rsp_pvt` is the responses taken.
    pub fn counters(&self) -> RingState {
        RingState {
            size: self.shared.responses,
            req_prod: self.req_shown,
            req_cons: self.req_pvt,
            req_event: self.shared.req_event.load(),
            rsp_prod: self.shared.rsp_prod.load(),
            rsp_pvt: self.rsp_cons,
            rsp_event: self.rsp_event,
        }
    }
}

#[cfg(test)]
impl FrontRing {
    /// As of [`super::BackRing`].
    pub(super) fn fork(&self) -> Self {
        Self { ..*self }
    }

    pub(super) fn shrink(&mut self, requests: u32, responses: u32) {
        self.shared = self.shared.shrunk(requests, responses);
    }

    pub(super) fn numbers(&self) -> [u32; 5] {
        [self.seen, self.req_pvt, self.req_shown, self.rsp_cons, self.rsp_event]
    }
}
