//! Commit of the leaf into its parent, under a guest: a mirror whose second side is what lies below the leaf.
//!
//! ```text
//!   guest's write ──▶ range held ──┬──▶ leaf                  what the leaf holds is not seen below it,
//!                                  └──▶ parent                what it does not hold is one place on both sides
//!   copier ── what the leaf holds ──▶ range held ──▶ parent
//! ```
//!
//! ```text
//! 1  the parent is opened for writing, made as large as the leaf, and put in its own place in the chain
//! 2  every change of the guest goes to both; what the leaf holds is copied      cancellable, at the job's rate
//! 3  requests are held back; what little is left is copied, both are made durable
//! 4  the leaf is emptied, durably                                               `VhdLayer::empty`
//! 5  requests go on with the parent as the leaf; the old leaf is closed         its file is the caller's to remove
//! ```
//!
//! The parent is open *once*: as the second side of the mirror and as the layer below the leaf. So a sector that the
//! leaf does not hold is the same on both sides whatever is done to the parent, and one that it holds is hidden. The
//! parent's sectors change in one way only: to something that the guest wrote there, or still reads there. Hence
//! whatever dies when, the chain with the leaf on top reads right:
//!
//! - the leaf has a sector durably: it hides the parent's;
//! - it has lost a sector that was not flushed: the parent has what was there before, or something written later;
//! - it is being emptied (step 4): the parent has all of it durably, and no request writes.
//!
//! Two more things keep that true. The leaf gives no blocks back meanwhile, because what would come to light below them
//! may not be durable yet; nor does the parent, because requests that read it through the leaf are not counted as its
//! visitors (`change/parent.rs`). And a leaf whose emptying failed half way answers no write before it is whole again
//! on its storage.

use std::rc::Rc;
use std::time::Duration;

use tapio_format::continuation::Move;
use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::Access;

use super::far::Far;
use super::run::{STALL_NS, refused};
use super::{CopyWhat, GRANULE_LEN, Mirror, MirrorOptions, MirrorPhase, PIECE_LEN, Report};
use crate::chain::{Chain, Link};
use crate::change::Change;
use crate::job::Job;
use crate::meter::Meter;

/// How long the parent may take for an answer: as long as any image of the disk.
const TIMEOUT: Duration = crate::stages::REQUEST_TIMEOUT;
/// What may be left to copy while requests are held back.
const REST_MAX: u64 = 4 << 20;
/// Between two attempts to switch over.
const RETRY_NS: u64 = 200_000_000;
/// Attempts that fail before the commit is given up: each of them holds the guest up for a moment.
const FAILURES_MAX: u32 = 10;

/// The chain with the parent open for writing, and the mirror onto that.
type Merge<S> = (Rc<Chain<S>>, Rc<Mirror<S>>);

fn cancelled() -> FormatError {
    FormatError::new(FormatErrorKind::Cancelled, "the commit was cancelled")
}

impl<I: Io> Change<I> {
    /// Commits the leaf of the open chain into its parent, as `job`.
    ///
    /// # Errors
    /// `Cancelled`; the disk is not running; the parent cannot be opened for writing or made exactly as large as the
    /// leaf; the storages'. The chain is as before then, and whatever was copied does no harm.
    pub(crate) async fn commit_leaf(&self, job: &Rc<Job>) -> Result<()> {
        let parent = Box::pin(self.open_parent(1)).await?;
        let begun = Box::pin(self.merge_into(&parent, job)).await;
        let (near, mirror) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.core().host.close_unused(&parent.layer).await;
                return Err(error);
            }
        };
        drop(parent);
        let merged = Box::pin(self.see_merge_through(&near, &mirror)).await;
        if merged.is_err() {
            Box::pin(self.end_merge(&near, &mirror)).await;
        }
        merged
    }

    /// Lets the disk go on with `parent` in its place, and with a mirror onto it.
    async fn merge_into(&self, parent: &Rc<Link<I::Store>>, job: &Rc<Job>) -> Result<Merge<I::Store>> {
        let held = self.hold_requests(STALL_NS).await?;
        if job.is_cancelled() {
            return Err(cancelled());
        }
        let chain = self.core().running_chain()?;
        if parent.layer.virtual_len() != chain.len() {
            let error = parent_too_large(parent.layer.virtual_len(), chain.len());
            return Err(error.with_path(&parent.spec().path));
        }
        if self.core().stages.taps.mirror().is_some() {
            return Err(refused("the disk has got a mirror meanwhile: end it first"));
        }
        let mut below = vec![Rc::clone(parent)];
        below.extend(chain.links()[2..].iter().cloned());
        let mirror = self.merging_mirror(chain.len(), below, job)?;
        let near = self.put_in_place(&chain, 1, Rc::clone(parent));
        self.core().change_taps(|tap| tap.mirror = Some(Rc::clone(&mirror)));
        held.release().await;
        self.core().run_copiers(&mirror);
        Ok((near, mirror))
    }

    fn merging_mirror(
        &self,
        len: u64,
        below: Vec<Rc<Link<I::Store>>>,
        job: &Rc<Job>,
    ) -> Result<Rc<Mirror<I::Store>>> {
        let tasks = self.core().host.tasks();
        let below = Chain::new(below, Access::ReadWrite, tasks.clone(), self.core().host.transfers());
        let options = MirrorOptions { copy: CopyWhat::Leaf, rate: 0, timeout: TIMEOUT };
        let timeout_ns = u64::try_from(options.timeout.as_nanos()).unwrap_or(u64::MAX);
        let target = below.spec();
        let far = Far::new(below, timeout_ns, tasks.clone())?;
        // The commit's own end is reported by its job.
        let report = Report { say: self.core().host.options().report, observer: None };
        let host = (tasks.clone(), report);
        let made = Mirror::new(len, Rc::clone(&far), target, (options, true), Rc::clone(job), host);
        made.inspect_err(|_| far.end())
    }

    /// Waits until all is copied and switches over.
    async fn see_merge_through(
        &self,
        near: &Rc<Chain<I::Store>>,
        mirror: &Rc<Mirror<I::Store>>,
    ) -> Result<()> {
        let (tasks, job) = (self.core().host.tasks(), &mirror.job);
        self.core().list(mirror).await?;
        mirror.listed.set(true);
        let mut failures = 0;
        loop {
            if job.is_cancelled() {
                return Err(cancelled());
            }
            if mirror.phase.get() != MirrorPhase::Copying {
                let lost = || FormatError::new(FormatErrorKind::Io, "the parent was lost");
                return Err(mirror.failure.borrow().clone().unwrap_or_else(lost));
            }
            job.set_total(mirror.copied.get() + mirror.status().dirty);
            if !mirror.is_clean() {
                job.wait(tasks).await;
                continue;
            }
            // Most of it is made durable while the guest goes on.
            mirror.sync_far().await;
            match Box::pin(self.switch_down(near, mirror)).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    failures += 1;
                    if failures == FAILURES_MAX {
                        return Err(error);
                    }
                }
            }
            if mirror.phase.get() == MirrorPhase::Copying && !job.is_cancelled() {
                tasks.sleep_until(tasks.turn_ns() + RETRY_NS).await;
            }
        }
    }

    /// Steps 3 to 5. Says whether it was done: not where too much was left, or the parent was lost.
    async fn switch_down(&self, near: &Rc<Chain<I::Store>>, mirror: &Rc<Mirror<I::Store>>) -> Result<bool> {
        let held = self.hold_requests(STALL_NS).await?;
        self.core().running_chain()?;
        if mirror.dirty.borrow().count() * GRANULE_LEN > REST_MAX {
            return Ok(false);
        }
        while mirror.far().is_some()
            && let Some((run, turn)) = mirror.claim(PIECE_LEN)
        {
            mirror.copy(&|| Some(Rc::clone(near)), run, turn).await;
        }
        while mirror.copying.get() > 0 {
            mirror.job.wait(self.core().host.tasks()).await;
        }
        mirror.sync(near, &Meter::default()).await?;
        if mirror.phase.get() != MirrorPhase::Copying || !mirror.is_clean() {
            return Ok(false);
        }
        let leaf = &near.links()[0];
        if let Layer::Vhd(image) = &leaf.layer {
            image.empty().await.map_err(|error| error.with_path(&leaf.spec().path))?;
        }
        let Some(far) = mirror.far.borrow_mut().take() else { return Ok(false) };
        let down = Move::Down { leaf: leaf.spec(), parent: far.chain().links()[0].spec() };
        let (changes, host) = (&self.core().changes, &self.core().host);
        if let Err(error) = changes.moves().note_or_owe(host, down).await {
            // The empty leaf on its parent is a right description as well, as long as its file is there.
            self.core().host.report(&format!("after a commit, keep {}: {error}", leaf.spec().path.display()));
        }
        self.take_off(mirror);
        far.chain().links()[0].set_merged_into(false);
        self.replace_chain(Rc::clone(far.chain()));
        changes.finished();
        far.end();
        // It was to take over from the image that is left now.
        let standby = changes.standby().close(host);
        let stalled_ns = held.release().await;
        standby.await;
        self.core().host.report(&format!(
            "{} is in its parent; the guest waited {} us",
            leaf.spec().path.display(),
            stalled_ns / 1_000
        ));
        self.core().host.close_unused(&leaf.layer).await;
        Ok(true)
    }

    /// Later requests do not report changes to the mirror; those in flight still do.
    fn take_off(&self, mirror: &Rc<Mirror<I::Store>>) {
        mirror.set_phase(MirrorPhase::Ended);
        self.core().change_taps(|tap| {
            if tap.mirror.as_ref().is_some_and(|other| Rc::ptr_eq(other, mirror)) {
                tap.mirror = None;
            }
        });
    }

    /// After a commit that failed: the leaf has everything, and the parent is only read again.
    async fn end_merge(&self, near: &Rc<Chain<I::Store>>, mirror: &Rc<Mirror<I::Store>>) {
        let tasks = self.core().host.tasks();
        self.take_off(mirror);
        let Some(far) = mirror.far.borrow_mut().take() else { return };
        // Requests that are about to write there go to the leaf alone.
        far.fail(&cancelled());
        while mirror.copiers.get() > 0 {
            mirror.job.wait(tasks).await;
        }
        far.answered_all().await;
        far.end();
        if let Err(error) = self.let_go(near, 1).await {
            self.core().host.report(&format!("after a commit: {error}"));
        }
    }
}

/// What is said of a parent that would make the disk larger.
pub(crate) fn parent_too_large(parent: u64, leaf: u64) -> FormatError {
    refused(format!(
        "has {parent} bytes, the leaf above it {leaf}: the disk would become larger by itself; grow it to that first"
    ))
}
