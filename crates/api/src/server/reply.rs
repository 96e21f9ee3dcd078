//! Answers of HTTP.

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};

/// What a handler of a route may fail with while its answer is on the way: the connection ends.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// An answer's body.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// An answer.
pub type Reply = Response<Body>;

/// A body that is there already.
pub fn body(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// An answer whose whole body is there.
pub fn reply(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(body(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A page that says what went wrong.
pub fn failure(status: StatusCode, why: &str) -> Reply {
    let escaped = why.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let text = format!("<html><body><h1>HTTP {status}</h1>{escaped}</body></html>\n");
    let mut response = reply(status, "text/html", text);
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// [`failure`], after which the connection closes: the rest of the request is not read.
pub fn last_failure(status: StatusCode, why: &str) -> Reply {
    let mut response = failure(status, why);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
