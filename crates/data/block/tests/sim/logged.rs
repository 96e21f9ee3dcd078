//! The log of changed blocks with the power cut, and the process killed, at every change that a session makes.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tapio_block::{Op, TapOptions};
use tapio_format::FormatError;
use tapio_format::cbt::{BLOCK_LEN, Log, LogHeader, bitmap_len, log_len};
use tapio_ring::PageBuf;
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::model::fill;
use crate::rig::{Content, DISK_LEN, Process, Rig, RigKind};

const LOG: &str = "log";
/// A block that the log has from an earlier session.
const EARLIER: u64 = 3;
/// What a session writes, one after the other: blocks of the log.
const WRITTEN: [u64; 4] = [1, 9, 17, 100];
/// Different draws of what survives a cut.
const DRAWS: u64 = 4;

/// A session whose log was trusted before: whenever it ends, the log is not trusted, or has every block that changed.
pub fn at_every_change(kind: RigKind) -> Result<(), String> {
    let (rig, process) = prepared(kind, 1);
    let before = rig.host.changed();
    let (answered, is_closed) = session(&rig, &process);
    if !is_closed || answered != WRITTEN.len() {
        return Err(format!("a session that nothing disturbs: {answered} writes, closed: {is_closed}"));
    }
    check(&rig, answered, true)?;
    let changes = rig.host.changed() - before;
    let mut trusted = 0;
    for cut in 1..=changes {
        for draw in 0..DRAWS {
            for kill in [false, true] {
                let (mut rig, process) = prepared(kind, 1 + draw);
                rig.host.cut_after(Some(cut));
                let (answered, is_closed) = session(&rig, &process);
                if kill {
                    rig.host.process_killed();
                } else {
                    rig.host.power_cut();
                    rig.memory = Arc::default();
                }
                rig.host.cut_after(None);
                let told = |why| format!("cut at {cut} of {changes}, draw {draw}, kill: {kill}: {why}");
                trusted += u64::from(check(&rig, answered, is_closed).map_err(told)?);
            }
        }
    }
    // Before the first change the log is as it was, at the end it is complete: both were seen.
    if trusted == 0 { Err("no log was trusted".to_owned()) } else { Ok(()) }
}

fn prepared(kind: RigKind, seed: u64) -> (Rig, Process) {
    let mut rig = Rig::new(kind, seed);
    while rig.grow(kind) {}
    let header = LogHeader { size: DISK_LEN, consistent: 1, ..LogHeader::default() };
    let mut bytes = header.encode().to_vec();
    let first = bytes.len();
    bytes.resize(log_len(DISK_LEN) as usize, 0);
    bytes[first + (EARLIER / 8) as usize] |= 1 << (EARLIER % 8);
    rig.host.put(Path::new(LOG), &bytes);
    let process = rig.process();
    (rig, process)
}

/// Opens the disk, writes and closes it; how many writes were answered, and whether it was closed.
fn session(rig: &Rig, process: &Process) -> (usize, bool) {
    let answered = Rc::new(Cell::new(0));
    let (running, spec, told) = (process.clone(), rig.spec(Access::ReadWrite), Rc::clone(&answered));
    let done = process.run(async move {
        let taps = TapOptions { log: Some(LOG.into()), ..TapOptions::default() };
        running.core.resume_with(&spec, &taps).await.map_err(|error| error.to_string())?;
        for block in WRITTEN {
            let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
            fill(1 + block, &mut page);
            let span = Span::new(block * BLOCK_LEN, SECTOR_LEN);
            running.ask(Op::Write { durable: true }, span, &page).await.map_err(|error| error.to_string())?;
            told.set(told.get() + 1);
        }
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    (answered.get(), matches!(done, Some(Ok(()))))
}

/// Whether the log is trusted; then nothing was written, or the log has all of it.
fn check(rig: &Rig, answered: usize, is_closed: bool) -> Result<bool, String> {
    let log = Log::open_on(Content(rig.host.content(Path::new(LOG)), false));
    let log = log.map_err(|error| format!("the log is none any more: {error}"))?;
    let mut bits = Vec::new();
    let read = log.read_bitmap(|piece| {
        bits.extend_from_slice(piece);
        Ok::<_, FormatError>(())
    });
    read.map_err(|error| error.to_string())?;
    if bits.len() as u64 != bitmap_len(DISK_LEN) {
        return Err(format!("the log has {} bytes", bits.len()));
    }
    let has = |block: u64| bits[(block / 8) as usize] >> (block % 8) & 1 == 1;
    if log.header().consistent == 0 {
        return if is_closed { Err("a log that was closed is not trusted".to_owned()) } else { Ok(false) };
    }
    // A log is trusted before the first write is begun, and after the last one was noted.
    let missing: Vec<u64> = WRITTEN.into_iter().filter(|block| !has(*block)).collect();
    let is_untouched = answered == 0 && missing.len() == WRITTEN.len();
    if !(missing.is_empty() || is_untouched) || !has(EARLIER) {
        return Err(format!("{answered} writes were answered, the log is trusted and lacks {missing:?}"));
    }
    Ok(true)
}
