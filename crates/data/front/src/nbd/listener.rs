//! Accepting connections and taking them through the handshake, away from the data threads.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tapio_block::DataThread;
use tapio_nbd::socket::{prepare, read_exact, write_all};
use tapio_sys::poll::{self, PollFd, PollFlags};

use super::connection::{Connection, Start};
use super::exports::{Entered, Visit};
use super::handshake::{Agreed, Catalog, Handshake, Refusal, Step};
use super::limits::{
    CONNECTIONS_MAX, DATA_THREAD_TIME, HANDSHAKE_THREADS_MAX, HANDSHAKE_TIME, HANDSHAKE_TIME_WHEN_FULL,
    HANDSHAKES_MAX, LISTENERS_MAX,
};
use super::session::{Permit, Shared, count};
use super::socket::Listener;
use super::state::ServerState;
use super::wire::Style;
use super::{plan, receiver, sender};

/// Stack of a handshake's thread: it recurses nowhere and keeps its buffers on the heap.
const STACK_LEN: usize = 128 << 10;
/// How long to wait when the process has no descriptors left.
const EXHAUSTED_TIME: Duration = Duration::from_millis(100);
/// Time between two looks at idle clients, at least.
const LOOK_TIME_MIN: Duration = Duration::from_millis(50);

/// Names a listening socket of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(u32);

/// A handshake in progress.
#[derive(Debug)]
struct Visitor {
    id: u64,
    fd: Arc<OwnedFd>,
    since: Instant,
}

/// The sockets listened on, and the number of the next one.
#[derive(Debug, Default)]
struct Listeners {
    next: u32,
    list: Vec<(ListenerId, Arc<Listener>)>,
}

#[derive(Debug)]
struct Inner {
    state: Arc<ServerState>,
    listeners: Mutex<Listeners>,
    visitors: Mutex<Vec<Visitor>>,
    /// Threads of handshakes.
    threads: Arc<AtomicUsize>,
    /// Wakes the accepting thread: the listeners changed, a handshake ended, or it is time to stop.
    event: File,
    stop: AtomicBool,
}

/// The thread that accepts, and what it listens on.
#[derive(Debug)]
pub(super) struct Acceptor {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Acceptor {
    pub(super) fn start(state: &Arc<ServerState>) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let inner = Arc::new(Inner {
            state: Arc::clone(state),
            listeners: Mutex::default(),
            visitors: Mutex::default(),
            threads: Arc::default(),
            event: File::from(event),
            stop: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name("nbd-accept".into()).stack_size(STACK_LEN).spawn({
            let inner = Arc::clone(&inner);
            move || inner.run()
        })?;
        Ok(Self { inner, thread: Mutex::new(Some(thread)) })
    }

    fn add(&self, listener: Listener) -> io::Result<ListenerId> {
        let mut listeners = self.inner.listeners.lock();
        if listeners.list.len() >= LISTENERS_MAX {
            let why = format!("the server listens on {LISTENERS_MAX} sockets already: close one first");
            return Err(io::Error::other(why));
        }
        let id = ListenerId(listeners.next);
        listeners.next += 1;
        listeners.list.push((id, Arc::new(listener)));
        drop(listeners);
        self.inner.wake();
        Ok(id)
    }

    pub(super) fn listen_unix(&self, path: &Path, mode: u32) -> io::Result<ListenerId> {
        self.add(Listener::unix(path, mode)?)
    }

    pub(super) fn listen_tcp(&self, address: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        let listener = Listener::tcp(address)?;
        let bound = listener.address.parse().unwrap_or(address);
        Ok((self.add(listener)?, bound))
    }

    pub(super) fn close(&self, id: ListenerId) -> bool {
        let mut listeners = self.inner.listeners.lock();
        let before = listeners.list.len();
        listeners.list.retain(|(other, _)| *other != id);
        let found = listeners.list.len() < before;
        drop(listeners);
        self.inner.wake();
        found
    }

    /// Takes a socket that needs no handshake; see [`super::NbdServer::adopt`].
    pub(super) fn adopt(&self, fd: OwnedFd, export: &str) -> Result<(), Refusal> {
        let inner = &self.inner;
        let mut visit = Visit::new(&inner.state.exports);
        let described = visit.find(export, true)?;
        let entered = visit.entered.ok_or(Refusal::Down)?;
        let agreed = Agreed { export: described, style: Style::Simple, allocation: false };
        count(&inner.state.totals.accepted);
        inner.hand_over(inner.state.next_id(), fd, "kernel".into(), &agreed, entered);
        Ok(())
    }

    /// Closes every socket, ends the handshakes in progress and waits for the thread.
    pub(super) fn stop(&self) {
        self.inner.stop.store(true, Ordering::Release);
        self.inner.listeners.lock().list.clear();
        for visitor in self.inner.visitors.lock().iter() {
            visitor.turn_away();
        }
        self.inner.wake();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Visitor {
    /// Ends its reads and writes; its thread notices and goes.
    fn turn_away(&self) {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

impl Inner {
    fn wake(&self) {
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn run(self: Arc<Self>) {
        while !self.stop.load(Ordering::Acquire) {
            let listeners: Vec<_> =
                self.listeners.lock().list.iter().map(|(_, listener)| Arc::clone(listener)).collect();
            let look = self.cut_idle();
            // With all places taken by young handshakes newcomers wait in the backlog.
            let (open, retry) = self.has_place();
            let retry = retry.into_iter().chain(look).min();
            let listening = if open { &listeners[..] } else { &[] };
            for index in self.wait(listening, retry) {
                if !self.has_place().0 {
                    break;
                }
                self.accept(&listening[index]);
            }
        }
    }

    /// Cuts off clients that have done nothing for as long as they may; says when to look again.
    fn cut_idle(&self) -> Option<Duration> {
        let mut idle = Vec::new();
        let mut next: Option<Duration> = None;
        for session in self.state.sessions().iter() {
            let Some((left, guard)) = session.shared.time_left() else { continue };
            if left.is_zero() {
                idle.push((
                    Arc::clone(&session.shared),
                    session.disk.clone(),
                    guard.report,
                    guard.client_time,
                ));
            }
            // What happened since the last look counts from this one on: often enough for that to matter little.
            let look = left.min(guard.client_time / 4).max(LOOK_TIME_MIN);
            next = Some(next.map_or(look, |next| next.min(look)));
        }
        for (shared, disk, report, time) in idle {
            report(&format!(
                "NBD client {} of export '{}' is disconnected: it sent no request and took no reply for {} s",
                shared.peer,
                shared.export,
                time.as_secs()
            ));
            shared.cancel();
            for thread in disk.threads() {
                let shared = Arc::clone(&shared);
                let cut = move |_: &DataThread| {
                    let of = |other: &Shared| std::ptr::eq(other, Arc::as_ptr(&shared));
                    Connection::on_this_thread(of).iter().for_each(|connection| connection.break_off());
                };
                // A data thread that has ended has no connections; one that does not answer is asked again.
                let _ = thread.call(DATA_THREAD_TIME, cut);
            }
        }
        next
    }

    /// Whether a newcomer may come in, after making room if an old handshake can go; and if not, when to ask again.
    fn has_place(&self) -> (bool, Option<Duration>) {
        if self.threads.load(Ordering::Relaxed) >= HANDSHAKE_THREADS_MAX {
            return (false, None);
        }
        let visitors = self.visitors.lock();
        if visitors.len() < HANDSHAKES_MAX {
            return (true, None);
        }
        // One more than the maximum may end at the same time as it is turned away; its place is free when it is gone.
        let oldest = visitors.iter().map(|visitor| visitor.since.elapsed()).max().unwrap_or_default();
        match HANDSHAKE_TIME_WHEN_FULL.checked_sub(oldest) {
            Some(left) if !left.is_zero() => (false, Some(left)),
            _ => (true, None),
        }
    }

    /// Indexes of listeners with a waiting client.
    fn wait(&self, listeners: &[Arc<Listener>], retry: Option<Duration>) -> Vec<usize> {
        let entry = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut entries: Vec<_> = listeners.iter().map(|listener| entry(listener.as_fd())).collect();
        entries.push(entry(self.event.as_fd()));
        if !poll::any(&mut entries, retry).unwrap_or(false) {
            return Vec::new();
        }
        if entries.pop().is_some_and(|event| !event.revents().is_empty()) {
            let _ = (&self.event).read(&mut [0; 8]);
        }
        (0..entries.len()).filter(|index| !entries[*index].revents().is_empty()).collect()
    }

    fn accept(self: &Arc<Self>, listener: &Listener) {
        let (fd, peer) = match listener.accept() {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return,
            Err(_) => {
                // Out of descriptors or memory: what is connected goes on, newcomers wait.
                std::thread::sleep(EXHAUSTED_TIME);
                return;
            }
        };
        count(&self.state.totals.accepted);
        prepare(fd.as_fd(), listener.is_unix());
        let (id, fd) = (self.state.next_id(), Arc::new(fd));
        {
            let mut visitors = self.visitors.lock();
            if visitors.len() >= HANDSHAKES_MAX {
                if let Some(oldest) = visitors.iter().min_by_key(|visitor| visitor.since) {
                    oldest.turn_away();
                    count(&self.state.totals.handshakes_evicted);
                }
                let index = (0..visitors.len()).min_by_key(|index| visitors[*index].since);
                index.map(|index| visitors.remove(index));
            }
            visitors.push(Visitor { id, fd: Arc::clone(&fd), since: Instant::now() });
        }
        let inner = Arc::clone(self);
        let Some(place) = Permit::take(&[(&self.threads, HANDSHAKE_THREADS_MAX)]) else {
            return self.leave(id);
        };
        let spawned =
            std::thread::Builder::new().name("nbd-handshake".into()).stack_size(STACK_LEN).spawn(move || {
                inner.handshake(id, fd, peer);
                drop(place);
                inner.wake();
            });
        if spawned.is_err() {
            self.leave(id);
        }
    }

    fn leave(&self, id: u64) {
        self.visitors.lock().retain(|visitor| visitor.id != id);
        self.wake();
    }

    fn handshake(&self, id: u64, fd: Arc<OwnedFd>, peer: String) {
        let mut visit = Visit::new(&self.state.exports);
        let outcome = self.converse(&fd, &peer, &mut visit);
        // From here on this thread alone holds the descriptor.
        self.leave(id);
        match (outcome, visit.entered) {
            (Ok(Some((agreed, plain))), Some(entered)) if !self.stop.load(Ordering::Acquire) => {
                // With TLS the data thread has the plain end, and the network belongs to the thread between.
                if let Some(fd) = plain.or_else(|| into_sole(fd)) {
                    self.hand_over(id, fd, peer, &agreed, entered);
                }
            }
            (Ok(None), _) => {}
            _ => count(&self.state.totals.handshakes_failed),
        }
    }

    /// Leads the conversation to its end: `None` when the client said goodbye. With TLS there is another socket for
    /// what follows.
    fn converse(
        &self,
        net: &OwnedFd,
        peer: &str,
        visit: &mut Visit<'_>,
    ) -> io::Result<Option<(Agreed, Option<OwnedFd>)>> {
        let deadline = Instant::now() + HANDSHAKE_TIME;
        let tls = self.state.tls.as_ref();
        write_all(net.as_fd(), &Handshake::greeting(), deadline)?;
        let mut handshake = Handshake::with_tls(tls.map(|tls| tls.policy));
        let mut plain: Option<OwnedFd> = None;
        let (mut bytes, mut out) = (Vec::new(), Vec::new());
        loop {
            let fd = plain.as_ref().unwrap_or(net).as_fd();
            bytes.resize(handshake.wants(), 0);
            read_exact(fd, &mut bytes, deadline)?;
            out.clear();
            let step = handshake.feed(&bytes, visit, &mut out).map_err(io::Error::other)?;
            write_all(fd, &out, deadline)?;
            match (step, tls) {
                (Step::More, _) => {}
                (Step::StartTls, Some(tls)) => {
                    plain = Some(tls.start(net.try_clone()?, deadline, peer.to_owned())?);
                }
                (Step::StartTls, None) => return Err(io::ErrorKind::Unsupported.into()),
                (Step::Transmission(agreed), _) => return Ok(Some((agreed, plain))),
                (Step::Goodbye, _) => return Ok(None),
            }
        }
    }

    fn hand_over(&self, id: u64, fd: OwnedFd, peer: String, agreed: &Agreed, entered: Entered) {
        let totals = Arc::clone(&self.state.totals);
        let guard = entered.entry.export.guard.clone().zip(entered.key);
        let shared = Arc::new(Shared::new(id, agreed.export.name.clone(), peer, totals, guard));
        let disk = entered.entry.export.disk.clone();
        let session = plan::Session {
            style: agreed.style,
            allocation: agreed.allocation,
            read_only: entered.entry.export.read_only,
            fast_zero: entered.entry.export.fast_zero,
            block_len: agreed.export.block_len_min,
        };
        count(&self.state.totals.sessions);
        // In the list before it runs, so that closing the server finds it.
        let thread = self.state.begin(&shared, &disk);
        // A close of the server, or a removal of the export, before it was in the list is seen here.
        // So is a name that is not valid any more.
        let is_over = self.stop.load(Ordering::Acquire) || entered.entry.removed.load(Ordering::Acquire);
        if is_over || !shared.is_admitted() {
            return shared.note_closed();
        }
        // A server counts its own clients; the pool's shares are for all servers of the disk together.
        let Some(place) = Permit::take(&[(disk.clients(), CONNECTIONS_MAX)]) else {
            return shared.note_closed();
        };
        let kept = Arc::clone(&shared);
        let held = Arc::clone(&entered.entry.held);
        let start = Start { fd, session, shared, permit: entered.permit, place, held };
        let started = disk.queue(thread).call(DATA_THREAD_TIME, move |data_thread| serve(data_thread, start));
        if started == Err(tapio_block::Gone::Ended) {
            kept.note_closed();
        }
    }
}

/// Serves a client, on the data thread.
fn serve(data_thread: &DataThread, start: Start) {
    if let Some(connection) = Connection::open(data_thread, start) {
        let tasks = data_thread.port.tasks();
        tasks.spawn(receiver::run(Rc::clone(&connection)));
        tasks.spawn(sender::run(connection));
    }
}

/// The descriptor itself, once the list of visitors has released it.
fn into_sole(fd: Arc<OwnedFd>) -> Option<OwnedFd> {
    match Arc::try_unwrap(fd) {
        Ok(fd) => Some(fd),
        // The acceptor is turning the client away at this moment.
        Err(shared) => shared.try_clone().ok(),
    }
}
