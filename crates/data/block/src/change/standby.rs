//! A second leaf that waits until the storage of the first is full.
//!
//! From the first write that finds no space on, it is the leaf and the image that was the leaf is its parent: what was
//! written before is read from below, every later write goes there.
//!
//! Taking over is a change of the chain like a snapshot: it is noted beside the old leaf, durably, before anything is
//! written to the standby (`tapio_format::continuation`); requests wait until those in flight have ended; the old leaf
//! is closed for writing afterwards, while the guest goes on. Requests that found no space wait for the standby
//! outside of the chain.
//!
//! A standby need not be a child of the leaf that it takes over from: XenServer's is a child of a copy of the leaf's
//! parent on another storage. The disk is both images then, no header says so, and nothing is put on top of them or
//! merged away between them until the standby is committed or the disk has moved away.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_format::continuation::{Move, Overflow};
use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, LayerSpec};

use crate::chain::{Chain, Link};
use crate::host::Host;
use crate::lineage::check_parent;
use crate::mirror::check_len;
use crate::options::{Signal, StandbyOptions};

/// The second leaf of a disk.
#[derive(Debug)]
pub(crate) struct Standby<S: Storage> {
    link: Rc<Link<S>>,
    on_use: Signal,
    used: Cell<bool>,
    /// Whether the image below it, once it took over, is the one that it was made from.
    is_child: Cell<bool>,
    /// The leaf beside which the note of its taking over is ready.
    ready: RefCell<Option<LayerSpec>>,
    /// The leaf beside which that note was put in place.
    noted: RefCell<Option<LayerSpec>>,
}

impl<S: Storage> Standby<S> {
    /// Whether it has taken over.
    pub fn is_used(&self) -> bool {
        self.used.get()
    }

    /// The image.
    pub fn link(&self) -> &Rc<Link<S>> {
        &self.link
    }

    /// The note that it takes over from `leaf` is in place.
    pub fn noted(&self, leaf: LayerSpec) {
        self.ready.take();
        *self.noted.borrow_mut() = Some(leaf);
    }

    /// It takes over now. `is_child`: it was made from the image that is below it from now on.
    pub fn take_over(&self, is_child: bool) {
        self.used.set(true);
        self.is_child.set(is_child);
    }

    /// Tells the opener of the disk that it is in use.
    pub fn signal(&self) {
        (self.on_use.0)();
    }

    /// What is noted when it takes over from this leaf.
    pub fn over(&self, leaf: &Link<S>) -> Overflow {
        // Whether a raw image is the one that a child was made from is not to be seen.
        let is_child = match (&self.link.layer, &leaf.layer) {
            (Layer::Vhd(standby), Layer::Vhd(_)) => check_parent(standby, &leaf.layer).is_ok(),
            _ => false,
        };
        Overflow { leaf: leaf.spec(), standby: self.link.spec(), is_child }
    }
}

/// What became of a write that found no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirected {
    /// It is to be tried again at once.
    Now,
    /// The standby is taking over.
    Soon,
    /// It is to be tried again when the change of the chain that is at work has ended.
    Later,
    /// There is nowhere else.
    Nowhere,
}

/// The standby's place in a disk.
#[derive(Debug)]
pub(crate) struct StandbySlot<S: Storage> {
    standby: RefCell<Option<Rc<Standby<S>>>>,
    /// The disk had one that had not taken over when it was paused the last time.
    waited: Cell<bool>,
}

impl<S: Storage> Default for StandbySlot<S> {
    fn default() -> Self {
        Self { standby: RefCell::new(None), waited: Cell::new(false) }
    }
}

impl<S: Storage> StandbySlot<S> {
    /// The standby, whether it has taken over or not.
    pub fn current(&self) -> Option<Rc<Standby<S>>> {
        self.standby.borrow().clone()
    }

    /// Whether the disk has one. Costs a load.
    pub fn is_there(&self) -> bool {
        self.standby.borrow().is_some()
    }

    fn used(&self) -> Option<Rc<Standby<S>>> {
        self.current().filter(|standby| standby.is_used())
    }

    fn waiting(&self) -> Option<Rc<Standby<S>>> {
        self.current().filter(|standby| !standby.is_used())
    }

    /// Sectors that were written to it since the storage was full.
    pub fn redirected_sectors(&self) -> u64 {
        self.used().map_or(0, |standby| standby.link.counters().sectors_written)
    }

    /// Whether the leaf of `chain` is a standby that took over.
    pub fn is_leaf_of(&self, chain: &Chain<S>) -> bool {
        self.used().is_some_and(|standby| Rc::ptr_eq(&chain.links()[0], &standby.link))
    }

    /// The disk is being paused: notes whether a standby waits.
    pub fn note_pause(&self) {
        self.waited.set(self.waiting().is_some());
    }

    /// Whether one waited at the last pause.
    pub const fn waited(&self) -> bool {
        self.waited.get()
    }

    /// Refuses `what` while the disk is two images of which no header names the other.
    ///
    /// # Errors
    /// A standby took over that is no child of the image below it.
    pub fn check_one_chain(&self, what: &str) -> Result<()> {
        let Some(standby) = self.used().filter(|standby| !standby.is_child.get()) else {
            return Ok(());
        };
        let standby = &standby.link.spec().path;
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
    pub fn check_grows(&self) -> Result<()> {
        match self.waiting() {
            Some(_) => Err(no_standby(
                "a standby waits that would be shorter than the disk: pause the disk, resize both, and open it with them",
            )),
            None => Ok(()),
        }
    }

    /// Opens the standby of a disk on `chain`, or finds it there as the leaf if it took over in an earlier life.
    pub async fn open<I: Io<Store = S>>(
        &self,
        host: &Host<I>,
        chain: &Chain<S>,
        options: &StandbyOptions,
    ) -> Result<()> {
        let image = &options.image;
        let (link, used) = match options.took_over {
            true => (Rc::clone(&chain.links()[0]), true),
            false => {
                let opened = host.open_layer(image.kind, &image.path, Access::ReadWrite).await;
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
        if standby.is_used() {
            standby.is_child.set(standby.over(&chain.links()[1]).is_child);
            standby.signal();
            return Ok(());
        }
        self.make_ready(host, &chain.links()[0]).await
    }

    /// Makes the note ready that the standby, if the disk has one that waits, needs to take over from `leaf`.
    ///
    /// # Errors
    /// It cannot be made durable.
    pub async fn make_ready<I: Io<Store = S>>(&self, host: &Host<I>, leaf: &Link<S>) -> Result<()> {
        let Some(standby) = self.waiting() else { return Ok(()) };
        let before = standby.ready.borrow().clone();
        if before.as_ref() == Some(&leaf.spec()) {
            return Ok(());
        }
        host.write_note(Move::MayOverflow(standby.over(leaf))).await?;
        *standby.ready.borrow_mut() = Some(leaf.spec());
        if let Some(before) = before {
            forget_ready(host, before).await;
        }
        Ok(())
    }

    /// Closes a standby that was not used; one that was is closed with the chain. From now on there is none.
    pub fn close<'a, I: Io<Store = S>>(&self, host: &'a Host<I>) -> impl Future<Output = ()> + use<'a, S, I> {
        let standby = self.standby.borrow_mut().take();
        close_taken(host, standby)
    }
}

async fn forget_ready<I: Io>(host: &Host<I>, leaf: LayerSpec) {
    if let Err(error) = host.write_note(Move::NeverOverflows { leaf }).await {
        host.report(&format!("a note of a standby stays behind: {error}"));
    }
}

async fn close_taken<I: Io>(host: &Host<I>, standby: Option<Rc<Standby<I::Store>>>) {
    let Some(standby) = standby.filter(|standby| !standby.used.get()) else { return };
    let ready = standby.ready.take();
    if let Some(leaf) = ready {
        forget_ready(host, leaf).await;
    }
    // It was about to take over, and nothing was written to it.
    let noted = standby.noted.take();
    if let Some(image) = noted {
        let stays = Move::Stays { image, other: standby.link.spec() };
        if let Err(error) = host.write_note(stays).await {
            host.report(&format!("a note of a standby stays behind: {error}"));
        }
    }
    host.close_unused(&standby.link.layer).await;
}

fn no_standby(detail: &'static str) -> FormatError {
    FormatError::new(FormatErrorKind::InvalidArgument, detail)
}
