//! A disk to a socket.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use sha2::{Digest, Sha256};
use tapio_format::PageBuffer;
use tapio_format::vhd::stream::{StreamOut, StreamPart, StreamShape};
use tapio_format::vhd::time;
use tapio_types::{ApiError, ChainSpec, SECTOR_LEN, Span};
use uuid::Uuid;

use super::wire::Wire;
use super::{Export, Head, StreamFormat, check_plain};
use crate::errors;
use crate::fill::plan::{Holds, PIECE_LEN, Plan};
use crate::fill::source::{Source, ceph_name};
use crate::fill::{failed, is_zero, read_or_zeros, sectors};
use crate::traits::Ctx;

/// Bytes of a piece with its place.
const CHUNK_LEN: usize = 1 << 20;

/// Sends a disk: a head, then the stream from [`Export::start`] on. Nothing was sent where this fails before the first
/// data.
///
/// # Errors
/// `VDI_TOO_LARGE` for a VHD of more than 2040 GiB, 79 for a start behind the last byte, `TASK_CANCELLED` also where
/// the client has gone away; those of the images.
pub(crate) fn export(ctx: &dyn Ctx, what: &Export, to: OwnedFd) -> Result<(), ApiError> {
    let wire = Wire::new(ctx, to)?;
    let source = Source::open(&what.chain)?;
    let other = what.base.as_ref().map(|(chain, _)| Source::open(chain)).transpose()?;
    check_plain(&source, what.uuid)?;
    match what.format {
        StreamFormat::Raw if other.is_none() => raw(&wire, what, &source),
        StreamFormat::Vhd => vhd(&wire, what, &source, other.as_ref()),
        StreamFormat::Chunked => chunked(&wire, what, &source, other.as_ref()),
        StreamFormat::Raw => {
            Err(errors::fail(79, "a difference is exported as a VHD or in pieces with their places"))
        }
    }
}

/// What the stream was made from: the same tag says that the same bytes come again.
fn tag(what: &Export) -> u64 {
    let mut hash = Sha256::new();
    hash.update(format!("{:?} {} {:?}", what.format, what.uuid, what.base.as_ref().map(|(_, uuid)| uuid)));
    let chains = std::iter::once(&what.chain).chain(what.base.as_ref().map(|(chain, _)| chain));
    for layer in chains.flat_map(|chain| &chain.layers) {
        if let Ok(facts) = std::fs::metadata(&layer.path) {
            let numbers = [facts.dev().cast_signed(), facts.ino().cast_signed(), facts.len().cast_signed()];
            for number in numbers.into_iter().chain([facts.mtime(), facts.mtime_nsec()]) {
                hash.update(number.to_le_bytes());
            }
        }
    }
    let is_written = |chain: &ChainSpec| ceph_name(chain).is_some_and(|name| !name.contains('@'));
    if is_written(&what.chain) || what.base.as_ref().is_some_and(|(chain, _)| is_written(chain)) {
        // Nothing tells that an image of Ceph is as it was, unless it is a snapshot.
        hash.update(Uuid::new_v4().as_bytes());
    }
    let digest = hash.finalize();
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn begin(wire: &Wire<'_>, what: &Export, len: u64) -> Result<(), ApiError> {
    if what.start >= len {
        let text = format!("the stream has {len} bytes and cannot begin at byte {}", what.start);
        return Err(errors::fail(79, text));
    }
    wire.send(&Head { len, tag: tag(what) }.encode())
}

fn raw(wire: &Wire<'_>, what: &Export, source: &Source) -> Result<(), ApiError> {
    let len = source.virtual_len();
    begin(wire, what, len)?;
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    let mut at = what.start;
    while at < len {
        wire.check()?;
        let piece = at / PIECE_LEN * PIECE_LEN;
        read_piece(source, piece, &mut data)?;
        let end = (len - piece).min(PIECE_LEN);
        wire.send(&data[(at - piece) as usize..end as usize])?;
        at = piece + end;
        wire.progress(at as f64 / len as f64);
    }
    Ok(())
}

/// Sends what the images hold in pieces of at most a MiB, each with its place; the head has the bytes of the disk. A
/// whole disk is sent without zeros, a difference with those that it has. [`Export::start`] is a byte of the disk.
fn chunked(wire: &Wire<'_>, what: &Export, source: &Source, other: Option<&Source>) -> Result<(), ApiError> {
    let len = source.virtual_len();
    let plan = Plan::new(source, other, &what.chain, what.base.as_ref().map(|(chain, _)| chain));
    wire.send(&Head { len, tag: tag(what) }.encode())?;
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    let mut theirs = plan.compares().then(|| PageBuffer::new(PIECE_LEN as usize));
    for at in (what.start / PIECE_LEN * PIECE_LEN..len).step_by(PIECE_LEN as usize) {
        wire.check()?;
        let mut wanted =
            plan.wanted(source, other, Span::new(at, PIECE_LEN.min(len - at))).map_err(failed)?;
        wanted.retain(|(_, holds)| plan.is_delta() || *holds == Holds::Data);
        if wanted.is_empty() {
            wire.progress(at as f64 / len as f64);
            continue;
        }
        read_piece(source, at, &mut data)?;
        if let (Some(theirs), Some(other)) = (&mut theirs, other) {
            read_piece(other, at, theirs)?;
        }
        for chunk in (0..PIECE_LEN.min(len - at)).step_by(CHUNK_LEN) {
            let all = Span::new(at + chunk, (CHUNK_LEN as u64).min(len - at - chunk));
            // Archives have whole chunks.
            let part = within(&wanted, all).map(|part| if plan.is_delta() { part } else { all });
            let Some(part) = part.and_then(|part| from(part, what.start)) else { continue };
            let place = (part.start - at) as usize..(part.start + part.len - at) as usize;
            let bytes = &data[place.clone()];
            let is_left_out = match &theirs {
                Some(theirs) => *bytes == theirs[place],
                None => !plan.is_delta() && sectors(bytes).all(is_zero),
            };
            if !is_left_out {
                wire.send(&chunk_head(part.start, bytes.len()))?;
                wire.send(bytes)?;
            }
        }
        wire.progress(at as f64 / len as f64);
    }
    wire.send(&chunk_head(len, 0))
}

/// What of a part lies behind byte `start`.
fn from(part: Span, start: u64) -> Option<Span> {
    let passed = start.saturating_sub(part.start);
    (passed < part.len).then(|| Span::new(part.start + passed, part.len - passed))
}

/// The part of a piece from the first byte that is wanted to the last, in whole sectors.
fn within(wanted: &[(Span, Holds)], piece: Span) -> Option<Span> {
    let end = piece.start + piece.len;
    let touching = wanted.iter().filter(|(span, _)| span.start < end && span.start + span.len > piece.start);
    let (mut first, mut last) = (end, piece.start);
    for (span, _) in touching {
        first = first.min(span.start.max(piece.start));
        last = last.max((span.start + span.len).min(end));
    }
    let first = first / SECTOR_LEN * SECTOR_LEN;
    let last = last.next_multiple_of(SECTOR_LEN).min(end.next_multiple_of(SECTOR_LEN));
    (last > first).then(|| Span::new(first, last - first))
}

/// What is in front of a piece: its place and its length.
fn chunk_head(at: u64, len: usize) -> [u8; 12] {
    let mut head = [0; 12];
    head[..8].copy_from_slice(&at.to_le_bytes());
    head[8..].copy_from_slice(&(len as u32).to_le_bytes());
    head
}

fn vhd(wire: &Wire<'_>, what: &Export, source: &Source, other: Option<&Source>) -> Result<(), ApiError> {
    let len = source.virtual_len().next_multiple_of(SECTOR_LEN);
    if len > tapio_format::vhd::stream::STREAM_LEN_MAX {
        let max = tapio_format::vhd::stream::STREAM_LEN_MAX.to_string();
        return Err(ApiError::new("VDI_TOO_LARGE", [what.uuid.to_string(), max]));
    }
    let leaf = what.chain.layers.first().and_then(|layer| std::fs::metadata(&layer.path).ok());
    let shape = StreamShape {
        len,
        uuid: what.uuid,
        timestamp: time::from_unix(leaf.map_or(0, |facts| facts.mtime())),
        parent: what.base.as_ref().map(|(_, uuid)| *uuid),
    };
    let blocks = blocks(wire, what, source, other)?;
    let stream = StreamOut::new(&shape, blocks).map_err(|error| errors::image(79, &error))?;
    begin(wire, what, stream.len())?;
    let mut data = PageBuffer::new(PIECE_LEN as usize);
    for (place, part) in stream.parts() {
        wire.check()?;
        let from = |bytes: usize| (what.start.saturating_sub(place)).min(bytes as u64) as usize;
        match part {
            StreamPart::Bytes(bytes) => wire.send(&bytes[from(bytes.len())..])?,
            StreamPart::Block(block) => {
                let bitmap = StreamOut::bitmap();
                let passed = from(bitmap.len() + data.len());
                if passed == bitmap.len() + data.len() {
                    continue;
                }
                wire.send(&bitmap[passed.min(bitmap.len())..])?;
                read_piece(source, u64::from(block) * PIECE_LEN, &mut data)?;
                wire.send(&data[passed.saturating_sub(bitmap.len())..])?;
            }
        }
        wire.progress(place as f64 / stream.len() as f64);
    }
    Ok(())
}

/// The blocks that the stream holds. What no image holds is left out; of a difference all that may differ is sent.
fn blocks(
    wire: &Wire<'_>,
    what: &Export,
    source: &Source,
    other: Option<&Source>,
) -> Result<Vec<u32>, ApiError> {
    let plan = Plan::new(source, other, &what.chain, what.base.as_ref().map(|(chain, _)| chain));
    let len = source.virtual_len();
    let mut blocks = Vec::new();
    let mut pair =
        plan.compares().then(|| (PageBuffer::new(PIECE_LEN as usize), PageBuffer::new(PIECE_LEN as usize)));
    for block in 0..len.div_ceil(PIECE_LEN) {
        wire.check()?;
        let at = block * PIECE_LEN;
        let wanted = plan.wanted(source, other, Span::new(at, PIECE_LEN.min(len - at))).map_err(failed)?;
        let is_sent = match (&mut pair, other) {
            _ if wanted.is_empty() => false,
            (Some((ours, theirs)), Some(other)) => {
                read_piece(source, at, ours)?;
                read_piece(other, at, theirs)?;
                **ours != **theirs
            }
            _ => plan.is_delta() || wanted.iter().any(|(_, holds)| *holds == Holds::Data),
        };
        if is_sent {
            blocks.push(u32::try_from(block).map_err(|_| ApiError::internal("a disk has too many blocks"))?);
        }
    }
    Ok(blocks)
}

/// Reads a whole piece; behind the end of the disk there are zeros.
fn read_piece(source: &Source, at: u64, data: &mut PageBuffer) -> Result<(), ApiError> {
    read_or_zeros(Some(source), at, data).map_err(failed)
}
