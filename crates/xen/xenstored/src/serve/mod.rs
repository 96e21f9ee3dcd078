//! The event loop: sockets, rings, signals, the journal.
//!
//! ```text
//!   epoll ─▶ read what came ─▶ Server ─▶ journal (one sync for all that came) ─▶ send what is to be sent
//! ```

pub mod poll;
pub mod ring;
pub mod rings;
pub mod socket;
#[cfg(test)]
mod tests;
mod update;
pub mod xen;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use poll::{Event, Interest, Poll};
use rings::SharedRings;

use crate::Server;
use crate::domains::Life;
use crate::journal::{Dir, Journal};
use crate::kept::Kept;
use crate::server::Action;
use crate::session;
use crate::tree::Caller;
use crate::watches::ConnId;

pub use update::{Restored, Update, read_state};

/// Numbers of what is waited for: a connection's own, or these with something in the low bits.
const LISTENER: u64 = 1 << 32;
const RING: u64 = 2 << 32;
const SIGNAL: u64 = 3 << 32;
const STOP: u64 = 4 << 32;
const DOMAINS: u64 = 5 << 32;
/// Bytes that are read of one socket before others have their turn.
const READ_LEN: usize = 16 << 10;
/// Sockets that may be connected at once.
const SOCKETS_MAX: usize = 1000;
/// How often a ring of 1024 bytes is read before others have their turn.
const RING_TURNS: usize = 8;

/// Why the loop ended.
#[derive(Debug)]
pub enum End {
    /// It was asked to.
    Asked,
    /// Another program is to go on.
    Update(Update),
}

/// Reports the states of domains after an event of the hypervisor.
pub struct DomainWatch {
    /// Becomes readable.
    pub channel: tapio_xen::Channel,
    /// Asks.
    pub life: Box<dyn FnMut(u32) -> Life>,
}

impl std::fmt::Debug for DomainWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DomainWatch").field("channel", &self.channel).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Socket {
    stream: UnixStream,
    interest: Interest,
}

/// A server with its transports.
#[derive(Debug)]
pub struct Daemon {
    /// The server.
    pub server: Server,
    poll: Poll,
    listeners: Vec<(PathBuf, UnixListener)>,
    sockets: BTreeMap<ConnId, Socket>,
    rings: SharedRings,
    journal: Option<Journal<Dir>>,
    signals: Option<OwnedFd>,
    domains: Option<DomainWatch>,
    dirty: Vec<ConnId>,
    /// Domains whose rings may have more requests than were read.
    waiting: Vec<u32>,
    buffer: Vec<u8>,
}

/// Lets a live update that is asked for by SIGUSR1 wait until the daemon serves: until [`Daemon::take_signals`] the
/// signal would end the process. To be called before anything that others can see, as the sockets.
///
/// # Errors
/// Of the system call.
pub fn hold_updates() -> io::Result<()> {
    poll::hold_signals(&[libc::SIGUSR1])
}

impl Daemon {
    /// A daemon without clients.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(server: Server, rings: SharedRings) -> io::Result<Self> {
        Ok(Self {
            server,
            poll: Poll::new()?,
            listeners: Vec::new(),
            sockets: BTreeMap::new(),
            rings,
            journal: None,
            signals: None,
            domains: None,
            dirty: Vec::new(),
            waiting: Vec::new(),
            buffer: Vec::new(),
        })
    }

    /// Serves the clients that connect here.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn listen(&mut self, path: &Path, listener: UnixListener) -> io::Result<()> {
        self.poll.add(&listener, LISTENER | self.listeners.len() as u64, Interest::READ)?;
        self.listeners.push((path.to_owned(), listener));
        Ok(())
    }

    /// Writes changes down before they are acknowledged.
    pub fn set_journal(&mut self, journal: Journal<Dir>) {
        self.journal = Some(journal);
    }

    /// Ends at SIGTERM and SIGINT, begins a live update at SIGUSR1.
    ///
    /// # Errors
    /// Of the system calls.
    pub fn take_signals(&mut self) -> io::Result<()> {
        // A peer that goes away during a write is noticed by the write's error.
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        let signals = poll::signals(&[libc::SIGTERM, libc::SIGINT, libc::SIGUSR1])?;
        self.poll.add(&signals, SIGNAL, Interest::READ)?;
        self.signals = Some(signals);
        Ok(())
    }

    /// Ends when this descriptor becomes readable.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn stop_by(&mut self, waker: &OwnedFd) -> io::Result<()> {
        self.poll.add(waker, STOP, Interest::READ)
    }

    /// Looks after domains when this says so.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn watch_domains(&mut self, watch: DomainWatch) -> io::Result<()> {
        self.poll.add(&watch.channel.raw_fd(), DOMAINS, Interest::READ)?;
        self.domains = Some(watch);
        Ok(())
    }

    /// Goes on with what a daemon before this one has kept ([`Server::take_up`]).
    pub fn take_up(&mut self, kept: Kept) {
        match &mut self.domains {
            Some(watch) => self.server.take_up(kept, &mut watch.life),
            None => self.server.take_up(kept, |_| Life::Running),
        }
    }

    /// Serves this kernel's own ring: the control domain's, which may do everything.
    ///
    /// # Errors
    /// It cannot be mapped, or its channel not be bound.
    pub fn serve_local(&mut self, port: u32) -> io::Result<()> {
        let id = self.server.connect(Caller::CONTROL);
        self.server.domains.entry(0).conn = Some(id);
        self.server.platform.introduce(id, 0, 0, port, crate::domains::FEATURES)
    }

    fn adopt(&mut self, id: ConnId, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        self.poll.add(&stream, id as u64, Interest::READ)?;
        self.sockets.insert(id, Socket { stream, interest: Interest::READ });
        Ok(())
    }

    /// Serves until it is asked to end.
    ///
    /// # Errors
    /// The system cannot wait any more.
    pub fn run(&mut self) -> io::Result<End> {
        let mut events = Vec::new();
        // What was restored may have something to send, and rings may have requests that came meanwhile.
        let all: Vec<u32> = self.rings.borrow().served.keys().copied().collect();
        all.into_iter().for_each(|domid| self.serve_ring(domid));
        for id in self.sockets.keys().copied().collect::<Vec<_>>() {
            self.server.go_on(id);
            self.flush(id);
        }
        loop {
            self.settle()?;
            if let Some(end) = self.next_live_update() {
                return Ok(end);
            }
            self.poll.wait(&mut events, self.waiting.is_empty())?;
            for event in &events {
                if let Some(end) = self.handle(*event) {
                    self.settle()?;
                    return Ok(end);
                }
            }
            for domid in std::mem::take(&mut self.waiting) {
                self.serve_ring(domid);
            }
        }
    }

    fn handle(&mut self, event: Event) -> Option<End> {
        let low = event.token as u32;
        match event.token >> 32 << 32 {
            0 => self.serve_socket(low as ConnId, event),
            LISTENER => self.accept(low as usize),
            RING => {
                if let Some(served) = self.rings.borrow_mut().served.get_mut(&low)
                    && served.ring.channel().take().is_err()
                {
                    served.ring.fail(ring::RingError::Communication);
                }
                self.serve_ring(low);
            }
            SIGNAL => match self.signals.as_ref().and_then(poll::next_signal) {
                Some(libc::SIGUSR1) => return Some(End::Update(Update::default())),
                Some(_) => return Some(End::Asked),
                None => {}
            },
            DOMAINS => {
                if let Some(watch) = &mut self.domains {
                    // A channel that broke says nothing more; domains that die are then found by their release.
                    let _ = watch.channel.take();
                    self.server.domains_changed(&mut watch.life);
                }
            }
            _ => return Some(End::Asked),
        }
        None
    }

    fn next_live_update(&mut self) -> Option<End> {
        let Action::LiveUpdate { conn, request, program, arguments } = self.server.actions.pop()?;
        Some(End::Update(Update { asked: Some((conn, request)), program, arguments }))
    }

    fn accept(&mut self, index: usize) {
        while let Some((_, listener)) = self.listeners.get(index) {
            let Ok((stream, _)) = listener.accept() else { return };
            if self.sockets.len() >= SOCKETS_MAX {
                // Dropped: its client sees the end of the connection.
                continue;
            }
            let id = self.server.connect(Caller::CONTROL);
            if self.adopt(id, stream).is_err() {
                self.server.disconnect(id);
            }
        }
    }

    fn serve_socket(&mut self, id: ConnId, event: Event) {
        let Some(socket) = self.sockets.get_mut(&id) else { return };
        let mut ended = event.gone && !event.readable;
        if event.readable && self.server.wants_more(id) {
            self.buffer.resize(READ_LEN, 0);
            match socket.stream.read(&mut self.buffer) {
                Ok(0) => ended = true,
                Ok(count) => self.server.receive(id, &self.buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => ended = true,
            }
        } else if event.gone {
            ended = true;
        }
        if ended {
            self.drop_socket(id);
        } else if event.writable {
            self.dirty.push(id);
        }
    }

    fn drop_socket(&mut self, id: ConnId) {
        self.server.disconnect(id);
        self.sockets.remove(&id);
    }

    /// Writes down what changed, then sends what is to be sent, until nothing is left that can be done now.
    fn settle(&mut self) -> io::Result<()> {
        loop {
            if let Some(journal) = &mut self.journal
                && let Err(error) = journal.commit(&mut self.server)
            {
                // To serve on is more than to remember: a host without its xenstored loses its guests.
                crate::say!("the state directory cannot be written any more: {error}; serving on without it");
                self.journal = None;
                self.server.store.journal = None;
                self.server.domains.changed = None;
                self.server.trouble = Some(format!("the state directory is not written any more: {error}"));
            }
            let fresh = std::mem::take(&mut self.rings.borrow_mut().fresh);
            for domid in fresh {
                if let Some(served) = self.rings.borrow().served.get(&domid) {
                    let channel = served.ring.channel().raw_fd();
                    self.poll.add(&channel, RING | u64::from(domid), Interest::READ)?;
                }
            }
            let mut dirty = std::mem::take(&mut self.dirty);
            self.server.take_dirty(&mut dirty);
            if dirty.is_empty() {
                self.dirty = dirty;
                return Ok(());
            }
            for id in dirty.drain(..) {
                self.flush(id);
            }
            self.dirty.append(&mut dirty);
        }
    }

    fn flush(&mut self, id: ConnId) {
        let Some(socket) = self.sockets.get_mut(&id) else {
            let domid = self.server.conn(id).map(|conn| conn.caller.domid);
            return domid.into_iter().for_each(|domid| self.send_ring(domid));
        };
        loop {
            let unsent = self.server.unsent(id);
            if unsent.is_empty() {
                break;
            }
            match socket.stream.write(unsent) {
                Ok(count) => self.server.sent(id, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.drop_socket(id),
            }
        }
        self.server.go_on(id);
        if self.server.conn(id).is_none_or(|conn| conn.broken) {
            return self.drop_socket(id);
        }
        let unsent = !self.server.unsent(id).is_empty();
        let interest = Interest { read: self.server.wants_more(id), write: unsent };
        if interest != socket.interest {
            socket.interest = interest;
            if self.poll.change(&socket.stream, id as u64, interest).is_err() {
                self.drop_socket(id);
            }
        }
    }

    /// Reads requests of a ring, for some turns; replies are sent with those of all connections.
    fn serve_ring(&mut self, domid: u32) {
        for _ in 0..RING_TURNS {
            let Some(id) = self.read_ring(domid) else { return };
            let buffer = std::mem::take(&mut self.buffer);
            self.server.receive(id, &buffer);
            self.buffer = buffer;
        }
        // Others first.
        self.waiting.push(domid);
    }

    /// Puts what a guest has written into the buffer; `None` when there is nothing, or nothing may be read now.
    fn read_ring(&mut self, domid: u32) -> Option<ConnId> {
        let mut rings = self.rings.borrow_mut();
        let served = rings.served.get_mut(&domid)?;
        let id = served.conn;
        if served.ring.wants_reset() {
            served.ring.reset();
            self.server.reset(id);
        }
        // Whether or not there are requests: a guest may have made room for what it is sent.
        self.dirty.push(id);
        served.stalled = !self.server.wants_more(id);
        if served.stalled {
            return None;
        }
        self.buffer.clear();
        match served.ring.read(&mut self.buffer) {
            Ok(0) => None,
            Ok(_) => {
                served.consumed = true;
                Some(id)
            }
            Err(_) => {
                // What it had open ends with its connection; the page says why until the guest begins anew.
                self.server.reset(id);
                None
            }
        }
    }

    /// Writes into a ring what there is room for.
    fn send_ring(&mut self, domid: u32) {
        let mut rings = self.rings.borrow_mut();
        let Some(served) = rings.served.get_mut(&domid) else { return };
        let id = served.conn;
        if self.server.conn(id).is_some_and(|conn| conn.broken) {
            let drowned = self.server.unsent(id).len() > session::REPLIES_MAX;
            let why = if drowned { ring::RingError::Communication } else { ring::RingError::Protocol };
            served.ring.fail(why);
            self.server.reset(id);
            return;
        }
        match served.ring.write(self.server.unsent(id)) {
            Ok(sent) => {
                self.server.sent(id, sent);
                if sent > 0 || std::mem::take(&mut served.consumed) {
                    served.ring.notify();
                }
            }
            Err(_) => return self.server.reset(id),
        }
        let stalled = served.stalled;
        // A request that is answered now may be about this very domain.
        drop(rings);
        self.server.go_on(id);
        if stalled && self.server.wants_more(id) {
            self.waiting.push(domid);
        }
    }

    /// Lets go of the sockets' files; connections end with the process.
    pub fn remove_sockets(&self) {
        for (path, _) in &self.listeners {
            // It may be gone, or another daemon's by now: then there is nothing to do.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Descriptors that another program is to inherit.
    fn inherited(&self) -> Vec<RawFd> {
        let mut fds: Vec<RawFd> = self.listeners.iter().map(|(_, listener)| listener.as_raw_fd()).collect();
        fds.extend(self.sockets.values().map(|socket| socket.stream.as_raw_fd()));
        fds.extend(self.rings.borrow().served.values().map(|served| served.ring.channel().raw_fd()));
        fds.extend(self.domains.iter().map(|watch| watch.channel.raw_fd()));
        fds
    }
}

/// A daemon in a thread of this process, for tests and benchmarks; it ends when this is dropped.
#[derive(Debug)]
pub struct Running {
    path: PathBuf,
    waker: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    /// Serves an empty tree at a socket.
    ///
    /// # Errors
    /// As of [`socket::listen`], in a sentence.
    pub fn start(path: &Path) -> Result<Self, String> {
        let listener = socket::listen(path)?;
        let failed = |error: io::Error| format!("cannot start a xenstored in this process: {error}");
        let waker = poll::waker().map_err(failed)?;
        let stop = waker.try_clone().map_err(failed)?;
        let place = path.to_owned();
        let thread = std::thread::Builder::new()
            .name("xenstored".into())
            .spawn(move || {
                let served = Daemon::new(Server::default(), SharedRings::default()).and_then(|mut daemon| {
                    daemon.listen(&place, listener)?;
                    daemon.stop_by(&stop)?;
                    daemon.run()
                });
                if let Err(error) = served {
                    crate::say!("the xenstored in this process ended: {error}");
                }
            })
            .map_err(failed)?;
        Ok(Self { path: path.to_owned(), waker, thread: Some(thread) })
    }

    /// Where it serves.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        poll::wake(&self.waker);
        if let Some(thread) = self.thread.take() {
            // A panic in it was printed by itself.
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
