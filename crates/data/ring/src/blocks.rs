//! Requests for parts of blocks, on a storage that moves whole blocks only: a disk with sectors of 4096 bytes.
//!
//! A write of a part reads its block, puts the part in and writes the block: one block by one operation, which such a
//! storage writes as a whole or not at all. So a power cut leaves the part old or new, and what is beside it as it was.
//!
//! What is beside it must not change between the read and the write. So a write of a part has its blocks alone
//! ([`Blocks`]): it begins when the writes that were there before have left them, and those that come later wait.
//! Writes of whole blocks do not wait for one another. A storage that takes sectors of 512 bytes has no [`Blocks`],
//! and pays nothing.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::ops::Range;

use tapio_types::Span;

use crate::lent::lend;
use crate::segments::{PageBuf, Segments};
use crate::storage::{Storage, StorageInfo, Zeroing};
use crate::tasks::{Notify, Tasks};

/// A longer request is cut, so that only its first and last block are copied.
const COPIED_MAX: u64 = 8 << 10;

/// The blocks of a storage, and the writes that are under way on them.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// Bytes of a block, a power of two.
    pub(crate) len: u64,
    places: RefCell<Vec<Place>>,
    /// Places without a write.
    free: RefCell<Vec<usize>>,
    next: Cell<u64>,
    /// Writes that have their blocks alone, or wait until they do.
    alone: Cell<usize>,
    /// Writes that wait.
    waiting: Cell<usize>,
    left: Notify,
}

/// A write that is under way, or waits until it may be.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Writes have their turns in this order where they meet; none: there is no write here.
    number: Option<u64>,
    span: Span,
    alone: bool,
}

impl Place {
    /// Whether a later write has to wait for this one.
    fn holds_up(&self, later: &Self) -> bool {
        self.span.overlaps(later.span)
            && (self.alone || later.alone)
            && self.number < later.number
            && self.number.is_some()
    }
}

/// A write that is under way.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    blocks: &'a Blocks,
    tasks: &'a Tasks,
    place: usize,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.blocks.leave(self.place, self.tasks);
    }
}

impl Blocks {
    /// Blocks of `len` bytes.
    pub(crate) fn new(len: u64) -> Self {
        assert!(len.is_power_of_two(), "a block of {len} bytes");
        Self {
            len,
            places: RefCell::default(),
            free: RefCell::default(),
            next: Cell::new(0),
            alone: Cell::new(0),
            waiting: Cell::new(0),
            left: Notify::default(),
        }
    }

    /// Whether a request is for whole blocks.
    #[inline]
    pub(crate) const fn are_whole(&self, span: Span) -> bool {
        (span.start | span.len) & (self.len - 1) == 0
    }

    const fn floor(&self, at: u64) -> u64 {
        at & !(self.len - 1)
    }

    const fn ceil(&self, at: u64) -> u64 {
        self.floor(at + self.len - 1)
    }

    /// Begins a write of whole blocks that need not wait; [`Blocks::leave`] ends it. No guard, which a request would
    /// have to have room for.
    #[inline]
    pub(crate) fn enter_now(&self, span: Span) -> Option<usize> {
        (self.alone.get() == 0 && self.are_whole(span)).then(|| self.enter(span, false))
    }

    /// Ends a write.
    pub(crate) fn leave(&self, place: usize, tasks: &Tasks) {
        let mut places = self.places.borrow_mut();
        places[place].number = None;
        let was_alone = places[place].alone;
        drop(places);
        self.free.borrow_mut().push(place);
        self.alone.set(self.alone.get() - usize::from(was_alone));
        if self.waiting.get() > 0 {
            self.left.notify_all(tasks);
        }
    }

    /// The turn of a write, which has its blocks `alone`.
    pub(crate) async fn turn<'a>(&'a self, span: Span, alone: bool, tasks: &'a Tasks) -> Turn<'a> {
        let start = self.floor(span.start);
        let place = self.enter(Span::new(start, self.ceil(span.start + span.len) - start), alone);
        let turn = Turn { blocks: self, tasks, place };
        while self.must_wait(place) {
            self.waiting.set(self.waiting.get() + 1);
            self.left.wait(tasks).await;
            self.waiting.set(self.waiting.get() - 1);
        }
        turn
    }

    fn enter(&self, span: Span, alone: bool) -> usize {
        let number = self.next.get();
        self.next.set(number + 1);
        self.alone.set(self.alone.get() + usize::from(alone));
        let new = Place { number: Some(number), span, alone };
        let mut places = self.places.borrow_mut();
        match self.free.borrow_mut().pop() {
            Some(place) => {
                places[place] = new;
                place
            }
            None => {
                places.push(new);
                places.len() - 1
            }
        }
    }

    fn must_wait(&self, place: usize) -> bool {
        let places = self.places.borrow();
        places.iter().any(|other| other.holds_up(&places[place]))
    }
}

/// How a page of this process is moved.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    /// Blocks, out of the storage.
    Read,
    /// Blocks, to the storage.
    Write,
    /// What is behind the last whole block, out of the storage.
    ReadEnd,
}

/// What a storage of blocks does by itself. Spans are whole blocks.
///
/// # Safety
/// As for [`Storage`], of every call that is given memory.
pub(crate) unsafe trait WholeBlocks {
    /// Its blocks.
    fn blocks(&self) -> &Blocks;
    /// The tasks of its thread.
    fn tasks(&self) -> &Tasks;
    /// Bytes. What is behind the last whole block, of a file, is moved by `read_end` and `write_end`.
    fn end(&self) -> u64;
    /// Reads blocks.
    fn read_blocks(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>>;
    /// Writes blocks.
    fn write_blocks(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>>;
    /// Makes blocks read as zero.
    fn zero_blocks(&self, span: Span, how: Zeroing) -> impl Future<Output = io::Result<()>>;
    /// Reads any bytes behind the last whole block of a file.
    fn read_end(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>>;
    /// Writes there, in a file that ends there or before.
    fn write_end(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>>;
    /// Moves `place` of `page`, which comes back with the result.
    fn move_page(
        &self,
        at: u64,
        page: PageBuf,
        place: Range<usize>,
        way: Way,
    ) -> impl Future<Output = (PageBuf, io::Result<()>)>
    where
        Self: Sized,
    {
        let operation = move |data| async move {
            match way {
                Way::Read => self.read_blocks(at, data).await,
                Way::Write => self.write_blocks(at, data).await,
                Way::ReadEnd => self.read_end(at, data).await,
            }
        };
        // SAFETY: implementations of this trait keep to what `lend` asks for.
        unsafe { lend(page, place, operation) }
    }
}

/// Where the last whole block ends, in a storage that has `end` bytes at least.
fn whole_end<S: WholeBlocks>(storage: &S, end: u64) -> u64 {
    storage.blocks().floor(storage.end().max(end))
}

/// The pieces of `span`: those of whole blocks as long as they can be where copying all of it were too much.
fn pieces(blocks: &Blocks, span: Span) -> impl Iterator<Item = Span> {
    let (start, end) = (span.start, span.start + span.len);
    let is_short = blocks.ceil(end) - blocks.floor(start) <= COPIED_MAX.max(blocks.len);
    let (first, last) = if is_short { (end, end) } else { (blocks.ceil(start), blocks.floor(end)) };
    [start..first, first..last, last..end]
        .into_iter()
        .filter(|piece| piece.start < piece.end)
        .map(|piece| Span::new(piece.start, piece.end - piece.start))
}

/// Reads any bytes.
pub(crate) async fn read<S: WholeBlocks>(storage: &S, at: u64, into: Segments) -> io::Result<()> {
    let blocks = storage.blocks();
    let all = Span::new(at, into.len());
    let whole = all.prefix(all.len.min(whole_end(storage, 0).saturating_sub(at)));
    for piece in pieces(blocks, whole) {
        let into = into.slice(piece.start - at, piece.len);
        if blocks.are_whole(piece) {
            storage.read_blocks(piece.start, into).await?;
            continue;
        }
        let first = blocks.floor(piece.start);
        let len = (blocks.ceil(piece.start + piece.len) - first) as usize;
        let (page, read) = storage.move_page(first, PageBuf::zeroed(len), 0..len, Way::Read).await;
        read?;
        into.copy_from(&page[(piece.start - first) as usize..][..piece.len as usize]);
    }
    if whole.len < all.len {
        storage.read_end(at + whole.len, into.slice(whole.len, all.len - whole.len)).await?;
    }
    Ok(())
}

/// Writes any bytes; the caller has their blocks alone.
async fn put<S: WholeBlocks>(storage: &S, at: u64, from: Segments) -> io::Result<()> {
    let blocks = storage.blocks();
    let all = Span::new(at, from.len());
    let whole = all.prefix(all.len.min(whole_end(storage, at + all.len).saturating_sub(at)));
    for piece in pieces(blocks, whole) {
        let from = from.slice(piece.start - at, piece.len);
        if blocks.are_whole(piece) {
            storage.write_blocks(piece.start, from).await?;
            continue;
        }
        let (first, end) = (blocks.floor(piece.start), piece.start + piece.len);
        let (len, last) = ((blocks.ceil(end) - first) as usize, blocks.floor(end));
        let mut page = PageBuf::zeroed(len);
        if first < piece.start {
            page = read_block(storage, first, page, 0).await?;
        }
        let is_read = last == first && first < piece.start;
        if last < end && !is_read {
            page = read_block(storage, last, page, last - first).await?;
        }
        from.copy_to(&mut page[(piece.start - first) as usize..][..piece.len as usize]);
        storage.move_page(first, page, 0..len, Way::Write).await.1?;
    }
    if whole.len < all.len {
        storage.write_end(at + whole.len, from.slice(whole.len, all.len - whole.len)).await?;
    }
    Ok(())
}

/// Reads the block at `at` to `place` of the page; what is behind the end of the storage stays zero.
async fn read_block<S: WholeBlocks>(storage: &S, at: u64, page: PageBuf, place: u64) -> io::Result<PageBuf> {
    let (block_len, len) = (storage.blocks().len, storage.end());
    let (way, count) = match len.saturating_sub(at) {
        0 => return Ok(page),
        left if left < block_len => (Way::ReadEnd, left),
        _ => (Way::Read, block_len),
    };
    let (page, read) = storage.move_page(at, page, place as usize..(place + count) as usize, way).await;
    read.map(|()| page)
}

/// Writes any bytes.
pub(crate) async fn write<S: WholeBlocks>(storage: &S, at: u64, from: Segments) -> io::Result<()> {
    let span = Span::new(at, from.len());
    let blocks = storage.blocks();
    let _turn = blocks.turn(span, !blocks.are_whole(span), storage.tasks()).await;
    put(storage, at, from).await
}

/// Makes any bytes read as zero.
pub(crate) async fn zero<S: WholeBlocks>(storage: &S, span: Span, how: Zeroing) -> io::Result<()> {
    let (blocks, end) = (storage.blocks(), span.start + span.len);
    let _turn = blocks.turn(span, !blocks.are_whole(span), storage.tasks()).await;
    let (first, last) = (blocks.ceil(span.start).min(end), blocks.floor(end));
    if how == Zeroing::Discard {
        // Parts of a block stay as they are: nothing is written for a discard.
        let whole = Span::new(first, last.saturating_sub(first));
        return if whole.is_empty() { Ok(()) } else { storage.zero_blocks(whole, how).await };
    }
    if first >= last {
        return put_zeroes(storage, span).await;
    }
    put_zeroes(storage, Span::new(span.start, first - span.start)).await?;
    storage.zero_blocks(Span::new(first, last - first), how).await?;
    put_zeroes(storage, Span::new(last, end - last)).await
}

/// Writes zeroes to less than two blocks; as the kernel does it, not behind the end.
async fn put_zeroes<S: WholeBlocks>(storage: &S, span: Span) -> io::Result<()> {
    let span = span.prefix(span.len.min(storage.end().saturating_sub(span.start)));
    if span.is_empty() {
        return Ok(());
    }
    let page = PageBuf::zeroed(span.len as usize);
    let operation = |zeroes| put(storage, span.start, zeroes);
    // SAFETY: implementations of `WholeBlocks` keep to what `lend` asks for.
    unsafe { lend(page, 0..span.len as usize, operation) }.await.1
}

/// A storage that takes whole blocks only, for requests of 512 bytes.
#[derive(Debug)]
pub struct InBlocks<S> {
    storage: S,
    blocks: Blocks,
    tasks: Tasks,
}

impl<S: Storage> InBlocks<S> {
    /// `storage` takes blocks of as many bytes as its sectors have.
    pub fn new(storage: S, tasks: Tasks) -> Self {
        let blocks = Blocks::new(storage.info().sector_len.into());
        Self { storage, blocks, tasks }
    }
}

// SAFETY: the storage below keeps to the contract.
unsafe impl<S: Storage> WholeBlocks for InBlocks<S> {
    fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn end(&self) -> u64 {
        self.blocks.floor(self.storage.len())
    }

    fn read_blocks(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>> {
        self.storage.read(at, into)
    }

    fn write_blocks(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>> {
        self.storage.write(at, from)
    }

    fn zero_blocks(&self, span: Span, how: Zeroing) -> impl Future<Output = io::Result<()>> {
        self.storage.zero(span, how)
    }

    async fn read_end(&self, _at: u64, _into: Segments) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, "read past the last whole block"))
    }

    async fn write_end(&self, _at: u64, _from: Segments) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }
}

// SAFETY: the storage below keeps to the contract, and gets this one's memory, or pages that are owned until its
// futures have ended.
unsafe impl<S: Storage> Storage for InBlocks<S> {
    fn info(&self) -> StorageInfo {
        StorageInfo { align: 512, ..self.storage.info() }
    }

    fn len(&self) -> u64 {
        self.end()
    }

    fn inode(&self) -> u64 {
        self.storage.inode()
    }

    fn data_run(&self, span: Span) -> impl Future<Output = (u64, bool)> {
        self.storage.data_run(span)
    }

    /// What the storage knows is about whole blocks, so it is asked about these.
    async fn known_runs(&self, span: Span, count_max: usize) -> Vec<(u64, bool)> {
        let start = self.blocks.floor(span.start);
        let end = self.blocks.ceil(span.start + span.len).min(self.end());
        let mut runs = self.storage.known_runs(Span::new(start, end - start), count_max).await;
        let (mut before, mut left) = (span.start - start, span.len);
        for (len, _) in &mut runs {
            let skipped = before.min(*len);
            *len = (*len - skipped).min(left);
            (before, left) = (before - skipped, left - *len);
        }
        runs.retain(|(len, _)| *len > 0);
        if runs.is_empty() {
            runs.push((span.len, true));
        }
        runs
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        read(self, at, into).await
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        write(self, at, from).await
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> {
        self.storage.flush()
    }

    async fn zero(&self, span: Span, how: Zeroing) -> io::Result<()> {
        zero(self, span, how).await
    }

    fn allocate(&self, span: Span, space: bool) -> impl Future<Output = io::Result<()>> {
        self.storage.allocate(span, space)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> {
        self.storage.set_len(len)
    }
}
