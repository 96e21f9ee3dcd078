//! Requests to answers: which handler takes which path.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_LENGTH,
    HeaderValue, LOCATION, ORIGIN, VARY,
};
use hyper::{HeaderMap, Method, Request, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use zeroize::Zeroizing;

use super::calls::Calls;
use super::console::{self, tickets::Tickets};
use super::history;
use super::images::{self, Images};
use super::limits::ServerLimits;
use super::metrics;
use super::reply::{Reply, failure, last_failure, reply};
use crate::backend::{BoxFuture, Peer};

/// Takes requests to other paths than those of calls: images that come and go, metrics.
pub trait RouteHandler: Send + Sync + 'static {
    /// Answers; the body is the handler's to read, and to bound.
    fn handle(&self, peer: Peer, request: Request<Incoming>) -> BoxFuture<Reply>;
}

/// Which requests a handler takes.
#[derive(Clone)]
pub struct Route {
    /// Of the request.
    pub method: Method,
    /// What the path begins with. Of all that match the longest counts.
    pub prefix: String,
    /// Takes them.
    pub handler: Arc<dyn RouteHandler>,
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.prefix)
    }
}

/// Memory for bodies is taken in pieces of this size.
const PIECE: usize = 64 << 10;

pub(super) struct Http {
    pub(super) calls: Calls,
    pub(super) limits: ServerLimits,
    /// Longest prefix first.
    pub(super) routes: Vec<Route>,
    /// Pieces of memory for bodies.
    pub(super) bodies: Arc<Semaphore>,
    /// From where pages may call; none: from nowhere else.
    pub(super) origins: Vec<String>,
    /// Disks that come and go.
    pub(super) images: Images,
    /// Tickets to consoles.
    pub(super) tickets: Tickets,
}

impl Http {
    pub(super) async fn answer(&self, peer: &Peer, request: Request<Incoming>) -> Reply {
        let origin = self.allowed_origin(request.headers());
        let mut reply = self.route(peer, request).await;
        if let Some(origin) = origin {
            reply.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            reply.headers_mut().insert(VARY, HeaderValue::from_static("Origin"));
        }
        reply
    }

    fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        let known = self.origins.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes());
        known.then(|| origin.clone())
    }

    async fn route(&self, peer: &Peer, request: Request<Incoming>) -> Reply {
        let (method, path) = (request.method(), request.uri().path());
        let taken =
            self.routes.iter().find(|route| route.method == *method && path.starts_with(&route.prefix));
        let json = ["/jsonrpc", "/json"].into_iter().find(|prefix| path.starts_with(prefix));
        match (taken, json) {
            (Some(route), Some(json)) if *method == Method::POST && json.len() > route.prefix.len() => {}
            (Some(route), _) => return route.handler.handle(peer.clone(), request).await,
            _ => {}
        }
        if let Some(direction) = images::direction(method, path) {
            return self.images.answer(&self.calls, (peer, &self.limits), direction, request).await;
        }
        if console::is_wanted(method, path) {
            let is_allowed = self.allowed_origin(request.headers()).is_some();
            let bounds = (peer, &self.limits);
            return console::answer(&self.calls, &self.tickets, bounds, request, is_allowed).await;
        }
        if console::wants_ticket(method, path) {
            let origin = self.allowed_origin(request.headers());
            let is_allowed = origin.is_some() || console::is_same_origin(&request);
            return match self.read(request).await {
                Ok(body) => console::give_ticket(&self.calls, &self.tickets, &body.bytes, is_allowed).await,
                Err((status, why)) => last_failure(status, &why),
            };
        }
        if *method == Method::GET && path == "/metrics" {
            return metrics::answer(&self.calls, (peer, &self.limits), request).await;
        }
        if let Some(what) = history::wanted(method, path) {
            return history::answer(&self.calls, (peer, &self.limits), what, request).await;
        }
        match *method {
            Method::POST => {
                let is_json = json.is_some();
                let body = match self.read(request).await {
                    Ok(body) => body,
                    Err((status, why)) => return last_failure(status, &why),
                };
                if is_json {
                    self.calls.json(peer, &self.limits, &body.bytes).await
                } else {
                    self.calls.xml(peer, &self.limits, &body.bytes).await
                }
            }
            Method::GET if path == "/" => {
                let mut page = reply(StatusCode::OK, "text/html", PAGE);
                if self.routes.iter().any(|route| route.prefix == "/dashboard") {
                    *page.status_mut() = StatusCode::SEE_OTHER;
                    page.headers_mut().insert(LOCATION, HeaderValue::from_static("/dashboard/"));
                }
                page
            }
            Method::OPTIONS if self.allowed_origin(request.headers()).is_some() => {
                let mut reply = reply(StatusCode::NO_CONTENT, "text/html", "");
                let headers = reply.headers_mut();
                headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("POST, GET, OPTIONS"));
                headers.insert(
                    ACCESS_CONTROL_ALLOW_HEADERS,
                    HeaderValue::from_static("content-type, accept, originator, x-requested-with"),
                );
                reply
            }
            Method::GET | Method::HEAD | Method::PUT | Method::OPTIONS => {
                last_failure(StatusCode::NOT_FOUND, &format!("{method} {path}: there is nothing here"))
            }
            _ => last_failure(StatusCode::METHOD_NOT_ALLOWED, &format!("{method} is not known here")),
        }
    }

    /// The body of a call.
    async fn read(&self, request: Request<Incoming>) -> Result<Received, Refusal> {
        let max = self.limits.body_len_max;
        let declared: Option<u64> =
            request.headers().get(CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse().ok());
        if declared.is_some_and(|len| len > max as u64) {
            return Err(too_long(max));
        }
        let time = self.limits.body_time;
        let late =
            |_| Err((StatusCode::REQUEST_TIMEOUT, format!("the call was not complete after {time:?}")));
        tokio::time::timeout(time, self.receive(request.into_body())).await.unwrap_or_else(late)
    }

    async fn receive(&self, mut body: Incoming) -> Result<Received, Refusal> {
        let max = self.limits.body_len_max;
        let mut bytes = Zeroizing::new(Vec::new());
        let mut memory = None;
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|_| (StatusCode::BAD_REQUEST, "the call ended in its middle".to_owned()))?;
            let Ok(data) = frame.into_data() else { continue };
            let len = bytes.len() + data.len();
            if len > max {
                return Err(too_long(max));
            }
            if len > bytes.capacity() {
                // Grown by hand, so that no copy is left behind uncleared, and none is taken unasked.
                let wanted = len.max(2 * bytes.capacity()).min(max).next_multiple_of(PIECE);
                let pieces = u32::try_from(wanted / PIECE).unwrap_or(u32::MAX);
                let taken = Arc::clone(&self.bodies).try_acquire_many_owned(pieces).map_err(|_| {
                    let why = "too many large calls at a time; come back in a second";
                    (StatusCode::SERVICE_UNAVAILABLE, why.to_owned())
                })?;
                let mut larger = Zeroizing::new(Vec::with_capacity(wanted));
                larger.extend_from_slice(&bytes);
                bytes = larger;
                memory = Some(taken);
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Received { bytes, _memory: memory })
    }
}

/// The body of a call. It may hold a password, so the memory is cleared when it is dropped.
struct Received {
    bytes: Zeroizing<Vec<u8>>,
    _memory: Option<OwnedSemaphorePermit>,
}

/// Why a body is not read.
type Refusal = (StatusCode, String);

fn too_long(max: usize) -> Refusal {
    (StatusCode::PAYLOAD_TOO_LARGE, format!("a call may have {max} bytes"))
}

impl Http {
    /// Memory for bodies, in pieces.
    pub(super) fn pieces(limits: &ServerLimits) -> Arc<Semaphore> {
        Arc::new(Semaphore::new((limits.bodies_len_max / PIECE).max(1)))
    }
}

/// The answer to a browser.
const PAGE: &str = "<!DOCTYPE html>\n<html><head><title>Tapio</title></head><body>\n<h1>Tapio</h1>\n\
    <p>This is the toolstack of a Tapio host: disks, storage repositories and VMs behind XenAPI.</p>\n\
    <ul>\n<li>XML-RPC: POST to <code>/</code></li>\n<li>JSON-RPC 1.0 and 2.0: POST to <code>/jsonrpc</code></li>\n\
    <li>Figures for Prometheus: GET <code>/metrics</code></li>\n<li>The dashboard: <a href=\"/dashboard/\">/dashboard/</a></li>\n<li>A command line: <code>xe</code></li>\n</ul>\n</body></html>\n";

/// The answer to a connection for which there is no room.
pub(super) fn no_room() -> &'static [u8] {
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain\r\nContent-Length: 50\r\nRetry-After: 1\r\n\
      Connection: close\r\n\r\nToo many connections are open; close some of them\n"
}

/// The answer while the daemon ends.
pub(super) fn ending() -> Reply {
    failure(StatusCode::SERVICE_UNAVAILABLE, "the toolstack's daemon is ending; connect again")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_refusal_is_as_long_as_it_says() {
        let text = std::str::from_utf8(super::no_room()).expect("ASCII");
        let (_, body) = text.split_once("\r\n\r\n").expect("a body");
        assert!(text.contains(&format!("Content-Length: {}\r\n", body.len())), "{}", body.len());
    }
}
