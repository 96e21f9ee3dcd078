//! How other threads reach the data thread: a bounded queue of jobs and one event counter.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use tapio_ring::uring::Uring;
use tapio_ring::{Inbox, Polling};

use crate::admission::{Origin, Taken};
use crate::core::Core;
use crate::front::Fronts;
use crate::io::DiskIo;
use crate::port::Port;

/// Commands that may wait for the data thread at once.
const QUEUE_MAX: usize = 16;

/// The data thread as its jobs see it: the disk's port, its ring, its shared-memory front ends.
#[derive(Clone, Debug)]
pub struct DataThread {
    /// The disk.
    pub port: Port,
    /// The ring of the thread: sockets, polls, the buffer pool.
    pub uring: Uring,
    /// The shared-memory front ends.
    pub fronts: Fronts,
    pub(crate) core: Rc<Core<DiskIo>>,
    pub(crate) inbox: Rc<Inbox<Taken>>,
    pub(crate) polling: Rc<RefCell<Polling>>,
}

impl DataThread {
    /// The disk itself.
    pub fn core(&self) -> Rc<Core<DiskIo>> {
        Rc::clone(&self.core)
    }

    /// The same thread with a port whose requests count where `origin` says.
    fn seen_from(&self, origin: Origin) -> Cow<'_, Self> {
        if origin == Origin::UNKNOWN {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self { port: self.port.with_origin(origin), ..self.clone() })
    }
}

type Job = Box<dyn FnOnce(&DataThread) + Send>;

/// The data thread did not answer: it has ended, or it did not come to it in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The thread has ended.
    Ended,
    /// No answer before the deadline; the job may still run later.
    TimedOut,
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ended => "the disk's data thread has ended",
            Self::TimedOut => "the disk's data thread did not answer in time",
        })
    }
}

impl std::error::Error for Gone {}

/// Reaches a data thread from any other thread.
#[derive(Clone, Debug)]
pub struct DiskHandle {
    jobs: SyncSender<Job>,
    event: Arc<File>,
    origin: Origin,
}

/// The data thread's end of a [`DiskHandle`].
#[derive(Debug)]
pub(crate) struct Jobs {
    jobs: Receiver<Job>,
    event: Arc<File>,
}

impl DiskHandle {
    /// A pair of ends.
    pub(crate) fn pair() -> io::Result<(Self, Jobs)> {
        let event = Arc::new(File::from(eventfd(0, EventfdFlags::CLOEXEC)?));
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        let remote = Self { jobs: sender, event: Arc::clone(&event), origin: Origin::UNKNOWN };
        Ok((remote, Jobs { jobs: receiver, event }))
    }

    /// The same for a front end whose requests count where `origin` says: its jobs are given such a port.
    #[must_use]
    pub fn with_origin(&self, origin: Origin) -> Self {
        Self { origin, ..self.clone() }
    }

    fn post(&self, job: Job) -> Result<(), Gone> {
        self.jobs.send(job).map_err(|_| Gone::Ended)?;
        (&*self.event).write_all(&1u64.to_ne_bytes()).map_err(|_| Gone::Ended)
    }

    /// Runs `job` on the data thread and gives its result.
    pub fn call<T: Send + 'static>(
        &self,
        within: Duration,
        job: impl FnOnce(&DataThread) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let (reply, answer) = sync_channel(1);
        let origin = self.origin;
        self.post(Box::new(move |data_thread| {
            // A caller that stopped waiting does not want the answer.
            let _ = reply.send(job(&data_thread.seen_from(origin)));
        }))?;
        Self::receive(&answer, within)
    }

    /// Runs the future that `job` makes as a task of the data thread and gives its result.
    pub fn call_async<T, Fut>(
        &self,
        within: Duration,
        job: impl FnOnce(DataThread) -> Fut + Send + 'static,
    ) -> Result<T, Gone>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let (reply, answer) = sync_channel(1);
        let origin = self.origin;
        self.post(Box::new(move |data_thread| {
            let future = job(data_thread.seen_from(origin).into_owned());
            data_thread.port.tasks().spawn(async move {
                // As above.
                let _ = reply.send(future.await);
            });
        }))?;
        Self::receive(&answer, within)
    }

    fn receive<T>(answer: &Receiver<T>, within: Duration) -> Result<T, Gone> {
        answer.recv_timeout(within).map_err(|error| match error {
            std::sync::mpsc::RecvTimeoutError::Timeout => Gone::TimedOut,
            std::sync::mpsc::RecvTimeoutError::Disconnected => Gone::Ended,
        })
    }
}

impl Jobs {
    /// The service that takes jobs, for as long as the thread lives. Sleeps in the ring: no timer, no wake-up.
    pub(crate) async fn serve(self, data_thread: DataThread) {
        let mut value = Box::new(0);
        loop {
            if data_thread.uring.read_event(self.event.as_raw_fd(), &mut value).await.is_err() {
                return;
            }
            while let Ok(job) = self.jobs.try_recv() {
                job(&data_thread);
            }
        }
    }
}
