//! The caller: an account with its session and its role.

use tapio_model::Role;

use crate::accounts::Credential;

/// The name under which a host logs in at another begins so; what follows is its UUID.
pub(crate) const HOST_LOGIN: &str = "host/";

/// The account that calls.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The session's reference; empty before login.
    pub session: String,
    /// What the caller may do.
    pub role: Role,
    /// Account.
    pub user: String,
    /// By what it was opened; none for the local superuser and for the toolstack itself.
    pub credential: Option<Credential>,
}

impl Caller {
    /// The toolstack itself.
    pub fn toolstack() -> Self {
        Self { session: String::new(), role: Role::PoolAdmin, user: "root".to_owned(), credential: None }
    }

    /// Whether another host of the pool calls.
    pub(crate) fn is_host(&self) -> bool {
        self.user.starts_with(HOST_LOGIN)
    }

    /// The account that what it makes belongs to; none for those that may do everything without one.
    pub fn account(&self) -> Option<&str> {
        self.credential.map(|_| self.user.as_str())
    }
}
