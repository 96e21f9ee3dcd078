//! The I/O schedulers of a device, one after the other under the same loads. What was set before is put back.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::device::{Device, Sample, Shape};
use crate::facts;
use crate::pace::Pace;

/// Loads that schedulers are compared by.
const LOADS: [(bool, u64, u32); 3] = [(true, 4096, 1), (true, 4096, 32), (false, 1 << 20, 4)];

/// What one scheduler came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SchedulerResult {
    /// Its name.
    pub name: String,
    /// Of each load.
    pub samples: Vec<Sample>,
}

impl SchedulerResult {
    /// The mean of the factors by which it is faster than another; none if one has no samples.
    pub fn against(&self, other: &Self) -> Option<f64> {
        let factors: Vec<f64> = self
            .samples
            .iter()
            .zip(&other.samples)
            .filter(|(one, other)| one.bytes_per_s > 0.0 && other.bytes_per_s > 0.0)
            .map(|(one, other)| (one.bytes_per_s / other.bytes_per_s).ln())
            .collect();
        (!factors.is_empty()).then(|| (factors.iter().sum::<f64>() / factors.len() as f64).exp())
    }
}

/// The queue of a device as it was; put back when this is dropped.
#[derive(Debug)]
struct Kept {
    queue: PathBuf,
    scheduler: String,
    nr_requests: Option<String>,
}

impl Kept {
    fn set(&self, name: &str) -> io::Result<()> {
        fs::write(self.queue.join("scheduler"), name)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Err(error) = self.set(&self.scheduler) {
            let path = self.queue.join("scheduler");
            eprintln!("{} could not be set back to {}: {error}", path.display(), self.scheduler);
        }
        if let Some(requests) = &self.nr_requests {
            // The scheduler brought the same number already, or the kernel takes it.
            let _ = fs::write(self.queue.join("nr_requests"), requests);
        }
    }
}

/// Compares the schedulers of the device with these numbers. None if there is no choice, or it may not be made.
///
/// # Errors
/// The target cannot be used.
pub fn compare(
    device: &mut dyn Device,
    sys: &Path,
    numbers: (u32, u32),
    pace: &Pace<'_>,
) -> io::Result<Vec<SchedulerResult>> {
    let queue = facts::disk(&facts::directory(sys, numbers)).join("queue");
    let line = fs::read_to_string(queue.join("scheduler")).unwrap_or_default();
    let (Some(scheduler), all) = facts::schedulers(&line) else { return Ok(Vec::new()) };
    let nr_requests = fs::read_to_string(queue.join("nr_requests")).ok().map(|text| text.trim().to_owned());
    let is_allowed = fs::OpenOptions::new().write(true).open(queue.join("scheduler")).is_ok();
    if all.len() < 2 || !is_allowed || pace.is_over() {
        return Ok(Vec::new());
    }
    let kept = Kept { queue, scheduler, nr_requests };
    let mut found: Vec<SchedulerResult> = Vec::new();
    let mut left = all.len() * LOADS.len();
    for name in all {
        if pace.is_over() {
            break;
        }
        // A scheduler that is a module that cannot be loaded is none to choose from.
        if kept.set(&name).is_err() {
            left -= LOADS.len();
            continue;
        }
        let mut samples = Vec::new();
        for (random, block_len, depth) in LOADS {
            let time: Duration = pace.slice(left);
            left -= 1;
            if pace.is_over() || block_len > device.len() {
                break;
            }
            let block_len = block_len.max(device.sector_len());
            samples.push(device.load(Shape { random, write: false, block_len, depth }, time, u64::MAX)?);
        }
        found.push(SchedulerResult { name, samples });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::simulated::Simulated;

    #[test]
    fn a_queue_is_as_before_whatever_happens() {
        let sys = tempfile::tempdir().expect("a directory");
        let queue = sys.path().join("dev/block/8:0/queue");
        fs::create_dir_all(&queue).expect("made");
        let (stop, tell) = (AtomicBool::new(false), |_: crate::pace::Progress<'_>| {});
        for stopped in [false, true] {
            stop.store(stopped, std::sync::atomic::Ordering::Relaxed);
            fs::write(queue.join("scheduler"), "none [mq-deadline] bfq\n").expect("written");
            fs::write(queue.join("nr_requests"), "64\n").expect("written");
            let pace = Pace::new(&stop, Duration::from_secs(60), &tell);
            let mut device = Simulated::solid_state(1 << 30);
            let found = compare(&mut device, sys.path(), (8, 0), &pace).expect("measured");
            let text = |name: &str| fs::read_to_string(queue.join(name)).expect("read");
            if stopped {
                assert!(found.is_empty() && text("scheduler").contains("[mq-deadline]"));
                continue;
            }
            let names: Vec<_> = found.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, ["none", "mq-deadline", "bfq"]);
            assert_eq!((text("scheduler").as_str(), text("nr_requests").as_str()), ("mq-deadline", "64"));
            assert!(found[0].against(&found[1]).is_some_and(|factor| (factor - 1.0).abs() < 0.2));
        }
        let pace = Pace::new(&stop, Duration::from_secs(60), &tell);
        let mut device = Simulated::solid_state(1 << 30);
        assert!(compare(&mut device, sys.path(), (8, 1), &pace).expect("no such device").is_empty());
    }
}
