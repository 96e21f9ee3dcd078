//! What a request asks for, checked before anything is done about it: pure functions.

use tapio_block::Geometry;
use tapio_types::Span;

use super::limits::PART_LEN_MAX;
use super::reply::Failure;
use super::wire::{PAYLOAD_LEN_MAX, RequestHeader, Style, command, command_flag, error};

/// What a connection has negotiated and what its export allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Of requests and replies.
    pub style: Style,
    /// Whether `base:allocation` was chosen.
    pub allocation: bool,
    /// Whether writes are refused on this export, whatever the disk allows.
    pub read_only: bool,
    /// Whether zeroing is known to be faster than writing.
    pub fast_zero: bool,
    /// The smallest block that the client was told of, to which its requests are aligned.
    pub block_len: u32,
}

/// A request that makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing to move: answer at once.
    Nothing,
    /// Answer a read of no bytes.
    EmptyRead,
    /// Read; `whole`: the data must come in one chunk.
    Read { whole: bool },
    /// Write; the payload follows.
    Write { durable: bool },
    /// Make what was answered durable.
    Flush,
    /// Discard, then flush if `durable`.
    Trim { durable: bool },
    /// Zero.
    Zero { unmap: bool, durable: bool },
    /// Read ahead.
    Cache,
    /// Tell extents; `one`: the first only.
    Status { one: bool },
    /// The client leaves.
    Disconnect,
}

/// Bytes that follow the header before the next one, whatever becomes of the request; `None` when that is more than
/// any client may send, and the connection is better dropped than drained.
pub fn payload_len(style: Style, request: &RequestHeader) -> Option<u64> {
    let flagged = style == Style::Extended && request.flags & command_flag::PAYLOAD_LEN != 0;
    // A WRITE always has a payload: clients that forget the flag send it all the same.
    let len = if request.command == command::WRITE || flagged { request.len } else { 0 };
    (len <= u64::from(PAYLOAD_LEN_MAX)).then_some(len)
}

const fn refuse(error: u32, message: &'static str) -> Result<Action, Failure> {
    Err(Failure::Refused { error, message })
}

/// Flags that a command may carry. FUA is allowed everywhere and means something where data changes.
const fn flags_allowed(style: Style, kind: u16) -> u16 {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
    FUA | match (kind, style) {
        (command::READ, Style::Structured | Style::Extended) => DF,
        (command::WRITE, Style::Extended) => PAYLOAD_LEN,
        (command::WRITE_ZEROES, _) => NO_HOLE | FAST_ZERO,
        (command::BLOCK_STATUS, _) => REQ_ONE,
        _ => 0,
    }
}

/// Decides what to do for a request, or why it fails.
pub fn check(session: &Session, geometry: &Geometry, request: &RequestHeader) -> Result<Action, Failure> {
    if request.command == command::DISC {
        return Ok(Action::Disconnect);
    }
    if request.command > command::BLOCK_STATUS {
        return refuse(error::INVAL, "unknown command: upgrade the server or use what the handshake offered");
    }
    if request.flags & !flags_allowed(session.style, request.command) != 0 {
        return refuse(error::INVAL, "the command does not take one of its flags");
    }
    if request.command == command::FLUSH {
        let plain = request.offset == 0 && request.len == 0;
        return if plain { Ok(Action::Flush) } else { refuse(error::INVAL, "a flush has no range") };
    }
    let changes = matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if changes && (session.read_only || geometry.read_only) {
        return refuse(error::PERM, "the export is read-only");
    }
    let span = Span::new(request.offset, request.len);
    if !span.fits(geometry.len) {
        // The protocol wants ENOSPC for writes past the end; TRIM is no write.
        let grows = matches!(request.command, command::WRITE | command::WRITE_ZEROES);
        return refuse(
            if grows { error::NOSPC } else { error::INVAL },
            "the request reaches past the end of the export",
        );
    }
    if !span.is_aligned(u64::from(session.block_len)) {
        return refuse(
            error::INVAL,
            "offset and length must be multiples of the minimum block size that the handshake stated",
        );
    }
    action(session, request)
}

fn action(session: &Session, request: &RequestHeader) -> Result<Action, Failure> {
    let has = |flag| request.flags & flag != 0;
    let durable = has(command_flag::FUA);
    let empty = request.len == 0;
    match request.command {
        command::READ => {
            let whole = has(command_flag::DF);
            if request.len > u64::from(PAYLOAD_LEN_MAX) {
                return refuse(error::INVAL, "a read is at most 32 MiB, the maximum block size stated");
            }
            if whole && request.len > PART_LEN_MAX as u64 {
                return refuse(error::OVERFLOW, "an unfragmented read is at most 2 MiB");
            }
            Ok(if empty { Action::EmptyRead } else { Action::Read { whole } })
        }
        command::BLOCK_STATUS if !session.allocation => {
            refuse(error::INVAL, "block status needs a metadata context chosen in the handshake")
        }
        command::BLOCK_STATUS if empty => refuse(error::INVAL, "block status of no bytes"),
        command::BLOCK_STATUS => Ok(Action::Status { one: has(command_flag::REQ_ONE) }),
        command::WRITE_ZEROES if has(command_flag::FAST_ZERO) && !session.fast_zero => {
            refuse(error::NOTSUP, "zeroing may not be faster than writing here")
        }
        _ if empty => Ok(Action::Nothing),
        command::WRITE => Ok(Action::Write { durable }),
        command::TRIM => Ok(Action::Trim { durable }),
        command::WRITE_ZEROES => Ok(Action::Zero { unmap: !has(command_flag::NO_HOLE), durable }),
        _ => Ok(Action::Cache),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: Geometry = Geometry {
        len: 1 << 30,
        logical_block_len: 512,
        physical_block_len: 4096,
        read_only: false,
        transfer_max: 2 << 20,
    };
    const SESSION: Session = Session {
        style: Style::Structured,
        allocation: true,
        read_only: false,
        fast_zero: false,
        block_len: 512,
    };

    fn request(command: u16, flags: u16, offset: u64, len: u64) -> RequestHeader {
        RequestHeader { flags, command, cookie: 1, offset, len }
    }

    fn number(result: Result<Action, Failure>) -> u32 {
        result.expect_err("must be refused").number()
    }

    #[test]
    fn each_command_becomes_its_action() {
        let check = |command, flags| check(&SESSION, &GEOMETRY, &request(command, flags, 4096, 512));
        use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
        assert_eq!(check(command::READ, 0), Ok(Action::Read { whole: false }));
        assert_eq!(check(command::READ, DF), Ok(Action::Read { whole: true }));
        assert_eq!(check(command::WRITE, FUA), Ok(Action::Write { durable: true }));
        assert_eq!(check(command::TRIM, 0), Ok(Action::Trim { durable: false }));
        assert_eq!(check(command::CACHE, 0), Ok(Action::Cache));
        assert_eq!(check(command::BLOCK_STATUS, REQ_ONE), Ok(Action::Status { one: true }));
        let zero = Action::Zero { unmap: false, durable: true };
        assert_eq!(check(command::WRITE_ZEROES, NO_HOLE | FUA), Ok(zero));
    }

    #[test]
    fn nonsense_is_refused_with_the_number_the_protocol_wants() {
        let on = |session: &Session, request| number(check(session, &GEOMETRY, &request));
        let read_only = Session { read_only: true, ..SESSION };
        let no_context = Session { allocation: false, ..SESSION };
        let simple = Session { style: Style::Simple, ..SESSION };
        let end = GEOMETRY.len;
        assert_eq!(on(&SESSION, request(command::READ, 0, end, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::WRITE, 0, end - 512, 1024)), error::NOSPC);
        assert_eq!(on(&SESSION, request(command::WRITE_ZEROES, 0, u64::MAX - 511, 512)), error::NOSPC);
        assert_eq!(on(&SESSION, request(command::TRIM, 0, end, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::READ, 0, 1, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::READ, 0, 0, 511)), error::INVAL);
        let long = Session { block_len: 4096, ..SESSION };
        assert_eq!(on(&long, request(command::READ, 0, 512, 4096)), error::INVAL);
        assert_eq!(on(&long, request(command::WRITE, 0, 4096, 512)), error::INVAL);
        assert_eq!(on(&read_only, request(command::WRITE, 0, 0, 512)), error::PERM);
        assert_eq!(on(&read_only, request(command::TRIM, 0, 0, 512)), error::PERM);
        assert_eq!(on(&no_context, request(command::BLOCK_STATUS, 0, 0, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::FLUSH, 0, 0, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::RESIZE, 0, 0, 0)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::WRITE, 1 << 9, 0, 512)), error::INVAL);
        assert_eq!(on(&simple, request(command::READ, command_flag::DF, 0, 512)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::READ, 0, 0, 64 << 20)), error::INVAL);
        assert_eq!(on(&SESSION, request(command::READ, command_flag::DF, 0, 4 << 20)), error::OVERFLOW);
        let fast = request(command::WRITE_ZEROES, command_flag::FAST_ZERO, 0, 512);
        assert_eq!(on(&SESSION, fast), error::NOTSUP);
    }

    #[test]
    fn the_payload_of_a_refused_write_is_known_and_that_of_an_absurd_one_is_not_read() {
        let write = |len| request(command::WRITE, 0, 0, len);
        assert_eq!(payload_len(Style::Simple, &write(512)), Some(512));
        assert_eq!(payload_len(Style::Simple, &write(u64::from(u32::MAX))), None);
        assert_eq!(payload_len(Style::Simple, &request(command::READ, 0, 0, u64::MAX)), Some(0));
        let flagged = request(command::TRIM, command_flag::PAYLOAD_LEN, 0, 100);
        assert_eq!(payload_len(Style::Extended, &flagged), Some(100));
        assert_eq!(payload_len(Style::Structured, &flagged), Some(0));
    }

    proptest! {
        #[test]
        fn what_passes_lies_inside_the_disk(
            command in 0u16..12, flags: u16, offset: u64, len: u64, extended: bool, near_end: bool,
        ) {
            let style = if extended { Style::Extended } else { Style::Structured };
            let offset = if near_end { GEOMETRY.len.wrapping_sub(offset % 8192) } else { offset };
            let request = request(command, flags & 0x3f, offset, len % (1 << 14));
            let session = Session { style, ..SESSION };
            if let Ok(Action::Read { .. } | Action::Write { .. } | Action::Zero { .. } | Action::Trim { .. })
                = check(&session, &GEOMETRY, &request)
            {
                let span = Span::new(request.offset, request.len);
                prop_assert!(span.fits(GEOMETRY.len) && span.is_aligned(512) && !span.is_empty());
            }
        }
    }
}
