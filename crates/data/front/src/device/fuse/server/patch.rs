//! Writes that do not begin and end with a sector: the sectors at their ends are read first.
//!
//! They come from programs that write to the exported file as to any other, never from a loop device. One at a time,
//! so that two that share a sector do not undo each other; the kernel itself keeps them apart from other writes to the
//! file through the page cache.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use tapio_block::{Completion, Data, DiskError, Op, Request};
use tapio_ring::{Buffer, Notify, TaskId, Tasks};
use tapio_types::{SECTOR_LEN, Span};

use super::Server;
use crate::device::fuse::wire::Answer;

/// How long to wait for memory before looking again.
const MEMORY_RETRY_NS: u64 = 1_000_000;

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Turn {
    taken: Cell<bool>,
    freed: Notify,
}

/// A request that a task of this thread waits for.
struct Asked {
    memory: Cell<Option<Buffer>>,
    result: Cell<Option<Result<(), DiskError>>>,
    task: TaskId,
    tasks: Tasks,
}

impl Completion for Asked {
    fn give_back(&self, _tag: u64, buffer: Buffer) {
        self.memory.set(Some(buffer));
    }

    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        self.result.set(Some(result));
        self.tasks.wake(self.task);
    }
}

impl Server {
    pub(super) async fn patch(&self, unique: u64, offset: u64, data: Buffer) {
        while self.patching.taken.get() {
            self.patching.freed.wait(self.port.tasks()).await;
        }
        self.patching.taken.set(true);
        let result = self.read_and_write(offset, &data).await;
        self.patching.taken.set(false);
        self.patching.freed.notify_all(self.port.tasks());
        match result {
            Ok(()) => self.send(&mut Answer::new(unique, 0).u32(data.len() as u32).u32(0)),
            Err(error) => self.answer(unique, error.errno()),
        }
    }

    async fn read_and_write(&self, offset: u64, data: &Buffer) -> Result<(), DiskError> {
        let start = offset / SECTOR_LEN * SECTOR_LEN;
        let end = (offset + data.len() as u64).next_multiple_of(SECTOR_LEN);
        let span = Span::new(start, end - start);
        let tasks = self.port.tasks();
        let whole = loop {
            match self.pool.take(span.len as usize) {
                Some(buffer) => break buffer,
                None => tasks.sleep_until(tasks.turn_ns() + MEMORY_RETRY_NS).await,
            }
        };
        let mut whole = self.ask(Op::Read, span, whole).await?;
        let skip = (offset - start) as usize;
        whole[skip..skip + data.len()].copy_from_slice(data);
        self.ask(Op::Write { durable: false }, span, whole).await.map(drop)
    }

    /// Reads into `memory`, or writes it; then it comes back.
    async fn ask(&self, op: Op, span: Span, memory: Buffer) -> Result<Buffer, DiskError> {
        let tasks = self.port.tasks();
        let (task, tasks) = (tasks.current(), tasks.clone());
        let asked = Rc::new(Asked { memory: Cell::default(), result: Cell::default(), task, tasks });
        let client: Rc<dyn Completion> = Rc::<Asked>::clone(&asked);
        let born_ns = self.port.tasks().turn_ns();
        let mut request = Request::new(op, span, Data::Own(memory), born_ns, 0, client);
        loop {
            self.port.wait_room().await;
            match self.port.submit(request) {
                Ok(()) => break,
                Err(back) => request = back,
            }
        }
        poll_fn(|_| asked.result.take().map_or(Poll::Pending, Poll::Ready)).await?;
        asked.memory.take().ok_or(DiskError::Io(libc::EIO))
    }
}
