//! Loads on the rings of guests, timed and, where that is asked for, traced.

use std::io;
use std::time::{Duration, Instant};

use tapio_front::vhost_user::driver::{self, DriverQueue};
use tapio_stat::trace::{Event, Point, TraceRing};
use tapio_xen::blkfront::{Command, FrontQueue, Load, LoadReport};

use super::guest::Guest;

/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// What came of a load on one guest.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub report: LoadReport,
    /// CPU microseconds of the disk process, and of the threads of the front end.
    pub disk_cpu_us: f64,
    pub front_cpu_us: f64,
}

/// CPU time of this thread in microseconds.
fn thread_cpu_us() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is ours to be written; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// Runs the load on every ring of the guest at once, each in a thread of its own.
///
/// # Errors
/// A ring is broken, or does not answer.
pub fn run(guest: &mut Guest, load: &Load) -> Result<Outcome, String> {
    let before = guest.disk.process.cpu_us();
    let done: Vec<io::Result<(LoadReport, f64)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = guest
            .queues
            .iter_mut()
            .enumerate()
            .map(|(index, queue)| {
                let load = Load { seed: load.seed.wrapping_add(index as u64 * 0x9e37), ..*load };
                scope.spawn(move || {
                    let begin = thread_cpu_us();
                    load.run(queue).map(|report| (report, thread_cpu_us() - begin))
                })
            })
            .collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a load thread panicked"))));
        joined.collect()
    });
    let mut outcome = Outcome::default();
    for one in done {
        let (report, cpu) = one.map_err(|error| error.to_string())?;
        outcome.report.add(&report);
        outcome.front_cpu_us += cpu;
    }
    outcome.disk_cpu_us =
        guest.disk.process.cpu_us().zip(before).map_or(0.0, |(after, before)| after - before);
    Ok(outcome)
}

/// A ring of a front end of ours, of either kind: what a traced load needs of it.
pub trait TracedRing {
    /// Puts a request into the ring; what the back end calls it, in 32 bits, or `None` when there is no room.
    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>>;
    /// Wakes the back end if it wants that.
    fn kick(&mut self) -> io::Result<()>;
    /// Waits for an answer; false if none came in time.
    fn wait(&mut self, time: Duration) -> io::Result<bool>;
    /// Takes the answers that are there, by the same names.
    fn reap(&mut self, into: &mut Vec<u32>) -> io::Result<()>;
}

impl TracedRing for FrontQueue {
    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>> {
        let command = if write { Command::Write { at, len } } else { Command::Read { at, len } };
        Ok(Self::submit(self, &command)?.map(|id| id as u32))
    }

    fn kick(&mut self) -> io::Result<()> {
        Self::kick(self)
    }

    fn wait(&mut self, time: Duration) -> io::Result<bool> {
        Self::wait(self, time)
    }

    fn reap(&mut self, into: &mut Vec<u32>) -> io::Result<()> {
        let mut done = Vec::new();
        Self::reap(self, &mut done)?;
        into.extend(done.iter().map(|completion| completion.id as u32));
        Ok(())
    }
}

impl TracedRing for DriverQueue {
    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>> {
        let command =
            if write { driver::Command::Write { at, len } } else { driver::Command::Read { at, len } };
        let slot = Self::submit(self, &command);
        Ok(slot.map(|slot| self.head_of(slot).into()))
    }

    fn kick(&mut self) -> io::Result<()> {
        Self::kick(self).map(drop)
    }

    fn wait(&mut self, time: Duration) -> io::Result<bool> {
        Self::wait(self, time)
    }

    fn reap(&mut self, into: &mut Vec<u32>) -> io::Result<()> {
        let mut done = Vec::new();
        Self::reap(self, &mut done);
        into.extend(done.iter().map(|completion| u32::from(self.head_of(completion.slot))));
        Ok(())
    }
}

/// Runs requests of one size on one ring and notes when each was submitted and its answer seen, in `ring`; how many.
///
/// # Errors
/// The ring is broken, or does not answer.
pub fn traced(
    queue: &mut dyn TracedRing,
    ring: &TraceRing,
    (write, block_len, depth): (bool, u32, u32),
    span_len: u64,
    time: Duration,
) -> io::Result<u64> {
    let blocks = (span_len / u64::from(block_len)).max(1);
    let (mut state, mut under_way, mut count) = (9u64, 0, 0);
    let mut done = Vec::with_capacity(depth as usize);
    let begin = Instant::now();
    loop {
        let more = begin.elapsed() < time;
        if !more && under_way == 0 {
            return Ok(count);
        }
        while more && under_way < depth {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 24) % blocks * u64::from(block_len);
            let stamp = ring.now();
            let Some(id) = queue.submit(write, at, block_len)? else { break };
            ring.push(Event { stamp, point: Point::FrontSubmit, client: 0, tag: 0, aux: id });
            under_way += 1;
        }
        queue.kick()?;
        if !queue.wait(ANSWER_MAX)? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in five seconds"));
        }
        done.clear();
        queue.reap(&mut done)?;
        for id in &done {
            ring.note(Point::FrontSaw, 0, 0, *id);
            under_way -= 1;
            count += 1;
        }
    }
}
