//! Requests and responses in the layouts of the two x86 ABIs.
//!
//! Both are little-endian. The 64-bit layout aligns 64-bit numbers to eight bytes, the 32-bit one to four: that moves
//! everything behind the first four bytes of a request by four, and nothing else.
//!
//! ```text
//!                     x86_64-abi, 112 bytes      x86_32-abi, 108 bytes
//!   any      op u8      0                          0
//!   direct   segments   1 (u8)   24 + 8 n          1 (u8)   20 + 8 n
//!            id u64     8                          4
//!            sector     16                         12
//!   discard  flag u8    1                          1
//!            sectors    24                         20
//!   indirect op u8      1                          1
//!            segments   2 (u16)                    2 (u16)
//!            pages      28 + 4 n                   24 + 4 n
//!   response id 0, op 8, status i16 10; 16 bytes   the same; 12 bytes
//! ```

use std::fmt;

use crate::domain::GrantRef;

/// Which layout a guest's ring has (`protocol` in xenstore).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Abi {
    /// `x86_32-abi`: 108 bytes a request.
    X86_32,
    /// `x86_64-abi`, and the native one here: 112 bytes a request.
    X86_64,
}

impl Abi {
    /// What `protocol` in the front end's directory means; `None` for a layout that is not served (`arm-abi` is
    /// another processor's). A front end without the node means what its toolstack says it means: for `tapdisk` that is
    /// [`Abi::X86_32`], for Linux' back end the native one.
    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "x86_32-abi" => Some(Self::X86_32),
            "x86_64-abi" => Some(Self::X86_64),
            _ => None,
        }
    }

    /// The word for `protocol`.
    pub fn word(self) -> &'static str {
        match self {
            Self::X86_32 => "x86_32-abi",
            Self::X86_64 => "x86_64-abi",
        }
    }

    /// Bytes of a request, and so of a slot of a ring.
    pub const fn request_len(self) -> usize {
        match self {
            Self::X86_32 => 108,
            Self::X86_64 => REQUEST_LEN_MAX,
        }
    }

    /// Bytes of a response.
    pub const fn response_len(self) -> usize {
        match self {
            Self::X86_32 => 12,
            Self::X86_64 => RESPONSE_LEN_MAX,
        }
    }

    /// Bytes from the start of a request to its `id`; everything else follows in both layouts alike.
    const fn id_at(self) -> usize {
        match self {
            Self::X86_32 => 4,
            Self::X86_64 => 8,
        }
    }
}

/// Bytes of the longer request.
pub const REQUEST_LEN_MAX: usize = 112;
/// Bytes of the longer response.
pub const RESPONSE_LEN_MAX: usize = 16;
/// Segments of a direct request, at most.
pub const DIRECT_SEGMENTS_MAX: usize = 11;
/// Pages of segments of an indirect request, at most.
pub const INDIRECT_PAGES_MAX: usize = 8;
/// Segments in such a page.
pub const INDIRECT_PER_PAGE: usize = 512;
/// Segments of an indirect request, at most.
pub const INDIRECT_SEGMENTS_MAX: usize = INDIRECT_PAGES_MAX * INDIRECT_PER_PAGE;
/// Bytes of a segment, in a request and in a page of segments.
pub const SEGMENT_LEN: usize = 8;
/// `BLKIF_DISCARD_SECURE`.
pub const DISCARD_SECURE: u8 = 1;

/// `BLKIF_OP_*`.
#[allow(missing_docs, reason = "the names of the specification")]
pub mod op {
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const WRITE_BARRIER: u8 = 2;
    pub const FLUSH_DISKCACHE: u8 = 3;
    pub const DISCARD: u8 = 5;
    pub const INDIRECT: u8 = 6;
}

/// `BLKIF_RSP_*`.
#[allow(missing_docs, reason = "the names of the specification")]
pub mod status {
    pub const OKAY: i16 = 0;
    pub const ERROR: i16 = -1;
    pub const EOPNOTSUPP: i16 = -2;
}

/// A piece of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The page.
    pub grant: GrantRef,
    /// First sector of 512 bytes in it, 0 to 7.
    pub first: u8,
    /// Last sector, itself included.
    pub last: u8,
}

impl Segment {
    /// From its bytes.
    pub fn decode(bytes: &[u8; SEGMENT_LEN]) -> Self {
        let [a, b, c, d, first, last, ..] = *bytes;
        Self { grant: GrantRef(u32::from_le_bytes([a, b, c, d])), first, last }
    }

    /// To its bytes.
    pub fn encode(&self) -> [u8; SEGMENT_LEN] {
        let [a, b, c, d] = self.grant.0.to_le_bytes();
        [a, b, c, d, self.first, self.last, 0, 0]
    }

    /// Where in the page its data begins, and how many bytes they are. `None` if it reaches outside the page or ends
    /// before it begins.
    pub fn span(&self) -> Option<(u16, u16)> {
        if self.first > self.last || self.last > 7 {
            return None;
        }
        Some((u16::from(self.first) * 512, u16::from(self.last - self.first + 1) * 512))
    }

    /// Copies `into.len()` segments out of a page of an indirect request, each byte once.
    ///
    /// # Safety
    /// `from` is valid for reading `SEGMENT_LEN * into.len()` bytes and aligned to eight. Others may write there
    /// meanwhile: what is read is then any mixture, but one that stays.
    pub unsafe fn copy_from_page(from: *const u8, into: &mut [Self]) {
        for (index, segment) in into.iter_mut().enumerate() {
            // SAFETY: inside the range, aligned as it is, by the caller's promise.
            let word = unsafe { from.add(index * SEGMENT_LEN).cast::<u64>().read_volatile() };
            *segment = Self::decode(&word.to_ne_bytes());
        }
    }
}

/// A request, copied out of the ring once and checked for form: never looked at in the ring again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the guest calls it; comes back in the response.
    pub id: u64,
    /// `BLKIF_OP_*`; of an indirect request the operation inside.
    pub op: u8,
    /// Whether its segments are in pages of their own ([`Request::grants`]).
    pub indirect: bool,
    /// First sector of 512 bytes on the disk.
    pub sector: u64,
    /// Segments.
    pub segments: u16,
    /// Of a direct request its segments.
    pub direct: [Segment; DIRECT_SEGMENTS_MAX],
    /// Of an indirect request the pages with its segments.
    pub grants: [GrantRef; INDIRECT_PAGES_MAX],
    /// Of a discard: sectors of 512 bytes.
    pub discard_sectors: u64,
    /// Of a discard: `BLKIF_DISCARD_SECURE` and other flags.
    pub discard_flag: u8,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            id: 0,
            op: op::READ,
            indirect: false,
            sector: 0,
            segments: 0,
            direct: [Segment::default(); DIRECT_SEGMENTS_MAX],
            grants: [GrantRef::default(); INDIRECT_PAGES_MAX],
            discard_sectors: 0,
            discard_flag: 0,
        }
    }
}

/// What is wrong with a request's form; it is answered with an error, and the ring goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// An operation that this interface does not have.
    Op(u8),
    /// More segments than the form holds, or none where data is to be moved.
    Segments(u16),
    /// An indirect request of an operation other than reading and writing.
    Indirect(u8),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op) => write!(f, "the guest asked for operation {op}, which block devices do not have"),
            Self::Segments(0) => write!(f, "the guest asked to move data but named no segment"),
            Self::Segments(count) => {
                write!(f, "the guest named {count} segments, more than such a request holds")
            }
            Self::Indirect(op) => {
                write!(
                    f,
                    "the guest sent operation {op} as an indirect request; only reads and writes may be"
                )
            }
        }
    }
}

impl std::error::Error for RequestError {}

/// A request that is no request: what is needed to answer it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// What the guest calls it.
    pub id: u64,
    /// The operation as the guest wrote it.
    pub op: u8,
    /// What is wrong.
    pub error: RequestError,
}

impl Malformed {
    /// The answer: [`status::EOPNOTSUPP`] for an operation that is not there, [`status::ERROR`] for anything else.
    pub fn response(&self) -> Response {
        let status =
            if matches!(self.error, RequestError::Op(_)) { status::EOPNOTSUPP } else { status::ERROR };
        Response { id: self.id, op: self.op, status }
    }
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Response {
    /// The request's.
    pub id: u64,
    /// The request's operation; of an indirect request the one inside.
    pub op: u8,
    /// [`status`].
    pub status: i16,
}

impl Response {
    /// From the first bytes of a slot: both layouts are alike.
    pub fn decode(bytes: &[u8; 12]) -> Self {
        let [a, b, c, d, e, f, g, h, op, _, low, high] = *bytes;
        Self { id: u64::from_le_bytes([a, b, c, d, e, f, g, h]), op, status: i16::from_le_bytes([low, high]) }
    }

    /// To bytes.
    pub fn encode(&self) -> [u8; 12] {
        let [a, b, c, d, e, f, g, h] = self.id.to_le_bytes();
        let [low, high] = self.status.to_le_bytes();
        [a, b, c, d, e, f, g, h, self.op, 0, low, high]
    }
}

/// The bytes of one request as they were in the ring at one moment, or almost: a guest may write while they are copied.
/// Bytes behind the layout's length are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(8))]
pub struct Slot(pub [u8; REQUEST_LEN_MAX]);

impl Slot {
    /// Copies a request out of shared memory, each byte once.
    ///
    /// # Safety
    /// `from` is valid for reading [`Abi::request_len`] bytes and aligned to eight for [`Abi::X86_64`], to four for
    /// [`Abi::X86_32`].
    #[inline]
    pub(super) unsafe fn copy_from(from: *const u8, abi: Abi) -> Self {
        let mut slot = Self([0; REQUEST_LEN_MAX]);
        let into = slot.0.as_mut_ptr();
        match abi {
            Abi::X86_64 => {
                for word in 0..REQUEST_LEN_MAX / 8 {
                    // SAFETY: both are 112 bytes long and aligned to eight; `from` by the caller's promise.
                    unsafe {
                        into.cast::<u64>().add(word).write(from.cast::<u64>().add(word).read_volatile());
                    }
                }
            }
            Abi::X86_32 => {
                for word in 0..Abi::X86_32.request_len() / 4 {
                    // SAFETY: 108 bytes, aligned to four; `from` by the caller's promise, `into` is longer.
                    unsafe {
                        into.cast::<u32>().add(word).write(from.cast::<u32>().add(word).read_volatile());
                    }
                }
            }
        }
        slot
    }

    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Request {
    /// Understands the bytes of a request.
    ///
    /// Checked: the operation is one of the interface's, segments are as many as the form holds (1 to 11 direct, 1 to
    /// 4096 indirect; a flush or barrier may have none), an indirect request reads or writes. Not checked, for it needs
    /// to know the disk: sectors, spans of segments ([`Segment::span`]), the limit that was advertised.
    pub fn decode(slot: &Slot, abi: Abi) -> Result<Self, Malformed> {
        let id_at = abi.id_at();
        let (op, second) = (slot.0[0], slot.0[1]);
        let id = slot.u64(id_at);
        let mut request = Self { id, op, sector: slot.u64(id_at + 8), ..Self::default() };
        let refuse = |error| Err(Malformed { id, op, error });
        match op {
            op::READ | op::WRITE | op::WRITE_BARRIER | op::FLUSH_DISKCACHE => {
                let count = usize::from(second);
                let may_be_empty = matches!(op, op::WRITE_BARRIER | op::FLUSH_DISKCACHE);
                if count > DIRECT_SEGMENTS_MAX || count == 0 && !may_be_empty {
                    return refuse(RequestError::Segments(second.into()));
                }
                request.segments = second.into();
                for (index, segment) in request.direct[..count].iter_mut().enumerate() {
                    *segment = Segment::decode(&slot.bytes(id_at + 16 + index * SEGMENT_LEN));
                }
            }
            op::DISCARD => {
                request.discard_flag = second;
                request.discard_sectors = slot.u64(id_at + 16);
            }
            op::INDIRECT => {
                let count = u16::from_le_bytes(slot.bytes(2));
                if !matches!(second, op::READ | op::WRITE) {
                    return refuse(RequestError::Indirect(second));
                }
                if count == 0 || usize::from(count) > INDIRECT_SEGMENTS_MAX {
                    return refuse(RequestError::Segments(count));
                }
                (request.indirect, request.op, request.segments) = (true, second, count);
                let pages = usize::from(count).div_ceil(INDIRECT_PER_PAGE);
                for (index, grant) in request.grants[..pages].iter_mut().enumerate() {
                    *grant = GrantRef(u32::from_le_bytes(slot.bytes(id_at + 20 + index * 4)));
                }
            }
            _ => return refuse(RequestError::Op(op)),
        }
        Ok(request)
    }

    /// Pages that hold the segments of an indirect request.
    pub fn indirect_pages(&self) -> &[GrantRef] {
        let pages = if self.indirect { usize::from(self.segments).div_ceil(INDIRECT_PER_PAGE) } else { 0 };
        &self.grants[..pages.min(INDIRECT_PAGES_MAX)]
    }

    /// Segments of a direct request; of an indirect one none.
    pub fn direct_segments(&self) -> &[Segment] {
        let count = if self.indirect { 0 } else { usize::from(self.segments) };
        &self.direct[..count.min(DIRECT_SEGMENTS_MAX)]
    }

    /// The answer to it.
    pub fn response(&self, status: i16) -> Response {
        Response { id: self.id, op: self.op, status }
    }

    /// The bytes of a request, as a front end writes them. `handle` names the disk to the guest; back ends ignore it.
    pub fn encode(&self, handle: u16, abi: Abi) -> Slot {
        let mut slot = Slot([0; REQUEST_LEN_MAX]);
        let id_at = abi.id_at();
        slot.0[0] = self.op;
        slot.put(id_at, &self.id.to_le_bytes());
        slot.put(id_at + 8, &self.sector.to_le_bytes());
        if self.indirect {
            slot.0[..2].copy_from_slice(&[op::INDIRECT, self.op]);
            slot.put(2, &self.segments.to_le_bytes());
            slot.put(id_at + 16, &handle.to_le_bytes());
            for (index, grant) in self.indirect_pages().iter().enumerate() {
                slot.put(id_at + 20 + index * 4, &grant.0.to_le_bytes());
            }
            return slot;
        }
        slot.put(2, &handle.to_le_bytes());
        if self.op == op::DISCARD {
            slot.0[1] = self.discard_flag;
            slot.put(id_at + 16, &self.discard_sectors.to_le_bytes());
        } else {
            slot.0[1] = self.segments as u8;
            for (index, segment) in self.direct_segments().iter().enumerate() {
                slot.put(id_at + 16 + index * SEGMENT_LEN, &segment.encode());
            }
        }
        slot
    }
}

#[cfg(test)]
#[path = "abi_tests.rs"]
mod tests;
