//! Trace points of the requests of a data thread: see [`tapio_stat::trace`].

use std::cell::{Cell, RefCell};

use tapio_stat::trace::{Clock, Event, Point, TAG_ALL, TraceRing};

use crate::meter::Meter;
use crate::request::Op;

/// Where the points of a disk go while it is traced. Off, a point costs the load of [`Trace::is_on`].
#[derive(Debug, Default)]
pub struct Trace {
    /// The ring's, while points are written.
    clock: Cell<Option<Clock>>,
    ring: RefCell<Option<TraceRing>>,
}

impl Trace {
    /// Whether the disk is traced.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.clock.get().is_some()
    }

    /// Writes points into `ring` from now on; gives the one before.
    pub fn start(&self, ring: TraceRing) -> Option<TraceRing> {
        self.clock.set(Some(ring.clock()));
        self.ring.replace(Some(ring))
    }

    /// Writes nothing more; what was written stays readable until [`Trace::forget`]. Answers how many events there
    /// were, or none if there is no ring.
    pub fn stop(&self) -> Option<u64> {
        self.clock.set(None);
        let ring = self.ring.borrow();
        let ring = ring.as_ref()?;
        ring.stop();
        Some(ring.written())
    }

    /// Writes nothing more; gives the ring, whose file goes when it is dropped.
    pub fn forget(&self) -> Option<TraceRing> {
        self.clock.set(None);
        self.ring.take()
    }

    /// Something happens now to request `tag` of `client`.
    #[inline]
    pub fn note(&self, point: Point, client: u8, tag: u16, aux: u32) {
        if self.is_on() {
            self.write(|ring| ring.note(point, client, tag, aux));
        }
    }

    /// Something happens now to all requests of `client`, or with client 0 to the thread.
    #[inline]
    pub fn note_all(&self, point: Point, client: u8) {
        self.note(point, client, TAG_ALL, 0);
    }

    /// The time now, as points are stamped; zero while tracing is off.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.clock.get().map_or(0, Clock::now)
    }

    /// Something happened to request `tag` of `client` at `stamp`, unless tracing was off then.
    #[inline]
    pub fn note_at(&self, stamp: u64, point: Point, client: u8, tag: u16, aux: u32) {
        if stamp > 0 && self.is_on() {
            self.write(|ring| ring.push(Event { stamp, point, client, tag, aux }));
        }
    }

    /// The clock of stamps, while the disk is traced.
    #[inline]
    pub(crate) fn clock(&self) -> Option<Clock> {
        self.clock.get()
    }

    /// What the disk did with a request, at its end. `started` is when it began.
    #[cold]
    pub(crate) fn served(&self, of: (u8, u64), about: (Op, u64), started: u64, meter: &Meter) {
        let (client, tag) = (of.0, of.1 as u16);
        self.write(|ring| {
            let event = |point, stamp, aux| {
                if stamp > 0 {
                    ring.push(Event { stamp, point, client, tag, aux });
                }
            };
            let (issued, returned) = meter.stamps();
            event(Point::Started, started, Event::about(about.0.kind(), about.1));
            event(Point::Issued, issued, 0);
            event(Point::Returned, returned, 0);
            event(Point::Ended, ring.now(), 0);
        });
    }

    #[cold]
    fn write(&self, write: impl FnOnce(&TraceRing)) {
        if let Some(ring) = &*self.ring.borrow() {
            write(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use tapio_stat::RequestKind;
    use tapio_stat::trace::requests;

    use super::*;

    #[test]
    fn nothing_is_written_while_tracing_is_off() {
        let trace = Trace::default();
        trace.note_all(Point::Woke, 0);
        assert!(!trace.is_on() && trace.stop().is_none() && trace.clock().is_none());
        assert!(trace.start(TraceRing::private(256).expect("memory")).is_none());
        trace.note_all(Point::Woke, 0);
        assert_eq!(trace.stop(), Some(1));
        trace.note_all(Point::Woke, 0);
        assert_eq!(trace.stop(), Some(1));
        assert_eq!(trace.forget().expect("there was a ring").written(), 1);
        assert!(trace.forget().is_none());
    }

    #[test]
    fn a_served_request_is_found_again() {
        let trace = Trace::default();
        trace.start(TraceRing::private(256).expect("memory"));
        trace.note(Point::Taken, 4, 9, 1234);
        let clock = trace.clock().expect("it is on");
        let (started, meter) = (clock.now(), Meter::traced(Some(clock)));
        meter.issued(1);
        trace.note_all(Point::Entering, 0);
        trace.note_all(Point::Woke, 0);
        meter.returned(2);
        trace.served((4, 9), (Op::Write { durable: true }, 8192), started, &meter);
        trace.note_all(Point::Published, 4);
        let ring = trace.forget().expect("a ring");
        let found = requests(&ring.data(), None);
        let [one] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((one.id, one.client, one.kind, one.len), (1234, 4, RequestKind::Write, 8192));
        let sum: u64 = one.steps_ns.iter().sum();
        assert!(sum <= one.total_ns && one.total_ns - sum < 20, "{one:?}");
    }
}
