//! The pool of page-aligned memory that front ends without shared memory move data through.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;

use crate::segments::Segments;

const PAGE_LEN: usize = 4096;
/// Memory is registered with the ring, and given back, in chunks of this size.
const CHUNK_LEN: usize = 1 << 20;
const CHUNK_PAGES: usize = CHUNK_LEN / PAGE_LEN;

/// Registers one chunk with the ring (or takes it back); false when the kernel refuses.
type Registrar = Box<dyn Fn(u16, Option<(*mut u8, usize)>) -> bool>;

struct Inner {
    base: NonNull<u8>,
    pages: usize,
    /// One bit a page, set while the page is free.
    free: RefCell<Vec<u64>>,
    free_pages: Cell<usize>,
    /// No page below this one is free.
    hint: Cell<usize>,
    registered: RefCell<Vec<bool>>,
    registrar: RefCell<Option<Registrar>>,
    touched: Cell<bool>,
}

/// A bounded pool of pages, one anonymous mapping. Memory costs nothing until it is used, the lowest pages are used
/// first, and [`Pool::rest`] gives back what is free.
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("pages", &self.inner.pages)
            .field("free", &self.inner.free_pages.get())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `len` bytes, rounded up to whole chunks of 1 MiB.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(CHUNK_LEN);
        if u32::try_from(len / PAGE_LEN).is_err() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // SAFETY: a fresh private anonymous mapping; no existing memory is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Huge pages would make the first byte of a chunk cost 2 MiB.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(base, len, libc::MADV_NOHUGEPAGE) };
        let pages = len / PAGE_LEN;
        let inner = Inner {
            base: NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)?,
            pages,
            free: RefCell::new(vec![u64::MAX; pages / 64]),
            free_pages: Cell::new(pages),
            hint: Cell::new(0),
            registered: RefCell::new(vec![false; pages / CHUNK_PAGES]),
            registrar: RefCell::new(None),
            touched: Cell::new(false),
        };
        Ok(Self { inner: Rc::new(inner) })
    }

    pub(crate) fn set_registrar(&self, registrar: Registrar) {
        *self.inner.registrar.borrow_mut() = Some(registrar);
    }

    /// How many chunks there are, each to be one registered buffer.
    pub(crate) fn chunks(&self) -> usize {
        self.inner.pages / CHUNK_PAGES
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.inner.pages * PAGE_LEN
    }

    /// Whether the pool has no memory; it always has.
    pub fn is_empty(&self) -> bool {
        self.inner.pages == 0
    }

    /// Bytes not in use.
    pub fn free_len(&self) -> usize {
        self.inner.free_pages.get() * PAGE_LEN
    }

    /// `len` bytes, contiguous and page-aligned, content unspecified; `None` when there is no such run: the
    /// caller waits until a buffer is dropped.
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let count = len.max(1).div_ceil(PAGE_LEN);
        if count > self.inner.free_pages.get() {
            return None;
        }
        let first = self.find(count)?;
        self.mark(first, count, false);
        if first == self.inner.hint.get() {
            self.inner.hint.set(first + count);
        }
        self.inner.free_pages.set(self.inner.free_pages.get() - count);
        self.inner.touched.set(true);
        let buffer = self.registered_chunk(first, count);
        Some(Buffer { pool: self.clone(), len, first: first as u32, count: count as u32, buffer })
    }

    /// Gives the memory of free pages back to the host.
    pub fn rest(&self) {
        if !self.inner.touched.replace(false) {
            return;
        }
        for chunk in 0..self.chunks() {
            let first = chunk * CHUNK_PAGES;
            let idle = self.inner.free.borrow()[first / 64..(first + CHUNK_PAGES) / 64]
                .iter()
                .all(|word| *word == u64::MAX);
            if !idle {
                self.inner.touched.set(true);
                continue;
            }
            if self.inner.registered.borrow()[chunk] {
                if let Some(registrar) = &*self.inner.registrar.borrow() {
                    registrar(chunk as u16, None);
                }
                self.inner.registered.borrow_mut()[chunk] = false;
            }
            // SAFETY: the chunk lies inside the mapping, and no page of it is in use.
            unsafe { libc::madvise(self.page(first).cast(), CHUNK_LEN, libc::MADV_DONTNEED) };
        }
    }

    fn page(&self, index: usize) -> *mut u8 {
        // SAFETY: callers give an index inside the mapping.
        unsafe { self.inner.base.as_ptr().add(index * PAGE_LEN) }
    }

    fn registered_chunk(&self, first: usize, count: usize) -> Option<u16> {
        let chunk = first / CHUNK_PAGES;
        if (first + count - 1) / CHUNK_PAGES != chunk {
            return None;
        }
        if !self.inner.registered.borrow()[chunk] {
            let registrar = self.inner.registrar.borrow();
            let done = registrar.as_ref()?(chunk as u16, Some((self.page(chunk * CHUNK_PAGES), CHUNK_LEN)));
            if !done {
                return None;
            }
            self.inner.registered.borrow_mut()[chunk] = true;
        }
        Some(chunk as u16)
    }

    fn free(&self, first: usize, count: usize) {
        self.mark(first, count, true);
        let inner = &self.inner;
        inner.free_pages.set(inner.free_pages.get() + count);
        inner.hint.set(inner.hint.get().min(first));
    }

    fn find(&self, count: usize) -> Option<usize> {
        let free = self.inner.free.borrow();
        let mut at = self.inner.hint.get();
        let mut run = 0;
        while at < self.inner.pages {
            let word = free[at / 64] >> (at % 64);
            let left = 64 - at % 64;
            if word == 0 {
                run = 0;
                at += left;
                continue;
            }
            let skip = word.trailing_zeros() as usize;
            if skip > 0 {
                run = 0;
                at += skip;
                continue;
            }
            let ones = (word.trailing_ones() as usize).min(left);
            if run + ones >= count {
                return Some(at - run);
            }
            run += ones;
            at += ones;
        }
        None
    }

    fn mark(&self, first: usize, count: usize, free: bool) {
        let mut words = self.inner.free.borrow_mut();
        let mut at = first;
        let end = first + count;
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            if free {
                words[at / 64] |= mask;
            } else {
                words[at / 64] &= !mask;
            }
            at += bits;
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `Pool::new`, and no buffer is held any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE_LEN) };
    }
}

/// A run of pages out of a [`Pool`]; goes back when dropped.
#[derive(Debug)]
pub struct Buffer {
    pool: Pool,
    len: usize,
    /// Short, because requests carry buffers.
    first: u32,
    count: u32,
    buffer: Option<u16>,
}

impl Buffer {
    const fn pages(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Keeps the first `len` bytes and gives the pages behind them back: for a caller that learns after receiving how
    /// much there was.
    pub fn truncate(&mut self, len: usize) {
        let keep = len.max(1).div_ceil(PAGE_LEN);
        let pages = self.pages();
        if keep < pages.len() {
            self.pool.free(pages.start + keep, pages.len() - keep);
            self.count = keep as u32;
            self.buffer = self.pool.registered_chunk(pages.start, keep);
        }
        self.len = self.len.min(len);
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pool.page(self.first as usize)
    }

    /// All of it, as the memory of an operation.
    ///
    /// # Safety
    /// As [`crate::Memory::segments`].
    pub(crate) unsafe fn whole(&self) -> Segments {
        // SAFETY: the pages are this buffer's until it is dropped, and the caller keeps to that.
        unsafe { Segments::from_registered(self.as_ptr(), self.len as u64, self.buffer) }
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages are mapped and belong to this buffer alone.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let pages = self.pages();
        self.pool.free(pages.start, pages.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_never_overlap_and_all_come_back() {
        let pool = Pool::new(4 << 20).unwrap();
        let mut held: Vec<Buffer> = Vec::new();
        let mut state = 1u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let len = 1 + (state >> 33) as usize % (300 << 10);
            if state >> 62 == 0 && !held.is_empty() {
                held.swap_remove((state >> 40) as usize % held.len());
            } else if let Some(buffer) = pool.take(len) {
                for other in &held {
                    let (a, b) = (buffer.pages(), other.pages());
                    assert!(a.end <= b.start || b.end <= a.start, "two buffers share a page");
                }
                held.push(buffer);
            } else {
                held.clear();
            }
        }
        held.clear();
        assert_eq!(pool.free_len(), pool.len());
        assert!(pool.take(4 << 20).is_some());
    }

    #[test]
    fn what_is_cut_off_a_buffer_is_free_and_the_rest_stays() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut buffer = pool.take(1 << 20).unwrap();
        buffer[..5000].fill(7);
        buffer.truncate(5000);
        assert_eq!((buffer.len(), pool.free_len()), (5000, (1 << 20) - 8192));
        let mut other = pool.take((1 << 20) - 8192).unwrap();
        other.fill(9);
        assert!(buffer.iter().all(|byte| *byte == 7));
        buffer.truncate(6000);
        assert_eq!(buffer.len(), 5000, "a buffer never grows");
        drop((buffer, other));
        assert_eq!(pool.free_len(), pool.len());
    }

    #[test]
    fn resting_gives_pages_back_and_keeps_what_is_in_use() {
        let pool = Pool::new(2 << 20).unwrap();
        let mut kept = pool.take(4096).unwrap();
        kept.fill(7);
        let mut other = pool.take(1 << 20).unwrap();
        other.fill(8);
        drop(other);
        pool.rest();
        assert!(kept.iter().all(|byte| *byte == 7));
    }
}
