//! The one place that knows the data plane: chains are opened, paused and closed here.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use tapio_block::{
    Beside, CoreOptions, Disk, DiskFailure, DiskOptions, DiskState, Geometry, Gone, NoSpace, Notes, Origin,
    REQUEST_TIMEOUT, Remote, StandbyOptions,
};
use tapio_control::{
    BlkifReport, ControlError, DiskInfo, Errno, Front, FrontRequest, ImageAnswer, ImageSource, ImageWork,
    Key, LimitsReport, Polling, PoolShare, PoolSpec, Result, TraceReport,
};
use tapio_format::FormatError;
use tapio_format::continuation;
use tapio_format::live::vhd::{IntentPlace, intent};
use tapio_format::vhd::Keys;
use tapio_format::vhd::offline::resolve_chain;
use tapio_ring::PollingConfig;
use tapio_stat::pool::PoolMember;
use tapio_stat::{DiskStats, ShmRoot, VbdPages};
use tapio_types::{Access, ChainSpec, ImageKind, IoLimits, LayerSpec, SECTOR_LEN, parse_type_and_path};
use zeroize::Zeroizing;

use crate::counter::Counter;
use crate::fronts::Fronts;
use crate::grow;
use crate::images;
use crate::log;
use crate::memory::{Budget, Share, disk_len, new_leaf_len};
use crate::mirror::beside;
use crate::process;
use crate::sandbox;
use crate::table::{OpenSpec, Plane, PlaneDisk, PlaneImage, PlaneStatus, Wishes};
use crate::trace::Tracing;

/// How long the data thread may take for something small.
pub(crate) const SOON: Duration = Duration::from_secs(2);
/// How long opening or closing images may take: repairs read what they must, on a slow storage.
pub const LATE: Duration = Duration::from_secs(300);
/// How long a forced close waits for requests that the kernel does not give back.
const FORCED: Duration = Duration::from_secs(5);

/// The data plane of this process.
pub struct Host {
    /// What a guest sees when the storage is full.
    pub no_space: NoSpace,
    /// What its disks may take.
    pub memory: Budget,
}

/// A disk with its data thread and its front ends.
pub struct HostDisk {
    /// Taken away when it is closed.
    disk: RwLock<Option<Disk>>,
    pub(crate) remote: Remote,
    /// As it was when it was opened, but for its length.
    geometry: Geometry,
    len: AtomicU64,
    access: Access,
    /// What guests read as the disk's serial number.
    serial: String,
    fronts: Fronts,
    memory: Budget,
    /// What the images that are open may take.
    shares: Mutex<Vec<Share>>,
    moved: images::Moved,
    /// The standby that it was opened with the last time that it had one.
    standby: Mutex<Option<StandbyOptions>>,
    minor: u16,
    trace: Tracing,
}

/// The chain behind a name: the parents of a VHD are found from it.
pub(crate) fn chain(image: &ImageSource, access: Access) -> Result<ChainSpec> {
    let layer = match image {
        ImageSource::Chain(layers) => {
            let chain = ChainSpec { layers: layers.clone(), access };
            grow::finish_resize_of(&chain)?;
            return Ok(chain);
        }
        ImageSource::Leaf(text) => {
            parse_type_and_path(text).map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))?
        }
    };
    whole_chain(layer, access)
}

/// The chain behind a leaf: the parents of a VHD are found from it.
pub(crate) fn whole_chain(layer: LayerSpec, access: Access) -> Result<ChainSpec> {
    match layer.kind {
        ImageKind::Raw | ImageKind::Nbd => Ok(ChainSpec { layers: vec![layer], access }),
        ImageKind::Vhd if access == Access::ReadWrite => {
            grow::finish_resize(&layer.path)?;
            resolve_chain(&layer.path, access).map_err(|error| bad_image(&error))
        }
        ImageKind::Vhd => resolve_chain(&layer.path, access).map_err(|error| bad_image(&error)),
    }
}

/// [`chain`], and what the disk has beside it, unless it is to be written and went on with another image: who names it
/// does not know that. Where a standby took over, it is opened with that, which `beside` names or `earlier` is: the one
/// that the disk had before a pause.
fn opening(
    image: &ImageSource,
    access: Access,
    mut beside: Beside,
    earlier: Option<&StandbyOptions>,
) -> Result<(ChainSpec, Beside)> {
    let leaf = match image {
        ImageSource::Chain(layers) => layers.first().cloned(),
        ImageSource::Leaf(text) => parse_type_and_path(text).ok(),
    };
    let Some(leaf) = leaf.filter(|_| access == Access::ReadWrite) else {
        return Ok((chain(image, access)?, beside));
    };
    let followed = continuation::follow(&leaf).map_err(|error| bad_image(&error))?;
    let known = beside.standby.as_ref().or(earlier);
    let Some(standby) = known.filter(|standby| followed.stands_on(&leaf, &standby.image)) else {
        continuation::check_writable(&leaf).map_err(|error| bad_image(&error))?;
        return Ok((chain(image, access)?, beside));
    };
    let mut standby = standby.clone();
    standby.took_over = true;
    let mut overlaid = chain(image, access)?;
    log::line(&format!("{leaf} was full before: it goes on with {} on top of it", standby.image));
    overlaid.layers.insert(0, standby.image.clone());
    beside.standby = Some(standby);
    Ok((overlaid, beside))
}

/// What the images of a chain are decrypted with.
fn keys(key: Option<&Key>) -> Result<Keys> {
    let keys = key.map(|key| Zeroizing::new(key.0.clone())).into_iter().collect();
    Keys::new(keys).map_err(|error| bad_image(&error))
}

/// The serial number of a disk: its image's file name without the ending, which for images of a storage repository
/// is the uuid
/// of the VDI. It stays while the process serves the disk, whatever images come to stand on top of the first.
fn serial(image: &ImageSource) -> String {
    let text = image.text();
    let path = text.split_once(':').map_or(text.as_str(), |(_, path)| path);
    // The options of a remote export's name are not part of it.
    let path = if text.starts_with("nbd:") { path.split('?').next().unwrap_or(path) } else { path };
    let stem = std::path::Path::new(path).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

pub fn bad_image(error: &FormatError) -> ControlError {
    ControlError::new(Errno::new(error.errno()), error.to_string())
}

pub fn failure(error: &DiskFailure) -> ControlError {
    match error {
        DiskFailure::Format(error) => bad_image(error),
        DiskFailure::Gone(gone) => unreachable_thread(*gone),
        DiskFailure::Host(_) => ControlError::new(Errno::new(error.errno()), error.to_string()),
    }
}

pub(crate) fn unreachable_thread(gone: Gone) -> ControlError {
    match gone {
        Gone::Ended => ControlError::new(Errno::ESHUTDOWN, gone.to_string()),
        Gone::TimedOut => ControlError::new(Errno::ETIMEDOUT, gone.to_string())
            .next("its storage may be stuck; 'tapio disk stats' shows what is in flight"),
    }
}

impl Plane for Host {
    type Disk = HostDisk;

    fn open(&self, spec: &OpenSpec<'_>, mut stats: DiskStats) -> Result<HostDisk> {
        if spec.page_cache {
            log::line("parents are read past the page cache all the same");
        }
        let access = if spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let options = DiskOptions {
            core: CoreOptions {
                report: log::line,
                no_space: self.no_space,
                request_timeout: match spec.request_timeout {
                    None => Some(REQUEST_TIMEOUT),
                    Some(Duration::MAX) => None,
                    limit => limit,
                },
                intent: IntentPlace::Directory(intent::directory()),
                keys: keys(spec.key)?,
                notes: Notes::new(continuation::note),
                ..CoreOptions::default()
            },
            at_start: Some(sandbox::enter_data_thread),
            beside: beside(spec.wishes)?,
            at_rest: Some(process::forget_the_program),
            ..DiskOptions::default()
        };
        let pool = spec.pool.map(|pool| join_pool(pool, spec.minor)).transpose()?;
        let depth = u32::try_from(options.queue_depth).unwrap_or(u32::MAX);
        stats.set_queue_depth(depth);
        let (chain, beside) = opening(spec.image, access, options.beside, None)?;
        let options = DiskOptions { beside, ..options };
        let standby = options.beside.standby.clone();
        let share = self.memory.take(disk_len(options.pool_len, &chain.layers, access))?;
        let disk = Disk::start(chain, options).map_err(|error| failure(&error))?;
        disk.observe(move |world| Counter::install(world, stats, depth), SOON)
            .map_err(|error| failure(&error))?;
        if let Some(member) = pool {
            disk.share_pages(member, SOON).map_err(|error| failure(&error))?;
        }
        Ok(HostDisk {
            remote: disk.remote().clone(),
            geometry: disk.geometry(),
            len: AtomicU64::new(disk.geometry().len),
            disk: RwLock::new(Some(disk)),
            access,
            serial: serial(spec.image),
            fronts: Fronts::new(spec.minor, serial(spec.image)),
            memory: self.memory.clone(),
            shares: Mutex::new(vec![share]),
            moved: images::Moved::default(),
            standby: Mutex::new(standby),
            minor: spec.minor,
            trace: Tracing::default(),
        })
    }
}

/// The place of a disk at the pool of its SR.
fn join_pool(pool: &PoolSpec, minor: u16) -> Result<PoolMember> {
    let name = pool.check()?;
    tapio_stat::pool::join(&ShmRoot::from_env(), &name, pool.pages, minor.into())
        .map_err(|error| ControlError::io(format_args!("cannot share the page pool {name}"), &error))
}

impl HostDisk {
    fn disk(&self) -> RwLockReadGuard<'_, Option<Disk>> {
        // The lock guards a pointer that is taken once.
        self.disk.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn with<T>(&self, run: impl FnOnce(&Disk) -> std::result::Result<T, DiskFailure>) -> Result<T> {
        match &*self.disk() {
            Some(disk) => run(disk).map_err(|error| failure(&error)),
            None => Err(ControlError::new(Errno::ENODEV, "the disk is closed")),
        }
    }

    /// Takes note of how long the disk is now.
    fn look_at_length(&self) {
        if let Ok(geometry) = self.remote.call(SOON, |world| world.port.geometry()) {
            self.len.store(geometry.len, Ordering::Relaxed);
        }
    }

    /// Takes note of what the leaf is called now: devices that outlive this process go on with a disk of that name
    /// only.
    fn look_at_leaf(&self) {
        let asked =
            self.remote.call(SOON, |world| world.core().leaf_facts().map(|facts| facts.image.to_string()));
        if let Ok(Ok(leaf)) = asked {
            self.fronts.renamed(&serial(&ImageSource::Leaf(leaf)));
        }
    }

    /// What the process may still take, for an image that is to be added.
    pub(crate) const fn memory(&self) -> &Budget {
        &self.memory
    }

    /// Where it is noted when the disk moves to other images by itself.
    pub(crate) fn notebook(&self) -> images::Moved {
        self.moved.clone()
    }

    /// An image was added that may take this.
    pub(crate) fn keep(&self, share: Share) {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).push(share);
    }

    /// Drains in ever longer waits, between which somebody may say that it is in vain. A drain that has begun goes on,
    /// and asking again joins it.
    fn drain(&self, in_vain: &dyn Fn() -> bool) -> Result<()> {
        let mut patience = Duration::from_millis(50);
        loop {
            let error = match self.with(|disk| Ok(disk.pause(patience)))? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !matches!(error, DiskFailure::Gone(Gone::TimedOut)) {
                return Err(failure(&error));
            }
            if in_vain() {
                return Err(ControlError::new(
                    Errno::ECANCELED,
                    "requests are still in flight, and nobody waits",
                )
                .next("the drain goes on; ask again"));
            }
            patience = (patience * 2).min(Duration::from_secs(2));
        }
    }
}

impl PlaneDisk for HostDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            sectors: self.len.load(Ordering::Relaxed) / SECTOR_LEN,
            sector_size: self.geometry.logical_block_len,
            info: if self.geometry.read_only { DiskInfo::READ_ONLY } else { 0 },
        }
    }

    fn status(&self) -> Result<PlaneStatus> {
        let asked = self.remote.call(SOON, |world| {
            Counter::refresh(world);
            world.status()
        });
        let status = asked.map_err(unreachable_thread)?;
        let layers = status.spec.map_or_else(Vec::new, |spec| spec.layers);
        let image = |(layer, counters): (tapio_types::LayerSpec, &tapio_block::LayerCounters)| PlaneImage {
            kind: layer.kind,
            path: layer.path.display().to_string(),
            hits: [counters.sectors_read, counters.sectors_written],
            fail: [counters.reads_failed, counters.writes_failed],
        };
        Ok(PlaneStatus {
            paused: matches!(status.state, DiskState::Paused),
            in_flight: status.in_flight as u64,
            stuck: status.stuck as u64,
            images: layers.into_iter().zip(&status.layers).map(image).collect(),
            page_cache: false,
            redirected: status.redirected_sectors,
            on_standby: status.on_standby,
            mirror_lost: status.mirror_lost,
        })
    }

    fn pause(&self, in_vain: &dyn Fn() -> bool) -> Result<()> {
        self.drain(in_vain)
    }

    fn grow(&self, len: u64) -> Result<DiskInfo> {
        let more = new_leaf_len(len).saturating_sub(new_leaf_len(self.len.load(Ordering::Relaxed)));
        let share = self.memory.take(more)?;
        let grown = grow::grow(self, len);
        if grown.is_ok() {
            self.keep(share);
        }
        self.look_at_length();
        self.fronts.grown();
        grown.map(|()| self.info())
    }

    fn resume(&self, image: &ImageSource, wishes: &Wishes) -> Result<()> {
        let name = image.text();
        let (chain, beside) = {
            let mut standby = self.standby.lock().unwrap_or_else(PoisonError::into_inner);
            let opened = opening(image, self.access, beside(wishes)?, standby.as_ref())?;
            if opened.1.standby.is_some() {
                standby.clone_from(&opened.1.standby);
            }
            opened
        };
        {
            // The images before are closed, and those that come may be larger.
            let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
            shares.clear();
            let len = disk_len(DiskOptions::default().pool_len, &chain.layers, self.access);
            shares.push(self.memory.take(len)?);
        }
        self.with(|disk| disk.resume_with(chain, beside, LATE))?;
        self.look_at_length();
        self.remote
            .call(SOON, move |_| Counter::with(|stats| stats.set_image(&name)))
            .map_err(unreachable_thread)?;
        self.fronts.resumed(&serial(image));
        Ok(())
    }

    fn close(&self, force: bool) -> Result<()> {
        // A trace is nothing without its disk, and its file is removed by this side.
        if let Err(error) = self.trace.forget(&self.remote) {
            log::line(&format!("the trace of disk {} is left behind: {error}", self.minor));
        }
        // The counters' files go before the thread: who reads them shall see the disk end, not stand still.
        let taken = self.with(|disk| disk.observe(|_| Counter::remove(), SOON));
        let disk = self.disk.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(disk) = disk else { return Ok(()) };
        match disk.close(if force { FORCED } else { LATE }) {
            Ok(()) => taken,
            Err(DiskFailure::Gone(Gone::TimedOut)) if force => {
                log::line("closed by force: the kernel still holds requests of the disk");
                Ok(())
            }
            Err(error) => Err(failure(&error)),
        }
    }

    fn publish(&self, pages: Box<VbdPages>) -> Result<usize> {
        let added = self.remote.call(SOON, move |_| Counter::with(|stats| stats.add_vbd(pages)));
        match added.map_err(unreachable_thread)? {
            Some(Ok(slot)) => Ok(slot),
            // The pages come back to this thread, which removes their files.
            Some(Err(pages)) => Err(ControlError::new(
                Errno::E2BIG,
                format!("the disk is published under too many numbers for {}", pages.id()),
            )),
            None => Err(ControlError::new(Errno::ENODEV, "the disk is closed")),
        }
    }

    fn withdraw(&self, slot: usize) -> Option<Box<VbdPages>> {
        self.remote.call(SOON, move |_| Counter::with(|stats| stats.remove_vbd(slot))).ok()??
    }

    fn front_add(&self, id: u32, request: FrontRequest, slot: usize) -> Result<Front> {
        if let Front::Blkif(front) = &request.front
            && let Some(polling) = front.polling
        {
            self.set_polling(polling)?;
        }
        self.fronts.add(id, request, self.remote.with_origin(Origin::of(slot)), &self.serial, slot)
    }

    fn rings(&self) -> Vec<BlkifReport> {
        self.fronts.rings()
    }

    fn front_claimed(&self, id: u32) -> bool {
        self.fronts.is_claimed(id)
    }

    fn front_follow(&self, id: u32, news: UnixStream) -> Result<()> {
        self.fronts.follow(id, news)
    }

    fn front_remove(&self, id: u32) -> Result<()> {
        self.fronts.remove(id)
    }

    fn connections(&self, id: u32) -> u32 {
        self.fronts.connections(id)
    }

    fn image_work(&self, work: &ImageWork) -> Result<ImageAnswer> {
        let answer = images::run(self, work);
        self.look_at_leaf();
        answer
    }

    fn standby_waited(&self) -> bool {
        self.remote.call(SOON, |world| world.core().standby_waited()).unwrap_or(false)
    }

    fn moved(&self) -> Option<Vec<LayerSpec>> {
        let images = self.moved.take()?;
        let leaf = images.first().map_or_else(String::new, LayerSpec::to_string);
        self.fronts.renamed(&serial(&ImageSource::Leaf(leaf)));
        Some(images)
    }

    fn set_polling(&self, polling: Polling) -> Result<()> {
        let config = PollingConfig {
            max_ns: u64::from(polling.max_us) * 1_000,
            idle_min_percent: polling.idle_percent,
        };
        self.with(|disk| disk.set_polling(config, SOON))
    }

    fn trace_start(&self, events: u32) -> Result<TraceReport> {
        self.trace.start(&self.remote, &self.memory, self.minor, events)
    }

    fn trace_stop(&self, forget: bool) -> Result<TraceReport> {
        self.trace.stop(&self.remote, self.minor, forget)
    }

    fn set_limits(&self, limits: &IoLimits) -> Result<()> {
        let limits = *limits;
        self.with(|disk| disk.set_limits(limits, SOON))?;
        self.remote.call(SOON, Counter::refresh).map_err(unreachable_thread)
    }

    fn limits(&self) -> Result<LimitsReport> {
        let asked = self.remote.call(SOON, |world| {
            Counter::refresh(world);
            world.status()
        });
        let status = asked.map_err(unreachable_thread)?;
        Ok(LimitsReport {
            limits: status.limits,
            delayed: status.delays.requests,
            delay_ns: status.delays.time_ns,
            waiting: status.delays.waiting,
            pool: status.pool.map(|pool| PoolShare { name: pool.name, pages: pool.pages, held: pool.held }),
        })
    }
}
