//! Loads on the rings of guests, and the processor time that both sides took.

use std::io;

use rustix::time::{ClockId, clock_gettime};
use tapio_load::{Load, LoadReport};

use super::guest::Guest;

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
    let time = clock_gettime(ClockId::ThreadCPUTime);
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
