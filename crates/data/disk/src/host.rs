//! The one place that knows the data plane: chains are opened, paused and closed here.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tapio_block::{
    CoreOptions, Disk, DiskFailure, DiskOptions, DiskState, Gone, InFlight, NoSpace, Notes, Origin,
    REQUEST_TIMEOUT,
};
use tapio_control::command::SecretName;
use tapio_control::{
    ControlError, DiskInfo, Errno, Front, ImageSource, Key, MirrorPivoted, PoolSpec, RequestReport, Result,
};
use tapio_format::continuation;
use tapio_format::live::vhd::{IntentPlace, intent};
use tapio_format::vhd::Keys;
use tapio_stat::pool::PoolMember;
use tapio_stat::{DiskStats, ShmRoot, VbdPages};
use tapio_types::{Access, LayerSpec, SECTOR_LEN};
use zeroize::Zeroizing;

use crate::chain::opening;
use crate::counter::Counter;
use crate::failure::{bad_image, failure, unreachable_thread};
use crate::fronts::Fronts;
use crate::host_disk::{HostDisk, serial};
use crate::limits::{IMAGES_TIMEOUT, REPLY_TIMEOUT};
use crate::log;
use crate::memory::{Budget, disk_len};
use crate::moved::Moved;
use crate::movement::alone;
use crate::rest;
use crate::room::Room;
use crate::sandbox;
use crate::table::{OpenSpec, Plane, PlaneDisk, PlaneImage, PlaneStatus, TapRequest};
use crate::tap_options::{name, tap_options};
use crate::trace::Tracing;

/// How long a forced close waits for requests that the kernel does not give back.
const FORCED: Duration = Duration::from_secs(5);

/// The data plane of this process.
pub struct Host {
    /// What a guest sees when the storage is full.
    pub no_space: NoSpace,
    /// What its disks may take.
    pub memory: Budget,
    /// Threads that a disk may have.
    pub threads: usize,
}

/// What the images of a chain are decrypted with.
fn keys(key: Option<&Key>) -> Result<Keys> {
    let keys = key.map(|key| Zeroizing::new(key.0.clone())).into_iter().collect();
    Keys::new(keys).map_err(|error| bad_image(&error))
}

impl Plane for Host {
    type Disk = HostDisk;

    fn open(&self, spec: &OpenSpec<'_>, mut stats: DiskStats) -> Result<HostDisk> {
        let command = spec.command;
        let access = if command.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let room = Room::of(command.minor);
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
                sector_len: command.sector_size,
                notes: Notes::new(continuation::note),
                room: room.place(),
                ..CoreOptions::default()
            },
            at_start: Some(sandbox::enter_data_thread),
            taps: tap_options(spec.taps)?,
            at_rest: Some(rest::give_back),
            ..DiskOptions::default()
        };
        let pool = command.pool.as_ref().map(|pool| join_pool(pool, command.minor)).transpose()?;
        let depth = u32::try_from(options.queue_depth).unwrap_or(u32::MAX);
        stats.set_queue_depth(depth);
        let (chain, taps) = opening(&command.image, access, options.taps, None)?;
        let options = DiskOptions { taps, ..options };
        let standby = options.taps.standby.clone();
        let (threads, share) = self
            .memory
            .take_for(self.threads, |threads| disk_len(&options, threads, &chain.layers, access))?;
        let options = DiskOptions { threads, ..options };
        let share_spec = command.share.unwrap_or_default();
        let images = chain.clone();
        let disk = Disk::start(chain, options).map_err(|error| failure(&error))?;
        disk.observe(move |data_thread| Counter::install(data_thread, stats, depth), REPLY_TIMEOUT)
            .map_err(|error| failure(&error))?;
        if let Some(member) = pool {
            disk.share_pages(member, REPLY_TIMEOUT).map_err(|error| failure(&error))?;
        }
        let opened = HostDisk {
            remote: disk.remote().clone(),
            geometry: disk.geometry(),
            len: AtomicU64::new(disk.geometry().len),
            disk: RwLock::new(Some(Arc::new(disk))),
            access,
            serial: serial(&command.image),
            fronts: Fronts::new(command.minor, serial(&command.image)),
            memory: self.memory.clone(),
            shares: Mutex::new(vec![share]),
            moved: Moved::default(),
            standby: Mutex::new(standby),
            minor: command.minor,
            trace: Tracing::default(),
            share: Mutex::new(share_spec),
            not_shared: Mutex::default(),
            room,
        };
        opened.share_device_of(&images)?;
        Ok(opened)
    }
}

/// The place of a disk at the pool of its SR.
fn join_pool(pool: &PoolSpec, minor: u16) -> Result<PoolMember> {
    let name = pool.check()?;
    tapio_stat::pool::join(&ShmRoot::from_env(), &name, pool.pages, minor.into())
        .map_err(|error| ControlError::io(format_args!("cannot share the page pool {name}"), &error))
}

fn request_report(request: &InFlight) -> RequestReport {
    RequestReport {
        op: request.op.kind().name().to_owned(),
        start: request.span.start,
        len: request.span.len,
        age_us: request.age_ns / 1000,
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
        let status = self.ask_status()?;
        let layers = status.spec.map_or_else(Vec::new, |spec| spec.layers);
        let image = |(layer, counters): (LayerSpec, &tapio_block::LayerCounters)| PlaneImage {
            kind: layer.kind,
            path: layer.path.display().to_string(),
            hits: [counters.sectors_read, counters.sectors_written],
            fail: [counters.reads_failed, counters.writes_failed],
        };
        Ok(PlaneStatus {
            paused: matches!(status.state, DiskState::Paused),
            in_flight: status.in_flight as u64,
            stuck: status.stuck as u64,
            oldest: status.oldest.iter().map(request_report).collect(),
            images: layers.into_iter().zip(&status.layers).map(image).collect(),
            redirected: status.redirected_sectors,
            on_standby: status.on_standby,
            mirror_lost: status.mirror_lost,
            standby_waited: status.standby_waited,
            rings: self.fronts.rings(),
            room: self.room.report(),
        })
    }

    fn pause(&self, is_cancelled: &dyn Fn() -> bool) -> Result<()> {
        self.drain(is_cancelled)
    }

    fn resume(&self, image: &ImageSource, taps: &TapRequest) -> Result<()> {
        let name = image.text();
        // No lock is held while images are looked at, which may hang.
        let earlier = self.standby.lock().clone();
        let (chain, taps) = opening(image, self.access, tap_options(taps)?, earlier.as_ref())?;
        self.check_images(&chain)?;
        if let Some((target, _)) = &taps.mirror {
            self.check_images(target)?;
        }
        if let Some(standby) = &taps.standby {
            self.check_images(&alone(standby.image.clone()))?;
        }
        if taps.standby.is_some() {
            self.standby.lock().clone_from(&taps.standby);
        }
        {
            // The images before are closed, and those that come may be larger.
            let mut shares = self.shares.lock();
            shares.clear();
            let threads = self.remote.threads_max();
            let len = disk_len(&DiskOptions::default(), threads, &chain.layers, self.access);
            shares.push(self.memory.take(len)?);
        }
        let images = chain.clone();
        self.with(|disk| disk.resume_with(chain, taps, IMAGES_TIMEOUT))?;
        self.share_device_of(&images)?;
        self.look_at_length();
        self.remote
            .call(REPLY_TIMEOUT, move |_| Counter::with(|stats| stats.set_image(&name)))
            .map_err(unreachable_thread)?;
        self.fronts.resumed(&serial(image));
        Ok(())
    }

    fn close(&self, force: bool) -> Result<()> {
        // A trace is nothing without its disk, and its file is removed by this side.
        if let Err(error) = self.trace.forget(&self.remote) {
            log::line(&format!("the trace of disk {} is left behind: {error}", self.minor));
        }
        // The counters' files go before the thread: their readers shall see the disk end, not stand still.
        let taken = self.with(|disk| disk.observe(|_| Counter::remove(), REPLY_TIMEOUT));
        let disk = self.disk.write().take();
        let Some(disk) = disk else { return Ok(()) };
        match disk.close(if force { FORCED } else { IMAGES_TIMEOUT }) {
            Ok(()) => taken,
            Err(DiskFailure::Gone(Gone::TimedOut)) if force => {
                log::line("closed by force: the kernel still holds requests of the disk");
                Ok(())
            }
            Err(error) => Err(failure(&error)),
        }
    }

    fn publish(&self, pages: Box<VbdPages>) -> Result<usize> {
        let added = self.remote.call(REPLY_TIMEOUT, move |_| Counter::with(|stats| stats.add_vbd(pages)));
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
        self.remote.call(REPLY_TIMEOUT, move |_| Counter::with(|stats| stats.remove_vbd(slot))).ok()??
    }

    fn front_add(&self, id: u32, front: Front, fds: Vec<OwnedFd>, slot: usize) -> Result<Front> {
        let mut only_copied = None;
        if let Front::Blkif(front) = &front {
            only_copied = self.check_movement(front)?;
            if let Some(polling) = front.polling {
                self.set_polling(polling)?;
            }
        }
        let remote = self.remote.with_origin(Origin::of(slot));
        let front = self.fronts.add(id, front, fds, remote, &self.serial, slot)?;
        self.fronts.set_only_copied(id, only_copied);
        Ok(front)
    }

    fn front_claimed(&self, id: u32) -> bool {
        self.fronts.is_claimed(id)
    }

    fn front_follow(&self, id: u32, news: UnixStream) -> Result<()> {
        self.fronts.follow(id, news)
    }

    fn front_admit(&self, id: u32, names: &[SecretName], cut: &[SecretName]) -> Result<()> {
        self.fronts.admit(id, names, cut)
    }

    fn front_remove(&self, id: u32) -> Result<()> {
        self.fronts.remove(id)
    }

    fn connections(&self, id: u32) -> u32 {
        self.fronts.connections(id)
    }

    fn moved(&self) -> Option<Vec<LayerSpec>> {
        let images = self.moved.take()?;
        let leaf = images.first().map_or_else(String::new, LayerSpec::to_string);
        self.fronts.renamed(&serial(&ImageSource::Leaf(leaf)));
        Some(images)
    }

    fn mirror_pivot(&self) -> Result<(ImageSource, MirrorPivoted)> {
        let pivoted =
            self.order(IMAGES_TIMEOUT, |data_thread| async move { data_thread.core().mirror_pivot().await })?;
        self.share_device_of(&pivoted.spec)?;
        let image = name(&pivoted.spec);
        let shown = image.clone();
        self.remote
            .call(REPLY_TIMEOUT, move |_| Counter::with(|stats| stats.set_image(&shown)))
            .map_err(unreachable_thread)?;
        let moved = MirrorPivoted { image, stalled_us: pivoted.stalled_ns / 1000 };
        Ok((ImageSource::Chain(pivoted.spec.layers), moved))
    }
}
