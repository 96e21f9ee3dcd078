//! The server without its transports: bytes of connections in, bytes of connections out.
//!
//! ```text
//!   socket, ring ─ receive ─▶ Decoder ─▶ requests ─▶ Store ─▶ changes ─▶ Watches
//!   socket, ring ◀─ unsent, sent ─ Outbox ◀─ reply ──┘                      │
//!                                  Outbox of others ◀─ event ───────────────┘
//! ```
//!
//! It never waits and never touches a disk (the log of requests has a thread of its own), so a fuzzer, a property test
//! and the event loop drive the same code.

mod control;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::hash_map::RandomState;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tapio_log::{Log, Rotated, Rotation};
use tapio_xenstore::wire::{Errno, Message, MessageKind};

use crate::domains::{Domain, Domains, Life, NoHypervisor, Part, Platform};
use crate::kept::Kept;
use crate::quota::Quota;
use crate::session::{Conn, REPLIES_MAX};
use crate::store::{Change, Op, Store};
use crate::tree::{Access, Caller, Node, Perms, Tree, split};
use crate::watches::{ConnId, Watch, Watches};

/// How long the last lines of the log of requests are waited for.
const TRACE_LIMIT: Duration = Duration::from_secs(1);

/// A request that the server cannot carry out alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Another program is to go on in this one's place; the request is answered by that.
    LiveUpdate {
        /// The connection that asked.
        conn: ConnId,
        /// The request's number.
        request: u32,
        /// The program; this one's file when it is not named.
        program: Option<String>,
        /// Arguments instead of this one's.
        arguments: Option<String>,
    },
}

/// Requests since the start, by kind's number.
pub type Counts = [u64; 32];

/// The server.
#[derive(Debug)]
pub struct Server {
    /// Connections; a number is used again when its connection has ended.
    pub conns: Vec<Option<Conn>>,
    /// The tree.
    pub store: Store,
    /// The watches of all connections.
    pub watches: Watches,
    /// The domains.
    pub domains: Domains,
    /// Where domains' rings are.
    pub platform: Box<dyn Platform>,
    /// Requests since the start.
    pub counts: Counts,
    /// Events since the start.
    pub events: u64,
    /// Transactions that were refused with `EAGAIN`.
    pub conflicts: u64,
    /// What `CONTROL check` is to complain about.
    pub trouble: Option<String>,
    /// What the event loop is to do.
    pub actions: Vec<Action>,
    /// Connections with something to send, or to be closed.
    dirty: Vec<ConnId>,
    hasher: RandomState,
    /// Every request is written here.
    trace: Option<Log>,
    trace_path: String,
    rotation: Rotation,
    /// A program that was named for a live update.
    next_program: Option<String>,
    next_arguments: Option<String>,
}

impl Default for Server {
    fn default() -> Self {
        Self::new(Store::default(), Box::new(NoHypervisor))
    }
}

impl Server {
    /// A server of this tree.
    pub fn new(store: Store, platform: Box<dyn Platform>) -> Self {
        Self {
            conns: Vec::new(),
            store,
            watches: Watches::default(),
            domains: Domains::default(),
            platform,
            counts: [0; 32],
            events: 0,
            conflicts: 0,
            trouble: None,
            actions: Vec::new(),
            dirty: Vec::new(),
            hasher: RandomState::new(),
            trace: None,
            rotation: Rotation::default(),
            trace_path: "/var/log/xen/tapio-xenstored.log".into(),
            next_program: None,
            next_arguments: None,
        }
    }

    /// When the log file of requests is rotated, from the next [`Self::set_trace`] on.
    pub fn set_rotation(&mut self, rotation: Rotation) {
        self.rotation = rotation;
    }

    /// Waits until all requests so far are in the log file, or it hangs.
    pub fn flush_trace(&self) {
        if let Some(trace) = &self.trace {
            trace.flush(TRACE_LIMIT);
        }
    }

    /// Where `CONTROL log on` writes to.
    pub fn set_trace_path(&mut self, path: &str) {
        self.trace_path = path.into();
    }

    /// Whether requests are written to the log file, and which that is.
    pub fn tracing(&self) -> (bool, &str) {
        (self.trace.is_some(), &self.trace_path)
    }

    /// Writes every request to the log file from now on, or no more.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn set_trace(&mut self, on: bool) -> std::io::Result<()> {
        self.flush_trace();
        self.trace = match on {
            true => Some(Log::in_file(Rotated::open(Path::new(&self.trace_path), self.rotation)?)?),
            false => None,
        };
        Ok(())
    }

    /// A connection begins.
    pub fn connect(&mut self, caller: Caller) -> ConnId {
        let conn = Some(Conn::new(caller));
        if let Some(free) = self.conns.iter().position(Option::is_none) {
            self.conns[free] = conn;
            return free;
        }
        self.conns.push(conn);
        self.conns.len() - 1
    }

    /// A connection has ended: its transactions and watches go.
    pub fn disconnect(&mut self, id: ConnId) {
        self.forget_watches(id);
        if let Some(place) = self.conns.get_mut(id) {
            *place = None;
        }
    }

    /// The connection of a number.
    pub fn conn(&self, id: ConnId) -> Option<&Conn> {
        self.conns.get(id)?.as_ref()
    }

    fn conn_mut(&mut self, id: ConnId) -> Option<&mut Conn> {
        self.conns.get_mut(id)?.as_mut()
    }

    /// Bytes came on a connection. Whole requests among them are answered.
    pub fn receive(&mut self, id: ConnId, bytes: &[u8]) {
        let Some(conn) = self.conn_mut(id) else { return };
        conn.decoder.push(bytes);
        self.go_on(id);
    }

    /// Whether more bytes of a connection may be read: not before it takes what is there for it.
    pub fn wants_more(&self, id: ConnId) -> bool {
        self.conn(id).is_some_and(|conn| !conn.broken && !self.stalled(conn))
    }

    fn stalled(&self, conn: &Conn) -> bool {
        let outstanding = conn.out.messages() as u64;
        conn.out.unsent().len() >= REPLIES_MAX
            || (!conn.caller.privileged
                && self.domains.limits(conn.caller.domid).exceeded(Quota::Outstanding, outstanding))
    }

    /// Answers what has come and was not answered, because what was to be sent had not been taken.
    pub fn go_on(&mut self, id: ConnId) {
        while self.wants_more(id) {
            let Some(conn) = self.conn_mut(id) else { return };
            // Taken out meanwhile, because the message lies in it and the request may be about any connection.
            let mut decoder = std::mem::take(&mut conn.decoder);
            let found = match decoder.next() {
                Ok(Some(message)) => {
                    self.request(id, &message);
                    true
                }
                Ok(None) => false,
                Err(_) => {
                    if let Some(conn) = self.conn_mut(id) {
                        conn.broken = true;
                    }
                    self.mark(id);
                    false
                }
            };
            let Some(conn) = self.conn_mut(id) else { return };
            conn.decoder = decoder;
            if !found {
                return;
            }
        }
    }

    /// What a connection is to be sent.
    pub fn unsent(&self, id: ConnId) -> &[u8] {
        self.conn(id).map_or(&[], |conn| conn.out.unsent())
    }

    /// So many bytes were sent.
    pub fn sent(&mut self, id: ConnId, count: usize) {
        if let Some(conn) = self.conn_mut(id) {
            conn.out.sent(count);
        }
    }

    /// Connections with something to send or that are broken, each once, since the last call.
    pub fn take_dirty(&mut self, into: &mut Vec<ConnId>) {
        into.append(&mut self.dirty);
        for id in into {
            if let Some(conn) = self.conns.get_mut(*id).and_then(Option::as_mut) {
                conn.dirty = false;
            }
        }
    }

    fn mark(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id).and_then(Option::as_mut)
            && !conn.dirty
        {
            conn.dirty = true;
            self.dirty.push(id);
        }
    }

    fn request(&mut self, id: ConnId, message: &Message<'_>) {
        if let Some(count) = self.counts.get_mut(message.header.kind as usize) {
            *count += 1;
        }
        if self.trace.is_some() {
            self.trace_request(id, message);
        }
        let header = message.header;
        if let Err(errno) = self.answer(id, message) {
            if errno == Errno::EAGAIN {
                self.conflicts += 1;
            }
            self.reply(id, MessageKind::Error, header.request, header.transaction, errno_payload(errno));
        }
        self.mark(id);
    }

    fn reply(&mut self, id: ConnId, kind: MessageKind, request: u32, transaction: u32, payload: &[u8]) {
        if let Some(conn) = self.conn_mut(id)
            && !conn.out.reply(kind, request, transaction, payload)
        {
            conn.out.reply(MessageKind::Error, request, transaction, errno_payload(Errno::E2BIG));
        }
    }

    /// Answers a request that was left open ([`Action`]).
    pub fn answer_control(&mut self, id: ConnId, request: u32, text: &str) {
        self.reply(id, MessageKind::Control, request, 0, format!("{text}\0").as_bytes());
        self.mark(id);
    }

    fn trace_request(&mut self, id: ConnId, message: &Message<'_>) {
        let name = message.kind().map_or("?", MessageKind::name);
        let payload: String =
            message.payload.iter().map(|byte| if *byte == 0 { ' ' } else { char::from(*byte) }).collect();
        let seconds = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0.0, |time| time.as_secs_f64());
        let domid = self.conn(id).map_or(0, |conn| conn.caller.domid);
        let transaction = message.header.transaction;
        let line = format!(
            "{seconds:.6} conn {id} domain {domid} tx {transaction} {name} {}",
            payload.escape_debug()
        );
        // A log that cannot be written does not keep the tree from being served: lines are lost then, and counted.
        if let Some(trace) = &self.trace {
            trace.line(line);
        }
    }

    // --- watches ---

    fn forget_watches(&mut self, id: ConnId) {
        let all: Vec<(Rc<str>, Rc<[u8]>)> =
            self.watches.of(id).map(|(path, watch)| (path.clone(), watch.token.clone())).collect();
        for (path, token) in all {
            self.watches.remove(id, &path, &token);
        }
        if let Some(conn) = self.conn_mut(id) {
            conn.watches = 0;
        }
        if let Some(domid) = self.domain_of(id) {
            self.domains.mark(Part::Domain(domid));
        }
    }

    /// A watch was made or dropped: those of domains are kept.
    fn note_watch(&mut self, id: ConnId, path: &str, token: &[u8]) {
        if let Some(domid) = self.domain_of(id) {
            self.domains.mark(Part::Watch(domid, path.into(), token.into()));
        }
    }

    /// The domain whose ring a connection is.
    fn domain_of(&self, id: ConnId) -> Option<u32> {
        let domid = self.conn(id)?.caller.domid;
        (self.domain(domid)?.conn == Some(id)).then_some(domid)
    }

    /// Fires the watches of changes that are visible now.
    fn fire(&mut self, changes: &[Change]) {
        if self.watches.is_empty() {
            return;
        }
        for change in changes {
            let mut told: Vec<(ConnId, String, Rc<[u8]>)> = Vec::new();
            match change {
                Change::Changed { path, before } => {
                    let node = self.store.live.get(path);
                    self.watches.above(path, |watch| {
                        if self.may_know(watch.conn, path, node.map(Rc::as_ref), before.as_ref()) {
                            told.push((watch.conn, path[watch.relative..].into(), watch.token.clone()));
                        }
                    });
                }
                Change::Gone { path, node } => {
                    self.watches.above(path, |watch| {
                        if self.may_know(watch.conn, path, Some(node), None) {
                            told.push((watch.conn, path[watch.relative..].into(), watch.token.clone()));
                        }
                    });
                    // A watch below fires for the node it names, not for the one that was removed above it.
                    let gone = Tree::new(node.clone());
                    let top = if &**path == "/" { 0 } else { path.len() };
                    self.watches.below(path, |below, watch| {
                        if let Some(node) = gone.get(&below[top..])
                            && self.may_know(watch.conn, below, Some(node), None)
                        {
                            told.push((watch.conn, below[watch.relative..].into(), watch.token.clone()));
                        }
                    });
                }
            }
            for (id, path, token) in told {
                self.tell(id, &path, &token);
            }
        }
    }

    /// Whether a connection may be told of a node: it can read it, could read it, or can read what it is in.
    fn may_know(&self, id: ConnId, path: &str, node: Option<&Node>, before: Option<&Perms>) -> bool {
        let Some(conn) = self.conn(id) else { return false };
        let reads = |perms: &Perms| perms.of(&conn.caller).has(Access::READ);
        conn.caller.privileged
            || before.is_some_and(reads)
            || node.is_some_and(|node| reads(&node.perms))
            || split(path)
                .and_then(|(parent, _)| self.store.live.get(parent))
                .is_some_and(|parent| reads(&parent.perms))
    }

    fn tell(&mut self, id: ConnId, path: &str, token: &[u8]) {
        let Some(conn) = self.conns.get_mut(id).and_then(Option::as_mut) else { return };
        if conn.broken {
            return;
        }
        conn.out.event(path, token, &self.hasher);
        self.events += 1;
        let memory = self.domains.limits(conn.caller.domid).get(Quota::Memory);
        if conn.drowned(memory) {
            conn.broken = true;
        }
        self.mark(id);
    }

    /// Fires the watches of a special name, `@releaseDomain` as an example, for a domain.
    fn fire_special(&mut self, name: &str, domid: u32) {
        let whole = format!("{name}/{domid}");
        let mut told: Vec<(ConnId, bool, Rc<[u8]>)> = Vec::new();
        self.watches.above(&whole, |watch| {
            let here = self.watches_whole(watch.conn, &whole, &watch.token);
            told.push((watch.conn, here || watch.depth == Some(1), watch.token.clone()));
        });
        for (id, specific, token) in told {
            let allowed = self
                .conn(id)
                .is_some_and(|conn| self.domains.special(&whole).of(&conn.caller).has(Access::READ));
            if allowed {
                self.tell(id, if specific { &whole } else { name }, &token);
            }
        }
    }

    fn watches_whole(&self, id: ConnId, path: &str, token: &[u8]) -> bool {
        self.watches.of(id).any(|(known, watch)| &**known == path && *watch.token == *token)
    }

    // --- domains ---

    /// A domain's ring is to be served.
    fn introduce(&mut self, domid: u32, gfn: u64, port: u32) -> Result<(), Errno> {
        if domid == 0 || domid >= crate::domains::DOMID_MAX {
            return Err(Errno::EINVAL);
        }
        let known = self.domains.entry(domid);
        match known.introduced {
            Some((page, _)) if page != gfn => return Err(Errno::EINVAL),
            Some((page, _)) => {
                self.platform.rebind(domid, port).map_err(|_| Errno::EINVAL)?;
                known.introduced = Some((page, port));
                known.shutdown = false;
            }
            None => {
                let features = known.features.unwrap_or(crate::domains::FEATURES);
                let target = known.target;
                let id = self.connect(Caller { target, ..Caller::guest(domid) });
                if self.platform.introduce(id, domid, gfn, port, features).is_err() {
                    self.disconnect(id);
                    return Err(Errno::EINVAL);
                }
                if let Some(known) = self.domains.change(domid) {
                    known.introduced = Some((gfn, port));
                    known.conn = Some(id);
                    known.shutdown = false;
                }
            }
        }
        self.fire_special("@introduceDomain", domid);
        Ok(())
    }

    /// A domain is gone, or shall be served no more.
    pub fn release(&mut self, domid: u32) {
        let (domain, agents) = self.domains.forget(domid);
        self.platform.release(domid);
        if let Some(id) = domain.conn {
            self.disconnect(id);
        }
        for id in agents {
            if let Some(conn) = self.conn_mut(id) {
                conn.caller.target = None;
            }
        }
        let changes = self.store.force(&Caller::CONTROL, Op::Forget(domid));
        self.fire(&changes);
        self.fire_special("@releaseDomain", domid);
    }

    /// Goes on with what a daemon before this one has kept, before any request. Domains are served by their rings
    /// where these can be had; `life` says how each is. A watch is told once, as when it was made: what it was about
    /// may have changed since its domain was last told.
    pub fn take_up(&mut self, mut kept: Kept, mut life: impl FnMut(u32) -> Life) {
        // The control domain's ring is there already.
        let control = self.domains.get(0).and_then(|domain| domain.conn);
        kept.domains.changed = self.domains.changed.take();
        self.domains = kept.domains;
        self.store = kept.store;
        if control.is_some() {
            self.domains.entry(0).conn = control;
        }
        for domid in self.domains.known().keys().copied().collect::<Vec<_>>() {
            let Some(domain) = self.domains.change(domid) else { continue };
            if let Some((gfn, port)) = domain.introduced {
                let features = domain.features.unwrap_or(crate::domains::FEATURES);
                let target = domain.target;
                if life(domid) == Life::Gone {
                    self.release(domid);
                    continue;
                }
                let id = self.connect(Caller { target, ..Caller::guest(domid) });
                let served = self.platform.introduce(id, domid, gfn, port, features);
                if let Err(error) = &served {
                    crate::say!("domain {domid} is served no more: {error}");
                    self.disconnect(id);
                }
                if let Some(domain) = self.domains.change(domid) {
                    domain.conn = served.is_ok().then_some(id);
                    domain.introduced = domain.introduced.filter(|_| served.is_ok());
                }
            }
            let Some(id) = self.domain(domid).and_then(|domain| domain.conn) else { continue };
            for (path, watch) in kept.watches.remove(&domid).unwrap_or_default() {
                let (token, relative) = (watch.token.clone(), watch.relative);
                if self.watches.add(&path, Watch { conn: id, ..watch }) {
                    if let Some(conn) = self.conn_mut(id) {
                        conn.watches += 1;
                    }
                    self.tell(id, &path[relative..], &token);
                }
            }
        }
    }

    /// The hypervisor says that something happened to domains; `life` says how each is.
    pub fn domains_changed(&mut self, mut life: impl FnMut(u32) -> Life) {
        let introduced: Vec<u32> = self
            .domains
            .known()
            .iter()
            .filter(|(_, domain)| domain.introduced.is_some())
            .map(|(domid, _)| *domid)
            .collect();
        for domid in introduced {
            match life(domid) {
                Life::Running => {}
                Life::Gone => self.release(domid),
                Life::Shutdown => {
                    let told = self.domains.change(domid).map(|d| std::mem::replace(&mut d.shutdown, true));
                    if told == Some(false) {
                        self.fire_special("@releaseDomain", domid);
                    }
                }
            }
        }
    }

    /// A guest asked for its ring to begin anew: nothing of what it had open stays.
    pub fn reset(&mut self, id: ConnId) {
        self.forget_watches(id);
        if let Some(conn) = self.conn_mut(id) {
            let caller = conn.caller;
            *conn = Conn::new(caller);
        }
    }

    /// A domain that is known, introduced or not.
    pub fn domain(&self, domid: u32) -> Option<&Domain> {
        self.domains.get(domid)
    }
}

fn errno_payload(errno: Errno) -> &'static [u8] {
    // Names of errors are a few; their NUL is the wire's.
    macro_rules! names {
        ($($name:ident)*) => { match errno { $(Errno::$name => concat!(stringify!($name), "\0").as_bytes()),* } };
    }
    names! {
        EINVAL EACCES EEXIST EISDIR ENOENT ENOMEM ENOSPC EIO ENOTEMPTY ENOSYS EROFS EBUSY EAGAIN EISCONN E2BIG EPERM
    }
}
