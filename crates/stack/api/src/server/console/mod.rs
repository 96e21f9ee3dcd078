//! Consoles of VMs: `CONNECT /console` as clients of XenAPI do, and `GET /console` with an upgrade to a WebSocket as
//! viewers in browsers do, with the subprotocol `binary`.
//!
//! ```text
//!   client ── connection ── the console's UNIX socket ── emulator
//! ```
//!
//! The session is looked at when the connection begins. A browser sends its cookies for any page that asks it to, so a
//! WebSocket is refused to pages of other origins than this server and those that are allowed to call.

pub mod websocket;

use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{
    CONNECTION, HOST, HeaderName, HeaderValue, ORIGIN, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::{Method, Request, StatusCode};
use parking_lot::Mutex;
use tapio_model::ApiError;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;

use super::calls::Calls;
use super::credentials::{Credentials, Params, header};
use super::limits::ServerLimits;
use super::refusal::refusal;
use super::reply::{Reply, failure, reply};
use crate::backend::Peer;
use websocket::{Frame, Frames, accept, binary, close, pong};

const OCTETS: &str = "application/octet-stream";
/// The subprotocol of viewers.
const BINARY: &str = "binary";
/// Bytes that are passed on at a time.
const PIECE_LEN: usize = 16 << 10;

/// What a connection becomes when its answer is out.
#[derive(Debug)]
pub(super) struct Upgraded {
    console: UnixStream,
    is_websocket: bool,
}

/// Where a request leaves what its connection becomes.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot(Arc<Mutex<Option<Upgraded>>>);

impl Slot {
    pub(super) fn take(&self) -> Option<Upgraded> {
        self.0.lock().take()
    }
}

/// Whether a request is for a console.
pub(super) fn is_wanted(method: &Method, path: &str) -> bool {
    matches!(*method, Method::CONNECT | Method::GET) && path.trim_end_matches('/') == "/console"
}

fn has_word<B>(request: &Request<B>, name: HeaderName, word: &str) -> bool {
    let text = header(request, name).unwrap_or_default();
    text.split(',').any(|one| one.trim().eq_ignore_ascii_case(word))
}

/// The key of an upgrade to a WebSocket.
fn key<B>(request: &Request<B>) -> Result<String, &'static str> {
    if !has_word(request, UPGRADE, "websocket") || !has_word(request, CONNECTION, "upgrade") {
        return Err("a console is reached by CONNECT, or by GET with an upgrade to a WebSocket");
    }
    if header(request, SEC_WEBSOCKET_VERSION) != Some("13") {
        return Err("version 13 of WebSocket is spoken here");
    }
    let key = header(request, SEC_WEBSOCKET_KEY).ok_or("Sec-WebSocket-Key is missing")?;
    Ok(key.to_owned())
}

/// Whether a page may connect: one of this server, or of an origin that is allowed to call; programs have none.
fn is_same_origin<B>(request: &Request<B>) -> bool {
    let Some(origin) = header(request, ORIGIN) else { return true };
    let host = header(request, HOST).unwrap_or_default();
    origin.split_once("://").is_some_and(|(_, of)| !host.is_empty() && of.eq_ignore_ascii_case(host))
}

/// Answers, and leaves the console in the request's [`Slot`].
pub(super) async fn answer(
    calls: &Calls,
    (peer, limits): (&Peer, &ServerLimits),
    request: Request<Incoming>,
    is_allowed_origin: bool,
) -> Reply {
    let params = Params::of(&request);
    let key = match (request.method() == Method::CONNECT).then_some(None) {
        Some(none) => none,
        None => match key(&request) {
            Ok(key) => Some(key),
            Err(why) => return failure(StatusCode::BAD_REQUEST, why),
        },
    };
    if key.is_some() && !is_allowed_origin && !is_same_origin(&request) {
        return failure(StatusCode::FORBIDDEN, "pages of this origin may not connect to consoles");
    }
    let Some(name) = params.get("ref").or_else(|| params.get("uuid")) else {
        return failure(StatusCode::BAD_REQUEST, "ref or uuid names a console, or a VM");
    };
    let credentials = Credentials::of(&request, &params);
    let entered = match credentials.enter(calls, (peer, limits)).await {
        Ok(entered) => entered,
        Err(error) => return refusal(&error, None),
    };
    let (backend, session) = (Arc::clone(&calls.backend), entered.session.clone());
    let opened = tokio::task::spawn_blocking(move || backend.console(&session, &name)).await;
    entered.leave(calls, (peer, limits)).await;
    let defect = |_| Err(ApiError::internal("a console could not be opened; the daemon's log has more"));
    let console = opened.unwrap_or_else(defect).and_then(|fd| {
        let stream = StdStream::from(fd);
        let made = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
        made.map_err(|error| ApiError::internal(format!("the socket of a console: {error}")))
    });
    let console = match console {
        Ok(console) => console,
        Err(error) => return refusal(&error, None),
    };
    let Some(slot) = request.extensions().get::<Slot>() else {
        return refusal(&ApiError::internal("a console has no connection"), None);
    };
    *slot.0.lock() = Some(Upgraded { console, is_websocket: key.is_some() });
    let mut answer = reply(StatusCode::OK, OCTETS, "");
    if let Some(key) = key {
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.clear();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        if let Ok(accepted) = HeaderValue::from_str(&accept(&key)) {
            headers.insert(SEC_WEBSOCKET_ACCEPT, accepted);
        }
        if has_word(&request, SEC_WEBSOCKET_PROTOCOL, BINARY) {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(BINARY));
        }
    }
    answer
}

impl Upgraded {
    /// Passes bytes on in both directions until one end has gone. `first` came with the request.
    pub(super) async fn run(self, client: &mut (impl AsyncRead + AsyncWrite + Unpin), first: &[u8]) {
        let Self { mut console, is_websocket } = self;
        let ended = if is_websocket {
            talk(client, &mut console, first).await
        } else {
            pass(client, &mut console, first).await
        };
        if let Err(error) = ended {
            tracing::debug!("a console: {error}");
        }
    }
}

async fn pass(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    console: &mut UnixStream,
    first: &[u8],
) -> std::io::Result<()> {
    console.write_all(first).await?;
    tokio::io::copy_bidirectional(client, console).await.map(drop)
}

async fn talk(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    console: &mut UnixStream,
    first: &[u8],
) -> std::io::Result<()> {
    let mut frames = Frames::default();
    frames.push(first);
    let (mut typed, mut shown) = (vec![0; PIECE_LEN], vec![0; PIECE_LEN]);
    loop {
        loop {
            match frames.take() {
                Ok(None) => break,
                Ok(Some(Frame::Data(data))) => console.write_all(&data).await?,
                Ok(Some(Frame::Ping(data))) => client.write_all(&pong(&data)).await?,
                Ok(Some(Frame::Pong)) => {}
                Ok(Some(Frame::Close)) => return client.write_all(&close()).await,
                Err(why) => return Err(std::io::Error::other(why)),
            }
        }
        tokio::select! {
            came = client.read(&mut typed) => match came? {
                0 => return Ok(()),
                len => frames.push(&typed[..len]),
            },
            came = console.read(&mut shown) => match came? {
                0 => return client.write_all(&close()).await,
                len => {
                    client.write_all(&binary(&shown[..len])).await?;
                    client.flush().await?;
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
