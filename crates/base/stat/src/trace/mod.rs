//! Trace points of requests: when each of them passed where, in a ring in shared memory.
//!
//! ```text
//!   front end's own ring        the disk's ring, tapio/.trace-<pid>.<minor>
//!   FrontSubmit(id) ─────────▶ Taken(id) ─ CopiedIn* ─▶ Started ─▶ Issued ─▶ Entering* ═ kernel ═▶ Woke* ─▶ Returned
//!   FrontSaw(id) ◀──────────── Published* ◀─ CopiedOut* ◀───────────────────────────────── Ended ◀──────────────┘
//! ```
//!
//! An event is 16 bytes: a time stamp, and a word with the step and the request. Events marked `*` are written once
//! for a batch and count for every request that they concern, so that what is traced is not slowed down more than it
//! must be. The ring is overwritten from its beginning when it is full: a reader gets the latest events. One
//! thread writes, by plain stores; it never waits for a reader.
//!
//! Stamps are of the processor's time stamp counter where that runs evenly through all states of all processors
//! (`constant_tsc` and `nonstop_tsc`), so that those of a front end and of a disk process can be compared; elsewhere of
//! `CLOCK_MONOTONIC_RAW`. [`requests`] puts events together again.

mod clock;
mod join;
mod ring;

pub use clock::{Clock, Rate};
pub use join::{STEPS, Step, TracedRequest, requests};
pub use ring::{
    EVENTS_DEFAULT, EVENTS_MAX, EVENTS_MIN, TRACE_VERSION, TraceData, TraceError, TraceRing, parse_trace,
    read_trace, trace_name,
};

use crate::RequestKind;

/// Where a request can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Point {
    /// A front end of ours put a request into its ring; `aux` is what it calls it.
    FrontSubmit = 1,
    /// The disk process took it out of the ring or off the socket; `aux` is what the front end calls it.
    Taken = 2,
    /// What was taken has been copied from its guest, or mapped. Of a client.
    CopiedIn = 3,
    /// The disk began to work on it: it has passed limits and page pool. `aux` is its kind and length, see
    /// [`Event::about`].
    Started = 4,
    /// Its first transfer was put into the kernel's ring.
    Issued = 5,
    /// The thread is about to enter the kernel, with all that was put into the ring. Of the thread.
    Entering = 6,
    /// The thread has seen what the kernel has completed. Of the thread.
    Woke = 7,
    /// Its last transfer has ended.
    Returned = 8,
    /// The disk is done with it.
    Ended = 9,
    /// Data was copied to the guest. Of a client.
    CopiedOut = 10,
    /// Its answer can be seen by the guest, or was sent. Of a client if the tag is [`TAG_ALL`].
    Published = 11,
    /// A front end of ours saw the answer; `aux` is what it calls the request.
    FrontSaw = 12,
}

/// The tag of events that are about all requests of a client.
pub const TAG_ALL: u16 = u16::MAX;

impl Point {
    /// All of them, in the order in which a request passes them.
    pub const ALL: [Self; 12] = [
        Self::FrontSubmit,
        Self::Taken,
        Self::CopiedIn,
        Self::Started,
        Self::Issued,
        Self::Entering,
        Self::Woke,
        Self::Returned,
        Self::Ended,
        Self::CopiedOut,
        Self::Published,
        Self::FrontSaw,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|point| *point as u8 == number)
    }
}

/// Something happened to a request, or to all requests of a client or of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, in ticks of the ring's clock.
    pub stamp: u64,
    /// What.
    pub point: Point,
    /// The queue or connection it came by, as the disk numbers them; modulo 256.
    pub client: u8,
    /// What the client calls the request while it is in flight; modulo 65536.
    pub tag: u16,
    /// Depends on the point.
    pub aux: u32,
}

/// Sectors of a length fit into the low bits of `aux`, the kind into those above.
const KIND_SHIFT: u32 = 28;

impl Event {
    /// The `aux` of a [`Point::Started`]: what the request does, and how many bytes long it is.
    pub const fn about(kind: RequestKind, len: u64) -> u32 {
        let (sectors, most) = (len.div_ceil(512), (1u64 << KIND_SHIFT) - 1);
        let sectors = if sectors > most { most } else { sectors };
        (kind as u32) << KIND_SHIFT | sectors as u32
    }

    /// What [`Event::about`] said.
    fn kind_and_len(self) -> (RequestKind, u64) {
        let kind =
            RequestKind::ALL.get((self.aux >> KIND_SHIFT) as usize).copied().unwrap_or(RequestKind::Read);
        (kind, u64::from(self.aux & ((1 << KIND_SHIFT) - 1)) * 512)
    }

    /// The second word of an event in the ring: from the lowest bits on the point, the client, the tag and `aux`.
    const fn word(self) -> u64 {
        self.point as u64 | (self.client as u64) << 8 | (self.tag as u64) << 16 | (self.aux as u64) << 32
    }

    /// An event from its two words; none for what no writer of ours wrote.
    fn of_words(stamp: u64, word: u64) -> Option<Self> {
        Some(Self {
            stamp,
            point: Point::of(word as u8)?,
            client: (word >> 8) as u8,
            tag: (word >> 16) as u16,
            aux: (word >> 32) as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_survives_its_words() {
        for (index, point) in Point::ALL.into_iter().enumerate() {
            let event = Event { stamp: 77, point, client: 200 + index as u8, tag: 65_000, aux: u32::MAX - 3 };
            assert_eq!(Event::of_words(event.stamp, event.word()), Some(event));
        }
        assert_eq!(Event::of_words(1, 0), None);
        assert_eq!(Event::of_words(1, 13), None);
    }

    #[test]
    fn kinds_and_lengths_survive_up_to_the_largest() {
        for kind in RequestKind::ALL {
            for len in [0, 512, 4096, 32 << 20, u64::MAX] {
                let event = Event {
                    stamp: 0,
                    point: Point::Started,
                    client: 0,
                    tag: 0,
                    aux: Event::about(kind, len),
                };
                let most = ((1u64 << KIND_SHIFT) - 1) * 512;
                assert_eq!(event.kind_and_len(), (kind, len.min(most)));
            }
        }
    }
}
