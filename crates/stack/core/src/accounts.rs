//! Accounts, as the toolstack asks for them; `api` holds their file and asks PAM.

use tapio_model::{ApiError, Role};

/// The other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Whether it is root on the UNIX socket: it needs no password.
    pub superuser: bool,
    /// As `192.0.2.1` or `unix:uid=1000`; for logs and delays.
    pub address: String,
    /// The fingerprint of the certificate that it showed, if it is another host.
    pub certificate: Option<String>,
}

/// By what an account was opened: its kind and its password, as a number that says nothing about them. Another
/// number is another account or another password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Credential(pub u64);

/// What a right password opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Login {
    /// What the account may do.
    pub role: Role,
    /// By what it was opened.
    pub credential: Credential,
}

/// Accounts that may log in.
pub trait Accounts: Send + Sync {
    /// Whose password this is, and what the account may do.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED`, `SESSION_AUTHORIZATION_FAILED` for an account without a role.
    fn authenticate(&self, user: &str, password: &str, peer: &Peer) -> Result<Login, ApiError>;

    /// Changes an account's password; answers what it is opened by from now on.
    ///
    /// # Errors
    /// `SESSION_AUTHENTICATION_FAILED` for a wrong old one, or why the new one is not taken.
    fn change_password(&self, user: &str, old: &str, new: &str) -> Result<Credential, ApiError>;

    /// A number that is another one after whatever may change what an account may do. Every call asks for it.
    fn generation(&self) -> u64;

    /// What each of these may do now; none where the account is gone or opened by something else.
    ///
    /// # Errors
    /// The accounts cannot be read: nothing is known of any of them.
    fn standings(&self, asked: &[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError>;
}

/// No accounts: only superusers get in.
#[derive(Clone, Copy, Debug)]
pub struct NoAccounts;

impl Accounts for NoAccounts {
    fn authenticate(&self, user: &str, _: &str, _: &Peer) -> Result<Login, ApiError> {
        Err(refused(user))
    }

    fn change_password(&self, user: &str, _: &str, _: &str) -> Result<Credential, ApiError> {
        Err(refused(user))
    }

    fn generation(&self) -> u64 {
        0
    }

    fn standings(&self, asked: &[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError> {
        Ok(vec![None; asked.len()])
    }
}

pub(crate) fn refused(user: &str) -> ApiError {
    ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, "the name or the password is wrong"])
}
