//! The load on a bare file: what io_uring gives without any server.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::measure::{Job, Sample};

/// Alignment that O_DIRECT is content with everywhere.
const ALIGN: usize = 4096;

struct Bare<'a> {
    job: &'a Job,
    file: File,
    ring: IoUring,
    memory: Vec<u8>,
    state: u64,
    position: u64,
    issued: Vec<Instant>,
    latencies_ns: Vec<u32>,
    errors: u64,
}

/// Runs the job on the file at `path`; `direct`: past the page cache.
pub fn run(path: &Path, job: &Job, direct: bool) -> io::Result<Sample> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new().read(true).write(job.workload.write).custom_flags(flags).open(path)?;
    let (depth, block_len) = (job.workload.depth, job.workload.block_len as usize);
    let entries = u32::try_from(depth).unwrap_or(1).next_power_of_two();
    let ring =
        IoUring::builder().setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun().build(entries)?;
    let begin = Instant::now();
    let mut bare = Bare {
        job,
        file,
        ring,
        memory: vec![0xa5; depth * block_len + ALIGN],
        state: job.seed | 1,
        position: 0,
        issued: vec![begin; depth],
        latencies_ns: Vec::with_capacity(1 << 20),
        errors: 0,
    };
    let cpu = own_cpu();
    bare.pump(begin)?;
    let seconds = begin.elapsed().as_secs_f64();
    let cpu = (own_cpu() - cpu).as_secs_f64() * 1e6;
    bare.latencies_ns.sort_unstable();
    let count = bare.latencies_ns.len();
    let quantile = |percent: usize| bare.latencies_ns.get(count * percent / 100).copied().unwrap_or(0);
    let rate = count as f64 / seconds.max(1e-9);
    Ok(Sample {
        iops: rate,
        bytes_per_second: rate * block_len as f64,
        p50_us: f64::from(quantile(50)) / 1e3,
        p99_us: f64::from(quantile(99)) / 1e3,
        cpu_us: Some(cpu / count.max(1) as f64),
        calls: None,
        errors: bare.errors,
    })
}

impl Bare<'_> {
    fn submit(&mut self, slot: usize, now: Instant) -> io::Result<()> {
        let workload = &self.job.workload;
        let len = workload.block_len;
        let blocks = (self.job.len / u64::from(len)).max(1);
        self.position += 1;
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let block = if workload.random { (self.state >> 24) % blocks } else { self.position % blocks };
        let offset = block * u64::from(len);
        let first = self.memory.as_ptr().align_offset(ALIGN);
        let memory = &mut self.memory[first + slot * len as usize..][..len as usize];
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = if workload.write {
            opcode::Write::new(fd, memory.as_ptr(), len).offset(offset).build()
        } else {
            opcode::Read::new(fd, memory.as_mut_ptr(), len).offset(offset).build()
        };
        self.issued[slot] = now;
        // SAFETY: the slot's piece of memory is used by one operation at a time, and `pump` returns only when all have
        // completed, or, on an error of the ring itself, after the ring was dropped with `self`, before the memory.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }
            .map_err(|_| io::Error::other("the ring is full"))
    }

    fn pump(&mut self, begin: Instant) -> io::Result<()> {
        let mut issued = 0;
        for slot in 0..self.job.workload.depth {
            self.submit(slot, begin)?;
            issued += 1;
        }
        let mut running = issued;
        let mut done = Vec::with_capacity(self.job.workload.depth);
        while running > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            done.extend(self.ring.completion().map(|entry| (entry.user_data() as usize, entry.result())));
            let now = Instant::now();
            let going_on = now - begin < self.job.time;
            for (slot, result) in done.drain(..) {
                running -= 1;
                self.errors += u64::from(result != self.job.workload.block_len as i32);
                let took = (now - self.issued[slot]).as_nanos();
                self.latencies_ns.push(u32::try_from(took).unwrap_or(u32::MAX));
                if going_on && issued < self.job.requests_max {
                    self.submit(slot, now)?;
                    issued += 1;
                    running += 1;
                }
            }
        }
        Ok(())
    }
}

/// CPU time of this process.
fn own_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is ours to be written; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload::WORKLOADS;

    #[test]
    fn a_number_of_requests_is_kept_and_counted() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("file");
        File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
        for workload in WORKLOADS {
            let job =
                Job { workload, len: 8 << 20, time: Duration::from_secs(5), requests_max: 100, seed: 3 };
            let sample = run(&path, &job, false).expect("it runs");
            assert_eq!(sample.errors, 0, "{}", workload.name);
            assert!(sample.iops > 0.0 && sample.p99_us >= sample.p50_us && sample.p50_us > 0.0);
        }
    }
}
