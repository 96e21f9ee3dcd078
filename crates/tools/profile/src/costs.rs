//! What a flush, a discard and writing zeroes cost, and whether discards give anything back.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::fs::{FallocateFlags, fallocate};
use serde::Serialize;

use crate::pace::Pace;
use crate::scan::median;

/// Times that each is done, at most.
const TRIES: usize = 20;
/// Bytes that are discarded or zeroed at a time.
const CLEAR_LEN: u64 = 1 << 20;
const PAGE: usize = 4096;

/// `BLKDISCARD` of `linux/fs.h`: `_IO(0x12, 119)`.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// Costs, in microseconds: medians. None was not measured, or is not supported.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Costs {
    /// A flush with nothing written before it.
    pub flush_us: Option<f64>,
    /// A write of 4 KiB.
    pub write_us: Option<f64>,
    /// A write of 4 KiB with a flush behind it.
    pub write_flush_us: Option<f64>,
    /// A discard of 1 MiB.
    pub discard_us: Option<f64>,
    /// What was discarded reads as zeroes.
    pub discard_zeroes: Option<bool>,
    /// Zeroing 1 MiB.
    pub zeroes_us: Option<f64>,
}

/// Memory of a length, aligned for O_DIRECT.
struct Aligned(Vec<u8>, usize, usize);

impl Aligned {
    fn new(len: usize, byte: u8) -> Self {
        let memory = vec![byte; len + PAGE];
        let first = memory.as_ptr().align_offset(PAGE);
        Self(memory, first, len)
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0[self.1..self.1 + self.2]
    }
}

/// The median of some tries. An error ends it: what cannot be done has no cost.
fn cost(pace: &Pace<'_>, mut work: impl FnMut(u64) -> io::Result<()>) -> Option<f64> {
    let mut times = Vec::new();
    for turn in 0..TRIES {
        if turn > 0 && pace.is_over() || pace.is_stopped() {
            break;
        }
        pace.slice(1);
        let begin = Instant::now();
        work(turn as u64).ok()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    (!times.is_empty()).then(|| median(&times))
}

/// A discard: of a device, or of a part of a file.
///
/// # Errors
/// It is not supported, or fails.
pub(crate) fn discard(file: &File, is_device: bool, at: u64, len: u64) -> io::Result<()> {
    if !is_device {
        return Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?);
    }
    let range = [at, len];
    // SAFETY: the call reads two numbers from `range`, which lives as long.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Measures costs. With `write`, the beginning of the target is overwritten.
pub fn costs(file: &File, len: u64, is_device: bool, write: bool, pace: &Pace<'_>) -> Costs {
    let mut costs = Costs::default();
    if pace.is_over() {
        return costs;
    }
    costs.flush_us = cost(pace, |_| file.sync_data());
    if !write {
        return costs;
    }
    let mut page = Aligned::new(PAGE, 0x5a);
    let pages = (len / PAGE as u64).max(1);
    let place = |turn: u64| turn * 31 % pages * PAGE as u64;
    if len >= PAGE as u64 {
        costs.write_us = cost(pace, |turn| file.write_all_at(page.bytes(), place(turn)));
        costs.write_flush_us =
            cost(pace, |turn| file.write_all_at(page.bytes(), place(turn)).and_then(|()| file.sync_data()));
    }
    let parts = len / CLEAR_LEN;
    if parts == 0 {
        return costs;
    }
    let at = |turn: u64| turn % parts * CLEAR_LEN;
    let mut full = Aligned::new(CLEAR_LEN as usize, 0x5a);
    let mut fill = |turn: u64| file.write_all_at(full.bytes(), at(turn));
    // What was never written costs nothing to discard.
    let _ = (0..parts.min(TRIES as u64)).try_for_each(&mut fill);
    costs.discard_us = cost(pace, |turn| discard(file, is_device, at(turn), CLEAR_LEN));
    if costs.discard_us.is_some() {
        let mut back = Aligned::new(CLEAR_LEN as usize, 1);
        let read = file.read_exact_at(back.bytes(), 0);
        costs.discard_zeroes = read.ok().map(|()| back.bytes().iter().all(|byte| *byte == 0));
    }
    let _ = (0..parts.min(TRIES as u64)).try_for_each(&mut fill);
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    costs.zeroes_us = cost(pace, |turn| Ok(fallocate(file, zero, at(turn), CLEAR_LEN)?));
    costs
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    #[test]
    fn nothing_is_written_unless_it_may_be() {
        let (stop, tell) = (AtomicBool::new(false), |_: crate::pace::Progress<'_>| {});
        let pace = Pace::new(&stop, Duration::from_secs(60), &tell);
        let path = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(path.path(), vec![7; 8 << 20]).expect("written");
        let file = File::options().read(true).write(true).open(path.path()).expect("open");
        let read = costs(&file, 8 << 20, false, false, &pace);
        assert!(read.flush_us.is_some() && read.write_us.is_none() && read.discard_us.is_none());
        assert!(std::fs::read(path.path()).expect("read").iter().all(|byte| *byte == 7));
        let written = costs(&file, 8 << 20, false, true, &pace);
        assert!(written.write_flush_us.is_some(), "{written:?}");
        if written.discard_us.is_some() {
            assert_eq!(written.discard_zeroes, Some(true), "a hole in a file");
        }
    }
}
