//! The server as the disk process holds it: exports, sockets, connections. None of this runs on a data thread.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tapio_block::{DiskHandle, Gone};
use tapio_nbd::tls::TlsServer;

use super::connection::Connection;
use super::exports::{Export, ExportError};
use super::guard::key_of;
use super::handshake::Refusal;
use super::limits::DATA_THREAD_TIME;
use super::listener::{Acceptor, ListenerId};
use super::session::{ConnectionInfo, ServerCounters, Shared};
use super::state::ServerState;

/// What becomes of the clients of an export that is drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// They stay connected and wait until [`NbdServer::resume`].
    Keep,
    /// They are disconnected; a client that reconnects repeats what had no answer.
    Close,
}

/// Why a drain did not finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrainError {
    /// There is no such export.
    Export(ExportError),
    /// The disk did not answer everything in time; the export stays held.
    Disk(Gone),
}

impl fmt::Display for DrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Export(error) => error.fmt(f),
            Self::Disk(gone) => write!(f, "requests are still in flight: {gone}"),
        }
    }
}

impl std::error::Error for DrainError {}

/// An NBD server: any number of exports on any number of sockets.
///
/// Handshakes run on short-lived threads of their own, transmission on the data thread of the export's disk. Dropping
/// the server closes its sockets and connections.
#[derive(Debug)]
pub struct NbdServer {
    state: Arc<ServerState>,
    acceptor: Acceptor,
}

impl NbdServer {
    /// A server without exports and sockets; starts the thread that will accept connections.
    pub fn new() -> io::Result<Self> {
        Self::with_tls(None)
    }

    /// The same, with clients that can begin TLS, or must.
    pub fn with_tls(tls: Option<TlsServer>) -> io::Result<Self> {
        let state = Arc::new(ServerState::new(tls));
        let acceptor = Acceptor::start(&state)?;
        Ok(Self { state, acceptor })
    }

    /// Offers a disk under a name.
    pub fn add_export(&self, export: Export) -> Result<(), ExportError> {
        self.state.exports.add(export)
    }

    /// Withdraws an export. With clients connected only if `force`: then they are cut off, what the disk has
    /// taken from them ends unanswered. See [`NbdServer::drain`] for the gentle way.
    pub fn remove_export(&self, name: &str, force: bool) -> Result<(), ExportError> {
        let entry = self.state.exports.remove(name, force)?;
        let name = entry.export.name.clone();
        for session in self.state.sessions().iter().filter(|session| session.shared.export == name) {
            session.shared.cancel();
        }
        self.cut_off(&entry.export.disk, move |shared| shared.export == name);
        Ok(())
    }

    /// Says by which names clients find a guarded export from now on. Clients that came by a name of `cut` are cut off;
    /// the others stay.
    pub fn admit(&self, export: &str, names: &[&str], cut: &[&str]) -> Result<(), ExportError> {
        let unknown = || ExportError::Unknown(export.to_string());
        let entry = self.state.exports.get(export).ok_or_else(unknown)?;
        let Some(guard) = &entry.export.guard else { return Err(unknown()) };
        guard.set(names);
        if cut.is_empty() {
            return Ok(());
        }
        let keys: Vec<_> = cut.iter().copied().map(key_of).collect();
        for session in self.state.sessions().iter().filter(|session| session.shared.came_by(&keys)) {
            session.shared.cancel();
        }
        self.cut_off(&entry.export.disk, move |shared| shared.came_by(&keys));
        Ok(())
    }

    /// The names of all exports.
    pub fn exports(&self) -> Vec<String> {
        self.state.exports.names()
    }

    /// Listens on a UNIX socket with these permissions (0o600 lets in its owner alone). A socket file without a server
    /// is replaced.
    pub fn listen_unix(&self, path: &Path, mode: u32) -> io::Result<ListenerId> {
        self.acceptor.listen_unix(path, mode)
    }

    /// Listens on a TCP address; returns where it really is, if the port was 0. Any client that reaches the address can
    /// use every export, unless TLS keeps unknown clients out.
    pub fn listen_tcp(&self, address: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        self.acceptor.listen_tcp(address)
    }

    /// Serves a connected socket whose client knows the export already and says nothing before its first request: the
    /// kernel's own. Replies are simple ones.
    pub fn adopt(&self, socket: OwnedFd, export: &str) -> Result<(), Refusal> {
        self.acceptor.adopt(socket, export)
    }

    /// Closes a socket; connections made through it stay. False when there is no such listener.
    pub fn close_listener(&self, id: ListenerId) -> bool {
        self.acceptor.close(id)
    }

    /// The connections in the transmission phase.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.state.sessions().iter().map(|session| session.shared.info()).collect()
    }

    /// What happened so far.
    pub fn counters(&self) -> ServerCounters {
        self.state.totals.read()
    }

    /// Cuts off one connection; false when there is none of this number.
    pub fn close_connection(&self, id: u64) -> bool {
        let disk = {
            let sessions = self.state.sessions();
            sessions.iter().find(|session| session.shared.id == id).map(|session| {
                session.shared.cancel();
                session.disk.clone()
            })
        };
        let Some(disk) = disk else { return false };
        self.cut_off(&disk, move |shared| shared.id == id)
    }

    /// Stops taking requests from the clients of an export and waits until everything taken is done and answered.
    /// New clients find the export: with [`Drained::Keep`] they wait likewise.
    pub fn drain(&self, name: &str, then: Drained, within: Duration) -> Result<(), DrainError> {
        let deadline = Instant::now() + within;
        let entry = self
            .state
            .exports
            .get(name)
            .ok_or_else(|| DrainError::Export(ExportError::Unknown(name.to_string())))?;
        if then == Drained::Keep {
            entry.held.store(true, Ordering::Release);
        }
        for thread in entry.export.disk.threads() {
            let (wanted, name) = (self.owner(), entry.export.name.clone());
            thread
                .call_async(deadline.saturating_duration_since(Instant::now()), move |_| async move {
                    let mine = Connection::on_this_thread(|shared| wanted(shared) && shared.export == name);
                    for connection in &mine {
                        connection.hold(true);
                    }
                    for connection in &mine {
                        connection.quiet().await;
                        if then == Drained::Close {
                            connection.break_off();
                        }
                    }
                })
                .map_err(DrainError::Disk)?;
        }
        if then == Drained::Close {
            // Their tasks run once more before they are gone.
            while entry.connections.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Lets the clients of an export go on after [`NbdServer::drain`].
    pub fn resume(&self, name: &str) -> Result<(), DrainError> {
        let unknown = || DrainError::Export(ExportError::Unknown(name.to_string()));
        let entry = self.state.exports.get(name).ok_or_else(unknown)?;
        entry.held.store(false, Ordering::Release);
        for thread in entry.export.disk.threads() {
            let (wanted, name) = (self.owner(), entry.export.name.clone());
            let resume = move |_: &tapio_block::DataThread| {
                for connection in Connection::on_this_thread(|shared| wanted(shared) && shared.export == name)
                {
                    connection.hold(false);
                }
            };
            thread.call(DATA_THREAD_TIME, resume).map_err(DrainError::Disk)?;
        }
        Ok(())
    }

    /// Distinguishes connections of this server from those of another one on the same data thread.
    fn owner(&self) -> impl Fn(&Shared) -> bool + Send + 'static {
        let totals = Arc::clone(&self.state.totals);
        move |shared| Arc::ptr_eq(&shared.totals, &totals)
    }

    fn cut_off(&self, disk: &DiskHandle, wanted: impl Fn(&Shared) -> bool + Clone + Send + 'static) -> bool {
        let mut any = false;
        for thread in disk.threads() {
            let (mine, wanted) = (self.owner(), wanted.clone());
            let found = thread.call(DATA_THREAD_TIME, move |_| {
                let found = Connection::on_this_thread(|shared| mine(shared) && wanted(shared));
                for connection in &found {
                    connection.break_off();
                }
                !found.is_empty()
            });
            // A data thread that has ended has no connections.
            any |= found.unwrap_or(false);
        }
        any
    }

    /// Closes all sockets and cuts off every connection.
    pub fn close(&self) {
        self.acceptor.stop();
        let mut ids: Vec<_> = self.state.sessions().iter().map(|session| session.shared.id).collect();
        while let Some(id) = ids.pop() {
            self.close_connection(id);
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.close();
    }
}
