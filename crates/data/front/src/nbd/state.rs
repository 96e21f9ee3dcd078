//! What the threads of a server have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tapio_block::DiskHandle;
use tapio_nbd::tls::TlsServer;

use super::exports::Exports;
use super::session::{Shared, Totals};

/// An open connection and the disk it is on.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) disk: DiskHandle,
    /// Which of the disk's threads serves it.
    pub(super) thread: usize,
}

/// What the threads of a server have in common.
#[derive(Debug, Default)]
pub(super) struct ServerState {
    pub(super) exports: Exports,
    /// How clients begin TLS, if they can.
    pub(super) tls: Option<TlsServer>,
    pub(super) totals: Arc<Totals>,
    sessions: Mutex<Vec<Session>>,
    next_id: AtomicU64,
}

impl ServerState {
    pub(super) fn new(tls: Option<TlsServer>) -> Self {
        Self { tls, ..Self::default() }
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Puts a session in the list, on the thread of its disk that has the fewest; gives its number.
    pub(super) fn begin(&self, shared: &Arc<Shared>, disk: &DiskHandle) -> usize {
        let mut sessions = self.sessions();
        let served = |thread: usize| {
            let here =
                |session: &&Session| session.thread == thread && session.shared.export == shared.export;
            sessions.iter().filter(here).count()
        };
        let thread = (0..disk.threads_max()).min_by_key(|thread| served(*thread)).unwrap_or(0);
        sessions.push(Session { shared: Arc::clone(shared), disk: disk.clone(), thread });
        thread
    }

    /// The sessions that are alive.
    pub(super) fn sessions(&self) -> MutexGuard<'_, Vec<Session>> {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| !session.shared.is_closed());
        sessions
    }
}
