//! Consoles over HTTP: the session, its role, and the socket of the emulator.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_model::{ApiError, Role};

use crate::{Toolstack, roles};

/// What a console needs: a reader of it sees what is typed there.
const LEAST: Role = Role::VmAdmin;

impl Toolstack {
    /// Connects to a console: `name` is the reference or the UUID of a console or of a VM.
    ///
    /// # Errors
    /// `SESSION_INVALID`, `RBAC_PERMISSION_DENIED`, `HANDLE_INVALID`, `UUID_INVALID`, `VM_BAD_POWER_STATE`; the console
    /// is a terminal of the host.
    pub fn console(self: &Arc<Self>, session: &str, name: &str) -> Result<OwnedFd, ApiError> {
        let reviewed = self.sessions.review();
        let session = self.sessions.enter(session)?;
        session.admit(reviewed)?;
        roles::check(&session.caller(), LEAST, "http/connect_console")?;
        self.wait_until_recovered();
        self.vms.console(name)
    }
}
