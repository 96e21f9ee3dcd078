//! The contents of one image on their way: pieces with their places, in parts that the receiver confirms when they are
//! durable there. A part that was lost with the network is sent again, from its first byte.

use std::io::{self, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::ApiError;
use tapio_types::ChainSpec;

use super::remote::{Remote, is_passing};
use crate::call::Call;
use crate::progress::Progress;
use crate::storage::Storage;
use crate::storage::archive::STREAM_HEAD_LEN;
use crate::storage::outgoing::Tree;

/// Bytes of a part: what is sent again at most.
const PART_LEN: u64 = 256 << 20;

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// Bytes a second that all streams of a motion have together.
#[derive(Debug)]
pub(super) struct Rate {
    limit: Option<u64>,
    /// Until when what was sent has taken the line.
    until: Mutex<Instant>,
}

impl Rate {
    pub(super) fn new(limit: Option<u64>) -> Self {
        Self { limit, until: Mutex::new(Instant::now()) }
    }

    /// Waits until so many more bytes may be sent.
    fn take(&self, bytes: u64, progress: &dyn Progress) {
        let Some(limit) = self.limit else { return };
        let now = Instant::now();
        let wait = {
            let mut until = self.until.lock();
            let from = (*until).max(now);
            *until = from + Duration::from_secs_f64(bytes as f64 / limit as f64);
            from.saturating_duration_since(now)
        };
        let end = now + wait;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|_| !progress.is_cancelled())
        {
            thread::sleep(left.min(PAUSE));
        }
    }
}

/// Where one image goes.
pub(super) struct Stream<'a> {
    pub(super) call: &'a Call<Storage>,
    pub(super) remote: &'a Remote,
    pub(super) rate: &'a Rate,
    pub(super) tree: &'a Tree,
    pub(super) from: (&'a ChainSpec, Option<&'a ChainSpec>),
    /// The UUID of the VDI at the receiver.
    pub(super) vdi: &'a str,
    /// Hears of the fraction that is sent.
    pub(super) told: &'a (dyn Fn(f64) + Sync),
}

/// Passes on whether the call is cancelled, and nothing else.
struct Quiet(std::sync::Arc<dyn Progress>);

impl Progress for Quiet {
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    fn set(&self, _: f64) {}

    fn task(&self) -> Option<&str> {
        self.0.task()
    }
}

/// How a run over the image ended early.
enum Ended {
    /// The images here cannot be read: the reader of the stream says why.
    Reading,
    Remote(ApiError),
}

impl Stream<'_> {
    /// Sends all of it.
    ///
    /// # Errors
    /// Those of the images here and of the receiver, `TASK_CANCELLED`.
    pub(super) fn send(&self) -> Result<(), ApiError> {
        let mut confirmed = 0;
        let mut until = None;
        loop {
            let before = confirmed;
            let error = match self.run(&mut confirmed) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            // What was interrupted there may hold the disk for a moment longer.
            let is_busy = matches!(&*error.code, "VDI_IN_USE" | "OTHER_OPERATION_IN_PROGRESS");
            if !is_passing(&error) && !is_busy {
                return Err(error);
            }
            if self.call.progress.is_cancelled() {
                let task = self.call.progress.task().unwrap_or_default();
                return Err(ApiError::new("TASK_CANCELLED", [task]));
            }
            if confirmed > before {
                until = None;
            }
            let limit = self.remote.timeout();
            if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + limit) {
                return Err(error);
            }
            tracing::info!(vdi = self.vdi, %error, confirmed, "what was lost on the way is sent again");
            thread::sleep(PAUSE);
        }
    }

    /// Sends from the last byte that is confirmed on.
    fn run(&self, confirmed: &mut u64) -> Result<(), ApiError> {
        let failed = |error: io::Error| ApiError::internal(format!("a disk cannot be sent: {error}"));
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let quiet = self.call.with(std::sync::Arc::new(Quiet(std::sync::Arc::clone(&self.call.progress))));
        let start = *confirmed;
        thread::scope(|scope| {
            let reading = scope.spawn(|| self.tree.send(&quiet, self.from, start, OwnedFd::from(theirs)));
            let passed = self.pass(BufReader::with_capacity(1 << 20, ours), confirmed);
            let read =
                reading.join().unwrap_or_else(|_| Err(ApiError::internal("a defect while a disk is read")));
            match passed {
                Ok(()) => read,
                Err(Ended::Remote(error)) => Err(error),
                Err(Ended::Reading) => {
                    read.and_then(|()| Err(ApiError::internal("the storage ended a stream early")))
                }
            }
        })
    }

    fn pass(&self, mut from: impl Read, confirmed: &mut u64) -> Result<(), Ended> {
        let mut head = [0; STREAM_HEAD_LEN];
        from.read_exact(&mut head).map_err(|_| Ended::Reading)?;
        let len = head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        loop {
            let (is_last, end) = self.part(&mut from, len)?;
            *confirmed = end;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Sends a part, and waits until it is confirmed: whether it is the last, and the byte behind it.
    fn part(&self, from: &mut impl Read, len: u64) -> Result<(bool, u64), Ended> {
        let failed =
            |error: io::Error| Ended::Remote(ApiError::internal(format!("a disk cannot be sent: {error}")));
        let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
        let is_broken = AtomicBool::new(false);
        thread::scope(|scope| {
            let putting = scope.spawn(|| self.remote.put(self.vdi, theirs, &is_broken));
            let fed = self.feed(from, &mut ours, len);
            // Without its end the receiver would wait for more.
            is_broken.store(fed.is_err(), Ordering::Relaxed);
            drop(ours);
            let put =
                putting.join().unwrap_or_else(|_| Err(ApiError::internal("a defect while a disk is sent")));
            match (put, fed) {
                (_, Err(Ended::Reading)) => Err(Ended::Reading),
                (Err(error), _) => Err(Ended::Remote(error)),
                (Ok(()), fed) => fed,
            }
        })
    }

    fn feed(&self, from: &mut impl Read, to: &mut UnixStream, len: u64) -> Result<(bool, u64), Ended> {
        // What the receiver answers is the cause, which its caller has.
        let lost = |error: io::Error| {
            Ended::Remote(ApiError::new("CANNOT_CONTACT_HOST", [format!("the stream ended: {error}")]))
        };
        let mut sent = 0;
        let mut data = Vec::new();
        loop {
            let mut head = [0; 12];
            from.read_exact(&mut head).map_err(|_| Ended::Reading)?;
            let (at, bytes) = head.split_at(8);
            let at = at.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let bytes = bytes.first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)));
            if bytes == 0 {
                to.write_all(&head).map_err(lost)?;
                return Ok((true, len));
            }
            data.resize(usize::try_from(bytes).map_err(|_| Ended::Reading)?, 0);
            from.read_exact(&mut data).map_err(|_| Ended::Reading)?;
            self.rate.take(bytes, &*self.call.progress);
            to.write_all(&head).and_then(|()| to.write_all(&data)).map_err(lost)?;
            sent += bytes;
            let end = at + bytes;
            (self.told)(end as f64 / len.max(1) as f64);
            if sent >= PART_LEN {
                let mut last = [0; 12];
                last[..8].copy_from_slice(&len.to_le_bytes());
                to.write_all(&last).map_err(lost)?;
                return Ok((false, end));
            }
        }
    }
}
