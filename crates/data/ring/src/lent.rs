//! Memory of this process that an operation works on: the operation has it, and gives it back at its end.
//!
//! An operation that borrowed its memory could not be checked: a future may be forgotten, which ends a borrow but not
//! the operation. So memory goes into the operation by value and comes back with the result. A future that is
//! forgotten takes the memory with it, for good; one that is dropped in flight does so too ([`crate::dropped`]).

use std::future::Future;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::buffer::Buffer;
use crate::dropped::Dropped;
use crate::segments::{PageBuf, Segments};

/// Memory that can be given to an operation that takes data out of it.
///
/// # Safety
/// What [`Memory::segments`] names stays where it is, wherever the value is moved, until the value is dropped. Nothing
/// changes it as long as an operation has the value.
pub unsafe trait Memory: 'static {
    /// The bytes of `place`, which must lie inside.
    ///
    /// # Safety
    /// What is made here is used only by operations that have ended when the memory is dropped or changed: [`lend`].
    unsafe fn segments(&self, place: Range<usize>) -> Segments;
}

/// Memory that can also be given to an operation that puts data into it.
///
/// # Safety
/// The value is the only one by which this memory is reached.
pub unsafe trait MemoryMut: Memory {}

// SAFETY: the pages are on the heap, and belong to the value alone.
unsafe impl Memory for PageBuf {
    unsafe fn segments(&self, place: Range<usize>) -> Segments {
        assert!(place.end <= self.len(), "a place outside of its memory");
        // SAFETY: the pages live as long as the value, and the caller keeps to that.
        let whole = unsafe { Segments::from_raw(self.as_ptr(), self.len() as u64) };
        whole.slice(place.start as u64, place.len() as u64)
    }
}

// SAFETY: as above.
unsafe impl MemoryMut for PageBuf {}

// SAFETY: the pages are the pool's, and no other buffer has them until the value is dropped.
unsafe impl Memory for Buffer {
    unsafe fn segments(&self, place: Range<usize>) -> Segments {
        // SAFETY: the caller keeps to that.
        let whole = unsafe { self.whole() };
        whole.slice(place.start as u64, place.len() as u64)
    }
}

// SAFETY: as above.
unsafe impl MemoryMut for Buffer {}

// SAFETY: as for the memory itself, where there is some.
unsafe impl<B: Memory> Memory for Option<B> {
    unsafe fn segments(&self, place: Range<usize>) -> Segments {
        let memory = self.as_ref().expect("there is memory to move");
        // SAFETY: the caller keeps to that.
        unsafe { memory.segments(place) }
    }
}

// SAFETY: what is shared can be looked at only; it is dropped with the last that has it.
unsafe impl<B: Memory> Memory for Rc<B> {
    unsafe fn segments(&self, place: Range<usize>) -> Segments {
        // SAFETY: the caller keeps to that.
        unsafe { B::segments(self, place) }
    }
}

/// Memory that is in the hands of an operation.
#[derive(Debug)]
pub struct Lent<B> {
    memory: ManuallyDrop<B>,
    /// The operation may have begun.
    is_used: bool,
}

impl<B> Lent<B> {
    fn new(memory: B) -> Self {
        Self { memory: ManuallyDrop::new(memory), is_used: false }
    }

    /// The operation has ended.
    fn take(mut self) -> B {
        // SAFETY: not used again, because `self` is forgotten.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        std::mem::forget(self);
        memory
    }
}

impl<B> Drop for Lent<B> {
    fn drop(&mut self) {
        if !(self.is_used && Dropped::Memory.is_fault()) {
            // SAFETY: dropped once: `take` forgets the rest.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// An operation with the memory that it works on. Gives both back.
#[derive(Debug)]
#[must_use = "an operation must be awaited"]
pub struct Lending<B, F> {
    /// Before the memory, because that is the order in which they are dropped.
    operation: F,
    lent: Option<Lent<B>>,
}

/// Lends `place` of `memory` to an operation until its end. Memory of this process reaches operations this way, or as
/// that of a request.
///
/// # Safety
/// What `operation` is given is used from the first poll of the future that it returns until that has ended, and never
/// again, by the future and by everything that it hands the memory to: see [`crate::Storage`].
pub unsafe fn lend<B: Memory, F: Future>(
    memory: B,
    place: Range<usize>,
    operation: impl FnOnce(Segments) -> F,
) -> Lending<B, F> {
    let lent = Lent::new(memory);
    // SAFETY: the memory is kept beside the operation until that has ended, and is kept for good if its future is
    // dropped before. It stays where it is when the two are moved.
    let data = unsafe { lent.memory.segments(place) };
    Lending { operation: operation(data), lent: Some(lent) }
}

impl<B, F: Future> Future for Lending<B, F> {
    type Output = (B, F::Output);

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: the operation is polled where it is and never moved; the memory is not pinned.
        let this = unsafe { self.get_unchecked_mut() };
        if let Some(lent) = &mut this.lent {
            lent.is_used = true;
        }
        // SAFETY: as above.
        match unsafe { Pin::new_unchecked(&mut this.operation) }.poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                let lent = this.lent.take().expect("a future that has ended is not polled");
                Poll::Ready((lent.take(), result))
            }
        }
    }
}
