//! The disks of the process: where each stands, its marker, its files of counters, and how it is reached.
//!
//! Everything the control protocol needs to know that is not moving data. Where data is moved is behind [`Plane`].
//!
//! Locks: the table's is held to look something up, a disk's to read or replace what it says of itself; neither is
//! held while the data plane works, so questions are answered during a pause.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tapio_control::{
    Blkif, BlkifFront, BlkifReport, Caller, ControlError, DiskEntry, DiskHost, DiskInfo, DiskReport,
    DriverType, Errno, Front, FrontEntry, FrontRequest, ImageAnswer, ImageReport, ImageSource, ImageStats,
    ImageWork, Key, LimitsReport, MINOR_MAX, MarkerLock, MirrorPivoted, MirrorReport, MirrorRequest,
    OpenRequest, Polling, PoolSpec, Result, ResumeRequest, RunDir, TraceReport, VbdState, VbdStats,
    XenbusStats,
};
use tapio_stat::{DiskName, DiskStats, Kind, ShmRoot, StatsView, VbdId, VbdPages};
use tapio_types::{ImageKind, IoLimits, LayerSpec};

mod mirror;

pub use mirror::{PlaneMirror, Secondary, Wishes};

/// Front ends of one disk.
const FRONTS_MAX: usize = 16;

/// See `Table::patience`. A service manager kills after a minute and a half at the latest.
const QUIT_TIME: Duration = Duration::from_secs(30);

/// What the data plane is told when a disk is opened.
#[derive(Debug)]
pub struct OpenSpec<'a> {
    /// Number of the disk.
    pub minor: u16,
    /// Leaf or chain.
    pub image: &'a ImageSource,
    /// Refuse writes.
    pub read_only: bool,
    /// Time after which a request fails; the data plane's own default without.
    pub request_timeout: Option<Duration>,
    /// What it has beside the image.
    pub wishes: &'a Wishes,
    /// The key of an encrypted image.
    pub key: Option<&'a Key>,
    /// Share this page pool.
    pub pool: Option<&'a PoolSpec>,
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
}

/// Where disks are made.
pub trait Plane: Sync {
    /// An open disk.
    type Disk: PlaneDisk;
    /// Opens one. The counters go with it.
    fn open(&self, spec: &OpenSpec<'_>, stats: DiskStats) -> Result<Self::Disk>;
}

/// An open disk. Called by one thread at a time, but for `status` and `connections`.
pub trait PlaneDisk: PlaneMirror + Send + Sync {
    /// What it looks like.
    fn info(&self) -> DiskInfo;
    /// What it does now; must not wait for the storage.
    fn status(&self) -> Result<PlaneStatus>;
    /// Drains and closes the images. Gives up with `ECANCELED` once `in_vain` says so; the drain may go on then.
    fn pause(&self, in_vain: &dyn Fn() -> bool) -> Result<()>;
    /// Opens an image, with what it is to have beside it, and goes on.
    fn resume(&self, image: &ImageSource, wishes: &Wishes) -> Result<()>;
    /// Makes the disk at least `len` bytes long; says what it looks like then.
    fn grow(&self, len: u64) -> Result<DiskInfo>;
    /// Closes all of a disk that was drained; with `force` one that was not, without waiting for long.
    fn close(&self, force: bool) -> Result<()>;
    /// Publishes the disk under these pages; answers the slot in its counters.
    fn publish(&self, pages: Box<VbdPages>) -> Result<usize>;
    /// Withdraws a slot; dropping the pages removes their files.
    fn withdraw(&self, slot: usize) -> Option<Box<VbdPages>>;
    /// Serves a front end, counting in `slot`; answers it as it is served.
    fn front_add(&self, id: u32, request: FrontRequest, slot: usize) -> Result<Front>;
    /// Whether it is a device that somebody has claimed for himself.
    fn front_claimed(&self, _id: u32) -> bool {
        false
    }
    /// Ends one: its clients are disconnected.
    fn front_remove(&self, id: u32) -> Result<()>;
    /// Tells of another size from now on, as long as there is the front end.
    fn front_follow(&self, id: u32, _news: UnixStream) -> Result<()> {
        Err(ControlError::new(Errno::ENOSYS, format!("nobody tells of front end {id}")))
    }
    /// Clients of one.
    fn connections(&self, id: u32) -> u32;
    /// Whether the disk, which is paused, had a standby that had not taken over; must not wait for the storage.
    fn standby_waited(&self) -> bool {
        false
    }
    /// Adaptive polling.
    fn set_polling(&self, polling: Polling) -> Result<()>;
    /// The devices of Xen guests, with their rings; must not wait for the storage.
    fn rings(&self) -> Vec<BlkifReport> {
        Vec::new()
    }
    /// Work on the images under the guest.
    fn image_work(&self, work: &ImageWork) -> Result<ImageAnswer>;
    /// The images of a disk that has moved to others by itself since the last time it was asked, leaf first; must not
    /// wait for the storage.
    fn moved(&self) -> Option<Vec<LayerSpec>> {
        None
    }
    /// Begins to note when requests pass where.
    fn trace_start(&self, _events: u32) -> Result<TraceReport> {
        Err(no_traces())
    }
    /// Ends that.
    fn trace_stop(&self, _forget: bool) -> Result<TraceReport> {
        Err(no_traces())
    }
    /// Limits the disk.
    fn set_limits(&self, limits: &IoLimits) -> Result<()>;
    /// What it is limited to; must not wait for the storage.
    fn limits(&self) -> Result<LimitsReport>;
}

/// A disk by its minor number.
struct Disk<D> {
    minor: u16,
    /// Given up when the disk is detached, however many still look at the disk.
    marker: Mutex<Option<MarkerLock>>,
    /// The number was taken by this process itself and is given back with the disk.
    own_minor: bool,
    now: Mutex<Now<D>>,
}

/// What a disk is at this moment.
struct Now<D> {
    state: VbdState,
    open: Option<Open<D>>,
}

/// A disk with an image.
struct Open<D> {
    plane: Arc<D>,
    image: ImageSource,
    read_only: bool,
    /// A second image, a log of changed blocks: for whoever makes the disk again.
    beside: Vec<String>,
    /// The second image that it was last opened with.
    secondary: Option<Secondary>,
    view: StatsView,
    fronts: Vec<FrontEntry>,
    published: Vec<(VbdId, usize)>,
    next_front: u32,
}

/// All disks of the process.
pub struct Table<P: Plane> {
    plane: P,
    run: RunDir,
    shm: ShmRoot,
    /// How long the end of the process waits for requests in flight, over all disks.
    patience: Duration,
    disks: Mutex<BTreeMap<u16, Arc<Disk<P::Disk>>>>,
}

/// A panic elsewhere leaves whole values behind these locks: each is replaced in one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The numbers of a disk that no hypervisor knows.
fn own_numbers(minor: u16) -> VbdId {
    VbdId { domid: 0, devid: minor.into() }
}

fn missing(minor: u16) -> ControlError {
    ControlError::new(Errno::ENODEV, format!("this process has no disk {minor}"))
        .next("'tap-ctl list' shows which it has")
}

fn no_traces() -> ControlError {
    ControlError::new(Errno::EOPNOTSUPP, "this process cannot trace its disks")
}

fn not_open(minor: u16) -> ControlError {
    ControlError::new(Errno::ENODEV, format!("disk {minor} has no image open")).next("open one first")
}

impl<P: Plane> Table<P> {
    /// No disks yet.
    pub fn new(plane: P, run: RunDir, shm: ShmRoot) -> Self {
        Self { plane, run, shm, patience: QUIT_TIME, disks: Mutex::default() }
    }

    /// Attaches a number that this process has taken for itself.
    pub fn attach_own(&self, minor: u16) -> Result<()> {
        self.insert(minor, true)
    }

    fn insert(&self, minor: u16, own_minor: bool) -> Result<()> {
        if minor >= MINOR_MAX {
            return Err(ControlError::new(Errno::EINVAL, format!("minor numbers end below {MINOR_MAX}")));
        }
        let mut disks = lock(&self.disks);
        if disks.contains_key(&minor) {
            return Err(ControlError::new(Errno::EEXIST, format!("disk {minor} is attached already")));
        }
        let marker = Mutex::new(Some(self.run.minors().lock(minor)?));
        let now = Mutex::new(Now { state: VbdState::Running, open: None });
        disks.insert(minor, Arc::new(Disk { minor, marker, own_minor, now }));
        Ok(())
    }

    fn disk(&self, minor: u16) -> Result<Arc<Disk<P::Disk>>> {
        lock(&self.disks).get(&minor).cloned().ok_or_else(|| missing(minor))
    }

    fn all(&self) -> Vec<Arc<Disk<P::Disk>>> {
        lock(&self.disks).values().cloned().collect()
    }

    /// The counters' files, or counters without files where there is no shared memory: a disk must not fail for want
    /// of statistics.
    fn counters(&self, minor: u16) -> Result<DiskStats> {
        let name = DiskName::of_this_process(minor.into());
        DiskStats::create(&self.shm, &name).or_else(|error| {
            self.log(&format!("disk {minor} has no statistics in {}: {error}", self.shm.path().display()));
            DiskStats::private(&name).map_err(|error| ControlError::io("making counters", &error))
        })
    }

    /// The files under the numbers that were asked for, or else the disk's own: a disk must not fail for want of
    /// statistics, but numbers somebody chose must not be lost silently. `nbd` adds the file of a disk reached by NBD,
    /// of which there is one per disk.
    fn pages(&self, minor: u16, asked: Option<VbdId>, nbd: bool) -> Result<Box<VbdPages>> {
        let id = asked.unwrap_or_else(|| own_numbers(minor));
        match VbdPages::create(&self.shm, std::process::id(), minor.into(), id, nbd) {
            Ok(pages) => Ok(pages),
            Err(error) if asked.is_some() => {
                Err(ControlError::io(format_args!("disk {minor} cannot be published as {id}"), &error)
                    .next("choose other numbers"))
            }
            Err(error) => {
                self.log(&format!("disk {minor} is not published as {id}: {error}"));
                VbdPages::private(id).map_err(|error| ControlError::io("making counters", &error))
            }
        }
    }

    /// Ends all front ends of an open disk and withdraws what it published.
    fn end_fronts(&self, disk: &Disk<P::Disk>) -> Result<()> {
        let ids: Vec<u32> = match &lock(&disk.now).open {
            Some(open) => open.fronts.iter().map(|front| front.id).collect(),
            None => Vec::new(),
        };
        let mut result = Ok(());
        for id in ids {
            result = result.and(self.front_remove(disk.minor, id, true));
        }
        result
    }

    /// Drains while clients are still there to get their answers, then ends the front ends, then closes.
    fn close_disk(&self, disk: &Disk<P::Disk>, force: bool, in_vain: &dyn Fn() -> bool) -> Result<()> {
        let Some(plane) = disk.plane() else { return Ok(()) };
        lock(&disk.now).state = VbdState::Closing;
        if !force {
            match plane.pause(in_vain) {
                Ok(()) => {}
                Err(error) if error.errno == Errno::ECANCELED => {
                    // As a pause that was left: whoever asks next may close it or let it go on.
                    lock(&disk.now).state = VbdState::Pausing;
                    return Err(error);
                }
                // Closing says again what is wrong.
                Err(error) => self.log(&format!("disk {}: {error}", disk.minor)),
            }
        }
        let fronts = self.end_fronts(disk);
        let closed = plane.close(force);
        // The images are not served any more, whatever went wrong: a disk that stays open can never be detached.
        *lock(&disk.now) = Now { state: VbdState::Closed, open: None };
        closed.and(fronts)
    }
}

impl<D: PlaneDisk> Disk<D> {
    /// The open disk in the data plane.
    fn plane(&self) -> Option<Arc<D>> {
        lock(&self.now).open.as_ref().map(|open| Arc::clone(&open.plane))
    }

    fn opened(&self) -> Result<Arc<D>> {
        self.plane().ok_or_else(|| not_open(self.minor))
    }

    /// A pause whose client went away may have come to its end since.
    fn state(&self) -> VbdState {
        let (state, plane) = {
            let now = lock(&self.now);
            (now.state, now.open.as_ref().map(|open| Arc::clone(&open.plane)))
        };
        if state == VbdState::Pausing
            && plane.is_some_and(|plane| plane.status().is_ok_and(|status| status.paused))
        {
            lock(&self.now).state = VbdState::Paused;
            return VbdState::Paused;
        }
        state
    }

    /// The disk may have moved to other images, and is opened again with these.
    fn note_moved(&self) {
        if let Some(images) = self.plane().and_then(|plane| plane.moved())
            && let Some(open) = &mut lock(&self.now).open
        {
            open.image.move_to(images);
        }
    }

    /// A chain that was given image by image is opened again as it is now: images may have left it since.
    fn note_chain(&self, plane: &D) {
        let Ok(status) = plane.status() else { return };
        if let Some(Open { image: ImageSource::Chain(layers), .. }) = &mut lock(&self.now).open
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
        let now = lock(&self.now);
        DiskEntry {
            minor: self.minor,
            state,
            image: now.open.as_ref().map(|open| open.image.text()),
            read_only: now.open.as_ref().is_some_and(|open| open.read_only),
            fronts: now.open.as_ref().map_or_else(Vec::new, Open::fronts),
        }
    }
}

impl<D: PlaneDisk> Open<D> {
    fn fronts(&self) -> Vec<FrontEntry> {
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

fn driver(kind: ImageKind) -> DriverType {
    match kind {
        ImageKind::Raw => DriverType::Aio,
        ImageKind::Vhd => DriverType::Vhd,
        ImageKind::Nbd => DriverType::Nbd,
    }
}

impl<P: Plane> DiskHost for Table<P> {
    fn list(&self) -> Vec<DiskEntry> {
        self.all().iter().map(|disk| disk.entry()).collect()
    }

    fn stats(&self, minor: u16) -> Result<VbdStats> {
        let disk = self.disk(minor)?;
        let open = lock(&disk.now)
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
            secs: [counters.kind(Kind::Read).bytes / 512, counters.kind(Kind::Write).bytes / 512],
            images: status.images.clone().into_iter().map(image).collect(),
            outstanding: status.in_flight,
            enospc_redirects: status.redirected,
            mirror_failed: status.mirror_lost,
            xenbus: plane.rings().first().map(xenbus),
        })
    }

    fn report(&self, minor: u16) -> Result<DiskReport> {
        let disk = self.disk(minor)?;
        let state = disk.state();
        let open = lock(&disk.now)
            .open
            .as_ref()
            .map(|open| (Arc::clone(&open.plane), open.view.clone(), open.beside.clone()));
        let Some((plane, view, beside)) = open else {
            return Ok(DiskReport {
                minor,
                state,
                counters: None,
                in_flight: 0,
                stuck: 0,
                images: Vec::new(),
                beside: Vec::new(),
                blkif: Vec::new(),
            });
        };
        let status = plane.status()?;
        let image = |image: PlaneImage| ImageReport {
            image: format!("{}:{}", driver(image.kind).name(), image.path),
            sectors_read: image.hits[0],
            sectors_written: image.hits[1],
        };
        Ok(DiskReport {
            minor,
            state,
            counters: Some(view.snapshot()),
            in_flight: status.in_flight,
            stuck: status.stuck,
            images: status.images.into_iter().map(image).collect(),
            beside,
            blkif: plane.rings(),
        })
    }

    fn fronts(&self, minor: u16) -> Result<Vec<FrontEntry>> {
        let disk = self.disk(minor)?;
        let now = lock(&disk.now);
        now.open.as_ref().map(Open::fronts).ok_or_else(|| not_open(minor))
    }

    fn attach(&self, minor: u16) -> Result<()> {
        self.insert(minor, false)
    }

    fn detach(&self, minor: u16) -> Result<()> {
        let disk = self.disk(minor)?;
        if lock(&disk.now).open.is_some() {
            return Err(
                ControlError::new(Errno::EBUSY, format!("disk {minor} is open")).next("close it first")
            );
        }
        lock(&self.disks).remove(&minor);
        drop(lock(&disk.marker).take());
        if disk.own_minor {
            self.run.minors().free(minor)?;
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        lock(&self.disks).is_empty()
    }

    fn open(&self, minor: u16, request: &OpenRequest) -> Result<DiskInfo> {
        let disk = self.disk(minor).map_err(|error| ControlError { errno: Errno::EINVAL, ..error })?;
        if let Some(open) = &lock(&disk.now).open {
            return Err(ControlError::new(
                Errno::EALREADY,
                format!("disk {minor} has {} open already", open.image.text()),
            )
            .next("close it first, or pause and unpause onto the other image"));
        }
        let marker = self.marker(minor, request.standby);
        let wishes = Wishes::of(request.secondary.as_ref(), marker, request.log_path.as_ref())?;
        request.image.check()?;
        let mut stats = self.counters(minor)?;
        stats.set_image(&request.image.text());
        let view = stats.view();
        let spec = OpenSpec {
            minor,
            image: &request.image,
            read_only: request.read_only,
            request_timeout: request.request_timeout,
            wishes: &wishes,
            key: request.key.as_ref(),
            pool: request.pool.as_ref(),
        };
        let plane = Arc::new(self.plane.open(&spec, stats)?);
        let info = plane.info();
        lock(&disk.now).open = Some(Open {
            plane,
            image: request.image.clone(),
            read_only: request.read_only,
            beside: wishes.names(),
            secondary: wishes.secondary,
            view,
            fronts: Vec::new(),
            published: Vec::new(),
            next_front: 1,
        });
        lock(&disk.now).state = VbdState::Running;
        if request.default_nbd {
            let path = self.run.nbd_socket(std::process::id(), minor);
            let front =
                Front::NbdUnix { path, listener: None, export: String::new(), read_only: request.read_only };
            if let Err(error) = self.front_add(minor, FrontRequest { front, vbd: None, fds: Vec::new() }) {
                // As it was before, or the disk could neither be reached nor opened again.
                self.close_disk(&disk, true, &|| false)?;
                return Err(error);
            }
        }
        Ok(info)
    }

    fn close(&self, minor: u16, force: bool, caller: &dyn Caller) -> Result<()> {
        self.close_disk(&*self.disk(minor)?, force, &|| caller.gone())
    }

    fn pause(&self, minor: u16, caller: &dyn Caller) -> Result<()> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        if disk.state() == VbdState::Paused {
            return Ok(());
        }
        lock(&disk.now).state = VbdState::Pausing;
        disk.note_moved();
        disk.note_chain(&*plane);
        let paused = plane.pause(&|| caller.gone());
        lock(&disk.now).state = match &paused {
            Ok(()) => VbdState::Paused,
            // The drain goes on; whoever asks later sees it end.
            Err(error) if error.errno == Errno::ECANCELED => VbdState::Pausing,
            Err(_) if plane.status().is_ok_and(|status| status.paused) => VbdState::Paused,
            Err(_) => VbdState::Running,
        };
        paused
    }

    fn resume(&self, minor: u16, request: &ResumeRequest) -> Result<()> {
        let disk = self.disk(minor)?;
        // There is a disk, but nothing that could go on.
        let plane = disk.opened().map_err(|error| ControlError { errno: Errno::EINVAL, ..error })?;
        let mut wishes = Wishes::of(request.secondary.as_ref(), None, request.log_path.as_ref())?;
        match disk.state() {
            VbdState::Paused | VbdState::ResumeFailed => {}
            state => {
                return Err(ControlError::new(
                    Errno::EINVAL,
                    format!("disk {minor} is {}, not paused", word(state)),
                )
                .next("pause it first"));
            }
        }
        // By a commit that came to its end while the disk was being paused.
        disk.note_moved();
        let image = match &request.image {
            Some(image) => image.clone(),
            None => {
                lock(&disk.now).open.as_ref().map(|open| open.image.clone()).ok_or_else(|| not_open(minor))?
            }
        };
        image.check()?;
        if request.secondary.is_none() && plane.standby_waited() {
            // Nobody said that the disk is to do without from now on.
            wishes.secondary = lock(&disk.now).open.as_ref().and_then(|open| open.secondary.clone());
        }
        let resumed = plane.resume(&image, &wishes);
        let mut now = lock(&disk.now);
        now.state = if resumed.is_ok() { VbdState::Running } else { VbdState::ResumeFailed };
        if resumed.is_ok()
            && let Some(open) = &mut now.open
        {
            open.image = image;
            open.beside = wishes.names();
            open.secondary = wishes.secondary;
        }
        resumed
    }

    fn disk_info(&self, minor: u16) -> Result<DiskInfo> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let info = plane.info();
        let read_only = lock(&disk.now).open.as_ref().is_some_and(|open| open.read_only);
        Ok(if read_only { DiskInfo { info: info.info | DiskInfo::READ_ONLY, ..info } } else { info })
    }

    fn grow(&self, minor: u16, len: u64) -> Result<DiskInfo> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        match disk.state() {
            VbdState::Running => plane.grow(len),
            state => {
                Err(ControlError::new(Errno::EINVAL, format!("disk {minor} is {}, not running", word(state)))
                    .next("let it go on first, with 'tapio disk resume'"))
            }
        }
    }

    fn front_add(&self, minor: u16, request: FrontRequest) -> Result<FrontEntry> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let vbd = request.vbd.or(request.front.vbd()).unwrap_or_else(|| own_numbers(minor));
        let (id, slot, first_nbd) = {
            let mut now = lock(&disk.now);
            let open = now.open.as_mut().ok_or_else(|| not_open(minor))?;
            if open.fronts.len() >= FRONTS_MAX {
                return Err(ControlError::new(
                    Errno::E2BIG,
                    format!("disk {minor} has {FRONTS_MAX} front ends"),
                )
                .next("remove one first"));
            }
            if let Some(other) =
                open.fronts.iter().find(|other| other.front.address() == request.front.address())
            {
                return Err(ControlError::new(
                    Errno::EADDRINUSE,
                    format!(
                        "disk {minor} is served on {} already, by front end {}",
                        other.front.address(),
                        other.id
                    ),
                ));
            }
            if request.front.is_block()
                && let Some(other) = open.fronts.iter().find(|other| other.front.is_block())
            {
                return Err(ControlError::new(
                    Errno::EEXIST,
                    format!("disk {minor} is {} already", other.front.address()),
                )
                .next("use that device, or detach it first"));
            }
            let id = open.next_front;
            open.next_front += 1;
            let slot = open.published.iter().find(|(known, _)| *known == vbd).map(|(_, slot)| *slot);
            (id, slot, request.front.is_nbd() && !open.fronts.iter().any(|other| other.front.is_nbd()))
        };
        let (slot, new) = match slot {
            Some(slot) => (slot, false),
            None => {
                let asked = request.vbd.or(request.front.vbd());
                (plane.publish(self.pages(minor, asked, first_nbd)?)?, true)
            }
        };
        let front = match plane.front_add(id, request, slot) {
            Ok(front) => front,
            Err(error) => {
                if new {
                    drop(plane.withdraw(slot));
                }
                return Err(error);
            }
        };
        let entry = FrontEntry { id, front, vbd, connections: 0 };
        if let Some(open) = &mut lock(&disk.now).open {
            open.fronts.push(entry.clone());
            if new {
                open.published.push((vbd, slot));
            }
        }
        Ok(entry)
    }

    fn front_remove(&self, minor: u16, id: u32, force: bool) -> Result<()> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let front = lock(&disk.now)
            .open
            .as_ref()
            .and_then(|open| open.fronts.iter().find(|front| front.id == id).cloned())
            .ok_or_else(|| {
                ControlError::new(Errno::ENOENT, format!("disk {minor} has no front end {id}"))
                    .next("'tapio disk list' shows which it has")
            })?;
        if !force && plane.front_claimed(id) {
            return Err(ControlError::new(
                Errno::EBUSY,
                format!("{} is in use: mounted, or part of another device", front.front.address()),
            )
            .next("unmount it first, or take it away by force: its users get errors"));
        }
        plane.front_remove(id)?;
        let unused = {
            let mut now = lock(&disk.now);
            let Some(open) = &mut now.open else { return Ok(()) };
            open.fronts.retain(|front| front.id != id);
            let used = open.fronts.iter().any(|other| other.vbd == front.vbd);
            let position = open.published.iter().position(|(vbd, _)| *vbd == front.vbd).filter(|_| !used);
            position.map(|position| open.published.swap_remove(position).1)
        };
        if let Some(slot) = unused {
            drop(plane.withdraw(slot));
        }
        Ok(())
    }

    fn front_follow(&self, minor: u16, id: u32, news: UnixStream) -> Result<DiskInfo> {
        self.disk(minor)?.opened()?.front_follow(id, news)?;
        self.disk_info(minor)
    }

    fn set_polling(&self, minor: u16, polling: Polling) -> Result<()> {
        self.disk(minor)?.opened()?.set_polling(polling)
    }

    fn connect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        let front = Front::Blkif(Box::new(BlkifFront::from_message(ring)?));
        self.front_add(minor, FrontRequest { front, vbd: None, fds: Vec::new() }).map(drop)
    }

    fn disconnect_ring(&self, minor: u16, ring: &Blkif) -> Result<()> {
        let id = {
            let disk = self.disk(minor)?;
            let now = lock(&disk.now);
            let fronts = now.open.iter().flat_map(|open| &open.fronts);
            let wanted = VbdId { domid: ring.domid, devid: ring.devid };
            fronts.into_iter().find(|entry| entry.front.vbd() == Some(wanted)).map(|entry| entry.id)
        };
        let Some(id) = id else {
            let why = format!("disk {minor} has no ring of device {} of domain {}", ring.devid, ring.domid);
            return Err(
                ControlError::new(Errno::ENODEV, why).next("'tapio disk front list' shows which it has")
            );
        };
        self.front_remove(minor, id, false)
    }

    fn mirror_start(&self, minor: u16, request: &MirrorRequest) -> Result<MirrorReport> {
        self.running(minor)?.mirror_start(request)
    }

    fn mirror_status(&self, minor: u16) -> Result<Option<MirrorReport>> {
        self.disk(minor)?.opened()?.mirror_status()
    }

    fn mirror_resume(&self, minor: u16) -> Result<()> {
        self.running(minor)?.mirror_resume()
    }

    fn mirror_rate(&self, minor: u16, rate: u64) -> Result<()> {
        self.running(minor)?.mirror_rate(rate)
    }

    fn mirror_pivot(&self, minor: u16) -> Result<MirrorPivoted> {
        self.pivot(minor)
    }

    fn mirror_cancel(&self, minor: u16) -> Result<()> {
        self.disk(minor)?.opened()?.mirror_cancel()
    }

    fn image_work(&self, minor: u16, work: &ImageWork) -> Result<ImageAnswer> {
        let disk = self.disk(minor)?;
        let answer = disk.opened()?.image_work(work)?;
        disk.note_moved();
        if let ImageAnswer::Snapshot(taken) = &answer
            && let Some(open) = &mut lock(&disk.now).open
        {
            open.image.put_on_top(&taken.leaf);
        }
        Ok(answer)
    }

    fn trace_start(&self, minor: u16, events: u32) -> Result<TraceReport> {
        self.disk(minor)?.opened()?.trace_start(events)
    }

    fn trace_stop(&self, minor: u16, forget: bool) -> Result<TraceReport> {
        self.disk(minor)?.opened()?.trace_stop(forget)
    }

    fn set_limits(&self, minor: u16, limits: &IoLimits) -> Result<()> {
        self.disk(minor)?.opened()?.set_limits(limits)
    }

    fn limits(&self, minor: u16) -> Result<LimitsReport> {
        self.disk(minor)?.opened()?.limits()
    }

    fn quit(&self, force: bool) -> Result<()> {
        let mut result = Ok(());
        let deadline = Instant::now() + self.patience;
        for disk in self.all() {
            let closed = match self.close_disk(&disk, force, &|| Instant::now() >= deadline) {
                Err(error) if error.errno == Errno::ECANCELED => {
                    self.log(&format!("disk {}: {error}; closed by force", disk.minor));
                    self.close_disk(&disk, true, &|| true)
                }
                other => other,
            };
            result = result.and(closed);
            let minor = disk.minor;
            drop(disk);
            result = result.and(self.detach(minor));
        }
        result
    }

    fn log(&self, line: &str) {
        crate::log::line(line);
    }
}

fn word(state: VbdState) -> &'static str {
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
