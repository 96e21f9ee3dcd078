//! Who may log in, and as what.
//!
//! An account is either one of the toolstack's own, in a file of argon2id hashes, or one of the system, whose password
//! PAM checks; then the same file says what it may do, by its name or by a group. A name that the file holds a hash for
//! is never asked of PAM. Root of the system may do everything.

mod file;
mod pam;
mod throttle;

use std::path::Path;
use std::time::Instant;

use tapio_model::{ApiError, Role};

use crate::door::Peer;
use throttle::Throttle;

pub use file::{AccountFile, Kind, Row, role_named, role_word};
pub use pam::{Pam, PamOptions};

/// File of the accounts, in the directory of what survives a reboot.
pub const FILE: &str = "accounts";

/// Checks names and passwords.
#[derive(Debug)]
pub struct Accounts {
    file: AccountFile,
    pam: Option<Pam>,
    throttle: Throttle,
}

impl Accounts {
    /// Accounts of `dir`; with PAM where `pam` asks for it and the system has it.
    ///
    /// # Errors
    /// A sentence about a file that cannot be read or has a wrong line.
    pub fn open(dir: &Path, pam: Option<&PamOptions>) -> Result<Self, String> {
        let file = AccountFile::new(dir.join(FILE));
        file.rows()?;
        let pam = pam.and_then(|options| match Pam::open(options) {
            Ok(pam) => Some(pam),
            Err(why) => {
                tracing::info!("accounts of the system cannot log in: {why}");
                None
            }
        });
        Ok(Self { file, pam, throttle: Throttle::default() })
    }

    /// Whether accounts of the system can log in.
    pub const fn has_pam(&self) -> bool {
        self.pam.is_some()
    }

    /// What this account may do, if the password is right.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED` for a wrong name or password, or after too many of them from there;
    /// `SESSION_AUTHORIZATION_FAILED` for an account that has no role.
    pub fn authenticate(&self, user: &str, password: &str, peer: &Peer) -> Result<Role, ApiError> {
        if let Some(wait) = self.throttle.wait(user, &peer.address, Instant::now()) {
            let seconds = wait.as_secs().max(1);
            tracing::warn!("login from {} is not tried: too many wrong passwords", peer.address);
            let why = format!("too many wrong passwords: wait {seconds} s and try again");
            return Err(refused(user, &why));
        }
        let result = self.check(user, password, &peer.address);
        match &result {
            Ok(role) => {
                self.throttle.succeeded(user, &peer.address);
                tracing::info!("{user} logged in from {} as {}", peer.address, role_word(*role));
            }
            Err(error) => {
                if error.code == "SESSION_AUTHENTICATION_FAILED" {
                    self.throttle.failed(user, &peer.address, Instant::now());
                }
                // The name may be a password typed into the wrong field: it is not written down.
                tracing::warn!("login from {} failed: {}", peer.address, error.code);
            }
        }
        result
    }

    fn check(&self, user: &str, password: &str, from: &str) -> Result<Role, ApiError> {
        let rows = self.file.rows().map_err(ApiError::internal)?;
        let own = rows.iter().find(|row| row.kind == Kind::Own && row.name == user);
        if own.is_some() || self.pam.is_none() {
            // An unknown name costs as much as a wrong password.
            let right = file::verify(own.and_then(|row| row.hash.as_deref()), password);
            return match own {
                Some(row) if right => Ok(row.role),
                _ => Err(refused(user, "the name or the password is wrong")),
            };
        }
        let Some(pam) = &self.pam else { return Err(refused(user, "the name or the password is wrong")) };
        pam.authenticate(user, password, from).map_err(|why| refused(user, &why))?;
        let by_name =
            rows.iter().filter(|row| row.kind == Kind::System && row.name == user).map(|row| row.role);
        let groups = rows.iter().filter(|row| row.kind == Kind::Group).collect::<Vec<_>>();
        let gids = if groups.is_empty() { Vec::new() } else { pam::groups_of(user) };
        let by_group =
            groups.iter().filter(|row| pam::gid_of(&row.name).is_some_and(|gid| gids.contains(&gid)));
        let root = (user == "root").then_some(Role::PoolAdmin);
        by_name.chain(by_group.map(|row| row.role)).chain(root).max().ok_or_else(|| {
            let why =
                "the account has no role here: 'tapiod user add --system NAME --role ROLE' gives it one";
            ApiError::new("SESSION_AUTHORIZATION_FAILED", [user, why])
        })
    }

    /// Changes the password of one of the toolstack's own accounts.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED` when the old one is wrong, `OPERATION_NOT_ALLOWED` for an account of the system
    /// and for a new password that is none.
    pub fn change_password(&self, user: &str, old: &str, new: &str) -> Result<(), ApiError> {
        let peer = Peer { superuser: false, address: "change_password".to_owned() };
        let rows = self.file.rows().map_err(ApiError::internal)?;
        if !rows.iter().any(|row| row.kind == Kind::Own && row.name == user) {
            let why = format!("{user} is an account of the system: change its password with passwd");
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        self.authenticate(user, old, &peer)?;
        self.file.set_password(user, new).map_err(|why| ApiError::new("OPERATION_NOT_ALLOWED", [why]))
    }
}

fn refused(user: &str, why: &str) -> ApiError {
    ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, why])
}

#[cfg(test)]
mod tests;
