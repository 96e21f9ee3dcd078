//! The FUSE protocol as far as one file needs it: `linux/fuse.h` of the kernel's user interface, version 7.
//!
//! Everything is in the host's byte order. Requests begin with a header of 40 bytes, answers with one of 16.

/// Bytes of a request's header (`fuse_in_header`).
pub const IN_HEADER_LEN: usize = 40;
/// Bytes of an answer's header (`fuse_out_header`).
pub const OUT_HEADER_LEN: usize = 16;
/// Bytes before the data of a write: header and `fuse_write_in`. A read's header and `fuse_read_in` are as long.
pub const HEAD_LEN: usize = 80;
/// Most bytes of a request, apart from a write's data, that are looked at.
pub const CALL_LEN_MAX: usize = 512;
/// The longest data of one read or write.
pub const TRANSFER_MAX: usize = 1 << 20;

/// Version that is spoken.
const MAJOR: u32 = 7;
/// The newest minor version whose structures are known here; older kernels than 7.23 are refused.
const MINOR: u32 = 38;
/// The oldest.
pub const MINOR_MIN: u32 = 23;

/// The directory.
pub const ROOT: u64 = 1;
/// The one file in it.
pub const DISK: u64 = 2;
/// The file's name.
pub const FILE_NAME: &str = "disk";

/// For how long the kernel may believe attributes, in seconds: changes are announced.
const VALID_S: u64 = 3600;

mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// Bits of INIT that are asked for where the kernel has them: reads in parallel, direct I/O in parallel, long requests.
const INIT_FLAGS: u32 = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22;
/// Of `fuse_open_out`: no page cache, and writers in parallel.
pub const OPEN_DIRECT: u32 = 1 << 0 | 1 << 6;
/// Of `fuse_open_out`: what the page cache holds stays.
pub const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// Of `fuse_setattr_in`: a new length is wanted.
const SETATTR_SIZE: u32 = 1 << 3;
/// Of `fuse_setattr_in`: times and handle, which change nothing here.
const SETATTR_HARMLESS: u32 = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10;
/// `FUSE_NOTIFY_INVAL_INODE`.
const NOTIFY_INVAL_INODE: i32 = 2;

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// The first: what the kernel can do.
    Init { major: u32, minor: u32, max_readahead: u32, flags: u32 },
    /// A name in the directory.
    Lookup { name: &'a [u8] },
    /// Attributes of a node.
    GetAttr,
    /// Change them; `len` is a new length.
    SetAttr { len: Option<u64>, harmless: bool },
    /// Open the file.
    Open { flags: u32 },
    /// Read from it.
    Read { offset: u64, len: u32 },
    /// Write to it; the data follows. `handle` is what the answer to the opening said.
    Write { offset: u64, len: u32, handle: u64 },
    /// Make it durable.
    Fsync,
    /// Zero a range, or reserve it.
    Fallocate { offset: u64, len: u64, mode: u32 },
    /// Where data or a hole begins.
    Seek { offset: u64, whence: u32 },
    /// Sizes of the file system.
    StatFs,
    /// Open the directory.
    OpenDir,
    /// The entries of the directory from `offset`, in at most `len` bytes.
    ReadDir { offset: u64, len: u32 },
    /// Something that is answered with "well" and nothing else.
    Nothing,
    /// Something that has no answer.
    Silent,
    /// Something that is not done here.
    Unknown(u32),
}

/// What goes with every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes in all.
    pub len: u32,
    /// What is asked.
    pub opcode: u32,
    /// Repeated in the answer.
    pub unique: u64,
    /// Which node.
    pub node: u64,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Header {
    /// Reads a header; `None` when there is not even that.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            len: u32_at(bytes, 0)?,
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
        })
        .filter(|_| bytes.len() >= IN_HEADER_LEN)
    }

    /// Whether it is a write, whose data needs a place of its own.
    pub const fn is_write(&self) -> bool {
        self.opcode == opcode::WRITE
    }
}

impl<'a> Call<'a> {
    /// Reads what follows the header; `None` when it is cut short.
    pub fn parse(header: &Header, body: &'a [u8]) -> Option<Self> {
        Some(match header.opcode {
            opcode::INIT => Self::Init {
                major: u32_at(body, 0)?,
                minor: u32_at(body, 4)?,
                max_readahead: u32_at(body, 8)?,
                flags: u32_at(body, 12)?,
            },
            opcode::LOOKUP => Self::Lookup { name: body.split(|byte| *byte == 0).next()? },
            opcode::GETATTR => Self::GetAttr,
            opcode::SETATTR => {
                let valid = u32_at(body, 0)?;
                let len = u64_at(body, 16)?;
                Self::SetAttr {
                    len: (valid & SETATTR_SIZE != 0).then_some(len),
                    harmless: valid & !(SETATTR_SIZE | SETATTR_HARMLESS) == 0,
                }
            }
            opcode::OPEN => Self::Open { flags: u32_at(body, 0)? },
            opcode::READ => Self::Read { offset: u64_at(body, 8)?, len: u32_at(body, 16)? },
            opcode::WRITE => {
                Self::Write { handle: u64_at(body, 0)?, offset: u64_at(body, 8)?, len: u32_at(body, 16)? }
            }
            opcode::FSYNC | opcode::FSYNCDIR => Self::Fsync,
            opcode::FALLOCATE => {
                Self::Fallocate { offset: u64_at(body, 8)?, len: u64_at(body, 16)?, mode: u32_at(body, 24)? }
            }
            opcode::LSEEK => Self::Seek { offset: u64_at(body, 8)?, whence: u32_at(body, 16)? },
            opcode::STATFS => Self::StatFs,
            opcode::READDIR => Self::ReadDir { offset: u64_at(body, 8)?, len: u32_at(body, 16)? },
            opcode::OPENDIR => Self::OpenDir,
            opcode::RELEASE | opcode::RELEASEDIR | opcode::FLUSH | opcode::DESTROY => Self::Nothing,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Self::Silent,
            other => Self::Unknown(other),
        })
    }
}

/// An answer without data of the disk: at most a few hundred bytes.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    bytes: [u8; 256],
    len: usize,
}

impl Answer {
    /// An answer to `unique` with nothing in it: `error` is 0 or an errno.
    pub fn new(unique: u64, error: i32) -> Self {
        let mut answer = Self { bytes: [0; 256], len: OUT_HEADER_LEN };
        answer.bytes[4..8].copy_from_slice(&error.saturating_neg().to_ne_bytes());
        answer.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        answer
    }

    fn u16(mut self, value: u16) -> Self {
        self.put(&value.to_ne_bytes());
        self
    }

    /// With four more bytes.
    #[must_use]
    pub fn u32(mut self, value: u32) -> Self {
        self.put(&value.to_ne_bytes());
        self
    }

    /// With eight more bytes.
    #[must_use]
    pub fn u64(mut self, value: u64) -> Self {
        self.put(&value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, count: usize) -> Self {
        self.len = (self.len + count).min(self.bytes.len());
        self
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if let Some(place) = self.bytes.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
            self.len = end;
        }
    }

    /// The bytes, with the length of the whole answer in them; `data` more will follow.
    pub fn finish(&mut self, data: usize) -> &[u8] {
        let len = u32::try_from(self.len + data).unwrap_or(u32::MAX);
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        &self.bytes[..self.len]
    }

    /// `fuse_init_out`: what we can do, for a kernel that can do `flags`.
    pub fn init(unique: u64, minor: u32, max_readahead: u32, flags: u32, background_max: u16) -> Self {
        Self::new(unique, 0)
            .u32(MAJOR)
            .u32(minor.min(MINOR))
            .u32(max_readahead.min(TRANSFER_MAX as u32))
            .u32(flags & INIT_FLAGS)
            .u16(background_max)
            .u16(background_max / 4 * 3)
            .u32(TRANSFER_MAX as u32)
            // Times are whole nanoseconds.
            .u32(1)
            .u16((TRANSFER_MAX / 4096) as u16)
            .zeroes(2 + 4 + 4 + 2 + 22)
    }

    /// An answer to a kernel with a newer major version: ours alone, after which it asks again.
    pub fn init_older(unique: u64) -> Self {
        Self::new(unique, 0).u32(MAJOR).u32(MINOR).zeroes(56)
    }

    /// `fuse_entry_out` of the file.
    pub fn entry(unique: u64, node: &Node) -> Self {
        // No generation: numbers are not used twice.
        Self::new(unique, 0).u64(DISK).u64(0).u64(VALID_S).u64(VALID_S).u32(0).u32(0).attributes(DISK, node)
    }

    /// `fuse_attr_out`.
    pub fn attr(unique: u64, number: u64, node: &Node) -> Self {
        Self::new(unique, 0).u64(VALID_S).u32(0).u32(0).attributes(number, node)
    }

    /// `fuse_open_out`.
    pub fn open(unique: u64, handle: u64, flags: u32) -> Self {
        Self::new(unique, 0).u64(handle).u32(flags).u32(0)
    }

    /// `fuse_statfs_out`: as large as the disk, and full.
    pub fn statfs(unique: u64, node: &Node) -> Self {
        let blocks = node.len.div_ceil(4096);
        Self::new(unique, 0).u64(blocks).u64(0).u64(0).u64(2).u64(0).u32(4096).u32(255).u32(4096).zeroes(28)
    }

    /// Entries of the directory, from the one numbered `offset`, as many as fit `len` bytes.
    pub fn entries(unique: u64, offset: u64, len: u32) -> Self {
        let mut answer = Self::new(unique, 0);
        for (number, (node, kind, name)) in [(ROOT, 4u32, "."), (ROOT, 4, ".."), (DISK, 8, FILE_NAME)]
            .into_iter()
            .enumerate()
            .skip(usize::try_from(offset).unwrap_or(usize::MAX))
        {
            let entry_len = (24 + name.len()).next_multiple_of(8);
            if answer.len - OUT_HEADER_LEN + entry_len > len as usize {
                break;
            }
            answer = answer.u64(node).u64(number as u64 + 1).u32(name.len() as u32).u32(kind);
            answer.put(name.as_bytes());
            answer = answer.zeroes(entry_len - 24 - name.len());
        }
        answer
    }

    /// Not an answer: what the kernel believes of the file's attributes is out of date.
    pub fn attributes_changed() -> Self {
        // A negative offset spares the file's pages.
        Self::new(0, -NOTIFY_INVAL_INODE).u64(DISK).u64((-1i64) as u64).u64(0)
    }

    fn attributes(self, number: u64, node: &Node) -> Self {
        let (mode, links, len) = match number {
            ROOT => (libc::S_IFDIR | 0o500, 2, 0),
            _ if node.read_only => (libc::S_IFREG | 0o400, 1, node.len),
            _ => (libc::S_IFREG | 0o600, 1, node.len),
        };
        let (user, group) = node.owner.filter(|_| number != ROOT).unwrap_or((0, 0));
        // Numbers, sizes, three times as seconds and nanoseconds, mode, links, user, group, device, block size, flags.
        self.u64(number)
            .u64(len)
            .u64(len / 512)
            .zeroes(24 + 12)
            .u32(mode)
            .u32(links)
            .u32(user)
            .u32(group)
            .u32(0)
            .u32(4096)
            .u32(0)
    }
}

/// What the file looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Bytes.
    pub len: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// User and group; root without.
    pub owner: Option<(u32, u32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Node = Node { len: 1 << 20, read_only: false, owner: None };

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((IN_HEADER_LEN + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(7u64.to_ne_bytes());
        bytes.extend(2u64.to_ne_bytes());
        bytes.resize(IN_HEADER_LEN, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn answers_have_the_sizes_of_the_kernels_structures() {
        let len = |mut answer: Answer| answer.finish(0).len() - OUT_HEADER_LEN;
        assert_eq!(len(Answer::init(1, 45, 1 << 20, u32::MAX, 256)), 64);
        assert_eq!(len(Answer::init_older(1)), 64);
        assert_eq!(len(Answer::entry(1, &NODE)), 128);
        assert_eq!(len(Answer::attr(1, DISK, &NODE)), 104);
        assert_eq!(len(Answer::open(1, 0, 0)), 16);
        assert_eq!(len(Answer::statfs(1, &NODE)), 80);
        assert_eq!(len(Answer::attributes_changed()), 24);
        assert_eq!(len(Answer::new(1, libc::EIO)), 0);
    }

    #[test]
    fn the_header_of_an_answer_tells_length_and_error() {
        let mut answer = Answer::new(9, libc::EIO);
        let bytes = answer.finish(100);
        assert_eq!(u32_at(bytes, 0), Some(116));
        assert_eq!(u32_at(bytes, 4).map(u32::cast_signed), Some(-libc::EIO));
        assert_eq!(u64_at(bytes, 8), Some(9));
        // What is not an answer carries its kind there, as it is.
        assert_eq!(u32_at(Answer::attributes_changed().finish(0), 4), Some(2));
    }

    #[test]
    fn calls_are_read_and_every_cut_is_noticed() {
        let mut body = 3u64.to_ne_bytes().to_vec();
        body.extend(4096u64.to_ne_bytes());
        body.extend(512u32.to_ne_bytes());
        body.resize(40, 0);
        let bytes = request(opcode::READ, &body);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.unique, header.node, header.is_write()), (7, 2, false));
        let call = |header: &Header, body| Call::parse(header, body);
        assert_eq!(call(&header, &bytes[40..]), Some(Call::Read { offset: 4096, len: 512 }));
        for end in 0..20 {
            assert_eq!(call(&header, &bytes[40..40 + end]), None, "{end}");
        }
        for end in 0..40 {
            assert_eq!(Header::parse(&bytes[..end]), None, "{end}");
        }
        let write = Header { opcode: opcode::WRITE, ..header };
        assert_eq!(call(&write, &bytes[40..]), Some(Call::Write { handle: 3, offset: 4096, len: 512 }));
        let lookup = Header { opcode: opcode::LOOKUP, ..header };
        assert_eq!(call(&lookup, b"disk\0junk"), Some(Call::Lookup { name: b"disk" }));
        assert_eq!(call(&Header { opcode: 999, ..header }, b""), Some(Call::Unknown(999)));
    }

    #[test]
    fn any_bytes_are_read_without_a_panic() {
        let mut state = 1u64;
        for round in 0..20_000 {
            let mut bytes: Vec<u8> = (0..round % 130)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            if bytes.len() >= 8 {
                bytes[4..8].copy_from_slice(&((state >> 40) as u32 % 60).to_ne_bytes());
            }
            if let Some(header) = Header::parse(&bytes) {
                let _ = Call::parse(&header, &bytes[IN_HEADER_LEN..]);
            }
        }
    }

    #[test]
    fn the_directory_is_listed_in_parts() {
        let listed = |offset, len| Answer::entries(1, offset, len).finish(0).len() - OUT_HEADER_LEN;
        assert_eq!(listed(0, 4096), 32 * 3);
        assert_eq!(listed(1, 4096), 32 * 2);
        assert_eq!(listed(0, 40), 32);
        assert_eq!(listed(0, 31), 0);
        assert_eq!(listed(3, 4096), 0);
        assert_eq!(listed(u64::MAX, 4096), 0);
    }
}
