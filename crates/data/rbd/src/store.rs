//! An image as a storage on the ring of a data thread.
//!
//! A request goes to librbd at once, from the data thread; librbd's own threads carry it out. Each end puts its number
//! and its result into a queue and counts up an eventfd, which one read on the ring waits for. The queue, the tickets
//! that ends come with and the places in the ring's table are made once and used again.
//!
//! # What an answered write means
//!
//! librbd's cache is off: a write that was answered is with the OSDs, on as many of them as the pool asks for, and a
//! flush waits for those in flight. While OSDs or monitors are away, requests wait and librbd asks again; with
//! `timeout=` they fail after that time with ETIMEDOUT. A client that another one shut out gets ESHUTDOWN for
//! everything from then on.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use tapio_ring::uring::Uring;
use tapio_ring::{Foreign, Io, PIECES_MAX, PageBuf, Segments, Storage, StorageInfo, Zeroing};
use tapio_types::{Access, Span};

use crate::cluster::Cluster;
use crate::error::RbdError;
use crate::image::{Image, Mode};
use crate::library::{Completion, library};
use crate::target::Target;

/// A range that is cleared by one request.
const ZERO_LEN_MAX: u64 = 128 << 20;
/// The most that one request moves.
const TRANSFER_LEN_MAX: u64 = 16 << 20;
/// A question about data covers at most this much.
const KNOWN_LEN_MAX: u64 = 1 << 30;
/// Stack of a thread that opens, closes or asks: the library's calls are deeper than ours.
const STACK_LEN: usize = 2 << 20;
/// Tickets that are made at once.
const TICKETS: usize = 64;

/// What librbd's threads hand to the data thread.
struct Signal {
    event: File,
    ended: Mutex<Vec<(u32, i32)>>,
}

impl Signal {
    fn wake(&self) {
        // A counter that is full wakes as well.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn end(&self, ticket: u32, result: i32) {
        let is_first = {
            let mut ended = self.ended.lock();
            ended.push((ticket, result));
            ended.len() == 1
        };
        // The thread that takes the first takes all.
        if is_first {
            self.wake();
        }
    }
}

/// What an end comes with. Changed by the data thread alone, while no request has it.
struct Ticket {
    index: u32,
    signal: Arc<Signal>,
    name: Cell<u64>,
}

/// All tickets; they never move.
struct Tickets {
    #[allow(clippy::vec_box, reason = "librbd points to them while the table grows")]
    all: Vec<Box<Ticket>>,
    free: Vec<u32>,
}

impl Tickets {
    fn new() -> Self {
        Self { all: Vec::new(), free: Vec::new() }
    }

    fn take(&mut self, signal: &Arc<Signal>, name: u64) -> *const Ticket {
        if self.free.is_empty() {
            let first = self.all.len() as u32;
            let made = first..first + TICKETS as u32;
            self.free.extend(made.clone().rev());
            self.all.extend(
                made.map(|index| Box::new(Ticket { index, signal: Arc::clone(signal), name: Cell::new(0) })),
            );
        }
        // Filled above.
        let index = self.free.pop().unwrap_or_default();
        let ticket = &*self.all[index as usize];
        ticket.name.set(name);
        ticket
    }

    fn give_back(&mut self, index: u32) -> Option<u64> {
        let name = self.all.get(index as usize)?.name.get();
        self.free.push(index);
        Some(name)
    }
}

/// A request has ended: called on a thread of librbd's, which must not wait.
unsafe extern "C" fn ended(completion: Completion, arg: *mut c_void) {
    // SAFETY: the argument is a ticket, which stays as it is until its end is taken from the queue below.
    let ticket = unsafe { &*arg.cast::<Ticket>() };
    // The ticket may go as soon as its end is in the queue.
    let (index, signal) = (ticket.index, Arc::clone(&ticket.signal));
    let Ok(library) = library() else { return };
    // SAFETY: the completion is the library's, has ended, and is released once.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result
    };
    signal.end(index, i32::try_from(result).unwrap_or(i32::MAX));
}

/// What requests and the reader of ends have in common.
struct Ends {
    uring: Uring,
    signal: Arc<Signal>,
    tickets: RefCell<Tickets>,
    flying: Cell<usize>,
    closing: Cell<bool>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        if self.flying.get() > 0 {
            // The thread ends with requests in flight: what the library still points to stays.
            std::mem::forget(std::mem::replace(self.tickets.get_mut(), Tickets::new()));
        }
    }
}

impl Ends {
    /// Ends requests until the storage is dropped. Sleeps in the ring.
    async fn serve(self: Rc<Self>) {
        let (mut value, mut taken) = (PageBuf::zeroed(8), Vec::new());
        while !self.closing.get() {
            let read;
            (value, read) = self.uring.read_event(self.signal.event.as_raw_fd(), value).await;
            match read {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                // The thread ends.
                Err(_) => return,
            }
            std::mem::swap(&mut taken, &mut *self.signal.ended.lock());
            for (ticket, result) in taken.drain(..) {
                let name = self.tickets.borrow_mut().give_back(ticket);
                if let Some(name) = name {
                    self.flying.set(self.flying.get() - 1);
                    self.uring.tasks().end_foreign(name, result);
                }
            }
        }
    }
}

/// Images that are being closed by threads of this process.
static CLOSING: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// Waits until the images that this process has let go of are closed, and their locks free; `limit` at most. Whether
/// they are.
pub fn closed(limit: Duration) -> bool {
    let until = Instant::now() + limit;
    let mut closing = CLOSING.lock();
    while *closing > 0 {
        if CLOSED.wait_until(&mut closing, until).timed_out() {
            return *closing == 0;
        }
    }
    true
}

/// Whether there are such images.
pub fn is_closing() -> bool {
    *CLOSING.lock() > 0
}

/// Counts an image that is being closed, until this is dropped.
struct Closing;

impl Closing {
    fn begin() -> Self {
        *CLOSING.lock() += 1;
        Self
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        *CLOSING.lock() -= 1;
        CLOSED.notify_all();
    }
}

/// Runs `work`, which calls the library and blocks, on a thread of its own.
fn deep<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let thread = std::thread::Builder::new().name("tapio-rbd".into()).stack_size(STACK_LEN).spawn(work)?;
    thread.join().map_err(|_| io::Error::other("a call of librbd ended in a panic"))
}

/// An image, used through the ring of one thread. Dropping it closes it, on another thread.
pub struct RbdStore {
    /// There until this is dropped.
    image: Option<Arc<Image>>,
    ends: Rc<Ends>,
    access: Access,
    len: Cell<u64>,
    name: String,
    report: fn(&str),
    /// That another client shut this one out was reported.
    is_shut_out: Cell<bool>,
}

impl std::fmt::Debug for RbdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdStore").field("image", &self.name).finish_non_exhaustive()
    }
}

impl Drop for RbdStore {
    fn drop(&mut self) {
        self.ends.closing.set(true);
        self.ends.signal.wake();
        let Some(image) = self.image.take() else { return };
        let closing = Closing::begin();
        let close = move || {
            drop(image);
            drop(closing);
        };
        let thread = std::thread::Builder::new().name("tapio-rbd".into()).stack_size(STACK_LEN);
        // Without a thread it is closed here, by the drop of what was to move there.
        let _ = thread.spawn(close);
    }
}

/// Opens the image of a target and takes its lock if it shall be written.
fn open(target: &Target, access: Access) -> Result<(Image, u64), RbdError> {
    let cluster = Cluster::shared(&target.connect)?;
    let pool = cluster.pool(&target.pool, target.namespace.as_deref())?;
    let image = match access {
        Access::ReadWrite => {
            let image = pool.open(&target.image, None, Mode::Write)?;
            image.take_lock()?;
            image
        }
        Access::ReadOnly => pool.open(&target.image, target.snapshot.as_deref(), Mode::Read)?,
    };
    let len = image.length()?;
    if i64::try_from(len).is_err() {
        return Err(RbdError::new(libc::EFBIG, format!("{target} has {len} bytes, which no disk can have")));
    }
    Ok((image, len))
}

impl RbdStore {
    /// Opens the image of `target`. `report` gets a line when another client takes the image over.
    ///
    /// # Errors
    /// The libraries are missing; the cluster does not answer; there is no such image; another client writes to it; a
    /// snapshot shall be written.
    pub async fn open(uring: &Uring, target: Target, access: Access, report: fn(&str)) -> io::Result<Self> {
        if target.snapshot.is_some() && access == Access::ReadWrite {
            let why = format!("{target} is a snapshot, which is only read: open it read-only, or clone it");
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, why));
        }
        let name = target.to_string();
        let (image, len) = uring.offload(move || deep(move || open(&target, access))).await???;
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC)?);
        let ends = Rc::new(Ends {
            uring: uring.clone(),
            signal: Arc::new(Signal { event, ended: Mutex::new(Vec::with_capacity(TICKETS)) }),
            tickets: RefCell::new(Tickets::new()),
            flying: Cell::new(0),
            closing: Cell::new(false),
        });
        uring.tasks().spawn(Rc::clone(&ends).serve());
        let (image, len) = (Some(Arc::new(image)), Cell::new(len));
        Ok(Self { image, ends, access, len, name, report, is_shut_out: Cell::new(false) })
    }

    fn image(&self) -> io::Result<&Arc<Image>> {
        self.image.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn uring(&self) -> &Uring {
        &self.ends.uring
    }

    fn check(&self, at: u64, len: u64) -> io::Result<()> {
        if Span::new(at, len).fits(self.len()) {
            return Ok(());
        }
        let why = format!("{len} bytes at {at} are not inside {} of {} bytes", self.name, self.len());
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    fn check_writable(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    /// Hands a request to librbd.
    fn start(&self, ask: Ask) -> io::Result<Foreign> {
        let image = self.image()?;
        let library = image.library();
        let operation = self.uring().tasks().begin_foreign();
        let ticket = self.ends.tickets.borrow_mut().take(&self.ends.signal, operation.name());
        // SAFETY: tickets never move, and this one is in the table.
        let index = unsafe { (*ticket).index };
        let mut completion = std::ptr::null_mut();
        let arg = ticket.cast_mut().cast::<c_void>();
        // SAFETY: the callback takes such an argument; there is a place for the completion.
        let mut code = unsafe { (library.rbd_aio_create_completion)(arg, Some(ended), &raw mut completion) };
        if code >= 0 {
            // Before the call: it may end before the call does.
            self.ends.flying.set(self.ends.flying.get() + 1);
            // SAFETY: the image is open, the completion is new; memory and table live until the operation has ended,
            // by the contract of `Storage` and of `Foreign::pieces`.
            code = unsafe { ask.submit(image, &operation, completion) };
            if code < 0 {
                self.ends.flying.set(self.ends.flying.get() - 1);
                // SAFETY: a call that was refused has no end, so the completion is still ours.
                unsafe { (library.rbd_aio_release)(completion) };
            }
        }
        if code < 0 {
            self.ends.tickets.borrow_mut().give_back(index);
            self.uring().tasks().end_foreign(operation.name(), code);
        }
        Ok(operation)
    }

    fn judge(&self, ask: Ask, result: i32) -> io::Result<()> {
        let Some(errno) = result.checked_neg().filter(|errno| *errno > 0) else {
            return match ask.kind {
                Kind::Read if result as u64 != ask.len => Err(io::ErrorKind::UnexpectedEof.into()),
                _ => Ok(()),
            };
        };
        if errno == libc::ESHUTDOWN && !self.is_shut_out.replace(true) {
            (self.report)(&format!(
                "{}: the cluster has shut this client out, because another took the image over: every request fails",
                self.name
            ));
            if let Ok(image) = self.image() {
                image.pool().cluster().forget();
            }
        }
        Err(io::Error::from_raw_os_error(errno))
    }

    fn request(&self, kind: Kind, at: u64, len: u64, data: Segments) -> Operation<'_> {
        Operation::One { store: self, ask: Ask { kind, at, len, data }, flying: None }
    }

    fn transfer(&self, kind: Kind, at: u64, data: Segments) -> Operation<'_> {
        let len = data.len();
        if len == 0 {
            return Operation::DONE;
        }
        let mut pieces = 0;
        data.for_each(|_, _| pieces += 1);
        if pieces > PIECES_MAX || len > TRANSFER_LEN_MAX {
            return Operation::Many(Box::pin(self.transfer_in_parts(kind, at, data)));
        }
        self.request(kind, at, len, data)
    }

    async fn transfer_in_parts(&self, kind: Kind, at: u64, data: Segments) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            let (mut pieces, mut len) = (0, 0);
            data.slice(done, data.len() - done).for_each(|_, piece| {
                pieces += 1;
                if pieces <= PIECES_MAX {
                    len += piece as u64;
                }
            });
            let part = data.slice(done, len.min(TRANSFER_LEN_MAX));
            self.request(kind, at + done, part.len(), part).await?;
            done += part.len();
        }
        Ok(())
    }

    async fn zero_in_parts(&self, span: Span) -> io::Result<()> {
        let mut left = span;
        while !left.is_empty() {
            let part = left.prefix(ZERO_LEN_MAX);
            self.request(Kind::Zero, part.start, part.len, Segments::EMPTY).await?;
            left = left.skip(part.len);
        }
        Ok(())
    }

    /// Calls the library on another thread.
    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Image) -> Result<T, RbdError> + Send + 'static,
    ) -> io::Result<T> {
        let image = Arc::clone(self.image()?);
        Ok(self.uring().offload(move || deep(move || work(&image))).await???)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Zero,
    Flush,
}

/// A request as it is handed over.
#[derive(Clone, Copy, Debug)]
struct Ask {
    kind: Kind,
    at: u64,
    len: u64,
    data: Segments,
}

impl Ask {
    /// Calls the library; a negative number where it takes nothing.
    ///
    /// # Safety
    /// The completion is a new one; the memory stays until the operation has ended.
    unsafe fn submit(self, image: &Image, operation: &Foreign, completion: Completion) -> c_int {
        let (library, handle, at) = (image.library(), image.handle, self.at);
        let (table, count, bytes) = match self.kind {
            Kind::Read | Kind::Write => operation.pieces(&self.data),
            Kind::Zero | Kind::Flush => (std::ptr::null(), 0, self.len),
        };
        debug_assert_eq!(bytes, self.len);
        // SAFETY: as many entries as were told, the first of which is there.
        let first = (count == 1).then(|| unsafe { *table });
        // SAFETY: the caller vouches for memory and completion.
        unsafe {
            match (self.kind, first) {
                (Kind::Read, Some(piece)) => (library.rbd_aio_read)(
                    handle,
                    at,
                    piece.iov_len,
                    piece.iov_base.cast::<c_char>(),
                    completion,
                ),
                (Kind::Read, None) => (library.rbd_aio_readv)(handle, table, count as c_int, at, completion),
                (Kind::Write, Some(piece)) => (library.rbd_aio_write)(
                    handle,
                    at,
                    piece.iov_len,
                    piece.iov_base.cast::<c_char>(),
                    completion,
                ),
                (Kind::Write, None) => {
                    (library.rbd_aio_writev)(handle, table, count as c_int, at, completion)
                }
                (Kind::Zero, _) => {
                    (library.rbd_aio_write_zeroes)(handle, at, self.len as usize, completion, 0, 0)
                }
                (Kind::Flush, _) => (library.rbd_aio_flush)(handle, completion),
            }
        }
    }
}

/// A call of the storage. Written by hand, because it is part of every request task of a disk.
enum Operation<'a> {
    Now(Option<io::Result<()>>),
    One {
        store: &'a RbdStore,
        ask: Ask,
        flying: Option<Foreign>,
    },
    /// Rare, and on the heap.
    Many(Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>),
}

impl Operation<'_> {
    const DONE: Self = Self::Now(Some(Ok(())));

    const fn failed(error: io::Error) -> Self {
        Self::Now(Some(Err(error)))
    }
}

impl Future for Operation<'_> {
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Now(result) => result.take().map_or(Poll::Pending, Poll::Ready),
            Self::One { store, ask, flying } => {
                let operation = match flying {
                    Some(operation) => operation,
                    None => match store.start(*ask) {
                        Ok(operation) => flying.insert(operation),
                        Err(error) => return Poll::Ready(Err(error)),
                    },
                };
                Pin::new(operation).poll(context).map(|result| store.judge(*ask, result))
            }
            Self::Many(future) => future.as_mut().poll(context),
        }
    }
}

// SAFETY: a request is answered by librbd, which then has let go of its memory, before its future ends.
unsafe impl Storage for RbdStore {
    fn info(&self) -> StorageInfo {
        StorageInfo {
            align: 1,
            sector_len: 512,
            resizable: false,
            fresh_reads_zero: true,
            promises_space: false,
        }
    }

    fn len(&self) -> u64 {
        self.len.get()
    }

    async fn known_runs(&self, span: Span, count_max: usize) -> Vec<(u64, bool)> {
        let span = span.prefix(KNOWN_LEN_MAX);
        let found = self.ask(move |image| {
            let mut runs: Vec<(u64, bool)> = Vec::new();
            let mut end = span.start;
            let mut add = |len: u64, has_data: bool| match runs.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.1 == has_data => last.0 += len,
                _ => runs.push((len, has_data)),
            };
            image.diff(None, (span.start, span.len), true, true, |diff| {
                let start = diff.start.max(end);
                add(start - end, false);
                let stop = (diff.start + diff.len).max(start);
                add(stop - start, diff.has_data);
                end = stop;
            })?;
            add((span.start + span.len).saturating_sub(end), false);
            Ok(runs)
        });
        let mut runs = found.await.unwrap_or_default();
        runs.truncate(count_max.max(1));
        if runs.is_empty() {
            // What is not known counts as data.
            runs.push((span.len, true));
        }
        runs
    }

    fn read(&self, at: u64, into: Segments) -> impl Future<Output = io::Result<()>> {
        match self.check(at, into.len()) {
            Ok(()) => self.transfer(Kind::Read, at, into),
            Err(error) => Operation::failed(error),
        }
    }

    fn write(&self, at: u64, from: Segments) -> impl Future<Output = io::Result<()>> {
        if let Err(error) = self.check_writable() {
            return Operation::failed(error);
        }
        if !Span::new(at, from.len()).fits(self.len()) {
            return Operation::failed(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.transfer(Kind::Write, at, from)
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> {
        match self.access {
            Access::ReadWrite => self.request(Kind::Flush, 0, 0, Segments::EMPTY),
            Access::ReadOnly => Operation::DONE,
        }
    }

    /// Space is given back either way: no pool sets any aside.
    fn zero(&self, span: Span, _: Zeroing) -> impl Future<Output = io::Result<()>> {
        if let Err(error) = self.check_writable().and_then(|()| self.check(span.start, span.len)) {
            return Operation::failed(error);
        }
        match span.len {
            0 => Operation::DONE,
            len if len <= ZERO_LEN_MAX => self.request(Kind::Zero, span.start, len, Segments::EMPTY),
            _ => Operation::Many(Box::pin(self.zero_in_parts(span))),
        }
    }

    async fn allocate(&self, span: Span, _space: bool) -> io::Result<()> {
        let fits = span.fits(self.len());
        if fits { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
    }

    /// Makes the image longer, unless another client has done so already.
    async fn set_len(&self, len: u64) -> io::Result<()> {
        self.check_writable()?;
        let known = self.len();
        let now = self.ask(move |image| {
            let now = image.length()?;
            if now < len {
                image.resize(len, false)?;
                return Ok(len);
            }
            Ok(now)
        });
        let now = now.await?;
        if now > len && known >= len && len != known {
            let why = "an RBD image is not made shorter while it is open";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        self.len.set(now.max(len));
        Ok(())
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

    #[test]
    fn tickets_are_used_again_and_wake_once() {
        let event = File::from(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        let signal = Arc::new(Signal { event, ended: Mutex::default() });
        let mut tickets = Tickets::new();
        let names: Vec<u64> = (1..200).collect();
        let taken: Vec<*const Ticket> = names.iter().map(|name| tickets.take(&signal, *name)).collect();
        for ticket in &taken {
            // SAFETY: the tickets are in the table.
            signal.end(unsafe { (**ticket).index }, 0);
        }
        let mut value = [0; 8];
        io::Read::read_exact(&mut &signal.event, &mut value).expect("it was woken");
        assert_eq!(u64::from_ne_bytes(value), 1);
        let ended = std::mem::take(&mut *signal.ended.lock());
        let found: Vec<u64> = ended.iter().filter_map(|(index, _)| tickets.give_back(*index)).collect();
        assert_eq!(found, names);
        assert_eq!(tickets.all.len(), 256);
    }
}
