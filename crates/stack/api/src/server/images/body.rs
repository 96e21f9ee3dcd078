//! The body of an export: from a socket to HTTP.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::net::UnixStream;

use super::super::reply::{Body, BodyError};
use super::Done;
use crate::backend::BoxFuture;

/// Bytes of a piece.
const PIECE_LEN: usize = 64 << 10;

/// The rest of an export. Dropping it before the end ends the transfer.
///
/// Its last piece is held back until the transfer has ended: a client that has all of it finds the VDI let go and the
/// task ended, and one whose export failed at its end is cut.
pub(super) struct Download {
    data: UnixStream,
    left: u64,
    last: Bytes,
    taken: Option<Sender<()>>,
    done: Done,
    ending: BoxFuture<()>,
}

impl Download {
    /// A body of `len` bytes, which are more than none; `taken` hears when all of them are here, `done` says how the
    /// transfer ended.
    pub(super) fn body(
        data: UnixStream,
        len: u64,
        taken: Sender<()>,
        done: Done,
        ending: BoxFuture<()>,
    ) -> Body {
        Self { data, left: len, last: Bytes::new(), taken: Some(taken), done, ending }.boxed_unsync()
    }

    /// The next piece that the storage sent.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, BodyError>> {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let piece = loop {
            ready!(self.data.poll_read_ready(cx))?;
            // Made when there is something to read: a transfer that waits holds no memory.
            let mut piece = Vec::with_capacity(left.min(PIECE_LEN));
            match self.data.try_read_buf(&mut piece) {
                Ok(_) => break piece,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        };
        if piece.len() > left {
            return Poll::Ready(Err("the storage sent more than the export has".into()));
        }
        if piece.is_empty() {
            return Poll::Ready(Err("the storage ended the export in its middle".into()));
        }
        Poll::Ready(Ok(piece.into()))
    }
}

impl hyper::body::Body for Download {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        if self.ending.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the toolstack's daemon is ending".into())));
        }
        if self.left > 0 {
            let piece = ready!(self.poll_piece(cx))?;
            self.left -= piece.len() as u64;
            if self.left > 0 {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            self.last = piece;
            if let Some(taken) = self.taken.take() {
                // A transfer that failed waits for nothing.
                let _ = taken.send(());
            }
        }
        let ended = ready!(Pin::new(&mut self.done).poll(cx));
        let piece = std::mem::take(&mut self.last);
        Poll::Ready(Some(match ended {
            Ok(Ok(())) => Ok(Frame::data(piece)),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err("a transfer ended in a defect of ours".into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0 && self.last.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left + self.last.len() as u64)
    }
}
