//! The answering side of both protocols.
//!
//! The calling thread accepts; each connection gets a thread of its own while it lasts, a bounded number of them. So
//! a process without requests consists of a thread in poll(2), and LIST, STATS and PID are answered while a
//! pause waits for its last request elsewhere. Everything that changes a disk takes its turn.
//!
//! A client must be root or the user of the process. A connection has ten seconds to bring a request. Where dozens of
//! disks are plugged at once, a client often has connected and then gets no processor for two seconds; if it were cut
//! off, it would take this server for a foreign tapdisk.

mod own;
mod tapdisk;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_sys::socket::peer;

use crate::command::Caller;
use crate::host::DiskHost;
use crate::socket::{Deadline, FDS_MAX, receive, wait};
use crate::{ControlError, Errno, Result};

/// Bounds of the server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at one time; further ones wait in the listener's queue.
    pub connections: usize,
    /// Requests that change a disk and wait for their turn; further ones are answered `EBUSY`.
    pub waiting: usize,
    /// Time in which a request must have come.
    pub read: Duration,
    /// Time in which an answer must have been taken.
    pub write: Duration,
    /// Time a conversation of our own protocol may stay silent.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            waiting: 8,
            read: Duration::from_secs(10),
            write: Duration::from_secs(10),
            idle: Duration::from_secs(60),
        }
    }
}

/// Why the server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A client asked for it.
    Quit,
    /// The last disk was detached.
    Empty,
    /// One of the descriptors to watch became readable.
    Stopped,
}

/// Serves until a command or a signal ends it. `stop` are descriptors whose readability ends it, for signals.
///
/// All conversations are over when this returns.
///
/// # Errors
/// The listener failed, or there are no threads.
pub fn serve(
    listener: &UnixListener,
    host: &dyn DiskHost,
    limits: Limits,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<Ended> {
    listener.set_nonblocking(true)?;
    let shared = Shared::new(host, limits)?;
    thread::scope(|scope| {
        let result = shared.accept(scope, listener, stop);
        // Conversations that wait for a request or for a drain look here.
        shared.end(Ended::Stopped);
        let left = shared.wait_conversations(CONVERSATIONS_END);
        if left > 0 {
            host.abandon(left);
        }
        result
    })?;
    let ended = *shared.ended.lock();
    Ok(ended.unwrap_or(Ended::Stopped))
}

/// How long a forced end of a disk waits for its turn.
const FORCED_TURN: Duration = Duration::from_secs(5);
/// How long the end of the server waits for its conversations.
const CONVERSATIONS_END: Duration = Duration::from_secs(10);

/// Whose turn it is to change a disk.
#[derive(Default)]
struct Turns {
    now: Option<u64>,
    last: u64,
}

/// One conversation on a stream that is connected already, without a listener and without threads: for fuzzers.
#[doc(hidden)]
pub fn converse_once(stream: UnixStream, host: &dyn DiskHost, limits: Limits) -> io::Result<()> {
    Shared::new(host, limits)?.converse(stream);
    Ok(())
}

/// What the threads share.
struct Shared<'a> {
    host: &'a dyn DiskHost,
    limits: Limits,
    turns: Mutex<Turns>,
    /// A turn has ended, or the server.
    turned: Condvar,
    waiting: AtomicUsize,
    connections: AtomicUsize,
    /// Readable once a connection has ended.
    freed: OwnedFd,
    ended: Mutex<Option<Ended>>,
    /// Readable for ever once the server ends.
    over: OwnedFd,
    is_over: AtomicBool,
}

fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn raise(event: &OwnedFd) {
    // It fails only when the counter is full, and then it is readable anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn lower(event: &OwnedFd) {
    // It fails only when the counter is zero, which is what is wanted.
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}

/// Leaves the number of connections when the thread ends, however it does.
struct Slot<'a>(&'a Shared<'a>);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
        raise(&self.0.freed);
    }
}

impl<'a> Shared<'a> {
    fn new(host: &'a dyn DiskHost, limits: Limits) -> io::Result<Self> {
        Ok(Self {
            host,
            limits,
            turns: Mutex::default(),
            turned: Condvar::new(),
            waiting: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            freed: event()?,
            ended: Mutex::new(None),
            over: event()?,
            is_over: AtomicBool::new(false),
        })
    }

    fn accept<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        listener: &UnixListener,
        stop: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let never = self.over.as_fd();
        loop {
            let full = self.connections.load(Ordering::Acquire) >= self.limits.connections;
            let next = if full { self.freed.as_fd() } else { listener.as_fd() };
            let ready = wait(
                [
                    (next, PollFlags::IN),
                    (self.over.as_fd(), PollFlags::IN),
                    (stop.unwrap_or(never), PollFlags::IN),
                ],
                Deadline::after(None),
            )?;
            if ready[1] || ready[2] {
                return Ok(());
            }
            if full {
                lower(&self.freed);
                continue;
            }
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    self.accept_failed(&error)?;
                    continue;
                }
            };
            self.connections.fetch_add(1, Ordering::AcqRel);
            let slot = Slot(self);
            let thread = thread::Builder::new().name("control".into()).stack_size(256 * 1024);
            let spawned = thread.spawn_scoped(scope, move || {
                let slot = slot;
                slot.0.converse(stream);
            });
            if let Err(error) = spawned {
                self.host.log(&format!("control: no thread for a connection: {error}"));
            }
        }
    }

    /// A client that hung up again or a shortage is no reason to end.
    fn accept_failed(&self, error: &io::Error) -> io::Result<()> {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ECONNABORTED | libc::EINTR | libc::EPROTO) => Ok(()),
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                self.host.log(&format!("control: cannot accept a connection: {error}"));
                // The connection stays in the queue and would wake us at once.
                thread::sleep(Duration::from_millis(100));
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }

    fn end(&self, why: Ended) {
        self.ended.lock().get_or_insert(why);
        self.is_over.store(true, Ordering::Release);
        raise(&self.over);
        // Under the lock, so that a waiter either sees it or is woken.
        let _turns = self.turns.lock();
        self.turned.notify_all();
    }

    /// Waits until the conversations are over, but no longer than `within`; says how many are not.
    fn wait_conversations(&self, within: Duration) -> usize {
        let deadline = Deadline::after(Some(within));
        loop {
            let count = self.connections.load(Ordering::Acquire);
            let ready =
                if count == 0 { Ok([false]) } else { wait([(self.freed.as_fd(), PollFlags::IN)], deadline) };
            match ready {
                Ok([true]) => lower(&self.freed),
                _ => return count,
            }
        }
    }

    fn converse(&self, stream: UnixStream) {
        if let Err(error) = self.admit(&stream) {
            self.host.log(&format!("control: {error}"));
            return;
        }
        let mut connection = Connection { shared: self, stream, bytes: Vec::new(), fds: Vec::new() };
        // Silence or a hang-up before the first byte is not logged: monitors connect to see whether a process listens.
        let Ok(true) = connection.fill(self.limits.read) else { return };
        let result = match connection.bytes.first() {
            Some(b'{') => own::converse(&mut connection),
            _ => tapdisk::answer(&mut connection),
        };
        if let Err(error) = result {
            self.host.log(&format!("control: {error}"));
        }
    }

    fn admit(&self, stream: &UnixStream) -> Result<()> {
        let peer =
            peer(stream).map_err(|error| ControlError::io("asking for the user of the peer", &error))?.uid;
        if peer != 0 && peer != tapio_sys::process::user() {
            return Err(ControlError::new(Errno::EPERM, format!("user {peer} connected and was refused")));
        }
        stream.set_nonblocking(true).map_err(|error| ControlError::io("preparing a connection", &error))
    }

    /// Runs something that changes a disk, when its turn has come.
    fn in_turn<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Leave<'a>(&'a AtomicUsize);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let before = self.waiting.fetch_add(1, Ordering::AcqRel);
        let _leave = Leave(&self.waiting);
        if before >= self.limits.waiting {
            return Err(
                ControlError::new(Errno::EBUSY, format!("{before} requests wait already")).next("try later")
            );
        }
        let _turn = self.turn(None)?;
        run()
    }

    /// [`Shared::in_turn`] of a forced end of a disk: it does not wait for a command that hangs. That command goes on,
    /// and finds the disk closed.
    fn in_forced_turn<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let _turn = self.turn(Some(FORCED_TURN))?;
        run()
    }

    /// Waits for a turn; after `within` takes it from the command that has it.
    fn turn(&self, within: Option<Duration>) -> Result<YourTurn<'_, 'a>> {
        let deadline = within.map(|within| Instant::now() + within);
        let mut turns = self.turns.lock();
        loop {
            if self.is_over.load(Ordering::Acquire) {
                return Err(ControlError::new(Errno::ESHUTDOWN, "the disk process is ending"));
            }
            if turns.now.is_none() {
                break;
            }
            match deadline {
                None => self.turned.wait(&mut turns),
                Some(deadline) if self.turned.wait_until(&mut turns, deadline).timed_out() => {
                    self.host.log("control: a command that hangs is not waited for");
                    break;
                }
                Some(_) => {}
            }
        }
        turns.last += 1;
        let number = turns.last;
        turns.now = Some(number);
        Ok(YourTurn { shared: self, number })
    }
}

/// A turn; ends when it is dropped, unless it was taken away before.
struct YourTurn<'s, 'a> {
    shared: &'s Shared<'a>,
    number: u64,
}

impl Drop for YourTurn<'_, '_> {
    fn drop(&mut self) {
        let mut turns = self.shared.turns.lock();
        if turns.now == Some(self.number) {
            turns.now = None;
            self.shared.turned.notify_one();
        }
    }
}

/// One conversation.
struct Connection<'a> {
    shared: &'a Shared<'a>,
    stream: UnixStream,
    /// Received and not yet used.
    bytes: Vec<u8>,
    /// Descriptors received and not yet used.
    fds: Vec<OwnedFd>,
}

impl Connection<'_> {
    /// Waits for more bytes; `false` at the end of the conversation or when the server ends.
    fn fill(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Deadline::after(Some(timeout));
        loop {
            let ready = wait(
                [(self.stream.as_fd(), PollFlags::IN), (self.shared.over.as_fd(), PollFlags::IN)],
                deadline,
            )
            .map_err(|error| ControlError::io("waiting for a request", &error))?;
            match ready {
                [false, false] => {
                    return Err(ControlError::new(Errno::ETIMEDOUT, "a request did not come in time"));
                }
                [false, true] => return Ok(false),
                [true, _] => {}
            }
            let mut bytes = [0; 4096];
            match receive(&self.stream, &mut bytes, &mut self.fds) {
                Ok(0) => return Ok(false),
                Ok(len) => {
                    // More than a request may bring: close them at once rather than run out.
                    self.fds.truncate(FDS_MAX);
                    self.bytes.extend_from_slice(&bytes[..len]);
                    return Ok(true);
                }
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(ControlError::io("reading a request", &error)),
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        let deadline = Deadline::after(Some(self.shared.limits.write));
        crate::socket::send_all(&self.stream, bytes, &[], deadline)
            .map_err(|error| ControlError::io("sending an answer", &error))
    }
}

impl Caller for Connection<'_> {
    fn gone(&self) -> bool {
        if self.shared.is_over.load(Ordering::Acquire) {
            return true;
        }
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll::any(&mut polled, Some(Duration::ZERO)).is_ok() && polled[0].revents().intersects(gone)
    }
}

#[cfg(test)]
mod tests;
