//! A blocking client: the handshake that any client needs, and one request at a time. For tests, tools and the load
//! generator; a storage on the ring of a data thread begins with the same handshake.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::socket::{prepare, read_exact, write_all};
use crate::tls::{Status, TlsClient};
use crate::wire::{
    BASE_ALLOCATION, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_LEN_MAX, Reader, ReplyHeader,
    RequestHeader, Style, chunk, command, command_flag, error, handshake_flag, info, option, option_reply,
    parse_reply, put_request,
};

/// The longest reply to an option that is read.
const OPTION_REPLY_MAX: u32 = 64 << 10;

/// Chunks of one reply: one for each sector of the longest read.
const CHUNKS_MAX: usize = PAYLOAD_LEN_MAX as usize / 512;
/// Extents in one reply: what fits the longest payload of one chunk that is read, in the smaller kind.
const EXTENTS_MAX: usize = 2 * PAYLOAD_LEN_MAX as usize / 8;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

/// What a client asks for; the server may give less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The export; empty for the default one.
    pub export: String,
    /// The best style wanted.
    pub style: Style,
    /// Whether `base:allocation` is wanted.
    pub allocation: bool,
}

impl ClientOptions {
    /// Extended headers and block status, as far as the server has them.
    pub fn all(export: impl Into<String>) -> Self {
        Self { export: export.into(), style: Style::Extended, allocation: true }
    }
}

/// Why something did not work.
#[derive(Debug)]
pub enum ClientError {
    /// The connection.
    Io(io::Error),
    /// The server does not keep to the protocol.
    Protocol(&'static str),
    /// The server refused an option of the handshake.
    Option {
        /// Which.
        option: u32,
        /// One of [`option_reply`].
        reply: u32,
        /// What it said about it.
        message: String,
    },
    /// TLS did not come to be, or ended badly.
    Tls(String),
    /// The server answered a request with an error.
    Request {
        /// One of [`error`].
        error: u32,
        /// What it said about it; empty with simple replies.
        message: String,
    },
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the connection to the NBD server failed: {error}"),
            Self::Protocol(what) => write!(f, "the NBD server does not keep to the protocol: {what}"),
            Self::Option { option, reply, message } => {
                write!(f, "the NBD server refused option {option} with {reply:#x}: {message}")
            }
            Self::Tls(why) => write!(f, "TLS with the NBD server failed: {why}"),
            Self::Request { error, message } => {
                write!(f, "the NBD server answered with error {error}: {message}")
            }
        }
    }
}

impl std::error::Error for ClientError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

type Result<T> = std::result::Result<T, ClientError>;

/// What the server says of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportInfo {
    /// Bytes.
    pub len: u64,
    /// [`crate::wire::transmission_flag`]s.
    pub flags: u16,
    /// Smallest, preferred and largest block, in bytes, where the server states them.
    pub block_lens: Option<(u32, u32, u32)>,
    /// The name the export really has.
    pub name: Option<String>,
    /// For people.
    pub description: Option<String>,
}

/// An extent of `base:allocation`: length in bytes and [`crate::wire::allocation`] flags.
pub type Allocation = (u64, u64);

/// The answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The first error, and what was said about it.
    pub error: Option<(u32, String)>,
    /// Data with its offset, in the order of arrival.
    pub data: Vec<(u64, Vec<u8>)>,
    /// Extents of the one context that was chosen.
    pub extents: Vec<Allocation>,
}

/// A connection to an export.
#[derive(Debug)]
pub struct Client {
    fd: OwnedFd,
    within: Duration,
    cookie: u64,
    style: Style,
    allocation: Option<u32>,
    export: ExportInfo,
    tls: Option<Status>,
}

struct OptionReply {
    kind: u32,
    payload: Vec<u8>,
}

/// A connection whose handshake is in progress.
#[derive(Debug)]
pub struct Haggle {
    fd: OwnedFd,
    deadline: Instant,
    /// What becomes of TLS, if it was begun.
    tls: Option<Status>,
}

impl Haggle {
    /// Connects and exchanges greetings; everything up to the export must happen `within`.
    pub fn begin(address: &Address, within: Duration) -> Result<Self> {
        let deadline = Instant::now() + within;
        let fd: OwnedFd = match address {
            Address::Unix(path) => UnixStream::connect(path)?.into(),
            Address::Tcp(address) => TcpStream::connect_timeout(address, within)?.into(),
        };
        prepare(fd.as_fd(), matches!(address, Address::Unix(_)));
        Self { fd, deadline, tls: None }.greet()
    }

    /// The same on a socket that is connected already.
    #[doc(hidden)]
    pub fn over(fd: OwnedFd, within: Duration) -> Result<Self> {
        Self { fd, deadline: Instant::now() + within, tls: None }.greet()
    }

    fn greet(self) -> Result<Self> {
        let haggle = self;
        let mut greeting = [0; 18];
        haggle.read(&mut greeting)?;
        let mut reader = Reader(&greeting);
        if (reader.u64(), reader.u64()) != (Some(MAGIC), Some(OPTION_MAGIC)) {
            return Err(ClientError::Protocol("it does not speak the newstyle handshake"));
        }
        let flags = reader.u16().unwrap_or(0);
        if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(ClientError::Protocol("it does not speak the fixed newstyle handshake"));
        }
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        haggle.write(&u32::from(flags & known).to_be_bytes())?;
        Ok(haggle)
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        read_exact(self.fd.as_fd(), into, self.deadline).map_err(|error| self.explain(error))
    }

    /// With TLS between, it knows best why the socket ended.
    fn explain(&self, error: io::Error) -> ClientError {
        match self.tls.as_ref().and_then(Status::failure) {
            Some(why) => ClientError::Tls(why),
            None => error.into(),
        }
    }

    /// Begins TLS: what was said before counts no more.
    pub fn start_tls(self, tls: &TlsClient) -> Result<Self> {
        match self.ask(option::STARTTLS, &[]) {
            Ok(_) => {}
            Err(ClientError::Option { message, .. }) => {
                let said = if message.is_empty() { String::new() } else { format!(": {message}") };
                return Err(ClientError::Tls(format!("the server offers no TLS{said}")));
            }
            Err(error) => return Err(error),
        }
        let (fd, status) = tls.start(self.fd, self.deadline)?;
        Ok(Self { fd, deadline: self.deadline, tls: Some(status) })
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        write_all(self.fd.as_fd(), from, self.deadline).map_err(|error| self.explain(error))
    }

    fn send_option(&self, option: u32, data: &[u8]) -> Result<()> {
        let mut bytes = Vec::with_capacity(16 + data.len());
        bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.write(&bytes)
    }

    fn option_reply(&self, option: u32) -> Result<OptionReply> {
        let mut header = [0; 20];
        self.read(&mut header)?;
        let mut reader = Reader(&header);
        let (magic, of) = (reader.u64(), reader.u32());
        let (kind, len) = (reader.u32().unwrap_or(0), reader.u32().unwrap_or(u32::MAX));
        if magic != Some(OPTION_REPLY_MAGIC) || of != Some(option) || len > OPTION_REPLY_MAX {
            return Err(ClientError::Protocol("what should answer an option does not"));
        }
        let mut payload = vec![0; len as usize];
        self.read(&mut payload)?;
        if kind & option_reply::ERROR != 0 {
            let message = String::from_utf8_lossy(&payload).into_owned();
            return Err(ClientError::Option { option, reply: kind, message });
        }
        Ok(OptionReply { kind, payload })
    }

    /// Sends an option and collects what is said before the acknowledgement.
    fn ask(&self, option: u32, data: &[u8]) -> Result<Vec<OptionReply>> {
        self.send_option(option, data)?;
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option)?;
            if reply.kind == option_reply::ACK {
                return Ok(replies);
            }
            if replies.len() >= 4096 {
                return Err(ClientError::Protocol("an answer without end"));
            }
            replies.push(reply);
        }
    }

    /// Whether the server takes this option, which carries no data.
    fn agree(&self, option: u32) -> Result<bool> {
        match self.ask(option, &[]) {
            Ok(_) => Ok(true),
            Err(ClientError::Option { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The names and descriptions of all exports.
    pub fn list(&self) -> Result<Vec<(String, String)>> {
        let mut list = Vec::new();
        for reply in self.ask(option::LIST, &[])? {
            let mut reader = Reader(&reply.payload);
            let name = reader.string().ok_or(ClientError::Protocol("a list without names"))?;
            list.push((name.to_string(), String::from_utf8_lossy(reader.0).into_owned()));
        }
        Ok(list)
    }

    /// What the server says of an export, without using it.
    pub fn info(&self, export: &str) -> Result<ExportInfo> {
        self.describe(option::INFO, export)
    }

    fn describe(&self, option: u32, export: &str) -> Result<ExportInfo> {
        let mut data = with_len(export);
        data.extend_from_slice(&3u16.to_be_bytes());
        for kind in [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE] {
            data.extend_from_slice(&kind.to_be_bytes());
        }
        let mut found = ExportInfo::default();
        for reply in self.ask(option, &data)? {
            parse_info(&reply.payload, &mut found)
                .ok_or(ClientError::Protocol("information that is not well formed"))?;
        }
        if found.flags == 0 {
            return Err(ClientError::Protocol("no size and flags of the export"));
        }
        Ok(found)
    }

    /// Ends the handshake without an export.
    pub fn abort(self) -> Result<()> {
        self.ask(option::ABORT, &[]).map(drop)
    }

    /// Negotiates what `options` name and enters the export. Requests then have `within` each.
    pub fn go(self, options: &ClientOptions, within: Duration) -> Result<Client> {
        let mut style = Style::Simple;
        if options.style == Style::Extended && self.agree(option::EXTENDED_HEADERS)? {
            style = Style::Extended;
        } else if options.style >= Style::Structured && self.agree(option::STRUCTURED_REPLY)? {
            style = Style::Structured;
        }
        let mut allocation = None;
        if options.allocation && style >= Style::Structured {
            let mut data = with_len(&options.export);
            data.extend_from_slice(&1u32.to_be_bytes());
            data.extend_from_slice(&with_len(BASE_ALLOCATION));
            match self.ask(option::SET_META_CONTEXT, &data) {
                Ok(replies) => allocation = replies.first().and_then(|reply| Reader(&reply.payload).u32()),
                Err(ClientError::Option { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let export = self.describe(option::GO, &options.export)?;
        Ok(Client { fd: self.fd, within, cookie: 0, style, allocation, export, tls: self.tls })
    }
}

fn with_len(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn parse_info(payload: &[u8], found: &mut ExportInfo) -> Option<()> {
    let mut reader = Reader(payload);
    match reader.u16()? {
        info::EXPORT => (found.len, found.flags) = (reader.u64()?, reader.u16()?),
        info::BLOCK_SIZE => found.block_lens = Some((reader.u32()?, reader.u32()?, reader.u32()?)),
        info::NAME => found.name = Some(String::from_utf8_lossy(reader.0).into_owned()),
        info::DESCRIPTION => found.description = Some(String::from_utf8_lossy(reader.0).into_owned()),
        _ => {}
    }
    Some(())
}

impl Client {
    /// Connects to an export; the handshake and each request may take `within`.
    pub fn connect(address: &Address, options: &ClientOptions, within: Duration) -> Result<Self> {
        Haggle::begin(address, within)?.go(options, within)
    }

    /// What the server said of the export.
    pub const fn export(&self) -> &ExportInfo {
        &self.export
    }

    /// The negotiated style.
    pub const fn style(&self) -> Style {
        self.style
    }

    /// The number under which extents of `base:allocation` come, if they can be asked for.
    pub const fn allocation_id(&self) -> Option<u32> {
        self.allocation
    }

    /// What becomes of TLS, if there is any.
    pub const fn tls(&self) -> Option<&Status> {
        self.tls.as_ref()
    }

    /// The socket, for a caller that speaks the protocol itself from here on.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.within
    }

    /// Sends a request without waiting for its reply; returns its cookie.
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> Result<u64> {
        self.cookie += 1;
        let payload_flag = if self.style == Style::Extended && command == command::WRITE {
            command_flag::PAYLOAD_LEN
        } else {
            0
        };
        let header = RequestHeader { flags: flags | payload_flag, command, cookie: self.cookie, offset, len };
        let mut bytes = Vec::with_capacity(32 + payload.len());
        put_request(self.style, &header, &mut bytes);
        bytes.extend_from_slice(payload);
        write_all(self.fd.as_fd(), &bytes, self.deadline())?;
        Ok(self.cookie)
    }

    fn read_into(&self, into: &mut [u8]) -> Result<()> {
        Ok(read_exact(self.fd.as_fd(), into, self.deadline())?)
    }

    /// Reads one reply header, and for a simple reply to a read that went well the data. Returns the cookie and
    /// whether the reply is complete.
    pub fn receive(&mut self, read_len: u64, reply: &mut Reply) -> Result<(u64, bool)> {
        let mut header = [0; 32];
        let mut have = 0;
        let parsed = loop {
            let wrong = |_| ClientError::Protocol("what should be a reply is none");
            if let Some((parsed, _)) = parse_reply(self.style, &header[..have]).map_err(wrong)? {
                break parsed;
            }
            // Headers differ in length by their first word, so none is read past.
            let step = if have < 16 { 16 - have } else { 4 };
            let into = header.get_mut(have..have + step);
            let into = into.ok_or(ClientError::Protocol("a reply header without end"))?;
            read_exact(self.fd.as_fd(), into, Instant::now() + self.within)?;
            have += step;
        };
        match parsed {
            ReplyHeader::Simple { error: error::NONE, cookie } => {
                if read_len > 0 {
                    let mut data = vec![0; bounded(read_len)?];
                    self.read_into(&mut data)?;
                    reply.data.push((0, data));
                }
                Ok((cookie, true))
            }
            ReplyHeader::Simple { error, cookie } => {
                reply.error.get_or_insert((error, String::new()));
                Ok((cookie, true))
            }
            ReplyHeader::Chunk { flags, kind, cookie, len, .. } => {
                let mut payload = vec![0; bounded(len)?];
                self.read_into(&mut payload)?;
                take_chunk(kind, &payload, reply)
                    .ok_or(ClientError::Protocol("a chunk that is not well formed"))?;
                Ok((cookie, flags & chunk::DONE != 0))
            }
        }
    }

    /// Sends a request and waits for its whole reply. No other may be in flight.
    pub fn call(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> Result<Reply> {
        let cookie = self.send(command, flags, offset, len, payload)?;
        let mut reply = Reply::default();
        let read_len = if command == command::READ { len } else { 0 };
        let mut chunks = 0;
        loop {
            let (of, done) = self.receive(read_len, &mut reply)?;
            if of != cookie {
                return Err(ClientError::Protocol("a reply to a request that was not made"));
            }
            chunks += 1;
            // A few bytes announce a hole of megabytes: what a reply may hold follows from the request, not from it.
            let held: u64 = reply.data.iter().map(|(_, data)| data.len() as u64).sum();
            if held > read_len {
                return Err(ClientError::Protocol("more data than was requested"));
            }
            if chunks > CHUNKS_MAX || reply.extents.len() > EXTENTS_MAX {
                return Err(ClientError::Protocol("a reply without end"));
            }
            if done {
                return Ok(reply);
            }
        }
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> Result<Reply> {
        let mut reply = self.call(command, flags, offset, len, payload)?;
        match reply.error.take() {
            Some((error, message)) => Err(ClientError::Request { error, message }),
            None => Ok(reply),
        }
    }

    /// Reads `len` bytes.
    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let reply = self.ask(command::READ, 0, offset, len, &[])?;
        let mut out = vec![0; bounded(len)?];
        let simple = self.style == Style::Simple;
        for (at, data) in reply.data {
            let start = if simple { 0 } else { at.wrapping_sub(offset) };
            let start = usize::try_from(start).unwrap_or(usize::MAX);
            let place = start.checked_add(data.len()).and_then(|end| out.get_mut(start..end));
            place.ok_or(ClientError::Protocol("data that was not asked for"))?.copy_from_slice(&data);
        }
        Ok(out)
    }

    /// Writes; with `durable` it is on stable storage when this returns.
    pub fn write(&mut self, offset: u64, data: &[u8], durable: bool) -> Result<()> {
        let flags = if durable { command_flag::FUA } else { 0 };
        self.ask(command::WRITE, flags, offset, data.len() as u64, data).map(drop)
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) -> Result<()> {
        self.ask(command::FLUSH, 0, 0, 0, &[]).map(drop)
    }

    /// The content is not needed any more.
    pub fn trim(&mut self, offset: u64, len: u64) -> Result<()> {
        self.ask(command::TRIM, 0, offset, len, &[]).map(drop)
    }

    /// Makes the range read as zero; `flags` as the protocol has them.
    pub fn zero(&mut self, offset: u64, len: u64, flags: u16) -> Result<()> {
        self.ask(command::WRITE_ZEROES, flags, offset, len, &[]).map(drop)
    }

    /// What is allocated, from `offset` on, as far as the server tells in one answer.
    pub fn allocation(&mut self, offset: u64, len: u64) -> Result<Vec<Allocation>> {
        Ok(self.ask(command::BLOCK_STATUS, 0, offset, len, &[])?.extents)
    }

    /// Sends the disconnect request and waits until the server has closed the connection.
    pub fn disconnect(mut self) -> Result<()> {
        self.send(command::DISC, 0, 0, 0, &[])?;
        match read_exact(self.fd.as_fd(), &mut [0], self.deadline()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => Err(ClientError::Protocol("something came after the goodbye")),
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn bounded(len: u64) -> Result<usize> {
    match usize::try_from(len) {
        Ok(len) if len <= 2 * PAYLOAD_LEN_MAX as usize => Ok(len),
        _ => Err(ClientError::Protocol("more data than was requested")),
    }
}

/// Adds what a chunk says to `reply`; `None` if it is not well formed.
fn take_chunk(kind: u16, payload: &[u8], reply: &mut Reply) -> Option<()> {
    let mut reader = Reader(payload);
    match kind {
        chunk::NONE => {}
        chunk::OFFSET_DATA => {
            let at = reader.u64()?;
            reply.data.push((at, reader.0.to_vec()));
        }
        chunk::OFFSET_HOLE => {
            let (at, len) = (reader.u64()?, reader.u32()?);
            reply.data.push((at, vec![0; bounded(u64::from(len)).ok()?]));
        }
        chunk::BLOCK_STATUS => {
            reader.u32()?;
            while !reader.0.is_empty() {
                reply.extents.push((u64::from(reader.u32()?), u64::from(reader.u32()?)));
            }
        }
        chunk::BLOCK_STATUS_EXT => {
            reader.u32()?;
            for _ in 0..reader.u32()? {
                reply.extents.push((reader.u64()?, reader.u64()?));
            }
        }
        kind if kind & chunk::ERROR_BIT != 0 => {
            let (error, len) = (reader.u32()?, reader.u16()?);
            let message = String::from_utf8_lossy(reader.bytes(usize::from(len))?).into_owned();
            reply.error.get_or_insert((error, message));
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_chunk_of_a_server_makes_the_client_panic(kind: u16, payload: Vec<u8>) {
            let mut reply = Reply::default();
            let _ = take_chunk(kind, &payload, &mut reply);
            let _ = take_chunk(kind & 7, &payload, &mut reply);
            let _ = parse_info(&payload, &mut ExportInfo::default());
        }
    }
}
