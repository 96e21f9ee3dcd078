//! A disk with its data thread, as the other threads of the process hold it.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use tapio_format::FormatError;
use tapio_ring::uring::{Caching, Uring, UringConfig};
use tapio_ring::{Executor, Inbox, Io, Polling, PollingConfig};
use tapio_stat::pool::PoolMember;
use tapio_stat::share::ShareFacts;
use tapio_types::{ChainSpec, IoLimits, TransferSizes};

use crate::core::Core;
use crate::data_thread::{DataThread, Gone, Handle, Owner};
use crate::disk_handle::DiskHandle;
use crate::front::Fronts;
use crate::io::DiskIo;
use crate::life::DiskState;
use crate::options::{CoreOptions, TapOptions};
use crate::port::Geometry;
use crate::shared::{QueueOptions, QueueThreads, ThreadOptions};
use crate::stages::{Admission, Delays, InFlight, Observer, PoolFacts};
use crate::taken::Taken;
use crate::trace::Trace;

/// How a disk runs.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Requests in flight at once, over all front ends.
    pub queue_depth: usize,
    /// Bytes of the buffer pool for front ends without shared memory, at most.
    pub pool_len: usize,
    /// Whether files are opened past the page cache.
    pub caching: Caching,
    /// Adaptive polling.
    pub polling: PollingConfig,
    /// Threads that may serve the disk.
    pub threads: usize,
    /// What the disk does when its storage is full, and where its logs go.
    pub core: CoreOptions,
    /// Called on the data thread at its start, when it has its ring: it may give up what it does not need any more.
    pub at_start: Option<fn()>,
    /// The taps that it has from the first request on.
    pub taps: TapOptions,
    /// Called on the data thread each time it has been without work for a while and gave its memory back.
    pub at_rest: Option<fn()>,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            queue_depth: 256,
            pool_len: 32 << 20,
            caching: Caching::Direct,
            polling: PollingConfig::OFF,
            threads: 1,
            core: CoreOptions::default(),
            at_start: None,
            taps: TapOptions::default(),
            at_rest: None,
        }
    }
}

/// Why a disk did not do as it was told.
#[derive(Clone, Debug)]
pub enum DiskFailure {
    /// Its images.
    Format(FormatError),
    /// Its thread.
    Gone(Gone),
    /// The host: no thread, no ring.
    Host(String),
}

impl fmt::Display for DiskFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => error.fmt(f),
            Self::Gone(gone) => gone.fmt(f),
            Self::Host(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for DiskFailure {}

impl DiskFailure {
    /// The error number that stands for this failure.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Format(error) => error.errno(),
            Self::Gone(Gone::Ended) => libc::ESRCH,
            Self::Gone(Gone::TimedOut) => libc::ETIMEDOUT,
            Self::Host(_) => libc::EIO,
        }
    }
}

impl From<FormatError> for DiskFailure {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

impl From<Gone> for DiskFailure {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

/// A plugged disk: one data thread, its ring and its images.
#[derive(Debug)]
pub struct Disk {
    remote: DiskHandle,
    geometry: Geometry,
    thread: Mutex<Option<JoinHandle<()>>>,
}

type Started = Result<(Handle<Owner>, Geometry), DiskFailure>;

impl Disk {
    /// Starts a data thread and opens the images of `spec` on it.
    ///
    /// # Errors
    /// No thread or ring to be had, or an image that cannot be opened.
    pub fn start(spec: ChainSpec, options: DiskOptions) -> Result<Self, DiskFailure> {
        let queues = Arc::new(QueueThreads::new(options.threads, thread_options(&options)));
        let (reply, answer) = sync_channel::<Started>(1);
        let run = move || run(&spec, options, &|started| drop(reply.send(started)));
        let thread = Builder::new()
            .name("tapio-data".into())
            .stack_size(256 << 10)
            .spawn(run)
            .map_err(|error| DiskFailure::Host(format!("cannot start a data thread: {error}")))?;
        let started = answer.recv().map_err(|_| DiskFailure::Gone(Gone::Ended))?;
        let (owner, geometry) = started?;
        let remote = DiskHandle::new(owner, queues);
        Ok(Self { remote, geometry, thread: Mutex::new(Some(thread)) })
    }

    /// How front ends and others reach the data thread.
    pub const fn remote(&self) -> &DiskHandle {
        &self.remote
    }

    /// The disk as a guest saw it when it was opened.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Stops taking requests, waits for those in flight and closes the images. Front ends stay attached: their
    /// guests wait.
    ///
    /// # Errors
    /// Not within the time (the disk goes on draining), or not closed cleanly.
    pub fn pause(&self, within: Duration) -> Result<(), DiskFailure> {
        Ok(self.remote.call_async(within, |data_thread| async move { data_thread.core.pause().await })??)
    }

    /// Opens images, the same or others of the same size, and goes on.
    ///
    /// # Errors
    /// An image cannot be opened, or has another size; the disk stays paused.
    pub fn resume(&self, spec: ChainSpec, within: Duration) -> Result<(), DiskFailure> {
        self.resume_with(spec, TapOptions::default(), within)
    }

    /// [`Disk::resume`] with the taps that the disk has from the first request on.
    ///
    /// # Errors
    /// As [`Disk::resume`], for any of them.
    pub fn resume_with(
        &self,
        spec: ChainSpec,
        taps: TapOptions,
        within: Duration,
    ) -> Result<(), DiskFailure> {
        Ok(self.remote.call_async(within, move |data_thread| async move {
            data_thread.core.resume_with(&spec, &taps).await?;
            data_thread.tell_geometry().await;
            Ok::<_, FormatError>(())
        })??)
    }

    /// Makes the disk at least `len` bytes long while it is used; front ends hear of it.
    ///
    /// # Errors
    /// As [`Core::grow`].
    pub fn grow(&self, len: u64, within: Duration) -> Result<Geometry, DiskFailure> {
        Ok(self.remote.call_async(within, move |data_thread| async move {
            let geometry = data_thread.core.grow(len).await?;
            data_thread.tell_geometry().await;
            Ok::<_, FormatError>(geometry)
        })??)
    }

    /// What the disk does now.
    ///
    /// # Errors
    /// The thread does not answer.
    pub fn status(&self, within: Duration) -> Result<DiskStatus, DiskFailure> {
        Ok(self.remote.call(within, |data_thread| data_thread.status())?)
    }

    /// Shares a pool of pages with other disks until it is closed.
    ///
    /// # Errors
    /// The thread does not answer.
    pub fn share_pages(&self, member: PoolMember, within: Duration) -> Result<(), DiskFailure> {
        Ok(self.remote.call(within, move |data_thread| data_thread.share_pages(member))?)
    }

    /// Lets an observer, made on the data thread, hear of every request.
    ///
    /// # Errors
    /// The thread does not answer.
    pub fn observe(
        &self,
        make: impl FnOnce(&Owner) -> Rc<dyn Observer> + Send + 'static,
        within: Duration,
    ) -> Result<(), DiskFailure> {
        Ok(self.remote.call(within, move |data_thread| data_thread.core.observe(make(data_thread)))?)
    }

    /// Closes the images and ends the thread. Front ends are to be detached before.
    ///
    /// # Errors
    /// Not within the time, or not closed cleanly.
    pub fn close(&self, within: Duration) -> Result<(), DiskFailure> {
        let result =
            self.remote.call_async(within, |data_thread| async move { data_thread.core.close().await });
        self.remote.queues().end(within, result.is_ok());
        let _ = self.remote.call(within, |data_thread| data_thread.port.tasks().stop());
        if result.is_ok()
            && let Some(thread) = self.thread.lock().take()
        {
            let _ = thread.join();
        }
        Ok(result??)
    }
}

/// The ring of each thread of the disk.
fn ring_config(options: &DiskOptions) -> UringConfig {
    UringConfig { pool_len: options.pool_len, caching: options.caching, ..UringConfig::default() }
}

fn thread_options(options: &DiskOptions) -> ThreadOptions {
    ThreadOptions {
        queue_depth: options.queue_depth,
        ring: ring_config(options),
        polling: options.polling,
        queue: QueueOptions { request_timeout: options.core.request_timeout, report: options.core.report },
        at_start: options.at_start,
        at_rest: options.at_rest,
    }
}

/// Requests of a status, at most.
const OLDEST_MAX: usize = 64;

/// What a disk does now.
#[derive(Clone, Debug)]
pub struct DiskStatus {
    /// Its state.
    pub state: DiskState,
    /// Its images, leaf first; none while paused.
    pub spec: Option<ChainSpec>,
    /// What each image has done.
    pub layers: Vec<crate::LayerCounters>,
    /// Requests in flight.
    pub in_flight: usize,
    /// Of these, requests that wait for space.
    pub waiting_for_space: usize,
    /// Of these, requests that take longer than they may and that the kernel does not give back.
    pub stuck: usize,
    /// Requests in the storage, those that began first: of the owner's thread, unless requests have no time limit.
    pub oldest: Vec<InFlight>,
    /// Requests answered with an error.
    pub failures: u64,
    /// The limits in force.
    pub limits: IoLimits,
    /// What limits and the pool have cost.
    pub delays: Delays,
    /// The pool that the disk shares.
    pub pool: Option<PoolFacts>,
    /// The device that the disk shares with others.
    pub share: Option<ShareFacts>,
    /// How its data goes to the storages.
    pub transfers: TransferSizes,
    /// Sectors that went to the standby leaf because the storage was full.
    pub redirected_sectors: u64,
    /// The leaf is the standby, which took over.
    pub on_standby: bool,
    /// The mirror was lost.
    pub mirror_lost: bool,
    /// The disk had a standby that had not taken over when it was paused the last time.
    pub standby_waited: bool,
    /// What the ring cost.
    pub ring: tapio_ring::uring::UringCounters,
    /// What polling cost and brought.
    pub polling: tapio_ring::PollingCounters,
}

impl DataThread {
    /// What polling cost and brought; cheap enough for the path of a request.
    pub fn polling_counters(&self) -> tapio_ring::PollingCounters {
        self.polling.borrow().counters()
    }

    /// Sets adaptive polling.
    pub fn set_polling(&self, config: PollingConfig) {
        self.polling.borrow_mut().set(config);
    }
}

impl Owner {
    /// Has guests see the disk as it is now.
    pub async fn tell_geometry(&self) {
        let Some(geometry) = self.core.geometry() else { return };
        // First, because a guest that hears of it may use it by any thread.
        self.core.sharing.know(geometry, self.core.host.tasks()).await;
        self.port.set_geometry(geometry);
    }

    /// Where requests wait for limits and for pages of a pool.
    pub fn admission(&self) -> &Rc<Admission> {
        self.core.admission()
    }

    /// Where the trace points of the disk go.
    pub fn trace(&self) -> &Trace {
        self.core.trace()
    }

    /// Shares a pool, and listens to its bell: an operation in the ring, no timer and no thread.
    fn share_pages(&self, member: PoolMember) {
        let bell = member.wake_fd();
        drop(self.admission().set_pages(Some(Box::new(member))));
        let (uring, core) = (self.uring.clone(), Rc::downgrade(&self.core));
        self.port.tasks().spawn(async move {
            // The descriptor lives as long as the core has the pool, and a closed one ends this.
            while uring.poll(bell, libc::POLLIN).await.is_ok() {
                match core.upgrade() {
                    Some(core) if core.admission().pool().is_some() => core.admission().bell_rang(),
                    _ => return,
                }
            }
        });
    }

    /// What the disk does now.
    pub fn status(&self) -> DiskStatus {
        DiskStatus {
            state: self.core.state(),
            spec: self.core.spec(),
            layers: self.core.layer_counters(),
            in_flight: self.inbox.in_flight() + self.core.sharing.in_flight(),
            waiting_for_space: self.core.waiting_for_space(),
            stuck: self.core.stuck() + self.core.sharing.stuck(),
            oldest: self.core.oldest(OLDEST_MAX),
            failures: self.core.failures(),
            limits: self.admission().limits(),
            delays: self.admission().delays(),
            pool: self.admission().pool(),
            share: self.core.share_facts(),
            transfers: self.core.transfers(),
            redirected_sectors: self.core.redirected_sectors(),
            on_standby: self.core.is_on_standby(),
            mirror_lost: self.core.mirror_was_lost(),
            standby_waited: self.core.standby_waited(),
            ring: self.uring.counters(),
            polling: self.polling.borrow().counters(),
        }
    }
}

/// The data thread.
fn run(spec: &ChainSpec, options: DiskOptions, started: &dyn Fn(Started)) {
    let uring = match Uring::new(ring_config(&options)) {
        Ok(uring) => uring,
        Err(error) => return started(Err(DiskFailure::Host(format!("io_uring cannot be set up: {error}")))),
    };
    if let Some(at_start) = options.at_start {
        at_start();
    }
    let inbox: Rc<Inbox<Taken>> = Inbox::new(options.queue_depth);
    let core = Core::new(DiskIo::new(uring.clone(), options.core.report), Rc::clone(&inbox), options.core);
    let polling = Rc::new(RefCell::new(Polling::new(options.polling)));
    let tasks = uring.tasks().clone();
    let serving = Rc::clone(&core);
    let make = move |request| Rc::clone(&serving).serve(request);
    let mut executor = Executor::new(tasks.clone(), Rc::clone(&inbox), make, Rc::clone(&polling));
    let opening = Rc::clone(&core);
    let (spec, taps) = (spec.clone(), options.taps);
    let opened = async move { opening.resume_with(&spec, &taps).await };
    if let Err(error) = executor.block_on(&uring, &mut (), opened) {
        executor.end(&uring);
        return started(Err(error.into()));
    }
    let (remote, jobs) = match Handle::pair() {
        Ok(pair) => pair,
        Err(error) => return started(Err(DiskFailure::Host(format!("cannot make an eventfd: {error}")))),
    };
    let Some(port) = core.port() else { return started(Err(DiskFailure::Gone(Gone::Ended))) };
    let geometry = port.geometry();
    let fronts = Fronts::on_thread(uring.pool().clone(), options.at_rest, Rc::clone(core.trace()));
    let mut hooks = fronts.clone();
    let thread = DataThread { port, uring: uring.clone(), fronts, polling };
    tasks.spawn(jobs.serve(Owner { thread, core, inbox }));
    started(Ok((remote, geometry)));
    executor.run(&uring, &mut hooks);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_task_is_small() {
        let len = crate::task_len::of(|(core, request): (Rc<Core<DiskIo>>, Taken)| core.serve(request));
        assert!(len <= 4096, "a request task takes {len} bytes; a disk has hundreds of them");
    }
}
