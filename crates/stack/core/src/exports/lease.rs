//! How long an export stays, and what becomes of it when its process dies.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tapio_model::Role;
use uuid::Uuid;

use super::serve::{ASK, has_sr};
use super::{Export, Exports, State};
use crate::roles;
use crate::sessions::Session;

/// How often leases are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long a process that died may take to be back.
const RESTART: Duration = Duration::from_secs(30);

/// Whether a session may connect still.
fn may_connect(session: &Session) -> bool {
    !session.has_ended() && is_trusted(session)
}

/// Whether its clients may stay: not those of an account that may not read disks any more.
fn is_trusted(session: &Session) -> bool {
    !session.is_revoked() && roles::rank(session.role()) >= roles::rank(Role::VmAdmin)
}

impl Exports {
    /// Takes the names of sessions that have ended from the processes.
    ///
    /// The caller waits for nothing: a process that hangs keeps no session from being reviewed.
    pub(super) fn withdraw_names(self: &Arc<Self>) {
        let exports = self.all();
        if exports.is_empty() {
            return;
        }
        let this = Arc::clone(self);
        let withdraw = move || {
            for export in exports {
                let mut state = export.state.lock();
                if !state.is_over {
                    this.withdraw(&export, &mut state);
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("exports-names".into()).spawn(withdraw) {
            tracing::warn!(%error, "names of exports are withdrawn some seconds later");
        }
    }

    fn withdraw(self: &Arc<Self>, export: &Export, state: &mut State) {
        if state.grants.values().all(|(session, _)| may_connect(session)) {
            return;
        }
        let lost = state.grants.iter().filter(|(_, (session, _))| !is_trusted(session));
        let cut: Vec<String> = lost.map(|(name, _)| name.clone()).collect();
        state.grants.retain(|_, (session, _)| may_connect(session));
        if let Err(error) = self.admit(export, state, &cut) {
            // A name that is not valid any more is worse than a client that must connect again.
            tracing::warn!(vdi = export.vdi, %error, "names of an export could not be withdrawn, so it ends");
            if let Err(error) = self.end(export, state) {
                tracing::error!(vdi = export.vdi, %error, "an export does not end");
            }
        }
    }

    /// Ends exports whose lease is over.
    fn look(self: &Arc<Self>) {
        for export in self.all() {
            // One that is being started or ended is looked at next time.
            let Some(mut state) = export.state.try_lock() else { continue };
            if state.is_over {
                continue;
            }
            self.withdraw(&export, &mut state);
            match self.disks.clients(export.id, Instant::now() + ASK) {
                Ok(0) => {}
                Ok(_) => {
                    state.used = Instant::now();
                    continue;
                }
                // Its death is followed, and a process that is silent is asked again.
                Err(_) => continue,
            }
            let is_over = state.grants.is_empty() || state.used.elapsed() > self.options().lease;
            if is_over
                && !state.is_over
                && let Err(error) = self.end(&export, &mut state)
            {
                tracing::warn!(vdi = export.vdi, %error, "an export without clients does not end; it is tried again");
            }
        }
    }

    /// Starts another process in the place of one that died; clients connect again. Answers false where it must be
    /// tried again later.
    fn died(self: &Arc<Self>, id: Uuid) -> bool {
        let Some(export) = self.all().into_iter().find(|export| export.id == id) else { return true };
        if self.disks.is_paused(id) {
            return false;
        }
        let mut state = export.state.lock();
        if state.is_over {
            return true;
        }
        let Some(note) = self.disks.of_vbd(id) else { return true };
        let again = has_sr(self, &note)
            && {
                let restarted = self.disks.restart(id, Instant::now() + RESTART).map(drop);
                let admitted = restarted.and_then(|()| self.admit(&export, &state, &[]));
                admitted
                .inspect_err(|error| {
                    tracing::warn!(vdi = export.vdi, %error, "the process of an export died and cannot be replaced");
                })
                .is_ok()
            };
        if again {
            tracing::warn!(vdi = export.vdi, "the process of an export had died and was started again");
        } else if let Err(error) = self.end(&export, &mut state) {
            tracing::warn!(vdi = export.vdi, %error, "an export whose process died does not end");
        }
        true
    }
}

/// Starts the thread that looks after exports; it ends with the toolstack.
pub(crate) fn listen(exports: &Arc<Exports>) {
    let weak = Arc::downgrade(exports);
    if let Err(error) = thread::Builder::new().name("exports".into()).spawn(move || tend(&weak)) {
        tracing::error!(%error, "no thread looks after exports: they stay until the next start");
    }
}

fn tend(exports: &Weak<Exports>) {
    let mut looked = Instant::now();
    let mut due: Vec<Uuid> = Vec::new();
    loop {
        let Some(disks) = exports.upgrade().map(|exports| exports.disks.clone()) else { return };
        due.extend(disks.wait_for_death_of_export(Instant::now() + LOOK_EVERY / 4));
        let Some(exports) = exports.upgrade() else { return };
        due.retain(|id| !exports.died(*id));
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            exports.look();
        }
    }
}
