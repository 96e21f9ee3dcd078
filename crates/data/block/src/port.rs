//! What a front end holds of a disk.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use tapio_ring::{Inbox, Notify, Tasks};
use tapio_stat::trace::Point;
use tapio_types::Span;

use crate::request::{DiskError, Request};
use crate::stages::{Admission, Client};
use crate::taken::{Origin, Taken};
use crate::trace::Trace;

/// The disk as a guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes; a multiple of the logical block.
    pub len: u64,
    /// Bytes of a sector as guests are told, 512 or 4096. Every span must be aligned to 512 all the same.
    pub logical_block_len: u32,
    /// The size of access that costs no extra work below: 4096.
    pub physical_block_len: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The largest request the disk takes, in bytes; front ends cut or refuse above it.
    pub transfer_max: u32,
}

/// A piece of the disk and what is known of its content, for NBD's `base:allocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// No layer of the chain keeps data here.
    pub hole: bool,
    /// Reads as zero.
    pub zero: bool,
}

type ExtentsFuture = Pin<Box<dyn Future<Output = Result<Vec<Extent>, DiskError>>>>;

/// What a port asks of its disk beside requests.
pub trait AllocationMap {
    /// Requests that wait for their turn elsewhere are to be let in: see [`Port::hurry`].
    fn hurry(&self) {}

    /// The extents of `span` in order, neighbours of one kind merged, at most `count_max` of them (then they cover only
    /// the beginning of `span`, never nothing).
    fn extents(&self, span: Span, count_max: usize) -> ExtentsFuture;
}

struct Inner {
    inbox: Rc<Inbox<Taken>>,
    admission: Rc<Admission>,
    tasks: Tasks,
    geometry: Cell<Geometry>,
    map: Rc<dyn AllocationMap>,
    geometry_changed: Notify,
    trace: Rc<Trace>,
    /// Clients so far.
    clients: Cell<u8>,
}

/// A disk as its front ends know it: a cheap handle on the data thread.
#[derive(Clone)]
pub struct Port {
    inner: Rc<Inner>,
    client: Rc<Client>,
    /// Number of the client, modulo 256.
    number: u8,
    origin: Origin,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").field("geometry", &self.inner.geometry.get()).finish_non_exhaustive()
    }
}

impl Port {
    /// A port to the disk that takes requests from `inbox`.
    pub(crate) fn new(
        inbox: Rc<Inbox<Taken>>,
        admission: Rc<Admission>,
        tasks: Tasks,
        geometry: Geometry,
        map: Rc<dyn AllocationMap>,
        trace: Rc<Trace>,
    ) -> Self {
        Self {
            inner: Rc::new(Inner {
                inbox,
                admission,
                tasks,
                geometry: Cell::new(geometry),
                map,
                geometry_changed: Notify::default(),
                trace,
                clients: Cell::new(0),
            }),
            client: Rc::default(),
            number: 0,
            origin: Origin::UNKNOWN,
        }
    }

    /// A port for one more client of the disk, a queue or a connection: where requests must wait for their turn, each
    /// client has its own. Clones of a port are one client.
    #[must_use]
    pub fn client(&self) -> Self {
        let number = self.inner.clients.get().wrapping_add(1);
        self.inner.clients.set(number);
        Self { client: Rc::default(), number, ..self.clone() }
    }

    /// A port whose requests count where `origin` says.
    #[must_use]
    pub fn with_origin(&self, origin: Origin) -> Self {
        Self { origin, ..self.clone() }
    }

    /// The disk as a guest sees it, now.
    pub fn geometry(&self) -> Geometry {
        self.inner.geometry.get()
    }

    /// Changes what guests see: after a resize.
    pub fn set_geometry(&self, geometry: Geometry) {
        if self.inner.geometry.replace(geometry) != geometry {
            self.inner.geometry_changed.notify_all(&self.inner.tasks);
        }
    }

    /// Waits until the geometry is another than `known`, and gives it: for front ends that tell their guests.
    pub async fn geometry_changed(&self, known: Geometry) -> Geometry {
        while self.geometry() == known {
            self.inner.geometry_changed.wait(&self.inner.tasks).await;
        }
        self.geometry()
    }

    /// The tasks of the data thread.
    pub fn tasks(&self) -> &Tasks {
        &self.inner.tasks
    }

    /// How many requests may be submitted now; 0 while the disk is paused, or this client's next one waits already.
    #[inline]
    pub fn room(&self) -> usize {
        let room = self.inner.inbox.room();
        if self.inner.admission.is_on() { self.inner.admission.room(&self.client, room) } else { room }
    }

    /// Whether nothing is let in because the disk is paused.
    pub fn is_paused(&self) -> bool {
        !self.inner.inbox.is_open()
    }

    /// Waits until there is room for a request.
    pub async fn wait_room(&self) {
        while self.room() == 0 {
            self.inner.admission.freed().wait(&self.inner.tasks).await;
        }
    }

    /// Hands a request to the disk. It always ends in exactly one [`crate::Completion::complete`], also where it makes
    /// no sense (out of range, unaligned, read-only): the disk checks, the front end need not. Handed back when there
    /// is no room, which the front end asks about before it takes a request from its guest.
    #[inline]
    pub fn submit(&self, request: Request) -> Result<(), Request> {
        let taken = Taken { request, origin: self.origin, pages: 0, client: self.number };
        if self.inner.admission.is_on() {
            return self.inner.admission.submit(&self.client, taken);
        }
        self.inner.inbox.push(taken).map_err(|taken| taken.request)
    }

    /// Lets in what waits for its turn, whatever it costs, which stays to be paid: when a client must come to an end.
    pub fn hurry(&self) {
        if self.inner.admission.is_on() {
            self.inner.admission.admit_all();
        }
        self.inner.map.hurry();
    }

    /// Whether requests are traced now: one load. Front ends ask before they do anything for the trace alone.
    #[inline]
    pub fn is_traced(&self) -> bool {
        self.inner.trace.is_on()
    }

    /// Request `tag` passes a point; see [`Point`] for `aux`. A load while tracing is off.
    #[inline]
    pub fn note(&self, point: Point, tag: u64, aux: u32) {
        self.inner.trace.note(point, self.number, tag as u16, aux);
    }

    /// The time now, as points are stamped, for [`Port::note_at`]; zero while tracing is off, which costs a load.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.inner.trace.stamp()
    }

    /// Request `tag` passed a point at `stamp`; nothing at a stamp of zero.
    #[inline]
    pub fn note_at(&self, stamp: u64, point: Point, tag: u64, aux: u32) {
        self.inner.trace.note_at(stamp, point, self.number, tag as u16, aux);
    }

    /// All requests of this client pass a point that have come so far. A load while tracing is off.
    #[inline]
    pub fn note_all(&self, point: Point) {
        self.inner.trace.note_all(point, self.number);
    }

    /// What is allocated in `span`; see [`AllocationMap::extents`].
    pub async fn extents(&self, span: Span, count_max: usize) -> Result<Vec<Extent>, DiskError> {
        self.inner.map.extents(span, count_max).await
    }
}
