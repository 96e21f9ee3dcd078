//! The accounts that may log in, and their roles.
//!
//! An account is either one of the toolstack's own, in a file of argon2id hashes, or one of the system, whose password
//! PAM checks; then the same file says what it may do, by its name or by a group. A name that the file holds a hash for
//! is never asked of PAM. Root of the system may do everything.
//!
//! What an account may do is asked again while sessions of it are open ([`Accounts::standings`]), whenever the file or
//! the system's own files of accounts changed ([`Accounts::generation`]).

mod file;
mod hash;
mod pam;
mod standing;
mod throttle;
mod watch;

use std::path::Path;
use std::time::Instant;

use tapio_model::{ApiError, Role};
use zeroize::Zeroizing;

use crate::backend::Peer;
use hash::Hasher;
use standing::{Prints, Stamps};
use throttle::Throttle;

pub use file::{AccountFile, Row, RowKind};
pub use pam::{Pam, PamOptions};
pub use watch::Watch;

/// File of the accounts, in the directory of what survives a reboot.
pub const FILE: &str = "accounts";

/// Checks names and passwords.
#[derive(Debug)]
pub struct Accounts {
    file: AccountFile,
    hasher: Hasher,
    pam: Option<Pam>,
    throttle: Throttle,
    stamps: Stamps,
    prints: Prints,
}

/// What a right password opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// What the account may do.
    pub role: Role,
    /// Another number after another password, and of another account of the name; says nothing about either.
    pub print: u64,
}

impl Accounts {
    /// Accounts of `dir`; with PAM where `pam` asks for it and the system has it.
    ///
    /// # Errors
    /// A sentence about a file that cannot be read or has a wrong line.
    pub fn open(dir: &Path, pam: Option<&PamOptions>) -> Result<Self, String> {
        let file = AccountFile::new(dir.join(FILE));
        file.rows()?;
        let hasher = Hasher::start()?;
        let pam = pam.and_then(|options| match Pam::open(options) {
            Ok(pam) => Some(pam),
            Err(why) => {
                tracing::info!("accounts of the system cannot log in: {why}");
                None
            }
        });
        let stamps = Stamps::new(dir.join(FILE), pam.is_some());
        Ok(Self { file, hasher, pam, throttle: Throttle::default(), stamps, prints: Prints::default() })
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
    pub fn authenticate(&self, user: &str, password: &str, peer: &Peer) -> Result<Opened, ApiError> {
        if let Some(wait) = self.throttle.wait(user, &peer.address, Instant::now()) {
            let seconds = wait.as_secs().max(1);
            tracing::warn!("login from {} is not tried: too many wrong passwords", peer.address);
            let why = format!("too many wrong passwords: wait {seconds} s and try again");
            return Err(refused(user, &why));
        }
        let result = self.check(user, password, &peer.address);
        match &result {
            Ok(opened) => {
                self.throttle.succeeded(user, &peer.address);
                tracing::info!("{user} logged in from {} as {}", peer.address, opened.role.name());
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

    fn check(&self, user: &str, password: &str, from: &str) -> Result<Opened, ApiError> {
        let rows = self.file.rows().map_err(ApiError::internal)?;
        let own = rows.iter().find(|row| row.kind == RowKind::Own && row.name == user);
        if own.is_some() || self.pam.is_none() {
            // An unknown name costs as much as a wrong password.
            let hash = own.and_then(|row| row.hash.clone());
            let password = Zeroizing::new(password.to_owned());
            let right = self.hasher.run(move |memory| memory.verify(hash.as_deref(), &password));
            let right = right.map_err(ApiError::internal)?;
            return match own {
                Some(row) if right => Ok(Opened { role: row.role, print: self.prints.own(row) }),
                _ => Err(refused(user, "the name or the password is wrong")),
            };
        }
        let Some(pam) = &self.pam else { return Err(refused(user, "the name or the password is wrong")) };
        // Before the password is checked: one that changes meanwhile has another print.
        let print = self.prints.system(user);
        pam.authenticate(user, password, from).map_err(|why| refused(user, &why))?;
        let role = standing::system_role(&rows, user).ok_or_else(|| {
            let why =
                "the account has no role here: 'tapiod user add --system NAME --role ROLE' gives it one";
            ApiError::new("SESSION_AUTHORIZATION_FAILED", [user, why])
        })?;
        Ok(Opened { role, print })
    }

    /// A number that is another one after a change of what accounts may do. Costs a look at the inodes of the files.
    pub fn generation(&self) -> u64 {
        self.stamps.generation()
    }

    /// What these accounts may do now; none for one that is gone, or that these prints do not open any more.
    ///
    /// # Errors
    /// The file cannot be read or has a wrong line: nothing is known of any account.
    pub fn standings(&self, asked: &[(&str, u64)]) -> Result<Vec<Option<Role>>, ApiError> {
        let rows = self.file.rows().map_err(ApiError::internal)?;
        let standing = |(user, print): &(&str, u64)| match rows
            .iter()
            .find(|row| row.kind == RowKind::Own && row.name == *user)
        {
            Some(row) => (self.prints.own(row) == *print).then_some(row.role),
            None if self.pam.is_none() || self.prints.system(user) != *print => None,
            None => standing::system_role(&rows, user),
        };
        Ok(asked.iter().map(standing).collect())
    }

    /// Directories and names of the files that [`Self::generation`] looks at, for a [`Watch`].
    pub fn files(&self) -> &[std::path::PathBuf] {
        self.stamps.files()
    }

    /// Changes the password of one of the toolstack's own accounts; answers its new print.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED` when the old one is wrong, `OPERATION_NOT_ALLOWED` for an account of the system
    /// and for a new password that is none.
    pub fn change_password(&self, user: &str, old: &str, new: &str) -> Result<u64, ApiError> {
        let peer = Peer { superuser: false, address: "change_password".to_owned(), certificate: None };
        let rows = self.file.rows().map_err(ApiError::internal)?;
        if !rows.iter().any(|row| row.kind == RowKind::Own && row.name == user) {
            let why = format!("{user} is an account of the system: change its password with passwd");
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        self.authenticate(user, old, &peer)?;
        let new = Zeroizing::new(new.to_owned());
        let hash = self.hasher.run(move |memory| memory.hash(&new)).map_err(ApiError::internal)?;
        let row = hash.and_then(|hash| self.file.set_hash(user, hash));
        row.map(|row| self.prints.own(&row)).map_err(|why| ApiError::new("OPERATION_NOT_ALLOWED", [why]))
    }
}

fn refused(user: &str, why: &str) -> ApiError {
    ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, why])
}

#[cfg(test)]
mod tests;
