//! A regular file or a block device as a storage.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::{opcode, squeue, types};
use tapio_types::Span;

use super::Uring;
use super::open_file::{DirectBlocks, Handle, OpenedFile, SharedFile, current_len};
use crate::blocks::{self, Blocks, WholeBlocks};
use crate::lent::lend;
use crate::segments::{Flat, PageBuf, Segments};
use crate::storage::{Storage, StorageInfo, Zeroing};
use crate::tasks::{IOVECS_MAX, Tasks};

/// The largest single operation. Longer transfers go in several, as the kernel would cut them anyway.
const TRANSFER_MAX: u64 = 1 << 30;
/// Longer reads of a file in memory are worth a kernel thread of their own: with two processors, reads of 1 MiB at
/// depth 8 over NBD went twice as fast so.
const READ_NOW_MAX: u64 = 64 << 10;
/// Longer writes likewise; what is written has just been received and is still in this processor's cache, so that the
/// border lies higher: a tenth faster and a sixth cheaper than with a thread.
const WRITE_NOW_MAX: u64 = 256 << 10;
/// The most runs that are looked up by one call.
const RUNS_MAX: usize = 256;
/// Zeroes written by hand go in pieces of this size.
const ZERO_PIECE: usize = 256 << 10;

/// A file or block device, used through the ring of one thread.
#[derive(Debug)]
pub struct UringFile {
    uring: Uring,
    shared: SharedFile,
    /// Of the thread that opened it alone. Taken when this is dropped.
    handle: Option<Arc<Handle>>,
    len: Cell<u64>,
    zeroing: Cell<ZeroSupport>,
    discarding: Cell<DiscardSupport>,
    /// A flush of the page cache failed: see [`Storage::flush`] of this type.
    flush_failed: Cell<bool>,
    /// Where O_DIRECT takes longer pieces than sectors of 512 bytes.
    direct_blocks: Option<Box<DirectBlocks>>,
}

impl Drop for UringFile {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            // A task that waits until it is closed waits for calls that still hold it, too.
            let _ = handle.closing.set(handle.closer.closing());
        }
    }
}

/// What the file system has turned out to be able to do; found out once, by trying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroSupport {
    Untried,
    ByHand,
}

/// How space is given back without a promise of zeroes. What is said to be there is tried, and what is refused is not
/// asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiscardSupport {
    /// As a hole, which reads as zero.
    Zeroed,
    /// By a device whose driver discards and cannot zero: many SATA disks, thin volumes of device-mapper.
    Plain,
    /// Not at all.
    None,
}

impl UringFile {
    /// A file that was opened, on this ring.
    pub(super) fn of(uring: &Uring, opened: OpenedFile) -> Self {
        Self::on(uring, opened.shared, Some(Arc::new(opened.handle)), opened.direct_blocks)
    }

    /// A file that another thread has opened, on this ring too.
    pub(super) fn adopt(uring: &Uring, shared: &SharedFile) -> Self {
        Self::on(uring, shared.clone(), None, None)
    }

    fn on(
        uring: &Uring,
        shared: SharedFile,
        handle: Option<Arc<Handle>>,
        direct_blocks: Option<Box<DirectBlocks>>,
    ) -> Self {
        Self {
            uring: uring.clone(),
            len: Cell::new(shared.len),
            shared,
            handle,
            zeroing: Cell::new(ZeroSupport::Untried),
            discarding: Cell::new(DiscardSupport::Zeroed),
            flush_failed: Cell::new(false),
            direct_blocks,
        }
    }

    /// The file for the rings of other threads; none where the writes to one block wait for one another, which only
    /// those of one thread do.
    pub(super) fn share(&self) -> Option<SharedFile> {
        let has_blocks = self.direct_blocks.is_some();
        (!has_blocks).then(|| self.shared.with_len(self.len.get()))
    }

    /// Whether the page cache is passed by.
    pub fn is_direct(&self) -> bool {
        self.shared.memory_align > 1 || self.shared.info.align > 1
    }

    fn fd(&self) -> RawFd {
        self.shared.fd
    }

    /// Runs a call on the file that may block, on a helper thread. For the thread that opened it.
    async fn ask<T: Send + 'static>(&self, call: impl FnOnce(&File) -> T + Send + 'static) -> io::Result<T> {
        let Some(handle) = self.handle.clone() else { return Err(io::ErrorKind::NotConnected.into()) };
        let work = move || {
            let told = handle.file().map(call);
            drop(handle);
            told
        };
        // Boxed: this is reached from requests, whose tasks have room for the common paths only.
        Box::pin(self.uring.offload(work)).await?.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Which operations a thread of the kernel's does from the beginning, instead of being tried by this one.
    fn flags(&self, write: bool) -> squeue::Flags {
        // The kernel waits for the lock of a file on FUSE although it is asked not to wait, and a flush holds that lock
        // until the server has answered: this thread would hang with a server that hangs.
        //
        // Of a file in memory, without being asked, the kernel lets one of its threads work at a time, unless that one
        // sleeps; copying never sleeps. Writes of a file go one after the other anyway.
        let aside = self.shared.on_fuse || self.shared.in_memory && !write;
        if aside { squeue::Flags::ASYNC } else { squeue::Flags::empty() }
    }

    /// What was looked at goes as it is: if it is not whole sectors the kernel refuses it here (EINVAL).
    async fn transfer(&self, at: u64, data: Segments, write: bool, looked_at: bool) -> io::Result<()> {
        // In here, where there is one way aside already: hundreds of request tasks have room for these futures.
        if !looked_at && self.goes_aside(at, &data, write) {
            return Box::pin(self.transfer_aside(at, data, write)).await;
        }
        let mut done = 0;
        while done < data.len() {
            let piece = data.slice(done, (data.len() - done).min(TRANSFER_MAX));
            let offset = at + done;
            if self.shared.in_memory && piece.len() <= if write { WRITE_NOW_MAX } else { READ_NOW_MAX } {
                done += self.move_now(offset, piece, write)?;
                continue;
            }
            let fd = types::Fd(self.fd());
            let flags = self.flags(write);
            // SAFETY: the maker of `data` guaranteed that its memory stays valid until the operation, awaited here,
            // has completed; the iovec table lives in the operation's own slot.
            let op = unsafe {
                match piece.flat() {
                    Flat::Contiguous { base, len, buffer: Some(buffer) } => self.uring.start(|_| {
                        if write {
                            opcode::WriteFixed::new(fd, base, len, buffer).offset(offset).build().flags(flags)
                        } else {
                            opcode::ReadFixed::new(fd, base, len, buffer).offset(offset).build().flags(flags)
                        }
                    }),
                    Flat::Contiguous { base, len, buffer: None } => self.uring.start(|_| {
                        if write {
                            opcode::Write::new(fd, base, len).offset(offset).build().flags(flags)
                        } else {
                            opcode::Read::new(fd, base, len).offset(offset).build().flags(flags)
                        }
                    }),
                    Flat::Scattered => self.uring.start(|id| {
                        self.uring.inner.tasks.with_iovecs(id, |table| {
                            let (count, _) = piece.fill_iovecs(&mut table[..IOVECS_MAX]);
                            if write {
                                opcode::Writev::new(fd, table.as_ptr(), count as u32)
                                    .offset(offset)
                                    .build()
                                    .flags(flags)
                            } else {
                                opcode::Readv::new(fd, table.as_ptr(), count as u32)
                                    .offset(offset)
                                    .build()
                                    .flags(flags)
                            }
                        })
                    }),
                }
            };
            match op.at_storage().await {
                0 if !write => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "read past the end of the file",
                    ));
                }
                0 => return Err(io::Error::new(io::ErrorKind::WriteZero, "the storage took no bytes")),
                moved if moved > 0 => done += moved as u64,
                error if -error == libc::EINTR || -error == libc::EAGAIN => {}
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        if write {
            self.len.set(self.len.get().max(at + data.len()));
        }
        Ok(())
    }

    /// Moves bytes of a file in memory by a call of its own; returns how many.
    ///
    /// tmpfs does not tell the ring that it never waits, so the ring would hand each operation to a kernel thread of
    /// its own: at depth 1 that costs more than moving the bytes, which is all there is to wait for here.
    fn move_now(&self, offset: u64, piece: Segments, write: bool) -> io::Result<u64> {
        let Flat::Contiguous { base, len, .. } = piece.first_piece().flat() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (fd, base, len, offset) = (self.fd(), base.cast(), len as usize, offset as libc::off64_t);
        loop {
            // SAFETY: the maker of the segments guaranteed that the memory is valid.
            let moved = unsafe {
                if write {
                    libc::pwrite64(fd, base, len, offset)
                } else {
                    libc::pread64(fd, base, len, offset)
                }
            };
            return match moved {
                0 if write => Err(io::Error::new(io::ErrorKind::WriteZero, "the storage took no bytes")),
                0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "read past the end of the file")),
                1.. => Ok(moved as u64),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => continue,
                    error => Err(error),
                },
            };
        }
    }

    /// Memory that O_DIRECT cannot take goes through a copy. Guests and pools are aligned, so this is rare.
    async fn transfer_bounced(&self, at: u64, data: Segments, write: bool) -> io::Result<()> {
        let len = usize::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bounce = PageBuf::zeroed(len);
        if write {
            data.copy_to(&mut bounce);
        }
        let (bounce, moved) = self.transfer_page(at, bounce, 0..len, write).await;
        if moved.is_ok() && !write {
            data.copy_from(&bounce);
        }
        moved
    }

    /// Moves `place` of `page` as it is.
    fn transfer_page(
        &self,
        at: u64,
        page: PageBuf,
        place: Range<usize>,
        write: bool,
    ) -> impl Future<Output = (PageBuf, io::Result<()>)> {
        // SAFETY: the future ends when the kernel has completed its operations.
        unsafe { lend(page, place, |data| self.transfer(at, data, write, true)) }
    }

    async fn fallocate(&self, span: Span, mode: i32) -> io::Result<()> {
        loop {
            let entry =
                opcode::Fallocate::new(types::Fd(self.fd()), span.len).offset(span.start).mode(mode).build();
            // SAFETY: the entry refers to no memory.
            let op = unsafe { self.uring.start(|_| entry) };
            match op.at_storage().await {
                0.. => return Ok(()),
                error if -error == libc::EINTR || -error == libc::EAGAIN => {}
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
    }

    async fn zero_by_hand(&self, span: Span) -> io::Result<()> {
        let mut zeroes = PageBuf::zeroed(ZERO_PIECE.min(span.len as usize));
        let mut left = span;
        while !left.is_empty() {
            let len = left.len.min(zeroes.len() as u64);
            let written;
            (zeroes, written) = self.transfer_page(left.start, zeroes, 0..len as usize, true).await;
            written?;
            left = left.skip(len);
        }
        Ok(())
    }

    /// Gives the space of a span back; what is there afterwards is undefined. Nothing is written.
    async fn discard(&self, span: Span) -> io::Result<()> {
        let is_unsupported = |error: &io::Error| error.raw_os_error() == Some(libc::EOPNOTSUPP);
        if self.discarding.get() == DiscardSupport::Zeroed {
            match self.fallocate(span, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).await {
                Err(error) if is_unsupported(&error) => {
                    let next =
                        if self.shared.is_device { DiscardSupport::Plain } else { DiscardSupport::None };
                    self.discarding.set(next);
                }
                result => return result,
            }
        }
        if self.discarding.get() == DiscardSupport::Plain {
            // The ring has this operation on new kernels only.
            let file = self.shared.clone();
            match self.uring.offload(move || file.discard(span)).await? {
                Err(error) if is_unsupported(&error) => self.discarding.set(DiscardSupport::None),
                result => return result,
            }
        }
        Ok(())
    }

    async fn zero_range(&self, span: Span, how: Zeroing) -> io::Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        if how == Zeroing::Discard {
            return Box::pin(self.discard(span)).await;
        }
        if self.zeroing.get() == ZeroSupport::ByHand {
            return Box::pin(self.zero_by_hand(span)).await;
        }
        let keep_size = libc::FALLOC_FL_KEEP_SIZE;
        let punched = match how {
            Zeroing::Unmap | Zeroing::Discard => {
                self.fallocate(span, libc::FALLOC_FL_PUNCH_HOLE | keep_size).await
            }
            Zeroing::Keep => match self.fallocate(span, libc::FALLOC_FL_ZERO_RANGE | keep_size).await {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    // tmpfs can punch and allocate, but not both at once.
                    match self.fallocate(span, libc::FALLOC_FL_PUNCH_HOLE | keep_size).await {
                        Ok(()) => self.fallocate(span, keep_size).await,
                        error => error,
                    }
                }
                result => result,
            },
        };
        match punched {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.zeroing.set(ZeroSupport::ByHand);
                Box::pin(self.zero_by_hand(span)).await
            }
            result => result,
        }
    }

    /// Whether a request is more than one operation, or must not meet others.
    fn goes_aside(&self, at: u64, data: &Segments, write: bool) -> bool {
        let by_blocks = self
            .direct_blocks
            .as_ref()
            .is_some_and(|parts| write || !parts.blocks.are_whole(Span::new(at, data.len())));
        by_blocks || self.must_bounce(data)
    }

    /// Whether O_DIRECT does not take this memory.
    fn must_bounce(&self, data: &Segments) -> bool {
        self.shared.memory_align > 1 && !data.is_aligned(self.shared.memory_align)
    }

    async fn transfer_aside(&self, at: u64, data: Segments, write: bool) -> io::Result<()> {
        let Some(parts) = &self.direct_blocks else { return self.transfer_bounced(at, data, write).await };
        let span = Span::new(at, data.len());
        if !write {
            return match parts.blocks.are_whole(span) {
                true => self.transfer_bounced(at, data, false).await,
                false => blocks::read(self, at, data).await,
            };
        }
        let Some(place) = parts.blocks.enter_now(span) else { return blocks::write(self, at, data).await };
        let result = self.transfer_blocks(at, data, true).await;
        parts.blocks.leave(place, &self.uring.inner.tasks);
        result
    }

    /// Moves whole blocks.
    async fn transfer_blocks(&self, at: u64, data: Segments, write: bool) -> io::Result<()> {
        match self.must_bounce(&data) {
            true => self.transfer_bounced(at, data, write).await,
            false => self.transfer(at, data, write, true).await,
        }
    }

    /// Moves less than a block at the end of a file, through the page cache.
    async fn move_end(&self, at: u64, data: Segments, write: bool) -> io::Result<()> {
        let parts = self.direct_blocks.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let len = usize::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut page = PageBuf::zeroed(len);
        if write {
            data.copy_to(&mut page);
            parts.end_was_written.set(true);
        }
        // SAFETY: the future ends when the kernel has completed its operations.
        let (page, moved) =
            unsafe { lend(page, 0..len, |page| self.transfer_cached(parts.cached, at, page, write)) }.await;
        moved?;
        if write {
            self.len.set(self.len.get().max(at + data.len()));
        } else {
            data.copy_from(&page);
        }
        Ok(())
    }

    /// Moves any bytes through the page cache, which the open file `cached` uses; the memory is one piece.
    async fn transfer_cached(&self, cached: RawFd, at: u64, data: Segments, write: bool) -> io::Result<()> {
        let (fd, flags) = (types::Fd(cached), self.flags(write));
        let mut done = 0;
        while done < data.len() {
            let Flat::Contiguous { base, len, .. } = data.slice(done, data.len() - done).flat() else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            let offset = at + done;
            let entry = if write {
                opcode::Write::new(fd, base, len).offset(offset).build().flags(flags)
            } else {
                opcode::Read::new(fd, base, len).offset(offset).build().flags(flags)
            };
            // SAFETY: the maker of `data` guaranteed that its memory stays valid until the operation, awaited here, has
            // completed.
            let op = unsafe { self.uring.start(|_| entry) };
            match op.at_storage().await {
                0 if write => {
                    return Err(io::Error::new(io::ErrorKind::WriteZero, "the storage took no bytes"));
                }
                0 => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "read past the end of the file",
                    ));
                }
                moved @ 1.. => done += moved as u64,
                error if -error == libc::EINTR || -error == libc::EAGAIN => {}
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        Ok(())
    }
}

// SAFETY: a future ends when the kernel has completed its operation, and bounces what it may not keep.
unsafe impl WholeBlocks for UringFile {
    fn blocks(&self) -> &Blocks {
        &self.direct_blocks.as_ref().expect("asked for where there are some").blocks
    }

    fn tasks(&self) -> &Tasks {
        &self.uring.inner.tasks
    }

    fn end(&self) -> u64 {
        self.len.get()
    }

    async fn read_blocks(&self, at: u64, into: Segments) -> io::Result<()> {
        self.transfer_blocks(at, into, false).await
    }

    async fn write_blocks(&self, at: u64, from: Segments) -> io::Result<()> {
        self.transfer_blocks(at, from, true).await
    }

    async fn zero_blocks(&self, span: Span, how: Zeroing) -> io::Result<()> {
        // Boxed: hundreds of request tasks have room for reads and writes.
        Box::pin(self.zero_range(span, how)).await
    }

    async fn read_end(&self, at: u64, into: Segments) -> io::Result<()> {
        self.move_end(at, into, false).await
    }

    async fn write_end(&self, at: u64, from: Segments) -> io::Result<()> {
        self.move_end(at, from, true).await
    }
}

// SAFETY: a future ends when the kernel has completed its operation, and bounces what it may not keep.
unsafe impl Storage for UringFile {
    fn info(&self) -> StorageInfo {
        self.shared.info
    }

    fn inode(&self) -> u64 {
        self.shared.inode
    }

    fn len(&self) -> u64 {
        self.len.get()
    }

    async fn data_run(&self, span: Span) -> (u64, bool) {
        if !self.shared.info.resizable {
            return (span.len, true);
        }
        self.ask(move |file| run_of(file, span)).await.unwrap_or((span.len, true))
    }

    async fn known_runs(&self, span: Span, count_max: usize) -> Vec<(u64, bool)> {
        let all_data = vec![(span.len, true)];
        if !self.shared.info.resizable {
            return all_data;
        }
        let runs = move |file: &File| {
            let (mut runs, mut left) = (Vec::new(), span);
            while !left.is_empty() && runs.len() < count_max.clamp(1, RUNS_MAX) {
                let run = run_of(file, left);
                runs.push(run);
                left = left.skip(run.0);
            }
            runs
        };
        self.ask(runs).await.unwrap_or(all_data)
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        self.transfer(at, into, false, false).await
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        self.transfer(at, from, true, false).await
    }

    /// After a failure the page cache may have dropped what it could not write, and would call the next flush a
    /// success. So there is none any more until the file is opened again. Past the page cache nothing is dropped, and
    /// the next flush may well succeed.
    async fn flush(&self) -> io::Result<()> {
        if self.flush_failed.get() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let entry = opcode::Fsync::new(types::Fd(self.fd())).flags(types::FsyncFlags::DATASYNC).build();
        // SAFETY: the entry refers to no memory.
        let op = unsafe { self.uring.start(|_| entry) };
        match op.at_storage().await {
            0.. => Ok(()),
            error => {
                // A flush that was cancelled was not tried.
                let was_cached = self
                    .direct_blocks
                    .as_ref()
                    .map_or(!self.is_direct(), |parts| parts.end_was_written.get());
                self.flush_failed.set(was_cached && -error != libc::ECANCELED);
                Err(io::Error::from_raw_os_error(-error))
            }
        }
    }

    async fn zero(&self, span: Span, how: Zeroing) -> io::Result<()> {
        if self.direct_blocks.is_some() {
            return Box::pin(blocks::zero(self, span, how)).await;
        }
        self.zero_range(span, how).await
    }

    async fn allocate(&self, span: Span, space: bool) -> io::Result<()> {
        let end = span.end().ok_or(io::ErrorKind::InvalidInput)?;
        if !self.shared.info.resizable {
            let fits = end <= self.len.get();
            return if fits { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) };
        }
        if space {
            match self.fallocate(span, 0).await {
                Ok(()) => {
                    self.len.set(self.len.get().max(end));
                    return Ok(());
                }
                // A file system that cannot reserve space can still grow the file.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                Err(error) => return Err(error),
            }
        }
        if end > self.len.get() {
            Box::pin(self.set_len(end)).await?;
        }
        Ok(())
    }

    async fn measured_len(&self) -> io::Result<u64> {
        if self.shared.info.resizable { Ok(self.len.get()) } else { self.ask(current_len).await? }
    }

    fn has_grown(&self, len: u64) {
        if !self.shared.info.resizable {
            self.len.set(self.len.get().max(len));
        }
    }

    fn ends_at(&self, len: u64) {
        if !self.shared.info.resizable {
            self.len.set(self.len.get().min(len));
        }
    }

    async fn set_len(&self, len: u64) -> io::Result<()> {
        if !self.shared.info.resizable {
            // The administrator has made the device longer, or not.
            let now = self.ask(current_len).await??;
            if now < len {
                let why = format!("the device has {now} bytes: make it longer first");
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
            self.len.set(now);
            return Ok(());
        }
        let grows = len >= self.len.get();
        match self.handle.as_ref().and_then(|handle| handle.file()) {
            Some(file) if self.shared.in_memory && grows => file.set_len(len)?,
            _ => {
                // A file system that gives back gigabytes, or waits for its journal or server, takes seconds. A request
                // that waited in vain does not make the file shorter than others have made it meanwhile.
                let cut = move |file: &File| match current_len(file)? {
                    now if grows && now >= len => Ok(()),
                    _ => file.set_len(len),
                };
                self.ask(cut).await??;
            }
        }
        self.len.set(len);
        Ok(())
    }
}

/// How much from the beginning of `span` is alike in being data, or a hole.
fn run_of(file: &File, span: Span) -> (u64, bool) {
    let seek = |whence| {
        // SAFETY: `lseek` takes no pointers; the offset of this descriptor is never used.
        unsafe { libc::lseek(file.as_raw_fd(), span.start as i64, whence) }
    };
    let end = span.start + span.len;
    let data = seek(libc::SEEK_DATA);
    if data < 0 {
        // ENXIO: nothing but a hole up to the end of the file. Anything else: no knowledge, so data.
        let hole = io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO);
        return (span.len, !hole);
    }
    let data = data as u64;
    if data > span.start {
        return (data.min(end) - span.start, false);
    }
    match u64::try_from(seek(libc::SEEK_HOLE)) {
        Ok(hole) if hole > span.start => (hole.min(end) - span.start, true),
        _ => (span.len, true),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use std::path::Path;

    use tapio_types::Access;

    use super::*;
    use crate::uring::UringConfig;
    use crate::uring::lock::WriterLock;
    use crate::{Executor, Inbox, Io, Polling, PollingConfig};

    #[test]
    fn what_is_not_whole_sectors_past_the_page_cache_is_an_error_and_no_endless_recursion() {
        let Ok(uring) = Uring::new(UringConfig::default()) else { return };
        let path = std::env::temp_dir().join(format!("tapio-ring-odd-{}", std::process::id()));
        std::fs::write(&path, vec![7; 8192]).expect("written");
        let inbox: Rc<Inbox<()>> = Inbox::new(1);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
        let running = uring.clone();
        let read = async move {
            let file = running.open(&path, Access::ReadOnly).await.expect("opened");
            std::fs::remove_file(&path).expect("removed");
            let is_direct = file.is_direct();
            let (page, odd) = file.read_into(0, PageBuf::zeroed(4096), 0..412).await;
            // Memory at an odd place is bounced, whole sectors at a time.
            let (page, moved) = file.read_into(0, page, 4..1028).await;
            (is_direct, odd, moved, page[4..1028] == [7; 1024])
        };
        let (is_direct, odd, moved, same) = executor.block_on(&uring, &mut (), read);
        assert!(moved.is_ok() && same, "{moved:?}");
        if is_direct {
            assert_eq!(odd.expect_err("not whole sectors").raw_os_error(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn a_discard_gives_space_back_or_does_nothing() {
        with_file("discard", |_, file, path| async move {
            let bytes = || std::fs::read(&path).expect("it is there");
            file.zero(Span::new(0, 4096), Zeroing::Discard).await.expect("given back");
            let is_punched = file.discarding.get() == DiscardSupport::Zeroed;
            assert_eq!(bytes()[..4096], [if is_punched { 0 } else { 7 }; 4096]);
            // As of a storage that refused once.
            file.discarding.set(DiscardSupport::None);
            file.zero(Span::new(4096, 4096), Zeroing::Discard).await.expect("nothing is to be done");
            assert_eq!(bytes()[4096..], [7; 4096], "nothing is written for a discard");
            file.zero(Span::new(4096, 4096), Zeroing::Unmap).await.expect("zeroed");
            assert_eq!(bytes()[4096..], [0; 4096]);
        });
    }

    /// Whether this process has the file open.
    fn is_open(path: &Path) -> bool {
        let open = std::fs::read_dir("/proc/self/fd").expect("the process has files").flatten();
        open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|name| name == path)
    }

    /// Whether a writer has the file.
    fn is_locked(path: &Path) -> bool {
        let lock = WriterLock::take(&File::open(path).expect("it is there"));
        lock.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
    }

    /// Runs `test` on a ring with a file; where there is no ring, nothing.
    fn with_file<Fut: Future<Output = ()> + 'static>(
        name: &str,
        test: impl FnOnce(Uring, UringFile, std::path::PathBuf) -> Fut + 'static,
    ) {
        let Ok(uring) = Uring::new(UringConfig::default()) else { return };
        let path = std::env::temp_dir().join(format!("tapio-ring-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![7; 8192]).expect("written");
        let inbox: Rc<Inbox<()>> = Inbox::new(1);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor = Executor::new(uring.tasks().clone(), inbox, |()| async {}, polling);
        let running = uring.clone();
        executor.block_on(&uring, &mut (), async move {
            let file = running.open(&path, Access::ReadWrite).await.expect("opened");
            assert!(is_open(&path) && is_locked(&path));
            test(running, file, path.clone()).await;
            std::fs::remove_file(&path).expect("removed");
        });
    }

    #[test]
    fn a_file_that_another_thread_has_is_unlocked_by_its_opener_and_closed_after_the_last() {
        with_file("shared", |uring, file, path| async move {
            let share = file.share();
            drop(file);
            uring.files_closed().await;
            assert!(is_open(&path) && !is_locked(&path));
            std::thread::spawn(move || drop(share)).join().expect("it ends");
            uring.files_closed().await;
            assert!(!is_open(&path));
        });
    }

    #[test]
    fn a_file_with_a_call_that_hangs_is_not_closed_before_the_call_has_ended() {
        with_file("hangs", |uring, file, path| async move {
            let (release, hold) = std::sync::mpsc::sync_channel::<()>(0);
            let (begin, begun) = std::sync::mpsc::sync_channel(1);
            let tasks = uring.tasks().clone();
            let given_up = Rc::new(Cell::new(false));
            let seen = Rc::clone(&given_up);
            let task = tasks.spawn(async move {
                let hang = move |_: &File| {
                    begin.send(()).expect("it is waited for");
                    hold.recv().expect_err("only its end is waited for");
                };
                file.ask(hang).await.expect_err("it is cancelled");
                drop(file);
                seen.set(true);
            });
            while begun.try_recv().is_err() {
                tasks.yield_now().await;
            }
            uring.cancel(task);
            while !given_up.get() {
                tasks.yield_now().await;
            }
            let closed = Rc::new(Cell::new(false));
            let (seen, waiting) = (Rc::clone(&closed), uring.clone());
            tasks.spawn(async move {
                waiting.files_closed().await;
                seen.set(true);
            });
            // What was handed to helpers before this one call has been taken, and is over or waits.
            uring.offload(|| ()).await.expect("a thread");
            assert!(is_locked(&path) && !closed.get());
            drop(release);
            while !closed.get() {
                tasks.yield_now().await;
            }
            assert!(!is_open(&path));
        });
    }
}
