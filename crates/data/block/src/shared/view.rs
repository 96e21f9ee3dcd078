//! The images of a disk as its queue threads know them.

use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;
use tapio_format::live::{Layer, SharedLayer, SharedMapping};
use tapio_ring::Io;
use tapio_stat::share::ShareSeat;
use tapio_types::{Access, LayerSpec, Span};

use super::gate::Gate;
use crate::chain::{Chain, Link};
use crate::stages::PageSeat;
use crate::transfers::{LiveSizes, Transfers};

/// One image.
#[derive(Debug)]
struct Image<F> {
    spec: LayerSpec,
    mapping: SharedMapping,
    storage: F,
}

/// The images of a disk, leaf first, between two changes of them.
#[derive(Debug)]
pub(crate) struct View<F> {
    pub id: u64,
    access: Access,
    images: Vec<Image<F>>,
    /// How data goes to the storages.
    sizes: Arc<LiveSizes>,
    /// Where requests take pages, if the disk shares a pool.
    pub seat: Option<Arc<dyn PageSeat>>,
    /// Where they are counted, if the disk shares its device.
    pub share: Option<Arc<ShareSeat>>,
}

impl<F> View<F> {
    /// What queue threads may know of `chain`; `None` where it has an image that only its owner can use.
    pub fn of<I: Io<Share = F>>(
        id: u64,
        chain: &Chain<I::Store>,
        seat: Option<Arc<dyn PageSeat>>,
        share: Option<Arc<ShareSeat>>,
        io: &I,
    ) -> Option<Self> {
        let image = |link: &Rc<Link<I::Store>>| {
            let storage = io.share(link.layer.store())?;
            Some(Image { spec: link.spec(), mapping: link.layer.share()?, storage })
        };
        let images = chain.links().iter().map(image).collect::<Option<_>>()?;
        let sizes = Arc::clone(chain.transfers().sizes());
        Some(Self { id, access: chain.access(), images, sizes, seat, share })
    }

    /// The chain that a queue thread walks.
    pub fn chain<I: Io<Share = F>>(&self, io: &I) -> Chain<I::Store> {
        let link = |image: &Image<F>| {
            let layer = SharedLayer::new(io.adopt(&image.storage), image.mapping.clone());
            Link::new(Layer::Shared(layer), image.spec.clone())
        };
        let transfers = Transfers::new(Arc::clone(&self.sizes), io.tasks().clone());
        Chain::new(self.images.iter().map(link).collect(), self.access, io.tasks().clone(), transfers)
    }
}

/// What all threads of a disk have in common.
#[derive(Debug)]
pub struct Shared<F> {
    pub(super) gate: Gate,
    /// The view that the gate names, for threads that do not have it yet.
    pub(super) view: Mutex<Option<Arc<View<F>>>>,
    /// Changes of queue threads that were answered although the storage still has them.
    told: Mutex<Vec<Span>>,
}

impl<F> Default for Shared<F> {
    fn default() -> Self {
        Self { gate: Gate::new(), view: Mutex::new(None), told: Mutex::default() }
    }
}

impl<F> Shared<F> {
    /// A change of `span` is about to be answered although the storage still has it: whatever touches the same bytes
    /// waits from now on.
    pub(super) fn tell(&self, span: Span) {
        self.told.lock().push(span);
        self.gate.fence();
    }

    /// The storage is done with it.
    pub(super) fn untell(&self, span: Span) {
        let mut told = self.told.lock();
        if let Some(index) = told.iter().position(|other| *other == span) {
            told.swap_remove(index);
            self.gate.unfence();
        }
    }

    /// Whether no such change touches `span`; a load where there is none.
    pub(super) fn is_clear(&self, span: Span) -> bool {
        !self.gate.is_fenced() || !self.told.lock().iter().any(|told| told.overlaps(span))
    }
}
