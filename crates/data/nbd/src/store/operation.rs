//! What a caller of the storage waits for. Written by hand, because it is part of every request task of a disk, remote
//! or not: a chain of nested `async fn`s would take four times the room.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Inner;
use super::slots::{Ask, Outcome, SlotState};

/// What an end of a request means for the storage.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// Nothing.
    Plain,
    /// Something was written, perhaps also when it failed.
    Change,
    /// The writes up to this number are durable.
    Flush {
        /// Of [`Inner::written`].
        covered: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// No place in the table yet.
    New,
    /// At this place.
    Placed(u32),
    /// Over.
    Ended,
}

/// One request.
pub(super) struct Request<'a> {
    inner: &'a Inner,
    ask: Ask,
    kind: Effect,
    stage: Stage,
    begun: bool,
}

impl<'a> Request<'a> {
    pub(super) const fn new(inner: &'a Inner, ask: Ask, kind: Effect) -> Self {
        Self { inner, ask, kind, stage: Stage::New, begun: false }
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true)
            && let Effect::Change = self.kind
        {
            let inner = self.inner;
            inner.status.borrow_mut().forget();
            inner.changes.set(inner.changes.get() + 1);
            inner.writing.set(inner.writing.get() + 1);
        }
    }

    fn end(&mut self, outcome: Outcome) -> io::Result<()> {
        self.stage = Stage::Ended;
        let inner = self.inner;
        if let Effect::Change = self.kind {
            inner.writing.set(inner.writing.get() - 1);
            inner.written.set(inner.written.get() + 1);
        }
        if outcome != Outcome::Done {
            return Err(inner.error(outcome));
        }
        match self.kind {
            Effect::Flush { covered } => inner.flushed(covered),
            Effect::Plain | Effect::Change => Ok(()),
        }
    }
}

impl Future for Request<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = self.inner;
        let tasks = inner.tasks();
        self.begin();
        loop {
            match self.stage {
                Stage::New => {
                    if inner.refusing.get() {
                        return Poll::Ready(self.end(Outcome::Unreachable));
                    }
                    let taken = inner.slots.borrow_mut().take(self.ask, tasks.current());
                    let Some(index) = taken else {
                        // Joins the waiters, and is asked again when a place is free.
                        let mut freed = inner.freed.wait(tasks);
                        let _ = Pin::new(&mut freed).poll(context);
                        return Poll::Pending;
                    };
                    self.stage = Stage::Placed(index);
                    inner.queue.borrow_mut().push_back(index);
                    inner.work.notify_all(tasks);
                    inner.busy.notify_all(tasks);
                }
                Stage::Placed(index) => {
                    let outcome = {
                        let mut slots = inner.slots.borrow_mut();
                        let slot = slots.at(index);
                        if slot.state != SlotState::Done {
                            slot.task = tasks.current();
                            return Poll::Pending;
                        }
                        let outcome = slot.outcome;
                        slots.free(index);
                        outcome
                    };
                    inner.freed.notify_all(tasks);
                    return Poll::Ready(self.end(outcome));
                }
                Stage::Ended => return Poll::Pending,
            }
        }
    }
}

/// A call of the storage: nothing to wait for, one request, or several one after the other.
pub(super) enum Operation<'a> {
    Now(Option<io::Result<()>>),
    One(Request<'a>),
    /// Rare, and on the heap.
    Many(Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>),
}

impl Operation<'_> {
    pub(super) const DONE: Self = Self::Now(Some(Ok(())));

    pub(super) const fn failed(error: io::Error) -> Self {
        Self::Now(Some(Err(error)))
    }
}

impl Future for Operation<'_> {
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Now(result) => result.take().map_or(Poll::Pending, Poll::Ready),
            Self::One(request) => Pin::new(request).poll(context),
            Self::Many(future) => future.as_mut().poll(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_small() {
        let len = size_of::<Operation<'_>>();
        assert!(len <= 160, "{len} bytes in every request task of every disk");
    }
}
