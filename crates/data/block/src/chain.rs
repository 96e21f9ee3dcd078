//! The walk down a chain: from a guest's span to the storages that hold it.

mod clear;
mod encrypted;
mod owned;
mod pieces;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;

use tapio_format::live::{Extent as Mapped, Layer, Lookup, Place};
use tapio_format::{FormatError, Result};
use tapio_ring::{Segments, Storage, Tasks, Zeroing};
use tapio_types::{Access, ChainSpec, LayerSpec, SECTOR_LEN, Span};

use crate::meter::Meter;
use crate::port::Extent;
use crate::transfers::Transfers;
use crate::window::Window;
use encrypted::Buffers;

/// Pieces of one request in flight at once.
const PIECES_MAX: usize = 4;

/// What a layer of an open chain has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCounters {
    /// Sectors read.
    pub sectors_read: u64,
    /// Sectors written.
    pub sectors_written: u64,
    /// Transfers that failed, reading.
    pub reads_failed: u64,
    /// Transfers that failed, writing.
    pub writes_failed: u64,
}

impl LayerCounters {
    /// What was done after `before`.
    pub(crate) const fn since(&self, before: &Self) -> Self {
        Self {
            sectors_read: self.sectors_read - before.sectors_read,
            sectors_written: self.sectors_written - before.sectors_written,
            reads_failed: self.reads_failed - before.reads_failed,
            writes_failed: self.writes_failed - before.writes_failed,
        }
    }
}

/// An open image and what was done with it. Shared by the chain before a change of images and the one after it.
#[derive(Debug)]
pub struct Link<S: Storage> {
    /// The image.
    pub layer: Layer<S>,
    /// How it is named: files may get other names while they are open.
    spec: RefCell<LayerSpec>,
    counters: Cell<LayerCounters>,
    /// It was the leaf, and what was written to it then is not known to be durable yet.
    unsettled: Cell<bool>,
    /// Another image is being merged into it, or it could not be closed after that.
    merged_into: Cell<bool>,
}

impl<S: Storage> Link<S> {
    /// A link for `layer`, which was opened as `spec` says.
    pub fn new(layer: Layer<S>, spec: LayerSpec) -> Rc<Self> {
        Rc::new(Self {
            layer,
            spec: RefCell::new(spec),
            counters: Cell::default(),
            unsettled: Cell::new(false),
            merged_into: Cell::new(false),
        })
    }

    /// A link for `layer`, which is the image of this one opened again.
    pub fn reopened(&self, layer: Layer<S>) -> Rc<Self> {
        let counters = Cell::new(self.counters.get());
        Rc::new(Self {
            layer,
            spec: RefCell::new(self.spec()),
            counters,
            unsettled: Cell::new(false),
            merged_into: Cell::new(false),
        })
    }

    /// How it is named.
    pub fn spec(&self) -> LayerSpec {
        self.spec.borrow().clone()
    }

    /// Its file has another name from now on.
    pub(crate) fn rename(&self, spec: LayerSpec) {
        *self.spec.borrow_mut() = spec;
    }

    /// Sets whether writes to this image are still to be made durable, although it is not the leaf.
    pub fn set_unsettled(&self, unsettled: bool) {
        self.unsettled.set(unsettled);
    }

    /// Sets whether another image is being merged into it.
    pub(crate) fn set_merged_into(&self, merged_into: bool) {
        self.merged_into.set(merged_into);
    }

    /// Whether more is known of it here than its storage would tell after a death: see `change/parent.rs`.
    pub(crate) const fn is_volatile(&self) -> bool {
        self.unsettled.get() || self.merged_into.get()
    }

    /// What was done with it.
    pub const fn counters(&self) -> LayerCounters {
        self.counters.get()
    }

    /// Counts what another thread did with it.
    pub(crate) fn add(&self, more: &LayerCounters) {
        self.count(|counters| {
            counters.sectors_read += more.sectors_read;
            counters.sectors_written += more.sectors_written;
            counters.reads_failed += more.reads_failed;
            counters.writes_failed += more.writes_failed;
        });
    }

    fn count(&self, change: impl FnOnce(&mut LayerCounters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    fn failed(&self, what: &'static str, offset: u64, error: std::io::Error) -> FormatError {
        FormatError::io(what, error).with_offset(offset).with_path(&self.spec.borrow().path)
    }
}

/// The images of a disk, open, leaf first. A list: nothing recurses.
#[derive(Debug)]
pub struct Chain<S: Storage> {
    links: Vec<Rc<Link<S>>>,
    access: Access,
    len: Cell<u64>,
    /// Memory to encrypt in.
    buffers: Buffers,
    tasks: Tasks,
    transfers: Rc<Transfers>,
}

/// Where a piece of a span is.
#[derive(Clone, Copy, Debug)]
enum Target {
    Data { layer: usize, offset: u64 },
    Zero,
}

impl<S: Storage> Chain<S> {
    /// A chain of `links`, leaf first, whose data goes by `transfers`.
    pub(crate) fn new(
        links: Vec<Rc<Link<S>>>,
        access: Access,
        tasks: Tasks,
        transfers: Rc<Transfers>,
    ) -> Self {
        let len = Cell::new(links[0].layer.virtual_len() / SECTOR_LEN * SECTOR_LEN);
        Self { links, access, len, buffers: Buffers::default(), tasks, transfers }
    }

    /// How its data goes.
    pub(crate) const fn transfers(&self) -> &Rc<Transfers> {
        &self.transfers
    }

    /// Bytes of the disk.
    pub const fn len(&self) -> u64 {
        self.len.get()
    }

    /// Whether the disk has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How the leaf was opened.
    pub const fn access(&self) -> Access {
        self.access
    }

    /// The images and how they were opened, leaf first.
    pub fn spec(&self) -> ChainSpec {
        ChainSpec { layers: self.links.iter().map(|link| link.spec()).collect(), access: self.access }
    }

    /// The images, leaf first.
    pub fn links(&self) -> &[Rc<Link<S>>] {
        &self.links
    }

    /// What each layer has done, leaf first.
    pub fn counters(&self) -> Vec<LayerCounters> {
        self.links.iter().map(|link| link.counters.get()).collect()
    }

    /// See [`Layer::growths`], of the leaf.
    pub fn growths(&self) -> Option<u64> {
        self.leaf().growths()
    }

    fn leaf(&self) -> &Layer<S> {
        &self.links[0].layer
    }

    /// Where the beginning of `span` is. From memory, but for bitmaps that have to be read first.
    async fn resolve(&self, span: Span) -> Result<(u64, Target)> {
        self.resolve_from(0, span).await
    }

    /// [`Chain::resolve`], beginning with the layer `first`.
    async fn resolve_from(&self, first: usize, span: Span) -> Result<(u64, Target)> {
        let mut len = span.len;
        for (index, link) in self.links.iter().enumerate().skip(first) {
            let layer = &link.layer;
            // A layer may be shorter than the ones above it: behind its end there is nothing.
            let Some(inside) = layer.virtual_len().checked_sub(span.start).filter(|inside| *inside > 0)
            else {
                return Ok((len, Target::Zero));
            };
            len = len.min(inside);
            let want = span.prefix(len);
            let extent = loop {
                match layer.lookup(want) {
                    Lookup::Extent(extent) => break extent,
                    // Boxed, like every path that is rare: a request task has room for the common ones only.
                    Lookup::Miss { block } => Box::pin(layer.load(block)).await?,
                }
            };
            len = extent.len;
            match extent.place {
                Place::Data { offset } => return Ok((len, Target::Data { layer: index, offset })),
                Place::Zero => return Ok((len, Target::Zero)),
                Place::Parent => {}
            }
        }
        Ok((len, Target::Zero))
    }

    /// Reads `span`, which lies inside the disk.
    ///
    /// # Errors
    /// The storage's; damage found on the way.
    pub async fn read(&self, span: Span, into: Segments, meter: &Meter) -> Result<()> {
        let _visit = self.leaf().enter();
        let (len, target) = self.resolve(span).await?;
        if len == span.len {
            return self.read_piece(target, span.start, into, meter).await;
        }
        self.transfers.pass().await;
        let mut window = pin!(Window::<_, _, PIECES_MAX>::new());
        let first = self.read_beside(target, span.start, into.slice(0, len), meter);
        window.as_mut().push(first).await;
        let mut done = len;
        let mut found = Ok(());
        while done < span.len {
            match self.resolve(span.skip(done)).await {
                Ok((len, target)) => {
                    let (at, into) = (span.start + done, into.slice(done, len));
                    let piece = self.read_beside(target, at, into, meter);
                    window.as_mut().push(piece).await;
                    done += len;
                }
                Err(error) => {
                    found = Err(error);
                    break;
                }
            }
        }
        window.finish().await.and(found)
    }

    async fn prepare(&self, span: Span) -> Result<Mapped> {
        match self.leaf().prepare_now(span) {
            Some(extent) => Ok(extent),
            None => Box::pin(self.leaf().prepare(span)).await,
        }
    }

    /// Writes `span`, which lies inside the disk.
    ///
    /// # Errors
    /// The storage's; no space. Parts of the span may have been written.
    pub async fn write(&self, span: Span, from: Segments, meter: &Meter) -> Result<()> {
        let _visit = self.leaf().enter();
        let extent = self.prepare(span).await?;
        if extent.len == span.len {
            return self.write_piece(extent, span, Piece::Data(from), meter).await;
        }
        self.transfers.pass().await;
        let mut window = pin!(Window::<_, _, PIECES_MAX>::new());
        let first = self.write_beside(extent, span.prefix(extent.len), from.slice(0, extent.len), meter);
        window.as_mut().push(first).await;
        let mut done = extent.len;
        let mut found = Ok(());
        while done < span.len {
            match self.prepare(span.skip(done)).await {
                Ok(extent) => {
                    let piece = span.skip(done).prefix(extent.len);
                    let data = from.slice(done, extent.len);
                    window.as_mut().push(self.write_beside(extent, piece, data, meter)).await;
                    done += extent.len;
                }
                Err(error) => {
                    found = Err(error);
                    break;
                }
            }
        }
        window.finish().await.and(found)
    }

    /// Makes the disk longer by making its leaf so.
    ///
    /// # Errors
    /// As [`Layer::grow`].
    pub async fn grow(&self, len: u64) -> Result<()> {
        self.leaf().grow(len).await?;
        self.len.set(self.leaf().virtual_len() / SECTOR_LEN * SECTOR_LEN);
        Ok(())
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// The storage's.
    pub async fn sync(&self, meter: &Meter) -> Result<()> {
        meter.issued(self.tasks.turn_ns());
        let result = match self.unsettled().next() {
            None => self.leaf().sync().await,
            Some(_) => Box::pin(self.sync_all()).await,
        };
        meter.returned(self.tasks.turn_ns());
        result
    }

    /// Images that were the leaf a moment ago.
    fn unsettled(&self) -> impl Iterator<Item = &Rc<Link<S>>> {
        self.links[1..].iter().filter(|link| link.unsettled.get())
    }

    async fn sync_all(&self) -> Result<()> {
        for link in self.unsettled() {
            link.layer.sync().await?;
        }
        self.leaf().sync().await
    }

    /// Leaves the images as other tools expect them. Nothing may be in flight.
    ///
    /// # Errors
    /// The storage's.
    pub async fn close(&self) -> Result<()> {
        let mut result = Ok(());
        for link in self.unsettled() {
            result = result.and(link.layer.close().await);
        }
        self.leaf().close().await.and(result)
    }

    /// How much of the beginning of `span` is alike in that the leaf itself holds it, or does not.
    ///
    /// # Errors
    /// The storage's.
    pub async fn held_by_leaf(&self, span: Span) -> Result<(u64, bool)> {
        let leaf = self.leaf();
        let want = span.prefix(span.len.min(leaf.virtual_len().saturating_sub(span.start)));
        if want.is_empty() {
            return Ok((span.len, false));
        }
        loop {
            match leaf.lookup(want) {
                Lookup::Extent(extent) => {
                    return Ok((extent.len, matches!(extent.place, Place::Data { .. })));
                }
                Lookup::Miss { block } => leaf.load(block).await?,
            }
        }
    }

    /// Whether all of `span` surely reads as zero, which the tables alone can tell.
    ///
    /// # Errors
    /// The storage's.
    pub async fn reads_zero(&self, span: Span) -> Result<bool> {
        let (len, target) = self.resolve(span).await?;
        Ok(len == span.len && matches!(target, Target::Zero))
    }

    /// What the leaf itself keeps of `span`: a hole is where the image below shows through, or where there is nothing
    /// at all.
    ///
    /// # Errors
    /// The storage's.
    pub async fn leaf_extents(&self, span: Span) -> Result<Vec<Extent>> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = span;
        while !left.is_empty() {
            let (len, hole) = match self.leaf().lookup(left) {
                Lookup::Miss { block } => {
                    Box::pin(self.leaf().load(block)).await?;
                    continue;
                }
                Lookup::Extent(Mapped { len, place: Place::Parent }) => (len, true),
                Lookup::Extent(Mapped { len, place: Place::Zero }) => (len, self.links.len() == 1),
                Lookup::Extent(Mapped { len, place: Place::Data { offset } }) => {
                    let (known, has_data) = self.leaf().store().data_run(Span::new(offset, len)).await;
                    (known, !has_data && self.links.len() == 1)
                }
            };
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.len += len,
                _ => extents.push(Extent { len, hole, zero: hole }),
            }
            left = left.skip(len);
        }
        Ok(extents)
    }

    /// What is allocated in `span`: see [`crate::AllocationMap::extents`].
    ///
    /// # Errors
    /// The storage's.
    pub async fn extents(&self, span: Span, count_max: usize) -> Result<Vec<Extent>> {
        self.extents_while(span, count_max, &|| true).await
    }

    /// The same; what is looked at when it is not `in_time` any more counts as data.
    ///
    /// # Errors
    /// The storage's.
    pub async fn extents_while(
        &self,
        span: Span,
        count_max: usize,
        in_time: &dyn Fn() -> bool,
    ) -> Result<Vec<Extent>> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = span;
        while !left.is_empty() {
            let (len, target) = self.resolve(left).await?;
            let count = (count_max.max(1) - extents.len()).saturating_add(1);
            let runs = match target {
                Target::Zero => vec![(len, false)],
                // A hole in an encrypted layer is not zero.
                Target::Data { layer, .. } if self.links[layer].layer.cipher().is_some() => vec![(len, true)],
                Target::Data { .. } if !in_time() => vec![(len, true)],
                Target::Data { layer, offset } => {
                    self.links[layer].layer.store().known_runs(Span::new(offset, len), count).await
                }
            };
            for (len, has_data) in runs {
                let full = extents.len() == count_max.max(1);
                match extents.last_mut() {
                    Some(last) if last.hole != has_data => last.len += len,
                    _ if full => return Ok(extents),
                    _ => extents.push(Extent { len, hole: !has_data, zero: !has_data }),
                }
                left = left.skip(len);
            }
        }
        Ok(extents)
    }
}

/// What goes into a place.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Data(Segments),
    Zero(Zeroing),
}
