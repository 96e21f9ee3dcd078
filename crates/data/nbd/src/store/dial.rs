//! Connecting, on a thread of its own: resolving a name and talking through a handshake may take seconds, and the data
//! thread has other things to do meanwhile. An event counter on its ring tells it of the end.

use std::fs::File;
use std::io::{self, Write};
use std::net::ToSocketAddrs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tapio_ring::PageBuf;
use tapio_ring::uring::Uring;

use crate::client::{Address, ClientError, ClientOptions, ExportInfo, Haggle};
use crate::target::{Endpoint, Target};
use crate::tls::{Status, TlsClient};
use crate::wire::{Style, option_reply};

/// How long connecting and the handshake may take.
const DIAL_TIME: Duration = Duration::from_secs(10);
/// Stack of the thread: name resolution takes the most of it.
const STACK_LEN: usize = 256 << 10;

/// A connection past its handshake.
#[derive(Debug)]
pub struct Dialled {
    /// The socket.
    pub fd: OwnedFd,
    /// What the server said of the export.
    pub export: ExportInfo,
    /// Of requests and replies.
    pub style: Style,
    /// The context `base:allocation`, if block status can be asked for.
    pub allocation: Option<u32>,
    /// What becomes of TLS, if there is any.
    pub tls: Option<Status>,
}

type Answer = Arc<Mutex<Option<io::Result<Dialled>>>>;

/// Connects to `target` without holding up the data thread.
///
/// # Errors
/// The server cannot be reached, does not keep to the protocol, or refuses.
pub async fn dial(uring: &Uring, target: &Target, tls: Option<&TlsClient>) -> io::Result<Dialled> {
    let event = Arc::new(File::from(eventfd(0, EventfdFlags::CLOEXEC)?));
    let answer = Answer::default();
    let (target, tls) = (target.clone(), tls.cloned());
    let (theirs, bell) = (Arc::clone(&answer), Arc::clone(&event));
    std::thread::Builder::new().name("tapio-nbd-dial".into()).stack_size(STACK_LEN).spawn(move || {
        let result = connect(&target, tls.as_ref());
        *theirs.lock() = Some(result);
        // Cannot fail: the counter is far from full.
        let _ = (&*bell).write(&1u64.to_ne_bytes());
    })?;
    let mut value = PageBuf::zeroed(8);
    loop {
        let read;
        (value, read) = uring.read_event(event.as_raw_fd(), value).await;
        match read {
            Ok(_) => break,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
    }
    let answer = answer.lock().take();
    answer.unwrap_or_else(|| Err(io::ErrorKind::Interrupted.into()))
}

fn connect(target: &Target, tls: Option<&TlsClient>) -> io::Result<Dialled> {
    let deadline = Instant::now() + DIAL_TIME;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host's name stands for no address");
    for address in addresses(&target.endpoint)? {
        match talk(&address, target, tls, deadline) {
            Ok(dialled) => return Ok(dialled),
            // Another address of the same host may be reachable.
            Err(ClientError::Io(error)) => last = error,
            Err(error) => return Err(into_io(error, target)),
        }
    }
    Err(last)
}

fn addresses(endpoint: &Endpoint) -> io::Result<Vec<Address>> {
    Ok(match endpoint {
        Endpoint::Unix(path) => vec![Address::Unix(path.clone())],
        Endpoint::Tcp { host, port } => {
            let found = (host.as_str(), *port).to_socket_addrs();
            let found = found.map_err(|error| {
                io::Error::new(error.kind(), format!("the host name '{host}' cannot be resolved: {error}"))
            })?;
            found.map(Address::Tcp).collect()
        }
    })
}

fn talk(
    address: &Address,
    target: &Target,
    tls: Option<&TlsClient>,
    deadline: Instant,
) -> Result<Dialled, ClientError> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let options = ClientOptions::all(target.export.as_str());
    let mut haggle = Haggle::begin(address, left)?;
    if let Some(tls) = tls {
        haggle = haggle.start_tls(tls)?;
    }
    let client = haggle.go(&options, left)?;
    let (style, allocation, export) = (client.style(), client.allocation_id(), client.export().clone());
    let tls = client.tls().cloned();
    Ok(Dialled { fd: client.into_fd(), export, style, allocation, tls })
}

fn into_io(error: ClientError, target: &Target) -> io::Error {
    let kind = match &error {
        ClientError::Option { reply: option_reply::ERR_UNKNOWN, .. } => {
            let why = format!("the server has no export '{}'", target.export.escape_debug());
            return io::Error::new(io::ErrorKind::NotFound, why);
        }
        ClientError::Option { reply: option_reply::ERR_TLS_REQD, .. } => {
            let why = "the server requires TLS: use 'nbds:' and name certificates or a pre-shared key";
            return io::Error::new(io::ErrorKind::PermissionDenied, why);
        }
        ClientError::Tls(_) => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string())
}
