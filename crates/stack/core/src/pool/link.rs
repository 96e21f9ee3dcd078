//! How this host reaches others: the daemon does it, the toolstack asks for it.

use std::os::unix::net::UnixStream;

use tapio_model::{ApiError, Value};

/// Where another host serves its API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// `ADDRESS` or `ADDRESS:PORT`; 443 without a port.
    pub address: String,
    /// The certificate (DER) that it must have. Then this host shows its own, and needs no password. None before the
    /// two know each other.
    pub certificate: Option<Vec<u8>>,
}

/// A login at another host.
pub trait Visit: Send + Sync {
    /// A call there; the session is put before `params`.
    ///
    /// # Errors
    /// The other host's; `CANNOT_CONTACT_HOST`.
    fn call(&self, method: &str, params: Vec<Value>) -> Result<Value, ApiError>;

    /// The session.
    fn session(&self) -> &str;
}

/// What the daemon does for a pool.
pub trait Link: Send + Sync {
    /// Logs in at another host.
    ///
    /// # Errors
    /// `CANNOT_CONTACT_HOST`, or it refuses the login.
    fn visit(&self, to: &Destination, user: &str, password: &str) -> Result<Box<dyn Visit>, ApiError>;

    /// Sends what comes from a socket until its end by `PUT`, on a connection of its own, and waits for the answer.
    /// `is_cancelled` is asked now and then.
    ///
    /// # Errors
    /// `CANNOT_CONTACT_HOST`, the other host's, `TASK_CANCELLED`.
    fn put(
        &self,
        to: &Destination,
        path: &str,
        data: UnixStream,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), ApiError>;

    /// The certificate of this host (DER), and its fingerprint.
    fn certificate(&self) -> (Vec<u8>, String);

    /// The certificate of this host and the authorities above it, as PEM.
    ///
    /// # Errors
    /// Its file cannot be read.
    fn certificate_chain(&self) -> Result<String, ApiError>;

    /// Shows another certificate from now on; the authorities above it may be empty. All are PEM.
    ///
    /// # Errors
    /// `SERVER_CERTIFICATE_INVALID` and others that say what is wrong; the one of before stays.
    fn install_certificate(&self, certificate: &str, authorities: &str, key: &str) -> Result<(), ApiError>;

    /// Shows a new certificate that is signed by itself.
    ///
    /// # Errors
    /// It cannot be made or kept.
    fn renew_certificate(&self) -> Result<(), ApiError>;

    /// The certificates (DER) of the hosts that may call without a password.
    fn trust(&self, certificates: Vec<Vec<u8>>);

    /// Ends the daemon as it ends when it is told to, and starts it again.
    fn restart(&self);

    /// Ends the daemon at once, as a kill would, and starts it again.
    fn restart_now(&self);
}
