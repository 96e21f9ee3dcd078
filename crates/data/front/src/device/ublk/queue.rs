//! The data side of a ublk device: one queue on the data thread.
//!
//! Each tag of the queue is a task that hands the driver a command ("here is the answer, give me the next") and the
//! disk a request, in turn. Both go with the batches of the thread's ring, so that a request costs no system call of
//! its own; the kernel copies data between the requester's pages and the tag's own piece of memory.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::task::Poll;

use tapio_block::{Completion, Data, DataThread, DiskError, FrontEnd, FrontId, Op, Point, Port, Request};
use tapio_ring::uring::Uring;
use tapio_ring::{Segments, TaskId};
use tapio_types::{SECTOR_LEN, Span};

use super::uapi::{self, DESCRIPTOR_LEN, Descriptor, FLAG_FUA, FLAG_NOUNMAP};

/// Requests in flight at once.
pub(super) const DEPTH: u16 = 128;
/// Bytes of the longest request.
pub(super) const REQUEST_LEN_MAX: u32 = 1 << 20;

thread_local! {
    /// The queues of this data thread, by their devices' numbers.
    static QUEUES: RefCell<BTreeMap<u32, (Rc<Queue>, FrontId)>> = const { RefCell::new(BTreeMap::new()) };
}

/// A mapping of ours, given back when dropped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    fn new(len: usize, protection: i32, flags: i32, fd: i32) -> io::Result<Self> {
        // SAFETY: a fresh mapping; no existing memory is touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)?, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; the last to use it is going.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[derive(Clone, Copy, Debug)]
struct Tag {
    task: TaskId,
    result: Option<Result<(), DiskError>>,
    /// The kernel waits for an answer: a write's data is in the tag's memory from the beginning.
    busy: bool,
    /// Its memory has been used since the thread last rested.
    touched: bool,
}

struct Queue {
    file: File,
    uring: Uring,
    port: Port,
    descriptors: Mapping,
    memory: Mapping,
    tags: RefCell<Vec<Tag>>,
    /// Tags whose requests the disk has no room for, first come first.
    waiting: RefCell<VecDeque<u16>>,
    /// Tags that the driver, or the disk, has.
    alive: Cell<u16>,
    ending: Cell<bool>,
}

impl Completion for Queue {
    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        let mut tags = self.tags.borrow_mut();
        let tag = &mut tags[tag as usize];
        tag.result = Some(result);
        self.port.tasks().wake(tag.task);
    }
}

/// The queue in the data thread's loop: only what waits for room needs it.
struct QueueFront(Rc<Queue>);

impl FrontEnd for QueueFront {
    fn pull(&mut self) -> bool {
        self.0.hand_over_waiting()
    }

    fn publish(&mut self) {}

    fn peek(&self) -> bool {
        self.0.can_go_on()
    }

    fn arm(&mut self) -> bool {
        self.0.can_go_on()
    }

    fn disarm(&mut self) {}

    fn rest(&mut self) {
        self.0.give_memory_back();
    }
}

/// Fetches the first requests of the device `id`, opened as `file`.
pub(super) fn start(data_thread: &DataThread, id: u32, file: File) -> io::Result<()> {
    let descriptors = (usize::from(DEPTH) * DESCRIPTOR_LEN).next_multiple_of(4096);
    let descriptors =
        Mapping::new(descriptors, libc::PROT_READ, libc::MAP_SHARED | libc::MAP_POPULATE, file.as_raw_fd())?;
    let memory = Mapping::new(
        usize::from(DEPTH) * REQUEST_LEN_MAX as usize,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        -1,
    )?;
    // Huge pages would make the first byte of a tag cost 2 MiB.
    // SAFETY: the range is the mapping just made.
    unsafe { libc::madvise(memory.base.as_ptr().cast(), memory.len, libc::MADV_NOHUGEPAGE) };
    let tasks = data_thread.port.tasks();
    let tag = Tag { task: tasks.current(), result: None, busy: false, touched: false };
    let queue = Rc::new(Queue {
        file,
        uring: data_thread.uring.clone(),
        port: data_thread.port.clone(),
        descriptors,
        memory,
        tags: RefCell::new(vec![tag; usize::from(DEPTH)]),
        waiting: RefCell::new(VecDeque::with_capacity(usize::from(DEPTH))),
        alive: Cell::new(DEPTH),
        ending: Cell::new(false),
    });
    let front = data_thread.fronts.add(Box::new(QueueFront(Rc::clone(&queue))));
    for tag in 0..DEPTH {
        tasks.spawn(Rc::clone(&queue).serve(tag));
    }
    QUEUES.with_borrow_mut(|queues| queues.insert(id, (queue, front)));
    Ok(())
}

/// Fails every request from now on, also those that wait for room.
pub(super) fn refuse(id: u32) {
    QUEUES.with_borrow(|queues| {
        if let Some((queue, _)) = queues.get(&id) {
            queue.ending.set(true);
            queue.hand_over_waiting();
        }
    });
}

/// Releases the device: commands the driver still has are cancelled.
pub(super) fn end(data_thread: &DataThread, id: u32) {
    if let Some((queue, front)) = QUEUES.with_borrow_mut(|queues| queues.remove(&id)) {
        queue.ending.set(true);
        data_thread.uring.cancel_fd(queue.file.as_raw_fd());
        drop(data_thread.fronts.remove(front));
    }
}

/// Whether the driver still has commands of ours: it takes them back when the device stops.
pub(super) fn is_alive(id: u32) -> bool {
    QUEUES.with_borrow(|queues| queues.get(&id).is_some_and(|(queue, _)| queue.alive.get() > 0))
}

impl Queue {
    /// Serves one tag until the driver takes its command back.
    async fn serve(self: Rc<Self>, tag: u16) {
        self.tags.borrow_mut()[usize::from(tag)].task = self.port.tasks().current();
        let (mut operation, mut result) = (uapi::io::FETCH, 0);
        loop {
            let payload = uapi::io_command(tag, result, self.memory_of(tag) as u64);
            // SAFETY: the file is open, and the tag's memory mapped, as long as this task holds the queue.
            let answer = unsafe { self.uring.command(self.file.as_raw_fd(), operation, payload) }.await;
            if answer != 0 {
                break;
            }
            result = self.one(tag).await;
            operation = uapi::io::COMMIT_AND_FETCH;
        }
        self.alive.set(self.alive.get() - 1);
    }

    /// One request of the kernel, from the descriptor to what it is answered with.
    async fn one(self: &Rc<Self>, tag: u16) -> i32 {
        {
            let state = &mut self.tags.borrow_mut()[usize::from(tag)];
            (state.busy, state.touched) = (true, true);
        }
        self.port.note(Point::Taken, tag.into(), tag.into());
        self.waiting.borrow_mut().push_back(tag);
        self.hand_over_waiting();
        let result = poll_fn(|_| {
            let result = self.tags.borrow_mut()[usize::from(tag)].result.take();
            result.map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        // The command that carries the answer is the next thing that is put into the ring.
        self.port.note(Point::Published, tag.into(), 0);
        self.tags.borrow_mut()[usize::from(tag)].busy = false;
        match result {
            Ok(()) => {
                let descriptor = self.descriptor(tag);
                i32::try_from(u64::from(descriptor.sectors) * SECTOR_LEN).unwrap_or(i32::MAX)
            }
            Err(error) => -error.errno(),
        }
    }

    fn can_go_on(&self) -> bool {
        !self.waiting.borrow().is_empty() && (self.ending.get() || self.port.room() > 0)
    }

    fn hand_over_waiting(self: &Rc<Self>) -> bool {
        let mut pulled = false;
        while self.can_go_on() {
            let Some(tag) = self.waiting.borrow_mut().pop_front() else { break };
            pulled = true;
            if self.ending.get() {
                self.complete(u64::from(tag), Err(DiskError::Io(libc::EIO)));
                continue;
            }
            match self.request(tag) {
                Some(request) => {
                    if let Err(request) = self.port.submit(request) {
                        // `room` said that there is some; should the disk see that otherwise, the request has failed.
                        request.answer(Err(DiskError::Io(libc::EAGAIN)));
                    }
                }
                None => self.complete(u64::from(tag), Err(DiskError::Unsupported)),
            }
        }
        pulled
    }

    /// What the kernel asks with `tag`; `None` for what was not offered.
    fn request(self: &Rc<Self>, tag: u16) -> Option<Request> {
        let descriptor = self.descriptor(tag);
        // A flush has no place: its first sector is all ones.
        let first = if descriptor.op == uapi::op::FLUSH { 0 } else { descriptor.first_sector };
        let start = first.checked_mul(SECTOR_LEN)?;
        let span = Span::new(start, u64::from(descriptor.sectors) * SECTOR_LEN);
        let durable = descriptor.flags & FLAG_FUA != 0;
        let mut data = Data::None;
        let (op, span) = match descriptor.op {
            uapi::op::READ | uapi::op::WRITE if span.len <= u64::from(REQUEST_LEN_MAX) => {
                // SAFETY: the tag's memory is mapped as long as the queue lives, which the request holds; the kernel
                // touches it only between two requests of this tag.
                data = Data::Guest(unsafe { Segments::from_raw(self.memory_of(tag), span.len) });
                let read = descriptor.op == uapi::op::READ;
                (if read { Op::Read } else { Op::Write { durable } }, span)
            }
            uapi::op::FLUSH => (Op::Flush, Span::new(0, 0)),
            uapi::op::DISCARD => (Op::Discard, span),
            uapi::op::WRITE_ZEROES => {
                let unmap = descriptor.flags & FLAG_NOUNMAP == 0;
                (Op::WriteZeroes { unmap, durable }, span)
            }
            _ => return None,
        };
        let client: Rc<dyn Completion> = Rc::<Self>::clone(self);
        Some(Request::new(op, span, data, self.port.tasks().turn_ns(), u64::from(tag), client))
    }

    fn memory_of(&self, tag: u16) -> *mut u8 {
        let offset = usize::from(tag.min(DEPTH - 1)) * REQUEST_LEN_MAX as usize;
        // SAFETY: there is that much memory for each of the tags.
        unsafe { self.memory.base.as_ptr().add(offset) }
    }

    /// The request of `tag`, copied once: the kernel has written it before the tag's command ended.
    fn descriptor(&self, tag: u16) -> Descriptor {
        let offset = usize::from(tag.min(DEPTH - 1)) * DESCRIPTOR_LEN;
        // SAFETY: the mapping holds a descriptor for each of the tags.
        let bytes = unsafe {
            self.descriptors.base.as_ptr().add(offset).cast::<[u8; DESCRIPTOR_LEN]>().read_volatile()
        };
        Descriptor::parse(&bytes)
    }

    /// The thread is without work: what was answered has been copied, so that only requests that wait for the storage
    /// need their memory.
    fn give_memory_back(&self) {
        for (tag, state) in self.tags.borrow_mut().iter_mut().enumerate() {
            if state.touched && !state.busy {
                state.touched = false;
                let memory = self.memory_of(tag as u16).cast();
                // SAFETY: the piece is this tag's, and nothing in flight on this thread uses it.
                unsafe { libc::madvise(memory, REQUEST_LEN_MAX as usize, libc::MADV_DONTNEED) };
            }
        }
    }
}
