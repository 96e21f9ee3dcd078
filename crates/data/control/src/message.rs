//! tapdisk's message: 544 bytes of a C structure, native byte order.
//!
//! ```text
//!   0  u16 type
//!   2  u16 cookie      the minor number, or what the request carried
//!   8  union, 536 bytes, by type:
//!      pid       i32
//!      params    u32 flags, u32 devnum, u32 domid, char path[256], u32 prt_devnum,
//!                u16 req_timeout, char secondary[256]
//!      image     u64 sectors, u32 sector_size, u32 info
//!      response  i32 error (positive), char message[256]
//!      list      i32 count, i32 minor, i32 state, char path[256]
//!      stat      u16 type, u16 cookie, u64 length                      then `length` bytes of text
//!      blkif     u32 domid, devid, gref[8], order, proto, char pool[256], u32 port, poll_duration, poll_idle_threshold
//! ```
//!
//! RESUME carries `params` too: the header of the original also declares a structure of its own for it, which
//! neither its client nor its server uses.
//!
//! Both directions are pure functions on bytes. Strings end with NUL inside their field; requests must hold plain
//! UTF-8 without control characters, answers of a foreign process are taken as they come.

use std::fmt;

/// Bytes of a message.
pub const MESSAGE_LEN: usize = 544;
/// Bytes of a path or text field, its NUL included.
pub const PATH_LEN: usize = 256;

const UNION: usize = 8;

/// Flags of OPEN and RESUME.
pub mod flags {
    /// The image may be opened by others at the same time.
    pub const SHARED: u32 = 0x1;
    /// Reads only.
    pub const RDONLY: u32 = 0x2;
    /// Add a block cache.
    pub const ADD_CACHE: u32 = 0x4;
    /// Use a VHD index.
    pub const VHD_INDEX: u32 = 0x8;
    /// Keep a log of changed blocks; 256 bytes with its path follow the message.
    pub const ADD_LOG: u32 = 0x10;
    /// Add a local cache to the leaf.
    pub const ADD_LCACHE: u32 = 0x20;
    /// Share the open parent chain of another minor.
    pub const REUSE_PRT: u32 = 0x40;
    /// A second image, a mirror unless STANDBY is set.
    pub const SECONDARY: u32 = 0x80;
    /// Redirect writes to the second image once the first is full.
    pub const STANDBY: u32 = 0x100;
    /// Read the parents through the page cache.
    pub const NO_O_DIRECT: u32 = 0x200;
    /// The image is encrypted; a byte with the length of the key and the key follow the message.
    pub const OPEN_ENCRYPTED: u32 = 0x400;
}

macro_rules! kinds {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// What a message is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        #[allow(missing_docs, reason = "the names are the protocol's own")]
        pub enum MessageKind { $($name = $number,)* }

        impl MessageKind {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// From the number on the wire.
            pub const fn from_number(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }

            /// For people.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

kinds! {
    Error = 1, "error";
    RuntimeError = 2, "runtime error";
    Pid = 3, "pid";
    PidRsp = 4, "pid response";
    Attach = 5, "attach";
    AttachRsp = 6, "attach response";
    Open = 7, "open";
    OpenRsp = 8, "open response";
    Pause = 9, "pause";
    PauseRsp = 10, "pause response";
    Resume = 11, "resume";
    ResumeRsp = 12, "resume response";
    Close = 13, "close";
    CloseRsp = 14, "close response";
    Detach = 15, "detach";
    DetachRsp = 16, "detach response";
    ListMinors = 17, "list minors";
    ListMinorsRsp = 18, "list minors response";
    List = 19, "list";
    ListRsp = 20, "list response";
    Stats = 21, "stats";
    StatsRsp = 22, "stats response";
    ForceShutdown = 23, "force shutdown";
    XenblkifConnect = 24, "ring connect";
    XenblkifConnectRsp = 25, "ring connect response";
    XenblkifDisconnect = 26, "ring disconnect";
    XenblkifDisconnectRsp = 27, "ring disconnect response";
    DiskInfo = 28, "disk info";
    DiskInfoRsp = 29, "disk info response";
    Exit = 30, "exit";
}

/// Why bytes are not a message, or a message has no bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CodecError {
    /// No such type.
    UnknownKind(u16),
    /// A string without its end, or with bytes that no name has.
    Text(&'static str),
    /// A string longer than its field.
    Long(&'static str),
    /// The body is not the one this type of message carries.
    Body(MessageKind),
}

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKind(number) => write!(f, "message type {number} does not exist"),
            Self::Text(field) => write!(f, "the field '{field}' is not a plain string"),
            Self::Long(field) => write!(f, "the field '{field}' has room for {} bytes", PATH_LEN - 1),
            Self::Body(kind) => write!(f, "a '{}' message does not carry that", kind.text()),
        }
    }
}

impl std::error::Error for CodecError {}

/// OPEN and RESUME.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// See [`flags`].
    pub flags: u32,
    /// Minor number again.
    pub devnum: u32,
    /// Unused.
    pub domid: u32,
    /// `type:/path`; for RESUME empty to keep the image.
    pub path: String,
    /// Minor whose parent chain is to be shared.
    pub prt_devnum: u32,
    /// Seconds after which a request fails; 0 for the default.
    pub req_timeout: u16,
    /// Second image.
    pub secondary: String,
}

/// What a disk looks like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Length in sectors.
    pub sectors: u64,
    /// Bytes of a sector.
    pub sector_size: u32,
    /// Flags of the disk: bit 0 CD-ROM, 1 removable, 2 read only.
    pub info: u32,
}

/// Success or failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response {
    /// Positive error number; 0 is success.
    pub error: i32,
    /// Why, for people. The original leaves it empty.
    pub message: String,
}

/// One disk of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// Disks from this one on; 0 ends the list.
    pub count: i32,
    /// Minor number; -1 at the end.
    pub minor: i32,
    /// State bits.
    pub state: i32,
    /// `type:/path`; empty when nothing is open.
    pub path: String,
}

/// The head of a statistics text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Unused.
    pub kind: u16,
    /// Unused.
    pub cookie: u16,
    /// Bytes of text after the message.
    pub length: u64,
}

/// A ring shared with a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blkif {
    /// Domain of the guest.
    pub domid: u32,
    /// Device in the guest.
    pub devid: u32,
    /// Grants of the ring's pages.
    pub gref: [u32; 8],
    /// Pages of the ring, as a power of two.
    pub order: u32,
    /// Layout of the ring: native, 32 or 64 bit.
    pub proto: u32,
    /// Page pool.
    pub pool: String,
    /// Event channel.
    pub port: u32,
    /// Longest spin in microseconds; 0 is off.
    pub poll_duration: u32,
    /// Percentage of idle time above which spinning is allowed.
    pub poll_idle_threshold: u32,
}

/// What a message carries, by its type.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is described at its own type")]
pub enum Body {
    /// Nothing but type and cookie.
    None,
    /// A process number.
    Pid(i32),
    Params(Box<Params>),
    Image(Image),
    Response(Response),
    List(List),
    Stat(Stat),
    Blkif(Box<Blkif>),
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Type.
    pub kind: MessageKind,
    /// Minor number.
    pub cookie: u16,
    /// The rest.
    pub body: Body,
}

impl Message {
    /// A message of type and cookie only.
    pub const fn bare(kind: MessageKind, cookie: u16) -> Self {
        Self { kind, cookie, body: Body::None }
    }

    /// The bytes.
    ///
    /// # Errors
    /// A string does not fit its field or holds NUL.
    pub fn encode(&self) -> Result<[u8; MESSAGE_LEN], CodecError> {
        if !carries(self.kind, &self.body) {
            return Err(CodecError::Body(self.kind));
        }
        let mut out = Writer { bytes: [0; MESSAGE_LEN] };
        out.put(0, &(self.kind as u16).to_ne_bytes());
        out.put(2, &self.cookie.to_ne_bytes());
        match &self.body {
            Body::None => {}
            Body::Pid(pid) => out.put(UNION, &pid.to_ne_bytes()),
            Body::Params(params) => {
                out.u32(UNION, params.flags);
                out.u32(UNION + 4, params.devnum);
                out.u32(UNION + 8, params.domid);
                out.text(UNION + 12, &params.path, "path")?;
                out.u32(UNION + 268, params.prt_devnum);
                out.put(UNION + 272, &params.req_timeout.to_ne_bytes());
                out.text(UNION + 274, &params.secondary, "secondary")?;
            }
            Body::Image(image) => {
                out.put(UNION, &image.sectors.to_ne_bytes());
                out.u32(UNION + 8, image.sector_size);
                out.u32(UNION + 12, image.info);
            }
            Body::Response(response) => {
                out.put(UNION, &response.error.to_ne_bytes());
                out.text(UNION + 4, &response.message, "message")?;
            }
            Body::List(list) => {
                out.put(UNION, &list.count.to_ne_bytes());
                out.put(UNION + 4, &list.minor.to_ne_bytes());
                out.put(UNION + 8, &list.state.to_ne_bytes());
                out.text(UNION + 12, &list.path, "path")?;
            }
            Body::Stat(stat) => {
                out.put(UNION, &stat.kind.to_ne_bytes());
                out.put(UNION + 2, &stat.cookie.to_ne_bytes());
                out.put(UNION + 8, &stat.length.to_ne_bytes());
            }
            Body::Blkif(blkif) => {
                out.u32(UNION, blkif.domid);
                out.u32(UNION + 4, blkif.devid);
                for (index, gref) in blkif.gref.iter().enumerate() {
                    out.u32(UNION + 8 + index * 4, *gref);
                }
                out.u32(UNION + 40, blkif.order);
                out.u32(UNION + 44, blkif.proto);
                out.text(UNION + 48, &blkif.pool, "pool")?;
                out.u32(UNION + 304, blkif.port);
                out.u32(UNION + 308, blkif.poll_duration);
                out.u32(UNION + 312, blkif.poll_idle_threshold);
            }
        }
        Ok(out.bytes)
    }

    /// From the bytes of a peer.
    ///
    /// # Errors
    /// The type does not exist, or a string of a request is not a plain one.
    pub fn decode(bytes: &[u8; MESSAGE_LEN]) -> Result<Self, CodecError> {
        use MessageKind as K;
        let from = Reader { bytes };
        let number = from.u16(0);
        let kind = MessageKind::from_number(number).ok_or(CodecError::UnknownKind(number))?;
        let body = match kind {
            K::Pid
            | K::Attach
            | K::Pause
            | K::Close
            | K::Detach
            | K::ListMinors
            | K::ListMinorsRsp
            | K::List
            | K::Stats
            | K::ForceShutdown
            | K::DiskInfo
            | K::Exit => Body::None,
            K::PidRsp => Body::Pid(from.i32(UNION)),
            K::Open | K::Resume => Body::Params(Box::new(Params {
                flags: from.u32(UNION),
                devnum: from.u32(UNION + 4),
                domid: from.u32(UNION + 8),
                path: from.strict(UNION + 12, "path")?,
                prt_devnum: from.u32(UNION + 268),
                req_timeout: from.u16(UNION + 272),
                secondary: from.strict(UNION + 274, "secondary")?,
            })),
            K::OpenRsp | K::DiskInfoRsp => Body::Image(Image {
                sectors: from.u64(UNION),
                sector_size: from.u32(UNION + 8),
                info: from.u32(UNION + 12),
            }),
            K::Error
            | K::RuntimeError
            | K::AttachRsp
            | K::PauseRsp
            | K::ResumeRsp
            | K::CloseRsp
            | K::DetachRsp
            | K::XenblkifConnectRsp
            | K::XenblkifDisconnectRsp => {
                Body::Response(Response { error: from.i32(UNION), message: from.lossy(UNION + 4) })
            }
            K::ListRsp => Body::List(List {
                count: from.i32(UNION),
                minor: from.i32(UNION + 4),
                state: from.i32(UNION + 8),
                path: from.lossy(UNION + 12),
            }),
            K::StatsRsp => Body::Stat(Stat {
                kind: from.u16(UNION),
                cookie: from.u16(UNION + 2),
                length: from.u64(UNION + 8),
            }),
            K::XenblkifConnect | K::XenblkifDisconnect => Body::Blkif(Box::new(Blkif {
                domid: from.u32(UNION),
                devid: from.u32(UNION + 4),
                gref: std::array::from_fn(|index| from.u32(UNION + 8 + index * 4)),
                order: from.u32(UNION + 40),
                proto: from.u32(UNION + 44),
                pool: from.strict(UNION + 48, "pool")?,
                port: from.u32(UNION + 304),
                poll_duration: from.u32(UNION + 308),
                poll_idle_threshold: from.u32(UNION + 312),
            })),
        };
        Ok(Self { kind, cookie: from.u16(2), body })
    }
}

/// Whether a type of message carries such a body. Anything may go without one: the union is zeroes then.
fn carries(kind: MessageKind, body: &Body) -> bool {
    use MessageKind as K;
    match body {
        Body::None => true,
        Body::Pid(_) => kind == K::PidRsp,
        Body::Params(_) => matches!(kind, K::Open | K::Resume),
        Body::Image(_) => matches!(kind, K::OpenRsp | K::DiskInfoRsp),
        Body::List(_) => kind == K::ListRsp,
        Body::Stat(_) => kind == K::StatsRsp,
        Body::Blkif(_) => matches!(kind, K::XenblkifConnect | K::XenblkifDisconnect),
        Body::Response(_) => matches!(
            kind,
            K::Error
                | K::RuntimeError
                | K::AttachRsp
                | K::PauseRsp
                | K::ResumeRsp
                | K::CloseRsp
                | K::DetachRsp
                | K::XenblkifConnectRsp
                | K::XenblkifDisconnectRsp
        ),
    }
}

/// The 256 bytes that follow OPEN or RESUME with [`flags::ADD_LOG`].
///
/// # Errors
/// The path does not fit or holds NUL.
pub fn encode_log_path(path: &str) -> Result<[u8; PATH_LEN], CodecError> {
    let mut field = [0; PATH_LEN];
    place(&mut field, path, "log path")?;
    Ok(field)
}

/// Reads them.
///
/// # Errors
/// They are not a plain string.
pub fn decode_log_path(bytes: &[u8; PATH_LEN]) -> Result<String, CodecError> {
    plain(bytes, "log path")
}

/// Whether a key of that many bytes may follow OPEN with [`flags::OPEN_ENCRYPTED`]: AES-XTS of 128 or 256 bits.
pub const fn key_len_is_valid(len: u8) -> bool {
    matches!(len, 32 | 64)
}

fn place(field: &mut [u8], text: &str, name: &'static str) -> Result<(), CodecError> {
    if text.len() >= field.len() {
        return Err(CodecError::Long(name));
    }
    if text.bytes().any(|byte| byte == 0) {
        return Err(CodecError::Text(name));
    }
    field[..text.len()].copy_from_slice(text.as_bytes());
    Ok(())
}

/// The string in a field up to its NUL.
fn until_nul(field: &[u8]) -> Option<&[u8]> {
    field.iter().position(|byte| *byte == 0).map(|end| &field[..end])
}

fn plain(field: &[u8], name: &'static str) -> Result<String, CodecError> {
    let text =
        until_nul(field).and_then(|text| std::str::from_utf8(text).ok()).ok_or(CodecError::Text(name))?;
    if text.chars().any(char::is_control) {
        return Err(CodecError::Text(name));
    }
    Ok(text.to_owned())
}

struct Writer {
    bytes: [u8; MESSAGE_LEN],
}

impl Writer {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_ne_bytes());
    }

    fn text(&mut self, at: usize, text: &str, name: &'static str) -> Result<(), CodecError> {
        place(&mut self.bytes[at..at + PATH_LEN], text, name)
    }
}

/// All offsets are constants inside the message.
struct Reader<'a> {
    bytes: &'a [u8; MESSAGE_LEN],
}

impl Reader<'_> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|index| self.bytes[at + index])
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.array(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    fn i32(&self, at: usize) -> i32 {
        i32::from_ne_bytes(self.array(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }

    fn strict(&self, at: usize, name: &'static str) -> Result<String, CodecError> {
        plain(&self.bytes[at..at + PATH_LEN], name)
    }

    fn lossy(&self, at: usize) -> String {
        let field = &self.bytes[at..at + PATH_LEN];
        String::from_utf8_lossy(until_nul(field).unwrap_or(field)).into_owned()
    }
}

#[cfg(test)]
mod tests;
