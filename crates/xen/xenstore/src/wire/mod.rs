//! Messages of the xenstore protocol, for both sides (`xen/include/public/io/xs_wire.h`, `docs/misc/xenstore.txt`).
//!
//! ```text
//!   0      4        8      12     16
//!   type   request  trans- length payload: strings that end with a NUL each, or a value to the end
//!   u32    id u32   action u32    at most 4096 bytes, both ways
//! ```
//!
//! Numbers are in the host's order. [`Decoder`] cuts a stream into messages, [`Request`] reads and writes what they
//! ask, [`reply`] what they answer, [`Errno`] names refusals.

mod errno;
mod permission;
pub mod reply;
mod request;
mod strings;

pub use errno::Errno;
pub use permission::{Access, PERMISSIONS_MAX, Permission};
pub use request::Request;
pub use strings::{Pieces, decimal};

use std::fmt;

/// Bytes of a header: type, request, transaction, length; four `u32` in the host's order.
pub const HEADER_LEN: usize = 16;
/// Longest payload in bytes.
pub const PAYLOAD_MAX: usize = 4096;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal $text:literal,)*) => {
        /// What a message is (`enum xsd_sockmsg_type`). 20 was RESTRICT and is no more.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum MessageKind { $($(#[$doc])* $name = $number,)* }

        impl MessageKind {
            /// All of them, by number.
            pub const ALL: &'static [MessageKind] = &[$(MessageKind::$name,)*];

            /// The kind of this number, if there is one.
            pub const fn from_number(number: u32) -> Option<MessageKind> {
                match number { $($number => Some(MessageKind::$name),)* _ => None }
            }

            /// As the documentation writes it.
            pub const fn name(self) -> &'static str {
                match self { $(MessageKind::$name => $text,)* }
            }
        }
    };
}

kinds! {
    /// Something about the daemon itself.
    Control = 0 "CONTROL",
    /// The names of a node's children.
    Directory = 1 "DIRECTORY",
    /// A node's value.
    Read = 2 "READ",
    /// The domains that may read and write a node.
    GetPerms = 3 "GET_PERMS",
    /// Reports changes to a node and all below it.
    Watch = 4 "WATCH",
    /// Ends a watch.
    Unwatch = 5 "UNWATCH",
    /// Begins a transaction.
    TransactionStart = 6 "TRANSACTION_START",
    /// Ends one.
    TransactionEnd = 7 "TRANSACTION_END",
    /// A domain has a ring from now on.
    Introduce = 8 "INTRODUCE",
    /// A domain has gone.
    Release = 9 "RELEASE",
    /// Where a domain's nodes are.
    GetDomainPath = 10 "GET_DOMAIN_PATH",
    /// Sets a value.
    Write = 11 "WRITE",
    /// Makes a node.
    Mkdir = 12 "MKDIR",
    /// Removes a node and all below it.
    Rm = 13 "RM",
    /// Sets the domains that may read and write a node.
    SetPerms = 14 "SET_PERMS",
    /// Something below a watch changed; only from the daemon.
    WatchEvent = 15 "WATCH_EVENT",
    /// A refusal; only from the daemon.
    Error = 16 "ERROR",
    /// Whether a domain has a ring.
    IsDomainIntroduced = 17 "IS_DOMAIN_INTRODUCED",
    /// A domain goes on after it was suspended.
    Resume = 18 "RESUME",
    /// A domain may do what another may.
    SetTarget = 19 "SET_TARGET",
    /// Ends all watches and transactions of the asker.
    ResetWatches = 21 "RESET_WATCHES",
    /// A part of a list of children that is too long for one message.
    DirectoryPart = 22 "DIRECTORY_PART",
    /// What the daemon offers a domain.
    GetFeature = 23 "GET_FEATURE",
    /// Sets the features that it offers.
    SetFeature = 24 "SET_FEATURE",
    /// A bound of a domain.
    GetQuota = 25 "GET_QUOTA",
    /// Sets one.
    SetQuota = 26 "SET_QUOTA",
}

/// The 16 bytes before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of a [`MessageKind`]; one that is not known is the reader's to refuse.
    pub kind: u32,
    /// Comes back in the answer; 0 in events.
    pub request: u32,
    /// Transaction, 0 outside of one.
    pub transaction: u32,
    /// Bytes of the payload.
    pub len: u32,
}

impl Header {
    /// On the wire.
    pub fn encode(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        for (place, number) in
            bytes.chunks_exact_mut(4).zip([self.kind, self.request, self.transaction, self.len])
        {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    /// From the wire. Any length passes: [`Decoder`] judges it.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let number = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { kind: number(0), request: number(4), transaction: number(8), len: number(12) }
    }
}

/// A message that came, its payload still in the decoder's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its header.
    pub header: Header,
    /// Its payload, `header.len` bytes.
    pub payload: &'a [u8],
}

impl Message<'_> {
    /// Its kind, if it is a known one.
    pub fn kind(&self) -> Option<MessageKind> {
        MessageKind::from_number(self.header.kind)
    }
}

/// Why a stream cannot be read on, or a message not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// A payload is longer than [`PAYLOAD_MAX`]. Where it came from, the connection is of no more use.
    TooLong {
        /// Bytes it would have.
        len: usize,
    },
    /// Strings that do not end, or too few or too many of them.
    Malformed(MessageKind),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { len } => {
                write!(f, "a xenstore message of {len} bytes: {PAYLOAD_MAX} are allowed")
            }
            Self::Malformed(kind) => write!(f, "a malformed xenstore message ({})", kind.name()),
        }
    }
}

impl std::error::Error for WireError {}

/// Appends a message to what is to be sent.
///
/// # Errors
/// The payload is too long; nothing was appended.
pub fn frame(
    kind: MessageKind,
    request: u32,
    transaction: u32,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), WireError> {
    if payload.len() > PAYLOAD_MAX {
        return Err(WireError::TooLong { len: payload.len() });
    }
    let header = Header { kind: kind as u32, request, transaction, len: payload.len() as u32 };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(payload);
    Ok(())
}

/// Cuts a stream of bytes into messages, in whatever pieces they come.
///
/// After [`Decoder::next`] has said `None`, at most one unfinished message is kept (4111 bytes), so what one peer can
/// make us remember is bounded by what is pushed at once.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Bytes before this one were given out.
    at: usize,
}

impl Decoder {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes that came.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.at > 0 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message.
    ///
    /// # Errors
    /// A header announces more than [`PAYLOAD_MAX`]: the stream cannot be trusted any more, and each further call says
    /// the same.
    #[allow(clippy::should_implement_trait, reason = "the message borrows from the decoder")]
    pub fn next(&mut self) -> Result<Option<Message<'_>>, WireError> {
        let rest = &self.bytes[self.at..];
        let Some(header) = rest.first_chunk::<HEADER_LEN>().map(Header::decode) else { return Ok(None) };
        let len = header.len as usize;
        if len > PAYLOAD_MAX {
            return Err(WireError::TooLong { len });
        }
        if rest.len() < HEADER_LEN + len {
            return Ok(None);
        }
        let from = self.at + HEADER_LEN;
        self.at = from + len;
        Ok(Some(Message { header, payload: &self.bytes[from..from + len] }))
    }

    /// What came and was not given out: for handing a connection over to another process.
    pub fn pending(&self) -> &[u8] {
        &self.bytes[self.at..]
    }
}

#[cfg(test)]
mod tests;
