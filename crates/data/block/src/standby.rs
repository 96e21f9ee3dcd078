//! A second leaf that waits until the storage of the first is full.
//!
//! From the first write that finds no space on, it is the leaf and the image that was the leaf is its parent: what was
//! written before is read from below, every later write goes there.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::Access;

use crate::chain::{Chain, Link};
use crate::core::Core;
use crate::mirror::check_len;
use crate::tap::{Signal, StandbyOptions};

/// The second leaf of a disk.
#[derive(Debug)]
pub(crate) struct Standby<S: Storage> {
    link: Rc<Link<S>>,
    on_use: Signal,
    used: Cell<bool>,
}

/// What became of a write that found no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirected {
    /// It is to be tried again at once.
    Now,
    /// It is to be tried again when the change of the chain that is at work has ended.
    Later,
    /// There is nowhere else.
    Nowhere,
}

/// The standby's place in a disk.
pub(crate) type Slot<S> = RefCell<Option<Rc<Standby<S>>>>;

impl<I: Io> Core<I> {
    /// Sectors that were written to the standby since the storage was full.
    pub fn redirected_sectors(&self) -> u64 {
        let standby = self.standby.borrow();
        standby
            .as_ref()
            .filter(|standby| standby.used.get())
            .map_or(0, |standby| standby.link.counters().sectors_written)
    }

    pub(crate) async fn open_standby(&self, chain: &Chain<I::Store>, options: &StandbyOptions) -> Result<()> {
        let image = &options.image;
        let opened = self.open_layer(image.kind, &image.path, Access::ReadWrite).await;
        let layer = opened.map_err(|error| error.with_path(&image.path))?;
        let fits = match &layer {
            Layer::Vhd(vhd) if vhd.parent_uuid().is_some() => check_len(layer.virtual_len(), chain.len()),
            _ => {
                let detail = "only a differencing image can take over when the leaf is full: others hide what is below";
                Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
            }
        };
        let link = Link::new(layer, image.clone());
        let standby = Standby { link, on_use: options.on_use.clone(), used: Cell::new(false) };
        *self.standby.borrow_mut() = Some(Rc::new(standby));
        fits.map_err(|error| error.with_path(&image.path))
    }

    /// A write on `chain` found no space: is there somewhere else to write?
    pub(crate) fn redirect(&self, chain: &Rc<Chain<I::Store>>) -> Redirected {
        let standby = self.standby.borrow();
        let (Some(standby), Some(current)) = (&*standby, self.chain()) else { return Redirected::Nowhere };
        if !Rc::ptr_eq(&current, chain) {
            // Somebody has put other images there meanwhile.
            return Redirected::Now;
        }
        if standby.used.get() {
            return Redirected::Nowhere;
        }
        if self.changing.get().is_some() {
            // Whoever changes the chain has the images of before in hand, and would put them back.
            return Redirected::Later;
        }
        standby.used.set(true);
        let mut links = vec![Rc::clone(&standby.link)];
        links.extend(chain.links().iter().cloned());
        // Writes to the old leaf that are under way end there: below the new one, where they are found.
        chain.links()[0].set_unsettled(true);
        self.replace_chain(Chain::new(links, chain.access(), self.io.tasks().clone()));
        (self.options.report)(&format!(
            "the storage is full: writes go to {} from now on",
            standby.link.spec
        ));
        (standby.on_use.0)();
        Redirected::Now
    }

    /// Closes a standby that was not used; one that was is closed with the chain. From now on there is none.
    pub(crate) fn close_standby(&self) -> impl Future<Output = ()> + '_ {
        let standby = self.standby.borrow_mut().take();
        self.close_taken(standby)
    }

    async fn close_taken(&self, standby: Option<Rc<Standby<I::Store>>>) {
        if let Some(standby) = standby.filter(|standby| !standby.used.get()) {
            self.close_unused(&standby.link.layer).await;
        }
    }
}
