//! A standby in the life of a disk: opened, ready, taking over, closed. What it is: `standby`.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use tapio_format::continuation::Move;
use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::{Access, LayerSpec};

use crate::chain::{Chain, Link};
use crate::change::Change;
use crate::core::{Core, DiskState};
use crate::mirror::check_len;
use crate::standby::{Redirected, Standby};
use crate::tap::StandbyOptions;
use crate::timeouts::Place;

/// How long requests in flight may take to end when the standby takes over: as long as at a snapshot.
const STALL_MAX_NS: u64 = 5_000_000_000;

/// What the right to change the chain is taken for.
const TAKE_OVER: &str = "the standby's taking over";

impl<I: Io> Core<I> {
    /// Sectors that were written to the standby since the storage was full.
    pub fn redirected_sectors(&self) -> u64 {
        self.used_standby().map_or(0, |standby| standby.link.counters().sectors_written)
    }

    /// Whether the leaf is a standby that took over.
    pub fn is_on_standby(&self) -> bool {
        let leaf = |chain: Rc<Chain<I::Store>>| Rc::clone(&chain.links()[0]);
        let same = |standby: Rc<Standby<_>>| {
            self.chain().is_some_and(|chain| Rc::ptr_eq(&leaf(chain), &standby.link))
        };
        self.used_standby().is_some_and(same)
    }

    /// Whether there is a standby that has not taken over.
    pub(crate) fn has_waiting_standby(&self) -> bool {
        self.standby.borrow().as_ref().is_some_and(|standby| !standby.used.get())
    }

    fn used_standby(&self) -> Option<Rc<Standby<I::Store>>> {
        self.standby.borrow().clone().filter(|standby| standby.used.get())
    }

    /// Refuses `what` while the disk is two images of which no header names the other.
    ///
    /// # Errors
    /// A standby took over that is no child of the image below it.
    pub(crate) fn check_one_chain(&self, what: &str) -> Result<()> {
        let Some(standby) = self.used_standby().filter(|standby| !standby.is_child.get()) else {
            return Ok(());
        };
        let standby = &standby.link.spec.path;
        let detail = format!(
            "took over from a full storage and is no child of the image below it: {what} would make a chain that could \
             not be opened again. When there is space again, commit it into that image ('tapio disk commit {}'), or \
             move the disk with 'tapio disk mirror'",
            standby.display()
        );
        Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(standby))
    }

    /// Refuses to make the disk longer than a standby that waits.
    ///
    /// # Errors
    /// There is one.
    pub(crate) fn check_standby_grows(&self) -> Result<()> {
        match &*self.standby.borrow() {
            Some(standby) if !standby.used.get() => Err(no_standby(
                "a standby waits that would be shorter than the disk: pause the disk, resize both, and open it with them",
            )),
            _ => Ok(()),
        }
    }

    /// Opens the standby of a disk on `chain`, or finds it there as the leaf if it took over in an earlier life.
    pub(crate) async fn open_standby(&self, chain: &Chain<I::Store>, options: &StandbyOptions) -> Result<()> {
        let image = &options.image;
        let (link, used) = match options.took_over {
            true => (Rc::clone(&chain.links()[0]), true),
            false => {
                let opened = self.open_layer(image.kind, &image.path, Access::ReadWrite).await;
                (Link::new(opened.map_err(|error| error.with_path(&image.path))?, image.clone()), false)
            }
        };
        let (len, on_use) = (link.layer.virtual_len(), options.on_use.clone());
        let fits = match &link.layer {
            Layer::Vhd(_) if used => match chain.links().get(1) {
                Some(below) if below.layer.virtual_len() <= len => Ok(()),
                _ => {
                    Err(no_standby("took over and is shorter than what is below it: it is another image now"))
                }
            },
            Layer::Vhd(vhd) if vhd.parent_uuid().is_none() => Err(no_standby(
                "only a differencing image can take over when the leaf is full: others hide what is below",
            )),
            Layer::Vhd(vhd) if vhd.blocks_beside(None).0 > 0 => Err(no_standby(
                "holds data, which would hide what is below it when it takes over: give an empty one",
            )),
            Layer::Vhd(_) => check_len(len, chain.len()),
            Layer::Raw(_) | Layer::Shared(_) => {
                Err(no_standby("only a differencing image can take over when the leaf is full"))
            }
        };
        let (used, is_child) = (Cell::new(used), Cell::new(false));
        let (ready, noted) = (RefCell::default(), RefCell::default());
        let standby = Rc::new(Standby { link, on_use, used, is_child, ready, noted });
        *self.standby.borrow_mut() = Some(Rc::clone(&standby));
        fits.map_err(|error| error.with_path(&image.path))?;
        if standby.used.get() {
            standby.is_child.set(standby.over(&chain.links()[1]).is_child);
            (standby.on_use.0)();
            return Ok(());
        }
        self.make_standby_ready(&chain.links()[0]).await
    }

    /// Makes the note ready that the standby, if the disk has one that waits, needs to take over from `leaf`.
    ///
    /// # Errors
    /// It cannot be made durable.
    pub(crate) async fn make_standby_ready(&self, leaf: &Link<I::Store>) -> Result<()> {
        let standby = self.standby.borrow().clone().filter(|standby| !standby.used.get());
        let Some(standby) = standby else { return Ok(()) };
        let before = standby.ready.borrow().clone();
        if before.as_ref() == Some(&leaf.spec) {
            return Ok(());
        }
        self.write_note(Move::MayOverflow(standby.over(leaf))).await?;
        *standby.ready.borrow_mut() = Some(leaf.spec.clone());
        if let Some(before) = before {
            self.forget_ready(before).await;
        }
        Ok(())
    }

    async fn forget_ready(&self, leaf: LayerSpec) {
        if let Err(error) = self.write_note(Move::NeverOverflows { leaf }).await {
            (self.options.report)(&format!("a note of a standby stays behind: {error}"));
        }
    }

    /// A write on `chain` found no space: is there somewhere else to write?
    pub(crate) fn redirect(self: &Rc<Self>, chain: &Rc<Chain<I::Store>>) -> Redirected {
        let standby = self.standby.borrow().clone();
        let (Some(standby), Some(current)) = (standby, self.chain()) else { return Redirected::Nowhere };
        if !Rc::ptr_eq(&current, chain) {
            // Another change has replaced the chain meanwhile.
            return Redirected::Now;
        }
        if standby.used.get() {
            return Redirected::Nowhere;
        }
        let change = match (self.changing.get(), self.begin_change(TAKE_OVER)) {
            (None, Ok(change)) => change,
            (Some(what), _) if what == TAKE_OVER => return Redirected::Soon,
            // The change in progress has the earlier images in hand, and would put them back.
            _ => return Redirected::Later,
        };
        self.io.tasks().spawn(Rc::clone(self).take_over(change, standby));
        Redirected::Soon
    }

    async fn take_over(self: Rc<Self>, change: Change<I>, standby: Rc<Standby<I::Store>>) {
        match Box::pin(self.put_standby_on_top(&standby)).await {
            Ok(()) => {
                (self.options.report)(&format!(
                    "the storage is full: writes go to {} from now on",
                    standby.link.spec
                ));
                (standby.on_use.0)();
                Box::pin(self.settle_below()).await;
            }
            Err(error) => {
                (self.options.report)(&format!("{} does not take over: {error}", standby.link.spec));
            }
        }
        drop(change);
    }

    /// From the note on, the empty standby on top of the leaf is a right description of the disk, whatever dies when or
    /// comes between.
    async fn put_standby_on_top(self: &Rc<Self>, standby: &Standby<I::Store>) -> Result<()> {
        let chain = self.running_chain()?;
        let overflow = standby.over(&chain.links()[0]);
        let is_child = overflow.is_child;
        let leaf = overflow.leaf.clone();
        self.note_move(Move::Overflows(overflow)).await?;
        standby.ready.take();
        *standby.noted.borrow_mut() = Some(leaf);
        let gate = self.close_gate(STALL_MAX_NS).await?;
        let chain = self.running_chain()?;
        standby.used.set(true);
        standby.is_child.set(is_child);
        let mut links = vec![Rc::clone(&standby.link)];
        links.extend(chain.links().iter().cloned());
        chain.links()[0].set_unsettled(true);
        self.replace_chain(Chain::new(links, chain.access(), self.io.tasks().clone()));
        gate.open().await;
        Ok(())
    }

    /// Waits outside of the chain until the standby has taken over from the chain `tried` or could not. Says whether a
    /// request is to be tried again.
    pub(crate) async fn wait_for_standby(&self, tried: Weak<Chain<I::Store>>, place: Place) -> bool {
        let is_same = || self.chain().is_some_and(|now| std::ptr::eq(Rc::as_ptr(&now), tried.as_ptr()));
        self.wait_aside(place, || is_same() && self.changing.get() == Some(TAKE_OVER)).await;
        // A pause may have come between; what is opened after it is tried.
        !is_same() || self.state() != DiskState::Running
    }

    /// Closes a standby that was not used; one that was is closed with the chain. From now on there is none.
    pub(crate) fn close_standby(&self) -> impl Future<Output = ()> + '_ {
        let standby = self.standby.borrow_mut().take();
        self.close_taken(standby)
    }

    async fn close_taken(&self, standby: Option<Rc<Standby<I::Store>>>) {
        let Some(standby) = standby.filter(|standby| !standby.used.get()) else { return };
        let ready = standby.ready.take();
        if let Some(leaf) = ready {
            self.forget_ready(leaf).await;
        }
        // It was about to take over, and nothing was written to it.
        let noted = standby.noted.take();
        if let Some(image) = noted {
            let stays = Move::Stays { image, other: standby.link.spec.clone() };
            if let Err(error) = self.write_note(stays).await {
                (self.options.report)(&format!("a note of a standby stays behind: {error}"));
            }
        }
        self.close_unused(&standby.link.layer).await;
    }
}

fn no_standby(detail: &'static str) -> FormatError {
    FormatError::new(FormatErrorKind::InvalidArgument, detail)
}
