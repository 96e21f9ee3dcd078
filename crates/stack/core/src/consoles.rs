//! Consoles over HTTP: the session, its role, and the socket of the emulator.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_model::{ApiError, Role};

use crate::{Toolstack, roles};

/// What a console needs: a reader of it sees what is typed there.
const LEAST: Role = Role::VmOperator;

impl Toolstack {
    /// Connects to a console: `name` is the reference or the UUID of a console or of a VM.
    ///
    /// # Errors
    /// `SESSION_INVALID`, `RBAC_PERMISSION_DENIED`, `HANDLE_INVALID`, `UUID_INVALID`, `VM_BAD_POWER_STATE`; the console
    /// is a terminal of the host.
    pub fn console(self: &Arc<Self>, session: &str, name: &str) -> Result<OwnedFd, ApiError> {
        self.admit_to_consoles(session)?;
        self.vms.console(name)
    }

    /// The reference of the console that [`Self::console`] would connect to.
    ///
    /// # Errors
    /// As [`Self::console`].
    pub fn console_of(self: &Arc<Self>, session: &str, name: &str) -> Result<String, ApiError> {
        self.admit_to_consoles(session)?;
        self.vms.console_of(name)
    }

    fn admit_to_consoles(&self, session: &str) -> Result<(), ApiError> {
        let reviewed = self.sessions.review();
        let reference = session;
        let session = self.sessions.enter(reference)?;
        if session.is_plugins() {
            return Err(ApiError::new("SESSION_INVALID", [reference]));
        }
        session.admit(reviewed)?;
        roles::check(&session.caller(), LEAST, "http/connect_console")?;
        self.wait_until_recovered();
        Ok(())
    }

    /// Waits until a session may not use consoles any more: it has ended, or its account has another role.
    pub async fn console_lost(self: Arc<Self>, session: String) {
        let Some(session) = self.sessions.peek(&session) else { return };
        let mut news = self.db.watch();
        loop {
            news.mark_unchanged();
            if session.has_ended() || session.role() < LEAST {
                return;
            }
            // The database lives as long as `self`: there is always a sender.
            drop(news.changed().await);
        }
    }
}
