//! The log of changed blocks of an open disk.
//!
//! It is in memory while the disk is open, and on its storage it says that it is not to be trusted from before the
//! first change until it was written back whole: a log that was not closed is known by that.

use std::cell::{Cell, RefCell};

use tapio_format::cbt::{HEADER_LEN, LogHeader, blocks_of, log_len, set_blocks};
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{PageBuf, Storage};
use tapio_types::Span;

/// What is written back at once, and whether it must be is known of.
const PAGE_LEN: usize = 4096;

/// An open log.
#[derive(Debug)]
pub(crate) struct ChangeLog<S: Storage> {
    store: S,
    /// The whole log, as it is on its storage.
    bytes: RefCell<PageBuf>,
    /// Bytes of it that are used.
    len: Cell<usize>,
    /// Which pages were changed.
    changed: RefCell<Vec<bool>>,
    header: Cell<LogHeader>,
    /// Whether it was to be trusted when it was opened.
    was_consistent: i32,
}

fn too_short(store_len: u64, disk_len: u64) -> FormatError {
    let detail = format!(
        "the log of changed blocks has {store_len} bytes, a disk of {disk_len} bytes needs {}",
        log_len(disk_len)
    );
    FormatError::new(FormatErrorKind::InvalidArgument, detail)
}

impl<S: Storage> ChangeLog<S> {
    /// Opens the log in `store` for a disk of `disk_len` bytes, and notes there that it is not to be trusted.
    ///
    /// # Errors
    /// It is no log, or one of a disk of another length; the storage's.
    pub async fn open(store: S, disk_len: u64) -> Result<Self> {
        let io = |error| FormatError::io("cannot read the log of changed blocks", error);
        let len = usize::try_from(log_len(disk_len)).map_err(|_| too_short(store.len(), disk_len))?;
        if store.len() < len as u64 {
            return Err(too_short(store.len(), disk_len));
        }
        // Before memory is taken: a disk without end would need memory without end.
        let first = padded(HEADER_LEN, &store);
        let (page, read) = store.read_into(0, PageBuf::zeroed(PAGE_LEN), 0..first).await;
        read.map_err(io)?;
        let header = LogHeader::decode(&page)?;
        // One that is longer was made ready for a disk that did not grow after all.
        if header.size < disk_len {
            let detail = format!(
                "the log of changed blocks is for a disk of {} bytes, this one has {disk_len}: see cbt-util set -s",
                header.size
            );
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        let len = usize::try_from(log_len(header.size)).map_err(|_| too_short(store.len(), header.size))?;
        if store.len() < len as u64 {
            return Err(too_short(store.len(), header.size));
        }
        let bytes = PageBuf::zeroed(len.next_multiple_of(PAGE_LEN));
        let (bytes, read) = store.read_into(0, bytes, 0..padded(len, &store)).await;
        read.map_err(io)?;
        let log = Self {
            store,
            changed: RefCell::new(vec![false; bytes.len() / PAGE_LEN]),
            bytes: RefCell::new(bytes),
            len: Cell::new(len),
            header: Cell::new(header),
            was_consistent: header.consistent,
        };
        log.say(0).await?;
        Ok(log)
    }

    /// Notes that `span` changes.
    pub fn note(&self, span: Span) {
        let mut bytes = self.bytes.borrow_mut();
        let len = self.len.get();
        let touched = set_blocks(&mut bytes[HEADER_LEN..len], blocks_of(span));
        if !touched.is_empty() {
            let pages = (HEADER_LEN + touched.start) / PAGE_LEN..=(HEADER_LEN + touched.end - 1) / PAGE_LEN;
            self.changed.borrow_mut()[pages].fill(true);
        }
    }

    /// Writes to the storage whether the log is to be trusted, and makes that durable.
    async fn say(&self, consistent: i32) -> Result<()> {
        let header = LogHeader { consistent, ..self.header.get() };
        self.header.set(header);
        self.bytes.borrow_mut()[..HEADER_LEN].copy_from_slice(&header.encode());
        self.write(0, HEADER_LEN).await?;
        self.flush().await
    }

    /// Writes the bytes `from..from + len`.
    async fn write(&self, from: usize, len: usize) -> Result<()> {
        let whole = padded(self.len.get(), &self.store);
        let end = padded(from + len, &self.store).min(whole);
        // A copy, of a page at most: changes are noted meanwhile.
        let mut piece = PageBuf::zeroed(end - from);
        piece.copy_from_slice(&self.bytes.borrow()[from..end]);
        let (_, written) = self.store.write_from(from as u64, piece, 0..end - from).await;
        written.map_err(|error| FormatError::io("cannot write the log of changed blocks", error))
    }

    async fn flush(&self) -> Result<()> {
        let flushed = self.store.flush().await;
        flushed.map_err(|error| FormatError::io("cannot flush the log of changed blocks", error))
    }

    /// Writes everything back, and only then says that the log is to be trusted, if it was. Nothing may change
    /// meanwhile.
    ///
    /// # Errors
    /// The storage's; the log says that it is not to be trusted then.
    pub async fn close(&self) -> Result<()> {
        let pages = self.changed.borrow().len();
        for page in 0..pages {
            if self.changed.borrow()[page] {
                let from = page * PAGE_LEN;
                self.write(from, PAGE_LEN.min(self.len.get() - from)).await?;
                self.changed.borrow_mut()[page] = false;
            }
        }
        self.flush().await?;
        if self.was_consistent == 0 { Ok(()) } else { self.say(self.was_consistent).await }
    }

    /// Makes the log as long as a disk of `disk_len` bytes needs it, which is not shorter than before; the new blocks
    /// are unchanged. Guests may write the old ones meanwhile.
    ///
    /// # Errors
    /// No room; the storage's. The log is as before then.
    pub async fn grow(&self, disk_len: u64) -> Result<()> {
        let len = usize::try_from(log_len(disk_len)).map_err(|_| too_short(self.store.len(), disk_len))?;
        if disk_len < self.header.get().size {
            let detail = "a log of changed blocks does not become shorter";
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        let old = self.len.get();
        if self.store.len() < len as u64 {
            // Memory and transfers past the page cache are in whole sectors, so the file's length must be.
            let padded = padded(len, &self.store) as u64;
            let grown = self.store.allocate(Span::new(0, padded), false).await;
            grown.map_err(|error| FormatError::io("cannot make the log of changed blocks longer", error))?;
        }
        let mut bytes = PageBuf::zeroed(len.next_multiple_of(PAGE_LEN));
        bytes[..old].copy_from_slice(&self.bytes.borrow()[..old]);
        let pages = bytes.len() / PAGE_LEN;
        *self.bytes.borrow_mut() = bytes;
        self.len.set(len);
        {
            // A device may hold anything where nothing was written.
            let mut changed = self.changed.borrow_mut();
            changed.resize(pages, true);
            changed[old / PAGE_LEN] = true;
        }
        self.header.set(LogHeader { size: disk_len, ..self.header.get() });
        self.say(0).await
    }
}

/// `len` as far as transfers to `store` must reach.
fn padded<S: Storage>(len: usize, store: &S) -> usize {
    len.next_multiple_of(store.info().align.max(1) as usize)
}
