//! The task that takes requests off the socket and hands them to the disk.

use std::rc::Rc;

use tapio_block::{Data, Op};
use tapio_types::Span;

use super::connection::{Connection, End};
use super::input::Input;
use super::limits::{
    CACHE_LEN_MAX, EXTENTS_MAX, PART_LEN_MAX, RANGE_PART_LEN, READ_PART_LEN, STATUS_LEN_MAX, WRITE_PART_LEN,
    WRITE_PART_LEN_AMONG_OTHERS,
};
use super::memory::Held;
use super::plan::{Action, check, payload_len};
use super::reply::Failure;
use super::slots::SlotKind;
use super::wire::{RequestHeader, Style, error, parse_request};

/// How long to wait for memory that is not ours to give back before looking again.
const RETRY_NS: u64 = 2_000_000;

/// Runs until the client leaves or must.
pub(super) async fn run(connection: Rc<Connection>) {
    let mut input = Input::new();
    let end = loop {
        if let Err(end) = next(&connection, &mut input).await {
            break end;
        }
    };
    drop(input);
    // Also after a protocol error: what was taken before it is still answered.
    connection.stop_taking(end);
}

async fn next(connection: &Connection, input: &mut Input) -> Result<(), End> {
    let style = connection.session.style;
    let header = loop {
        match parse_request(style, input.bytes()) {
            Ok(Some(header)) => break header,
            Ok(None) => input.fill(&connection.uring, connection.fd(), &connection.memory).await?,
            Err(_) => return Err(End::Protocol("the client sent what is no NBD request")),
        }
    };
    input.consume(style.request_len());
    connection.gate().await?;
    dispatch(connection, input, &header).await
}

async fn dispatch(connection: &Connection, input: &mut Input, header: &RequestHeader) -> Result<(), End> {
    let session = &connection.session;
    let payload = payload_len(session.style, header)
        .ok_or(End::Protocol("the client announced a payload above 32 MiB"))?;
    connection.shared.note_request(header);
    match check(session, &connection.port.geometry(), header) {
        Ok(Action::Read { whole }) => read(connection, header, whole).await,
        Ok(Action::Write { durable }) => write(connection, input, header, durable).await,
        Ok(Action::Disconnect) => Err(End::Goodbye),
        Ok(Action::Flush) => {
            let slot = head(connection, SlotKind::Flush, header, 0).await?;
            connection.submit(slot, Op::Flush, Span::default(), Data::None).await
        }
        Ok(Action::Trim { durable }) => {
            range(connection, header, SlotKind::Trim { durable }, Op::Discard).await
        }
        Ok(Action::Zero { unmap, durable }) => {
            range(connection, header, SlotKind::Zero, Op::WriteZeroes { unmap, durable }).await
        }
        Ok(Action::Cache) => cache(connection, header).await,
        Ok(Action::Status { one }) => {
            let slot = head(connection, SlotKind::Status, header, 0).await?;
            let span = Span::new(header.offset, header.len).prefix(STATUS_LEN_MAX);
            connection.look_up(slot, span, if one { 1 } else { EXTENTS_MAX });
            Ok(())
        }
        Ok(Action::Nothing) => answer(connection, header, SlotKind::Answer, None).await,
        Ok(Action::EmptyRead) => answer(connection, header, SlotKind::EmptyRead, None).await,
        Err(failure) => {
            // The stream stays in step only if the refused data is read past.
            input.skip(&connection.uring, connection.fd(), &connection.memory, payload).await?;
            answer(connection, header, SlotKind::Answer, Some(failure)).await
        }
    }
}

/// A slot for a whole request, when one is free.
async fn head(
    connection: &Connection,
    kind: SlotKind,
    header: &RequestHeader,
    left: u64,
) -> Result<u32, End> {
    loop {
        let taken = connection.slots.borrow_mut().take_head(kind, header, left);
        match taken {
            Some(slot) => return Ok(slot),
            None => connection.wait_freed().await?,
        }
    }
}

/// A slot for a part: the head itself if that is the only part.
async fn part(connection: &Connection, head: u32, header: &RequestHeader, span: Span) -> Result<u32, End> {
    if span.len == header.len {
        return Ok(head);
    }
    loop {
        let taken = connection.slots.borrow_mut().take_part(head, span.start, span.len);
        match taken {
            Some(slot) => return Ok(slot),
            None => connection.wait_freed().await?,
        }
    }
}

async fn answer(
    connection: &Connection,
    header: &RequestHeader,
    kind: SlotKind,
    failure: Option<Failure>,
) -> Result<(), End> {
    let slot = head(connection, kind, header, 0).await?;
    connection.slots.borrow_mut().at(slot).failure = failure;
    connection.answer(slot);
    Ok(())
}

/// Memory for up to `len` bytes, when there is some. `own`: slots in use that do not give memory back by themselves.
async fn some_memory(connection: &Connection, len: usize, own: usize) -> Result<Held, End> {
    loop {
        if let Some(memory) = connection.memory.take_some(len) {
            return Ok(memory);
        }
        if connection.slots.borrow().used() > own {
            connection.wait_freed().await?;
        } else {
            connection.wait_freed_or(RETRY_NS).await?;
        }
    }
}

/// Memory for `len` bytes in one piece; `None` when that is not to be had even with nothing else in flight.
async fn whole_memory(connection: &Connection, len: usize, own: usize) -> Result<Option<Held>, End> {
    loop {
        if let Some(memory) = connection.memory.take(len) {
            return Ok(Some(memory));
        }
        if connection.slots.borrow().used() <= own {
            return Ok(None);
        }
        connection.wait_freed().await?;
    }
}

fn part_len_max(connection: &Connection, wanted: usize) -> u64 {
    // The disk's limit is a multiple of its block; a disk that states less than a page would be a mistake.
    u64::from(connection.port.geometry().transfer_max).clamp(4096, wanted as u64)
}

/// Hands over a part that moves data. The request has the memory until the disk has answered, given up or not; on the
/// account it stays as the slot's.
async fn submit(connection: &Connection, slot: u32, op: Op, span: Span, mut memory: Held) -> Result<(), End> {
    let data = Data::Own(memory.lend());
    connection.slots.borrow_mut().at(slot).memory = Some(memory);
    connection.submit(slot, op, span, data).await
}

async fn read(connection: &Connection, header: &RequestHeader, whole: bool) -> Result<(), End> {
    if whole || connection.session.style == Style::Simple {
        return read_whole(connection, header).await;
    }
    read_in_parts(connection, SlotKind::Read, header).await
}

/// Reads the range piece by piece, each as large as there is memory for.
async fn read_in_parts(connection: &Connection, kind: SlotKind, header: &RequestHeader) -> Result<(), End> {
    let part_len = part_len_max(connection, READ_PART_LEN);
    let head = head(connection, kind, header, header.len).await?;
    let mut left = Span::new(header.offset, header.len);
    while !left.is_empty() {
        let memory = some_memory(connection, left.len.min(part_len) as usize, 1).await?;
        let span = left.prefix(memory.len() as u64);
        let slot = part(connection, head, header, span).await?;
        submit(connection, slot, Op::Read, span, memory).await?;
        left = left.skip(span.len);
    }
    Ok(())
}

/// A read whose answer is one piece: with simple replies, or because the client said so.
async fn read_whole(connection: &Connection, header: &RequestHeader) -> Result<(), End> {
    let span = Span::new(header.offset, header.len);
    if header.len <= part_len_max(connection, PART_LEN_MAX) {
        let slot = head(connection, SlotKind::Read, header, header.len).await?;
        if let Some(memory) = whole_memory(connection, header.len as usize, 1).await? {
            return submit(connection, slot, Op::Read, span, memory).await;
        }
        connection.slots.borrow_mut().free(slot);
    }
    if connection.session.style == Style::Simple {
        return stream(connection, header).await;
    }
    let message = "too large to be read in one piece now: ask for less or allow fragments";
    let failure = Failure::Refused { error: error::OVERFLOW, message };
    answer(connection, header, SlotKind::Answer, Some(failure)).await
}

/// A read larger than any buffer, for a client that takes only simple replies: alone on the connection, part after
/// part. A failure after the header has gone can only be told by dropping the connection.
async fn stream(connection: &Connection, header: &RequestHeader) -> Result<(), End> {
    let mut left = Span::new(header.offset, header.len);
    while !left.is_empty() {
        // The part before must have left, and at first everything else.
        while connection.slots.borrow().used() > 0 {
            connection.wait_freed().await?;
        }
        let first = left.len == header.len;
        if !first && connection.stream_failed.take() {
            return Ok(());
        }
        let wanted = left.len.min(part_len_max(connection, PART_LEN_MAX)) as usize;
        let memory = some_memory(connection, wanted, 0).await?;
        let span = left.prefix(memory.len() as u64);
        let slot = head(connection, SlotKind::Stream { first }, header, span.len).await?;
        {
            let mut slots = connection.slots.borrow_mut();
            let slot = slots.at(slot);
            (slot.at, slot.len) = (span.start, span.len);
        }
        submit(connection, slot, Op::Read, span, memory).await?;
        left = left.skip(span.len);
    }
    Ok(())
}

async fn write(
    connection: &Connection,
    input: &mut Input,
    header: &RequestHeader,
    durable: bool,
) -> Result<(), End> {
    let wanted = match (durable, connection.slots.borrow().used()) {
        // Each part of a durable write costs a flush of its own below.
        (true, _) => PART_LEN_MAX,
        (false, 0) => WRITE_PART_LEN,
        (false, _) => WRITE_PART_LEN_AMONG_OTHERS,
    };
    let part_len = part_len_max(connection, wanted);
    let head = head(connection, SlotKind::Write, header, header.len).await?;
    let mut left = Span::new(header.offset, header.len);
    while !left.is_empty() {
        let mut memory = some_memory(connection, left.len.min(part_len) as usize, 1).await?;
        input.read_exact(&connection.uring, connection.fd(), &mut memory).await?;
        let span = left.prefix(memory.len() as u64);
        let slot = part(connection, head, header, span).await?;
        submit(connection, slot, Op::Write { durable }, span, memory).await?;
        left = left.skip(span.len);
    }
    Ok(())
}

/// TRIM and WRITE_ZEROES: no data, any length.
async fn range(connection: &Connection, header: &RequestHeader, kind: SlotKind, op: Op) -> Result<(), End> {
    let head = head(connection, kind, header, header.len).await?;
    let mut left = Span::new(header.offset, header.len);
    while !left.is_empty() {
        let span = left.prefix(RANGE_PART_LEN);
        let slot = part(connection, head, header, span).await?;
        connection.submit(slot, op, span, Data::None).await?;
        left = left.skip(span.len);
    }
    Ok(())
}

/// CACHE: reads the beginning of the range and forgets it, so that metadata and page cache have it.
async fn cache(connection: &Connection, header: &RequestHeader) -> Result<(), End> {
    let header = &RequestHeader { len: header.len.min(CACHE_LEN_MAX), ..*header };
    read_in_parts(connection, SlotKind::Cache, header).await
}
