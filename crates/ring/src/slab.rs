//! Places for the futures of requests, which never move and never cost an allocation.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;

const PAGE_LEN: usize = 4096;

/// A fixed number of places. Memory is touched only where a place was used since the last [`Slab::rest`]: a slab that
/// wrote "empty" into each place would cost an idle disk a megabyte.
pub(crate) struct Slab<F> {
    places: Box<[UnsafeCell<MaybeUninit<F>>]>,
    used: Box<[Cell<bool>]>,
    touched: Cell<bool>,
}

impl<F> Slab<F> {
    /// `count` empty places.
    pub fn new(count: usize) -> Self {
        let places = Box::new_uninit_slice(count);
        // SAFETY: a place that holds nothing yet is a valid `UnsafeCell<MaybeUninit<F>>` whatever its bytes are.
        let places = unsafe { places.assume_init() };
        Self { places, used: (0..count).map(|_| Cell::new(false)).collect(), touched: Cell::new(false) }
    }

    /// How many places there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Fills an empty place.
    pub fn put(&self, index: u32, future: F) {
        let index = index as usize;
        assert!(!self.used[index].replace(true), "the place of a request is taken");
        self.touched.set(true);
        // SAFETY: the place is empty, so nobody refers into it; the slab belongs to one thread.
        unsafe { (*self.places[index].get()).write(future) };
    }

    /// The future in a place, which stays there until it is removed.
    pub fn at(&self, index: u32) -> Option<*mut F> {
        let index = index as usize;
        self.used.get(index)?.get().then(|| self.places[index].get().cast::<F>())
    }

    /// Ends the future in a place.
    pub fn remove(&self, index: u32) {
        if let Some(future) = self.at(index) {
            self.used[index as usize].set(false);
            // SAFETY: the place was filled, and is empty from now on; nobody else refers into it.
            unsafe { future.drop_in_place() };
        }
    }

    /// Gives memory back to the host if no place is filled.
    pub fn rest(&self) {
        if !self.touched.get() || self.used.iter().any(Cell::get) {
            return;
        }
        self.touched.set(false);
        let begin = self.places.as_ptr().addr().next_multiple_of(PAGE_LEN);
        let end = (self.places.as_ptr().addr() + size_of_val(&*self.places)) & !(PAGE_LEN - 1);
        if begin < end {
            let start = self.places.as_ptr().cast_mut().cast::<u8>().with_addr(begin);
            // SAFETY: whole pages inside our own memory, which holds nothing: what they read as does not matter.
            unsafe { libc::madvise(start.cast(), end - begin, libc::MADV_DONTNEED) };
        }
    }
}

impl<F> Drop for Slab<F> {
    fn drop(&mut self) {
        for index in 0..self.places.len() {
            self.remove(index as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn what_is_put_is_found_and_dropped_once() {
        let slab: Slab<(Rc<()>, [u8; 5000])> = Slab::new(8);
        let witness = Rc::new(());
        for index in 0..8 {
            assert!(slab.at(index).is_none());
            slab.put(index, (Rc::clone(&witness), [index as u8; 5000]));
        }
        // Full: resting must not take anything away.
        slab.rest();
        for index in 0..8 {
            let place = slab.at(index).unwrap();
            // SAFETY: the place is filled and nobody else looks at it.
            assert_eq!(unsafe { &*place }.1, [index as u8; 5000]);
        }
        (0..8).for_each(|index| slab.remove(index));
        assert_eq!(Rc::strong_count(&witness), 1);
        slab.rest();
        slab.put(3, (Rc::clone(&witness), [9; 5000]));
        assert!(slab.at(3).is_some() && slab.at(9).is_none());
        drop(slab);
        assert_eq!(Rc::strong_count(&witness), 1);
    }
}
