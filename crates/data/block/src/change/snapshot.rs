//! A snapshot of a disk in use: another image becomes the leaf, and the one that was it becomes its parent.

use std::rc::Rc;

use tapio_format::continuation::Move;
use tapio_format::live::Layer;
use tapio_format::vhd::KeyHash;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, LayerSpec};
use uuid::Uuid;

use super::Change;
use crate::chain::{Chain, Link};
use crate::lineage::check_parent;
use crate::open::CHAIN_MAX;
use crate::stages::ChangeLog;

/// What a snapshot cost the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swapped {
    /// How long no request was taken, in nanoseconds.
    pub stalled_ns: u64,
}

/// What a child of the present leaf has to record.
#[derive(Clone, Debug)]
pub struct LeafFacts {
    /// The leaf.
    pub image: LayerSpec,
    /// Its UUID; `None` for one that is not a dynamic or differencing VHD.
    pub uuid: Option<Uuid>,
    /// Bytes of the disk.
    pub len: u64,
    /// The largest size that its block table has room for, in bytes; 0 without one.
    pub len_max: u64,
    /// The key that it needs, if it is encrypted.
    pub key_hash: KeyHash,
}

impl LeafFacts {
    pub(super) fn of<S: Storage>(chain: &Chain<S>) -> Self {
        let leaf = &chain.links()[0];
        let (uuid, len_max, key_hash) = match &leaf.layer {
            Layer::Vhd(vhd) => (Some(vhd.uuid()), vhd.len_max(), vhd.key_hash()),
            Layer::Raw(_) | Layer::Shared(_) => (None, 0, KeyHash::default()),
        };
        Self { image: leaf.spec(), uuid, len: chain.len(), len_max, key_hash }
    }
}

/// What else changes when an image is put on top.
pub(super) enum Names<'a, S: Storage> {
    /// Nothing.
    Kept,
    /// The leaf of before is called `below` by now, and changes are noted in `log` from here on, if there is one.
    Swapped { below: &'a LayerSpec, log: Option<Rc<ChangeLog<S>>> },
}

impl<I: Io> Change<I> {
    /// See [`crate::Core::snapshot`].
    pub(super) async fn snapshot(self, leaf: &LayerSpec, stall_max_ns: u64) -> Result<Swapped> {
        let chain = self.chain_with_room(leaf)?;
        let named = |error: FormatError| error.with_path(&leaf.path);
        if chain.links().iter().any(|link| link.spec().path == leaf.path) {
            return Err(named(FormatError::new(FormatErrorKind::Loop, "the image is in the chain already")));
        }
        let layer =
            self.core.host.open_layer(leaf.kind, &leaf.path, Access::ReadWrite).await.map_err(named)?;
        let swapped = match fits(&layer, &chain) {
            Ok(()) => Box::pin(self.put_on_top_noted(&chain, layer, leaf, stall_max_ns)).await,
            Err(error) => {
                self.core.host.close_unused(&layer).await;
                Err(error)
            }
        };
        let swapped = swapped.map_err(named)?;
        drop(chain);
        Box::pin(self.settle_below()).await;
        Ok(swapped)
    }

    /// The open chain, which may get another leaf, `leaf`.
    ///
    /// # Errors
    /// It may not.
    pub(super) fn chain_with_room(&self, leaf: &LayerSpec) -> Result<Rc<Chain<I::Store>>> {
        let chain = self.core.running_chain()?;
        if chain.access() == Access::ReadOnly {
            return Err(FormatError::new(FormatErrorKind::ReadOnly, "a read-only disk needs no snapshot"));
        }
        self.core.changes.standby().check_one_chain("a snapshot")?;
        if chain.links().len() >= CHAIN_MAX {
            let detail = format!("the chain has {CHAIN_MAX} images already; commit some of them first");
            return Err(FormatError::new(FormatErrorKind::TooDeep, detail).with_path(&leaf.path));
        }
        Ok(chain)
    }

    /// Takes note first: a process that dies from here on is started again with the old leaf's name. The new leaf is
    /// empty until requests go to it, so what the note says is right at once.
    async fn put_on_top_noted(
        &self,
        chain: &Rc<Chain<I::Store>>,
        layer: Layer<I::Store>,
        spec: &LayerSpec,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        let below = chain.links()[0].spec();
        if let Err(error) = self.note_move(Move::OnTop { below: below.clone(), leaf: spec.clone() }).await {
            self.core.host.close_unused(&layer).await;
            return Err(error);
        }
        let swapped = self.put_on_top(chain, layer, spec, Names::Kept, stall_max_ns).await;
        if swapped.is_err()
            && let Err(error) = self.note_move(Move::Stays { image: below, other: spec.clone() }).await
        {
            // Still right as long as the new leaf is there, which is why the caller looks before it removes that.
            self.core.host.report(&format!("after a snapshot that failed: {error}"));
        }
        swapped
    }

    /// `names` is what else changes between two requests.
    pub(super) async fn put_on_top(
        &self,
        chain: &Rc<Chain<I::Store>>,
        layer: Layer<I::Store>,
        spec: &LayerSpec,
        names: Names<'_, I::Store>,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        let top = Link::new(layer, spec.clone());
        let ready = self.core.changes.standby().make_ready(&self.core.host, &top).await;
        let held = match ready {
            Ok(()) => self.hold_requests(stall_max_ns).await,
            Err(error) => Err(error),
        };
        let held = match held {
            Ok(held) => held,
            Err(error) => {
                self.core.host.close_unused(&top.layer).await;
                if let Err(error) =
                    self.core.changes.standby().make_ready(&self.core.host, &chain.links()[0]).await
                {
                    // Without its note it cannot take over; the disk gets that error when it is to take over.
                    self.core.host.report(&format!("after a snapshot that failed: {error}"));
                }
                return Err(error);
            }
        };
        chain.links()[0].set_unsettled(true);
        if let Names::Swapped { below, log } = names {
            chain.links()[0].rename(below.clone());
            if let Some(log) = log {
                self.core.change_taps(|tap| tap.log = Some(log));
            }
        }
        let mut links = Vec::with_capacity(chain.links().len() + 1);
        links.push(top);
        links.extend(chain.links().iter().cloned());
        self.replace_chain(Chain::new(
            links,
            Access::ReadWrite,
            self.core.host.tasks().clone(),
            self.core.host.transfers(),
        ));
        Ok(Swapped { stalled_ns: held.release().await })
    }

    /// Makes what was written to the image below the leaf durable, and opens it again as one that is only read. A
    /// failure leaves it open as it was: then flushes of the guest, and the end of the disk, try again.
    pub(crate) async fn settle_below(&self) {
        let Ok(chain) = self.core.running_chain() else { return };
        if let Err(error) = self.let_go(&chain, 1).await {
            self.core.host.report(&format!("after a snapshot: {error}"));
        }
    }
}

pub(super) fn fits<S: Storage>(layer: &Layer<S>, chain: &Chain<S>) -> Result<()> {
    let Layer::Vhd(child) = layer else {
        return Err(FormatError::new(
            FormatErrorKind::InvalidArgument,
            "a new leaf must be a differencing VHD; 'vhd-util snapshot' makes one",
        ));
    };
    if layer.virtual_len() < chain.len() {
        let detail = format!("has {} bytes, fewer than the disk's {}", layer.virtual_len(), chain.len());
        return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
    }
    check_parent(child, &chain.links()[0].layer)
}
