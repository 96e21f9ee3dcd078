//! Sessions held against the accounts they were opened by.
//!
//! An account may be removed, or get another role or another password, while sessions of it are open: the file of
//! accounts is changed by a command, not by a call. Every call asks whether anything changed (a look at the file's
//! inode), and so does the daemon's watch of the file, for calls that wait. If something did, all sessions are held
//! against what the accounts say now, before the call goes on:
//!
//! | the account | its sessions | what they have in progress |
//! |---|---|---|
//! | is gone, or has another password | end | waits end with `SESSION_INVALID`, running work is cancelled |
//! | has a lower role | go on with it | waits go on with it, running work that needs more is cancelled |
//! | has a higher role | go on with it | goes on |
//! | cannot be read | are refused until it can | goes on |

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_model::{ApiError, Value};

use super::{Session, Sessions};
use crate::accounts::Credential;
use crate::caller::Caller;
use crate::roles;

impl Sessions {
    /// Holds all sessions against the accounts, if those changed since it was done last.
    ///
    /// # Errors
    /// The accounts cannot be read: no session of theirs may do anything.
    pub fn review(&self) -> Result<(), ApiError> {
        if self.accounts.generation() == self.reviewed.load(Ordering::Acquire) {
            return Ok(());
        }
        let _turn = self.reviewing.lock();
        let generation = self.accounts.generation();
        if generation == self.reviewed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hold()?;
        // What changed while it was read has another number: the next call looks again.
        self.reviewed.store(generation, Ordering::Release);
        Ok(())
    }

    /// The same although nothing may have changed: for what has no generation, as the groups of a directory.
    ///
    /// # Errors
    /// As [`Self::review`].
    pub fn review_again(&self) -> Result<(), ApiError> {
        let _turn = self.reviewing.lock();
        self.hold()
    }

    fn hold(&self) -> Result<(), ApiError> {
        let open: Vec<(Arc<Session>, Credential)> = {
            let all = self.all.lock();
            all.values().filter_map(|session| Some((Arc::clone(session), session.credential()?))).collect()
        };
        let asked: Vec<(&str, Credential)> =
            open.iter().map(|(session, credential)| (session.user.as_str(), *credential)).collect();
        let roles = self.accounts.standings(&asked)?;
        let mut changed = false;
        for ((session, _), role) in open.iter().zip(roles) {
            let user = &session.user;
            match role {
                None => {
                    tracing::warn!(user, "a session ends: its account is gone or has another password");
                    session.is_revoked.store(true, Ordering::Release);
                    self.end(&session.reference);
                }
                Some(role) if role != session.role() => {
                    tracing::warn!(user, role = roles::name(role), "a session goes on with another role");
                    session.role.store(roles::rank(role), Ordering::Release);
                    let names = Value::Set(vec![roles::name(role).into()]);
                    self.db.set("session", &session.reference, "rbac_permissions", names)?;
                    changed = true;
                }
                Some(_) => {}
            }
        }
        if changed {
            // A call that waits for events looks again at what it may see.
            self.db.announce();
            self.have_changed();
        }
        self.tasks.hold(|asked| self.accounts.standings(asked))
    }

    /// Changes the password of the account of a session, which goes on; other sessions of the account end.
    pub(super) fn change_password(&self, caller: &Caller, old: &str, new: &str) -> Result<(), ApiError> {
        {
            // No review between the account's change and the session's.
            let _turn = self.reviewing.lock();
            let credential = self.accounts.change_password(&caller.user, old, new)?;
            if let Some(session) = self.all.lock().get(&caller.session) {
                let mut known = session.credential.lock();
                // The local superuser is none of the account's sessions, whatever it calls itself.
                *known = known.map(|_| credential);
            }
        }
        self.review()
    }
}
