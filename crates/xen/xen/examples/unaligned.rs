//! Writes and reads a device, past the page cache, with memory that begins at each multiple of 512 bytes in a page:
//! what front ends then ask for are pieces of pages.
//!
//! `unaligned DEVICE AT` uses 64 KiB for each such beginning, from byte AT on. Prints `ok`, or ends with 1 and says
//! what went wrong.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;

const PAGE_LEN: usize = 4096;
const LEN: usize = 64 << 10;

/// The place in `memory`, which has two pages more than a piece, that lies `at` bytes behind the beginning of a page.
fn piece(memory: &mut [u8], at: usize) -> &mut [u8] {
    let first = memory.as_ptr().align_offset(PAGE_LEN) + at;
    &mut memory[first..first + LEN]
}

fn byte(round: usize, index: usize) -> u8 {
    (index ^ (index >> 8)).wrapping_mul(31).wrapping_add(round * 17 + 1) as u8
}

fn attempt() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(device), Some(start)) = (words.next(), words.next()) else {
        return Err("usage: unaligned DEVICE AT".into());
    };
    let start: u64 = start.parse()?;
    let device = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(device)?;
    let mut memory = vec![0; LEN + 2 * PAGE_LEN];
    let beginnings = PAGE_LEN / 512;
    let place = |round: usize| start + (round * LEN) as u64;
    for round in 0..beginnings {
        let data = piece(&mut memory, round * 512);
        data.iter_mut().enumerate().for_each(|(index, slot)| *slot = byte(round, index));
        device
            .write_all_at(data, place(round))
            .map_err(|error| format!("a write from {} bytes into a page: {error}", round * 512))?;
    }
    // For a test that reads the image afterwards.
    device.sync_all()?;
    for round in 0..beginnings {
        // Into memory that begins elsewhere.
        let at = (round + 3) % beginnings * 512;
        let data = piece(&mut memory, at);
        data.fill(0);
        device
            .read_exact_at(data, place(round))
            .map_err(|error| format!("a read to {at} bytes into a page: {error}"))?;
        if let Some(wrong) = (0..LEN).find(|index| data[*index] != byte(round, *index)) {
            return Err(format!("round {round}, byte {wrong}: another one was written").into());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match attempt() {
        Ok(()) => {
            println!("ok");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
