//! Changes of the chain of a disk that is in use, and the jobs that do them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_block::{Forecast, Job, JobInfo, JobState, LeafFacts, Owner, Swapped};
use tapio_control::command::{Call, Commit, Handle, JobCancel, JobList, JobRate, Snapshot, SwapLeaf};
use tapio_control::{ControlError, Errno, ImageSource, JobReport, JobStatus, Result, SnapshotReport};
use tapio_format::FormatError;
use tapio_format::continuation::{self, Identity};
use tapio_format::vhd::offline::{ParentFacts, Shape, create, remove_orphans};
use tapio_types::{ImageKind, LayerSpec, SECTOR_LEN};

use crate::counter::Counter;
use crate::failure::{bad_image, unreachable_thread};
use crate::host::Host;
use crate::host_disk::HostDisk;
use crate::limits::IMAGES_TIMEOUT;
use crate::log;
use crate::memory::new_leaf_len;
use crate::movement::alone;
use crate::table::{Plane, PlaneDisk, Table};

impl<P: Plane> Handle<Snapshot> for Table<P> {
    fn handle(&self, command: Snapshot, call: &mut Call<'_>) -> Result<SnapshotReport> {
        let disk = self.disk(command.minor)?;
        let taken = disk.opened()?.handle(command, call)?;
        disk.note_moved();
        if let Some(open) = &mut disk.now.lock().open {
            open.image.put_on_top(&taken.leaf);
        }
        Ok(taken)
    }
}

impl Handle<Snapshot> for HostDisk {
    fn handle(&self, command: Snapshot, _: &mut Call<'_>) -> Result<SnapshotReport> {
        let taken = snapshot(self, &command.leaf, Duration::from_millis(command.stall_ms.into()));
        self.look_at_leaf();
        taken
    }
}

impl<P: Plane> Handle<SwapLeaf> for Table<P> {
    fn handle(&self, command: SwapLeaf, call: &mut Call<'_>) -> Result<SnapshotReport> {
        let disk = self.disk(command.minor)?;
        let images = command.images.clone();
        let taken = disk.opened()?.handle(command, call)?;
        disk.note_moved();
        if let Some(open) = &mut disk.now.lock().open {
            open.image = ImageSource::Chain(images);
        }
        Ok(taken)
    }
}

impl Handle<SwapLeaf> for HostDisk {
    fn handle(&self, command: SwapLeaf, _: &mut Call<'_>) -> Result<SnapshotReport> {
        let stall_max = Duration::from_millis(command.stall_ms.into());
        let taken = swap_leaf(self, command.images, command.log, stall_max);
        self.look_at_leaf();
        taken
    }
}

impl Handle<Commit> for Table<Host> {
    fn handle(&self, command: Commit, _: &mut Call<'_>) -> Result<JobReport> {
        self.on_images(command.minor, |disk| commit(disk, &command.image, command.rate, command.force))
    }
}

impl Handle<JobList> for Table<Host> {
    fn handle(&self, command: JobList, _: &mut Call<'_>) -> Result<Vec<JobReport>> {
        let list = |disk: &HostDisk| disk.ask(|data_thread| Ok(data_thread.core().jobs().infos()));
        Ok(self.on_images(command.minor, list)?.iter().map(report).collect())
    }
}

impl Handle<JobCancel> for Table<Host> {
    fn handle(&self, command: JobCancel, _: &mut Call<'_>) -> Result<JobReport> {
        let cancel = |data_thread: &Owner, job: &Job| job.cancel(data_thread.port.tasks());
        self.on_images(command.minor, |disk| with_job(disk, command.job, cancel))
    }
}

impl Handle<JobRate> for Table<Host> {
    fn handle(&self, command: JobRate, _: &mut Call<'_>) -> Result<JobReport> {
        let set = move |data_thread: &Owner, job: &Job| job.set_rate(command.rate, data_thread.port.tasks());
        self.on_images(command.minor, |disk| with_job(disk, command.job, set))
    }
}

impl Table<Host> {
    /// Does something about the images of a disk, which may be others then.
    fn on_images<T>(&self, minor: u16, work: impl FnOnce(&HostDisk) -> Result<T>) -> Result<T> {
        let disk = self.disk(minor)?;
        let plane = disk.opened()?;
        let done = work(&plane);
        plane.look_at_leaf();
        let done = done?;
        disk.note_moved();
        Ok(done)
    }
}

fn with_job(disk: &HostDisk, id: u32, run: impl FnOnce(&Owner, &Job) + Send + 'static) -> Result<JobReport> {
    let info = disk.ask(move |data_thread| {
        Ok(data_thread.core().jobs().get(id).map(|job| {
            run(data_thread, &job);
            job.info()
        }))
    })?;
    let missing = || ControlError::new(Errno::ENOENT, format!("there is no job {id}"));
    let info = info.ok_or_else(|| missing().next("'tapio disk job list' shows which there are"))?;
    Ok(report(&info))
}

fn report(info: &JobInfo) -> JobReport {
    let (status, reason) = match &info.state {
        JobState::Running => (JobStatus::Running, None),
        JobState::Ready => (JobStatus::Ready, None),
        JobState::Done => (JobStatus::Done, None),
        JobState::Cancelled => (JobStatus::Cancelled, None),
        JobState::Failed(error) => (JobStatus::Failed, Some(error.to_string())),
    };
    JobReport {
        id: info.id,
        kind: info.kind.to_string(),
        subject: info.subject.clone(),
        status,
        reason,
        done_bytes: info.done,
        total_bytes: info.total,
        rate: info.rate,
    }
}

fn snapshot(disk: &HostDisk, path: &Path, stall_max: Duration) -> Result<SnapshotReport> {
    let facts = disk.ask(|data_thread| data_thread.core().leaf_facts())?;
    // An image that exists is never written over. A device is there always, and is made into an image in place.
    if std::fs::symlink_metadata(path).is_ok_and(|there| !is_device(&there)) {
        return Err(ControlError::new(Errno::EEXIST, format!("{} exists already", path.display()))
            .next("give the snapshot's leaf a new name"));
    }
    disk.check_images(&alone(LayerSpec { kind: ImageKind::Vhd, path: path.to_path_buf() }))?;
    let share = disk.memory().take(new_leaf_len(facts.len_max.max(facts.len)))?;
    path.parent().map_or_else(Vec::new, remove_orphans);
    make_child(path, &facts).map_err(|error| bad_image(&error))?;
    let leaf = LayerSpec { kind: ImageKind::Vhd, path: path.to_path_buf() };
    let (name, image) = (leaf.to_string(), leaf.clone());
    let stall_max_ns = u64::try_from(stall_max.as_nanos()).unwrap_or(u64::MAX);
    let asked = disk.remote.call_async(IMAGES_TIMEOUT, move |data_thread| async move {
        let swapped = data_thread.core().snapshot(&image, stall_max_ns).await?;
        data_thread.tell_geometry().await;
        Counter::with(|stats| stats.set_image(&name));
        Ok::<Swapped, FormatError>(swapped)
    });
    // Without an answer the new leaf may be in use, so it stays.
    match asked.map_err(unreachable_thread)? {
        Ok(swapped) => {
            disk.keep(share);
            Ok(SnapshotReport {
                leaf: leaf.to_string(),
                parent: facts.image.to_string(),
                stalled_us: swapped.stalled_ns / 1_000,
            })
        }
        Err(error) => {
            let noted = continuation::read(&facts.image);
            let is_noted =
                !matches!(&noted, Ok(note) if note.as_ref().is_none_or(|note| note.by.path != path));
            if is_noted {
                log::line(&format!("{} stays: a note beside {} names it", path.display(), facts.image));
            } else if std::fs::metadata(path).is_ok_and(|there| there.is_file()) {
                let _ = std::fs::remove_file(path);
            }
            Err(bad_image(&error))
        }
    }
}

fn swap_leaf(
    disk: &HostDisk,
    images: Vec<LayerSpec>,
    log: Option<PathBuf>,
    stall_max: Duration,
) -> Result<SnapshotReport> {
    let facts = disk.ask(|data_thread| data_thread.core().leaf_facts())?;
    let [leaf, below, ..] = &images[..] else {
        return Err(ControlError::new(Errno::EINVAL, "a new leaf lies on another image, and none is named"));
    };
    check_same(&facts, below)?;
    disk.check_images(&alone(leaf.clone()))?;
    let share = disk.memory().take(new_leaf_len(facts.len_max.max(facts.len)))?;
    let (leaf, parent) = (leaf.to_string(), below.to_string());
    let stall_max_ns = u64::try_from(stall_max.as_nanos()).unwrap_or(u64::MAX);
    let name = leaf.clone();
    let asked = disk.remote.call_async(IMAGES_TIMEOUT, move |data_thread| async move {
        let swapped = data_thread.core().swap_leaf(&images, log.as_deref(), stall_max_ns).await?;
        data_thread.tell_geometry().await;
        Counter::with(|stats| stats.set_image(&name));
        Ok::<Swapped, FormatError>(swapped)
    });
    // It may happen yet, and the client must know that.
    let asked =
        asked.map_err(|gone| ControlError { errno: SwapLeaf::UNKNOWN, ..unreachable_thread(gone) })?;
    let swapped = asked.map_err(|error| bad_image(&error))?;
    disk.keep(share);
    Ok(SnapshotReport { leaf, parent, stalled_us: swapped.stalled_ns / 1_000 })
}

/// Whether `below` is the leaf that is open, under another name.
fn check_same(leaf: &LeafFacts, below: &LayerSpec) -> Result<()> {
    let other = || {
        let why = format!("{below} is another image than the leaf that the disk has open, {}", leaf.image);
        Err(ControlError::new(Errno::EINVAL, why).next("rename the leaf before it gets a child of its name"))
    };
    match leaf.uuid {
        Some(uuid) => match Identity::of(below).map_err(|error| bad_image(&error))? {
            Identity::Vhd(found) if found == uuid => Ok(()),
            _ => other(),
        },
        // It may have its old name as well.
        None => match (std::fs::metadata(&leaf.image.path), std::fs::metadata(&below.path)) {
            (Ok(old), Ok(new)) if (old.dev(), old.ino()) != (new.dev(), new.ino()) => other(),
            (_, Err(error)) => Err(ControlError::io(format_args!("cannot look at {below}"), &error)),
            _ => Ok(()),
        },
    }
}

fn is_device(there: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    there.file_type().is_block_device() || there.file_type().is_symlink()
}

/// Makes an empty child of the leaf, which is open and being written: what it records about its parent comes from
/// memory and not from the file.
fn make_child(path: &Path, leaf: &LeafFacts) -> std::result::Result<(), FormatError> {
    let parent = match leaf.uuid {
        Some(uuid) => {
            ParentFacts { uuid, key_hash: leaf.key_hash, ..ParentFacts::names(path, &leaf.image.path)? }
        }
        // Raw, or a fixed VHD, whose footer is not written.
        None => ParentFacts::gather(path, &leaf.image.path, leaf.image.kind != ImageKind::Vhd)?.0,
    };
    create(path, &Shape::Differencing(parent), leaf.len, leaf.len_max)
}

fn commit(disk: &HostDisk, path: &Path, rate: u64, force: bool) -> Result<JobReport> {
    let image = path.to_path_buf();
    let forecast = disk.ask(move |data_thread| data_thread.core().forecast(&image))?;
    if !force {
        check_space(&forecast)?;
    }
    // Until it is over the parent is open for writing beside the leaf, whose part it then takes over.
    let len = match forecast.parent.kind {
        ImageKind::Vhd => new_leaf_len(disk.info().sectors * SECTOR_LEN),
        ImageKind::Raw | ImageKind::Nbd | ImageKind::Rbd => 0,
    };
    let (share, moved) = (disk.memory().take(len)?, disk.notebook());
    let image = path.to_path_buf();
    let info = disk.ask(move |data_thread| {
        let before = data_thread.core().spec().map_or_else(Vec::new, |spec| spec.layers);
        let job = data_thread.core().commit(&image, rate)?;
        let (info, tasks) = (job.info(), data_thread.port.tasks().clone());
        tasks.clone().spawn(async move {
            let is_done = job.ended(&tasks).await.is_ok();
            drop(share);
            if is_done && before.first().is_some_and(|leaf| leaf.path == image) {
                moved.note(&before[1..]);
            }
        });
        Ok(info)
    })?;
    log::line(&format!(
        "commit of {} begins: up to {} bytes to copy, the parent grows by up to {}",
        path.display(),
        forecast.copy,
        forecast.space
    ));
    Ok(report(&info))
}

/// Whether the parent's file system has the space that the parent may grow by.
fn check_space(forecast: &Forecast) -> Result<()> {
    let free = match forecast.room {
        Some(room) => room,
        None => match free_bytes(&forecast.parent.path) {
            Some(free) => free,
            // Nothing is known: the copy itself finds out, and does no harm.
            None => return Ok(()),
        },
    };
    if forecast.space <= free {
        return Ok(());
    }
    Err(ControlError::new(
        Errno::ENOSPC,
        format!(
            "{} may grow by {} MiB and its storage has {} MiB free",
            forecast.parent.path.display(),
            forecast.space.div_ceil(1 << 20),
            free >> 20
        ),
    )
    .next(
        "make room, or begin all the same with --force: what does not fit stops the commit and loses nothing",
    ))
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}
