//! Operations that something else than the kernel carries out: a library with threads of its own.
//!
//! They have places in the table of the kernel's operations, so that waiting for one allocates nothing, and so that a
//! thread that ends does not free memory that the library still works on. Whoever learns of the end on another thread
//! hands the operation's name to this one, which calls [`Tasks::end_foreign`].

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::segments::Segments;
use crate::tasks::{IOVECS_MAX, Op, OpId, Tasks};

/// An operation in flight. Awaiting it gives the result that [`Tasks::end_foreign`] was called with.
#[must_use = "an operation must be awaited: its memory is in use until then"]
pub struct Foreign {
    tasks: Tasks,
    id: OpId,
    op: Op,
}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Foreign").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The most pieces of memory that one operation moves.
pub const PIECES_MAX: usize = IOVECS_MAX;

impl Tasks {
    /// Begins an operation of the storage, for the task that runs now.
    pub fn begin_foreign(&self) -> Foreign {
        let id = self.start_op();
        Foreign { tasks: self.clone(), id, op: Op::new(self, id).at_storage() }
    }

    /// The operation of this name has ended. A name that is no operation's any more is ignored.
    pub fn end_foreign(&self, name: u64, result: i32) {
        self.complete_op(OpId::from_u64(name), result);
    }
}

impl Foreign {
    /// What the other side calls it.
    pub fn name(&self) -> u64 {
        self.id.to_u64()
    }

    /// The table of the pieces of `data`: where it is, how many there are and how many bytes these have. It stays in
    /// its place until the operation has ended. At most [`PIECES_MAX`] pieces: what they do not hold is another
    /// operation's.
    pub fn pieces(&self, data: &Segments) -> (*const libc::iovec, usize, u64) {
        self.tasks.with_iovecs(self.id, |table| {
            let (count, bytes) = data.fill_iovecs(table);
            (table.as_ptr(), count, bytes)
        })
    }
}

impl Future for Foreign {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<i32> {
        Pin::new(&mut self.op).poll(context)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::uring::{Uring, UringConfig};
    use crate::{Executor, Inbox, Io as _, Polling, PollingConfig};

    #[test]
    fn an_operation_ends_with_what_another_thread_found() {
        let Ok(uring) = Uring::new(UringConfig::default()) else { return };
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let inbox: Rc<Inbox<()>> = Inbox::new(1);
        let tasks = uring.tasks().clone();
        let mut executor = Executor::new(tasks.clone(), inbox, |()| async {}, polling);
        let mut memory = [[1u8; 8], [2u8; 8]];
        let table =
            memory.each_mut().map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: 8 });
        executor.block_on(&uring, &mut (), async move {
            // SAFETY: memory and table are there until the end of the test.
            let data = unsafe { Segments::from_iovecs(&table, 16) };
            let operation = tasks.begin_foreign();
            let (first, count, bytes) = operation.pieces(&data.slice(4, 8));
            // SAFETY: as many entries as were told, which live as long as the operation.
            let pieces = unsafe { std::slice::from_raw_parts(first, count) };
            assert_eq!(
                (bytes, pieces.iter().map(|piece| piece.iov_len).collect::<Vec<_>>()),
                (8, vec![4, 4])
            );
            let name = operation.name();
            let found = std::thread::spawn(move || (name, -5)).join().expect("another thread");
            tasks.end_foreign(found.0, found.1);
            assert_eq!(operation.await, -5);
            // Its name is over.
            tasks.end_foreign(name, 7);
            let next = tasks.begin_foreign();
            assert_ne!(next.name(), name);
            tasks.end_foreign(next.name(), 1);
            assert_eq!(next.await, 1);
        });
    }
}
