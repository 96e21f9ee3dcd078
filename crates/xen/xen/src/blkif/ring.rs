//! The arithmetic of shared rings (`xen/include/public/io/ring.h`): the back end's side.
//!
//! What the guest can write is read once and then checked: the producer in [`BackRing::look`], a request's bytes in
//! [`BackRing::take`]. Our own numbers are never read back from the ring after it was attached.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use tapio_types::RingState;

use super::abi::{Abi, Response, Slot};
use super::ring_error::RingError;
use super::shared::Shared;
use crate::domain::Mapped;

/// The pages of a ring, kept mapped for its life.
#[derive(Debug)]
#[allow(dead_code, reason = "held, never looked at: the ring's words and slots point into them")]
enum Pages {
    One(Mapped),
    Two(Mapped, Mapped),
    Elsewhere,
}

/// The back end's side of a ring, ordinary or split.
///
/// ```text
///   look  ── n requests ──> take, take, ... ── work ──> push, push, ... ──> publish ── true: notify
///    ▲                                                                         │
///    └────────────── true: some slipped in ── arm  <── nothing to do ──────────┘
/// ```
///
/// A back end that polls does not arm: the guest then sees an old event and does not notify.
#[derive(Debug)]
pub struct BackRing {
    shared: Shared,
    /// Requests that the last look found, as the producer's number.
    seen: u32,
    req_cons: u32,
    req_event: u32,
    rsp_pvt: u32,
    rsp_shown: u32,
    _pages: Pages,
}

// SAFETY: the pointers lead to shared memory, which is accessed by atomic and volatile operations and belongs to no
// thread.
unsafe impl Send for BackRing {}

fn base_of(pages: &Mapped) -> Result<NonNull<u8>, RingError> {
    NonNull::new(pages.as_ptr()).ok_or(RingError::Pages { len: 0 })
}

impl BackRing {
    /// A ring in pages that the guest granted, 1, 2, 4 or 8, mapped for writing.
    ///
    /// It goes on after the responses that the guest can see: in a new ring that is 0.
    ///
    /// # Errors
    /// The number of pages.
    pub fn new(pages: Mapped, abi: Abi) -> Result<Self, RingError> {
        // SAFETY: the ring keeps the mapping for its life, and it has no other owner here.
        let shared = unsafe { Shared::ordinary(base_of(&pages)?, pages.len(), abi)? };
        Ok(Self::start(shared, Pages::One(pages)))
    }

    /// A [split](super::split) ring: the pages of its requests, the pages of its responses.
    ///
    /// # Errors
    /// The numbers of pages.
    pub fn new_split(requests: Mapped, responses: Mapped) -> Result<Self, RingError> {
        let areas = ((base_of(&requests)?, requests.len()), (base_of(&responses)?, responses.len()));
        // SAFETY: the ring keeps both mappings for its life, and they have no other owner here.
        let shared = unsafe { Shared::split(areas.0, areas.1)? };
        Ok(Self::start(shared, Pages::Two(requests, responses)))
    }

    /// A ring in memory that the caller keeps.
    ///
    /// # Errors
    /// The length.
    ///
    /// # Safety
    /// `base` is page-aligned and valid for `len` bytes as long as the ring lives; others access that memory by atomic
    /// or volatile operations alone.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize, abi: Abi) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        Ok(Self::start(unsafe { Shared::ordinary(base, len, abi)? }, Pages::Elsewhere))
    }

    /// A split ring in memory that the caller keeps: requests, then responses.
    ///
    /// # Errors
    /// The lengths.
    ///
    /// # Safety
    /// As of [`BackRing::from_raw`], for both areas.
    pub unsafe fn split_from_raw(
        requests: (NonNull<u8>, usize),
        responses: (NonNull<u8>, usize),
    ) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        Ok(Self::start(unsafe { Shared::split(requests, responses)? }, Pages::Elsewhere))
    }

    fn start(shared: Shared, pages: Pages) -> Self {
        let answered = shared.rsp_prod.load();
        Self {
            shared,
            seen: answered,
            req_cons: answered,
            req_event: shared.req_event.load(),
            rsp_pvt: answered,
            rsp_shown: answered,
            _pages: pages,
        }
    }

    /// Goes on in a ring whose back end died, when `under_way` requests had been taken and not answered.
    ///
    /// The ring says which requests are answered (those before `rsp_prod`), but not which: responses come in any order,
    /// and response *n* lies on top of request *n*, whichever request it answers. So after a death the requests between
    /// `rsp_prod` and `rsp_prod + under_way`, counted in slots, are partly gone from the ring and partly such that were
    /// answered: they must not be read again, and are not. What was in flight has to be known from elsewhere:
    /// a journal kept beside the ring. Everything behind was never taken and is read from the ring.
    ///
    /// To be called before the first [`BackRing::look`]. Then notify the guest once, whatever [`BackRing::publish`]
    /// says later: the former back end may have died between showing responses and notifying, and the guest's event
    /// lies before what is shown already.
    ///
    /// # Errors
    /// `under_way` is more than the guest has produced, or than fits: the journal belongs to another ring.
    pub fn resume(&mut self, under_way: u32) -> Result<(), RingError> {
        let req_prod = self.shared.req_prod.load();
        if under_way > self.shared.responses || under_way > req_prod.wrapping_sub(self.rsp_pvt) {
            return Err(RingError::Overrun { req_prod, rsp_prod: self.rsp_pvt });
        }
        self.req_cons = self.rsp_pvt.wrapping_add(under_way);
        self.seen = self.req_cons;
        Ok(())
    }

    /// The layout.
    pub fn abi(&self) -> Abi {
        self.shared.abi
    }

    /// Requests in flight at most.
    pub fn size(&self) -> u32 {
        self.shared.responses
    }

    /// Whether the guest has moved its producer since the last look: one load. The poller's spin.
    #[inline]
    pub fn peek(&self) -> bool {
        self.shared.req_prod.load() != self.seen
    }

    /// Requests that wait to be taken. Reads the guest's producer once.
    ///
    /// # Errors
    /// The guest claims more than the ring can hold. Look no more.
    #[inline]
    pub fn look(&mut self) -> Result<u32, RingError> {
        let req_prod = self.shared.req_prod.load();
        let waiting = req_prod.wrapping_sub(self.req_cons);
        let under_way = req_prod.wrapping_sub(self.rsp_pvt);
        if waiting > self.shared.requests || under_way > self.shared.responses {
            return Err(RingError::Overrun { req_prod, rsp_prod: self.rsp_pvt });
        }
        self.seen = req_prod;
        Ok(waiting)
    }

    /// Requests that the last look found and that were not taken yet.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.seen.wrapping_sub(self.req_cons)
    }

    /// The number of the next request that is taken.
    #[inline]
    pub fn next_number(&self) -> u32 {
        self.req_cons
    }

    /// Copies the next request that the last look found out of the ring, each byte once.
    ///
    /// In a split ring the guest may use the slot again only when this has returned `None`, or after
    /// [`BackRing::publish`] or [`BackRing::arm`]: a record of what is in flight is written by then.
    #[inline]
    pub fn take(&mut self) -> Option<Slot> {
        if self.seen == self.req_cons {
            self.show_taken();
            return None;
        }
        // SAFETY: a slot is as long as a request of this layout, and aligned for it: the base is page-aligned, headers
        // and the 64-bit slots are multiples of eight, the 32-bit ones of four.
        let slot = unsafe { Slot::copy_from(self.shared.request(self.req_cons), self.shared.abi) };
        self.req_cons = self.req_cons.wrapping_add(1);
        Some(slot)
    }

    /// The number that the next response gets.
    #[inline]
    pub fn next_response(&self) -> u32 {
        self.rsp_pvt
    }

    /// Writes a response. The guest sees it after [`BackRing::publish`]. One for each request taken, in any order.
    ///
    /// # Panics
    /// There are more responses than requests were taken: a defect of the caller, which would give the guest answers
    /// to what it never asked.
    #[inline]
    pub fn push(&mut self, response: &Response) {
        assert!(self.rsp_pvt != self.req_cons, "a response without a request");
        let at = self.shared.response(self.rsp_pvt).cast::<u32>();
        for (index, word) in response.encode().as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: a slot of responses has at least 12 bytes and is aligned to four.
            unsafe { at.add(index).write_volatile(u32::from_ne_bytes(*word)) };
        }
        self.rsp_pvt = self.rsp_pvt.wrapping_add(1);
    }

    /// Shows all responses to the guest. True: it wants to be notified.
    ///
    /// Also to be called when nothing was pushed: of a split ring it says which requests were taken.
    #[inline]
    #[must_use = "a guest that is not notified waits for ever"]
    pub fn publish(&mut self) -> bool {
        let old = self.show();
        self.wants_notification(old)
    }

    /// The first half of [`BackRing::publish`]; what was shown before.
    #[inline]
    pub(super) fn show(&mut self) -> u32 {
        self.show_taken();
        let old = self.rsp_shown;
        if old != self.rsp_pvt {
            self.shared.rsp_prod.store(self.rsp_pvt);
            self.rsp_shown = self.rsp_pvt;
        }
        old
    }

    /// The second half. The event is read after the producer was shown: of a guest that arms meanwhile either we see
    /// the event or it sees the producer.
    #[inline]
    pub(super) fn wants_notification(&self, old: u32) -> bool {
        let new = self.rsp_shown;
        if old == new {
            return false;
        }
        fence(Ordering::SeqCst);
        let event = self.shared.rsp_event.load();
        new.wrapping_sub(event) < new.wrapping_sub(old)
    }

    /// Asks to be notified of the next request. True: one has slipped in, look again rather than sleep.
    ///
    /// # Errors
    /// As of [`BackRing::look`].
    pub fn arm(&mut self) -> Result<bool, RingError> {
        self.set_event();
        Ok(self.look()? > 0)
    }

    /// The first half of [`BackRing::arm`]; the second is a look.
    pub(super) fn set_event(&mut self) {
        self.show_taken();
        self.req_event = self.req_cons.wrapping_add(1);
        self.shared.req_event.store(self.req_event);
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn show_taken(&self) {
        if let Some(word) = self.shared.req_cons {
            word.store(self.req_cons);
        }
    }

    /// Where it stands. Reads the guest's two words as they are, unchecked: for people to look at.
    pub fn counters(&self) -> RingState {
        RingState {
            size: self.shared.responses,
            req_prod: self.shared.req_prod.load(),
            req_cons: self.req_cons,
            req_event: self.req_event,
            rsp_prod: self.rsp_shown,
            rsp_pvt: self.rsp_pvt,
            rsp_event: self.shared.rsp_event.load(),
        }
    }
}

#[cfg(test)]
impl BackRing {
    /// The same side of the same ring once more, to go on from here in another way.
    pub(super) fn fork(&self) -> Self {
        Self { _pages: Pages::Elsewhere, ..*self }
    }

    pub(super) fn shrink(&mut self, requests: u32, responses: u32) {
        self.shared = self.shared.shrunk(requests, responses);
    }

    pub(super) fn numbers(&self) -> [u32; 5] {
        [self.seen, self.req_cons, self.req_event, self.rsp_pvt, self.rsp_shown]
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
