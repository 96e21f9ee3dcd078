//! The body of an export: from a socket to HTTP.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::net::UnixStream;

use super::super::reply::{Body, BodyError};
use crate::backend::BoxFuture;

/// Bytes of a piece.
const PIECE_LEN: usize = 64 << 10;

/// The rest of an export. Dropping it before the end ends the transfer.
pub(super) struct Download {
    data: UnixStream,
    left: u64,
    taken: Sender<()>,
    ending: BoxFuture<()>,
}

impl Download {
    /// A body of `len` bytes; `taken` hears when all of them were taken.
    pub(super) fn body(data: UnixStream, len: u64, taken: Sender<()>, ending: BoxFuture<()>) -> Body {
        Self { data, left: len, taken, ending }.boxed_unsync()
    }
}

impl hyper::body::Body for Download {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        if self.ending.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the toolstack's daemon is ending".into())));
        }
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let piece = loop {
            if let Err(error) = ready!(self.data.poll_read_ready(cx)) {
                return Poll::Ready(Some(Err(error.into())));
            }
            // Made when there is something to read: a transfer that waits holds no memory.
            let mut piece = Vec::with_capacity(left.min(PIECE_LEN));
            match self.data.try_read_buf(&mut piece) {
                Ok(_) => break piece,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        };
        if piece.len() > left {
            return Poll::Ready(Some(Err("the storage sent more than the export has".into())));
        }
        if piece.is_empty() {
            return Poll::Ready(Some(Err("the storage ended the export in its middle".into())));
        }
        self.left -= piece.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(piece.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if self.left == 0 {
            // A transfer that failed waits for nothing.
            let _ = self.taken.send(());
        }
    }
}
