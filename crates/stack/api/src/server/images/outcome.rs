//! Answers that begin before the transfer ends: one without a length, and one whose body ends when an import does.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Bytes, Frame};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use tapio_model::ApiError;

use super::super::reply::{Body, BodyError, Reply};
use super::OCTETS;
use crate::backend::BoxFuture;

/// See [`Outcome::turns`].
const TURNS: u8 = 3;

/// An answer with this body, on a connection that ends with it.
pub(super) fn stream(body: Body) -> Reply {
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(OCTETS));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    *reply.status_mut() = StatusCode::OK;
    reply
}

/// The answer to an import that was accepted. If it fails, the body is the error as text and the connection is cut, so
/// that no client takes it for a success.
pub(super) fn answer(taking: BoxFuture<Result<(), ApiError>>) -> Reply {
    stream(Outcome { taking: Some(taking), error: None, turns: TURNS }.boxed_unsync())
}

/// The end of an import, as the body of its answer; the import goes on while this is asked for.
struct Outcome {
    taking: Option<BoxFuture<Result<(), ApiError>>>,
    /// How it failed, once the text of that was given.
    error: Option<ApiError>,
    /// Turns in which the server sends that text, before the connection is cut.
    turns: u8,
}

impl HttpBody for Outcome {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.error.is_some() && self.turns > 0 {
            self.turns -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error.into())));
        }
        let Some(taking) = &mut self.taking else { return Poll::Ready(None) };
        let done = ready!(taking.as_mut().poll(cx));
        self.taking = None;
        let Err(error) = done else { return Poll::Ready(None) };
        let text = format!("{error}\n");
        self.error = Some(error);
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }
}
