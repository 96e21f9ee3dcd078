//! A plugged disk on its data thread: its parts, and its life from plug to unplug.

use std::fmt;
use std::path::Path;
use std::rc::{Rc, Weak};

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Inbox, Io};
use tapio_stat::share::{ShareFacts, ShareMember};
use tapio_types::{Access, ChainSpec, Span, TransferSizes};

use crate::chain::{Chain, LayerCounters};
use crate::change::Changes;
use crate::host::Host;
use crate::job::Jobs;
use crate::life::{DiskState, Drain, Life};
use crate::options::{CoreOptions, TapOptions};
use crate::port::{AllocationMap, Extent, Geometry, Port};
use crate::request::DiskError;
use crate::sectors::{count_for, in_units};
use crate::shared::SharingSlot;
use crate::stages::{Admission, ChangeLog, InFlight, Late, Observer, Stages, Tap};
use crate::taken::Taken;
use crate::trace::Trace;

/// A disk on its data thread.
///
/// What a request passes is [`Stages`], and `serve.rs` is its way; what replaces the images is `change`.
pub struct Core<I: Io> {
    /// The ring, the options, the log.
    pub(crate) host: Host<I>,
    /// The states between plug and unplug.
    pub(crate) life: Life,
    /// What a request passes.
    pub(crate) stages: Stages<I::Store>,
    /// What is known of changes of the chain.
    pub(crate) changes: Changes<I::Store>,
    /// Queue threads, if the disk has any.
    pub(crate) sharing: SharingSlot<I>,
}

impl<I: Io> fmt::Debug for Core<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl<I: Io> Core<I> {
    /// A disk without images yet, paused.
    pub fn new(io: I, inbox: Rc<Inbox<Taken>>, options: CoreOptions) -> Rc<Self> {
        let stages = Stages::new(inbox, io.tasks(), options.request_timeout);
        Rc::new(Self {
            host: Host::new(io, options),
            life: Life::default(),
            stages,
            changes: Changes::default(),
            sharing: SharingSlot::default(),
        })
    }

    /// The state now.
    pub fn state(&self) -> DiskState {
        self.life.state()
    }

    /// What the open chain is.
    pub fn spec(&self) -> Option<ChainSpec> {
        self.chain().map(|chain| chain.spec())
    }

    /// The open chain.
    pub(crate) fn chain(&self) -> Option<Rc<Chain<I::Store>>> {
        self.stages.images.chain()
    }

    /// The chain, while requests are served.
    pub(crate) fn running_chain(&self) -> Result<Rc<Chain<I::Store>>> {
        match (self.state(), self.chain()) {
            (DiskState::Running, Some(chain)) => Ok(chain),
            (state, _) => {
                let detail = format!("the disk is {state}, not running");
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
            }
        }
    }

    /// What each layer has done, leaf first.
    pub fn layer_counters(&self) -> Vec<LayerCounters> {
        self.chain().map(|chain| chain.counters()).unwrap_or_default()
    }

    /// Requests that were answered with an error.
    pub fn failures(&self) -> u64 {
        self.stages.accounting.failures()
    }

    /// Requests that wait for space now.
    pub fn waiting_for_space(&self) -> usize {
        self.stages.gate.aside()
    }

    /// Whether the disk had a standby that had not taken over when it was paused the last time.
    pub fn standby_waited(&self) -> bool {
        self.changes.standby().waited()
    }

    /// Sectors that were written to the standby since the storage was full.
    pub fn redirected_sectors(&self) -> u64 {
        self.changes.standby().redirected_sectors()
    }

    /// Whether the leaf is a standby that took over.
    pub fn is_on_standby(&self) -> bool {
        self.chain().is_some_and(|chain| self.changes.standby().is_leaf_of(&chain))
    }

    /// Where requests wait for limits and for pages of a pool.
    pub const fn admission(&self) -> &Rc<Admission> {
        &self.stages.admission
    }

    /// Jobs: long work in the background of the guest's requests.
    pub const fn jobs(&self) -> &Jobs {
        self.changes.jobs()
    }

    /// Requests that take longer than they may, and that the kernel does not give back.
    pub fn stuck(&self) -> usize {
        self.stages.timeouts.stuck()
    }

    /// The requests of the owner's thread that are in the storage for the longest, at most so many.
    pub fn oldest(&self, count: usize) -> Vec<InFlight> {
        self.stages.timeouts.oldest(self.host.tasks().turn_ns(), count)
    }

    /// Where the trace points of the disk go.
    pub(crate) const fn trace(&self) -> &Rc<Trace> {
        self.stages.accounting.trace()
    }

    /// Shares the throughput of a device with other disks from now on, or, with `None`, not any more.
    pub fn share_device(&self, member: Option<ShareMember>) {
        if let Some(member) = &member {
            member.set_clock(self.host.io().now_ns());
        }
        self.stages.fairness.set(member, self.host.tasks());
    }

    /// Calls `run` with the disk's place at its device, if it shares one.
    pub fn with_share<T>(&self, run: impl FnOnce(&mut ShareMember) -> T) -> Option<T> {
        self.stages.fairness.with(run)
    }

    /// What is known of the device that the disk shares.
    pub fn share_facts(&self) -> Option<ShareFacts> {
        self.stages.fairness.facts()
    }

    /// A queue thread has found that it is time to look at the other disks of the device.
    pub(crate) fn look_at_device(&self) {
        self.stages.fairness.look_now(self.host.tasks());
    }

    /// Sets how data goes to the storages, on all threads of the disk: transfers that begin from now on.
    pub fn set_transfers(&self, sizes: TransferSizes) {
        self.host.transfers().sizes().set(sizes);
    }

    /// How data goes to the storages.
    pub fn transfers(&self) -> TransferSizes {
        self.host.transfers().sizes().get()
    }

    /// Lets `observer` hear of every request from now on.
    pub fn observe(&self, observer: Rc<dyn Observer>) {
        self.stages.accounting.observe(observer);
    }

    /// Queue threads beside this one.
    pub fn queue_threads(&self) -> usize {
        self.sharing.count()
    }

    /// A port for front ends. The disk must have images.
    pub fn port(self: &Rc<Self>) -> Option<Port> {
        let geometry = self.geometry()?;
        let map = Rc::new(Map(Rc::downgrade(self)));
        let (inbox, admission) = (self.stages.gate.inbox(), &self.stages.admission);
        let tasks = self.host.tasks().clone();
        Some(Port::new(Rc::clone(inbox), Rc::clone(admission), tasks, geometry, map, Rc::clone(self.trace())))
    }

    /// The disk as a guest sees it, while it has images.
    pub fn geometry(&self) -> Option<Geometry> {
        let chain = self.chain()?;
        let sector_len = self.life.sector_len();
        Some(Geometry {
            len: chain.len() / u64::from(sector_len) * u64::from(sector_len),
            logical_block_len: sector_len,
            physical_block_len: 4096,
            read_only: chain.access() == Access::ReadOnly,
            transfer_max: 32 << 20,
        })
    }

    /// Opens the images of `spec` and serves requests.
    ///
    /// # Errors
    /// An image cannot be opened, or does not belong to the one above it. The disk stays paused.
    pub async fn resume(self: &Rc<Self>, spec: &ChainSpec) -> Result<()> {
        self.resume_with(spec, &TapOptions::default()).await
    }

    /// [`Core::resume`] with the taps that the disk has from the first request on.
    ///
    /// # Errors
    /// As [`Core::resume`], for any of them.
    pub async fn resume_with(self: &Rc<Self>, spec: &ChainSpec, taps: &TapOptions) -> Result<()> {
        if self.state() != DiskState::Paused {
            let detail = format!("the disk is {}, not paused", self.state());
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        // Opening waits for the storage: another command may come meanwhile.
        let change = self.begin_change("opening the images")?;
        let overlaid = taps.standby.as_ref().is_some_and(|standby| standby.took_over);
        let chain = self.host.open_chain(spec, overlaid).await?;
        let wanted = self.host.options().sector_len;
        let keys = self.host.check_keys(&chain, self.changes.moves().has_moved());
        let opened = match keys.and_then(|()| self.life.settle_sectors(&chain, wanted)) {
            Ok(()) => self.open_taps(&chain, taps).await,
            Err(error) => Err(error),
        };
        let opened = match opened {
            Ok(()) if self.state() != DiskState::Paused => {
                self.close_taps().await;
                let detail = format!("the disk is {} meanwhile", self.state());
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
            }
            opened => opened,
        };
        if let Err(error) = opened {
            self.host.close_chain(&chain).await.ok();
            return Err(error);
        }
        chain.links()[0].layer.ask_for_room();
        self.stages.images.replace(Rc::new(chain));
        self.life.run();
        drop(change);
        if let Some(mirror) = self.stages.taps.mirror() {
            self.mirror_run(&mirror);
        }
        self.stages.open();
        self.open_queue_threads();
        self.stages.gate.tell();
        if self.stages.timeouts.begin_watch() {
            self.host.tasks().spawn(Rc::clone(self).watch());
        }
        Ok(())
    }

    /// Opens the taps of a disk on `chain`. The mirror still has to be run.
    ///
    /// # Errors
    /// One of them cannot be opened; the others are closed again. The disk is read-only.
    async fn open_taps(&self, chain: &Chain<I::Store>, taps: &TapOptions) -> Result<()> {
        let wanted = taps.mirror.is_some() || taps.standby.is_some() || taps.log.is_some();
        if wanted && chain.access() == Access::ReadOnly {
            let detail = "a disk that is not written has no second image and no log: open it without them";
            return Err(FormatError::new(FormatErrorKind::ReadOnly, detail));
        }
        let opened = self.try_open_taps(chain, taps).await;
        if opened.is_err() {
            self.close_taps().await;
        }
        opened
    }

    async fn try_open_taps(&self, chain: &Chain<I::Store>, taps: &TapOptions) -> Result<()> {
        if let Some(path) = &taps.log {
            let log = self.open_log(path, chain.len()).await?;
            self.change_taps(|tap| tap.log = Some(log));
        }
        if let Some(standby) = &taps.standby {
            self.changes.standby().open(&self.host, chain, standby).await?;
        }
        if let Some((target, options)) = &taps.mirror {
            let mirror = self.mirror_onto(chain, target, options.clone()).await?;
            self.change_taps(|tap| tap.mirror = Some(mirror));
        }
        Ok(())
    }

    /// Opens the log of changed blocks at `path` for a disk of `len` bytes, and notes there that it is not to be
    /// trusted.
    pub(crate) async fn open_log(&self, path: &Path, len: u64) -> Result<Rc<ChangeLog<I::Store>>> {
        let opened = match self.host.open_file(path, Access::ReadWrite, "the log of changed blocks").await {
            Ok(store) => ChangeLog::open(store, len).await,
            Err(error) => Err(error),
        };
        opened.map(Rc::new).map_err(|error| error.with_path(path))
    }

    /// Sets which receivers hear of changes.
    pub(crate) fn change_taps(&self, change: impl FnOnce(&mut Tap<I::Store>)) {
        self.stages.taps.change(change);
        self.look_at_sharing();
    }

    /// Closes the taps of a disk whose images are closed; its mirror has ended by then.
    async fn close_taps(&self) {
        self.changes.standby().close(&self.host).await;
        if let Err(error) = self.stages.taps.close().await {
            self.host.report(&format!("the log of changed blocks is not complete: {error}"));
        }
    }

    /// The task that cancels and reports requests that take too long.
    async fn watch(self: Rc<Self>) {
        let (io, timeouts) = (self.host.io(), &self.stages.timeouts);
        loop {
            timeouts.next_look(io.tasks()).await;
            while let Some(late) = timeouts.next_late(io.tasks().turn_ns()) {
                match late {
                    Late::Cancel(task) => io.cancel(task),
                    Late::Stuck { what, .. } => self.host.report(&what),
                }
            }
            // Before an answer goes out, which is another task's.
            self.look_at_sharing();
            // A request that waits behind a late one may be late itself.
            self.stages.gate.tell();
        }
    }

    /// Stops taking requests, waits for those in flight, and closes the images.
    ///
    /// # Errors
    /// The images could not be closed cleanly; they are closed all the same, and the next opening repairs them.
    pub async fn pause(&self) -> Result<()> {
        let gate = &self.stages.gate;
        match self.life.drain() {
            Drain::Begun => gate.expect_ends(),
            Drain::Joined => {
                // Another pause is at work, perhaps closing already: it has ended when the state says so, and not when
                // there is nothing left to take from the chain.
                while self.state() == DiskState::Draining {
                    gate.news().await;
                }
                return self.life.paused();
            }
            Drain::Over => return Ok(()),
        }
        self.drain_queue_threads().await;
        // Requests that were taken are served without waiting for their turn.
        self.stages.admission.admit_all();
        gate.close();
        gate.tell();
        self.changes.jobs().stop_all(self.host.tasks()).await;
        while self.changes.at_work().is_some() {
            gate.news().await;
        }
        while gate.at_images() > 0 {
            gate.news().await;
        }
        let chain = self.stages.images.take();
        self.sharing.take_images_back(self.host.tasks()).await;
        // The next opening of the chain finds out which parent it is.
        self.changes.finished();
        let result = match &chain {
            Some(chain) => self.host.close_chain(chain).await,
            None => Ok(()),
        };
        drop(chain);
        self.changes.standby().note_pause();
        self.close_taps().await;
        // A caller that is told of the pause may open the images.
        self.host.io().closed().await;
        self.life.pause(result.clone());
        gate.tell();
        result
    }

    /// Pauses for good: requests that wait for space fail.
    ///
    /// # Errors
    /// As [`Core::pause`].
    pub async fn close(&self) -> Result<()> {
        let (result, gate) = (self.pause().await, &self.stages.gate);
        self.life.close();
        gate.tell();
        while !gate.is_empty() {
            gate.news().await;
        }
        drop(self.stages.admission.set_pages(None));
        result
    }
}

/// Answers what is allocated. Not the one that keeps the disk: its front ends are held by requests, which it holds.
struct Map<I: Io>(Weak<Core<I>>);

impl<I: Io> AllocationMap for Map<I> {
    fn extents(
        &self,
        span: Span,
        count_max: usize,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<Vec<Extent>, DiskError>>>> {
        let core = self.0.upgrade();
        Box::pin(async move {
            let core = core.ok_or(DiskError::Io(libc::ESHUTDOWN))?;
            let chain = loop {
                match core.chain() {
                    Some(chain) => break chain,
                    None if core.life.is_closed() => {
                        return Err(DiskError::Io(libc::ESHUTDOWN));
                    }
                    None => core.stages.gate.news().await,
                }
            };
            if !span.fits(chain.len()) {
                return Err(DiskError::OutOfRange);
            }
            let unit = core.life.sector_len();
            let (timeouts, tasks) = (&core.stages.timeouts, core.host.tasks());
            let place = timeouts.begin_question(span, tasks);
            let in_time = || !timeouts.is_over(place);
            let found = chain.extents_while(span, count_for(count_max, unit), &in_time).await;
            timeouts.end(place);
            let found = found.map_err(|error| DiskError::Io(error.errno()))?;
            let to_end = found.iter().map(|extent| extent.len).sum::<u64>() >= span.len;
            Ok(in_units(found, unit, count_max, to_end))
        })
    }
}
