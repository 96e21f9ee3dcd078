//! Replies as bytes: headers, error chunks and extents, appended to the batch that goes out next.

use tapio_block::{DiskError, Extent};

use super::wire::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, Style, allocation, chunk, error,
};

/// Why a request failed, as its client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Refused before it reached the disk.
    Refused {
        /// One of [`error`].
        error: u32,
        /// What was wrong, for a person.
        message: &'static str,
    },
    /// The disk's answer; `write` because the protocol has its own number for writes past the end.
    Disk {
        /// What the disk said.
        error: DiskError,
        /// Whether the request wanted to change something.
        write: bool,
    },
}

impl Failure {
    /// The protocol's number.
    pub const fn number(&self) -> u32 {
        match self {
            Self::Refused { error, .. } => *error,
            Self::Disk { error: DiskError::ReadOnly, .. } => error::PERM,
            Self::Disk { error: DiskError::OutOfRange, write: true } => error::NOSPC,
            Self::Disk { error: DiskError::OutOfRange | DiskError::Unaligned, .. } => error::INVAL,
            Self::Disk { error: DiskError::NoSpace, .. } => error::NOSPC,
            Self::Disk { error: DiskError::Unsupported, .. } => error::NOTSUP,
            Self::Disk { error: DiskError::Io(errno), .. } => match *errno {
                libc::ENOMEM => error::NOMEM,
                libc::ENOSPC => error::NOSPC,
                libc::ESHUTDOWN => error::SHUTDOWN,
                _ => error::IO,
            },
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Refused { message, .. } => (*message).to_string(),
            Self::Disk { error, .. } => error.to_string(),
        }
    }
}

/// Writes replies of one style.
#[derive(Clone, Copy, Debug)]
pub struct ReplyWriter {
    /// As negotiated.
    pub style: Style,
}

impl ReplyWriter {
    /// A simple reply, data of a read may follow.
    pub fn simple(self, out: &mut Vec<u8>, cookie: u64, error: u32) {
        out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        out.extend_from_slice(&error.to_be_bytes());
        out.extend_from_slice(&cookie.to_be_bytes());
    }

    /// The header of a chunk with `len` bytes of payload; `offset` is that of the request and only travels in
    /// extended headers.
    fn chunk(self, out: &mut Vec<u8>, done: bool, kind: u16, cookie: u64, offset: u64, len: u64) {
        let extended = self.style == Style::Extended;
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&if done { chunk::DONE } else { 0 }.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&cookie.to_be_bytes());
        if extended {
            out.extend_from_slice(&offset.to_be_bytes());
            out.extend_from_slice(&len.to_be_bytes());
        } else {
            // Parts, messages and extent lists are all far below 4 GiB.
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }

    /// All went well, and there is nothing more to say.
    pub fn success(self, out: &mut Vec<u8>, cookie: u64, offset: u64) {
        match self.style {
            Style::Simple | Style::Structured => self.simple(out, cookie, error::NONE),
            Style::Extended => self.chunk(out, true, chunk::NONE, cookie, offset, 0),
        }
    }

    /// An empty reply to a READ of no bytes, which has to be structured where that was negotiated.
    pub fn empty_read(self, out: &mut Vec<u8>, cookie: u64, offset: u64) {
        match self.style {
            Style::Simple => self.simple(out, cookie, error::NONE),
            Style::Structured | Style::Extended => self.chunk(out, true, chunk::NONE, cookie, offset, 0),
        }
    }

    /// The request failed as a whole.
    pub fn failure(self, out: &mut Vec<u8>, cookie: u64, offset: u64, failure: &Failure) {
        if self.style == Style::Simple {
            return self.simple(out, cookie, failure.number());
        }
        let message = failure.message();
        self.chunk(out, true, chunk::ERROR, cookie, offset, 6 + message.len() as u64);
        Self::error_payload(out, failure, &message);
    }

    /// One part of a read failed; other parts may still come unless `done`. Not for simple replies.
    pub fn part_failure(
        self,
        out: &mut Vec<u8>,
        cookie: u64,
        request_offset: u64,
        failure: &Failure,
        at: u64,
        done: bool,
    ) {
        let message = failure.message();
        let len = 14 + message.len() as u64;
        self.chunk(out, done, chunk::ERROR_OFFSET, cookie, request_offset, len);
        Self::error_payload(out, failure, &message);
        out.extend_from_slice(&at.to_be_bytes());
    }

    fn error_payload(out: &mut Vec<u8>, failure: &Failure, message: &str) {
        out.extend_from_slice(&failure.number().to_be_bytes());
        out.extend_from_slice(&(message.len() as u16).to_be_bytes());
        out.extend_from_slice(message.as_bytes());
    }

    /// What precedes `len` bytes of a read's data that begin at `at`. Not for simple replies.
    pub fn data(self, out: &mut Vec<u8>, cookie: u64, request_offset: u64, at: u64, len: u64, done: bool) {
        self.chunk(out, done, chunk::OFFSET_DATA, cookie, request_offset, 8 + len);
        out.extend_from_slice(&at.to_be_bytes());
    }

    /// The extents of one metadata context. Not for simple replies.
    pub fn extents(self, out: &mut Vec<u8>, cookie: u64, offset: u64, context: u32, extents: &[Extent]) {
        let extended = self.style == Style::Extended;
        let (kind, fixed, each) =
            if extended { (chunk::BLOCK_STATUS_EXT, 8, 16) } else { (chunk::BLOCK_STATUS, 4, 8) };
        self.chunk(out, true, kind, cookie, offset, fixed + each * extents.len() as u64);
        out.extend_from_slice(&context.to_be_bytes());
        if extended {
            out.extend_from_slice(&(extents.len() as u32).to_be_bytes());
        }
        for extent in extents {
            let flags = if extent.hole { allocation::HOLE } else { 0 }
                | if extent.zero { allocation::ZERO } else { 0 };
            if extended {
                out.extend_from_slice(&extent.len.to_be_bytes());
                out.extend_from_slice(&u64::from(flags).to_be_bytes());
            } else {
                // The request was at most 4 GiB - 1 long, and extents are cut to it.
                out.extend_from_slice(&u32::try_from(extent.len).unwrap_or(u32::MAX).to_be_bytes());
                out.extend_from_slice(&flags.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{Reader, ReplyHeader, parse_reply};
    use super::*;

    fn written(style: Style, write: impl FnOnce(ReplyWriter, &mut Vec<u8>)) -> (ReplyHeader, Vec<u8>) {
        let mut out = Vec::new();
        write(ReplyWriter { style }, &mut out);
        let (header, len) = parse_reply(style, &out).unwrap().unwrap();
        (header, out[len..].to_vec())
    }

    #[test]
    fn a_failure_is_a_number_for_the_old_and_a_sentence_for_the_rest() {
        let failure = Failure::Disk { error: DiskError::OutOfRange, write: true };
        let (header, rest) = written(Style::Simple, |writer, out| writer.failure(out, 7, 0, &failure));
        assert_eq!(header, ReplyHeader::Simple { error: error::NOSPC, cookie: 7 });
        assert!(rest.is_empty());
        for style in [Style::Structured, Style::Extended] {
            let (header, payload) = written(style, |writer, out| writer.failure(out, 7, 0, &failure));
            let ReplyHeader::Chunk { flags, kind, cookie, len, .. } = header else { panic!("{header:?}") };
            assert_eq!((flags, kind, cookie), (chunk::DONE, chunk::ERROR, 7));
            assert_eq!(payload.len() as u64, len);
            let mut reader = Reader(&payload);
            assert_eq!(reader.u32(), Some(error::NOSPC));
            let message_len = usize::from(reader.u16().unwrap());
            assert_eq!(reader.0.len(), message_len);
            assert!(std::str::from_utf8(reader.0).unwrap().contains("past the end"));
        }
    }

    #[test]
    fn extents_carry_their_flags_in_both_widths() {
        let extents =
            [Extent { len: 4096, hole: false, zero: false }, Extent { len: 1 << 20, hole: true, zero: true }];
        let (_, narrow) = written(Style::Structured, |writer, out| writer.extents(out, 1, 0, 9, &extents));
        let mut reader = Reader(&narrow);
        let numbers: Vec<u32> = std::iter::from_fn(|| reader.u32()).collect();
        assert_eq!(numbers, [9, 4096, 0, 1 << 20, 3]);
        let (_, wide) = written(Style::Extended, |writer, out| writer.extents(out, 1, 0, 9, &extents));
        let mut reader = Reader(&wide);
        assert_eq!((reader.u32(), reader.u32()), (Some(9), Some(2)));
        let numbers: Vec<u64> = std::iter::from_fn(|| reader.u64()).collect();
        assert_eq!(numbers, [4096, 0, 1 << 20, 3]);
    }

    #[test]
    fn every_failure_of_the_disk_has_a_number_of_the_protocol() {
        let known = [error::PERM, error::IO, error::NOMEM, error::INVAL, error::NOSPC, error::NOTSUP, 108];
        let errors = (1..140).map(DiskError::Io).chain([
            DiskError::ReadOnly,
            DiskError::OutOfRange,
            DiskError::Unaligned,
            DiskError::NoSpace,
            DiskError::Unsupported,
        ]);
        for error in errors {
            for write in [false, true] {
                assert!(known.contains(&Failure::Disk { error, write }.number()), "{error:?}");
            }
        }
    }
}
