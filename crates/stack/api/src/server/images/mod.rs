//! Disks and VMs that come and go: `GET /export_raw_vdi`, `PUT /import_raw_vdi`, `GET /export` and `PUT /import`; and
//! the database and the host: `GET` and `PUT /pool/xmldbdump`, `GET /host_backup` and `PUT /host_restore`.
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
//!
//! Before a stream of unknown length clients look for a redirection, with the same request and no body. So an import
//! without a length and without a task begins with its first byte ([`probe`]).
//!
//! A transfer that another host of the pool has to do is answered with 302 before anything of it is read
//! ([`redirect`]).

mod body;
mod database;
mod outcome;
mod probe;
mod redirect;
mod request;
mod vm;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, mpsc};

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
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
use super::reply::{Reply, failure, reply};
use crate::backend::{ApiBackend, BoxFuture, Peer};
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
    /// VMs without their disks.
    ExportMetadata,
    /// The same, received.
    ImportMetadata,
    /// The memory of a guest that comes from another host.
    Memory,
    /// All objects.
    ExportDatabase,
    /// The same, received.
    ImportDatabase,
    /// This host.
    ExportHost,
    /// The same, received.
    ImportHost,
}

impl Direction {
    /// Whether an archive is sent.
    fn is_archive_out(self) -> bool {
        matches!(self, Self::ExportVm | Self::ExportMetadata | Self::ExportDatabase | Self::ExportHost)
    }

    /// Whether one is received.
    fn is_archive_in(self) -> bool {
        matches!(self, Self::ImportVm | Self::ImportMetadata)
    }
}

/// Whether a request is for a disk. Clients write the path with and without a slash behind it.
pub(super) fn direction(method: &Method, path: &str) -> Option<Direction> {
    match (method, path.trim_end_matches('/')) {
        (&Method::GET, "/export_raw_vdi") => Some(Direction::Export),
        (&Method::PUT, "/import_raw_vdi") => Some(Direction::Import),
        (&Method::GET, "/export") => Some(Direction::ExportVm),
        (&Method::PUT, "/import") => Some(Direction::ImportVm),
        (&Method::GET, "/export_metadata") => Some(Direction::ExportMetadata),
        (&Method::PUT, "/import_metadata") => Some(Direction::ImportMetadata),
        (&Method::GET, "/pool/xmldbdump") => Some(Direction::ExportDatabase),
        (&Method::PUT, "/pool/xmldbdump") => Some(Direction::ImportDatabase),
        (&Method::GET, "/host_backup") => Some(Direction::ExportHost),
        (&Method::PUT, "/host_restore") => Some(Direction::ImportHost),
        (&Method::PUT, "/receive_memory") => Some(Direction::Memory),
        _ => None,
    }
}

/// Disks that come and go.
#[derive(Clone, Debug)]
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
        outcome_of(self.done).await
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
        let answer = match redirect::elsewhere(calls, &wanted, &session).await {
            Ok(None) => {
                let body = request.into_body();
                self.transfer(calls, limits, direction, (wanted, session), body).await
            }
            Ok(Some(other)) => redirect::answer(request.uri(), &other),
            Err(error) => redirect::refused(self, calls, (&wanted, &session), &error).await,
        };
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
        let Wanted { task, asked, format, status, condition, early, may_be_probe, .. } = wanted;
        let transfer = Transfer { session, task, asked };
        let mut body = body;
        let mut first = Bytes::new();
        if may_be_probe {
            match probe::first_bytes(&mut body).await {
                Some(bytes) => first = bytes,
                None => return self.answer_probe(calls, limits, transfer, body).await,
            }
        }
        let mut running = match self.start(&calls.backend, transfer) {
            Ok(running) => running,
            Err(error) => return refusal(&error, None),
        };
        let begun = (&mut running.begun).await.ok();
        let task = begun.as_ref().map(|begun| begun.task.clone());
        let mut reply = match (&begun, format) {
            (Some(_), None) if direction.is_archive_out() => vm::download(calls, running, direction).await,
            (Some(_), None) if direction.is_archive_in() => vm::upload(calls, limits, running, (first, body)),
            (Some(_), None) if matches!(direction, Direction::ImportDatabase | Direction::ImportHost) => {
                let ending = Box::pin(ended(calls.ending.clone()));
                let received = database::receive(ending, limits.upload_time, running, (first, body));
                if early {
                    answered_early(async { received.await.map(drop) })
                } else {
                    database::answer(received.await)
                }
            }
            // Refused, or a probe.
            (None, _) => match outcome_of(running.done).await {
                Ok(()) => reply(StatusCode::OK, OCTETS, ""),
                Err(error) => refusal(&error, status),
            },
            (Some(begun), Some(format)) => download(calls, running, begun, format, condition).await,
            (Some(_), None) => {
                let Running { data, done, .. } = running;
                let ending = Box::pin(ended(calls.ending.clone()));
                let received = receive(ending, limits.upload_time, (data, done), (first, body));
                if early { answered_early(received) } else { uploaded(received.await) }
            }
        };
        if let Some(task) = task.and_then(|task| HeaderValue::from_str(&task).ok()) {
            reply.headers_mut().insert("task-id", task);
        }
        reply
    }

    /// Puts a transfer on a thread of its own.
    fn start(&self, backend: &Arc<dyn ApiBackend>, mut transfer: Transfer) -> Result<Running, ApiError> {
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
        let backend = Arc::clone(backend);
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

fn defect() -> ApiError {
    ApiError::internal("a transfer ended in a defect of ours; the daemon's log has more")
}

async fn outcome_of(done: Done) -> Result<(), ApiError> {
    done.await.unwrap_or_else(|_| Err(defect()))
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

/// Gives a body, of which some bytes were read already, to the storage, until one of them has ended; how the transfer
/// ended.
async fn receive(
    mut ending: BoxFuture<()>,
    upload_time: Duration,
    (mut data, mut done): (UnixStream, Done),
    (first, mut body): (Bytes, Incoming),
) -> Result<(), ApiError> {
    let sending = feed(&mut ending, upload_time, &mut data, (first, &mut body));
    let early = tokio::select! {
        biased;
        done = &mut done => Some(done),
        () = sending => None,
    };
    drop(data);
    match early {
        Some(done) => done.unwrap_or_else(|_| Err(defect())),
        None => outcome_of(done).await,
    }
}

/// Gives a body, of which some bytes were read already, to a transfer until one of them has ended.
async fn feed(
    ending: &mut BoxFuture<()>,
    upload_time: Duration,
    data: &mut UnixStream,
    (first, body): (Bytes, &mut Incoming),
) {
    if data.write_all(&first).await.is_err() {
        return;
    }
    drop(first);
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(upload_time, body.frame()) => next,
            () = &mut *ending => return,
        };
        // The end, the client's silence or its loss: the storage knows whether all has come.
        let Ok(Some(Ok(frame))) = next else { return };
        let Ok(bytes) = frame.into_data() else { continue };
        if data.write_all(&bytes).await.is_err() {
            // The storage wants no more.
            return;
        }
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

/// An answer that comes before the image: that it was accepted. How it ends is told by its task as well. The import
/// goes on when the client ends the connection behind its last byte.
fn answered_early(received: impl Future<Output = Result<(), ApiError>> + Send + 'static) -> Reply {
    let going_on = tokio::spawn(received);
    outcome::answer(Box::pin(async move { going_on.await.unwrap_or_else(|_| Err(defect())) }))
}

#[cfg(test)]
mod tests;
