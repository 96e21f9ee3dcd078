//! What both sides know of a connection: the control side lists it, the data thread counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::guard::{Guard, Key};
use super::wire::{RequestHeader, command};

/// A place among a bounded number; given back when dropped.
#[derive(Debug)]
pub struct Permit(Vec<Arc<AtomicUsize>>);

impl Permit {
    /// Takes one place at each counter, or none: `None` when one of them stands at its maximum.
    pub fn take(counters: &[(&Arc<AtomicUsize>, usize)]) -> Option<Self> {
        let mut permit = Self(Vec::with_capacity(counters.len()));
        for (counter, max) in counters {
            let free = |count| (count < *max).then_some(count + 1);
            counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free).ok()?;
            permit.0.push(Arc::clone(counter));
        }
        Some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        for counter in &self.0 {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What happened to a server's clients so far.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) accepted: AtomicU64,
    pub(super) handshakes_failed: AtomicU64,
    pub(super) handshakes_evicted: AtomicU64,
    pub(super) sessions: AtomicU64,
    pub(super) protocol_errors: AtomicU64,
    pub(super) vanished: AtomicU64,
}

/// What happened to a server's clients so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Handshakes that ended in neither transmission nor a goodbye.
    pub handshakes_failed: u64,
    /// Slow handshakes that gave way to newcomers.
    pub handshakes_evicted: u64,
    /// Connections that reached transmission.
    pub sessions: u64,
    /// Sessions ended because the client sent what is no request.
    pub protocol_errors: u64,
    /// Sessions whose client left without DISC.
    pub vanished: u64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Totals {
    pub(super) fn read(&self) -> ServerCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerCounters {
            accepted: of(&self.accepted),
            handshakes_failed: of(&self.handshakes_failed),
            handshakes_evicted: of(&self.handshakes_evicted),
            sessions: of(&self.sessions),
            protocol_errors: of(&self.protocol_errors),
            vanished: of(&self.vanished),
        }
    }
}

/// One connection as both sides know it.
#[derive(Debug)]
pub(super) struct Shared {
    /// Its number, never used twice by one server.
    pub(super) id: u64,
    /// Name of its export.
    pub(super) export: String,
    /// The client's identity, as far as the socket tells.
    pub(super) peer: String,
    pub(super) totals: Arc<Totals>,
    since: Instant,
    requests: AtomicU64,
    read_len: AtomicU64,
    written_len: AtomicU64,
    failures: AtomicU64,
    /// Counts requests that were taken and sends that took something.
    progress: AtomicU64,
    /// The progress at which it was looked at last, and since when it stands.
    stands: Mutex<(u64, Instant)>,
    guard: Option<(Arc<Guard>, Key)>,
    /// Not to be started any more, if that has not happened yet.
    cancelled: AtomicBool,
    closed: AtomicBool,
}

/// What the control side can say about a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Its number, never used twice by one server.
    pub id: u64,
    /// Name of its export.
    pub export: String,
    /// The client: `unix:pid=123,uid=0` or an address with its port.
    pub peer: String,
    /// Seconds since the handshake was done.
    pub age_s: u64,
    /// Requests taken.
    pub requests: u64,
    /// Bytes asked for by reads.
    pub read_len: u64,
    /// Bytes sent with writes.
    pub written_len: u64,
    /// Requests the disk failed.
    pub failures: u64,
}

/// Counters have one writer, the data thread: no need for a locked instruction.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

impl Shared {
    pub(super) fn new(
        id: u64,
        export: String,
        peer: String,
        totals: Arc<Totals>,
        guard: Option<(Arc<Guard>, Key)>,
    ) -> Self {
        Self {
            id,
            export,
            peer,
            totals,
            since: Instant::now(),
            requests: AtomicU64::new(0),
            read_len: AtomicU64::new(0),
            written_len: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            stands: Mutex::new((0, Instant::now())),
            guard,
            cancelled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn info(&self) -> ConnectionInfo {
        ConnectionInfo {
            id: self.id,
            export: self.export.clone(),
            peer: self.peer.clone(),
            age_s: self.since.elapsed().as_secs(),
            requests: self.requests.load(Ordering::Relaxed),
            read_len: self.read_len.load(Ordering::Relaxed),
            written_len: self.written_len.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
        }
    }

    pub(super) fn note_request(&self, header: &RequestHeader) {
        add(&self.requests, 1);
        self.note_progress();
        match header.command {
            command::READ => add(&self.read_len, header.len),
            command::WRITE => add(&self.written_len, header.len),
            _ => {}
        }
    }

    /// The client has sent or taken something.
    pub(super) fn note_progress(&self) {
        add(&self.progress, 1);
    }

    /// Whether the name by which it was found is valid still; true where its export is for all.
    pub(super) fn is_admitted(&self) -> bool {
        self.guard.as_ref().is_none_or(|(guard, key)| guard.admits(key))
    }

    /// Whether it came by one of these names.
    pub(super) fn came_by(&self, keys: &[Key]) -> bool {
        self.guard.as_ref().is_some_and(|(_, key)| keys.contains(key))
    }

    /// What its client has left of the time that it may do nothing, and what to call where that is over; none where it
    /// may do nothing for ever.
    pub(super) fn time_left(&self) -> Option<(Duration, &Guard)> {
        let (guard, _) = self.guard.as_ref()?;
        let progress = self.progress.load(Ordering::Relaxed);
        let mut stands = self.stands.lock();
        if stands.0 != progress {
            *stands = (progress, Instant::now());
        }
        Some((guard.client_time.saturating_sub(stands.1.elapsed()), guard))
    }

    pub(super) fn note_failure(&self) {
        add(&self.failures, 1);
    }

    /// Keeps it from starting; the caller then ends it if it has started already.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    pub(super) fn note_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_takes_all_its_places_or_none() {
        let (wide, narrow) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let take = || Permit::take(&[(&wide, 3), (&narrow, 1)]);
        let first = take();
        assert!(first.is_some() && take().is_none());
        assert_eq!(wide.load(Ordering::Relaxed), 1);
        drop(first);
        assert_eq!((wide.load(Ordering::Relaxed), narrow.load(Ordering::Relaxed)), (0, 0));
    }
}
