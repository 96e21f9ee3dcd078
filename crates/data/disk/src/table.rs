//! The disks of the process: where each stands, its marker, its files of counters, and how it is reached.
//!
//! Everything the control protocol needs to know that is not moving data. Where data is moved is behind [`Plane`].
//!
//! Locks: the table's is held to look something up, a disk's to read or replace what it says of itself; neither is
//! held while the data plane works, so questions are answered during a pause.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tapio_control::command::{Grow, Handle, Open, SecretName, Snapshot, SwapLeaf};
use tapio_control::{
    BlkifReport, ControlError, DiskEntry, DiskInfo, DriverType, Errno, Front, FrontEntry, ImageSource,
    ImageStats, Key, MINOR_MAX, MarkerLock, MirrorPivoted, RequestReport, Result, RoomReport, RunDir,
    VbdState, VbdStats, XenbusStats,
};
use tapio_stat::{DiskName, DiskStats, RequestKind, ShmRoot, StatsView, VbdId, VbdPages};
use tapio_types::{ImageKind, LayerSpec};

mod taps;

use crate::log;

pub use taps::{Secondary, TapRequest};

/// See `Table::quit_time`. A service manager kills after a minute and a half at the latest.
const QUIT_TIME: Duration = Duration::from_secs(30);

/// What the data plane opens a disk with.
#[derive(Debug)]
pub struct OpenSpec<'a> {
    /// What was asked.
    pub command: &'a Open,
    /// Time after which a request fails; the data plane's own default without.
    pub request_timeout: Option<Duration>,
    /// The taps of its disk.
    pub taps: &'a TapRequest,
    /// The key of an encrypted image.
    pub key: Option<&'a Key>,
}

/// One image of an open chain, leaf first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneImage {
    /// Kind.
    pub kind: ImageKind,
    /// Path.
    pub path: String,
    /// Sectors read and written here.
    pub hits: [u64; 2],
    /// Requests that failed here.
    pub fail: [u64; 2],
}

/// What the data plane says of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaneStatus {
    /// The images are closed and the guest waits.
    pub paused: bool,
    /// Requests taken and not answered.
    pub in_flight: u64,
    /// Of these, requests that the storage keeps for longer than they may take.
    pub stuck: u64,
    /// Images, leaf first; none while paused.
    pub images: Vec<PlaneImage>,
    /// Sectors written to the second image because the first is full.
    pub redirected: u64,
    /// The first image is the standby, which took over from the second.
    pub on_standby: bool,
    /// The mirror was lost.
    pub mirror_lost: bool,
    /// The disk, when it was paused the last time, had a standby that had not taken over.
    pub standby_waited: bool,
    /// Requests in the storage, those that began first.
    pub oldest: Vec<RequestReport>,
    /// The devices of Xen guests, with their rings.
    pub rings: Vec<BlkifReport>,
    /// The room of a disk that asks for it.
    pub room: Option<RoomReport>,
}

/// Where disks are made.
pub trait Plane: Sync {
    /// An open disk.
    type Disk: PlaneDisk;
    /// Opens one. The counters go with it.
    fn open(&self, spec: &OpenSpec<'_>, stats: DiskStats) -> Result<Self::Disk>;
}

/// An open disk. Called by one thread at a time, but for `status` and `connections`.
pub trait PlaneDisk: Handle<Grow> + Handle<Snapshot> + Handle<SwapLeaf> + Send + Sync {
    /// What it looks like.
    fn info(&self) -> DiskInfo;
    /// What it does now; must not wait for the storage.
    fn status(&self) -> Result<PlaneStatus>;
    /// Drains and closes the images. Gives up with `ECANCELED` once `is_cancelled` says so; the drain may go on then.
    fn pause(&self, is_cancelled: &dyn Fn() -> bool) -> Result<()>;
    /// Opens an image with its taps, and goes on.
    fn resume(&self, image: &ImageSource, taps: &TapRequest) -> Result<()>;
    /// Closes all of a disk that was drained; with `force` one that was not, without waiting for long.
    fn close(&self, force: bool) -> Result<()>;
    /// Publishes the disk under these pages; answers the slot in its counters.
    fn publish(&self, pages: Box<VbdPages>) -> Result<usize>;
    /// Withdraws a slot; dropping the pages removes their files.
    fn withdraw(&self, slot: usize) -> Option<Box<VbdPages>>;
    /// Serves a front end, counting in `slot`; answers it as it is served.
    fn front_add(&self, id: u32, front: Front, fds: Vec<OwnedFd>, slot: usize) -> Result<Front>;
    /// Whether it is a device that one user has claimed alone.
    fn front_claimed(&self, id: u32) -> bool;
    /// Ends one: its clients are disconnected.
    fn front_remove(&self, id: u32) -> Result<()>;
    /// Reports another size to `news` from now on, as long as there is the front end.
    fn front_follow(&self, id: u32, news: UnixStream) -> Result<()>;
    /// Says by which names clients find a guarded export, and cuts off those that came by some.
    fn front_admit(&self, id: u32, names: &[SecretName], cut: &[SecretName]) -> Result<()>;
    /// Clients of one.
    fn connections(&self, id: u32) -> u32;
    /// The images of a disk that has moved to others by itself since the last time it was asked, leaf first; must not
    /// wait for the storage.
    fn moved(&self) -> Option<Vec<LayerSpec>>;
    /// Switches over to the second side of its mirror; says onto which image, and how long the guest waited.
    fn mirror_pivot(&self) -> Result<(ImageSource, MirrorPivoted)>;
}

/// A disk by its minor number.
pub(crate) struct Disk<D> {
    pub(crate) minor: u16,
    /// Given up when the disk is detached, however many still look at the disk.
    marker: Mutex<Option<MarkerLock>>,
    /// The number was taken by this process itself and is given back with the disk.
    own_minor: bool,
    pub(crate) now: Mutex<Now<D>>,
}

/// What a disk is at this moment.
pub(crate) struct Now<D> {
    pub(crate) state: VbdState,
    pub(crate) open: Option<Opened<D>>,
}

impl<D> Now<D> {
    /// Whether `plane` is what is open.
    pub(crate) fn is_of(&self, plane: &Arc<D>) -> bool {
        self.open.as_ref().is_some_and(|open| Arc::ptr_eq(&open.plane, plane))
    }
}

/// A disk with an image.
pub(crate) struct Opened<D> {
    pub(crate) plane: Arc<D>,
    pub(crate) image: ImageSource,
    pub(crate) read_only: bool,
    /// A second image, a log of changed blocks: for the caller that makes the disk again.
    pub(crate) beside: Vec<String>,
    /// The second image that it was last opened with.
    pub(crate) secondary: Option<Secondary>,
    pub(crate) view: StatsView,
    pub(crate) fronts: Vec<FrontEntry>,
    pub(crate) published: Vec<(VbdId, usize)>,
    pub(crate) next_front: u32,
}

/// All disks of the process.
pub struct Table<P: Plane> {
    pub(crate) plane: P,
    pub(crate) run: RunDir,
    shm: ShmRoot,
    /// How long the end of the process waits for requests in flight, over all disks.
    pub(crate) quit_time: Duration,
    disks: Mutex<BTreeMap<u16, Arc<Disk<P::Disk>>>>,
}

fn missing(minor: u16) -> ControlError {
    ControlError::new(Errno::ENODEV, format!("this process has no disk {minor}"))
        .next("'tap-ctl list' shows which it has")
}

pub(crate) fn not_open(minor: u16) -> ControlError {
    ControlError::new(Errno::ENODEV, format!("disk {minor} has no image open")).next("open one first")
}

impl<P: Plane> Table<P> {
    /// No disks yet.
    pub fn new(plane: P, run: RunDir, shm: ShmRoot) -> Self {
        Self { plane, run, shm, quit_time: QUIT_TIME, disks: Mutex::default() }
    }

    /// Attaches a number that this process has taken for itself.
    pub fn attach_own(&self, minor: u16) -> Result<()> {
        self.insert(minor, true)
    }

    pub(crate) fn insert(&self, minor: u16, own_minor: bool) -> Result<()> {
        if minor >= MINOR_MAX {
            return Err(ControlError::new(Errno::EINVAL, format!("minor numbers end below {MINOR_MAX}")));
        }
        let mut disks = self.disks.lock();
        if disks.contains_key(&minor) {
            return Err(ControlError::new(Errno::EEXIST, format!("disk {minor} is attached already")));
        }
        let marker = Mutex::new(Some(self.run.minors().lock(minor)?));
        let now = Mutex::new(Now { state: VbdState::Running, open: None });
        disks.insert(minor, Arc::new(Disk { minor, marker, own_minor, now }));
        Ok(())
    }

    pub(crate) fn disk(&self, minor: u16) -> Result<Arc<Disk<P::Disk>>> {
        self.disks.lock().get(&minor).cloned().ok_or_else(|| missing(minor))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Disk<P::Disk>>> {
        self.disks.lock().values().cloned().collect()
    }

    /// The counters' files, or counters without files where there is no shared memory: a disk must not fail for want
    /// of statistics.
    pub(crate) fn counters(&self, minor: u16) -> Result<DiskStats> {
        let name = DiskName::of_this_process(minor.into());
        DiskStats::create(&self.shm, &name).or_else(|error| {
            log::line(&format!("disk {minor} has no statistics in {}: {error}", self.shm.path().display()));
            DiskStats::private(&name).map_err(|error| ControlError::io("making counters", &error))
        })
    }

    /// The files under the numbers that were asked for, or else the disk's own: a disk must not fail for want of
    /// statistics, but numbers that a client chose must not be lost silently. `nbd` adds the file of a disk reached by
    /// NBD, of which there is one per disk.
    pub(crate) fn pages(&self, minor: u16, id: VbdId, is_asked: bool, nbd: bool) -> Result<Box<VbdPages>> {
        match VbdPages::create(&self.shm, std::process::id(), minor.into(), id, nbd) {
            Ok(pages) => Ok(pages),
            Err(error) if is_asked => {
                Err(ControlError::io(format_args!("disk {minor} cannot be published as {id}"), &error)
                    .next("choose other numbers"))
            }
            Err(error) => {
                log::line(&format!("disk {minor} is not published as {id}: {error}"));
                VbdPages::private(id).map_err(|error| ControlError::io("making counters", &error))
            }
        }
    }

    /// Drains while clients are still there to get their answers, then ends the front ends, then closes.
    pub(crate) fn close_disk(
        &self,
        disk: &Disk<P::Disk>,
        force: bool,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        let Some(plane) = disk.plane() else { return Ok(()) };
        disk.now.lock().state = VbdState::Closing;
        if !force {
            match plane.pause(is_cancelled) {
                Ok(()) => {}
                Err(error) if error.errno == Errno::ECANCELED => {
                    // As a pause that was left: the next caller may close it or let it go on.
                    disk.now.lock().state = VbdState::Pausing;
                    return Err(error);
                }
                // Closing says again what is wrong.
                Err(error) => log::line(&format!("disk {}: {error}", disk.minor)),
            }
        }
        let fronts = self.end_fronts(disk);
        let closed = plane.close(force);
        // The images are not served any more, whatever went wrong: a disk that stays open can never be detached.
        *disk.now.lock() = Now { state: VbdState::Closed, open: None };
        closed.and(fronts)
    }
}

impl<D: PlaneDisk> Disk<D> {
    /// The open disk in the data plane.
    fn plane(&self) -> Option<Arc<D>> {
        self.now.lock().open.as_ref().map(|open| Arc::clone(&open.plane))
    }

    pub(crate) fn opened(&self) -> Result<Arc<D>> {
        self.plane().ok_or_else(|| not_open(self.minor))
    }

    /// A pause whose client left may have ended since.
    pub(crate) fn state(&self) -> VbdState {
        let (state, plane) = {
            let now = self.now.lock();
            (now.state, now.open.as_ref().map(|open| Arc::clone(&open.plane)))
        };
        if state == VbdState::Pausing
            && plane.is_some_and(|plane| plane.status().is_ok_and(|status| status.paused))
        {
            self.now.lock().state = VbdState::Paused;
            return VbdState::Paused;
        }
        state
    }

    /// The disk may have moved to other images, and is opened again with these.
    pub(crate) fn note_moved(&self) {
        if let Some(images) = self.plane().and_then(|plane| plane.moved())
            && let Some(open) = &mut self.now.lock().open
        {
            open.image.move_to(images);
        }
    }

    /// A chain that was given image by image is opened again as it is now: images may have left it since.
    pub(crate) fn note_chain(&self, plane: &D) {
        let Ok(status) = plane.status() else { return };
        if let Some(Opened { image: ImageSource::Chain(layers), .. }) = &mut self.now.lock().open
            && !status.images.is_empty()
        {
            let layer = |image: PlaneImage| LayerSpec { kind: image.kind, path: image.path.into() };
            // A standby that took over is no image of the chain: the note beside the next image leads to it.
            let standby = usize::from(status.on_standby);
            *layers = status.images.into_iter().skip(standby).map(layer).collect();
        }
    }

    fn entry(&self) -> DiskEntry {
        let state = self.state();
        self.note_moved();
        let now = self.now.lock();
        DiskEntry {
            minor: self.minor,
            state,
            image: now.open.as_ref().map(|open| open.image.text()),
            read_only: now.open.as_ref().is_some_and(|open| open.read_only),
            fronts: now.open.as_ref().map_or_else(Vec::new, Opened::fronts),
        }
    }
}

impl<D: PlaneDisk> Opened<D> {
    pub(crate) fn fronts(&self) -> Vec<FrontEntry> {
        let with_clients = |front: &FrontEntry| FrontEntry {
            connections: self.plane.connections(front.id),
            ..front.clone()
        };
        self.fronts.iter().map(with_clients).collect()
    }
}

/// The part of a ring that the tapdisk protocol's statistics have.
fn xenbus(ring: &BlkifReport) -> XenbusStats {
    let counts = &ring.counts;
    XenbusStats {
        pool: ring.pool.clone(),
        domid: ring.domid,
        devid: ring.devid,
        reqs: [counts.requests, counts.responses],
        kicks: [counts.kicks_in, counts.kicks_out],
        errors: [counts.errors_message, counts.errors_map, counts.errors_disk, 0],
    }
}

pub(crate) fn driver(kind: ImageKind) -> DriverType {
    match kind {
        ImageKind::Raw => DriverType::Aio,
        ImageKind::Vhd => DriverType::Vhd,
        ImageKind::Nbd => DriverType::Nbd,
        ImageKind::Rbd => DriverType::Rbd,
    }
}

impl<P: Plane> Table<P> {
    /// The disks, by minor number.
    pub fn list(&self) -> Vec<DiskEntry> {
        self.all().iter().map(|disk| disk.entry()).collect()
    }

    /// Whether the last disk was detached.
    pub fn is_empty(&self) -> bool {
        self.disks.lock().is_empty()
    }

    /// Forgets a disk that is not open.
    pub(crate) fn forget(&self, disk: &Disk<P::Disk>) -> Result<()> {
        self.disks.lock().remove(&disk.minor);
        drop(disk.marker.lock().take());
        if disk.own_minor {
            self.run.minors().free(disk.minor)?;
        }
        Ok(())
    }

    /// The data plane of an open disk.
    pub(crate) fn opened(&self, minor: u16) -> Result<Arc<P::Disk>> {
        self.disk(minor)?.opened()
    }

    /// That of one which must be running.
    pub(crate) fn running(&self, minor: u16) -> Result<Arc<P::Disk>> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        match disk.state() {
            VbdState::Running => Ok(plane),
            state => Err(ControlError::new(Errno::EINVAL, format!("disk {minor} is {}", word(state)))
                .next("resume it first")),
        }
    }

    /// Statistics in tapdisk's form.
    pub fn stats(&self, minor: u16) -> Result<VbdStats> {
        let disk = self.disk(minor)?;
        let open = disk
            .now
            .lock()
            .open
            .as_ref()
            .map(|open| (Arc::clone(&open.plane), open.view.clone(), open.image.text()));
        let Some((plane, view, name)) = open else { return Ok(VbdStats::default()) };
        let counters = view.snapshot();
        let status = plane.status()?;
        let image = |image: PlaneImage| ImageStats {
            name: image.path,
            hits: image.hits,
            fail: image.fail,
            driver: driver(image.kind),
            requests: (image.kind == ImageKind::Raw).then_some([counters.queue_depth, status.in_flight]),
        };
        Ok(VbdStats {
            name: Some(name),
            secs: [
                counters.kind(RequestKind::Read).bytes / 512,
                counters.kind(RequestKind::Write).bytes / 512,
            ],
            images: status.images.iter().cloned().map(image).collect(),
            outstanding: status.in_flight,
            enospc_redirects: status.redirected,
            mirror_failed: status.mirror_lost,
            xenbus: status.rings.first().map(xenbus),
            room: status.room,
        })
    }
}

pub(crate) fn word(state: VbdState) -> &'static str {
    match state {
        VbdState::Running => "running",
        VbdState::Pausing => "pausing",
        VbdState::Paused => "paused",
        VbdState::ResumeFailed => "paused after a failed resume",
        VbdState::Closing => "closing",
        VbdState::Closed => "closed",
    }
}

#[cfg(test)]
mod tests;
