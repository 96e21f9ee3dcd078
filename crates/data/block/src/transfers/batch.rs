//! The line in which transfers wait for their neighbours.
//!
//! A transfer that comes waits in the line until all tasks that can run have run: those of the requests that were taken
//! from the guest with its own are behind it then. The first in line goes, with all that follow and continue it; it
//! leads them, and they wait for its end. So transfers go to the storage in the order in which they came, whatever they
//! overlap, and a transfer is the neighbour of the one before it only.
//!
//! Nothing is allocated for a transfer once the line was as long as it becomes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tapio_ring::{Segments, Storage, TaskId, Tasks};

use super::Way;

/// Pieces of memory of a transfer, at most: more go to the kernel by several operations.
const PIECES_MAX: usize = tapio_ring::PIECES_MAX;
/// Storages want memory of several pieces in whole sectors.
const PIECE_ALIGN: u32 = 512;

/// What goes to a storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    /// The storage, to be told from others.
    store: *const (),
    way: Way,
    at: u64,
    data: Segments,
}

impl Transfer {
    pub fn new<S: Storage>(store: &S, way: Way, at: u64, data: Segments) -> Self {
        Self { store: std::ptr::from_ref(store).cast(), way, at, data }
    }

    /// Whether `next` goes on where this ends.
    fn is_continued_by(&self, next: &Self) -> bool {
        self.store == next.store && self.way == next.way && self.at + self.data.len() == next.at
    }
}

/// What a transfer is to do after it has waited.
pub(super) enum Role {
    /// It goes by itself.
    Alone,
    /// It goes with others: [`Batch::ended`] must hear of the end.
    Leads(Lead),
    /// It went with others.
    Done,
    /// It went with others, which were cancelled.
    Cancelled,
}

/// Several transfers as one.
pub(super) struct Lead {
    pub at: u64,
    pub data: Segments,
    /// The first that is led.
    first: u32,
    /// What `data` names.
    table: Box<[libc::iovec]>,
}

/// How far one in the line has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    Led,
    Done,
    Cancelled,
    /// It was led, and the storage did not do all of it: it goes by itself.
    Again,
}

#[derive(Debug)]
struct Place {
    /// None: it only waits for those before it.
    transfer: Option<Transfer>,
    state: State,
    task: TaskId,
    /// It was its turn to run, and it was not the first in line.
    was_polled: bool,
    /// The next that the same transfer leads.
    next: Option<u32>,
    size_max: u32,
}

#[derive(Debug, Default)]
struct Line {
    places: Vec<Place>,
    free: Vec<u32>,
    order: VecDeque<u32>,
    tables: Vec<Box<[libc::iovec]>>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Batch(RefCell<Line>);

impl Batch {
    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().order.is_empty()
    }

    /// Waits in the line; up to `size_max` bytes may go as one.
    pub fn enter<'a>(&'a self, transfer: Option<Transfer>, size_max: u32, tasks: &'a Tasks) -> Turn<'a> {
        let mut line = self.0.borrow_mut();
        let task = tasks.current();
        let place = Place { transfer, state: State::Waits, task, was_polled: false, next: None, size_max };
        let index = match line.free.pop() {
            Some(index) => {
                line.places[index as usize] = place;
                index
            }
            None => {
                line.places.push(place);
                line.places.len() as u32 - 1
            }
        };
        line.order.push_back(index);
        Turn { batch: self, tasks, index, has_yielded: false }
    }

    /// What `lead` led has ended at the storage. True if that is the end of the leader too; otherwise it goes again
    /// alone, as all of them do.
    pub fn ended(&self, lead: Lead, result: &io::Result<()>, tasks: &Tasks) -> bool {
        let state = match result {
            Ok(()) => State::Done,
            // The time of the leader was over. Those that it led came at about the same time.
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => State::Cancelled,
            Err(_) => State::Again,
        };
        let mut line = self.0.borrow_mut();
        let mut next = Some(lead.first);
        while let Some(index) = next {
            let place = &mut line.places[index as usize];
            place.state = state;
            next = place.next;
            tasks.wake(place.task);
        }
        line.tables.push(lead.table);
        state != State::Again
    }
}

impl Line {
    fn leave(&mut self, index: u32) {
        self.places[index as usize].transfer = None;
        self.free.push(index);
    }

    /// The first in line goes, `index`, with those that continue it.
    fn go(&mut self, index: u32, tasks: &Tasks) -> Role {
        self.order.pop_front();
        let size_max = u64::from(self.places[index as usize].size_max);
        let role = match self.places[index as usize].transfer {
            Some(head) => self.lead(head, size_max).map_or(Role::Alone, Role::Leads),
            None => Role::Alone,
        };
        self.leave(index);
        if let Some(first) = self.order.front() {
            let place = &mut self.places[*first as usize];
            if std::mem::take(&mut place.was_polled) {
                tasks.wake(place.task);
            }
        }
        role
    }

    /// Takes those out of the line that continue `head`.
    fn lead(&mut self, head: Transfer, size_max: u64) -> Option<Lead> {
        let (mut last, mut len) = (head, head.data.len());
        let mut pieces = pieces_of(&head.data)?;
        let (mut first, mut tail) = (None, None::<u32>);
        while let Some(index) = self.order.front().copied() {
            let Some(next) = self.places[index as usize].transfer else { break };
            if !last.is_continued_by(&next) || len + next.data.len() > size_max {
                break;
            }
            let Some(more) = pieces_of(&next.data).filter(|more| pieces + more <= PIECES_MAX) else { break };
            (last, len, pieces) = (next, len + next.data.len(), pieces + more);
            self.order.pop_front();
            self.places[index as usize].state = State::Led;
            match tail {
                Some(tail) => self.places[tail as usize].next = Some(index),
                None => first = Some(index),
            }
            tail = Some(index);
        }
        let first = first?;
        let mut table = self.tables.pop().unwrap_or_else(empty_table);
        let mut count = 0;
        let mut put = |data: &Segments| {
            data.for_each(|base, len| {
                table[count] = libc::iovec { iov_base: base.cast(), iov_len: len };
                count += 1;
            });
        };
        put(&head.data);
        let mut next = Some(first);
        while let Some(index) = next {
            let place = &self.places[index as usize];
            if let Some(transfer) = &place.transfer {
                put(&transfer.data);
            }
            next = place.next;
        }
        // SAFETY: the memory is that of transfers whose makers wait until `ended`, which is when the operation on this
        // has ended; the table is in `Lead` until then, on the heap.
        let data = unsafe { Segments::from_iovecs(&table[..count], len) };
        Some(Lead { at: head.at, data, first, table })
    }
}

fn empty_table() -> Box<[libc::iovec]> {
    const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    vec![EMPTY; PIECES_MAX].into_boxed_slice()
}

/// How many pieces of memory these are; none where they cannot be put together with others.
fn pieces_of(data: &Segments) -> Option<usize> {
    let mut count = 0;
    data.for_each(|_, _| count += 1);
    (count > 0 && count < PIECES_MAX && data.is_aligned(PIECE_ALIGN)).then_some(count)
}

/// The wait in the line.
pub(super) struct Turn<'a> {
    batch: &'a Batch,
    tasks: &'a Tasks,
    index: u32,
    has_yielded: bool,
}

impl Future for Turn<'_> {
    type Output = Role;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Role> {
        if !self.has_yielded {
            self.has_yielded = true;
            self.tasks.wake(self.tasks.current());
            return Poll::Pending;
        }
        let index = self.index;
        let mut line = self.batch.0.borrow_mut();
        let role = match line.places[index as usize].state {
            State::Waits if line.order.front() == Some(&index) => {
                return Poll::Ready(line.go(index, self.tasks));
            }
            State::Waits => {
                line.places[index as usize].was_polled = true;
                return Poll::Pending;
            }
            State::Led => return Poll::Pending,
            State::Done => Role::Done,
            State::Cancelled => Role::Cancelled,
            State::Again => Role::Alone,
        };
        line.leave(index);
        Poll::Ready(role)
    }
}
