//! The contents of one disk into another.
//!
//! Readers run ahead of the one writer, each with its own pieces of the disk in turn, so that reads and writes overlap
//! and new blocks lie in the order of the disk. What no image of the source holds is not touched: a target that has
//! other contents keeps them there, which is what a delta is for.

mod log;
pub(crate) mod plan;
mod raw;
pub(crate) mod source;
pub(crate) mod target;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use tapio_format::{FormatError, FormatErrorKind, PageBuffer};
use tapio_types::{ApiError, ChainSpec, SECTOR_LEN, Span};

use crate::errors;
use crate::traits::Ctx;
use plan::{Holds, PIECE_LEN, Plan};
use source::Source;
use target::Target;

/// Reader threads; there is one writer.
const READERS: usize = 3;
/// How often progress is reported at most: the caller may write each report to the database.
const UPDATES: u64 = 200;
/// Pieces that a reader may be ahead.
const AHEAD: usize = 2;

/// A piece as a reader hands it over.
pub(crate) struct Filled {
    pub(crate) span: Span,
    pub(crate) data: PageBuffer,
    /// Runs of whole sectors within the piece; zero ones are not in `data`.
    pub(crate) runs: Vec<Run>,
}

/// Sectors within a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Bytes from the start of the piece.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) is_zero: bool,
}

/// Copies what `from` holds into `into`, or with `base` what the two hold differently.
///
/// # Errors
/// 79 for a target that is too small, `VDI_IN_USE` for one that is open, `TASK_CANCELLED`, those of the
/// images. The target is then incomplete.
pub(crate) fn fill(
    ctx: &dyn Ctx,
    into: &ChainSpec,
    from: &ChainSpec,
    base: Option<&ChainSpec>,
) -> Result<(), ApiError> {
    let source = Source::open(from)?;
    let other = base.map(Source::open).transpose()?;
    let mut target = Target::open(into)?;
    if source.virtual_len() > target.virtual_len() {
        let text = format!(
            "the source has {} bytes and the target {}: make it larger",
            source.virtual_len(),
            target.virtual_len()
        );
        return Err(errors::fail(79, text));
    }
    ctx.step("fill:begin");
    if base.is_none() && raw::share(&source, &target) {
        target.note_all();
    } else {
        let plan = Plan::new(&source, other.as_ref(), from, base);
        copy(ctx, &source, other.as_ref(), &plan, &mut target)?;
    }
    target.finish().map_err(failed)?;
    ctx.progress(1.0);
    ctx.step("fill:done");
    Ok(())
}

pub(crate) fn failed(error: FormatError) -> ApiError {
    if error.errno() == libc::EBUSY {
        return errors::fail(46, error);
    }
    errors::image(200, &error)
}

/// Moves every piece of the plan.
fn copy(
    ctx: &dyn Ctx,
    source: &Source,
    other: Option<&Source>,
    plan: &Plan,
    target: &mut Target,
) -> Result<(), ApiError> {
    let len = source.virtual_len();
    let pieces = len.div_ceil(PIECE_LEN);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for reader in 0..READERS as u64 {
            let (give, take): (SyncSender<_>, Receiver<_>) = sync_channel(AHEAD);
            let (give_back, spare): (Sender<PageBuffer>, Receiver<PageBuffer>) = channel();
            let stop = &stop;
            scope.spawn(move || {
                for piece in (reader..pieces).step_by(READERS) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let at = piece * PIECE_LEN;
                    let span = Span::new(at, PIECE_LEN.min(len - at));
                    let filled = read_piece(source, other, plan, span, &spare);
                    let failed = filled.is_err();
                    if give.send(filled).is_err() || failed {
                        return;
                    }
                }
            });
            readers.push((take, give_back));
        }
        let mut write_all = || {
            for piece in 0..pieces {
                if ctx.is_cancelled() {
                    return Err(errors::cancelled());
                }
                let (take, give_back) = &readers[(piece % READERS as u64) as usize];
                let filled = take.recv().map_err(|_| ApiError::internal("a reader of a copy is gone"))?;
                if let Some(filled) = filled.map_err(failed)? {
                    target.write(&filled, plan.is_delta()).map_err(failed)?;
                    let _ = give_back.send(filled.data);
                }
                if (piece * UPDATES / pieces) != ((piece + 1) * UPDATES / pieces) {
                    ctx.progress(piece as f64 / pieces as f64);
                }
                if piece == pieces / 2 {
                    ctx.step("fill:half");
                }
            }
            Ok(())
        };
        let written = write_all();
        stop.store(true, Ordering::Relaxed);
        // Readers that wait for room see that their channels are closed.
        readers.clear();
        written
    })
}

/// Reads what is to be copied of one piece; none where that is nothing.
fn read_piece(
    source: &Source,
    other: Option<&Source>,
    plan: &Plan,
    span: Span,
    spare: &Receiver<PageBuffer>,
) -> Result<Option<Filled>, FormatError> {
    let wanted = plan.wanted(source, other, span)?;
    if wanted.is_empty() {
        return Ok(None);
    }
    let mut data = spare.try_recv().unwrap_or_else(|_| PageBuffer::new(PIECE_LEN as usize));
    let mut theirs = Vec::new();
    let mut runs = Vec::new();
    for (piece, holds) in wanted {
        let start = usize::try_from(piece.start - span.start).unwrap_or(0);
        let len = usize::try_from(piece.len).unwrap_or(0);
        if holds == Holds::Zeros && !plan.compares() {
            push(&mut runs, Run { start, len, is_zero: true });
            continue;
        }
        let ours = &mut data[start..start + len];
        source.read_at(piece.start, ours)?;
        if plan.compares() {
            theirs.resize(len, 0);
            read_or_zeros(other, piece.start, &mut theirs)?;
            for (at, (a, b)) in sectors(ours).zip(sectors(&theirs)).enumerate() {
                if a != b {
                    let start = start + at * SECTOR_LEN as usize;
                    push(&mut runs, Run { start, len: a.len(), is_zero: is_zero(a) });
                }
            }
        } else {
            for (at, sector) in sectors(ours).enumerate() {
                let start = start + at * SECTOR_LEN as usize;
                push(&mut runs, Run { start, len: sector.len(), is_zero: is_zero(sector) });
            }
        }
    }
    runs.sort_by_key(|run| run.start);
    Ok((!runs.is_empty()).then_some(Filled { span, data, runs }))
}

/// Reads of a disk that may be shorter: behind its end there are zeros.
pub(crate) fn read_or_zeros(chain: Option<&Source>, at: u64, into: &mut [u8]) -> Result<(), FormatError> {
    into.fill(0);
    let Some(chain) = chain else { return Ok(()) };
    let there = chain.virtual_len().saturating_sub(at).min(into.len() as u64);
    match usize::try_from(there) {
        Ok(0) => Ok(()),
        Ok(there) => chain.read_at(at, &mut into[..there]),
        Err(_) => Err(FormatError::new(FormatErrorKind::InvalidArgument, "a piece is too large")),
    }
}

pub(crate) fn sectors(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks(SECTOR_LEN as usize)
}

pub(crate) fn is_zero(sector: &[u8]) -> bool {
    static ZEROS: [u8; SECTOR_LEN as usize] = [0; SECTOR_LEN as usize];
    sector == &ZEROS[..sector.len()]
}

/// Adds a run, joined to the one before where they touch and are alike.
pub(crate) fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.start + last.len == run.start && last.is_zero == run.is_zero => {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}
