//! What a front end asks of a disk.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::rc::Rc;

use tapio_ring::{Buffer, Dropped, Memory, Segments};
use tapio_stat::RequestKind;
use tapio_types::Span;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read `span` into the data.
    Read,
    /// Write the data to `span`; `durable` (FUA) means that the answer comes when it is on stable storage.
    Write { durable: bool },
    /// Make every write that was answered durable. No span, no data.
    Flush,
    /// The guest does not need the content of `span` any more.
    Discard,
    /// Make `span` read as zero; `unmap`: its space may be given back.
    WriteZeroes { unmap: bool, durable: bool },
}

impl Op {
    /// What it counts as.
    pub const fn kind(self) -> RequestKind {
        match self {
            Self::Read => RequestKind::Read,
            Self::Write { .. } => RequestKind::Write,
            Self::Flush => RequestKind::Flush,
            Self::Discard => RequestKind::Discard,
            Self::WriteZeroes { .. } => RequestKind::WriteZeroes,
        }
    }
}

/// Why a request failed, as a front end tells its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskError {
    /// The disk is read-only.
    ReadOnly,
    /// The span lies outside the disk.
    OutOfRange,
    /// The span is not aligned to the logical block.
    Unaligned,
    /// The storage is full.
    NoSpace,
    /// The storage cannot do this.
    Unsupported,
    /// The storage failed with this errno; its details are in the log.
    Io(i32),
}

impl DiskError {
    /// The errno that stands for this error.
    pub const fn errno(self) -> i32 {
        match self {
            Self::ReadOnly => libc::EROFS,
            Self::OutOfRange | Self::Unaligned => libc::EINVAL,
            Self::NoSpace => libc::ENOSPC,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::Io(errno) => errno,
        }
    }
}

impl From<&io::Error> for DiskError {
    fn from(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace,
            Some(libc::EOPNOTSUPP) => Self::Unsupported,
            Some(libc::EROFS) => Self::ReadOnly,
            Some(errno) => Self::Io(errno),
            None => Self::Io(libc::EIO),
        }
    }
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReadOnly => f.write_str("the disk is read-only"),
            Self::OutOfRange => f.write_str("the request reaches past the end of the disk"),
            Self::Unaligned => f.write_str("the request is not aligned to 512-byte sectors"),
            Self::NoSpace => f.write_str("the storage is full"),
            Self::Unsupported => f.write_str("the storage cannot do this"),
            Self::Io(errno) => write!(f, "the storage failed: {}", io::Error::from_raw_os_error(*errno)),
        }
    }
}

/// The receiver of completions: a virtqueue, a connection.
pub trait Completion {
    /// The request that carried `tag` is done. Called on the data thread, once for every request; must not block
    /// and must not run other tasks. Making the answer visible waits for [`crate::FrontEnd::publish`] or a wake-up
    /// of the client's own task, so that a batch is answered at once.
    fn complete(&self, tag: u64, result: Result<(), DiskError>);

    /// The memory that the request with `tag` came with, if it was the process' own. Called just before
    /// [`Completion::complete`], under the same conditions.
    fn give_back(&self, _tag: u64, buffer: Buffer) {
        drop(buffer);
    }

    /// The request that carried `tag` has taken longer than it may, and the kernel does not give its memory back.
    /// Returns whether the guest gets its error (ETIMEDOUT) now; the memory must stay as it is until
    /// [`Completion::complete`], which comes all the same. A client whose memory is its guest's must return false:
    /// after an answer the guest would use for other things what the kernel still fills.
    fn give_up(&self, _tag: u64) -> bool {
        false
    }

    /// Whether [`Completion::give_up`] answers, for a caller that cannot ask at that moment.
    fn gives_up(&self) -> bool {
        false
    }
}

/// The memory of a request.
#[derive(Debug)]
pub enum Data {
    /// None: a flush, a discard, zeroes.
    None,
    /// Memory of the process: the request has it until it is answered, and [`Completion::give_back`] has it then.
    Own(Buffer),
    /// Memory of the guest, or of the kernel: its maker keeps it until the request is answered.
    Guest(Segments),
}

/// A request on its way. Its holder answers it, or hands it on: see [`tapio_ring::dropped`].
#[must_use = "a request must be answered"]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// Where on the disk, in bytes.
    pub span: Span,
    /// When the front end took it, by [`tapio_ring::Tasks::turn_ns`].
    pub born_ns: u64,
    /// The client's name for it.
    pub tag: u64,
    /// The memory to fill or to take from.
    data: Data,
    /// A storage may have the memory.
    is_used: Cell<bool>,
    /// The receiver of its completion; none once it is answered.
    client: Option<Rc<dyn Completion>>,
}

impl Request {
    /// A request. Reads and writes have `span.len` bytes of `data`.
    pub fn new(op: Op, span: Span, data: Data, born_ns: u64, tag: u64, client: Rc<dyn Completion>) -> Self {
        let (is_used, client) = (Cell::new(false), Some(client));
        Self { op, span, born_ns, tag, data, is_used, client }
    }

    /// The memory, for operations that end before the request is answered.
    pub(crate) fn data(&self) -> Segments {
        self.is_used.set(true);
        match &self.data {
            Data::None => Segments::EMPTY,
            // SAFETY: the memory is the request's until it is answered, when no storage uses it any more, or for good.
            Data::Own(buffer) => unsafe { buffer.segments(0..buffer.len()) },
            Data::Guest(data) => *data,
        }
    }

    /// Bytes of the memory.
    pub(crate) const fn data_len(&self) -> u64 {
        match &self.data {
            Data::None => 0,
            Data::Own(buffer) => buffer.len() as u64,
            Data::Guest(data) => data.len(),
        }
    }

    /// The receiver of its completion.
    pub(crate) fn client(&self) -> &Rc<dyn Completion> {
        self.client.as_ref().expect("it is there until the request is answered, which consumes it")
    }

    /// Ends the request. No storage has its memory any more.
    pub fn answer(mut self, result: Result<(), DiskError>) {
        let Some(client) = self.client.take() else { return };
        if let Data::Own(buffer) = std::mem::replace(&mut self.data, Data::None) {
            client.give_back(self.tag, buffer);
        }
        client.complete(self.tag, result);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        if !Dropped::Request.is_fault() {
            return;
        }
        match std::mem::replace(&mut self.data, Data::None) {
            Data::Own(buffer) if self.is_used.get() => std::mem::forget(buffer),
            // After an answer the guest would use for other things what the kernel may still fill.
            Data::Guest(data) if self.is_used.get() && !data.is_empty() => return,
            Data::None | Data::Own(_) | Data::Guest(_) => {}
        }
        client.complete(self.tag, Err(DiskError::Io(libc::EIO)));
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("op", &self.op)
            .field("span", &self.span)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}

/// It is in every request task twice.
const _: () = assert!(size_of::<Request>() <= 96);

#[cfg(test)]
mod tests;
