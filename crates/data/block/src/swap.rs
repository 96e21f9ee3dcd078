//! A snapshot of a disk in use: another image becomes the leaf, and the one that was it becomes its parent.

use std::rc::Rc;

use tapio_format::continuation::Move;
use tapio_format::live::Layer;
use tapio_format::vhd::KeyHash;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::{Access, LayerSpec};
use uuid::Uuid;

use crate::chain::{Chain, Link};
use crate::core::{Core, DiskState};
use crate::lineage::check_parent;
use crate::open::CHAIN_MAX;

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

impl<I: Io> Core<I> {
    /// What a child of the present leaf has to record.
    ///
    /// # Errors
    /// The disk is not running.
    pub fn leaf_facts(&self) -> Result<LeafFacts> {
        let chain = self.running_chain()?;
        let leaf = &chain.links()[0];
        let (uuid, len_max, key_hash) = match &leaf.layer {
            Layer::Vhd(vhd) => (Some(vhd.uuid()), vhd.len_max(), vhd.key_hash()),
            Layer::Raw(_) | Layer::Shared(_) => (None, 0, KeyHash::default()),
        };
        Ok(LeafFacts { image: leaf.spec.clone(), uuid, len: chain.len(), len_max, key_hash })
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
        let change = self.begin_change("a snapshot")?;
        let chain = self.running_chain()?;
        if chain.access() == Access::ReadOnly {
            return Err(FormatError::new(FormatErrorKind::ReadOnly, "a read-only disk needs no snapshot"));
        }
        self.check_one_chain("a snapshot")?;
        let named = |error: FormatError| error.with_path(&leaf.path);
        if chain.links().len() >= CHAIN_MAX {
            let detail = format!("the chain has {CHAIN_MAX} images already; commit some of them first");
            return Err(named(FormatError::new(FormatErrorKind::TooDeep, detail)));
        }
        if chain.links().iter().any(|link| link.spec.path == leaf.path) {
            return Err(named(FormatError::new(FormatErrorKind::Loop, "the image is in the chain already")));
        }
        let layer = self.open_layer(leaf.kind, &leaf.path, Access::ReadWrite).await.map_err(named)?;
        let swapped = match fits(&layer, &chain) {
            Ok(()) => Box::pin(self.put_on_top_noted(&chain, layer, leaf, stall_max_ns)).await,
            Err(error) => {
                self.close_unused(&layer).await;
                Err(error)
            }
        };
        let swapped = swapped.map_err(named)?;
        drop(chain);
        Box::pin(self.settle_below()).await;
        drop(change);
        Ok(swapped)
    }

    /// Takes note first: a process that dies from here on is started again with the old leaf's name. The new leaf is
    /// empty until requests go to it, so what the note says is right at once.
    async fn put_on_top_noted(
        self: &Rc<Self>,
        chain: &Rc<Chain<I::Store>>,
        layer: Layer<I::Store>,
        spec: &LayerSpec,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        let below = chain.links()[0].spec.clone();
        if let Err(error) = self.note_move(Move::OnTop { below: below.clone(), leaf: spec.clone() }).await {
            self.close_unused(&layer).await;
            return Err(error);
        }
        let swapped = self.put_on_top(chain, layer, spec, stall_max_ns).await;
        if swapped.is_err()
            && let Err(error) = self.note_move(Move::Stays { image: below, other: spec.clone() }).await
        {
            // Still right as long as the new leaf is there, which is why the caller looks before it removes that.
            (self.options.report)(&format!("after a snapshot that failed: {error}"));
        }
        swapped
    }

    async fn put_on_top(
        self: &Rc<Self>,
        chain: &Rc<Chain<I::Store>>,
        layer: Layer<I::Store>,
        spec: &LayerSpec,
        stall_max_ns: u64,
    ) -> Result<Swapped> {
        let top = Link::new(layer, spec.clone());
        let ready = self.make_standby_ready(&top).await;
        let gate = match ready {
            Ok(()) => self.close_gate(stall_max_ns).await,
            Err(error) => Err(error),
        };
        let gate = match gate {
            Ok(gate) => gate,
            Err(error) => {
                self.close_unused(&top.layer).await;
                if let Err(error) = self.make_standby_ready(&chain.links()[0]).await {
                    // Without its note it cannot take over; the disk gets that error when it is to take over.
                    (self.options.report)(&format!("after a snapshot that failed: {error}"));
                }
                return Err(error);
            }
        };
        chain.links()[0].set_unsettled(true);
        let mut links = Vec::with_capacity(chain.links().len() + 1);
        links.push(top);
        links.extend(chain.links().iter().cloned());
        self.replace_chain(Chain::new(links, Access::ReadWrite, self.io.tasks().clone()));
        Ok(Swapped { stalled_ns: gate.open().await })
    }

    /// Makes what was written to the image below the leaf durable, and opens it again as one that is only read. A
    /// failure leaves it open as it was: then flushes of the guest, and the end of the disk, try again.
    pub(crate) async fn settle_below(&self) {
        let Ok(chain) = self.running_chain() else { return };
        if let Err(error) = self.let_go(&chain, 1).await {
            (self.options.report)(&format!("after a snapshot: {error}"));
        }
    }

    /// Closes an image that was opened for a change that does not happen.
    pub(crate) async fn close_unused(&self, layer: &Layer<I::Store>) {
        if let Err(error) = layer.close().await {
            (self.options.report)(&format!("not closed cleanly: {error}"));
        }
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
}

fn fits<S: tapio_ring::Storage>(layer: &Layer<S>, chain: &Chain<S>) -> Result<()> {
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
