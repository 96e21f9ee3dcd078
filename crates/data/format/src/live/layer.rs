//! One layer of a chain, whatever its format. A closed list: the hot path has no virtual call.

use std::rc::Rc;

use tapio_ring::Storage;
use tapio_types::{ImageKind, Span};

use super::mapping::{Extent, Lookup};
use super::raw::RawLayer;
use super::vhd::{VhdLayer, Visit};
use crate::error::Result;
use crate::vhd::crypt::DiskCipher;

/// An open image.
#[derive(Debug)]
pub enum Layer<S: Storage> {
    /// Bytes as they are.
    Raw(RawLayer<S>),
    /// Virtual Hard Disk.
    Vhd(Rc<VhdLayer<S>>),
}

impl<S: Storage> Layer<S> {
    /// The format.
    pub fn kind(&self) -> ImageKind {
        match self {
            Self::Raw(raw) => raw.kind(),
            Self::Vhd(_) => ImageKind::Vhd,
        }
    }

    /// The storage that guest data goes to.
    pub fn store(&self) -> &S {
        match self {
            Self::Raw(raw) => &raw.store,
            Self::Vhd(vhd) => vhd.store(),
        }
    }

    /// Bytes of the disk as this layer has it.
    pub fn virtual_len(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.virtual_len(),
            Self::Vhd(vhd) => vhd.virtual_len(),
        }
    }

    /// Bytes that the storage has for new blocks, where it has its length for good.
    pub fn room(&self) -> Option<u64> {
        match self {
            _ if self.store().info().resizable => None,
            // All of it is there already.
            Self::Raw(_) => Some(u64::MAX),
            Self::Vhd(vhd) => Some(vhd.room()),
        }
    }

    /// What the sectors of this layer are encrypted by. A sector that is in the layer is always encrypted then; one
    /// that is not reads as in any other layer.
    pub fn cipher(&self) -> Option<&DiskCipher> {
        match self {
            Self::Raw(_) => None,
            Self::Vhd(vhd) => vhd.cipher(),
        }
    }

    /// To be held by a request that looks places up in a layer open for writing, from before [`Layer::lookup`] or
    /// [`Layer::prepare`] until the bytes there are read or written: without it a place may meanwhile be given back and
    /// belong to another block.
    pub fn enter(&self) -> Option<Visit<'_>> {
        match self {
            Self::Raw(_) => None,
            Self::Vhd(vhd) => vhd.enter(),
        }
    }

    /// Where the beginning of `want` is; from memory alone.
    pub fn lookup(&self, want: Span) -> Lookup {
        match self {
            Self::Raw(raw) => Lookup::Extent(raw.lookup(want)),
            Self::Vhd(vhd) => vhd.lookup(want),
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
        }
    }

    /// [`Layer::prepare`] where it needs no waiting.
    pub fn prepare_now(&self, want: Span) -> Option<Extent> {
        match self {
            Self::Raw(raw) => Some(raw.lookup(want)),
            Self::Vhd(vhd) => vhd.prepare_now(want),
        }
    }

    /// The data of a span that [`Layer::prepare`] gave the place at `offset` is there: it may be read from now on.
    /// Returns whether metadata must be written before the write is durable; then the caller lets [`Layer::settle`]
    /// run.
    pub fn written(&self, span: Span, offset: u64) -> bool {
        match self {
            Self::Raw(_) => false,
            Self::Vhd(vhd) => vhd.written(span, offset),
        }
    }

    /// The write to a span that [`Layer::prepare`] gave a place failed: nothing of it becomes visible.
    pub fn not_written(&self, span: Span) {
        match self {
            Self::Raw(_) => {}
            Self::Vhd(vhd) => vhd.not_written(span),
        }
    }

    /// Waits while too much metadata is waiting to be written.
    ///
    /// # Errors
    /// The storage's.
    pub async fn settle(&self) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
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
        }
    }
}
