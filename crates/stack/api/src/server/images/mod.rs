//! Disks and VMs that come and go: `GET /export_raw_vdi`, `PUT /import_raw_vdi`, `GET /export` and `PUT /import`.
//!
//! ```text
//!   client ── HTTP body ── a socket ── worker of the SR ── images
//!                  \__ a thread: session, task, the operation on the VDI
//! ```
//!
//! The data pass in pieces of 64 KiB that nothing here looks at. A client that does not go on is not read, or written,
//! further than the buffers of the sockets reach. The answer to an import is sent when the outcome is known, whether
//! the client has sent everything or not: an error reaches one that still sends, and so does success where a client
//! announced a length without meaning. With `early=true` the answer comes first, for clients that send nothing before
//! it.

mod body;
mod request;
mod vm;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{ACCEPT_RANGES, CONNECTION, CONTENT_DISPOSITION, CONTENT_RANGE, ETAG, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tapio_model::{ApiError, Begun, ImageFormat, Transfer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, oneshot};

use super::calls::Calls;
use super::ended;
use super::limits::ServerLimits;
use super::refusal::refusal;
use super::reply::{BodyError, Reply, failure, reply};
use crate::backend::{BoxFuture, Peer};
use body::Download;
use request::{Wanted, read};

/// Bytes in front of an export.
const HEAD_LEN: usize = 16;

/// Which way a disk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Export,
    Import,
    /// A VM as an XVA archive.
    ExportVm,
    /// VMs of one.
    ImportVm,
}

/// Whether a request is for a disk. Clients write the path with and without a slash behind it.
pub(super) fn direction(method: &Method, path: &str) -> Option<Direction> {
    match (method, path.trim_end_matches('/')) {
        (&Method::GET, "/export_raw_vdi") => Some(Direction::Export),
        (&Method::PUT, "/import_raw_vdi") => Some(Direction::Import),
        (&Method::GET, "/export") => Some(Direction::ExportVm),
        (&Method::PUT, "/import") => Some(Direction::ImportVm),
        _ => None,
    }
}

/// Disks that come and go.
#[derive(Debug)]
pub(super) struct Images {
    places: Arc<Semaphore>,
}

/// How a transfer ended; nothing where its thread panicked.
type Done = oneshot::Receiver<Result<(), ApiError>>;

/// A transfer on its thread.
struct Running {
    data: UnixStream,
    begun: oneshot::Receiver<Begun>,
    done: Done,
    taken: mpsc::Sender<()>,
}

impl Running {
    /// Ends an export that nothing more is taken of.
    async fn give_up(self) -> Result<(), ApiError> {
        drop((self.data, self.taken));
        outcome(self.done).await
    }
}

impl Images {
    pub(super) fn new(limits: &ServerLimits) -> Self {
        Self { places: Arc::new(Semaphore::new(limits.transfers_max)) }
    }

    pub(super) async fn answer(
        &self,
        calls: &Calls,
        (peer, limits): (&Peer, &ServerLimits),
        direction: Direction,
        request: Request<Incoming>,
    ) -> Reply {
        let wanted = read(direction, &request);
        let entered = match wanted.credentials.enter(calls, (peer, limits)).await {
            Ok(entered) => entered,
            Err(error) => return refusal(&error, None),
        };
        let session = entered.session.clone();
        let answer = self.transfer(calls, limits, direction, (wanted, session), request.into_body()).await;
        // An export goes on without the session that it was begun with.
        entered.leave(calls, (peer, limits)).await;
        answer
    }

    async fn transfer(
        &self,
        calls: &Calls,
        limits: &ServerLimits,
        direction: Direction,
        (wanted, session): (Wanted, String),
        body: Incoming,
    ) -> Reply {
        let Wanted { task, asked, format, status, condition, early, .. } = wanted;
        let transfer = Transfer { session, task, asked };
        let mut running = match self.start(calls, transfer) {
            Ok(running) => running,
            Err(error) => return refusal(&error, None),
        };
        let begun = (&mut running.begun).await.ok();
        let task = begun.as_ref().map(|begun| begun.task.clone());
        let mut reply = match (&begun, format) {
            (Some(_), None) if direction == Direction::ExportVm => vm::download(calls, running).await,
            (Some(_), None) if direction == Direction::ImportVm => vm::upload(calls, limits, running, body),
            // Refused, or a probe.
            (None, _) => match outcome(running.done).await {
                Ok(()) => reply(StatusCode::OK, OCTETS, ""),
                Err(error) => refusal(&error, status),
            },
            (Some(begun), Some(format)) => download(calls, running, begun, format, condition).await,
            (Some(_), None) => {
                let Running { data, done, .. } = running;
                let ending = Box::pin(ended(calls.ending.clone()));
                let received = receive(ending, limits.upload_time, (data, done), body);
                if early { answered_early(received) } else { uploaded(received.await) }
            }
        };
        if let Some(task) = task.and_then(|task| HeaderValue::from_str(&task).ok()) {
            reply.headers_mut().insert("task-id", task);
        }
        reply
    }

    /// Puts a transfer on a thread of its own.
    fn start(&self, calls: &Calls, mut transfer: Transfer) -> Result<Running, ApiError> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        if place.is_err() && transfer.asked.is_ok() {
            // Its task ends with that.
            transfer.asked = Err(ApiError::bare("TOO_MANY_PENDING_TASKS"));
        }
        let failed = |error: std::io::Error| ApiError::internal(format!("a transfer cannot begin: {error}"));
        let (ours, theirs) = StdStream::pair().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let data = UnixStream::from_std(ours).map_err(failed)?;
        let (tell_begun, begun) = oneshot::channel();
        let (tell_done, done) = oneshot::channel();
        let (taken, is_taken) = mpsc::channel();
        let backend = Arc::clone(&calls.backend);
        let work = move || {
            let _place = place;
            let mut tell_begun = Some(tell_begun);
            let mut begin = |begun: Begun| {
                if let Some(tell) = tell_begun.take() {
                    let _ = tell.send(begun);
                }
            };
            let wait = || is_taken.recv().is_ok();
            let outcome = backend.transfer(&transfer, OwnedFd::from(theirs), &mut begin, &wait);
            // Before the end of `begun`, which is what a refused transfer is known by.
            let _ = tell_done.send(outcome);
        };
        std::thread::Builder::new().name("tapiod-image".into()).spawn(work).map_err(failed)?;
        Ok(Running { data, begun, done, taken })
    }
}

const OCTETS: &str = "application/octet-stream";

async fn outcome(done: Done) -> Result<(), ApiError> {
    let defect =
        |_| Err(ApiError::internal("a transfer ended in a defect of ours; the daemon's log has more"));
    done.await.unwrap_or_else(defect)
}

/// The answer to an export that was accepted: nothing is sent before the storage has begun to.
async fn download(
    calls: &Calls,
    mut running: Running,
    begun: &Begun,
    format: ImageFormat,
    condition: request::Condition,
) -> Reply {
    let mut head = [0; HEAD_LEN];
    if running.data.read_exact(&mut head).await.is_err() {
        let error = running.give_up().await.err();
        let error = error.unwrap_or_else(|| ApiError::internal("an export ended before it began"));
        let is_behind = condition.start > 0 && error.code == "SR_BACKEND_FAILURE_79";
        return refusal(&error, is_behind.then_some(StatusCode::RANGE_NOT_SATISFIABLE));
    }
    let (len, tag) = head.split_at(8);
    let len = len.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let tag = tag.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let tag = format!("\"{tag:016x}\"");
    if condition.matches.is_some_and(|wanted| wanted != "*" && wanted != tag) {
        // The client that hears of it finds the VDI let go.
        let _ = running.give_up().await;
        return failure(
            StatusCode::PRECONDITION_FAILED,
            "the disk is not the one of before: export it from the beginning",
        );
    }
    let Running { data, taken, done, .. } = running;
    let ending = Box::pin(ended(calls.ending.clone()));
    let body = Download::body(data, len.saturating_sub(condition.start), taken, done, ending);
    let mut reply: Reply = Response::new(body);
    let headers = reply.headers_mut();
    let kind = if format == ImageFormat::Vhd { "application/vhd" } else { OCTETS };
    headers.insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let name = begun.vdi.as_deref().unwrap_or("disk");
    let file = format!("attachment; filename=\"{name}.{}\"", format.suffix());
    let range = format!("bytes {}-{}/{len}", condition.start, len.saturating_sub(1));
    for (header, value) in [(CONTENT_DISPOSITION, Some(file)), (ETAG, Some(tag))]
        .into_iter()
        .chain([(CONTENT_RANGE, (condition.start > 0).then_some(range))])
    {
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(&value).ok()) {
            headers.insert(header, value);
        }
    }
    if condition.start > 0 {
        *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    reply
}

/// Gives a body to the storage, until one of them has ended; how the transfer ended.
async fn receive(
    mut ending: BoxFuture<()>,
    upload_time: Duration,
    (mut data, mut done): (UnixStream, Done),
    mut body: Incoming,
) -> Result<(), ApiError> {
    let sending = async {
        loop {
            let next = tokio::select! {
                next = tokio::time::timeout(upload_time, body.frame()) => next,
                () = &mut ending => return,
            };
            // The end, the client's silence or its loss: the storage knows whether all has come.
            let Ok(Some(Ok(frame))) = next else { return };
            let Ok(bytes) = frame.into_data() else { continue };
            if data.write_all(&bytes).await.is_err() {
                // The storage wants no more.
                return;
            }
        }
    };
    let early = tokio::select! {
        biased;
        done = &mut done => Some(done),
        () = sending => None,
    };
    drop(data);
    match early {
        Some(done) => {
            done.unwrap_or_else(|_| Err(ApiError::internal("a transfer ended in a defect of ours")))
        }
        None => outcome(done).await,
    }
}

fn uploaded(done: Result<(), ApiError>) -> Reply {
    match done {
        Ok(()) => {
            let mut reply = reply(StatusCode::OK, OCTETS, "");
            reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            reply
        }
        Err(error) => refusal(&error, None),
    }
}

/// An answer that comes before the image: that it was accepted. How it ends is told by its task, and by an answer
/// that is cut off. The import goes on when the client ends the connection behind its last byte.
fn answered_early(received: impl Future<Output = Result<(), ApiError>> + Send + 'static) -> Reply {
    let mut reply: Reply = Response::new(Early(tokio::spawn(received)).boxed_unsync());
    reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    reply
}

/// An empty body that ends with an import.
struct Early(tokio::task::JoinHandle<Result<(), ApiError>>);

impl hyper::body::Body for Early {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match ready!(Pin::new(&mut self.0).poll(cx)) {
            Ok(Ok(())) => Poll::Ready(None),
            Ok(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }
}

#[cfg(test)]
mod tests;
