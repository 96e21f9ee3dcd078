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

use tapio_format::continuation::Overflow;
use tapio_format::live::Layer;
use tapio_ring::Storage;
use tapio_types::LayerSpec;

use crate::chain::Link;
use crate::lineage::check_parent;
use crate::tap::Signal;

/// The second leaf of a disk.
#[derive(Debug)]
pub(crate) struct Standby<S: Storage> {
    pub(crate) link: Rc<Link<S>>,
    pub(crate) on_use: Signal,
    pub(crate) used: Cell<bool>,
    /// Whether the image below it, once it took over, is the one that it was made from.
    pub(crate) is_child: Cell<bool>,
    /// The leaf beside which the note of its taking over is ready.
    pub(crate) ready: RefCell<Option<LayerSpec>>,
    /// The leaf beside which that note was put in place.
    pub(crate) noted: RefCell<Option<LayerSpec>>,
}

impl<S: Storage> Standby<S> {
    /// What is noted when it takes over from this leaf.
    pub(crate) fn over(&self, leaf: &Link<S>) -> Overflow {
        // Whether a raw image is the one that a child was made from is not to be seen.
        let is_child = match (&self.link.layer, &leaf.layer) {
            (Layer::Vhd(standby), Layer::Vhd(_)) => check_parent(standby, &leaf.layer).is_ok(),
            _ => false,
        };
        Overflow { leaf: leaf.spec.clone(), standby: self.link.spec.clone(), is_child }
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
pub(crate) type Slot<S> = RefCell<Option<Rc<Standby<S>>>>;
