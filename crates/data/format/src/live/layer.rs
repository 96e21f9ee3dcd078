//! One layer of a chain, whatever its format. A closed list: the hot path has no virtual call.

use std::rc::Rc;
use std::sync::Arc;

use tapio_ring::Storage;
use tapio_types::{ImageKind, Span};

use super::mapping::{Extent, Lookup, Place};
use super::raw::RawLayer;
use super::vhd::{SharedMap, VhdLayer, Visit};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::vhd::crypt::DiskCipher;

/// What a thread other than the owner of an image knows of it: where blocks are that it need not ask about.
#[derive(Clone, Debug)]
pub struct SharedMapping {
    kind: ImageKind,
    virtual_len: u64,
    /// Of a raw image every byte is where it is.
    map: Option<Arc<SharedMap>>,
}

/// An image that another thread keeps.
#[derive(Debug)]
pub struct SharedLayer<S> {
    store: S,
    mapping: SharedMapping,
}

impl<S> SharedLayer<S> {
    /// The image in `store`, which its owner has opened.
    pub const fn new(store: S, mapping: SharedMapping) -> Self {
        Self { store, mapping }
    }

    fn lookup(&self, want: Span) -> Lookup {
        match &self.mapping.map {
            Some(map) => map.lookup(want),
            None => Lookup::Extent(Extent { len: want.len, place: Place::Data { offset: want.start } }),
        }
    }

    fn prepare_now(&self, want: Span) -> Option<Extent> {
        match self.lookup(want) {
            Lookup::Extent(extent @ Extent { place: Place::Data { .. }, .. }) => Some(extent),
            Lookup::Extent(_) | Lookup::Miss { .. } => None,
        }
    }
}

/// What only the owner of an image can do.
fn of_owner<T>() -> Result<T> {
    Err(FormatError::new(FormatErrorKind::Owner, "the owner of the image has to do this"))
}

/// An open image.
#[derive(Debug)]
pub enum Layer<S: Storage> {
    /// Bytes as they are.
    Raw(RawLayer<S>),
    /// Virtual Hard Disk.
    Vhd(Rc<VhdLayer<S>>),
    /// An image of another thread.
    Shared(SharedLayer<S>),
}

impl<S: Storage> Layer<S> {
    /// The format.
    pub fn kind(&self) -> ImageKind {
        match self {
            Self::Raw(raw) => raw.kind(),
            Self::Vhd(_) => ImageKind::Vhd,
            Self::Shared(shared) => shared.mapping.kind,
        }
    }

    /// The storage that guest data goes to.
    pub fn store(&self) -> &S {
        match self {
            Self::Raw(raw) => &raw.store,
            Self::Vhd(vhd) => vhd.store(),
            Self::Shared(shared) => &shared.store,
        }
    }

    /// Bytes of the disk as this layer has it.
    pub fn virtual_len(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.virtual_len(),
            Self::Vhd(vhd) => vhd.virtual_len(),
            Self::Shared(shared) => shared.mapping.virtual_len,
        }
    }

    /// What other threads are told of this image; `None` where they need its owner for everything.
    pub fn share(&self) -> Option<SharedMapping> {
        let map = match self {
            Self::Raw(_) => None,
            Self::Vhd(vhd) => Some(vhd.share_map()?),
            Self::Shared(_) => return None,
        };
        Some(SharedMapping { kind: self.kind(), virtual_len: self.virtual_len(), map })
    }

    /// Gives back the memory of what other threads were told, which have had nothing to do for a while.
    pub fn forget_shared(&self) {
        if let Self::Vhd(vhd) = self {
            vhd.forget_shared();
        }
    }

    /// Bytes that the storage has for new blocks, where it has its length for good.
    pub fn room(&self) -> Option<u64> {
        match self {
            _ if self.store().info().resizable => None,
            // All of it is there already.
            Self::Raw(_) => Some(u64::MAX),
            Self::Vhd(vhd) => Some(vhd.room()),
            Self::Shared(_) => None,
        }
    }

    /// It is the leaf of its disk from now on; see [`VhdLayer::ask_for_room`].
    pub fn ask_for_room(&self) {
        if let Self::Vhd(vhd) = self {
            vhd.ask_for_room();
        }
    }

    /// See [`VhdLayer::growths`].
    pub fn growths(&self) -> Option<u64> {
        match self {
            Self::Vhd(vhd) => vhd.growths(),
            Self::Raw(_) | Self::Shared(_) => None,
        }
    }

    /// See [`VhdLayer::look_for_room`].
    ///
    /// # Errors
    /// The storage's.
    pub async fn look_for_room(&self) -> Result<bool> {
        match self {
            Self::Vhd(vhd) => vhd.look_for_room().await,
            Self::Raw(_) | Self::Shared(_) => Ok(false),
        }
    }

    /// See [`VhdLayer::shorten`].
    ///
    /// # Errors
    /// It is no VHD; that function's.
    pub async fn shorten(&self, from: u64, to: u64) -> Result<()> {
        match self {
            Self::Vhd(vhd) => vhd.shorten(from, to).await,
            Self::Raw(_) => {
                let detail = "a raw image has all of its space";
                Err(crate::FormatError::new(crate::FormatErrorKind::InvalidArgument, detail))
            }
            Self::Shared(_) => of_owner(),
        }
    }

    /// What the sectors of this layer are encrypted by. A sector that is in the layer is always encrypted then; one
    /// that is not reads as in any other layer.
    pub fn cipher(&self) -> Option<&DiskCipher> {
        match self {
            Self::Raw(_) | Self::Shared(_) => None,
            Self::Vhd(vhd) => vhd.cipher(),
        }
    }

    /// To be held by a request that looks places up in a layer open for writing, from before [`Layer::lookup`] or
    /// [`Layer::prepare`] until the bytes there are read or written: without it a place may meanwhile be given back and
    /// belong to another block.
    pub fn enter(&self) -> Option<Visit<'_>> {
        match self {
            Self::Raw(_) | Self::Shared(_) => None,
            Self::Vhd(vhd) => vhd.enter(),
        }
    }

    /// Where the beginning of `want` is; from memory alone.
    pub fn lookup(&self, want: Span) -> Lookup {
        match self {
            Self::Raw(raw) => Lookup::Extent(raw.lookup(want)),
            Self::Vhd(vhd) => vhd.lookup(want),
            Self::Shared(shared) => shared.lookup(want),
        }
    }

    /// Brings into memory what a [`Lookup::Miss`] lacked.
    ///
    /// # Errors
    /// The storage's, or damage found.
    pub async fn load(&self, block: u32) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Vhd(vhd) => vhd.load(block).await,
            Self::Shared(_) => of_owner(),
        }
    }

    /// Where to write the beginning of `want`: makes room first where there is none. What is written there becomes
    /// visible with [`Layer::written`].
    ///
    /// # Errors
    /// No space; the storage's; damage found.
    pub async fn prepare(&self, want: Span) -> Result<Extent> {
        match self {
            Self::Raw(raw) => Ok(raw.lookup(want)),
            Self::Vhd(vhd) => vhd.prepare(want).await,
            Self::Shared(_) => of_owner(),
        }
    }

    /// [`Layer::prepare`] where it needs no waiting.
    pub fn prepare_now(&self, want: Span) -> Option<Extent> {
        match self {
            Self::Raw(raw) => Some(raw.lookup(want)),
            Self::Vhd(vhd) => vhd.prepare_now(want),
            Self::Shared(shared) => shared.prepare_now(want),
        }
    }

    /// The data of a span that [`Layer::prepare`] gave the place at `offset` is there: it may be read from now on.
    /// Returns whether metadata must be written before the write is durable; then the caller lets [`Layer::settle`]
    /// run.
    pub fn written(&self, span: Span, offset: u64) -> bool {
        match self {
            Self::Raw(_) | Self::Shared(_) => false,
            Self::Vhd(vhd) => vhd.written(span, offset),
        }
    }

    /// The write to a span that [`Layer::prepare`] gave a place failed: nothing of it becomes visible.
    pub fn not_written(&self, span: Span) {
        match self {
            Self::Raw(_) | Self::Shared(_) => {}
            Self::Vhd(vhd) => vhd.not_written(span),
        }
    }

    /// Waits while too much metadata is waiting to be written.
    ///
    /// # Errors
    /// The storage's.
    pub async fn settle(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Shared(_) => Ok(()),
            Self::Vhd(vhd) => vhd.settle().await,
        }
    }

    /// Makes the disk `len` bytes long, which must not be less than it is. What is behind the old end reads as zero, or
    /// as the layers below.
    ///
    /// # Errors
    /// `InvalidArgument` where that needs more than can be done while the image is in use; the storage's.
    pub async fn grow(&self, len: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.grow(len).await,
            Self::Vhd(vhd) => vhd.grow(len).await,
            Self::Shared(_) => of_owner(),
        }
    }

    /// Makes everything written so far durable, metadata included.
    ///
    /// # Errors
    /// The storage's.
    pub async fn sync(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => {
                raw.store.flush().await.map_err(|error| crate::FormatError::io("cannot flush", error))
            }
            Self::Vhd(vhd) => vhd.sync().await,
            Self::Shared(_) => of_owner(),
        }
    }

    /// Brings the image into the state in which other tools expect it, and makes that durable. Nothing may be in
    /// flight.
    ///
    /// # Errors
    /// The storage's.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Raw(_) => self.sync().await,
            Self::Vhd(vhd) => vhd.close().await,
            Self::Shared(_) => of_owner(),
        }
    }
}
