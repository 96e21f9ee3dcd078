//! The toolstack as the servers of its API see it.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;

use tapio_model::{Answer, ApiError, Begun, OtherHost, Transfer, TransferPlace, Value};

/// A future of the server's.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The peer of a connection, before a login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Root of this host on a UNIX socket: needs no password.
    pub superuser: bool,
    /// `192.0.2.1` or `unix:uid=1000`, for logs and for what is limited per peer.
    pub address: String,
    /// The fingerprint of the certificate that it showed, if it is another host.
    pub certificate: Option<String>,
}

/// What a server of the API calls: the toolstack behind it, or its double in tests.
pub trait ApiBackend: Send + Sync + 'static {
    /// Does a call; may take as long as the operation does. Runs on a thread that may block.
    ///
    /// # Errors
    /// Those of the message.
    fn call(&self, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Answer, ApiError>;

    /// The account of a session; none if there is no such session. The memory of all answers to one account is counted
    /// together.
    fn account_of(&self, session: &str) -> Option<String>;

    /// Does a transfer of a disk over `data`: an export comes with its length and a tag in front, eight bytes each, the
    /// lowest byte first. `begun` is called once it was accepted; `is_taken` waits until the client has taken the
    /// export, all but a last piece that it gets when this has returned, and says whether it has. Runs on a thread of
    /// its own.
    ///
    /// # Errors
    /// Why it was refused, or how it ended; its task, if it has one, has ended so too.
    fn transfer(
        &self,
        transfer: &Transfer,
        data: OwnedFd,
        begun: &mut dyn FnMut(Begun),
        is_taken: &dyn Fn() -> bool,
    ) -> Result<(), ApiError>;

    /// Whether another host may have to do a transfer: [`Self::elsewhere`] is asked then.
    fn has_others(&self) -> bool {
        false
    }

    /// The host that has to do a transfer; none: this one. May take as long as a call of another host does.
    ///
    /// # Errors
    /// The session may not do it; the other host cannot be reached.
    fn elsewhere(
        &self,
        _session: &str,
        _place: &TransferPlace,
        _task: Option<&str>,
    ) -> Result<Option<OtherHost>, ApiError> {
        Ok(None)
    }

    /// Connects to a console: `name` is the reference or the UUID of a console or of a VM.
    ///
    /// # Errors
    /// `SESSION_INVALID`, `RBAC_PERMISSION_DENIED`, `HANDLE_INVALID`, `UUID_INVALID`; the VM does not run, or has no
    /// console that can be reached so.
    fn console(&self, _session: &str, _name: &str) -> Result<OwnedFd, ApiError> {
        Err(ApiError::new("NOT_IMPLEMENTED", ["console"]))
    }

    /// The reference of the console that [`Self::console`] would connect to.
    ///
    /// # Errors
    /// Those of [`Self::console`] that are known without a connection.
    fn console_of(&self, _session: &str, _name: &str) -> Result<String, ApiError> {
        Err(ApiError::new("NOT_IMPLEMENTED", ["console"]))
    }

    /// Ends when a session may not use consoles any more.
    fn console_lost(&self, _session: &str) -> BoxFuture<()> {
        Box::pin(std::future::pending())
    }

    /// A call that waits for something to happen (`event.from`, `event.next`), as a future that holds no thread; its
    /// parameters are taken then. None for every other call. A client that goes away ends its wait: the future is
    /// dropped.
    fn wait(
        &self,
        peer: &Peer,
        method: &str,
        params: &mut Vec<Value>,
    ) -> Option<BoxFuture<Result<Answer, ApiError>>>;
}

/// Runs the commands of clients that have XenServer's own `xe`.
pub trait CommandLines: Send + Sync + 'static {
    /// Begins a command in a session that is logged in: a connection to the program that runs it, which speaks
    /// `tapio_model::thin` from the client's first bytes on, and the program, which ends when it is dropped. May block.
    ///
    /// # Errors
    /// Why it could not begin.
    fn begin(&self, session: &str, words: &[String]) -> io::Result<(UnixStream, Box<dyn Send>)>;
}
