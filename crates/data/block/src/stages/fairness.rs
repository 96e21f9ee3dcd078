//! A disk's part of the device that it shares with other disks: see [`tapio_stat::share`].
//!
//! ```text
//!   serve() ──▶ begin()                  alone on the device: one load in a turn of the thread
//!                 │ others have a slot
//!                 ├─▶ Counted            what goes to the device is counted, whole
//!                 └─▶ Paced              others compete: in pieces, each when the rule has room for it
//! ```
//!
//! A piece that waits goes when one of this disk's own pieces ends: that there is one is what makes it wait. So nothing
//! wakes a thread that would not wake anyway, except a timer while a piece waits, for a storage that is stuck.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use tapio_format::Result;
use tapio_ring::{Notify, Storage, Tasks};
use tapio_stat::share::{PERIOD_NS, PIECE_MIN, ShareFacts, ShareMember, ShareSeat};
use tapio_types::Span;

use crate::chain::Chain;
use crate::meter::Meter;
use crate::request::{Op, Request};
use crate::window::Window;

/// Pieces of one request at the device at once.
const PIECES_MAX: usize = 8;

/// How a request goes to the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As if there were no other disks.
    Free,
    /// Counted, since that time.
    Counted(u64),
    /// In pieces.
    Paced,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Fairness {
    member: RefCell<Option<ShareMember>>,
    /// The member's, to be reached without its lock.
    seat: RefCell<Option<Arc<ShareSeat>>>,
    is_on: Cell<bool>,
    /// Whether others have a slot, and the turn in which that was read.
    looked: Cell<(u64, bool)>,
    /// Pieces take turns: the next number, and whose turn it is.
    next: Cell<u64>,
    turn: Cell<u64>,
    /// Told when a piece has ended, or may go.
    freed: Notify,
}

impl fmt::Debug for Fairness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fairness").field("on", &self.is_on.get()).finish_non_exhaustive()
    }
}

impl Fairness {
    /// Shares a device from now on, or not any more.
    pub fn set(&self, member: Option<ShareMember>, tasks: &Tasks) {
        self.is_on.set(member.is_some());
        *self.seat.borrow_mut() = member.as_ref().map(ShareMember::seat);
        *self.member.borrow_mut() = member;
        self.looked.set((0, false));
        self.freed.notify_all(tasks);
    }

    /// Calls `run` with the place at the device, if there is one.
    pub fn with<T>(&self, run: impl FnOnce(&mut ShareMember) -> T) -> Option<T> {
        self.member.borrow_mut().as_mut().map(run)
    }

    /// What is known of the device.
    pub fn facts(&self) -> Option<ShareFacts> {
        self.with(|member| member.facts())
    }

    /// The place at the device, for queue threads.
    pub fn seat(&self) -> Option<Arc<ShareSeat>> {
        self.seat.borrow().clone()
    }

    fn seen<T>(&self, read: impl FnOnce(&ShareSeat) -> T) -> Option<T> {
        self.seat.borrow().as_deref().map(read)
    }

    /// A request comes by.
    #[inline]
    pub fn begin(&self, request: &Request, tasks: &Tasks) -> Way {
        if !self.is_on.get() || !matches!(request.op, Op::Read | Op::Write { .. }) {
            return Way::Free;
        }
        let now = tasks.turn_ns();
        let (then, mut is_shared) = self.looked.get();
        if then != now {
            is_shared = self.seen(ShareSeat::is_shared) == Some(true);
            self.looked.set((now, is_shared));
        }
        if !is_shared {
            return Way::Free;
        }
        self.look(tasks);
        match self.seen(ShareSeat::competes) {
            Some(true) => Way::Paced,
            Some(false) => {
                self.seen(|seat| seat.begin(request.span.len, now));
                Way::Counted(now)
            }
            None => Way::Free,
        }
    }

    /// `bytes` that began at a time are done.
    pub fn end(&self, bytes: u64, began_ns: u64, tasks: &Tasks) {
        self.seen(|seat| seat.end(bytes, began_ns, tasks.turn_ns()));
        self.look(tasks);
        if self.next.get() != self.turn.get() {
            self.freed.notify_all(tasks);
        }
    }

    /// Looks at the other disks, once in a period.
    fn look(&self, tasks: &Tasks) {
        if self.seen(|seat| seat.is_due(tasks.turn_ns())) == Some(true) {
            self.look_now(tasks);
        }
    }

    /// Looks at the other disks.
    pub fn look_now(&self, tasks: &Tasks) {
        if self.with(|member| member.look(tasks.turn_ns())) == Some(true) {
            self.freed.notify_all(tasks);
        }
    }

    /// Waits until a piece of `rest` bytes may go; gives its length.
    async fn turn_of(&self, rest: u64, tasks: &Tasks) -> u64 {
        let ticket = self.next.get();
        self.next.set(ticket + 1);
        let mut since = None;
        let bytes = loop {
            let now = tasks.turn_ns();
            if self.turn.get() == ticket {
                let piece = self.with(|member| member.piece(rest, now));
                // No longer shared: all of it.
                let Some(piece) = piece else { break rest };
                // The first in turn, behind a piece that the storage keeps: it is not held up by that.
                let is_over = since.is_some_and(|since: u64| now >= since.saturating_add(2 * PERIOD_NS));
                if let Some(bytes) = piece.or(is_over.then(|| rest.min(PIECE_MIN))) {
                    break bytes;
                }
            }
            if since.is_none() {
                since = Some(now);
                self.seen(|seat| seat.waits(now));
            }
            self.freed.wait_until(tasks, now.saturating_add(PERIOD_NS)).await;
        };
        let now = tasks.turn_ns();
        self.turn.set(ticket + 1);
        if self.next.get() != ticket + 1 {
            self.freed.notify_all(tasks);
        }
        self.seen(|seat| {
            seat.begin(bytes, now);
            if since.is_some() {
                seat.waited();
            }
        });
        if let Some(since) = since {
            self.with(|member| member.add_wait(now.saturating_sub(since)));
        }
        bytes
    }

    /// Reads or writes in pieces.
    ///
    /// # Errors
    /// The first of a piece; others may have moved.
    pub async fn paced<S: Storage>(
        &self,
        chain: &Chain<S>,
        request: &Request,
        meter: &Meter,
        tasks: &Tasks,
    ) -> Result<()> {
        let span = request.span;
        let piece = |at: u64, len: u64| async move {
            let (span, data) = (Span::new(span.start + at, len), request.data().slice(at, len));
            let began = tasks.turn_ns();
            let moved = match request.op {
                Op::Read => chain.read(span, data, meter).await,
                _ => chain.write(span, data, meter).await,
            };
            self.end(len, began, tasks);
            moved
        };
        let mut window = pin!(Window::<_, _, PIECES_MAX>::new());
        let mut done = 0;
        while done < span.len {
            let len = window.as_mut().beside(self.turn_of(span.len - done, tasks)).await;
            window.as_mut().push(piece(done, len)).await;
            done += len;
        }
        window.finish().await
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tapio_ring::Io;
    use tapio_ring::sim::SimHost;
    use tapio_stat::ShmRoot;
    use tapio_stat::share::{DeviceName, join};

    use super::super::asked::{answer, asked};
    use super::*;

    fn member(root: &ShmRoot, minor: u32) -> ShareMember {
        join(root, &"8-0".parse::<DeviceName>().expect("a name"), minor).expect("joined")
    }

    #[test]
    fn requests_are_counted_while_another_disk_has_a_slot_and_not_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, sim) = (ShmRoot::new(dir.path()), SimHost::new(1).process());
        let (fairness, tasks, client) = (Fairness::default(), sim.tasks(), Rc::default());
        let taken = asked(&client, Op::Read, 0, 4096);
        assert_eq!(fairness.begin(&taken.request, tasks), Way::Free);
        fairness.set(Some(member(&root, 0)), tasks);
        assert_eq!(fairness.begin(&taken.request, tasks), Way::Free, "it is alone");
        let other = member(&root, 1);
        fairness.looked.set((u64::MAX, false));
        assert_eq!(fairness.begin(&taken.request, tasks), Way::Counted(tasks.turn_ns()));
        assert_eq!(fairness.seat().expect("a place").in_flight(), 4096);
        fairness.end(4096, 0, tasks);
        assert_eq!(fairness.seat().expect("a place").in_flight(), 0);
        let flush = asked(&client, Op::Flush, 0, 0);
        assert_eq!(fairness.begin(&flush.request, tasks), Way::Free);
        assert_eq!(fairness.facts().expect("a place").disks, 2);
        drop(other);
        [taken, flush].into_iter().for_each(answer);
    }
}
