//! Changes of an open chain: one at a time, with requests held back for a moment where that is needed.
//!
//! Whatever replaces the images is a function of [`Change`], the right to do so. What a disk knows of its changes
//! between them is [`Changes`].
//!
//! | file | has |
//! |---|---|
//! | `snapshot` | another image becomes the leaf, the one that was it becomes its parent |
//! | `swap` | the same, where the new leaf has the name of the old one |
//! | `commit` | an inner image goes into its parent; the leaf does in `mirror::merge` |
//! | `grow` | the disk becomes larger |
//! | `standby`, `takeover` | a second leaf, for a full storage; how it becomes the leaf |
//! | `parent` | an image below the leaf that is written for a while |
//! | `moves` | notes of the image that the disk goes on with |

mod changes;
mod commit;
mod grow;
mod moves;
mod parent;
mod snapshot;
mod standby;
mod swap;
mod takeover;

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use tapio_format::continuation::Move;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::LayerSpec;

use crate::chain::Chain;
use crate::core::Core;
use crate::job::Job;
use crate::port::Geometry;

pub(crate) use changes::Changes;
pub use commit::Forecast;
pub use snapshot::{LeafFacts, Swapped};
pub(crate) use standby::Redirected;
pub(crate) use takeover::TAKE_OVER;

/// The right to change the chain; ends when it is dropped.
pub(crate) struct Change<I: Io> {
    core: Rc<Core<I>>,
}

impl<I: Io> fmt::Debug for Change<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").finish_non_exhaustive()
    }
}

impl<I: Io> Drop for Change<I> {
    fn drop(&mut self) {
        self.core.changes.end();
        self.core.look_at_sharing();
        self.core.stages.gate.tell();
    }
}

/// Requests are held back; they go on when it is dropped.
pub(crate) struct Held<I: Io> {
    core: Rc<Core<I>>,
    since_ns: u64,
}

impl<I: Io> Held<I> {
    /// Lets requests through again; answers for how long they were held back, in nanoseconds: until the thread has
    /// looked after them again, so that whatever keeps the thread counts.
    pub(crate) async fn release(self) -> u64 {
        let (core, since_ns) = (Rc::clone(&self.core), self.since_ns);
        drop(self);
        core.host.tasks().yield_now().await;
        core.host.io().now_ns().saturating_sub(since_ns)
    }
}

impl<I: Io> Drop for Held<I> {
    fn drop(&mut self) {
        // A pause that came meanwhile keeps the gate closed.
        if self.core.life.is_running() {
            self.core.stages.open();
            self.core.look_at_sharing();
            self.core.stages.admission.look();
            self.core.stages.gate.tell();
        }
    }
}

impl<I: Io> Core<I> {
    /// Takes the right to change the chain, for `what`.
    ///
    /// # Errors
    /// Another change is at work.
    pub(crate) fn begin_change(self: &Rc<Self>, what: &'static str) -> Result<Change<I>> {
        self.changes.begin(what)?;
        self.look_at_sharing();
        Ok(Change { core: Rc::clone(self) })
    }

    /// What a child of the present leaf has to record.
    ///
    /// # Errors
    /// The disk is not running.
    pub fn leaf_facts(&self) -> Result<LeafFacts> {
        Ok(LeafFacts::of(&*self.running_chain()?))
    }

    /// Puts the image `leaf`, a child of the present leaf, on top of the chain. It is opened first; then requests wait
    /// until those in flight have ended, for at most `stall_max_ns`; then they go on with the new leaf. The image below
    /// is closed for writing afterwards, while the guest goes on.
    ///
    /// From the moment this is called until it fails, the new leaf on top of the old one is a right description of the
    /// disk, whatever dies when; the old leaf alone is right until the guest has written again.
    ///
    /// # Errors
    /// The disk is not running or not writable, another change is at work, the new leaf is no child of the present one
    /// or smaller, requests did not end in time: then all is as it was.
    pub async fn snapshot(self: &Rc<Self>, leaf: &LayerSpec, stall_max_ns: u64) -> Result<Swapped> {
        self.begin_change("a snapshot")?.snapshot(leaf, stall_max_ns).await
    }

    /// Goes on with `images`, leaf first: a child of the present leaf that has taken over its name, and below it the
    /// images that are open, of which the first has the other name that is given here. All but the names is as in
    /// [`Self::snapshot`]; no note is made of the move, because what has the name of the disk's leaf is right already.
    ///
    /// With `log`, the disk also goes on with that log of changed blocks: what goes to the new leaf is noted there and
    /// nowhere else, what went to the old one is in the old log, which is closed when this returns. It may be closed
    /// without being complete, which is reported, and which the log itself says.
    ///
    /// # Errors
    /// As [`Self::snapshot`]; also if the images below the leaf are others than those that are open, or the log cannot
    /// be opened.
    pub async fn swap_leaf(
        self: &Rc<Self>,
        images: &[LayerSpec],
        log: Option<&Path>,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        self.begin_change("a snapshot")?.swap_leaf(images, log, stall_max_ns).await
    }

    /// Makes the disk at least `len` bytes long by making its leaf so, and gives what guests are to be told. A VHD
    /// takes whole blocks.
    ///
    /// # Errors
    /// The disk is not running or not writable, another change is at work, `len` is less than what it has;
    /// `NeedsPause` where the leaf cannot grow while it is in use; the storage's.
    pub async fn grow(self: &Rc<Self>, len: u64) -> Result<Geometry> {
        self.begin_change("growing the disk")?.grow(len).await
    }

    /// Looks whether the device of the leaf has become longer; if so, requests that wait for room go on.
    ///
    /// # Errors
    /// The disk is not running; the storage's.
    pub async fn look_for_room(&self) -> Result<bool> {
        let chain = self.running_chain()?;
        let has_grown = chain.links()[0].layer.look_for_room().await?;
        self.stages.gate.tell();
        Ok(has_grown)
    }

    /// Ends the leaf at the byte `to` of its device, which it knows to have `from` bytes: the owner of the device may
    /// cut off what is behind. Guests notice nothing.
    ///
    /// # Errors
    /// The disk is not running, another change is at work, the leaf needs what is behind that end, or has another
    /// length: nothing has changed. The storage's: the owner has to put the footer at the end of the device.
    pub async fn shorten(self: &Rc<Self>, from: u64, to: u64) -> Result<()> {
        let _change = self.begin_change("giving room back")?;
        self.running_chain()?.links()[0].layer.shorten(from, to).await
    }

    /// What committing the image `path` into its parent would cost: from the tables alone, so an upper bound.
    ///
    /// # Errors
    /// The image is not one with another below it in the open chain.
    pub fn forecast(&self, path: &Path) -> Result<Forecast> {
        Forecast::of(&*self.running_chain()?, path)
    }

    /// Begins to commit the image `path`, which is not the base, into its parent, at `rate` bytes a second (0: no
    /// limit). If it is the leaf, its parent is the leaf when the job is done.
    ///
    /// # Errors
    /// The image is not such a one; another change is at work; the disk is not running or read-only. For the leaf also:
    /// the disk has a mirror; the parent is larger.
    pub fn commit(self: &Rc<Self>, path: &Path, rate: u64) -> Result<Rc<Job>> {
        let chain = self.running_chain()?;
        let index = commit::place(&chain, path)?;
        // First of all: what another one is in the middle of looks odd.
        self.begin_change("a commit")?.begin_commit(chain, index, path, rate)
    }
}

impl<I: Io> Change<I> {
    /// The disk.
    pub(crate) const fn core(&self) -> &Rc<Core<I>> {
        &self.core
    }

    /// Lets requests that are taken from now on see these images.
    pub(crate) fn replace_chain(&self, chain: impl Into<Rc<Chain<I::Store>>>) {
        let chain = chain.into();
        chain.links()[0].layer.ask_for_room();
        self.core.stages.images.replace(chain);
        self.core.look_at_sharing();
    }

    /// Takes note of a move of the disk before it happens.
    ///
    /// # Errors
    /// It cannot be made durable: the disk must not move.
    pub(crate) async fn note_move(&self, change: Move) -> Result<()> {
        self.core.changes.moves().note(&self.core.host, change).await
    }

    /// Takes no new requests and waits until those in flight have ended.
    ///
    /// # Errors
    /// They did not within `within_ns`, or the disk is being paused: requests go on.
    pub(crate) async fn hold_requests(&self, within_ns: u64) -> Result<Held<I>> {
        let core = &self.core;
        let (tasks, gate) = (core.host.tasks(), &core.stages.gate);
        let held = Held { core: Rc::clone(core), since_ns: core.host.io().now_ns() };
        gate.close();
        core.look_at_sharing();
        let until = tasks.turn_ns().saturating_add(within_ns);
        while gate.at_images() > 0 || !core.sharing.are_out() {
            if !core.life.is_running() {
                return Err(FormatError::new(FormatErrorKind::Cancelled, "the disk is being paused"));
            }
            if tasks.turn_ns() >= until {
                return Err(self.late(within_ns));
            }
            gate.news_until(until).await;
        }
        Ok(held)
    }

    /// What is said of requests that did not end in time.
    fn late(&self, within_ns: u64) -> FormatError {
        let stages = &self.core.stages;
        let count = stages.gate.at_images() + self.core.sharing.in_flight();
        let longest = stages.timeouts.longest(self.core.host.io().now_ns());
        let longest = longest.map_or_else(String::new, |longest| format!(" ({longest})"));
        let detail = format!(
            "{count} {} did not end within {} ms{longest}; try again later",
            if count == 1 { "request" } else { "requests" },
            within_ns / 1_000_000,
        );
        FormatError::io(detail, std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
    }
}
