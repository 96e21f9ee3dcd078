//! Questions to disk processes, each on a thread of its own: a storage that hangs does not delay the other devices.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use tapio_control::{DiskInfo, Polling};
use tapio_stat::VbdId;

use crate::disks::{Disks, Link, Linked, Order, Trouble};

/// Stack of such a thread; it sends a message and reads one.
const STACK_LEN: usize = 512 << 10;

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Job {
    Connect(Box<Order>),
    Disconnect { link: Link, force: bool },
    Info(Link),
    SetPolling(Link, Polling),
}

/// How it went.
#[derive(Debug)]
pub(crate) enum Outcome {
    Connected(Result<Box<Linked>, Trouble>),
    Disconnected(Result<(), Trouble>),
    Info(Result<DiskInfo, Trouble>),
    PollingSet(Polling, Result<(), Trouble>),
}

/// Jobs that run. A device has one at a time.
#[derive(Debug)]
pub(crate) struct Jobs<D> {
    disks: Arc<D>,
    sender: Sender<(VbdId, Outcome)>,
    receiver: Receiver<(VbdId, Outcome)>,
    wake: UnixStream,
    waker: Arc<UnixStream>,
}

impl<D: Disks> Jobs<D> {
    pub(crate) fn new(disks: Arc<D>) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let (wake, waker) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        Ok(Self { disks, sender, receiver, wake, waker: Arc::new(waker) })
    }

    /// Becomes readable when one has ended.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    pub(crate) fn start(&self, id: VbdId, job: Job) {
        let (disks, sender, waker) = (self.disks.clone(), self.sender.clone(), self.waker.clone());
        let failed = failure(&job);
        let thread = std::thread::Builder::new().name("tapback-job".into()).stack_size(STACK_LEN);
        let started = thread.spawn(move || {
            let outcome = match job {
                Job::Connect(order) => Outcome::Connected(disks.connect(&order).map(Box::new)),
                Job::Disconnect { link, force } => Outcome::Disconnected(disks.disconnect(&link, force)),
                Job::Info(link) => Outcome::Info(disks.info(&link)),
                Job::SetPolling(link, polling) => {
                    Outcome::PollingSet(polling, disks.set_polling(&link, polling))
                }
            };
            // The receiver is gone when the program ends.
            let _ = sender.send((id, outcome));
            let _ = (&*waker).write(&[1]);
        });
        if let Err(error) = started {
            let trouble = Trouble::Absent(format!("no thread: {error}"));
            let _ = self.sender.send((id, failed(trouble)));
            let _ = (&*self.waker).write(&[1]);
        }
    }

    /// One that has ended.
    pub(crate) fn take(&self) -> Option<(VbdId, Outcome)> {
        let taken = self.receiver.try_recv().ok();
        if taken.is_none() {
            let mut bytes = [0; 64];
            while matches!((&self.wake).read(&mut bytes), Ok(len) if len > 0) {}
            // What ended between the look and the reading has woken in vain; look again.
            return self.receiver.try_recv().ok();
        }
        taken
    }
}

fn failure(job: &Job) -> Box<dyn FnOnce(Trouble) -> Outcome> {
    match job {
        Job::Connect(_) => Box::new(|trouble| Outcome::Connected(Err(trouble))),
        Job::Disconnect { .. } => Box::new(|trouble| Outcome::Disconnected(Err(trouble))),
        Job::Info(_) => Box::new(|trouble| Outcome::Info(Err(trouble))),
        Job::SetPolling(_, polling) => {
            let polling = *polling;
            Box::new(move |trouble| Outcome::PollingSet(polling, Err(trouble)))
        }
    }
}
