//! One worker as the daemon knows it: its process, and links that carry one call each.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_sys::poll;
use tapio_types::{Access, ApiError};

use super::frame::{Frames, encode};
use super::message::{Answer, FromWorker, Question, Reply, Task, ToWorker};
use super::process::{Launch, Process};
use super::rights;
use crate::traits::{ApiSession, Ctx, LiveDisk, VdiInfo};

/// Calls that one worker does at a time; each is a thread there.
const CALLS_MAX: usize = 128;

/// How often a waiting call looks whether it was cancelled, or its worker abandoned.
const LOOK: Duration = Duration::from_millis(100);

/// How long a call that was cancelled may take to undo what it did. Reading a piece of a copy, or putting back a few
/// names, takes less on a storage that answers.
const CANCEL: Duration = Duration::from_secs(5);

/// How long a worker may take to read what it is asked.
const WRITE: Duration = Duration::from_secs(5);

/// Images that a scan may tell of; one SR with more is none of ours.
const IMAGES_MAX: usize = 1_000_000;
/// Bytes of a text: the changed blocks of the largest disk that they are listed of take less.
const TEXT_MAX: usize = 16 << 20;

/// Notices of one call to the administrator.
const NOTICES_MAX: usize = 1000;
/// Bytes of one of them that are kept.
const NOTICE_LEN_MAX: usize = 4096;

/// Records in one answer to a question about them.
const RECORDS_AT_ONCE: usize = 500;

/// Running disks that a call asked about.
type Disks = HashMap<usize, Box<dyn LiveDisk>>;

/// What a call asked for, until it is over.
#[derive(Default)]
struct Asked {
    disks: Disks,
    /// One for all of a call's plugins.
    session: Option<Box<dyn ApiSession>>,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The driver's error.
    Refused(ApiError),
    /// Nothing was received for too long.
    Silent,
    /// It was cancelled, and went on.
    Cancelled,
    /// The worker is gone.
    Ended,
    /// What came is no message, or none that belongs there.
    Nonsense(String),
}

/// A worker.
#[derive(Debug)]
pub(super) struct Worker {
    process: Arc<dyn Process>,
    control: UnixStream,
    idle: Mutex<Vec<Link>>,
    calls: AtomicUsize,
    is_given_up: AtomicBool,
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    frames: Frames,
}

impl Worker {
    /// Starts one.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(launch: &dyn Launch) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let process = launch.launch(OwnedFd::from(theirs))?;
        Ok(Self {
            process: Arc::from(process),
            control: ours,
            idle: Mutex::default(),
            calls: AtomicUsize::new(0),
            is_given_up: AtomicBool::new(false),
        })
    }

    pub(super) fn process(&self) -> Arc<dyn Process> {
        Arc::clone(&self.process)
    }

    /// Whether calls make sense.
    pub(super) fn is_usable(&self) -> bool {
        !self.is_given_up.load(Ordering::Acquire) && !self.process.has_ended()
    }

    /// No call is made any more, and those that wait end; false where that was so already.
    pub(super) fn give_up(&self) -> bool {
        if self.is_given_up.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.idle.lock().clear();
        // The end of the control socket ends the worker even where no signal reaches it.
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        true
    }

    fn link(&self, data: Option<&OwnedFd>) -> io::Result<Link> {
        let idle = if data.is_none() { self.idle.lock().pop() } else { None };
        if let Some(link) = idle {
            return Ok(link);
        }
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_write_timeout(Some(WRITE))?;
        rights::send(&self.control, theirs, data)?;
        Ok(Link { stream: ours, frames: Frames::default() })
    }

    /// One call: its answer, and the images that came before it. `data` is the socket of a transfer, which the worker
    /// gets.
    ///
    /// # Errors
    /// After any but [`Failure::Refused`] the worker is of no use any more.
    pub(super) fn call(
        &self,
        ctx: &dyn Ctx,
        (task, data): (&Task, Option<OwnedFd>),
        limit: Duration,
    ) -> Result<(Answer, Vec<VdiInfo>), Failure> {
        let running = self.calls.fetch_add(1, Ordering::AcqRel);
        let done = if running < CALLS_MAX {
            self.talk(ctx, (task, data), limit)
        } else {
            let text =
                format!("{}: {CALLS_MAX} operations of this SR run already; repeat later", task.name());
            Err(Failure::Refused(crate::errors::fail(46, text)))
        };
        self.calls.fetch_sub(1, Ordering::AcqRel);
        done
    }

    fn talk(
        &self,
        ctx: &dyn Ctx,
        (task, data): (&Task, Option<OwnedFd>),
        limit: Duration,
    ) -> Result<(Answer, Vec<VdiInfo>), Failure> {
        let mut link = self.link(data.as_ref()).map_err(|error| broken(&error))?;
        // The worker has its own descriptor: the socket ends with the transfer.
        let is_transfer = data.is_some();
        drop(data);
        link.send(&ToWorker::Begin(task.clone()))?;
        let (mut asked, mut images, mut text) = (Asked::default(), Vec::new(), String::new());
        let mut notices = 0;
        let mut heard = Instant::now();
        let mut cancelled: Option<Instant> = None;
        loop {
            let Some(message) = link.receive(LOOK)? else {
                if self.is_given_up.load(Ordering::Acquire) {
                    return Err(Failure::Ended);
                }
                if cancelled.is_none() && ctx.is_cancelled() {
                    link.send(&ToWorker::Cancel)?;
                    cancelled = Some(Instant::now());
                }
                if cancelled.is_some_and(|at| at.elapsed() >= CANCEL) {
                    return Err(Failure::Cancelled);
                }
                if heard.elapsed() >= limit {
                    return Err(Failure::Silent);
                }
                continue;
            };
            match message {
                FromWorker::Progress(fraction) => {
                    ctx.progress(fraction);
                    // Where much is told, no turn of the loop is without news.
                    if cancelled.is_none() && ctx.is_cancelled() {
                        link.send(&ToWorker::Cancel)?;
                        cancelled = Some(Instant::now());
                    }
                }
                FromWorker::Ask(question) => {
                    let reply = answer(ctx, &mut asked, question);
                    link.send(&ToWorker::Reply(reply))?;
                }
                FromWorker::Notice { vdi, notice, why } => {
                    notices += 1;
                    if notices > NOTICES_MAX {
                        return Err(Failure::Nonsense(format!("more than {NOTICES_MAX} notices")));
                    }
                    ctx.notice(vdi, notice, &why[..why.floor_char_boundary(NOTICE_LEN_MAX)]);
                }
                FromWorker::Images(some) => {
                    if images.len() + some.len() > IMAGES_MAX {
                        return Err(Failure::Nonsense(format!("more than {IMAGES_MAX} images")));
                    }
                    images.extend(some);
                }
                FromWorker::Text(piece) => {
                    if text.len() + piece.len() > TEXT_MAX {
                        return Err(Failure::Nonsense(format!("a text of more than {TEXT_MAX} bytes")));
                    }
                    text.push_str(&piece);
                }
                FromWorker::Done(done) => {
                    // A cancel that came too late lies in the link, where the next call would find it.
                    if link.frames.is_empty()
                        && cancelled.is_none()
                        && !is_transfer
                        && !self.is_given_up.load(Ordering::Acquire)
                    {
                        self.idle.lock().push(link);
                    }
                    return match done {
                        Ok(Answer::Text(_)) => Ok((Answer::Text(text), images)),
                        done => done.map(|answer| (answer, images)).map_err(Failure::Refused),
                    };
                }
            }
            heard = Instant::now();
        }
    }
}

fn broken(error: &io::Error) -> Failure {
    match error.kind() {
        // It does not read, or not in time.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Failure::Silent,
        _ => Failure::Ended,
    }
}

impl Link {
    fn send(&mut self, message: &ToWorker) -> Result<(), Failure> {
        let refused =
            |why| Failure::Refused(ApiError::internal(format!("a worker cannot be told what to do: {why}")));
        let bytes = encode(message).map_err(refused)?;
        self.stream.write_all(&bytes).map_err(|error| broken(&error))
    }

    /// The next message; none where none came for so long.
    fn receive(&mut self, limit: Duration) -> Result<Option<FromWorker>, Failure> {
        let mut piece = [0; 32 << 10];
        loop {
            if let Some(message) = self.frames.take().map_err(|why| Failure::Nonsense(why.to_string()))? {
                return Ok(Some(message));
            }
            if !poll::is_readable(&self.stream, limit).unwrap_or(false) {
                return Ok(None);
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(Failure::Ended),
                Ok(len) => self.frames.feed(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(&error)),
            }
        }
    }
}

/// Answers what a driver asks about running disks and records.
fn answer(ctx: &dyn Ctx, asked: &mut Asked, question: Question) -> Reply {
    let disks = &mut asked.disks;
    let unknown = || Reply::Done(Err(ApiError::internal("a driver asked about a disk that is not known")));
    match question {
        Question::Live { vdi } => Reply::Live(ctx.live(vdi).map(|disk| {
            let number = disks.len();
            disks.insert(number, disk);
            number
        })),
        Question::Managed { vdi } => Reply::Managed(ctx.is_managed(vdi)),
        Question::Pause { disk } => disks.get(&disk).map_or_else(unknown, |disk| Reply::Done(disk.pause())),
        Question::Resume { disk, with } => {
            disks.get(&disk).map_or_else(unknown, |disk| Reply::Done(disk.resume(&with)))
        }
        Question::Hold { disk, new_log } => {
            disks.get(&disk).map_or_else(unknown, |disk| Reply::Held(disk.hold(new_log)))
        }
        Question::SwapLeaf { disk, with, new_log } => {
            disks.get(&disk).map_or_else(unknown, |disk| Reply::Swapped(disk.swap_leaf(&with, new_log)))
        }
        Question::Shorten { disk, from, to } => {
            disks.get(&disk).map_or_else(unknown, |disk| Reply::Shortened(disk.shorten(from, to)))
        }
        Question::LookForRoom { disk } => disks.get(&disk).map_or_else(unknown, |disk| {
            disk.look_for_room();
            Reply::Done(Ok(()))
        }),
        Question::Access { disk } => {
            Reply::Access(disks.get(&disk).map_or(Access::ReadWrite, |disk| disk.access()))
        }
        Question::Grow { disk, bytes } => {
            disks.get(&disk).map_or_else(unknown, |disk| Reply::Done(disk.grow(bytes)))
        }
        Question::Holders { vdi } => Reply::Count(ctx.holders(vdi)),
        Question::Session { sr } => {
            let opened = match asked.session.take() {
                Some(session) => Ok(session),
                None => ctx.api(sr),
            };
            Reply::Session(opened.map(|session| {
                let session = asked.session.insert(session);
                (session.session().to_owned(), session.host().to_owned())
            }))
        }
        Question::Records { sr, vdi, after } => Reply::Records(ctx.records(sr, vdi).map(|mut all| {
            let from = after.min(all.len());
            let to = all.len().min(from + RECORDS_AT_ONCE);
            all.drain(from..to).collect()
        })),
        Question::Sizes { sr } => Reply::Sizes(ctx.sizes(sr)),
    }
}
