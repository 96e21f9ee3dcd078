//! A load on the disks of a guest, from inside it: writes as fast as the disks take it, reads back and compares.
//!
//! ```text
//! in_guest STOP REPORT SPAN_MIB DEPTH DEVICE...
//! ```
//!
//! Each of `DEPTH` threads of a device writes blocks of 1 MiB past the page cache, one after the other, over its share
//! of the first `SPAN_MIB`, round after round with other bytes, and reads every eighth block back at once. When the
//! file `STOP` appears they sync, and read and compare everything. The file `REPORT` has a line for each device all the
//! while, `NAME MILLISECONDS WRITTEN_MIB COMPARED_MIB WRONG`, and a last line `done` at the end.
//!
//! `scripts/run` compiles this file alone, statically: a guest has no libraries. So it needs the standard library only.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK_LEN: usize = 1 << 20;

/// Alignment of memory that O_DIRECT takes on every device.
const ALIGN: usize = 4096;

/// One block in so many is read back as soon as it was written.
const COMPARED_EACH: u64 = 8;

/// Between two reports.
const REPORT_TIME: Duration = Duration::from_millis(100);

#[cfg(target_arch = "aarch64")]
const O_DIRECT: i32 = 0o200_000;
#[cfg(not(target_arch = "aarch64"))]
const O_DIRECT: i32 = 0o40_000;

/// What the threads of a device came to so far, in blocks.
#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    compared: AtomicU64,
    wrong: AtomicU64,
}

/// A block in memory, aligned.
struct Block(Vec<u8>, usize);

impl Block {
    fn new() -> Self {
        let memory = vec![0; BLOCK_LEN + ALIGN];
        let first = memory.as_ptr().align_offset(ALIGN);
        Self(memory, first)
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0[self.1..][..BLOCK_LEN]
    }

    /// Fills it with what block `number` of device `device` has in a round.
    fn fill(&mut self, device: u64, number: u64, round: u64) {
        let mut word = (device << 48 ^ number << 24 ^ round).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for eight in self.bytes().chunks_exact_mut(8) {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            eight.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// A thread's share of a device.
struct Share<'a> {
    file: &'a File,
    device: u64,
    numbers: Vec<u64>,
    counts: &'a Counts,
}

impl Share<'_> {
    /// Writes until it is told to stop, then compares everything that it wrote.
    fn run(&self, stop: &AtomicBool) -> io::Result<()> {
        let (mut ours, mut theirs) = (Block::new(), Block::new());
        let mut rounds = vec![0; self.numbers.len()];
        let mut turn = self.device;
        'writing: loop {
            for (number, round) in self.numbers.iter().zip(&mut rounds) {
                if stop.load(Ordering::Relaxed) {
                    break 'writing;
                }
                *round += 1;
                ours.fill(self.device, *number, *round);
                self.file.write_all_at(ours.bytes(), number * BLOCK_LEN as u64)?;
                self.counts.written.fetch_add(1, Ordering::Relaxed);
                turn += 1;
                if turn.is_multiple_of(COMPARED_EACH) {
                    self.compare(&mut ours, &mut theirs, *number)?;
                }
            }
        }
        self.file.sync_all()?;
        for (number, round) in self.numbers.iter().zip(&rounds).filter(|(_, round)| **round > 0) {
            ours.fill(self.device, *number, *round);
            self.compare(&mut ours, &mut theirs, *number)?;
        }
        Ok(())
    }

    fn compare(&self, ours: &mut Block, theirs: &mut Block, number: u64) -> io::Result<()> {
        self.file.read_exact_at(theirs.bytes(), number * BLOCK_LEN as u64)?;
        self.counts.compared.fetch_add(1, Ordering::Relaxed);
        self.counts.wrong.fetch_add(u64::from(ours.bytes() != theirs.bytes()), Ordering::Relaxed);
        Ok(())
    }
}

fn report(to: &Path, devices: &[String], counts: &[Counts], time: Duration, is_done: bool) -> io::Result<()> {
    let mut text = String::new();
    for (device, counts) in devices.iter().zip(counts) {
        let name = device.rsplit('/').next().unwrap_or(device);
        let [written, compared, wrong] =
            [&counts.written, &counts.compared, &counts.wrong].map(|count| count.load(Ordering::Relaxed));
        text += &format!("{name} {} {written} {compared} {wrong}\n", time.as_millis());
    }
    if is_done {
        text += "done\n";
    }
    let fresh = to.with_extension("new");
    std::fs::write(&fresh, text)?;
    std::fs::rename(&fresh, to)
}

fn run(arguments: &[String]) -> io::Result<()> {
    let wrong = || io::Error::other("usage: in_guest STOP REPORT SPAN_MIB DEPTH DEVICE...");
    let [stop, report_to, span, depth, devices @ ..] = arguments else { return Err(wrong()) };
    let (Ok(span), Ok(depth)) = (span.parse::<u64>(), depth.parse::<u64>()) else { return Err(wrong()) };
    let (stop, report_to) = (Path::new(stop), Path::new(report_to));
    let open = |device: &String| {
        let opened = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(device);
        opened.map_err(|error| io::Error::new(error.kind(), format!("{device}: {error}")))
    };
    let files = devices.iter().map(open).collect::<io::Result<Vec<_>>>()?;
    let counts: Vec<Counts> = devices.iter().map(|_| Counts::default()).collect();
    let begun = Instant::now();
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (device, (file, counts)) in (0..).zip(files.iter().zip(&counts)) {
            for first in 0..depth {
                let numbers = (first..span).step_by(depth as usize).collect();
                let (share, stopped) = (Share { file, device, numbers, counts }, &stopped);
                threads.push(scope.spawn(move || share.run(stopped)));
            }
        }
        while !threads.iter().all(|thread| thread.is_finished()) {
            report(report_to, devices, &counts, begun.elapsed(), false)?;
            std::thread::sleep(REPORT_TIME);
            // A thread that failed ends the others too.
            let is_over = stop.exists() || threads.iter().any(|thread| thread.is_finished());
            stopped.fetch_or(is_over, Ordering::Relaxed);
        }
        for thread in threads {
            thread.join().map_err(|_| io::Error::other("a thread panicked"))??;
        }
        report(report_to, devices, &counts, begun.elapsed(), true)
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}
