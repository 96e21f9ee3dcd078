//! The numbers of the NBD protocol and its headers, as pure functions on bytes. Everything is big-endian.
//!
//! Source: `doc/proto.md` of the NetworkBlockDevice project, the sections named at each item.

/// "NBDMAGIC", the first word a server says ("Newstyle negotiation").
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", the second word of the server and the first of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags of the server, and with the same bits those of the client.
pub mod handshake_flag {
    /// The fixed newstyle handshake is spoken.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zero bytes after the answer to EXPORT_NAME may be left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options ("Option types").
pub mod option {
    /// Choose an export and begin transmission, without a way to say no.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and begin transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options ("Option reply types").
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information on an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    /// The option is unknown or not offered.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// Forbidden by configuration.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option makes no sense as it was sent.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// TLS must come first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is about to end.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The option is longer than the server takes.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Kinds of information in replies to INFO and GO.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block size constraints.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export ("Transmission flags").
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see one coherent disk.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of the transmission phase ("Request types").
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write; the data follows the header.
    pub const WRITE: u16 = 1;
    /// Disconnect; has no reply.
    pub const DISC: u16 = 2;
    /// Make what was answered durable.
    pub const FLUSH: u16 = 3;
    /// The content is not needed any more.
    pub const TRIM: u16 = 4;
    /// The content will be needed soon.
    pub const CACHE: u16 = 5;
    /// Make the range read as zero.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask for extents of the chosen metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
    /// Change the size, as a client asks: of an experimental extension, which is not part of the protocol. Refused.
    pub const RESIZE: u16 = 8;
}

/// Flags of commands ("Command flags").
pub mod command_flag {
    /// Answer when the data is on stable storage.
    pub const FUA: u16 = 1 << 0;
    /// WRITE_ZEROES must not give space back.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The data of a READ comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// BLOCK_STATUS answers with one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// WRITE_ZEROES fails rather than being as slow as writing.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// Extended headers: the length is that of a payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Chunks of structured and extended replies ("Structured reply types").
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1 << 0;
    /// No payload.
    pub const NONE: u16 = 0;
    /// Offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in every error chunk.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Error number and message.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// Error number, message and the offset where it happened.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers ("Error values"): fixed by the protocol, whatever the host's errno values are.
pub mod error {
    /// No error.
    pub const NONE: u32 = 0;
    /// Not permitted: the export is read-only.
    pub const PERM: u32 = 1;
    /// The storage failed.
    pub const IO: u32 = 5;
    /// Out of memory.
    pub const NOMEM: u32 = 12;
    /// The request makes no sense.
    pub const INVAL: u32 = 22;
    /// The storage is full, or a write reaches past the end.
    pub const NOSPC: u32 = 28;
    /// The reply would be too large for what was asked.
    pub const OVERFLOW: u32 = 75;
    /// Not supported, or not fast.
    pub const NOTSUP: u32 = 95;
    /// The server is about to end.
    pub const SHUTDOWN: u32 = 108;
}

/// Flags of an extent in the context `base:allocation`.
pub mod allocation {
    /// Not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zero.
    pub const ZERO: u32 = 1 << 1;
}

/// The name of the one metadata context that every server with block status has.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Longest name or description ("Values": strings are at most 4096 bytes).
pub const STRING_LEN_MAX: usize = 4096;
/// What clients may assume of a server that states no constraint, and what this one states: 32 MiB.
pub const PAYLOAD_LEN_MAX: u32 = 32 << 20;

/// How requests and replies look, as negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies to READ and BLOCK_STATUS, and to what fails.
    Structured,
    /// Extended requests and replies, with 64-bit lengths.
    Extended,
}

impl Style {
    /// Bytes of a request's header.
    pub const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// [`command_flag`]s.
    pub flags: u16,
    /// [`command`].
    pub command: u16,
    /// The client's name for the request, given back in the reply.
    pub cookie: u64,
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The stream does not hold a header of the negotiated kind where one must be: nothing after this can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongMagic(pub u32);

impl std::fmt::Display for WrongMagic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "expected the magic number of an NBD header, found {:#010x}", self.0)
    }
}

impl std::error::Error for WrongMagic {}

/// Reads big-endian numbers off the front of a slice; every step says whether there was enough.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its 32-bit length before it, at most [`STRING_LEN_MAX`] bytes of UTF-8 without NUL.
    pub fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        if len > STRING_LEN_MAX {
            return None;
        }
        let text = std::str::from_utf8(self.bytes(len)?).ok()?;
        (!text.contains('\0')).then_some(text)
    }
}

/// Reads a request's header off the front of `bytes`; `None` while it is not whole yet.
pub fn parse_request(style: Style, bytes: &[u8]) -> Result<Option<RequestHeader>, WrongMagic> {
    let want = if style == Style::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
    let mut reader = Reader(bytes);
    let Some(magic) = reader.u32() else { return Ok(None) };
    if magic != want {
        return Err(WrongMagic(magic));
    }
    Ok(request_fields(style, &mut reader))
}

fn request_fields(style: Style, reader: &mut Reader<'_>) -> Option<RequestHeader> {
    let (flags, command) = (reader.u16()?, reader.u16()?);
    let (cookie, offset) = (reader.u64()?, reader.u64()?);
    let len = if style == Style::Extended { reader.u64()? } else { u64::from(reader.u32()?) };
    Some(RequestHeader { flags, command, cookie, offset, len })
}

/// Appends a request's header; with compact headers the length must fit 32 bits.
pub fn put_request(style: Style, request: &RequestHeader, out: &mut Vec<u8>) {
    let extended = style == Style::Extended;
    let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
    out.extend_from_slice(&magic.to_be_bytes());
    out.extend_from_slice(&request.flags.to_be_bytes());
    out.extend_from_slice(&request.command.to_be_bytes());
    out.extend_from_slice(&request.cookie.to_be_bytes());
    out.extend_from_slice(&request.offset.to_be_bytes());
    if extended {
        out.extend_from_slice(&request.len.to_be_bytes());
    } else {
        out.extend_from_slice(&u32::try_from(request.len).unwrap_or(u32::MAX).to_be_bytes());
    }
}

/// The header of a reply, or of one chunk of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply; the data of a READ that went well follows.
    Simple { error: u32, cookie: u64 },
    /// A chunk; `len` bytes of payload follow. `offset` is 0 unless the header is an extended one.
    Chunk { flags: u16, kind: u16, cookie: u64, offset: u64, len: u64 },
}

/// Reads a reply's header off the front of `bytes`, and says how long it is; `None` while it is not whole yet.
pub fn parse_reply(style: Style, bytes: &[u8]) -> Result<Option<(ReplyHeader, usize)>, WrongMagic> {
    let mut reader = Reader(bytes);
    let Some(magic) = reader.u32() else { return Ok(None) };
    let header = match (magic, style) {
        (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => simple_fields(&mut reader),
        (STRUCTURED_REPLY_MAGIC, Style::Structured) => chunk_fields(&mut reader, false),
        (EXTENDED_REPLY_MAGIC, Style::Extended) => chunk_fields(&mut reader, true),
        _ => return Err(WrongMagic(magic)),
    };
    Ok(header.map(|header| (header, bytes.len() - reader.0.len())))
}

fn simple_fields(reader: &mut Reader<'_>) -> Option<ReplyHeader> {
    Some(ReplyHeader::Simple { error: reader.u32()?, cookie: reader.u64()? })
}

fn chunk_fields(reader: &mut Reader<'_>, extended: bool) -> Option<ReplyHeader> {
    let (flags, kind, cookie) = (reader.u16()?, reader.u16()?, reader.u64()?);
    let offset = if extended { reader.u64()? } else { 0 };
    let len = if extended { reader.u64()? } else { u64::from(reader.u32()?) };
    Some(ReplyHeader::Chunk { flags, kind, cookie, offset, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn styles() -> impl Strategy<Value = Style> {
        prop_oneof![Just(Style::Simple), Just(Style::Structured), Just(Style::Extended)]
    }

    proptest! {
        #[test]
        fn a_request_survives_the_wire(
            style in styles(), flags: u16, command: u16, cookie: u64, offset: u64, len: u64,
        ) {
            let len = if style == Style::Extended { len } else { len & 0xffff_ffff };
            let header = RequestHeader { flags, command, cookie, offset, len };
            let mut bytes = Vec::new();
            put_request(style, &header, &mut bytes);
            prop_assert_eq!(bytes.len(), style.request_len());
            prop_assert_eq!(parse_request(style, &bytes), Ok(Some(header)));
            for cut in 0..bytes.len() {
                prop_assert_eq!(parse_request(style, &bytes[..cut]), Ok(None));
            }
        }

        #[test]
        fn no_bytes_make_the_parsers_panic(style in styles(), bytes: Vec<u8>) {
            let _ = parse_request(style, &bytes);
            let _ = parse_reply(style, &bytes);
            let _ = Reader(&bytes).string();
        }
    }

    #[test]
    fn the_wrong_kind_of_header_is_refused_by_its_first_word() {
        let header = RequestHeader { flags: 0, command: 0, cookie: 1, offset: 2, len: 3 };
        let mut bytes = Vec::new();
        put_request(Style::Extended, &header, &mut bytes);
        assert_eq!(parse_request(Style::Simple, &bytes), Err(WrongMagic(EXTENDED_REQUEST_MAGIC)));
        assert_eq!(parse_request(Style::Simple, &[0; 28]), Err(WrongMagic(0)));
    }

    #[test]
    fn a_string_that_lies_about_its_length_is_no_string() {
        assert_eq!(Reader(&[0, 0, 0, 2, b'a', b'b', b'c']).string(), Some("ab"));
        assert_eq!(Reader(&[0, 0, 0, 9, b'a']).string(), None);
        assert_eq!(Reader(&[0xff, 0xff, 0xff, 0xff]).string(), None);
        assert_eq!(Reader(&[0, 0, 0, 1, 0]).string(), None);
        assert_eq!(Reader(&[0, 0, 0, 1, 0xff]).string(), None);
    }
}
