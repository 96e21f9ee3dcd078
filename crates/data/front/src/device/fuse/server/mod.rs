//! The data side: requests of the kernel, read from `/dev/fuse` by the data thread itself.
//!
//! A poll on the ring tells that there is something; then requests are read one after the other until there is none,
//! the disk has no room, or there is no memory. A write is received with its data at the beginning of a page, so that
//! it goes on to the image without a copy; what its buffer is too long goes back to the pool. Answers go out in a
//! batch when requests have ended.

mod calls;
mod patch;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use tapio_block::{Completion, Data, DataThread, DiskError, FrontEnd, FrontId, Op, Point, Port, Request};
use tapio_ring::uring::Uring;
use tapio_ring::{Buffer, Notify, Pool};
use tapio_types::{SECTOR_LEN, Span};

use super::wire::{
    self, Answer, CALL_LEN_MAX, Call, DISK, FILE_NAME, HEAD_LEN, Header, IN_HEADER_LEN, Node, ROOT,
    TRANSFER_MAX,
};

/// Bytes of the pool that requests of one device move through: 32 of the longest.
const POOL_LEN: usize = 32 << 20;
/// Memory for one request as the kernel wants it offered: the longest data, and what is not data.
const RECEIVE_LEN: usize = TRANSFER_MAX + 4096;
/// Requests that the kernel has in flight at once on its own behalf: read-ahead and asynchronous direct I/O.
const BACKGROUND_MAX: u16 = 256;

thread_local! {
    /// The devices of this data thread, by their numbers: what belongs to the thread stays on it.
    static SERVERS: RefCell<BTreeMap<u64, (Rc<Server>, FrontId)>> = const { RefCell::new(BTreeMap::new()) };
}

/// A request that the disk has not got yet.
#[derive(Debug)]
struct Waiting {
    unique: u64,
    op: Op,
    span: Span,
    /// A write's data.
    buffer: Option<Buffer>,
    /// Of a read: where in the span the bytes that were asked for begin, and how many they are.
    skip: usize,
    len: usize,
}

/// A request that the disk has.
#[derive(Debug)]
struct Slot {
    unique: u64,
    op: Op,
    /// Its memory, once the disk has given it back.
    buffer: Option<Buffer>,
    skip: usize,
    len: usize,
}

#[derive(Debug)]
struct Inner {
    head: Box<[u8; HEAD_LEN]>,
    receive: Option<Buffer>,
    waiting: Option<Waiting>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// One exported file.
pub(super) struct Server {
    file: Rc<File>,
    port: Port,
    pool: Pool,
    read_only: bool,
    owner: Option<(u32, u32)>,
    inner: RefCell<Inner>,
    /// What the disk has finished since the last publication.
    done: RefCell<Vec<(u32, Result<(), DiskError>)>>,
    /// There may be requests to read; the poll is idle meanwhile.
    ready: Cell<bool>,
    drained: Notify,
    /// There was no memory for the next request.
    starved: Cell<bool>,
    /// Everything is refused from now on: the device goes.
    ending: Cell<bool>,
    /// The connection is over.
    dead: Cell<bool>,
    seeks: Cell<u32>,
    patching: patch::Turn,
}

/// What became of an attempt to read a request.
enum Received {
    Request(usize),
    Nothing,
    NoMemory,
}

impl Completion for Server {
    fn give_back(&self, tag: u64, buffer: Buffer) {
        self.inner.borrow_mut().slots[tag as usize].buffer = Some(buffer);
    }

    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        self.done.borrow_mut().push((tag as u32, result));
    }
}

/// The server in the data thread's loop.
struct ServerFront(Rc<Server>);

impl FrontEnd for ServerFront {
    fn pull(&mut self) -> bool {
        self.0.pull()
    }

    fn publish(&mut self) {
        self.0.publish();
    }

    fn peek(&self) -> bool {
        // The poll on the ring tells, and spinning looks at the ring.
        false
    }

    fn arm(&mut self) -> bool {
        self.0.can_go_on()
    }

    fn disarm(&mut self) {}

    fn rest(&mut self) {
        self.0.inner.borrow_mut().receive = None;
        self.0.pool.rest();
    }
}

/// Starts serving `file`, a fresh connection to the kernel, under the number `id`.
pub(super) fn start(
    data_thread: &DataThread,
    id: u64,
    file: File,
    (read_only, owner): (bool, Option<(u32, u32)>),
) -> io::Result<()> {
    let inner = Inner {
        head: Box::new([0; HEAD_LEN]),
        receive: None,
        waiting: None,
        slots: Vec::new(),
        free: Vec::new(),
    };
    let server = Rc::new(Server {
        file: Rc::new(file),
        port: data_thread.port.clone(),
        pool: Pool::new(POOL_LEN)?,
        read_only,
        owner,
        inner: RefCell::new(inner),
        done: RefCell::default(),
        ready: Cell::new(false),
        drained: Notify::default(),
        starved: Cell::new(false),
        ending: Cell::new(false),
        dead: Cell::new(false),
        seeks: Cell::new(0),
        patching: patch::Turn::default(),
    });
    let front = data_thread.fronts.add(Box::new(ServerFront(Rc::clone(&server))));
    data_thread.port.tasks().spawn(watch(data_thread.uring.clone(), Rc::clone(&server)));
    SERVERS.with_borrow_mut(|servers| servers.insert(id, (server, front)));
    Ok(())
}

/// Refuses every request from now on, also those that wait for room.
pub(super) fn refuse(id: u64) {
    SERVERS.with_borrow(|servers| {
        if let Some((server, _)) = servers.get(&id) {
            server.ending.set(true);
            server.drained.notify_all(server.port.tasks());
        }
    });
}

/// Ends a server: the kernel's connection closes with it, and programs that still use the file get errors.
pub(super) fn end(data_thread: &DataThread, id: u64) {
    let found = SERVERS.with_borrow_mut(|servers| servers.remove(&id));
    if let Some((server, front)) = found {
        server.dead.set(true);
        // The poll holds the connection open.
        data_thread.uring.cancel_fd(server.file.as_raw_fd());
        server.drained.notify_all(server.port.tasks());
        drop(data_thread.fronts.remove(front));
    }
}

/// Notifies the kernel that the size has changed.
pub(super) fn announce_size(id: u64) {
    SERVERS.with_borrow(|servers| {
        if let Some((server, _)) = servers.get(&id) {
            server.send(&mut Answer::attributes_changed());
        }
    });
}

/// Whether the kernel still talks to this server.
pub(super) fn is_alive(id: u64) -> bool {
    SERVERS.with_borrow(|servers| servers.get(&id).is_some_and(|(server, _)| !server.dead.get()))
}

/// Polls for requests whenever there are none.
async fn watch(uring: Uring, server: Rc<Server>) {
    let file = Rc::clone(&server.file);
    loop {
        while server.ready.get() && !server.dead.get() {
            server.drained.wait(server.port.tasks()).await;
        }
        if server.dead.get() {
            return;
        }
        match uring.poll(file.as_raw_fd(), libc::POLLIN).await {
            // The loop of the thread pulls next. That the connection is over is seen by reading.
            Ok(_) => server.ready.set(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return server.dead.set(true),
        }
    }
}

impl Server {
    fn node(&self) -> Node {
        let geometry = self.port.geometry();
        Node { len: geometry.len, read_only: self.read_only || geometry.read_only, owner: self.owner }
    }

    /// Whether the next pull would get somewhere.
    fn can_go_on(&self) -> bool {
        if self.dead.get() || self.starved.get() {
            return false;
        }
        match &self.inner.borrow().waiting {
            Some(_) => self.ending.get() || self.port.room() > 0,
            None => self.ready.get(),
        }
    }

    fn pull(self: &Rc<Self>) -> bool {
        if self.dead.get() {
            return false;
        }
        let mut pulled = false;
        loop {
            let waiting = self.inner.borrow_mut().waiting.take();
            if let Some(waiting) = waiting {
                if let Err(back) = self.hand_over(waiting) {
                    self.inner.borrow_mut().waiting = Some(back);
                    return pulled;
                }
                pulled = true;
            }
            if !self.ready.get() {
                return pulled;
            }
            match self.receive() {
                Received::Request(len) => {
                    pulled = true;
                    self.take(len);
                }
                Received::NoMemory => {
                    self.starved.set(true);
                    return pulled;
                }
                Received::Nothing => {
                    self.ready.set(false);
                    self.drained.notify_all(self.port.tasks());
                    return pulled;
                }
            }
        }
    }

    /// Reads one request: its first bytes into the head, the rest to the beginning of the receiving buffer.
    fn receive(&self) -> Received {
        let mut inner = self.inner.borrow_mut();
        let inner = &mut *inner;
        if inner.receive.is_none() {
            inner.receive = self.pool.take(RECEIVE_LEN);
        }
        let Some(buffer) = &inner.receive else { return Received::NoMemory };
        self.starved.set(false);
        let table = [
            libc::iovec { iov_base: inner.head.as_mut_ptr().cast(), iov_len: HEAD_LEN },
            libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: RECEIVE_LEN },
        ];
        loop {
            // SAFETY: both pieces are valid for writing, and nothing else refers to them.
            let len = unsafe { libc::readv(self.file.as_raw_fd(), table.as_ptr(), 2) };
            if len >= 0 {
                return Received::Request(len as usize);
            }
            match io::Error::last_os_error().raw_os_error() {
                // ENOENT: the request was withdrawn before it was read.
                Some(libc::EINTR | libc::ENOENT) => {}
                Some(libc::EAGAIN) => return Received::Nothing,
                // ENODEV: unmounted and closed by all its users, or aborted.
                _ => {
                    self.dead.set(true);
                    return Received::Nothing;
                }
            }
        }
    }

    /// Takes the request that was received.
    fn take(self: &Rc<Self>, len: usize) {
        let mut body = [0; CALL_LEN_MAX];
        let (header, body_len, buffer) = {
            let mut inner = self.inner.borrow_mut();
            let Some(header) = Header::parse(&inner.head[..len.min(HEAD_LEN)]) else { return };
            let first = len.min(HEAD_LEN) - IN_HEADER_LEN;
            body[..first].copy_from_slice(&inner.head[IN_HEADER_LEN..IN_HEADER_LEN + first]);
            let mut body_len = first;
            let mut buffer = None;
            if header.is_write() {
                buffer = inner.receive.take();
            } else if let Some(received) = inner.receive.as_ref().filter(|_| len > HEAD_LEN) {
                let rest = (len - HEAD_LEN).min(CALL_LEN_MAX - first);
                body[first..first + rest].copy_from_slice(&received[..rest]);
                body_len += rest;
            }
            (header, body_len, buffer)
        };
        let Some(call) = Call::parse(&header, &body[..body_len]) else {
            return self.answer(header.unique, libc::EIO);
        };
        match call {
            Call::Read { offset, len } => self.read(header.unique, offset, len),
            Call::Write { offset, len: wanted, handle } => {
                // What arrived is what counts, and it has to be what was announced.
                let Some(mut buffer) = buffer.filter(|_| len == HEAD_LEN + wanted as usize) else {
                    return self.answer(header.unique, libc::EIO);
                };
                buffer.truncate(wanted as usize);
                self.write(header.unique, offset, handle, buffer);
            }
            call => self.other(&header, call),
        }
    }

    fn read(&self, unique: u64, offset: u64, len: u32) {
        let node = self.node();
        let len = u64::from(len).min(node.len.saturating_sub(offset)).min(TRANSFER_MAX as u64);
        if len == 0 {
            return self.answer(unique, 0);
        }
        let start = offset / SECTOR_LEN * SECTOR_LEN;
        let end = (offset + len).next_multiple_of(SECTOR_LEN);
        self.put(Waiting {
            unique,
            op: Op::Read,
            span: Span::new(start, end - start),
            buffer: None,
            skip: (offset - start) as usize,
            len: len as usize,
        });
    }

    fn write(self: &Rc<Self>, unique: u64, offset: u64, handle: u64, buffer: Buffer) {
        let node = self.node();
        let span = Span::new(offset, buffer.len() as u64);
        if node.read_only {
            return self.answer(unique, libc::EROFS);
        }
        if span.is_empty() || !span.fits(node.len) {
            return self.answer(unique, if span.is_empty() { 0 } else { libc::ENOSPC });
        }
        if !span.is_aligned(SECTOR_LEN) {
            if handle == calls::DIRECT {
                return self.answer(unique, libc::EINVAL);
            }
            let server = Rc::clone(self);
            self.port.tasks().spawn(async move { server.patch(unique, offset, buffer).await });
            return;
        }
        let len = buffer.len();
        self.put(Waiting {
            unique,
            op: Op::Write { durable: false },
            span,
            buffer: Some(buffer),
            skip: 0,
            len,
        });
    }

    /// Hands a request without data to the disk.
    fn plain(&self, unique: u64, op: Op, span: Span) {
        self.put(Waiting { unique, op, span, buffer: None, skip: 0, len: 0 });
    }

    fn put(&self, waiting: Waiting) {
        let mut inner = self.inner.borrow_mut();
        debug_assert!(inner.waiting.is_none(), "one request is taken at a time");
        inner.waiting = Some(waiting);
    }

    /// Gives the disk a request, or gives it back when there is no room or no memory.
    fn hand_over(self: &Rc<Self>, mut waiting: Waiting) -> Result<(), Waiting> {
        if self.ending.get() {
            self.answer(waiting.unique, libc::EIO);
            return Ok(());
        }
        if self.port.room() == 0 {
            return Err(waiting);
        }
        if waiting.op == Op::Read && waiting.buffer.is_none() {
            waiting.buffer = self.pool.take(waiting.span.len as usize);
            if waiting.buffer.is_none() {
                self.starved.set(true);
                return Err(waiting);
            }
        }
        let Waiting { unique, op, span, buffer, skip, len } = waiting;
        let data = buffer.map_or(Data::None, Data::Own);
        let slot = Slot { unique, op, buffer: None, skip, len };
        let index = {
            let mut inner = self.inner.borrow_mut();
            match inner.free.pop() {
                Some(index) => {
                    inner.slots[index as usize] = slot;
                    index
                }
                None => {
                    inner.slots.push(slot);
                    inner.slots.len() as u32 - 1
                }
            }
        };
        let client: Rc<dyn Completion> = Rc::<Self>::clone(self);
        let born_ns = self.port.tasks().turn_ns();
        self.port.note(Point::Taken, index.into(), unique as u32);
        let request = Request::new(op, span, data, born_ns, index.into(), client);
        if let Err(request) = self.port.submit(request) {
            // `room` said that there is some; should the disk see that otherwise, the request has failed.
            request.answer(Err(DiskError::Io(libc::EAGAIN)));
        }
        Ok(())
    }

    /// Answers what the disk has finished.
    fn publish(&self) {
        let count = self.done.borrow().len();
        for place in 0..count {
            let (index, result) = self.done.borrow()[place];
            let mut inner = self.inner.borrow_mut();
            let slot = &mut inner.slots[index as usize];
            let errno = result.err().map_or(0, DiskError::errno);
            let mut answer = Answer::new(slot.unique, errno);
            match (&slot.op, &slot.buffer) {
                (Op::Read, Some(buffer)) if errno == 0 => {
                    self.send_with(&mut answer, &buffer[slot.skip..slot.skip + slot.len]);
                }
                (Op::Write { .. }, _) if errno == 0 => self.send(&mut answer.u32(slot.len as u32).u32(0)),
                _ => self.send(&mut answer),
            }
            if slot.buffer.take().is_some() {
                self.starved.set(false);
            }
            inner.free.push(index);
            self.port.note(Point::Published, index.into(), 0);
        }
        self.done.borrow_mut().drain(..count);
    }

    /// Everything but reads and writes.
    fn other(self: &Rc<Self>, header: &Header, call: Call<'_>) {
        let unique = header.unique;
        match call {
            Call::Silent => {}
            Call::Nothing => self.answer(unique, 0),
            Call::Init { major, minor, max_readahead, flags } => match (major, minor) {
                (0..7, _) | (7, 0..wire::MINOR_MIN) => self.answer(unique, libc::EPROTO),
                (7, _) => self.send(&mut Answer::init(unique, minor, max_readahead, flags, BACKGROUND_MAX)),
                _ => self.send(&mut Answer::init_older(unique)),
            },
            Call::Lookup { name } if header.node == ROOT && name == FILE_NAME.as_bytes() => {
                self.send(&mut Answer::entry(unique, &self.node()));
            }
            Call::Lookup { .. } => self.answer(unique, libc::ENOENT),
            Call::GetAttr => self.send(&mut Answer::attr(unique, header.node, &self.node())),
            Call::OpenDir => self.send(&mut Answer::open(unique, 0, 0)),
            Call::ReadDir { offset, len } => self.send(&mut Answer::entries(unique, offset, len)),
            Call::StatFs => self.send(&mut Answer::statfs(unique, &self.node())),
            _ if header.node != DISK => self.answer(unique, libc::EISDIR),
            call => self.of_the_file(header, call),
        }
    }

    fn answer(&self, unique: u64, errno: i32) {
        self.send(&mut Answer::new(unique, errno));
    }

    fn send(&self, answer: &mut Answer) {
        self.send_with(answer, &[]);
    }

    /// Sends an answer. One that the kernel does not take belongs to a request that no longer has a waiter.
    fn send_with(&self, answer: &mut Answer, data: &[u8]) {
        let head = answer.finish(data.len());
        let table = [
            libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
            libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() },
        ];
        let count = if data.is_empty() { 1 } else { 2 };
        // SAFETY: the table names memory that is valid for reading; writing to the kernel's queue does not wait.
        unsafe { libc::writev(self.file.as_raw_fd(), table.as_ptr(), count) };
    }
}
