//! The log of changed blocks with the power cut, and the process killed, at every change that a session makes; the same
//! while the leaf and the log are swapped for new ones.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tapio_block::{Op, TapOptions};
use tapio_format::cbt::{BLOCK_LEN, Log, LogHeader, bitmap_len, log_len};
use tapio_format::vhd::offline::{Image, OpenOptions};
use tapio_format::{FormatError, Medium};
use tapio_ring::{Io, PageBuf};
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

/// The log that a disk goes on with.
const NEXT: &str = "next";
/// What is written before the leaf is swapped, and after it.
const OLD: [u64; 2] = [1, 9];
const NEW: [u64; 2] = [17, 100];

/// How far a session came that swaps its leaf and its log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Came {
    old: usize,
    is_swapped: bool,
    new: usize,
    is_closed: bool,
}

/// Whenever a session that swaps its leaf and its log ends, each log is not trusted, or has every block that went to
/// its own leaf.
pub fn swapped_at_every_change(kind: RigKind) -> Result<(), String> {
    let (rig, process) = prepared(kind, 1);
    put_next(&rig);
    let before = rig.host.changed();
    let (rig, came) = swapping_session(rig, &process);
    if came != (Came { old: OLD.len(), is_swapped: true, new: NEW.len(), is_closed: true }) {
        return Err(format!("a session that nothing disturbs: {came:?}"));
    }
    let changes = rig.host.changed() - before;
    if check_both(&rig, came)? != (true, true) {
        return Err("a log that was closed is not trusted".to_owned());
    }
    let mut trusted = (0, 0);
    for cut in 1..=changes {
        for draw in 0..DRAWS {
            for kill in [false, true] {
                let (rig, process) = prepared(kind, 1 + draw);
                put_next(&rig);
                rig.host.cut_after(Some(cut));
                let (rig, came) = swapping_session(rig, &process);
                if kill {
                    rig.host.process_killed();
                } else {
                    rig.host.power_cut();
                }
                rig.host.cut_after(None);
                let told =
                    |why| format!("cut at {cut} of {changes}, draw {draw}, kill: {kill}, {came:?}: {why}");
                let found = check_both(&rig, came).map_err(told)?;
                trusted.0 += u64::from(found.0 && came.old > 0);
                trusted.1 += u64::from(found.1);
            }
        }
    }
    // The old log is complete as soon as the swap is over, whatever becomes of the rest.
    if trusted.0 == 0 || trusted.1 == 0 {
        Err(format!("logs that were trusted: {trusted:?}"))
    } else {
        Ok(())
    }
}

/// Guests that write without a pause while leaf and log are swapped: each block is in the log of the leaf that has it.
pub fn swapped_under_load(seed: u64) -> Result<(), String> {
    const CLIENTS: u64 = 6;
    let (rig, process) = prepared(RigKind::Dynamic, seed);
    put_next(&rig);
    let rig = Rc::new(RefCell::new(rig));
    let (running, shared) = (process.clone(), Rc::clone(&rig));
    let done = process.run(async move {
        let text = |error: FormatError| error.to_string();
        let spec = shared.borrow().spec(Access::ReadWrite);
        let taps = TapOptions { log: Some(LOG.into()), ..TapOptions::default() };
        running.core.resume_with(&spec, &taps).await.map_err(text)?;
        let (stop, left) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(CLIENTS)));
        for client in 0..CLIENTS {
            let (running, stop, left) = (running.clone(), Rc::clone(&stop), Rc::clone(&left));
            running.clone().sim.tasks().spawn(async move {
                let blocks = DISK_LEN / BLOCK_LEN;
                let mut block = client;
                while !stop.get() {
                    let written = write_block(&running, block).await;
                    assert!(written.is_ok(), "{written:?}");
                    block = (block + CLIENTS) % blocks;
                }
                left.set(left.get() - 1);
            });
        }
        let tasks = running.sim.tasks().clone();
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        shared.borrow_mut().put_child_in_place();
        let images = shared.borrow().spec(Access::ReadWrite).layers;
        running.core.swap_leaf(&images, Some(Path::new(NEXT)), u64::MAX).await.map_err(text)?;
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        stop.set(true);
        while left.get() > 0 {
            tasks.sleep_until(tasks.turn_ns() + 10_000).await;
        }
        running.core.close().await.map_err(text)
    });
    process.sim.end();
    done.ok_or("the power went")??;
    let rig = rig.borrow();
    let mut counts = [0, 0];
    for (index, log) in [(1, LOG), (0, NEXT)] {
        let (is_trusted, bits) = bits_of(&rig, log)?;
        let (_, path, _) = &rig.images[index];
        let content = Content(rig.host.content(path), false);
        let image = Image::open_on(content, path, OpenOptions::READ).map_err(|error| error.to_string())?;
        for block in 0..DISK_LEN / BLOCK_LEN {
            let at = block * BLOCK_LEN;
            let number = u32::try_from(at / u64::from(image.block_len())).unwrap_or(u32::MAX);
            let bitmap = image.bitmap(number).map_err(|error| error.to_string())?;
            let sector = (at % u64::from(image.block_len()) / SECTOR_LEN) as usize;
            // Sectors that were never written may count as held, and are zero.
            let mut data = [0; 8];
            if let Some(offset) = image.data_offset(number) {
                let place = offset + sector as u64 * SECTOR_LEN;
                image.medium().read_at(place, &mut data).map_err(|error| error.to_string())?;
            }
            let is_held = data != [0; 8]
                && bitmap.is_some_and(|bitmap| bitmap[sector / 8] >> (7 - sector % 8) & 1 == 1);
            let is_noted = bits[(block / 8) as usize] >> (block % 8) & 1 == 1;
            if is_held && !is_noted {
                return Err(format!("{} has block {block}, and {log} does not", path.display()));
            }
            counts[index] += u64::from(is_held);
        }
        if !is_trusted {
            return Err(format!("{log} was closed and is not trusted"));
        }
    }
    if counts.contains(&0) { Err(format!("blocks of both leaves: {counts:?}")) } else { Ok(()) }
}

fn put_next(rig: &Rig) {
    let header = LogHeader { size: DISK_LEN, consistent: 1, ..LogHeader::default() };
    let mut bytes = header.encode().to_vec();
    bytes.resize(log_len(DISK_LEN) as usize, 0);
    rig.host.put(Path::new(NEXT), &bytes);
}

async fn write_block(process: &Process, block: u64) -> Result<(), String> {
    let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
    fill(1 + block, &mut page);
    let span = Span::new(block * BLOCK_LEN, SECTOR_LEN);
    process.ask(Op::Write { durable: true }, span, &page).await.map_err(|error| error.to_string())
}

fn swapping_session(rig: Rig, process: &Process) -> (Rig, Came) {
    let came = Rc::new(Cell::new(Came::default()));
    let rig = Rc::new(RefCell::new(rig));
    let (running, shared, told) = (process.clone(), Rc::clone(&rig), Rc::clone(&came));
    process.run(async move {
        let text = |error: FormatError| error.to_string();
        let spec = shared.borrow().spec(Access::ReadWrite);
        let taps = TapOptions { log: Some(LOG.into()), ..TapOptions::default() };
        running.core.resume_with(&spec, &taps).await.map_err(text)?;
        for block in OLD {
            write_block(&running, block).await?;
            told.set(Came { old: told.get().old + 1, ..told.get() });
        }
        shared.borrow_mut().put_child_in_place();
        let images = shared.borrow().spec(Access::ReadWrite).layers;
        running.core.swap_leaf(&images, Some(Path::new(NEXT)), u64::MAX).await.map_err(text)?;
        told.set(Came { is_swapped: true, ..told.get() });
        for block in NEW {
            write_block(&running, block).await?;
            told.set(Came { new: told.get().new + 1, ..told.get() });
        }
        running.core.close().await.map_err(text)?;
        told.set(Came { is_closed: true, ..told.get() });
        Ok::<_, String>(())
    });
    process.sim.end();
    let rig = rig.borrow().clone();
    (rig, came.get())
}

/// Whether a log is trusted, and its bits.
fn bits_of(rig: &Rig, name: &str) -> Result<(bool, Vec<u8>), String> {
    let log = Log::open_on(Content(rig.host.content(Path::new(name)), false));
    let log = log.map_err(|error| format!("{name} is no log any more: {error}"))?;
    let mut bits = Vec::new();
    let read = log.read_bitmap(|piece| {
        bits.extend_from_slice(piece);
        Ok::<_, FormatError>(())
    });
    read.map_err(|error| error.to_string())?;
    Ok((log.header().consistent == 1, bits))
}

/// Whether each of the logs is trusted.
fn check_both(rig: &Rig, came: Came) -> Result<(bool, bool), String> {
    let (old_trusted, old) = bits_of(rig, LOG)?;
    let (new_trusted, new) = bits_of(rig, NEXT)?;
    let has = |bits: &[u8], block: u64| bits[(block / 8) as usize] >> (block % 8) & 1 == 1;
    if old_trusted && came.old > 0 {
        let missing: Vec<u64> = OLD.into_iter().filter(|block| !has(&old, *block)).collect();
        if !missing.is_empty() || !has(&old, EARLIER) {
            return Err(format!("the old log is trusted and lacks {missing:?}"));
        }
    }
    if came.is_swapped && !old_trusted {
        return Err("the leaf was swapped and the old log is not trusted".to_owned());
    }
    if NEW.into_iter().any(|block| has(&old, block)) || OLD.into_iter().any(|block| has(&new, block)) {
        return Err("a block is in the log of the other leaf".to_owned());
    }
    if new_trusted && came.new > 0 {
        let missing: Vec<u64> = NEW.into_iter().filter(|block| !has(&new, *block)).collect();
        if !missing.is_empty() {
            return Err(format!("the new log is trusted and lacks {missing:?}"));
        }
    }
    Ok((old_trusted, new_trusted))
}
