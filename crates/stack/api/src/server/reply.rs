//! Answers of HTTP.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Frame, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};

use super::budget::Share;

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

/// A text that holds its share as long as hyper holds the text: that is until it is sent, or the connection ends.
struct Held {
    text: String,
    _share: Arc<Share>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// A text that holds its share until it is sent.
pub(super) fn held(text: String, share: Arc<Share>) -> Bytes {
    Bytes::from_owner(Held { text, _share: share })
}

/// Texts that are there already.
struct Texts {
    texts: VecDeque<Bytes>,
    left: u64,
}

impl hyper::body::Body for Texts {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let text = self.texts.pop_front();
        self.left -= text.as_ref().map_or(0, |text| text.len() as u64);
        Poll::Ready(text.map(|text| Ok(Frame::data(text))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// A body of texts, one behind the other.
pub(super) fn texts(texts: Vec<Bytes>) -> Body {
    let left = texts.iter().map(|text| text.len() as u64).sum();
    Texts { texts: texts.into(), left }.boxed_unsync()
}

/// An answer whose whole body is there.
pub fn reply(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Reply {
    reply_of(status, kind, body(text))
}

/// An answer with a body.
pub(super) fn reply_of(status: StatusCode, kind: &'static str, body: Body) -> Reply {
    let mut response = Response::new(body);
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
