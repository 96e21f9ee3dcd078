//! The ring: its layout, writing and reading it.
//!
//! | word | |
//! |---|---|
//! | 0 | `TAPIOTRC` |
//! | 1 | layout number |
//! | 2 | events that the ring holds, a power of two |
//! | 3 | events written so far, since the beginning |
//! | 4 | the clock: 0 `CLOCK_MONOTONIC_RAW`, 1 time stamp counter |
//! | 5, 6 | one moment, in ticks and in nanoseconds of `CLOCK_MONOTONIC_RAW` |
//! | 7, 8 | process, minor number |
//! | 9 | 1 while events are being written |
//! | 512 + 2n | stamp of event n |
//! | 513 + 2n | what it is, see [`super::Event`] |

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use super::{Clock, Event, Point, Rate};
use crate::reader::open_plain;
use crate::shm::{ShmRoot, Turn, Words, private_dir};

/// Layout number. A reader refuses any other.
pub const TRACE_VERSION: u64 = 1;
/// Fewest events of a ring.
pub const EVENTS_MIN: u32 = 1 << 8;
/// Events of a ring unless another number is asked for: 4 MiB, some 25,000 requests.
pub const EVENTS_DEFAULT: u32 = 1 << 18;
/// Most events of a ring: 64 MiB.
pub const EVENTS_MAX: u32 = 1 << 22;

const MAGIC: u64 = u64::from_ne_bytes(*b"TAPIOTRC");
const HEAD_WORDS: usize = 512;
const EVENT_WORDS: usize = 2;
/// Events at the old end of a full ring that may be half overwritten while it is read.
const TORN: u64 = 1;

mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const CAPACITY: usize = 2;
    pub const WRITTEN: usize = 3;
    pub const CLOCK: usize = 4;
    pub const TICKS: usize = 5;
    pub const NANOSECONDS: usize = 6;
    pub const PID: usize = 7;
    pub const MINOR: usize = 8;
    pub const RUNNING: usize = 9;
}

/// The name of a disk's ring among the pages; the dot hides it from programs that list disks.
pub fn trace_name(pid: u32, minor: u32) -> String {
    format!(".trace-{pid}.{minor}")
}

/// A ring of events, written by one thread.
#[derive(Debug)]
pub struct TraceRing {
    words: Words,
    clock: Clock,
    mask: u64,
    written: Cell<u64>,
}

impl TraceRing {
    /// Makes the ring of a disk of this process, visible to others until it is dropped. Its memory is touched here, so
    /// that its writer does not wait for pages.
    ///
    /// # Errors
    /// A number of events that cannot be; no room; the directory has another owner.
    pub fn create(root: &ShmRoot, minor: u32, events: u32) -> io::Result<Self> {
        let events = check(events)?;
        let turn = Turn::take(root)?;
        private_dir(&root.pages())?;
        let path = root.pages().join(trace_name(std::process::id(), minor));
        Ok(Self::over(Words::create(&turn, &path, len_of(events))?, minor, events))
    }

    /// A ring without a file, for a front end that reads it itself.
    ///
    /// # Errors
    /// A number of events that cannot be; no memory.
    pub fn private(events: u32) -> io::Result<Self> {
        let events = check(events)?;
        Ok(Self::over(Words::anonymous(len_of(events))?, 0, events))
    }

    /// Bytes of a ring of so many events.
    pub const fn len_of(events: u32) -> u64 {
        len_of(events) as u64
    }

    fn over(words: Words, minor: u32, events: u32) -> Self {
        let clock = Clock::best();
        for word in words.as_slice() {
            word.store(0, Ordering::Relaxed);
        }
        let (ticks, ns) = clock.pair();
        words.set(at::VERSION, TRACE_VERSION);
        words.set(at::CAPACITY, events.into());
        words.set(at::CLOCK, clock.number());
        words.set(at::TICKS, ticks);
        words.set(at::NANOSECONDS, ns);
        words.set(at::PID, std::process::id().into());
        words.set(at::MINOR, minor.into());
        words.set(at::RUNNING, 1);
        fence(Ordering::Release);
        words.as_slice()[at::MAGIC].store(MAGIC, Ordering::Release);
        Self { words, clock, mask: u64::from(events) - 1, written: Cell::new(0) }
    }

    /// What events are stamped by.
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// The time now, as events are stamped.
    #[inline]
    pub fn now(&self) -> u64 {
        self.clock.now()
    }

    /// Writes an event. Two stores and a third that makes it visible.
    #[inline]
    pub fn push(&self, event: Event) {
        let written = self.written.get();
        let first = HEAD_WORDS + (written & self.mask) as usize * EVENT_WORDS;
        let words = self.words.as_slice();
        words[first].store(event.stamp, Ordering::Relaxed);
        words[first + 1].store(event.word(), Ordering::Relaxed);
        self.written.set(written + 1);
        words[at::WRITTEN].store(written + 1, Ordering::Release);
    }

    /// Writes an event that happens now.
    #[inline]
    pub fn note(&self, point: Point, client: u8, tag: u16, aux: u32) {
        self.push(Event { stamp: self.now(), point, client, tag, aux });
    }

    /// Marks the ring as stopped. What was written stays readable.
    pub fn stop(&self) {
        self.words.set(at::RUNNING, 0);
    }

    /// Events written so far, those that were overwritten included.
    pub fn written(&self) -> u64 {
        self.written.get()
    }

    /// What is in it, for the process that writes it.
    pub fn data(&self) -> TraceData {
        let words: Vec<u64> = self.words.as_slice().iter().map(|word| word.load(Ordering::Relaxed)).collect();
        // This program wrote head and events.
        parse_words(&words, self.written.get(), &|then| self.clock.rate_since(then))
            .expect("a ring of this process has the right layout")
    }
}

fn check(events: u32) -> io::Result<u32> {
    if !(EVENTS_MIN..=EVENTS_MAX).contains(&events) || !events.is_power_of_two() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{events} events: a ring has a power of two of them from {EVENTS_MIN} to {EVENTS_MAX}"),
        ));
    }
    Ok(events)
}

const fn len_of(events: u32) -> usize {
    8 * (HEAD_WORDS + events as usize * EVENT_WORDS)
}

/// What a ring held at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceData {
    /// Process that wrote it.
    pub pid: u32,
    /// Minor number of the disk in that process.
    pub minor: u32,
    /// Where the stamps come from.
    pub clock: Clock,
    /// How long a tick is.
    pub rate: Rate,
    /// Whether more may come.
    pub running: bool,
    /// Events that were overwritten before they were read.
    pub lost: u64,
    /// The others, as they were written.
    pub events: Vec<Event>,
}

/// Why a ring cannot be read.
#[derive(Debug)]
pub enum TraceError {
    /// The file system said no.
    Io(io::Error),
    /// It is no ring of the known layout.
    Layout(&'static str),
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Layout(why) => write!(f, "{why}: use the tapio that came with the disk"),
        }
    }
}

impl std::error::Error for TraceError {}

impl From<io::Error> for TraceError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads the ring of a disk.
///
/// # Errors
/// There is none, or it is not ours.
pub fn read_trace(root: &ShmRoot, pid: u32, minor: u32) -> Result<TraceData, TraceError> {
    let file = open_plain(&root.pages().join(trace_name(pid, minor)))?;
    let len = file.metadata()?.len();
    if len > TraceRing::len_of(EVENTS_MAX) {
        return Err(TraceError::Layout("the trace is larger than any of ours"));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    // What was written while the copy was made may have overwritten the oldest events of it.
    parse_trace(&bytes, written_now(&file)?, &|clock, then| clock.rate_since(then))
}

fn written_now(file: &File) -> io::Result<u64> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, 8 * at::WRITTEN as u64)?;
    Ok(u64::from_ne_bytes(word))
}

/// Reads a copy of a ring. `written_after` is how many events had been written when the copy was complete, `rate_of`
/// says how fast a clock has run since a moment in ticks and nanoseconds.
///
/// # Errors
/// It is no ring of the known layout.
pub fn parse_trace(
    bytes: &[u8],
    written_after: u64,
    rate_of: &dyn Fn(Clock, (u64, u64)) -> Rate,
) -> Result<TraceData, TraceError> {
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|chunk| chunk.try_into().map_or(0, u64::from_ne_bytes)).collect();
    let clock = words.get(at::CLOCK).and_then(|number| Clock::of_number(*number));
    let clock = clock.ok_or(TraceError::Layout("the trace has an unknown clock"))?;
    parse_words(&words, written_after, &|then| rate_of(clock, then))
}

fn parse_words(
    words: &[u64],
    written_after: u64,
    rate_of: &dyn Fn((u64, u64)) -> Rate,
) -> Result<TraceData, TraceError> {
    if words.len() < HEAD_WORDS || words[at::MAGIC] != MAGIC {
        return Err(TraceError::Layout("this is no trace"));
    }
    if words[at::VERSION] != TRACE_VERSION {
        return Err(TraceError::Layout("the trace has an unknown layout"));
    }
    let capacity = words[at::CAPACITY];
    let held = (words.len() - HEAD_WORDS) / EVENT_WORDS;
    if !capacity.is_power_of_two() || capacity > held as u64 {
        return Err(TraceError::Layout("the trace is shorter than it says"));
    }
    let clock =
        Clock::of_number(words[at::CLOCK]).ok_or(TraceError::Layout("the trace has an unknown clock"))?;
    let written = words[at::WRITTEN];
    let torn = if written_after > written { TORN } else { 0 };
    let first = written_after.max(written).saturating_add(torn).saturating_sub(capacity).min(written);
    let event = |index: u64| {
        let at = HEAD_WORDS + (index & (capacity - 1)) as usize * EVENT_WORDS;
        Event::of_words(words[at], words[at + 1])
    };
    // Nonsense in the count of a foreign file must not make this long: there are no more than the ring holds.
    let begin = first.max(written.saturating_sub(capacity));
    Ok(TraceData {
        pid: words[at::PID] as u32,
        minor: words[at::MINOR] as u32,
        clock,
        rate: rate_of((words[at::TICKS], words[at::NANOSECONDS])),
        running: words[at::RUNNING] == 1,
        lost: begin,
        events: (begin..written).filter_map(event).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(ring: &TraceRing, numbers: std::ops::Range<u32>) {
        for aux in numbers {
            ring.push(Event { stamp: u64::from(aux) * 10, point: Point::Taken, client: 1, tag: 2, aux });
        }
    }

    fn auxes(data: &TraceData) -> Vec<u32> {
        data.events.iter().map(|event| event.aux).collect()
    }

    #[test]
    fn a_ring_keeps_the_last_events_and_counts_the_others() {
        let ring = TraceRing::private(256).expect("memory");
        push(&ring, 0..200);
        assert_eq!((auxes(&ring.data()), ring.data().lost), ((0..200).collect(), 0));
        push(&ring, 200..1000);
        let data = ring.data();
        assert_eq!((auxes(&data), data.lost, data.running), ((744..1000).collect(), 744, true));
        ring.stop();
        assert!(!ring.data().running && ring.written() == 1000);
    }

    #[test]
    fn another_process_reads_what_is_there_until_the_ring_goes() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = ShmRoot::new(dir.path());
        let pid = std::process::id();
        assert!(matches!(read_trace(&root, pid, 3), Err(TraceError::Io(_))));
        let ring = TraceRing::create(&root, 3, 512).expect("made");
        push(&ring, 0..700);
        let data = read_trace(&root, pid, 3).expect("readable");
        assert_eq!((data.pid, data.minor, data.lost), (pid, 3, 188));
        assert_eq!(auxes(&data), (188..700).collect::<Vec<_>>());
        assert!(data.rate.ns_per_tick > 0.01 && data.rate.ns_per_tick < 100.0);
        assert!(crate::disks(&root).expect("listed").is_empty(), "a ring is no disk");
        TraceRing::create(&root, 3, 512).expect_err("there is one already");
        drop(ring);
        assert!(matches!(read_trace(&root, pid, 3), Err(TraceError::Io(_))));
    }

    #[test]
    fn what_was_overwritten_during_the_copy_is_left_out() {
        let ring = TraceRing::private(256).expect("memory");
        push(&ring, 0..300);
        let words: Vec<u64> = ring.words.as_slice().iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let rate = |_: (u64, u64)| Rate { ns_per_tick: 1.0 };
        // Ten more came meanwhile, and an eleventh may be half there.
        let data = parse_words(&words, 310, &rate).expect("a ring");
        assert_eq!(auxes(&data), (55..300).collect::<Vec<_>>());
        let data = parse_words(&words, 100_000, &rate).expect("a ring");
        assert!(data.events.is_empty() && data.lost == 300);
    }

    #[test]
    fn sizes_are_powers_of_two_within_bounds() {
        for bad in [0, 255, 300, EVENTS_MAX * 2, u32::MAX] {
            assert!(TraceRing::private(bad).is_err(), "{bad}");
        }
        assert_eq!(TraceRing::len_of(EVENTS_DEFAULT), (4 << 20) + 4096);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(
            head in proptest::collection::vec(proptest::num::u64::ANY, 10),
            capacity in 0u32..12,
            noise in proptest::collection::vec(proptest::num::u64::ANY, 600),
            after in proptest::num::u64::ANY,
        ) {
            let mut words = noise;
            words.resize(HEAD_WORDS + 512, 7);
            words[..10].copy_from_slice(&head);
            (words[at::MAGIC], words[at::VERSION]) = (MAGIC, TRACE_VERSION);
            (words[at::CAPACITY], words[at::CLOCK]) = (1 << capacity, head[4] % 2);
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let rate = |_: Clock, _: (u64, u64)| Rate { ns_per_tick: 0.5 };
            match parse_trace(&bytes, after, &rate) {
                Ok(data) => {
                    proptest::prop_assert!(data.events.len() <= 1 << capacity);
                    super::super::requests(&data, None);
                }
                Err(_) => proptest::prop_assert!(capacity > 8),
            }
        }
    }
}
