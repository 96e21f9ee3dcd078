//! VMs that come and go as XVA archives.
//!
//! Neither answer has a length: how long an archive is shows when it is whole. An import is answered before its body
//! was read, as XenServer does, because clients wait for the answer before they send; the body of the answer ends when
//! the import does. If a transfer fails the connection is cut in the middle of that body, behind the error as text
//! where it is the body of an import, so that no client takes it for a success.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};

use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_DISPOSITION, HeaderValue};
use tapio_model::ApiError;
use tokio::net::UnixStream;

use super::super::calls::Calls;
use super::super::ended;
use super::super::limits::ServerLimits;
use super::super::refusal::refusal;
use super::super::reply::{BodyError, Reply};
use super::{Direction, Done, Running, outcome, receive};
use crate::backend::BoxFuture;

/// Bytes of a piece.
const PIECE_LEN: usize = 64 << 10;

/// The answer to an export that was accepted: nothing is sent before the first bytes are there.
pub(super) async fn download(calls: &Calls, running: Running, direction: Direction) -> Reply {
    let is_there = running.data.readable().await.is_ok();
    let mut first = Vec::with_capacity(PIECE_LEN);
    let len = if is_there { running.data.try_read_buf(&mut first) } else { Ok(0) };
    if matches!(len, Ok(0)) {
        let error = running.give_up().await.err();
        let error = error.unwrap_or_else(|| ApiError::internal("an export ended before it began"));
        return refusal(&error, None);
    }
    let Running { data, taken, done, .. } = running;
    let ending: BoxFuture<()> = Box::pin(ended(calls.ending.clone()));
    let first = Some(Bytes::from(first)).filter(|first| !first.is_empty());
    let body = Archive { data, first, taken: Some(taken), done: Some(done), ending }.boxed_unsync();
    let mut reply = outcome::stream(body);
    let name = match direction {
        Direction::ExportDatabase => "attachment; filename=\"database.tapio\"",
        Direction::ExportHost => "attachment; filename=\"host.tapio.tar\"",
        _ => "attachment; filename=\"export.xva\"",
    };
    let name = HeaderValue::from_static(name);
    reply.headers_mut().insert(CONTENT_DISPOSITION, name);
    reply
}

/// The archive of an export. Dropping it before the end ends the transfer. Its end is sent when the transfer has ended:
/// the client finds the VM let go.
struct Archive {
    data: UnixStream,
    first: Option<Bytes>,
    taken: Option<Sender<()>>,
    done: Option<Done>,
    ending: BoxFuture<()>,
}

impl Archive {
    /// The next piece; an empty one at the end.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, BodyError>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(first));
        }
        loop {
            ready!(self.data.poll_read_ready(cx))?;
            let mut piece = Vec::with_capacity(PIECE_LEN);
            match self.data.try_read_buf(&mut piece) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|_| piece.into()).map_err(Into::into)),
            }
        }
    }
}

impl HttpBody for Archive {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.ending.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the toolstack's daemon is ending".into())));
        }
        if self.taken.is_some() {
            let piece = ready!(self.poll_piece(cx))?;
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if let Some(taken) = self.taken.take() {
                // A transfer that failed waits for nothing.
                let _ = taken.send(());
            }
        }
        let Some(done) = &mut self.done else { return Poll::Ready(None) };
        let done = ready!(Pin::new(done).poll(cx));
        self.done = None;
        Poll::Ready(match done {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(error.into())),
            Err(_) => Some(Err("a transfer ended in a defect of ours".into())),
        })
    }
}

/// Answers an import that was accepted, and takes it.
pub(super) fn upload(
    calls: &Calls,
    limits: &ServerLimits,
    running: Running,
    body: (Bytes, Incoming),
) -> Reply {
    let Running { data, done, .. } = running;
    let ending: BoxFuture<()> = Box::pin(ended(calls.ending.clone()));
    let taking = receive(ending, limits.upload_time, (data, done), body);
    outcome::answer(Box::pin(taking))
}
