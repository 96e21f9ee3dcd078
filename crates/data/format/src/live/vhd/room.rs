//! Room for new blocks on a device that becomes longer when it is asked for: a logical volume of a thin disk.
//!
//! The image asks before the room ends. How early follows from what the guest has written in the last seconds and from
//! how long growths took: what is left then lasts for twice that time. It asks for twice as much, so that more than
//! that is left when the growth is over. While it wants room it asks again, because what is asked may be lost with the
//! process that heard it; and it looks itself whether the device has become longer. So no answer is needed, and a
//! growth whose teller died is found.
//!
//! | the device has become longer | |
//! |---|---|
//! | its last sector is no footer of this image | its owner is at work: the room is not used yet |
//! | its last sector is the footer that this image has | the growth is whole: the image ends there from now on |
//!
//! A guest that gives blocks back may leave the end of the device unused. When that has been so for a while, and is
//! more than what is kept ahead, the image offers it, a few times and ever more seldom: see `shorten`.
//!
//! Where there is no room left a new block fails with `OutOfSpace`, and what waits for that is the caller's choice.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tapio_ring::{Notify, PageBuf, Storage};

use super::{VhdLayer, Writer};
use crate::error::{FormatError, Result};
use crate::vhd::{FOOTER_LEN as FOOTER_BYTES, Footer, layout};

const FOOTER_LEN: u64 = FOOTER_BYTES as u64;
/// Room that is always kept ahead, where the disk can still need as much.
pub const AHEAD_MIN: u64 = 8 << 20;
/// Room that is kept ahead at most.
pub const AHEAD_MAX: u64 = 4 << 30;
/// How many times the room ahead a growth is to bring.
const GOAL: u64 = 2;
/// How long a growth is expected to take before the first has been seen.
const LEAD_NS: u64 = 1_000_000_000;
/// A growth that took longer, because its SR was full or its owner away, says nothing of the next.
const LEAD_MAX_NS: u64 = 10_000_000_000;
/// The rate of writing is measured over so long.
const WINDOW_NS: u64 = 200_000_000;
/// For so long a rate counts after its window, less and less: guests write in bursts.
const MEMORY_NS: u64 = 8_000_000_000;
/// It is asked again after this time, sooner while requests wait.
const AGAIN_NS: u64 = 1_000_000_000;
const AGAIN_WAITING_NS: u64 = 250_000_000;
/// Room that is spare is offered when nothing was given back for so long, then after twice that time, and so on.
const OFFER_AFTER_NS: u64 = 5_000_000_000;
/// So often, if no disk takes it.
const OFFERS_MAX: u32 = 7;
/// The end of a device is read in one piece of this length, which every device takes.
const PIECE: usize = 4096;

/// What an image wants of the owner of its device, or offers to it. A state, not an event: asking twice is asking once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomWanted {
    /// Bytes of the device as the image knows it.
    pub len: u64,
    /// Bytes that it shall have at least; fewer than it has: those are enough.
    pub wanted: u64,
    /// Requests wait for it.
    pub is_waiting: bool,
}

/// Asks the owner of a device for room. Called on the data thread: it waits for nothing.
pub trait AskForRoom: Send + Sync + fmt::Debug {
    /// Asks, or loses the question.
    fn ask(&self, wanted: &RoomWanted);
}

/// Where room is asked for: nowhere, or there.
#[derive(Clone, Debug, Default)]
pub struct RoomPlace(Option<(Arc<dyn AskForRoom>, Arc<RoomGauge>)>);

impl RoomPlace {
    /// There; what is known of the room is in `gauge`.
    pub fn new(ask: Arc<dyn AskForRoom>, gauge: Arc<RoomGauge>) -> Self {
        Self(Some((ask, gauge)))
    }
}

/// How it stands, for other threads; all zero while no image asks for room.
#[derive(Debug, Default)]
pub struct RoomGauge {
    len: AtomicU64,
    used: AtomicU64,
    ahead: AtomicU64,
    wanted: AtomicU64,
    enough: AtomicU64,
    /// Since when requests wait: nanoseconds after `began`, and 1; 0 while none does.
    waiting_since: AtomicU64,
    began: OnceLock<Instant>,
    grown: AtomicU64,
    /// The image that it is about; 0 for none.
    image: AtomicU64,
}

/// What a [`RoomGauge`] shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoomFacts {
    /// Bytes of the device; 0: it is no image that asks for room.
    pub len: u64,
    /// Bytes of it that blocks and metadata take, with gaps.
    pub used: u64,
    /// Room that shall be there: with less, it is asked for.
    pub ahead: u64,
    /// Bytes that the device shall have; 0 while nothing is asked for.
    pub wanted: u64,
    /// Bytes of the device that are enough; 0 while nothing is offered.
    pub enough: u64,
    /// For how long requests have waited; none while none does.
    pub waiting: Option<Duration>,
    /// How often the device has become longer.
    pub grown: u64,
}

impl RoomGauge {
    /// How it stands.
    pub fn facts(&self) -> RoomFacts {
        let load = |place: &AtomicU64| place.load(Ordering::Relaxed);
        RoomFacts {
            len: load(&self.len),
            used: load(&self.used),
            ahead: load(&self.ahead),
            wanted: load(&self.wanted),
            enough: load(&self.enough),
            waiting: load(&self.waiting_since).checked_sub(1).map(|since| {
                let now = self.began.get().map_or(Duration::ZERO, Instant::elapsed);
                now.saturating_sub(Duration::from_nanos(since))
            }),
            grown: load(&self.grown),
        }
    }

    /// It is about another image from now on; its number.
    fn take(&self) -> u64 {
        self.image.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn is_of(&self, image: u64) -> bool {
        self.image.load(Ordering::Relaxed) == image
    }

    fn set(&self, facts: &RoomFacts) {
        let store = |place: &AtomicU64, value| place.store(value, Ordering::Relaxed);
        store(&self.len, facts.len);
        store(&self.used, facts.used);
        store(&self.ahead, facts.ahead);
        store(&self.wanted, facts.wanted);
        store(&self.enough, facts.enough);
        store(&self.grown, facts.grown);
        let is_known = self.waiting_since.load(Ordering::Relaxed) != 0;
        if facts.waiting.is_none() {
            store(&self.waiting_since, 0);
        } else if !is_known {
            let since = self.began.get_or_init(Instant::now).elapsed().as_nanos();
            store(&self.waiting_since, u64::try_from(since).unwrap_or(u64::MAX - 1) + 1);
        }
    }
}

/// What is known of writing and of growths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pace {
    /// Bytes a second.
    rate: u64,
    window_ns: u64,
    window_bytes: u64,
    /// How long growths take.
    lead_ns: u64,
}

impl Pace {
    /// A block of `bytes` was taken.
    fn taken(&mut self, now_ns: u64, bytes: u64) {
        let since = now_ns.saturating_sub(self.window_ns);
        self.window_bytes += bytes;
        if since >= WINDOW_NS {
            let rate = u128::from(self.window_bytes) * 1_000_000_000 / u128::from(since);
            let rate = u64::try_from(rate).unwrap_or(u64::MAX);
            // Up at once, down slowly: a burst that pauses goes on.
            self.rate = rate.max(self.rate_at(now_ns));
            (self.window_ns, self.window_bytes) = (now_ns, 0);
        } else if self.window_bytes > self.rate / 4 {
            // More already than the rate so far has for all of the window.
            self.rate = self.rate.max(self.window_bytes.saturating_mul(1_000_000_000 / WINDOW_NS));
        }
    }

    /// A growth took so long.
    fn grew(&mut self, took_ns: u64) {
        let took = took_ns.min(LEAD_MAX_NS);
        self.lead_ns = if self.lead_ns == 0 { took } else { took.max((self.lead_ns + took) / 2) };
    }

    /// What is left of the rate when nothing was written since its window began.
    fn rate_at(&self, now_ns: u64) -> u64 {
        let left = u128::from(MEMORY_NS.saturating_sub(now_ns.saturating_sub(self.window_ns)));
        u64::try_from(u128::from(self.rate) * left / u128::from(MEMORY_NS)).unwrap_or(u64::MAX)
    }

    /// Room that lasts for twice the time of a growth.
    fn ahead(&self, now_ns: u64) -> u64 {
        let lead = if self.lead_ns == 0 { LEAD_NS } else { self.lead_ns };
        let bytes = u128::from(self.rate_at(now_ns)) * u128::from(lead) * 2 / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX).clamp(AHEAD_MIN, AHEAD_MAX)
    }
}

/// When room is offered.
#[derive(Clone, Copy, Debug, Default)]
struct Offer {
    /// Not before this; none: nothing was given back.
    at_ns: Option<u64>,
    /// How often it was.
    turns: u32,
    /// Bytes of the device that were enough then; 0: nothing is offered.
    enough: u64,
}

/// The room of an image that is open for writing on a device.
#[derive(Debug)]
pub(super) struct Room {
    ask: Arc<dyn AskForRoom>,
    gauge: Arc<RoomGauge>,
    pace: Cell<Pace>,
    /// When it was asked first for what is wanted.
    asked_ns: Cell<Option<u64>>,
    /// Its number at the gauge; 0 before it is a leaf.
    image: Cell<u64>,
    is_waiting: Cell<bool>,
    /// How often the device has become longer.
    grown: Cell<u64>,
    offer: Cell<Offer>,
    /// The service sleeps until room is low.
    is_asleep: Cell<bool>,
    /// Room is low, is there again, or a request waits for it.
    news: Notify,
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.is_of_leaf() {
            self.gauge.set(&RoomFacts::default());
        }
    }
}

impl Room {
    /// The image is the leaf of its disk.
    fn is_of_leaf(&self) -> bool {
        self.image.get() != 0 && self.gauge.is_of(self.image.get())
    }

    pub(super) fn new(place: &RoomPlace) -> Option<Self> {
        let (ask, gauge) = place.0.clone()?;
        Some(Self {
            ask,
            gauge,
            pace: Cell::default(),
            asked_ns: Cell::new(None),
            image: Cell::new(0),
            is_waiting: Cell::new(false),
            grown: Cell::new(0),
            offer: Cell::default(),
            is_asleep: Cell::new(false),
            news: Notify::default(),
        })
    }
}

impl<S: Storage> VhdLayer<S> {
    fn room_of_writer(&self) -> Option<(&Writer, &Room)> {
        let writer = self.writer.as_ref()?;
        Some((writer, writer.room.as_ref()?))
    }

    /// How often the device has become longer while it was open; none where room is not asked for.
    pub fn growths(&self) -> Option<u64> {
        self.room_of_writer().map(|(_, room)| room.grown.get())
    }

    /// The image is the leaf of its disk from now on: only a leaf asks for room.
    pub fn ask_for_room(self: &Rc<Self>) {
        let Some((writer, room)) = self.room_of_writer() else { return };
        if room.is_of_leaf() || writer.closing.get() {
            return;
        }
        let is_first = room.image.replace(room.gauge.take()) == 0;
        if is_first {
            writer.services.set(writer.services.get() + 1);
            self.tasks.spawn(Rc::clone(self).keep_room());
        } else {
            room.news.notify_all(&self.tasks);
        }
    }

    /// Bytes that new blocks may still take, and those that they can take in all.
    fn left_and_needed(&self, writer: &Writer) -> (u64, u64) {
        let cost = layout::block_span_len(self.header.borrow().block_len) + layout::DATA_ALIGN;
        let places = u64::from(writer.reserve.ready()) + writer.freed.count();
        let tail = self.store.len().saturating_sub(writer.reserve.tail() + FOOTER_LEN);
        let missing = u64::from(self.table.len().saturating_sub(self.table.allocated()));
        (tail + places * cost, missing * cost + FOOTER_LEN)
    }

    /// What is wanted now, if anything is.
    fn wants_room(&self, writer: &Writer, room: &Room) -> Option<RoomWanted> {
        if !room.is_of_leaf() {
            return None;
        }
        let (left, needed) = self.left_and_needed(writer);
        let ahead = room.pace.get().ahead(self.tasks.turn_ns());
        let len = self.store.len();
        let is_waiting = room.is_waiting.get();
        let is_low = left < needed && (left < ahead.min(needed) || is_waiting);
        let more = ahead.saturating_mul(GOAL).min(needed).saturating_sub(left).max(1);
        let wanted = is_low.then(|| RoomWanted { len, wanted: len.saturating_add(more), is_waiting });
        room.gauge.set(&RoomFacts {
            len,
            used: writer.reserve.tail(),
            ahead: ahead.min(needed),
            wanted: wanted.map_or(0, |wanted| wanted.wanted),
            enough: room.offer.get().enough,
            waiting: is_waiting.then_some(Duration::ZERO),
            grown: room.grown.get(),
        });
        wanted
    }

    /// A block was given a place.
    pub(super) fn watch_room(&self, writer: &Writer) {
        let Some(room) = &writer.room else { return };
        let mut pace = room.pace.get();
        pace.taken(self.tasks.turn_ns(), u64::from(self.header.borrow().block_len));
        room.pace.set(pace);
        room.is_waiting.set(false);
        if room.is_asleep.get() && self.wants_room(writer, room).is_some() {
            room.is_asleep.set(false);
            room.news.notify_all(&self.tasks);
        }
    }

    /// Blocks were given back.
    pub(super) fn watch_spare(&self, writer: &Writer) {
        let Some(room) = writer.room.as_ref().filter(|room| room.is_of_leaf()) else { return };
        let before = room.offer.get();
        room.offer.set(Offer { at_ns: Some(self.tasks.turn_ns() + OFFER_AFTER_NS), turns: 0, ..before });
        if before.at_ns.is_none() && room.is_asleep.replace(false) {
            room.news.notify_all(&self.tasks);
        }
    }

    /// The image has become shorter, or was to.
    pub(super) fn room_was_given(&self, writer: &Writer, given: bool) {
        let Some(room) = &writer.room else { return };
        room.offer.set(if given { Offer::default() } else { Offer { enough: 0, ..room.offer.get() } });
        room.is_asleep.set(false);
        room.news.notify_all(&self.tasks);
    }

    /// Offers what is spare, if it is time for that, or waits for news.
    async fn rest(&self, writer: &Writer, room: &Room) {
        let offer = room.offer.get();
        let Some(at) = offer.at_ns else { return room.news.wait(&self.tasks).await };
        if self.tasks.turn_ns() < at {
            return room.news.wait_until(&self.tasks, at).await;
        }
        room.is_asleep.set(false);
        if self.tasks.turn_ns().saturating_sub(writer.reserve.taken_ns()) >= OFFER_AFTER_NS {
            // The rate of what was written last says nothing any more.
            room.pace.set(Pace { rate: 0, ..room.pace.get() });
        }
        let (_, needed) = self.left_and_needed(writer);
        let ahead = room.pace.get().ahead(self.tasks.turn_ns()).saturating_mul(2).min(needed);
        let enough = self.enough(writer, ahead).await;
        let offered = self.offer(enough);
        let turns = offer.turns + 1;
        let next = self.tasks.turn_ns() + (OFFER_AFTER_NS << turns.min(OFFERS_MAX));
        room.offer.set(Offer {
            at_ns: (offered.is_some() && turns < OFFERS_MAX).then_some(next),
            turns,
            enough: offered.map_or(0, |offered| offered.wanted),
        });
        // What is known of the room shows it before it is asked.
        if self.wants_room(writer, room).is_none()
            && let Some(offered) = offered
        {
            room.ask.ask(&offered);
        }
    }

    /// A block found no room.
    pub(super) fn missed_room(&self, writer: &Writer) {
        let Some(room) = &writer.room else { return };
        if !room.is_waiting.replace(true) {
            room.is_asleep.set(false);
            room.news.notify_all(&self.tasks);
        }
    }

    /// The service that asks for room. Sleeps while there is enough.
    pub(super) async fn keep_room(self: Rc<Self>) {
        let Some((writer, room)) = self.room_of_writer() else { return };
        while !writer.closing.get() {
            let Some(wanted) = self.wants_room(writer, room) else {
                room.asked_ns.set(None);
                room.is_asleep.set(true);
                self.rest(writer, room).await;
                continue;
            };
            let now = self.tasks.turn_ns();
            room.asked_ns.set(Some(room.asked_ns.get().unwrap_or(now)));
            room.ask.ask(&wanted);
            let again = if wanted.is_waiting { AGAIN_WAITING_NS } else { AGAIN_NS };
            room.news.wait_until(&self.tasks, now + again).await;
            if !writer.closing.get() && self.tasks.turn_ns() >= now + again {
                // An owner that died may have made it longer. What cannot be looked at now is later.
                let _ = Box::pin(self.look_for_room()).await;
            }
        }
        writer.service_ends(&self.tasks);
    }

    pub(super) fn end_room_service(&self, writer: &Writer) {
        if let Some(room) = &writer.room {
            room.news.notify_all(&self.tasks);
        }
    }

    /// Looks whether the device has become longer, and takes that over. Whether it has.
    ///
    /// # Errors
    /// The storage's.
    pub async fn look_for_room(&self) -> Result<bool> {
        let Some((writer, room)) = self.room_of_writer() else { return Ok(false) };
        let failed = |error| FormatError::io("cannot ask how long the device is", error);
        let len = self.store.measured_len().await.map_err(failed)? / PIECE as u64 * PIECE as u64;
        // The party that asks learns what is wanted now, not at the last bell.
        let _ = self.wants_room(writer, room);
        if len <= self.store.len() || !self.ends_in_footer(len).await? {
            return Ok(false);
        }
        // The end is moved by one at a time.
        let reserve = &writer.reserve;
        while reserve.busy.replace(true) {
            reserve.done.wait(&self.tasks).await;
        }
        if len > self.store.len() && !writer.closing.get() {
            self.store.has_grown(len);
            room.offer.set(Offer { enough: 0, ..room.offer.get() });
            writer.log.will_have_len(len, len);
            room.grown.set(room.grown.get() + 1);
            room.is_waiting.set(false);
            if let Some(asked) = room.asked_ns.take() {
                let mut pace = room.pace.get();
                pace.grew(self.tasks.turn_ns().saturating_sub(asked));
                room.pace.set(pace);
            }
        }
        reserve.busy.set(false);
        reserve.done.notify_all(&self.tasks);
        reserve.may_go_on(&self.tasks);
        room.is_asleep.set(false);
        room.news.notify_all(&self.tasks);
        Ok(true)
    }

    /// Whether a device of `len` bytes ends in the footer of this image.
    async fn ends_in_footer(&self, len: u64) -> Result<bool> {
        let at = len - PIECE as u64;
        let (page, read) = self.store.read_into(at, PageBuf::zeroed(PIECE), 0..PIECE).await;
        read.map_err(|error| {
            FormatError::io("cannot read the new end of the device", error).with_offset(at)
        })?;
        let mut last = [0; FOOTER_BYTES];
        last.copy_from_slice(&page[PIECE - FOOTER_BYTES..]);
        let own = *self.footer.borrow();
        Ok(Footer::decode(&last).is_ok_and(|(footer, _)| {
            footer.uuid == own.uuid
                && footer.current_len == own.current_len
                && footer.disk_type == own.disk_type
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 2 << 20;
    const MS: u64 = 1_000_000;

    #[test]
    fn room_ahead_follows_the_rate_of_writing_and_the_time_of_growths() {
        let mut pace = Pace::default();
        assert_eq!(pace.ahead(0), AHEAD_MIN, "nothing is written");
        // 200 MiB a second: 100 blocks, one each 10 ms.
        for block in 1..=100 {
            pace.taken(block * 10 * MS, BLOCK);
        }
        let rate = 200 << 20;
        assert!(pace.rate.abs_diff(rate) < rate / 5, "{}", pace.rate);
        let ahead = |pace: &Pace| pace.ahead(1_000 * MS);
        assert!(ahead(&pace).abs_diff(2 * rate) < rate / 5, "a second, twice: {}", ahead(&pace));
        pace.grew(2_000 * MS);
        assert!(ahead(&pace) > rate * 3, "growths take two seconds: {}", ahead(&pace));
        pace.grew(100 * MS);
        pace.grew(100 * MS);
        assert!(ahead(&pace) < rate * 3, "and less again: {}", ahead(&pace));
        assert_eq!(pace.ahead(10_000 * MS), AHEAD_MIN, "nothing is written any more");
        // A burst after a rest of two seconds finds most of what it had.
        pace.taken(3_000 * MS, BLOCK);
        assert!(pace.rate > rate / 2, "{}", pace.rate);
        // Once a second.
        for block in 2..=40 {
            pace.taken((1 + block) * 1_000 * MS, BLOCK);
        }
        assert_eq!(pace.ahead(42_000 * MS), AHEAD_MIN);
    }

    #[test]
    fn a_burst_is_known_before_its_window_is_over() {
        let mut pace = Pace::default();
        for block in 0..50 {
            pace.taken(1_000 * MS + block * MS, BLOCK);
        }
        assert!(pace.ahead(1_050 * MS) > 400 << 20, "{}", pace.ahead(1_050 * MS));
        pace.grew(u64::MAX);
        assert_eq!(pace.lead_ns, LEAD_MAX_NS);
        pace.rate = u64::MAX;
        assert_eq!(pace.ahead(1_000 * MS), AHEAD_MAX);
    }
}
