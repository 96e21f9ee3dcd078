//! The load on a bare file: what io_uring gives without any server.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use crate::{Load, LoadReport, Mix, Ring};
use io_uring::{IoUring, opcode, types};
use rustix::time::ClockId;

/// Alignment that O_DIRECT is content with everywhere.
const ALIGN: usize = 4096;

/// A file as a ring with one slot for each request of the depth. The kernel's ring is dropped before the memory that
/// its operations use.
struct Bare {
    file: File,
    ring: IoUring,
    memory: Vec<u8>,
    block_len: usize,
    free: Vec<u32>,
}

/// What a load on a bare file came to.
#[derive(Debug)]
pub struct BareReport {
    /// As of any load.
    pub load: LoadReport,
    /// CPU time of this process, in microseconds for each request.
    pub cpu_us: f64,
}

/// Random requests of `block_len` bytes on a whole file, `depth` at a time, past the page cache where there is one.
/// Reads only, unless `write`.
///
/// # Errors
/// The file cannot be opened so, or is shorter than a request.
pub fn random(
    path: &Path,
    block_len: u64,
    depth: u32,
    write: bool,
    time: Duration,
) -> io::Result<BareReport> {
    let block_len = u32::try_from(block_len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let len = std::fs::metadata(path)?.len();
    if len < block_len.into() {
        return Err(io::Error::other(format!("it is shorter than {block_len} bytes")));
    }
    let mix = if write { Mix::RandomWrite } else { Mix::RandomRead };
    let load =
        Load { mix, block_len, depth, span_len: len, time, requests_max: u64::MAX, spin: false, seed: 11 };
    // A file system in memory has no page cache to go past.
    match run(path, &load, true) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => run(path, &load, false),
        result => result,
    }
}

/// Runs the load on the file at `path`; `direct`: past the page cache.
///
/// # Errors
/// The file cannot be opened so, or a request fails.
pub fn run(path: &Path, load: &Load, direct: bool) -> io::Result<BareReport> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new().read(true).write(load.mix.writes()).custom_flags(flags).open(path)?;
    run_on(file, load)
}

/// Runs the load on an open file.
///
/// # Errors
/// A request fails to be made.
pub fn run_on(file: File, load: &Load) -> io::Result<BareReport> {
    let mut bare = Bare::new(file, load.block_len as usize, load.depth)?;
    let before = own_cpu();
    let report = load.run(&mut bare)?;
    let cpu_us = (own_cpu() - before).as_secs_f64() * 1e6 / report.count.max(1) as f64;
    Ok(BareReport { load: report, cpu_us })
}

/// Reads `len` bytes in two places at once; nanoseconds until both were read.
///
/// # Errors
/// A read failed, or ended early.
pub fn read_pair(file: &File, at: [u64; 2], len: usize) -> io::Result<u64> {
    let block_len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bare = Bare::new(file.try_clone()?, len, 2)?;
    let begin = std::time::Instant::now();
    for place in at {
        bare.submit(false, place, block_len)?;
    }
    let mut done = Vec::new();
    while done.len() < at.len() {
        bare.wait(Duration::ZERO)?;
        bare.reap(&mut done)?;
    }
    let ns = begin.elapsed().as_nanos() as u64;
    if done.iter().all(|(_, well)| *well) { Ok(ns) } else { Err(io::Error::other("a read failed")) }
}

impl Bare {
    fn new(file: File, block_len: usize, depth: u32) -> io::Result<Self> {
        let entries = depth.next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_defer_taskrun()
            .build(entries)?;
        let memory = vec![0xa5; depth as usize * block_len + ALIGN];
        Ok(Self { file, ring, memory, block_len, free: (0..depth).rev().collect() })
    }
}

impl Ring for Bare {
    fn room(&self) -> usize {
        self.free.len()
    }

    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>> {
        let Some(slot) = self.free.pop() else { return Ok(None) };
        let first = self.memory.as_ptr().align_offset(ALIGN);
        let memory = &mut self.memory[first + slot as usize * self.block_len..][..len as usize];
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = if write {
            opcode::Write::new(fd, memory.as_ptr(), len).offset(at).build()
        } else {
            opcode::Read::new(fd, memory.as_mut_ptr(), len).offset(at).build()
        };
        // SAFETY: the slot's piece of memory is used by one operation at a time: it is free again when that has
        // completed. What an error leaves in flight ends with the kernel's ring, which is dropped before the memory.
        unsafe { self.ring.submission().push(&entry.user_data(slot.into())) }
            .map_err(|_| io::Error::other("the ring is full"))?;
        Ok(Some(slot))
    }

    /// Together with the wait that follows: one system call.
    fn kick(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn has_answers(&self) -> bool {
        // SAFETY: nothing else looks at the queue while this does.
        !unsafe { self.ring.completion_shared() }.is_empty()
    }

    /// However long it takes: a file always answers.
    fn wait(&mut self, _time: Duration) -> io::Result<bool> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(true),
        }
    }

    fn reap(&mut self, into: &mut Vec<(u32, bool)>) -> io::Result<()> {
        for entry in self.ring.completion() {
            let slot = entry.user_data() as u32;
            self.free.push(slot);
            into.push((slot, entry.result() == self.block_len as i32));
        }
        Ok(())
    }

    fn notified(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// CPU time of this process: what the kernel's threads do for its ring is counted too.
fn own_cpu() -> Duration {
    crate::cpu_of(ClockId::ProcessCPUTime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_requests_is_kept_and_counted() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("file");
        File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
        for mix in [Mix::RandomRead, Mix::RandomWrite, Mix::SequentialRead, Mix::SequentialWrite] {
            for (block_len, depth) in [(4096, 1), (4096, 32), (1 << 20, 8)] {
                let time = Duration::from_secs(60);
                let (span_len, requests_max) = (8 << 20, 100);
                let load = Load { mix, block_len, depth, span_len, time, requests_max, spin: false, seed: 3 };
                let report = run(&path, &load, false).expect("it runs").load;
                assert_eq!((report.count, report.errors), (100, 0), "{mix:?} {block_len} {depth}");
                assert!(report.rate() > 0.0 && report.latencies.quantile_ns(0.5) > 0);
            }
        }
    }

    #[test]
    fn a_file_shorter_than_a_request_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let error = random(file.path(), 4096, 1, false, Duration::from_millis(1)).unwrap_err();
        assert!(error.to_string().contains("shorter than 4096 bytes"), "{error}");
    }
}
