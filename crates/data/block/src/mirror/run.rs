//! The life of a mirror on its disk: it is begun, looked after, switched over to, given up.

use std::rc::Rc;

use tapio_format::continuation::Move;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, ChainSpec, Span};

use super::far::{Far, Order, check_len};
use super::{CopyWhat, Mirror, MirrorOptions, MirrorPhase, MirrorStatus, PIECE_LEN, Report};
use crate::chain::Chain;
use crate::core::Core;
use crate::job::{Job, JobKind};

/// Copies in flight at once.
const COPIERS: usize = 4;
/// Bytes of the disk that are listed before others may run.
const LIST_LEN: u64 = 1 << 30;
/// How long the guest may be kept waiting for the requests in flight when a mirror begins or ends.
pub(super) const STALL_NS: u64 = 2_000_000_000;

/// What a switch-over has done.
#[derive(Clone, Debug)]
pub struct Pivoted {
    /// The images that the disk is on now.
    pub spec: ChainSpec,
    /// How long no request was taken, in nanoseconds.
    pub stalled_ns: u64,
}

pub(super) fn refused(detail: impl Into<std::borrow::Cow<'static, str>>) -> FormatError {
    FormatError::new(FormatErrorKind::InvalidArgument, detail)
}

impl<I: Io> Core<I> {
    fn mirror(&self) -> Result<Rc<Mirror<I::Store>>> {
        // The leaf's commit into its parent has a job, and ends by itself.
        let mirror = self.stages.taps.mirror().filter(|mirror| !mirror.merges);
        mirror.ok_or_else(|| refused("the disk has no mirror: start one first"))
    }

    /// What the disk's mirror says of itself, if it has one.
    pub fn mirror_status(&self) -> Option<MirrorStatus> {
        self.mirror().ok().map(|mirror| mirror.status())
    }

    /// Whether a mirror of this disk was lost since the last one began.
    pub fn mirror_was_lost(&self) -> bool {
        self.mirror_status().is_some_and(|status| status.phase == MirrorPhase::Degraded)
    }

    /// Begins a mirror onto the images of `target`, and copies to it in the background. Its job is ready when both
    /// sides are the same.
    ///
    /// # Errors
    /// The disk has one already, is read-only or not running; the target cannot be opened, has another length, or is
    /// not empty where it must be.
    pub async fn mirror_start(
        self: &Rc<Self>,
        target: &ChainSpec,
        options: MirrorOptions,
    ) -> Result<Rc<Job>> {
        let chain = self.open_for_mirror()?;
        let mirror = self.mirror_onto(&chain, target, options).await?;
        drop(chain);
        if let Err(error) = self.put_on(&mirror).await {
            self.give_up(&mirror).await;
            mirror.job.finish(Err(error.clone()), self.host.tasks());
            return Err(error);
        }
        self.mirror_run(&mirror);
        Ok(Rc::clone(&mirror.job))
    }

    /// Reports every change to a mirror from now on: requests that are in flight would pass it by, so there must be
    /// none.
    async fn put_on(self: &Rc<Self>, mirror: &Rc<Mirror<I::Store>>) -> Result<()> {
        let change = self.begin_change("the beginning of a mirror")?;
        self.running_chain()?;
        let held = change.hold_requests(STALL_NS).await?;
        if self.mirror().is_ok() {
            return Err(refused("the disk has got another mirror meanwhile"));
        }
        self.change_taps(|tap| tap.mirror = Some(Rc::clone(mirror)));
        held.release().await;
        Ok(())
    }

    fn open_for_mirror(self: &Rc<Self>) -> Result<Rc<Chain<I::Store>>> {
        if self.mirror().is_ok() {
            return Err(refused("the disk has a mirror already: end it first"));
        }
        drop(self.begin_change("a mirror")?);
        let chain = self.running_chain()?;
        if chain.access() == Access::ReadOnly {
            return Err(FormatError::new(
                FormatErrorKind::ReadOnly,
                "a disk that is not written needs no mirror",
            ));
        }
        Ok(chain)
    }

    /// A mirror of `chain` onto `target`, which nothing uses yet.
    ///
    /// # Errors
    /// As [`Core::mirror_start`].
    pub(crate) async fn mirror_onto(
        &self,
        chain: &Chain<I::Store>,
        target: &ChainSpec,
        options: MirrorOptions,
    ) -> Result<Rc<Mirror<I::Store>>> {
        let target = ChainSpec { layers: target.layers.clone(), access: Access::ReadWrite };
        // Before anything is opened: whether the disk can be kept track of at all.
        super::Granules::new(chain.len())?;
        let far = self.open_far(&target, chain.len(), &options, options.copy == CopyWhat::Allocated).await?;
        let subject = target.layers.first().map_or_else(String::new, ToString::to_string);
        let job = self.jobs().begin(JobKind::Mirror, subject, options.rate);
        let report = Report { say: self.host.options().report, observer: self.stages.accounting.observer() };
        let host = (self.host.tasks().clone(), report);
        let made = Mirror::new(chain.len(), far, target, (options, false), Rc::clone(&job), host);
        made.inspect_err(|error| job.finish(Err(error.clone()), self.host.tasks()))
    }

    async fn open_far(
        &self,
        target: &ChainSpec,
        len: u64,
        options: &MirrorOptions,
        must_be_empty: bool,
    ) -> Result<Rc<Far<I::Store>>> {
        let chain = self.host.open_chain(target, false).await?;
        let fits = match check_len(chain.len(), len) {
            Ok(()) if must_be_empty => check_empty(&chain).await,
            other => other,
        };
        if let Err(error) = fits {
            let _ = chain.close().await;
            return Err(match target.layers.first() {
                Some(leaf) => error.with_path(&leaf.path),
                None => error,
            });
        }
        let timeout_ns = u64::try_from(options.timeout.as_nanos()).unwrap_or(u64::MAX);
        Far::new(chain, timeout_ns, self.host.tasks().clone())
    }

    /// Starts the tasks of a mirror that the disk has.
    pub(crate) fn mirror_run(self: &Rc<Self>, mirror: &Rc<Mirror<I::Store>>) {
        self.run_copiers(mirror);
        self.host.tasks().spawn(Rc::clone(self).look_after(Rc::clone(mirror)));
    }

    pub(super) fn run_copiers(self: &Rc<Self>, mirror: &Rc<Mirror<I::Store>>) {
        mirror.copiers.set(COPIERS);
        for _ in 0..COPIERS {
            self.host.tasks().spawn(copier(Rc::clone(self), Rc::clone(mirror)));
        }
    }

    /// Looks after a mirror until it is over.
    async fn look_after(self: Rc<Self>, mirror: Rc<Mirror<I::Store>>) {
        let tasks = self.host.tasks().clone();
        if let Err(error) = self.list(&mirror).await {
            mirror.degrade(&error);
            // What else is allocated is not known, so all has to be copied if this goes on.
            mirror.lacks(Span::new(0, mirror.len));
        }
        mirror.listed.set(true);
        loop {
            if mirror.phase.get() == MirrorPhase::Ended {
                return;
            }
            if mirror.job.is_cancelled() {
                break;
            }
            mirror.job.set_total(mirror.copied.get() + mirror.status().dirty);
            if mirror.phase.get() == MirrorPhase::Copying && mirror.is_clean() {
                mirror.sync_far().await;
                // Guests may have gone on meanwhile; what they changed is on both sides or noted.
                if mirror.phase.get() == MirrorPhase::Copying && mirror.is_clean() {
                    mirror.set_phase(MirrorPhase::InSync);
                }
                continue;
            }
            mirror.job.wait(&tasks).await;
        }
        self.give_up(&mirror).await;
        let detail = "the mirror was cancelled";
        mirror.job.finish(Err(FormatError::new(FormatErrorKind::Cancelled, detail)), &tasks);
    }

    /// Notes what has to be copied. Guests write meanwhile: what they write goes to both sides, and is copied once more
    /// where it is listed later.
    pub(super) async fn list(&self, mirror: &Mirror<I::Store>) -> Result<()> {
        let mut left = Span::new(0, mirror.len);
        while !left.is_empty() && !mirror.job.is_cancelled() && mirror.phase.get() != MirrorPhase::Ended {
            let piece = left.prefix(LIST_LEN);
            match mirror.options.copy {
                CopyWhat::Nothing => return Ok(()),
                CopyWhat::Everything => mirror.lacks(piece),
                what => {
                    let chain = self.running_chain()?;
                    let extents = match what {
                        CopyWhat::Leaf => chain.leaf_extents(piece).await?,
                        _ => chain.extents(piece, usize::MAX).await?,
                    };
                    let mut at = piece.start;
                    for extent in extents {
                        if !extent.hole {
                            mirror.lacks(Span::new(at, extent.len));
                        }
                        at += extent.len;
                    }
                }
            }
            left = left.skip(piece.len);
            self.host.tasks().yield_now().await;
        }
        Ok(())
    }

    /// Takes a mirror off the disk and closes its second side.
    pub(crate) async fn give_up(&self, mirror: &Rc<Mirror<I::Store>>) {
        let tasks = self.host.tasks();
        mirror.set_phase(MirrorPhase::Ended);
        self.change_taps(|tap| {
            if tap.mirror.as_ref().is_some_and(|other| Rc::ptr_eq(other, mirror)) {
                tap.mirror = None;
            }
        });
        let far = mirror.far.borrow_mut().take();
        let Some(far) = far else { return };
        while mirror.copiers.get() > 0 {
            mirror.job.wait(tasks).await;
        }
        far.drained().await;
        if let Err(error) = far.order(Order::Close, None).await {
            self.host.report(&format!("the second side of the mirror is not closed cleanly: {error}"));
        }
        far.end();
    }

    /// Goes on with a mirror whose second side was lost, onto the same images: only what that side lacks is copied.
    ///
    /// # Errors
    /// The mirror is not degraded; the second side has still not answered what it was asked before, or cannot be
    /// opened. It stays as it is then.
    pub async fn mirror_resume(self: &Rc<Self>) -> Result<()> {
        let mirror = self.mirror()?;
        while mirror.phase.get() == MirrorPhase::Degraded && mirror.copying.get() > 0 {
            // A copy that was in flight ends soon.
            mirror.job.wait(self.host.tasks()).await;
        }
        if mirror.phase.get() != MirrorPhase::Degraded {
            return Err(refused("the mirror is not degraded: there is nothing to resume"));
        }
        let lost = mirror.far.borrow_mut().take();
        if let Some(lost) = lost {
            if lost.unanswered() > 0 {
                let detail = format!("{} requests to the second side were never answered", lost.unanswered());
                *mirror.far.borrow_mut() = Some(lost);
                return Err(refused(detail));
            }
            // Its result does not matter: the side is opened and repaired again.
            let _ = lost.chain().close().await;
            lost.end();
            let chain = Rc::downgrade(lost.chain());
            drop(lost);
            // Its tasks release the images when they have run once more.
            while chain.strong_count() > 0 {
                self.host.tasks().yield_now().await;
            }
        }
        let far = self.open_far(&mirror.target, mirror.len, &mirror.options, false).await?;
        if mirror.phase.get() != MirrorPhase::Degraded {
            far.end();
            return Err(refused("the mirror has ended meanwhile"));
        }
        *mirror.far.borrow_mut() = Some(far);
        *mirror.failure.borrow_mut() = None;
        mirror.set_phase(MirrorPhase::Copying);
        Ok(())
    }

    /// Lets the copy move `rate` bytes a second from now on; 0 is no limit.
    ///
    /// # Errors
    /// There is no mirror.
    pub fn mirror_set_rate(&self, rate: u64) -> Result<()> {
        self.mirror()?.job.set_rate(rate, self.host.tasks());
        Ok(())
    }

    /// Ends the mirror and keeps the first side. Ends when the second side is closed.
    ///
    /// # Errors
    /// There is no mirror.
    pub async fn mirror_cancel(&self) -> Result<()> {
        let mirror = self.mirror()?;
        mirror.job.cancel(self.host.tasks());
        match mirror.job.ended(self.host.tasks()).await {
            Err(error) if error.kind() == FormatErrorKind::Cancelled => Ok(()),
            other => other,
        }
    }

    /// Switches over: the disk goes on on the second side, and the first is closed. The guest waits for its requests
    /// in flight and for one flush.
    ///
    /// # Errors
    /// The two sides are not the same, or the requests in flight did not end soon. Everything stays as it was.
    pub async fn mirror_pivot(self: &Rc<Self>) -> Result<Pivoted> {
        let mirror = self.mirror()?;
        check_in_sync(&mirror)?;
        let change = self.begin_change("a switch-over")?;
        self.running_chain()?;
        let held = change.hold_requests(STALL_NS).await?;
        let chain = self.running_chain()?;
        // Requests that ended meanwhile may have left something to copy, or lost the second side.
        check_in_sync(&mirror)?;
        mirror.sync(&chain, &crate::Meter::default()).await?;
        check_in_sync(&mirror)?;
        let (near, far) = (chain.links()[0].spec(), mirror.target.layers[0].clone());
        change.note_move(Move::Away { near: near.clone(), far: far.clone() }).await?;
        // Nothing was written meanwhile, but the second side may have been lost.
        if let Err(error) = check_in_sync(&mirror) {
            if let Err(error) = change.note_move(Move::Stays { image: near, other: far }).await {
                self.host
                    .report(&format!("the disk stays where it is, but would be started elsewhere: {error}"));
            }
            return Err(error);
        }
        let far = mirror.far.borrow_mut().take().ok_or_else(|| refused("the second side is gone"))?;
        mirror.set_phase(MirrorPhase::Ended);
        self.change_taps(|tap| tap.mirror = None);
        change.replace_chain(Rc::clone(far.chain()));
        self.changes.finished();
        self.changes.moves().moved();
        far.end();
        // It was to take over from the image that is left now.
        let standby = self.changes.standby().close(&self.host);
        let stalled_ns = held.release().await;
        standby.await;
        // The guest is served already.
        let closed = chain.close().await;
        if let Err(error) = &closed {
            self.host.report(&format!("the first side of the mirror is not closed cleanly: {error}"));
        }
        drop(change);
        mirror.job.finish(Ok(()), self.host.tasks());
        Ok(Pivoted { spec: mirror.target.clone(), stalled_ns })
    }
}

/// A copier: takes runs of dirty granules until the mirror is over.
async fn copier<I: Io>(core: Rc<Core<I>>, mirror: Rc<Mirror<I::Store>>) {
    let tasks = core.host.tasks().clone();
    loop {
        let paced = match (mirror.phase.get(), mirror.peek(PIECE_LEN)) {
            (MirrorPhase::Ended, _) => break,
            (MirrorPhase::Degraded, _) | (_, None) => None,
            (_, Some(run)) => mirror.job.pace(run.len, &tasks).await.ok(),
        };
        // Another may have taken it meanwhile.
        match paced.filter(|()| mirror.far().is_some()).and_then(|()| mirror.claim(PIECE_LEN)) {
            Some((run, turn)) => {
                mirror.copy(&|| core.chain(), run, turn).await;
                // Waiters for the job see how far it is.
                mirror.job.set_state(mirror.job.info().state, &tasks);
            }
            None if mirror.phase.get() == MirrorPhase::Ended => break,
            None => mirror.more.wait(&tasks).await,
        }
    }
    mirror.copiers.set(mirror.copiers.get() - 1);
    mirror.job.set_state(mirror.job.info().state, &tasks);
}

fn check_in_sync<S: Storage>(mirror: &Mirror<S>) -> Result<()> {
    match mirror.phase.get() {
        MirrorPhase::InSync => Ok(()),
        MirrorPhase::Degraded => Err(refused("the second side was lost: resume the mirror first")),
        MirrorPhase::Ended => Err(refused("the mirror has ended")),
        MirrorPhase::Copying => Err(refused(format!(
            "the second side lacks {} bytes: wait until the mirror is in sync",
            mirror.status().dirty
        ))),
    }
}

async fn check_empty<S: Storage>(chain: &Chain<S>) -> Result<()> {
    let all = Span::new(0, chain.len());
    match chain.extents(all, 1).await?.first() {
        Some(extent) if !extent.hole || extent.len < all.len => Err(refused(
            "it holds data, but only what the disk has data for would be copied: give an empty one, or copy everything",
        )),
        _ => Ok(()),
    }
}
