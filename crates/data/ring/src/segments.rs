//! Memory that a request moves: pieces of guest memory, pool pages or a metadata page.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::slice;

/// Memory to read into or write from: a run of `iovec`s, some of it skipped, `len` bytes in all.
///
/// A copyable view. It never owns, so that cutting a request at block borders allocates nothing. Its maker guarantees
/// (see [`Segments::from_iovecs`]) that the memory outlives every operation on it.
#[derive(Clone, Copy, Debug)]
pub struct Segments {
    pieces: Pieces,
    skip: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug)]
enum Pieces {
    One { base: *mut u8, buffer: Option<u16> },
    Many { first: *const libc::iovec, count: usize },
}

/// How the kernel is to be handed the memory of a [`Segments`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Flat {
    /// Contiguous; `buffer` is the index of the registered buffer it lies in.
    Contiguous { base: *mut u8, len: u32, buffer: Option<u16> },
    /// Scattered: to be copied into an iovec table by [`Segments::fill_iovecs`].
    Scattered,
}

impl Segments {
    /// No memory: what a flush or a discard carries.
    pub const EMPTY: Self =
        Self { pieces: Pieces::One { base: std::ptr::null_mut(), buffer: None }, skip: 0, len: 0 };

    /// A contiguous piece.
    ///
    /// # Safety
    /// `base .. base + len` stays valid, and is not accessed through a reference in a way that conflicts, until
    /// every operation started on this value or on a slice of it has completed.
    pub const unsafe fn from_raw(base: *mut u8, len: u64) -> Self {
        Self { pieces: Pieces::One { base, buffer: None }, skip: 0, len }
    }

    /// A contiguous piece inside registered buffer `buffer` of the ring.
    ///
    /// # Safety
    /// As [`Segments::from_raw`]; and the whole piece lies inside that registered buffer.
    pub(crate) const unsafe fn from_registered(base: *mut u8, len: u64, buffer: Option<u16>) -> Self {
        Self { pieces: Pieces::One { base, buffer }, skip: 0, len }
    }

    /// Scattered pieces, `len` bytes in all.
    ///
    /// # Safety
    /// The table and the memory it names stay valid as for [`Segments::from_raw`]; the pieces add up to at least
    /// `len` bytes.
    pub unsafe fn from_iovecs(table: &[libc::iovec], len: u64) -> Self {
        match table {
            [one] => Self { pieces: Pieces::One { base: one.iov_base.cast(), buffer: None }, skip: 0, len },
            many => Self { pieces: Pieces::Many { first: many.as_ptr(), count: many.len() }, skip: 0, len },
        }
    }

    /// The same memory for the ring of another thread, which has not registered it.
    #[must_use]
    pub const fn elsewhere(&self) -> Self {
        let pieces = match self.pieces {
            Pieces::One { base, .. } => Pieces::One { base, buffer: None },
            many @ Pieces::Many { .. } => many,
        };
        Self { pieces, skip: self.skip, len: self.len }
    }

    /// Bytes in all.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `offset`; both must lie inside.
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Self {
        assert!(offset <= self.len && len <= self.len - offset, "slice outside its segments");
        Self { pieces: self.pieces, skip: self.skip + offset, len }
    }

    /// The beginning, as far as it is contiguous.
    pub(crate) fn first_piece(&self) -> Self {
        let mut first = None;
        self.for_each(|_, len| {
            first.get_or_insert(len as u64);
        });
        self.slice(0, first.unwrap_or(0))
    }

    /// Whether every piece starts and ends on a multiple of `align` (a power of two), as O_DIRECT wants it.
    pub fn is_aligned(&self, align: u32) -> bool {
        let mask = align as usize - 1;
        let mut aligned = true;
        self.for_each(|base, len| aligned &= (base as usize | len) & mask == 0);
        aligned
    }

    /// Calls `each` with every contiguous piece, in order.
    pub fn for_each(&self, mut each: impl FnMut(*mut u8, usize)) {
        let (mut skip, mut left) = (self.skip as usize, self.len as usize);
        match self.pieces {
            Pieces::One { base, .. } => {
                if left > 0 {
                    each(base.wrapping_add(skip), left);
                }
            }
            Pieces::Many { first, count } => {
                for index in 0..count {
                    if left == 0 {
                        break;
                    }
                    // SAFETY: `from_iovecs` had a table of `count` entries that is still valid.
                    let piece = unsafe { &*first.add(index) };
                    if skip >= piece.iov_len {
                        skip -= piece.iov_len;
                        continue;
                    }
                    let len = (piece.iov_len - skip).min(left);
                    each(piece.iov_base.cast::<u8>().wrapping_add(skip), len);
                    skip = 0;
                    left -= len;
                }
                assert!(left == 0, "segments shorter than they claim");
            }
        }
    }

    /// How to hand this to the kernel.
    pub(crate) fn flat(&self) -> Flat {
        match self.pieces {
            Pieces::One { base, buffer } => Flat::Contiguous {
                base: base.wrapping_add(self.skip as usize),
                len: u32::try_from(self.len).unwrap_or(u32::MAX),
                buffer,
            },
            Pieces::Many { .. } => {
                let (mut found, mut pieces) = (None, 0);
                self.for_each(|base, len| {
                    pieces += 1;
                    found = Some((base, len));
                });
                match found {
                    Some((base, len)) if pieces == 1 => {
                        Flat::Contiguous { base, len: len as u32, buffer: None }
                    }
                    _ => Flat::Scattered,
                }
            }
        }
    }

    /// Writes the pieces into `table` as far as it has room; returns how many and how many bytes they hold.
    pub(crate) fn fill_iovecs(&self, table: &mut [libc::iovec]) -> (usize, u64) {
        let (mut count, mut bytes) = (0, 0);
        self.for_each(|base, len| {
            if let Some(entry) = table.get_mut(count) {
                *entry = libc::iovec { iov_base: base.cast(), iov_len: len };
                count += 1;
                bytes += len as u64;
            }
        });
        (count, bytes)
    }

    /// Fills the memory with zeroes.
    pub fn fill_zero(&self) {
        // SAFETY: the maker guaranteed that the memory is valid for writing.
        self.for_each(|base, len| unsafe { base.write_bytes(0, len) });
    }

    /// Copies `from` into the memory; the lengths must be equal.
    pub fn copy_from(&self, from: &[u8]) {
        assert_eq!(from.len() as u64, self.len);
        let mut at = 0;
        self.for_each(|base, len| {
            // SAFETY: the maker guaranteed that the memory is valid for writing; `from` is checked by the slice.
            unsafe { base.copy_from_nonoverlapping(from[at..at + len].as_ptr(), len) };
            at += len;
        });
    }

    /// Copies the memory out; the lengths must be equal.
    pub fn copy_to(&self, into: &mut [u8]) {
        assert_eq!(into.len() as u64, self.len);
        let mut at = 0;
        self.for_each(|base, len| {
            // SAFETY: the maker guaranteed that the memory is valid for reading; `into` is checked by the slice.
            unsafe { base.copy_to_nonoverlapping(into[at..at + len].as_mut_ptr(), len) };
            at += len;
        });
    }
}

/// Page-aligned memory for metadata, zeroed at first. Not for the path of guest data, which uses the pool.
///
/// Operations take it by value: [`crate::Storage::read_into`], [`crate::Storage::write_from`].
///
/// ```compile_fail,E0382
/// # async fn example(store: impl tapio_ring::Storage) {
/// let page = tapio_ring::PageBuf::zeroed(4096);
/// let write = store.write_from(0, page, 0..4096);
/// drop(page);
/// # drop(write);
/// # }
/// ```
#[derive(Debug)]
pub struct PageBuf {
    base: NonNull<u8>,
    layout: Layout,
}

impl PageBuf {
    /// `len` zero bytes at a page border.
    pub fn zeroed(len: usize) -> Self {
        let layout =
            Layout::from_size_align(len.max(1), 4096).expect("metadata buffers are far below isize::MAX");
        // SAFETY: the layout has a size above zero.
        let base =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }

    /// Where it begins.
    pub(crate) const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl std::ops::Deref for PageBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this size and initialised to zero.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }
}

impl std::ops::DerefMut for PageBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

impl Drop for PageBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with the same layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scattered(memory: &mut [Vec<u8>]) -> (Vec<libc::iovec>, u64) {
        let table: Vec<_> = memory
            .iter_mut()
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() })
            .collect();
        let len = table.iter().map(|piece| piece.iov_len as u64).sum();
        (table, len)
    }

    #[test]
    fn every_slice_of_scattered_memory_names_the_same_bytes() {
        let mut memory: Vec<Vec<u8>> = vec![(0..5).collect(), (5..6).collect(), (6..16).collect()];
        let (table, len) = scattered(&mut memory);
        // SAFETY: `memory` and `table` outlive `all`.
        let all = unsafe { Segments::from_iovecs(&table, len) };
        for start in 0..=len {
            for count in 0..=len - start {
                let mut out = vec![0; count as usize];
                all.slice(start, count).copy_to(&mut out);
                let want: Vec<u8> = (start as u8..(start + count) as u8).collect();
                assert_eq!(out, want);
            }
        }
    }

    #[test]
    fn a_slice_inside_one_piece_is_contiguous() {
        let mut memory: Vec<Vec<u8>> = vec![vec![0; 8], vec![0; 8]];
        let (table, len) = scattered(&mut memory);
        // SAFETY: `memory` and `table` outlive `all`.
        let all = unsafe { Segments::from_iovecs(&table, len) };
        assert!(matches!(all.slice(9, 4).flat(), Flat::Contiguous { len: 4, .. }));
        assert!(matches!(all.slice(6, 4).flat(), Flat::Scattered));
    }
}
