//! A few futures of one kind at once, without an allocation.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

/// Up to `N` futures that run together inside one task. None is ever dropped before its end: they own operations of the
/// kernel.
pub(crate) struct Window<F, E, const N: usize> {
    slots: [Option<F>; N],
    failure: Option<E>,
}

impl<F: Future<Output = Result<(), E>>, E, const N: usize> Window<F, E, N> {
    pub(crate) const fn new() -> Self {
        Self { slots: [const { None }; N], failure: None }
    }

    /// Starts `future` when there is a place for it.
    pub(crate) async fn push(mut self: Pin<&mut Self>, future: F) {
        let place = poll_fn(|context| match self.as_mut().poll_slots(context) {
            (Some(place), _) => Poll::Ready(place),
            (None, _) => Poll::Pending,
        })
        .await;
        // SAFETY: the place is empty, and the window is pinned: from here on the future does not move.
        unsafe { self.as_mut().get_unchecked_mut() }.slots[place] = Some(future);
        // Started at once, so that it shares the batch of this turn.
        poll_fn(|context| {
            self.as_mut().poll_slots(context);
            Poll::Ready(())
        })
        .await;
    }

    /// Waits for `other`, and goes on with what is in flight meanwhile.
    pub(crate) async fn beside<T>(mut self: Pin<&mut Self>, other: impl Future<Output = T>) -> T {
        let mut other = pin!(other);
        poll_fn(|context| {
            self.as_mut().poll_slots(context);
            other.as_mut().poll(context)
        })
        .await
    }

    /// Waits until all have ended; the first failure, if there was one.
    pub(crate) async fn finish(mut self: Pin<&mut Self>) -> Result<(), E> {
        poll_fn(|context| if self.as_mut().poll_slots(context).1 { Poll::Ready(()) } else { Poll::Pending })
            .await;
        // SAFETY: only the failure is moved, which is not pinned.
        match unsafe { self.get_unchecked_mut() }.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// Whether one has failed.
    pub(crate) const fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Polls all; gives an empty place and whether all are empty.
    fn poll_slots(self: Pin<&mut Self>, context: &mut Context<'_>) -> (Option<usize>, bool) {
        // SAFETY: the futures are polled and dropped where they are, never moved.
        let this = unsafe { self.get_unchecked_mut() };
        let (mut empty, mut all) = (None, true);
        for (index, slot) in this.slots.iter_mut().enumerate() {
            if let Some(future) = slot {
                // SAFETY: as above.
                match unsafe { Pin::new_unchecked(future) }.poll(context) {
                    Poll::Pending => {
                        all = false;
                        continue;
                    }
                    Poll::Ready(result) => {
                        *slot = None;
                        if let Err(failure) = result {
                            this.failure.get_or_insert(failure);
                        }
                    }
                }
            }
            empty = empty.or(Some(index));
        }
        (empty, all)
    }
}
