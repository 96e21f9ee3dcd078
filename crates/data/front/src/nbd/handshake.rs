//! The handshake as a state machine on bytes: no socket, no clock, no thread.
//!
//! ```text
//!  greeting() ──▶ client flags ──▶ option header ──▶ option data ──▶ answer ─┬─▶ next option
//!                                      ▲                                     ├─▶ transmission
//!                                      └─────────────────────────────────────┘   or the end
//! ```
//!
//! The driver reads exactly [`Handshake::wants`] bytes, hands them to [`Handshake::feed`] and sends what that wrote: so
//! nothing of the transmission phase is ever read here.

use std::fmt;

use tapio_nbd::tls::TlsPolicy;
use tapio_types::SECTOR_LEN;

use super::limits::{OPTION_LEN_MAX, OPTION_SKIP_MAX, OPTIONS_MAX};
use super::wire::{
    BASE_ALLOCATION, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_LEN_MAX, Reader, STRING_LEN_MAX, Style,
    handshake_flag, info, option, option_reply, transmission_flag,
};

/// The context identifier under which `base:allocation` travels.
pub const ALLOCATION_ID: u32 = 1;
/// The block size stated as preferred when the disk does not know better.
const PREFERRED_LEN: u32 = 4096;

/// An export as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Name.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// An export as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// The name it really has: the client may have asked for the default one.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Bytes.
    pub len: u64,
    /// Smallest unit of offsets and lengths, in bytes, a power of two.
    pub block_len_min: u32,
    /// Unit that costs no extra work, in bytes, a power of two.
    pub block_len_preferred: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether zeroing is known to be faster than writing.
    pub fast_zero: bool,
}

impl Described {
    /// For a client that does not ask about block sizes: it may send requests of 512 bytes, which are served.
    fn for_any_client(self) -> Self {
        Self { block_len_min: self.block_len_min.min(SECTOR_LEN as u32), ..self }
    }

    /// The transmission flags, which depend on what was negotiated before.
    pub fn flags(&self, style: Style) -> u16 {
        use transmission_flag as flag;
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        // A flush on one connection makes durable what was answered on any: the disk has one cache for all.
        flags |= flag::CAN_MULTI_CONN;
        if self.read_only {
            flags |= flag::READ_ONLY;
        } else {
            flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
        }
        if style >= Style::Structured {
            flags |= flag::SEND_DF;
        }
        flags
    }
}

/// Why an export is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is none of this name.
    Unknown,
    /// It has as many clients as it may.
    Busy,
    /// It is being taken down, or its disk does not answer.
    Down,
}

impl Refusal {
    const fn reply(self) -> (u32, &'static str) {
        match self {
            Self::Unknown => (option_reply::ERR_UNKNOWN, "no such export: ask for the list"),
            Self::Busy => (option_reply::ERR_POLICY, "too many connections: close one and try again"),
            Self::Down => (option_reply::ERR_SHUTDOWN, "the export is being taken down"),
        }
    }
}

/// What the handshake asks about exports.
pub trait Catalog {
    /// All exports, in the order of a list.
    fn list(&self) -> Vec<Listed>;
    /// The export of this name; the empty name is the only export there is. `enter`: the client wants to use it now.
    fn find(&mut self, name: &str, enter: bool) -> Result<Described, Refusal>;
}

/// How the handshake goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send what was written, then read [`Handshake::wants`] bytes.
    More,
    /// Send what was written, then begin TLS; what comes next comes inside.
    StartTls,
    /// Send what was written, then begin transmission.
    Transmission(Agreed),
    /// Send what was written, then close: the client asked for it.
    Goodbye,
}

/// The result of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The export.
    pub export: Described,
    /// Of requests and replies.
    pub style: Style,
    /// Whether `base:allocation` was chosen.
    pub allocation: bool,
}

/// The client does not keep to the protocol, or to the bounds of this server; the connection is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// Unknown flags in the client's first word.
    ClientFlags(u32),
    /// No option where one must be.
    WrongMagic(u64),
    /// More options than this server takes.
    TooManyOptions,
    /// An option longer than this server reads past.
    OptionTooLong(u32),
    /// EXPORT_NAME without TLS where that is required: the protocol has no other answer.
    TlsRequired,
    /// EXPORT_NAME of an export that is not to be had: the protocol has no other answer.
    NoSuchExport(Refusal),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientFlags(flags) => write!(f, "the client sent unknown handshake flags {flags:#x}"),
            Self::WrongMagic(magic) => write!(f, "expected an NBD option, found {magic:#018x}"),
            Self::TooManyOptions => write!(f, "the client sent more than {OPTIONS_MAX} options"),
            Self::OptionTooLong(len) => write!(f, "the client sent an option of {len} bytes"),
            Self::TlsRequired => f.write_str("the client begins without TLS, which is required"),
            Self::NoSuchExport(why) => f.write_str(why.reply().1),
        }
    }
}

impl std::error::Error for HandshakeError {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Flags,
    Header,
    Data {
        option: u32,
    },
    /// Reading past an option that is too long.
    Skip {
        option: u32,
        left: u32,
    },
}

/// Where a handshake stands with TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    /// There is none to be had.
    Off,
    /// It may begin, or must.
    Possible(TlsPolicy),
    /// What is said now is said inside.
    On,
}

/// The server's side of one handshake.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    wants: usize,
    no_zeroes: bool,
    options: u32,
    tls: Tls,
    style: Style,
    /// The export for which `base:allocation` was chosen.
    allocation: Option<String>,
}

impl Default for Handshake {
    fn default() -> Self {
        Self::new()
    }
}

/// Bytes of an option's header.
const OPTION_HEADER_LEN: usize = 16;
/// How much of a skipped option is read at a time.
const SKIP_LEN: u32 = 4096;

impl Handshake {
    /// The beginning.
    pub const fn new() -> Self {
        let (state, style) = (State::Flags, Style::Simple);
        Self { state, wants: 4, no_zeroes: false, options: 0, tls: Tls::Off, style, allocation: None }
    }

    /// The beginning of a handshake in which the client may, or must, begin TLS.
    pub fn with_tls(policy: Option<TlsPolicy>) -> Self {
        let tls = match policy {
            Some(policy) => Tls::Possible(policy),
            None => Tls::Off,
        };
        Self { tls, ..Self::new() }
    }

    /// What the server says first.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// How many bytes to read before the next call of [`Handshake::feed`]; at least 1, at most [`OPTION_LEN_MAX`].
    pub const fn wants(&self) -> usize {
        self.wants
    }

    /// Takes exactly the bytes it wanted and appends what is to be sent to `out`.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        catalog: &mut dyn Catalog,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        debug_assert_eq!(bytes.len(), self.wants);
        match self.state {
            State::Flags => self.client_flags(bytes),
            State::Header => self.option_header(bytes, catalog, out),
            State::Data { option } => self.option(option, bytes, catalog, out),
            State::Skip { option, left } => Ok(self.skip(option, left, out)),
        }
    }

    fn next_option(&mut self) -> Step {
        self.state = State::Header;
        self.wants = OPTION_HEADER_LEN;
        Step::More
    }

    fn client_flags(&mut self, bytes: &[u8]) -> Result<Step, HandshakeError> {
        let flags = Reader(bytes).u32().unwrap_or(u32::MAX);
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 {
            return Err(HandshakeError::ClientFlags(flags));
        }
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(self.next_option())
    }

    fn option_header(
        &mut self,
        bytes: &[u8],
        catalog: &mut dyn Catalog,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        let mut reader = Reader(bytes);
        let magic = reader.u64().unwrap_or(0);
        let (Some(option), Some(len), OPTION_MAGIC) = (reader.u32(), reader.u32(), magic) else {
            return Err(HandshakeError::WrongMagic(magic));
        };
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(HandshakeError::TooManyOptions);
        }
        match len {
            0 => self.option(option, &[], catalog, out),
            1..=OPTION_LEN_MAX => {
                self.state = State::Data { option };
                self.wants = len as usize;
                Ok(Step::More)
            }
            // EXPORT_NAME cannot be answered with an error, so its name is not worth reading.
            _ if len > OPTION_SKIP_MAX || option == option::EXPORT_NAME => {
                Err(HandshakeError::OptionTooLong(len))
            }
            _ => {
                self.state = State::Skip { option, left: len };
                self.wants = len.min(SKIP_LEN) as usize;
                Ok(Step::More)
            }
        }
    }

    fn skip(&mut self, option: u32, left: u32, out: &mut Vec<u8>) -> Step {
        let left = left - left.min(SKIP_LEN);
        if left > 0 {
            self.state = State::Skip { option, left };
            self.wants = left.min(SKIP_LEN) as usize;
            return Step::More;
        }
        self.refuse(out, option, option_reply::ERR_TOO_BIG, "the option is longer than 16 KiB")
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        catalog: &mut dyn Catalog,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        if self.tls == Tls::Possible(TlsPolicy::Required)
            && !matches!(option, option::STARTTLS | option::ABORT)
        {
            if option == option::EXPORT_NAME {
                return Err(HandshakeError::TlsRequired);
            }
            return Ok(self.refuse(
                out,
                option,
                option_reply::ERR_TLS_REQD,
                "this server requires TLS: begin it first",
            ));
        }
        Ok(match option {
            option::EXPORT_NAME => return self.export_name(data, catalog, out),
            option::ABORT => {
                reply(out, option, option_reply::ACK, &[]);
                Step::Goodbye
            }
            option::LIST => self.list(data, catalog, out),
            option::INFO | option::GO => self.info(option, data, catalog, out),
            option::STRUCTURED_REPLY => self.set_style(option, data, Style::Structured, out),
            option::EXTENDED_HEADERS => self.set_style(option, data, Style::Extended, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta(option, data, catalog, out),
            option::STARTTLS => self.start_tls(data, out),
            _ => self.refuse(out, option, option_reply::ERR_UNSUP, "unknown option"),
        })
    }

    /// What was agreed before counts no more inside: an attacker on the network may have sent it.
    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> Step {
        let (error, why) = match self.tls {
            Tls::Off => (option_reply::ERR_POLICY, "TLS is not configured"),
            Tls::On => (option_reply::ERR_INVALID, "TLS has begun already"),
            Tls::Possible(_) if !data.is_empty() => (option_reply::ERR_INVALID, "the option takes no data"),
            Tls::Possible(_) => {
                reply(out, option::STARTTLS, option_reply::ACK, &[]);
                (self.tls, self.style, self.allocation) = (Tls::On, Style::Simple, None);
                self.next_option();
                return Step::StartTls;
            }
        };
        self.refuse(out, option::STARTTLS, error, why)
    }

    fn refuse(&mut self, out: &mut Vec<u8>, option: u32, error: u32, message: &str) -> Step {
        reply(out, option, error, message.as_bytes());
        self.next_option()
    }

    fn ack(&mut self, out: &mut Vec<u8>, option: u32) -> Step {
        reply(out, option, option_reply::ACK, &[]);
        self.next_option()
    }

    fn set_style(&mut self, option: u32, data: &[u8], style: Style, out: &mut Vec<u8>) -> Step {
        if !data.is_empty() {
            return self.refuse(out, option, option_reply::ERR_INVALID, "the option takes no data");
        }
        if self.style >= style {
            return self.refuse(out, option, option_reply::ERR_INVALID, "already negotiated");
        }
        self.style = style;
        self.ack(out, option)
    }

    fn list(&mut self, data: &[u8], catalog: &dyn Catalog, out: &mut Vec<u8>) -> Step {
        if !data.is_empty() {
            return self.refuse(out, option::LIST, option_reply::ERR_INVALID, "LIST takes no data");
        }
        for export in catalog.list() {
            let mut payload = Vec::with_capacity(4 + export.name.len() + export.description.len());
            payload.extend_from_slice(&(export.name.len() as u32).to_be_bytes());
            payload.extend_from_slice(export.name.as_bytes());
            payload.extend_from_slice(export.description.as_bytes());
            reply(out, option::LIST, option_reply::SERVER, &payload);
        }
        self.ack(out, option::LIST)
    }

    fn agree(&self, export: Described) -> Step {
        let allocation = self.allocation.as_ref() == Some(&export.name);
        Step::Transmission(Agreed { export, style: self.style, allocation })
    }

    fn export_name(
        &self,
        data: &[u8],
        catalog: &mut dyn Catalog,
        out: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        let name = std::str::from_utf8(data).unwrap_or("\0");
        let unknown = name.len() > STRING_LEN_MAX || name.contains('\0');
        let found = if unknown { Err(Refusal::Unknown) } else { catalog.find(name, true) };
        let export = found.map_err(HandshakeError::NoSuchExport)?.for_any_client();
        out.extend_from_slice(&export.len.to_be_bytes());
        out.extend_from_slice(&export.flags(self.style).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Ok(self.agree(export))
    }

    fn info(&mut self, option: u32, data: &[u8], catalog: &mut dyn Catalog, out: &mut Vec<u8>) -> Step {
        let Some((name, kinds)) = parse_info(data) else {
            return self.refuse(out, option, option_reply::ERR_INVALID, "the option is not well formed");
        };
        let export = match catalog.find(name, option == option::GO) {
            Ok(export) if kinds.contains(&info::BLOCK_SIZE) => export,
            Ok(export) => export.for_any_client(),
            Err(why) => {
                let (error, message) = why.reply();
                return self.refuse(out, option, error, message);
            }
        };
        put_infos(out, option, &export, self.style, &kinds);
        reply(out, option, option_reply::ACK, &[]);
        if option == option::GO { self.agree(export) } else { self.next_option() }
    }

    fn meta(&mut self, option: u32, data: &[u8], catalog: &mut dyn Catalog, out: &mut Vec<u8>) -> Step {
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            self.allocation = None;
        }
        if self.style < Style::Structured {
            let why = "metadata contexts need structured replies";
            return self.refuse(out, option, option_reply::ERR_INVALID, why);
        }
        let Some(query) = parse_meta(data) else {
            return self.refuse(out, option, option_reply::ERR_INVALID, "the option is not well formed");
        };
        let export = match catalog.find(query.export, false) {
            Ok(export) => export,
            Err(why) => {
                let (error, message) = why.reply();
                return self.refuse(out, option, error, message);
            }
        };
        // A list may ask for a whole namespace, or for everything by asking for nothing.
        let listed = !setting && (query.namespace || query.count == 0);
        if query.allocation || listed {
            let id = if setting { ALLOCATION_ID } else { 0 };
            let payload = [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
            reply(out, option, option_reply::META_CONTEXT, &payload);
            if setting {
                self.allocation = Some(export.name);
            }
        }
        self.ack(out, option)
    }
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(payload);
}

fn put_infos(out: &mut Vec<u8>, option: u32, export: &Described, style: Style, kinds: &[u16]) {
    let mut put = |kind: u16, parts: &[&[u8]]| {
        let payload = [&[&kind.to_be_bytes()[..]], parts].concat().concat();
        reply(out, option, option_reply::INFO, &payload);
    };
    put(info::EXPORT, &[&export.len.to_be_bytes(), &export.flags(style).to_be_bytes()]);
    // Stated whether asked for or not: a client that ignores it loses nothing.
    let preferred = export.block_len_preferred.max(PREFERRED_LEN).max(export.block_len_min);
    put(
        info::BLOCK_SIZE,
        &[&export.block_len_min.to_be_bytes(), &preferred.to_be_bytes(), &PAYLOAD_LEN_MAX.to_be_bytes()],
    );
    if kinds.contains(&info::NAME) {
        put(info::NAME, &[export.name.as_bytes()]);
    }
    if kinds.contains(&info::DESCRIPTION) && !export.description.is_empty() {
        put(info::DESCRIPTION, &[export.description.as_bytes()]);
    }
}

/// Name and wanted kinds of information of an INFO or GO option.
fn parse_info(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u16()?;
    let kinds = (0..count).map(|_| reader.u16()).collect::<Option<Vec<_>>>()?;
    reader.0.is_empty().then_some((name, kinds))
}

struct MetaQuery<'a> {
    export: &'a str,
    count: u32,
    /// `base:allocation` was named.
    allocation: bool,
    /// `base:` was named.
    namespace: bool,
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
fn parse_meta(data: &[u8]) -> Option<MetaQuery<'_>> {
    let mut reader = Reader(data);
    let export = reader.string()?;
    let count = reader.u32()?;
    let mut query = MetaQuery { export, count, allocation: false, namespace: false };
    // A count that lies ends at the end of the data, which is bounded.
    for _ in 0..count {
        match reader.string()? {
            BASE_ALLOCATION => query.allocation = true,
            "base:" => query.namespace = true,
            _ => {}
        }
    }
    reader.0.is_empty().then_some(query)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
