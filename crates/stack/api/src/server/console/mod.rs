//! Consoles of VMs: `CONNECT /console` as clients of XenAPI do, and `GET /console` with an upgrade to a WebSocket as
//! viewers in browsers do, with the subprotocol `binary`.
//!
//! ```text
//!   client ── connection ── the console's UNIX socket ── emulator
//! ```
//!
//! The session is looked at when the connection begins, and the connection ends when the session does or may not use
//! consoles any more. A browser sends its cookies for any page that asks it to, so a
//! WebSocket is refused to pages of other origins than this server and those that are allowed to call. Pages name a
//! [ticket](tickets) in place of the session.

pub(super) mod tickets;
pub mod websocket;

use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{
    CACHE_CONTROL, CONNECTION, HOST, HeaderName, HeaderValue, ORIGIN, SEC_WEBSOCKET_ACCEPT,
    SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::{Method, Request, StatusCode};
use parking_lot::Mutex;
use tapio_model::ApiError;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;

use super::calls::Calls;
use super::credentials::{Credentials, Entered, Params, header};
use super::limits::ServerLimits;
use super::refusal::{refusal, status_of};
use super::reply::{Reply, failure, reply};
use crate::backend::{BoxFuture, Peer};
use tickets::{Grant, Tickets};
use websocket::{Frame, Frames, accept, binary, close, pong};

const OCTETS: &str = "application/octet-stream";
/// The subprotocol of viewers.
const BINARY: &str = "binary";
/// What a subprotocol begins with that is a ticket.
const TICKET: &str = "ticket.";
/// Bytes that are passed on at a time.
const PIECE_LEN: usize = 16 << 10;

/// Sentences of refusals.
const NO_NAME: &str = "ref or uuid names a console, or a VM";
const NO_TICKET: &str =
    "the ticket was used, is older than 30 seconds, or is for another console; ask for another one";

/// What a connection becomes when its answer is out.
pub(super) struct Upgraded {
    console: UnixStream,
    is_websocket: bool,
    /// Ends when the session may not use consoles any more.
    lost: BoxFuture<()>,
    /// The session; one that was made for the connection ends with it.
    pub(super) entered: Entered,
}

impl std::fmt::Debug for Upgraded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upgraded").field("is_websocket", &self.is_websocket).finish_non_exhaustive()
    }
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

/// Whether a request asks for a ticket to one.
pub(super) fn wants_ticket(method: &Method, path: &str) -> bool {
    *method == Method::POST && path == "/console/ticket"
}

/// Answers with a ticket. `body` is a form, with the session as `session_id` and a console, or a VM, as `ref` or
/// `uuid`.
pub(super) async fn give_ticket(
    calls: &Calls,
    tickets: &Tickets,
    body: &[u8],
    is_allowed_origin: bool,
) -> Reply {
    let json = |status, value: serde_json::Value| {
        let mut answer = reply(status, "application/json", value.to_string());
        answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        answer
    };
    let given = async {
        if !is_allowed_origin {
            return Err(ApiError::new("RBAC_PERMISSION_DENIED", ["pages of this origin get no tickets"]));
        }
        let params = Params::of_form(body);
        let session = params.get("session_id");
        let session = session.ok_or_else(|| ApiError::new("SESSION_INVALID", [tapio_model::NULL_REF]))?;
        let name = params.get("ref").or_else(|| params.get("uuid"));
        let name = name.ok_or_else(|| ApiError::new("INVALID_VALUE", ["uuid", "", NO_NAME]))?;
        let (backend, of, asked) = (Arc::clone(&calls.backend), session.clone(), name.clone());
        let looked = tokio::task::spawn_blocking(move || backend.console_of(&of, &asked)).await;
        let defect =
            |_| Err(ApiError::internal("a console could not be looked up; the daemon's log has more"));
        let console = looked.unwrap_or_else(defect)?;
        tickets.issue(Grant { session, console, name }, Instant::now())
    };
    match given.await {
        Ok(ticket) => json(StatusCode::OK, serde_json::json!({ "result": ticket })),
        Err(error) => {
            let words: Vec<&str> =
                [&*error.code].into_iter().chain(error.params.iter().map(String::as_str)).collect();
            json(status_of(&error.code), serde_json::json!({ "error": words }))
        }
    }
}

/// The ticket among the subprotocols.
fn ticket<B>(request: &Request<B>) -> Option<&str> {
    let words = header(request, SEC_WEBSOCKET_PROTOCOL)?.split(',');
    words.map(str::trim).find_map(|word| word.strip_prefix(TICKET))
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
pub(super) fn is_same_origin<B>(request: &Request<B>) -> bool {
    let Some(origin) = header(request, ORIGIN) else { return true };
    let host = header(request, HOST).unwrap_or_default();
    origin.split_once("://").is_some_and(|(_, of)| !host.is_empty() && of.eq_ignore_ascii_case(host))
}

/// Answers, and leaves the console in the request's [`Slot`].
pub(super) async fn answer(
    calls: &Calls,
    tickets: &Tickets,
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
    let name = params.get("ref").or_else(|| params.get("uuid"));
    let ticket = key.as_ref().and_then(|_| ticket(&request));
    let has_ticket = ticket.is_some();
    let (entered, name) = if let Some(ticket) = ticket {
        let grant = tickets.redeem(ticket, Instant::now());
        let is_for =
            |grant: &Grant| name.as_ref().is_none_or(|name| [&grant.name, &grant.console].contains(&name));
        match grant.filter(is_for) {
            Some(grant) => (Entered::of(&grant.session), grant.console),
            None => return failure(StatusCode::FORBIDDEN, NO_TICKET),
        }
    } else {
        let Some(name) = name else { return failure(StatusCode::BAD_REQUEST, NO_NAME) };
        match Credentials::of(&request, &params).enter(calls, (peer, limits)).await {
            Ok(entered) => (entered, name),
            Err(error) => return refusal(&error, None),
        }
    };
    let (backend, session) = (Arc::clone(&calls.backend), entered.session.clone());
    let opened = tokio::task::spawn_blocking(move || backend.console(&session, &name)).await;
    let defect = |_| Err(ApiError::internal("a console could not be opened; the daemon's log has more"));
    let console = opened.unwrap_or_else(defect).and_then(|fd| {
        let stream = StdStream::from(fd);
        let made = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
        made.map_err(|error| ApiError::internal(format!("the socket of a console: {error}")))
    });
    let console = match console {
        Ok(console) => console,
        Err(error) => {
            entered.leave(calls, (peer, limits)).await;
            // A browser would ask for a password at 401, of which a ticket knows nothing.
            return refusal(&error, has_ticket.then_some(StatusCode::FORBIDDEN));
        }
    };
    let Some(slot) = request.extensions().get::<Slot>() else {
        return refusal(&ApiError::internal("a console has no connection"), None);
    };
    let lost = calls.backend.console_lost(&entered.session);
    *slot.0.lock() = Some(Upgraded { console, is_websocket: key.is_some(), lost, entered });
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
    /// Passes bytes on in both directions until one end has gone or the session is lost. `first` came with the request.
    pub(super) async fn run(&mut self, client: &mut (impl AsyncRead + AsyncWrite + Unpin), first: &[u8]) {
        let Self { console, is_websocket, lost, .. } = self;
        let talking = async {
            if *is_websocket {
                talk(client, console, first).await
            } else {
                pass(client, console, first).await
            }
        };
        let ended = tokio::select! {
            ended = talking => ended,
            () = lost => Err(std::io::Error::other("its session has ended, or may not use it any more")),
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
