//! The server: HTTP on TCP, TLS and UNIX sockets.
//!
//! ```text
//!   listener ── free place? ── TLS ── guard (time) ── hyper ── http (path, body) ── calls ── lanes ── ApiBackend
//!                                                               |
//!                                           |                 routes (images, metrics)
//!                                         `POST /cli` ── thin ── a process that runs the command
//! ```
//!
//! Everything that a client can make the server hold is bounded before it is held: connections in all and of each
//! peer, bytes of heads, bodies and answers, time for each part of a request, calls at work and calls that wait.
//! Calls that wait for events hold no thread.

mod budget;
mod calls;
mod console;
mod credentials;
mod fair;
mod guard;
mod history;
mod http;
mod images;
mod lanes;
mod limits;
mod metrics;
mod notices;
mod peers;
mod pieces;
mod refusal;
mod reply;
mod thin;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::backend::{ApiBackend, CommandLines, Peer};
use crate::tls::{HOST_PROTOCOL, Trusted, fingerprint};
use budget::Budget;
use calls::Calls;
use console::tickets::Tickets;
use guard::{Guarded, Phase};
use http::Http;
use lanes::Lanes;
use notices::Notices;
use peers::{PeerKey, Peers, Place};
use thin::{Prefixed, Thin};

pub use console::websocket;
pub use http::{Route, RouteHandler};
pub use limits::{LaneLimits, ServerLimits};
pub use reply::{Body, BodyError, Reply, body, failure, last_failure, reply};

/// After an accept that failed for want of something (descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a client may send nothing before the kernel asks whether it is there.
const SILENCE: Duration = Duration::from_secs(15);

/// How a listener shakes hands.
#[derive(Clone, Debug)]
pub struct Tls {
    /// With clients.
    pub clients: Arc<rustls::ServerConfig>,
    /// With hosts, which ask for that; none: they are clients.
    pub hosts: Option<Arc<rustls::ServerConfig>>,
    /// The hosts that need no password.
    pub trusted: Arc<Trusted>,
}

impl Tls {
    async fn shake(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let begun = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
        let asks =
            begun.client_hello().alpn().is_some_and(|mut asked| asked.any(|name| name == HOST_PROTOCOL));
        let config = self.hosts.as_ref().filter(|_| asks).unwrap_or(&self.clients);
        begun.into_stream(Arc::clone(config)).await
    }

    /// The peer, with the certificate that it showed.
    fn peer(&self, stream: &TlsStream<TcpStream>, peer: Peer) -> Peer {
        let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        let Some(shown) = shown else { return peer };
        let certificate = Some(fingerprint(shown.as_ref()));
        match self.trusted.contains(shown.as_ref()) {
            true => Peer { superuser: true, address: format!("host:{}", peer.address), certificate },
            false => Peer { certificate, ..peer },
        }
    }
}

/// What a server is made of.
#[derive(Default)]
pub struct ServerOptions {
    /// Bounds.
    pub limits: ServerLimits,
    /// Handlers of other paths than those of calls.
    pub routes: Vec<Route>,
    /// Web pages of these origins may call; `*` for all.
    pub origins: Vec<String>,
    /// Runs the commands of `POST /cli`; none: there is nothing at that path.
    pub command_lines: Option<Arc<dyn CommandLines>>,
}

impl std::fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerOptions").field("limits", &self.limits).finish_non_exhaustive()
    }
}

struct Shared {
    http: Http,
    thin: Thin,
    peers: Arc<Peers>,
    notices: Notices,
    ending: watch::Receiver<bool>,
    /// A copy is held by everything that has to end before the server has.
    alive: watch::Sender<()>,
}

/// A running server. Dropping it ends its listeners; [`Self::close`] also waits for calls in flight.
pub struct Server {
    shared: Arc<Shared>,
    end: watch::Sender<bool>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("connections", &self.shared.peers).finish_non_exhaustive()
    }
}

impl Server {
    /// A server without listeners. Everything runs on the current tokio runtime, which needs
    /// [`ServerLimits::threads_max`] blocking threads and some more.
    pub fn new(backend: Arc<dyn ApiBackend>, options: ServerOptions) -> Self {
        let (end, ending) = watch::channel(false);
        let ServerOptions { limits, mut routes, origins, command_lines } = options;
        routes.sort_by_key(|route| std::cmp::Reverse(route.prefix.len()));
        let calls = Calls {
            backend,
            lanes: Lanes::new(&limits),
            budget: Arc::new(Budget::new(limits.answers_len_max, limits.answers_len_per_client_max)),
            turns: Arc::new(Semaphore::new(limits.encoding_max)),
            ending: ending.clone(),
        };
        let bodies = Http::pieces(&limits);
        let images = images::Images::new(&limits);
        let http = Http { calls, limits, routes, bodies, origins, images, tickets: Tickets::default() };
        let thin = Thin::new(command_lines, http.limits.command_lines_max);
        let (peers, notices, alive) = (Arc::default(), Notices::default(), watch::Sender::new(()));
        let shared = Shared { http, thin, peers, notices, ending, alive };
        Self { shared: Arc::new(shared), end }
    }

    /// Serves plain HTTP. For loopback addresses: passwords and sessions travel as they are.
    pub fn listen_http(&self, listener: TcpListener) {
        self.listen_tcp(listener, None);
    }

    /// Serves HTTPS.
    pub fn listen_https(&self, listener: TcpListener, config: Arc<rustls::ServerConfig>) {
        self.listen_tls(listener, Tls { clients: config, hosts: None, trusted: Arc::default() });
    }

    /// Serves HTTPS, to other hosts too.
    pub fn listen_tls(&self, listener: TcpListener, tls: Tls) {
        self.listen_tcp(listener, Some(tls));
    }

    fn listen_tcp(&self, listener: TcpListener, tls: Option<Tls>) {
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            while let Some(accepted) = shared.until_end(listener.accept()).await {
                match accepted {
                    Ok((stream, address)) => {
                        // Loopback may be both 127.0.0.1 and ::ffff:127.0.0.1: one peer.
                        let address = address.ip().to_canonical();
                        let peer = Peer { superuser: false, address: address.to_string(), certificate: None };
                        // Answers are written whole; waiting for more would only cost time.
                        let _ = stream.set_nodelay(true);
                        notice_loss(&stream);
                        shared.clone().take_tcp(stream, PeerKey::Address(address), peer, tls.clone());
                    }
                    Err(error) => pause(&error).await,
                }
            }
        });
    }

    /// Serves HTTP on a UNIX socket; root of this host and the user that runs the daemon need no password there.
    pub fn listen_unix(&self, listener: UnixListener) {
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            while let Some(accepted) = shared.until_end(listener.accept()).await {
                match accepted.and_then(|(stream, _)| Ok((stream.peer_cred()?.uid(), stream))) {
                    Ok((uid, stream)) => {
                        let own = rustix::process::geteuid().as_raw();
                        let peer = Peer {
                            superuser: uid == 0 || uid == own,
                            address: format!("unix:uid={uid}"),
                            certificate: None,
                        };
                        shared.clone().take_unix(stream, PeerKey::User(uid), peer);
                    }
                    Err(error) => pause(&error).await,
                }
            }
        });
    }

    /// Takes no more connections, and lets calls in flight end within `limit`. A client that waits for events is
    /// told to come back. Returns whether everything ended.
    pub async fn close(self, limit: Duration) -> bool {
        self.end.send_replace(true);
        let Self { shared, end: _end } = self;
        let alive = shared.alive.clone();
        drop(shared);
        tokio::time::timeout(limit, alive.closed()).await.is_ok()
    }
}

/// Waits for the server's end, or for its loss.
async fn ended(mut ending: watch::Receiver<bool>) {
    drop(ending.wait_for(|ending| *ending).await);
}

async fn pause(error: &io::Error) {
    tracing::warn!("a connection could not be taken: {error}");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

impl Shared {
    /// What `work` comes to; none when the server ends before.
    async fn until_end<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = ended(self.ending.clone()) => None,
        }
    }

    fn place(&self, owner: PeerKey) -> Option<Place> {
        let limits = &self.http.limits;
        let place = self.peers.enter(owner, limits.connections_per_peer_max, limits.connections_max);
        if place.is_none() {
            self.notices.refused(format_args!("{owner:?}"), "no room for another connection");
        }
        place
    }

    /// A connection ended by an error.
    fn lost(&self, peer: &Peer, error: &(dyn std::error::Error + 'static)) {
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        let is_late = causes.any(|cause| {
            let io = cause.downcast_ref::<io::Error>();
            io.is_some_and(|io| io.kind() == io::ErrorKind::TimedOut)
        });
        if is_late {
            self.notices.refused(&peer.address, error);
        } else {
            tracing::debug!("{}: {error}", peer.address);
        }
    }

    fn take_tcp(self: Arc<Self>, mut stream: TcpStream, owner: PeerKey, peer: Peer, tls: Option<Tls>) {
        let Some(place) = self.place(owner) else {
            if tls.is_none() {
                tokio::spawn(async move { refuse(&mut stream).await });
            }
            return;
        };
        let alive = self.alive.subscribe();
        tokio::spawn(async move {
            let _held = (place, alive);
            let Some(tls) = tls else { return self.serve(stream, peer).await };
            let time = self.http.limits.head_time;
            match self.until_end(tokio::time::timeout(time, tls.shake(stream))).await {
                Some(Ok(Ok(stream))) => {
                    let peer = tls.peer(&stream, peer);
                    self.serve(stream, peer).await;
                }
                Some(Ok(Err(error))) => tracing::debug!("{}: no TLS: {error}", peer.address),
                Some(Err(_)) => self.notices.refused(&peer.address, format_args!("no TLS within {time:?}")),
                None => {}
            }
        });
    }

    fn take_unix(self: Arc<Self>, mut stream: UnixStream, owner: PeerKey, peer: Peer) {
        let Some(place) = self.place(owner) else {
            tokio::spawn(async move { refuse(&mut stream).await });
            return;
        };
        let alive = self.alive.subscribe();
        tokio::spawn(async move {
            let _held = (place, alive);
            self.serve(stream, peer).await;
        });
    }

    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        self: Arc<Self>,
        stream: S,
        peer: Peer,
    ) {
        let limits = &self.http.limits;
        let phase = Arc::new(Phase::default());
        let mut guarded = Guarded::new(stream, Arc::clone(&phase), limits.head_time, limits.write_time);
        let mut front = Vec::new();
        let begun = self.until_end(thin::is_thin(&mut guarded, &mut front)).await;
        let is_thin = match begun {
            Some(Ok(is_thin)) => is_thin,
            Some(Err(error)) => return self.lost(&peer, &error),
            None => return,
        };
        let mut guarded = Prefixed::new(front, guarded);
        if is_thin {
            if let Err(error) = self.command_line(&mut guarded, &peer, &phase).await {
                self.lost(&peer, &error);
            }
            let _ = tokio::time::timeout(limits.linger_time, linger(&mut guarded)).await;
            return;
        }
        let slot = console::Slot::default();
        let stood = Arc::clone(&phase);
        let service = service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
            phase.step();
            request.extensions_mut().insert(slot.clone());
            let (this, phase, peer) = (Arc::clone(&self), Arc::clone(&phase), peer.clone());
            Box::pin(async move {
                let reply = if *this.ending.borrow() {
                    http::ending()
                } else {
                    this.http.answer(&peer, request).await
                };
                this.notices.answered(&peer.address, reply.status());
                phase.step();
                Ok::<_, Infallible>(reply)
            })
        });
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            // Answers are sent from where they are: a copy of hyper's would be held and not be counted.
            .writev(true)
            // This is also how long a connection may be idle; the guard bounds a head that has begun.
            .header_read_timeout(limits.idle_time)
            .max_buf_size(limits.head_len_max.max(8 << 10))
            .serve_connection(TokioIo::new(guarded), service);
        let mut ending = pin!(ended(self.ending.clone()));
        let mut is_ending = false;
        let result = poll_fn(|cx| {
            if !is_ending && ending.as_mut().poll(cx).is_ready() {
                is_ending = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            connection.poll_without_shutdown(cx)
        });
        let is_lost = match result.await {
            Ok(()) => false,
            Err(error) => {
                self.lost(&peer, &error);
                // A head that is none was answered, too.
                !error.is_parse()
            }
        };
        let http1::Parts { io, read_buf, .. } = connection.into_parts();
        let mut stream = io.into_inner();
        if let Some(mut upgraded) = slot.take() {
            if !is_lost {
                // From here on the client may be silent.
                stood.step();
                self.until_end(upgraded.run(&mut stream, &read_buf)).await;
            }
            upgraded.entered.leave(&self.http.calls, (&peer, limits)).await;
        }
        if is_lost {
            return;
        }
        let _ = tokio::time::timeout(limits.linger_time, linger(&mut stream)).await;
    }
}

/// Ends a connection so that the client has its answer: while something that it sent is unread, a close would be a
/// reset, which discards what the client has not read yet.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let mut dropped = [0; 4096];
    if stream.shutdown().await.is_ok() {
        while stream.read(&mut dropped).await.is_ok_and(|len| len > 0) {}
    }
}

/// Answers that there is no room, without waiting for anything.
async fn refuse(stream: &mut (impl AsyncWrite + Unpin)) {
    let saying = async {
        // A client that does not read misses it.
        let _ = stream.write_all(http::no_room()).await;
        let _ = stream.shutdown().await;
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), saying).await;
}

/// Has the kernel end a connection whose other end is gone without a word: a way that was cut, a host that died. A
/// server that reads learns that in no other way.
fn notice_loss(stream: &TcpStream) {
    use rustix::net::sockopt;
    let watched = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, SILENCE))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, SILENCE / 3))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 3));
    if let Err(error) = watched {
        tracing::debug!(%error, "a connection is not watched by the kernel");
    }
}

#[cfg(test)]
mod tests;
