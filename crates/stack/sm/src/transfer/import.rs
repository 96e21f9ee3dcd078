//! A socket to a disk.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use tapio_format::vhd::bitmap;
use tapio_format::vhd::stream::StreamIn;
use tapio_format::{FormatError, PageBuffer};
use tapio_types::{ApiError, ChainSpec, SECTOR_LEN, Span};

use super::wire::Wire;
use super::{Import, StreamFormat, check_plain};
use crate::errors;
use crate::fill::plan::PIECE_LEN;
use crate::fill::target::Target;
use crate::fill::{Filled, Run, failed, is_zero, push, sectors};
use crate::traits::Ctx;

/// Receives into a VDI. A raw stream is over with its length, a VHD with its last block, a stream of chunks with its
/// empty chunk: what follows is not read. Where this fails the VDI holds what came until then, durably.
///
/// # Errors
/// `IMPORT_ERROR_PREMATURE_EOF` with the byte of a raw disk to go on from, `IMPORT_ERROR` for what is no such stream,
/// 79 for what is too large, `TASK_CANCELLED`; those of the image.
pub(crate) fn import(
    ctx: &dyn Ctx,
    target: &ChainSpec,
    what: &Import,
    from: OwnedFd,
) -> Result<(), ApiError> {
    let wire = Wire::new(ctx, from)?;
    let mut target = Target::open(target)?;
    check_plain(target.before(), what.into)?;
    let received = match what.format {
        StreamFormat::Raw => raw(&wire, what, &mut target),
        StreamFormat::Vhd => vhd(&wire, &mut target),
        StreamFormat::Chunked => chunked(&wire, &mut target),
    };
    let finished = target.finish().map_err(failed);
    received?;
    finished?;
    ctx.progress(1.0);
    Ok(())
}

fn wrong(why: impl Into<String>) -> ApiError {
    ApiError::new("IMPORT_ERROR", [why.into()])
}

fn too_small(len: u64, room: u64) -> ApiError {
    errors::fail(79, format!("the image has {len} bytes, and the VDI room for {room}: make it larger"))
}

/// Sectors for the target, some of which may be zero.
fn piece(at: u64, data: PageBuffer, len: usize) -> Filled {
    let mut runs = Vec::new();
    add_runs(&mut runs, &data, 0, len);
    Filled { span: Span::new(at, len as u64), data, runs }
}

/// Adds the runs of `data` from byte `start` to `end`.
fn add_runs(runs: &mut Vec<Run>, data: &[u8], start: usize, end: usize) {
    for (at, sector) in sectors(&data[start..end]).enumerate() {
        let start = start + at * SECTOR_LEN as usize;
        push(runs, Run { start, len: sector.len(), is_zero: is_zero(sector) });
    }
}

fn raw(wire: &Wire<'_>, what: &Import, target: &mut Target) -> Result<(), ApiError> {
    if !what.start.is_multiple_of(SECTOR_LEN) {
        return Err(wrong(format!("byte {}, where the data begin, is not on a sector", what.start)));
    }
    let room = target.virtual_len().saturating_sub(what.start);
    let len = what.len.unwrap_or(room);
    if len > room {
        return Err(too_small(len, room));
    }
    let (mut at, end) = (what.start, what.start + len);
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    while at < end {
        wire.check()?;
        let here = (PIECE_LEN - at % PIECE_LEN).min(end - at);
        let came = wire.receive(&mut data[..here as usize])?;
        let is_cut = (came as u64) < here;
        // A sector that is not whole is not written where more was announced; at the end its rest stays as it is.
        let whole = came / SECTOR_LEN as usize * SECTOR_LEN as usize;
        let len = if is_cut { whole } else { came.next_multiple_of(SECTOR_LEN as usize) };
        if len > came {
            let mut last = [0; SECTOR_LEN as usize];
            target.read_before(at + whole as u64, &mut last).map_err(failed)?;
            data[came..len].copy_from_slice(&last[came - whole..]);
        }
        let filled = piece(at, data, len);
        target.write(&filled, false).map_err(failed)?;
        data = filled.data;
        if is_cut {
            return Err(ApiError::new("IMPORT_ERROR_PREMATURE_EOF", [(at + whole as u64).to_string()]));
        }
        at += here;
        wire.progress(at as f64 / end as f64);
    }
    Ok(())
}

fn chunked(wire: &Wire<'_>, target: &mut Target) -> Result<(), ApiError> {
    let early = || ApiError::bare("IMPORT_ERROR_PREMATURE_EOF");
    let disk_len = target.virtual_len();
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    // Pieces that were written to: there zeros are data, because a later chunk may clear what an earlier one wrote.
    let mut touched = BTreeSet::new();
    loop {
        wire.check()?;
        let mut head = [0; 12];
        if wire.receive(&mut head)? < head.len() {
            return Err(early());
        }
        let (offset, len) = head.split_at(8);
        let offset = offset.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let len = len.first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)));
        if len == 0 {
            return Ok(());
        }
        let span = Span::new(offset, len);
        if !span.fits(disk_len) {
            let what = format!("a chunk of {len} bytes at byte {offset} of a disk of {disk_len} bytes");
            return Err(errors::fail(79, what));
        }
        if !span.is_aligned(SECTOR_LEN) {
            return Err(wrong(format!("a chunk of {len} bytes at byte {offset} is not of whole sectors")));
        }
        let mut at = offset;
        while at < offset + len {
            wire.check()?;
            let here = (PIECE_LEN - at % PIECE_LEN).min(offset + len - at) as usize;
            if wire.receive(&mut data[..here])? < here {
                return Err(early());
            }
            let was_touched = !touched.insert(at / PIECE_LEN);
            let filled = piece(at, data, here);
            target.write(&filled, was_touched).map_err(failed)?;
            data = filled.data;
            at += here as u64;
        }
        wire.progress(at as f64 / disk_len as f64);
    }
}

fn vhd(wire: &Wire<'_>, target: &mut Target) -> Result<(), ApiError> {
    let refused = |error: FormatError| {
        let cancelled = wire.check().err();
        let ended = wire.has_ended().then(|| ApiError::bare("IMPORT_ERROR_PREMATURE_EOF"));
        cancelled.or(ended).unwrap_or_else(|| wrong(error.to_string()))
    };
    let mut stream = StreamIn::open(wire).map_err(refused)?;
    let (len, room) = (stream.virtual_len(), target.virtual_len());
    if len > room {
        return Err(too_small(len, room));
    }
    let block_len = u64::from(stream.block_len());
    let is_difference = stream.is_difference();
    if !is_difference && !target.is_fresh() {
        let held: BTreeSet<u32> = stream.blocks().collect();
        clear(wire, target, |block| held.contains(&block), (block_len, len))?;
    }
    let count = stream.blocks().len();
    let mut data = PageBuffer::new(block_len as usize);
    for number in 0..count {
        wire.check()?;
        let Some(found) = stream.next_block(&mut data).map_err(refused)? else { break };
        let at = u64::from(found.block) * block_len;
        let end = len.saturating_sub(at).min(block_len).next_multiple_of(SECTOR_LEN) as usize;
        let mut runs = Vec::new();
        let sectors = end / SECTOR_LEN as usize;
        for (is_held, first, count) in bitmap::runs(&found.bitmap, 0, sectors) {
            let (start, run_len) = (first * SECTOR_LEN as usize, count * SECTOR_LEN as usize);
            if is_held {
                add_runs(&mut runs, &data, start, start + run_len);
            } else if !is_difference {
                push(&mut runs, Run { start, len: run_len, is_zero: true });
            }
        }
        let filled = Filled { span: Span::new(at, end as u64), data, runs };
        target.write(&filled, false).map_err(failed)?;
        data = filled.data;
        wire.progress((number + 1) as f64 / count as f64);
    }
    Ok(())
}

/// Clears what a whole image does not hold.
fn clear(
    wire: &Wire<'_>,
    target: &mut Target,
    is_held: impl Fn(u32) -> bool,
    (block_len, len): (u64, u64),
) -> Result<(), ApiError> {
    let disk_len = target.virtual_len();
    let mut at = 0;
    while at < disk_len {
        wire.check()?;
        let here = block_len.min(disk_len - at);
        let is_kept = at < len && u32::try_from(at / block_len).is_ok_and(&is_held);
        if !is_kept {
            let runs = vec![Run { start: 0, len: here as usize, is_zero: true }];
            let filled = Filled { span: Span::new(at, here), data: PageBuffer::new(0), runs };
            target.write(&filled, false).map_err(failed)?;
        }
        at += here;
    }
    Ok(())
}
