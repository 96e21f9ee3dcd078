//! How other threads reach the data thread: a bounded queue of jobs and one event counter.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use tapio_ring::uring::Uring;
use tapio_ring::{Inbox, PageBuf, Polling};

use crate::core::Core;
use crate::front::Fronts;
use crate::io::DiskIo;
use crate::port::Port;
use crate::shared::Wake;
use crate::taken::{Origin, Taken};

/// Commands that may wait for the data thread at once.
const QUEUE_MAX: usize = 16;

/// A thread that serves a disk, as front ends see it: the disk's port, the thread's ring, its shared-memory front ends.
#[derive(Clone, Debug)]
pub struct DataThread {
    /// The disk.
    pub port: Port,
    /// The ring of the thread: sockets, polls, the buffer pool.
    pub uring: Uring,
    /// The shared-memory front ends.
    pub fronts: Fronts,
    pub(crate) polling: Rc<RefCell<Polling>>,
}

/// The data thread that has the images of its disk.
#[derive(Clone, Debug)]
pub struct Owner {
    pub(crate) thread: DataThread,
    pub(crate) core: Rc<Core<DiskIo>>,
    pub(crate) inbox: Rc<Inbox<Taken>>,
}

impl Deref for Owner {
    type Target = DataThread;

    fn deref(&self) -> &DataThread {
        &self.thread
    }
}

impl Owner {
    /// The disk itself.
    pub fn core(&self) -> Rc<Core<DiskIo>> {
        Rc::clone(&self.core)
    }
}

/// What jobs of a thread are given.
pub trait Place: Clone + 'static {
    /// The same with a port whose requests count where `origin` says.
    fn seen_from(&self, origin: Origin) -> Cow<'_, Self>;
    /// The thread.
    fn thread(&self) -> &DataThread;
    /// A job has been done.
    fn look(&self) {}
}

impl Place for DataThread {
    fn seen_from(&self, origin: Origin) -> Cow<'_, Self> {
        if origin == Origin::UNKNOWN {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self { port: self.port.with_origin(origin), ..self.clone() })
    }

    fn thread(&self) -> &DataThread {
        self
    }
}

impl Place for Owner {
    fn seen_from(&self, origin: Origin) -> Cow<'_, Self> {
        match self.thread.seen_from(origin) {
            Cow::Borrowed(_) => Cow::Borrowed(self),
            Cow::Owned(thread) => Cow::Owned(Self { thread, ..self.clone() }),
        }
    }

    fn thread(&self) -> &DataThread {
        &self.thread
    }

    /// Limits, traces and whatever else a command may have set close queue threads out, or no longer.
    fn look(&self) {
        self.core.look_at_sharing();
    }
}

type Job<P> = Box<dyn FnOnce(&P) + Send>;

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

/// Reaches a thread that serves a disk from any other thread.
#[derive(Debug)]
pub struct Handle<P> {
    jobs: SyncSender<Job<P>>,
    event: Arc<File>,
    origin: Origin,
}

impl<P> Clone for Handle<P> {
    fn clone(&self) -> Self {
        Self { jobs: self.jobs.clone(), event: Arc::clone(&self.event), origin: self.origin }
    }
}

/// The thread's end of a [`Handle`].
#[derive(Debug)]
pub(crate) struct Jobs<P> {
    jobs: Receiver<Job<P>>,
    event: Arc<File>,
}

impl<P: Place> Handle<P> {
    /// A pair of ends.
    pub(crate) fn pair() -> io::Result<(Self, Jobs<P>)> {
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

    pub(crate) const fn origin(&self) -> Origin {
        self.origin
    }

    /// Wakes the thread, which looks at everything that it may have missed.
    pub fn waker(&self) -> Wake {
        let event = Arc::clone(&self.event);
        // A counter that is full wakes as well.
        Arc::new(move || drop((&*event).write(&1u64.to_ne_bytes())))
    }

    fn post(&self, job: Job<P>) -> Result<(), Gone> {
        self.jobs.send(job).map_err(|_| Gone::Ended)?;
        (&*self.event).write_all(&1u64.to_ne_bytes()).map_err(|_| Gone::Ended)
    }

    /// Runs `job` on the thread and gives its result.
    pub fn call<T: Send + 'static>(
        &self,
        within: Duration,
        job: impl FnOnce(&P) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let (reply, answer) = sync_channel(1);
        let origin = self.origin;
        self.post(Box::new(move |place| {
            // A caller that stopped waiting does not want the answer.
            let _ = reply.send(job(&place.seen_from(origin)));
        }))?;
        Self::receive(&answer, within)
    }

    /// Runs the future that `job` makes as a task of the thread and gives its result.
    pub fn call_async<T, Fut>(
        &self,
        within: Duration,
        job: impl FnOnce(P) -> Fut + Send + 'static,
    ) -> Result<T, Gone>
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let (reply, answer) = sync_channel(1);
        let origin = self.origin;
        self.post(Box::new(move |place| {
            let future = job(place.seen_from(origin).into_owned());
            place.thread().port.tasks().spawn(async move {
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

impl<P: Place> Jobs<P> {
    /// The service that takes jobs, for as long as the thread lives. Sleeps in the ring: no timer, no wake-up.
    pub(crate) async fn serve(self, place: P) {
        let mut value = PageBuf::zeroed(8);
        loop {
            let read;
            (value, read) = place.thread().uring.read_event(self.event.as_raw_fd(), value).await;
            if read.is_err() {
                return;
            }
            while let Ok(job) = self.jobs.try_recv() {
                job(&place);
                place.look();
            }
        }
    }
}
