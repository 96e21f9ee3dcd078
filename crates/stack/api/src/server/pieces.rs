//! The body of a large answer: made piece by piece, as the client takes it.
//!
//! ```text
//!   client takes ── hyper asks ── a turn ── a blocking thread: parts to text, 64 KiB ── hyper
//! ```
//!
//! A client that takes nothing has what its answer began with and no more. Turns are few and given in order, so that
//! many large answers leave the processors to small ones, and none of the large ones waits for another's end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use tapio_model::Large;
use tokio::sync::Semaphore;

use super::budget::Share;
use super::reply::{Body, BodyError, held};
use crate::backend::BoxFuture;
use crate::writer::{Language, Writer};

/// Bytes of a piece; a part that is longer is a piece of its own.
pub(super) const PIECE_LEN: usize = 64 << 10;

/// Pieces of an answer that are there at a time: one that is made, and two that hyper and the connection hold.
const PIECES: usize = 3;

/// Timeout for room for a part longer than a piece. A client that does not read loses its room before.
const ROOM_TIME: Duration = Duration::from_secs(120);

/// What an answer holds while its client takes it.
pub(super) const fn cost(large: &Large) -> usize {
    large.held_len + PIECES * PIECE_LEN
}

type Piece = Result<(Writer, Option<String>), BodyError>;

enum State {
    Idle(Box<Writer>),
    Working(BoxFuture<Piece>),
    Over,
}

/// A large answer on its way.
struct Pieces {
    state: State,
    share: Arc<Share>,
    turns: Arc<Semaphore>,
    part_len: usize,
}

/// The body of an answer that holds `share`.
pub(super) fn pieces(large: Large, language: Language, share: Share, turns: Arc<Semaphore>) -> Body {
    let part_len = large.part_len;
    let state = State::Idle(Box::new(Writer::new(large, language)));
    Pieces { state, share: Arc::new(share), turns, part_len }.boxed_unsync()
}

async fn work(mut writer: Writer, share: Arc<Share>, turns: Arc<Semaphore>, part_len: usize) -> Piece {
    // Room for a part that is longer than a piece is taken before it is made.
    let _more = match part_len > PIECE_LEN {
        true => Some(tokio::time::timeout(ROOM_TIME, share.more(2 * part_len)).await?),
        false => None,
    };
    let turn = turns.acquire_owned().await?;
    let made = tokio::task::spawn_blocking(move || {
        let piece = writer.piece(PIECE_LEN);
        drop(turn);
        piece.map(|text| (writer, text))
    });
    Ok(made.await??)
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        loop {
            match std::mem::replace(&mut this.state, State::Over) {
                State::Over => return Poll::Ready(None),
                State::Idle(writer) => {
                    let (share, turns) = (Arc::clone(&this.share), Arc::clone(&this.turns));
                    this.state = State::Working(Box::pin(work(*writer, share, turns, this.part_len)));
                }
                State::Working(mut working) => match working.as_mut().poll(cx) {
                    Poll::Pending => {
                        this.state = State::Working(working);
                        return Poll::Pending;
                    }
                    Poll::Ready(Ok((_, None))) => return Poll::Ready(None),
                    Poll::Ready(Ok((writer, Some(piece)))) => {
                        this.state = State::Idle(Box::new(writer));
                        // What hyper has not sent yet is a part of what the answer holds.
                        let piece = held(piece, Arc::clone(&this.share));
                        return Poll::Ready(Some(Ok(Frame::data(piece))));
                    }
                    Poll::Ready(Err(error)) => {
                        tracing::debug!("an answer ends in its middle: {error}");
                        return Poll::Ready(Some(Err(error)));
                    }
                },
            }
        }
    }
}
