//! Loads: what benchmarks and tests ask of a disk, whichever front end they reach it by, and what came of it.
//!
//! ```text
//!   Load ─ places() ─▶ where the next request goes
//!     └─ run(Ring) ─▶ submit, kick, wait, reap ... ─▶ LoadReport: count, errors, time, Latencies
//! ```

pub mod bare_file;
mod latencies;
mod random;

use std::io;
use std::time::{Duration, Instant};

pub use latencies::Latencies;
pub use random::Random;

use rustix::time::ClockId;
use tapio_stat::trace::{Event, Point, TraceRing};

/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// What to do, request by request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Reads at random places.
    RandomRead,
    /// Writes at random places.
    RandomWrite,
    /// Reads one after the other.
    SequentialRead,
    /// Writes one after the other.
    SequentialWrite,
}

impl Mix {
    /// Whether requests write.
    pub const fn writes(self) -> bool {
        matches!(self, Self::RandomWrite | Self::SequentialWrite)
    }

    /// Whether they go to random places.
    pub const fn is_random(self) -> bool {
        matches!(self, Self::RandomRead | Self::RandomWrite)
    }
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What to do.
    pub mix: Mix,
    /// Bytes of each request, a multiple of the sector.
    pub block_len: u32,
    /// Requests in flight, as far as there is room.
    pub depth: u32,
    /// Bytes of the disk to use, from its start.
    pub span_len: u64,
    /// For how long.
    pub time: Duration,
    /// For how many requests, at most; `u64::MAX` for as many as the time allows.
    pub requests_max: u64,
    /// Spin for answers rather than sleep, on a ring.
    pub spin: bool,
    /// Where the places begin.
    pub seed: u64,
}

/// Where requests go, one after the other.
#[derive(Clone, Debug)]
pub struct Places {
    /// None when they follow each other.
    random: Option<Random>,
    block_len: u64,
    blocks: u64,
    block: u64,
}

impl Places {
    /// The byte at which the next request begins.
    pub fn take(&mut self) -> u64 {
        let block = if let Some(random) = &mut self.random {
            random.below(self.blocks)
        } else {
            self.block = (self.block + 1) % self.blocks;
            self.block
        };
        block * self.block_len
    }
}

/// What came of a load.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// Requests answered.
    pub count: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// How long it took.
    pub time: Duration,
    /// Times the back end of a ring was notified.
    pub kicks: u64,
    /// Times it notified us, where that is counted.
    pub wakes: u64,
    /// CPU time of the threads that made the load: what the generator itself costs.
    pub cpu: Duration,
    /// How long the requests took.
    pub latencies: Latencies,
}

impl LoadReport {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Counts an answer to a request that was made at `issued`.
    pub fn note(&mut self, issued: Instant, now: Instant, done: bool) {
        self.latencies.note(now.saturating_duration_since(issued).as_nanos() as u64);
        self.errors += u64::from(!done);
        self.count += 1;
    }

    /// Adds what came of another load, which ran at the same time.
    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.errors += other.errors;
        self.time = self.time.max(other.time);
        self.kicks += other.kicks;
        self.wakes += other.wakes;
        self.cpu += other.cpu;
        self.latencies.add(&other.latencies);
    }
}

/// CPU time of the calling thread so far.
pub fn thread_cpu() -> Duration {
    cpu_of(ClockId::ThreadCPUTime)
}

fn cpu_of(clock: ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

/// A ring of a front end of ours, of whatever kind: what a load needs of it. Slots are numbered from 0.
pub trait Ring {
    /// Slots that are free.
    fn room(&self) -> usize;

    /// Puts a request into the ring; its slot, or `None` when there is no room.
    ///
    /// # Errors
    /// The ring has what it needs no more.
    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>>;

    /// Wakes the back end if it wants that.
    ///
    /// # Errors
    /// It cannot be woken.
    fn kick(&mut self) -> io::Result<()>;

    /// Whether there are answers: one load.
    fn has_answers(&self) -> bool;

    /// Waits for an answer; false if none came in time.
    ///
    /// # Errors
    /// The ring is broken.
    fn wait(&mut self, time: Duration) -> io::Result<bool>;

    /// Takes the answers that are there: slots, and whether the request was done.
    ///
    /// # Errors
    /// The ring is broken.
    fn reap(&mut self, into: &mut Vec<(u32, bool)>) -> io::Result<()>;

    /// Turns notifications by the back end on or off: off while a thread spins.
    fn want_wakes(&mut self, _wanted: bool) {}

    /// How often the back end was notified so far, and how often it notified us.
    fn notified(&self) -> (u64, u64);

    /// What the back end calls the request in a slot, in 32 bits.
    fn name_of(&self, slot: u32) -> u32 {
        slot
    }
}

/// Looks on while a load runs.
pub trait Watch {
    /// The time right before a request is submitted, in ticks of the watch.
    fn now(&self) -> u64;
    /// The request that the back end calls `name` was submitted, at `stamp`.
    fn submitted(&self, stamp: u64, name: u32);
    /// Its answer was seen.
    fn saw(&self, name: u32);
}

/// The watch that does nothing.
impl Watch for () {
    fn now(&self) -> u64 {
        0
    }

    fn submitted(&self, _stamp: u64, _name: u32) {}

    fn saw(&self, _name: u32) {}
}

/// The front end's own points of a trace.
impl Watch for TraceRing {
    fn now(&self) -> u64 {
        Self::now(self)
    }

    fn submitted(&self, stamp: u64, name: u32) {
        self.push(Event { stamp, point: Point::FrontSubmit, client: 0, tag: 0, aux: name });
    }

    fn saw(&self, name: u32) {
        self.note(Point::FrontSaw, 0, 0, name);
    }
}

impl Load {
    /// Where its requests go.
    pub fn places(&self) -> Places {
        let block_len = u64::from(self.block_len.max(1));
        let blocks = (self.span_len / block_len).max(1);
        let random = self.mix.is_random().then(|| Random::new(self.seed));
        Places { random, block_len, blocks, block: self.seed % blocks }
    }

    /// Runs the load. The ring's slots must be as large as a block; nothing else may be in flight.
    ///
    /// # Errors
    /// The ring is broken, or no answer comes for a minute.
    pub fn run(&self, ring: &mut (impl Ring + ?Sized)) -> io::Result<LoadReport> {
        self.run_watched(ring, &())
    }

    /// The same under a watch.
    ///
    /// # Errors
    /// As of [`Load::run`].
    pub fn run_watched(&self, ring: &mut (impl Ring + ?Sized), watch: &impl Watch) -> io::Result<LoadReport> {
        let mut report = LoadReport::default();
        let mut issued = vec![Instant::now(); ring.room()];
        let mut done = Vec::with_capacity(ring.room());
        let (mut places, mut started, mut under_way) = (self.places(), 0, 0);
        let (kicks, wakes) = ring.notified();
        ring.want_wakes(!self.spin);
        let cpu = thread_cpu();
        let begin = Instant::now();
        let mut now = begin;
        let mut place = None;
        loop {
            let more = now < begin + self.time && started < self.requests_max;
            if !more && under_way == 0 {
                break;
            }
            while more && under_way < self.depth && started < self.requests_max {
                let at = *place.get_or_insert_with(|| places.take());
                let stamp = watch.now();
                // What has no room now goes there later.
                let Some(slot) = ring.submit(self.mix.writes(), at, self.block_len)? else { break };
                watch.submitted(stamp, ring.name_of(slot));
                issued[slot as usize] = now;
                place = None;
                (under_way, started) = (under_way + 1, started + 1);
            }
            ring.kick()?;
            if !self.answered(ring)? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in a minute"));
            }
            done.clear();
            ring.reap(&mut done)?;
            now = Instant::now();
            for (slot, well) in &done {
                watch.saw(ring.name_of(*slot));
                report.note(issued[*slot as usize], now, *well);
                under_way -= 1;
            }
        }
        report.time = begin.elapsed();
        report.cpu = thread_cpu().saturating_sub(cpu);
        let after = ring.notified();
        (report.kicks, report.wakes) = (after.0 - kicks, after.1 - wakes);
        Ok(report)
    }

    /// Waits for an answer, spinning or asleep; false when none comes.
    fn answered(&self, ring: &mut (impl Ring + ?Sized)) -> io::Result<bool> {
        if !self.spin {
            return ring.wait(ANSWER_MAX);
        }
        let (begin, mut spins) = (Instant::now(), 0u32);
        while !ring.has_answers() {
            spins = spins.wrapping_add(1);
            std::hint::spin_loop();
            // Time is asked for rarely: it is what is measured.
            if spins.is_multiple_of(1 << 20) && begin.elapsed() > ANSWER_MAX {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const LOAD: Load = Load {
        mix: Mix::SequentialRead,
        block_len: 4096,
        depth: 3,
        span_len: 10 * 4096 + 512,
        time: Duration::from_secs(3600),
        requests_max: 25,
        spin: false,
        seed: 8,
    };

    #[test]
    fn places_are_whole_blocks_of_the_span() {
        let mut places = LOAD.places();
        let blocks: Vec<_> = (0..4).map(|_| places.take() / 4096).collect();
        assert_eq!(blocks, [9, 0, 1, 2], "one after the other, and round");
        let random = Load { mix: Mix::RandomWrite, ..LOAD };
        let mut places = random.places();
        let mut seen = [false; 10];
        for _ in 0..1000 {
            let at = places.take();
            assert!(at.is_multiple_of(4096) && at < 10 * 4096);
            seen[at as usize / 4096] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(Load { span_len: 0, ..LOAD }.places().take(), 0, "a span without a block");
    }

    /// Answers the oldest request; fails every tenth.
    #[derive(Default)]
    struct Double {
        flying: Vec<u32>,
        asked: Vec<u64>,
        answered: u64,
        dead: bool,
    }

    impl Ring for Double {
        fn room(&self) -> usize {
            2 - self.flying.len()
        }

        fn submit(&mut self, _: bool, at: u64, _: u32) -> io::Result<Option<u32>> {
            let Some(slot) = (0..2).find(|slot| !self.flying.contains(slot)) else { return Ok(None) };
            self.flying.push(slot);
            self.asked.push(at / 4096);
            Ok(Some(slot))
        }

        fn kick(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn has_answers(&self) -> bool {
            !self.flying.is_empty()
        }

        fn wait(&mut self, _: Duration) -> io::Result<bool> {
            Ok(!self.dead)
        }

        fn reap(&mut self, into: &mut Vec<(u32, bool)>) -> io::Result<()> {
            self.answered += 1;
            into.push((self.flying.remove(0), !self.answered.is_multiple_of(10)));
            Ok(())
        }

        fn notified(&self) -> (u64, u64) {
            (self.answered, 0)
        }

        fn name_of(&self, slot: u32) -> u32 {
            slot + 100
        }
    }

    #[derive(Default)]
    struct Names(RefCell<Vec<u32>>, RefCell<Vec<u32>>);

    impl Watch for Names {
        fn now(&self) -> u64 {
            self.0.borrow().len() as u64
        }

        fn submitted(&self, stamp: u64, name: u32) {
            assert_eq!(stamp, self.now());
            self.0.borrow_mut().push(name);
        }

        fn saw(&self, name: u32) {
            self.1.borrow_mut().push(name);
        }
    }

    #[test]
    fn a_load_asks_as_often_as_it_was_told_and_skips_no_place() {
        for spin in [false, true] {
            let (mut ring, names) = (Double::default(), Names::default());
            let report = Load { spin, ..LOAD }.run_watched(&mut ring, &names).expect("answered");
            assert_eq!((report.count, report.errors, report.kicks), (25, 2, 25));
            assert_eq!(ring.asked, (0..25).map(|number| (9 + number) % 10).collect::<Vec<_>>());
            let (asked, seen) = (names.0.into_inner(), names.1.into_inner());
            assert_eq!((asked.len(), &asked), (25, &seen), "answers in the order of requests");
            assert!(asked.iter().all(|name| [100, 101].contains(name)));
            assert_eq!(report.latencies.count(), report.count, "each request has its latency");
            assert!(report.cpu > Duration::ZERO, "the generator's own cost is known");
            let mut twice = report.clone();
            twice.add(&report);
            assert_eq!((twice.count, twice.errors, twice.time), (50, 4, report.time));
            assert_eq!((twice.latencies.count(), twice.cpu), (50, report.cpu * 2));
        }
        let mut dead = Double { dead: true, ..Double::default() };
        assert_eq!(LOAD.run(&mut dead).expect_err("no answer").kind(), io::ErrorKind::TimedOut);
    }
}
