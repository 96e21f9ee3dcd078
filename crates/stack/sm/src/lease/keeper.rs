//! The keeper of a host's lease on one SR: renews it, watches the others, and stops the host's disks when it is late.
//!
//! A process of its own, because disks go on when daemon and storage worker end, and their lease has to. It ends when
//! nothing needs the lease: no storage worker, and no disk process with an image of the SR.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::area::Area;
use super::disks::Images;
use super::guests;
use super::layout::{
    Beat, HEAD_SECTORS, HOSTS, OPEN_SECTORS, SECTOR, Turn, beat_at, decode_open, open_at, turn_at,
};
use super::seen::Seen;
use super::status::{Files, Status, grace_ms, now_ms};
use super::turn::turn_in;

/// What a keeper keeps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Keeping {
    pub(crate) area: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) sr: Uuid,
    pub(crate) host: Uuid,
    pub(crate) name: String,
    pub(crate) slot: u8,
    pub(crate) generation: u64,
    pub(crate) silence_ms: u32,
    pub(crate) images: Images,
}

/// A program that is a keeper where its last argument is what to keep.
static PROGRAM: OnceLock<(PathBuf, Vec<OsString>)> = OnceLock::new();

/// Has keepers run as this program with these arguments. Without it they are threads, which end with the caller.
pub fn run_keepers_as(path: &Path, arguments: &[OsString]) {
    let _ = PROGRAM.set((path.to_path_buf(), arguments.to_vec()));
}

/// Runs as a keeper; `what` is the last argument of one. Returns when nothing needs the lease, or it is lost.
pub fn keep(what: &str) {
    match serde_json::from_str::<Keeping>(what) {
        Ok(keeping) => keeping.run(&AtomicBool::new(false)),
        Err(error) => tracing::error!("a keeper was told what cannot be read: {error}"),
    }
}

/// How often a lease is renewed: eight times before others count the host as dead.
pub(crate) const fn renewal(silence_ms: u32) -> Duration {
    Duration::from_millis(silence_ms as u64 / 8)
}

/// How long after a renewal the host itself goes by its lease: half as long as others do.
pub(crate) const fn validity_ms(silence_ms: u32) -> u64 {
    silence_ms as u64 / 2
}

/// Who counts this host as dead, by what lies in the area.
pub(crate) fn verdict(sectors: &[[u8; SECTOR]], (slot, generation): (u8, u64)) -> Option<String> {
    let is_marked = |turn: &Turn| turn.dead.get(&slot) == Some(&generation);
    let others = (0..HOSTS).filter(|other| *other != usize::from(slot));
    let judge = others.into_iter().find(|other| is_marked(&turn_in(&sectors[turn_at(*other)])))?;
    let name =
        Beat::decode(&sectors[beat_at(judge)]).map_or_else(|| "another host".into(), |beat| beat.named());
    Some(format!("{name} counts this host as dead, which was silent for too long, and may have what it had"))
}

/// A keeper that was started.
#[derive(Debug)]
pub(crate) struct Started {
    /// Of one that is a thread.
    end: Arc<AtomicBool>,
}

impl Started {
    /// A thread ends soon.
    pub(crate) fn end(&self) {
        self.end.store(true, Ordering::Release);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts one.
///
/// # Errors
/// The system's.
pub(crate) fn start(keeping: &Keeping) -> io::Result<Started> {
    let end = Arc::new(AtomicBool::new(false));
    if let Some((path, arguments)) = PROGRAM.get() {
        let what = serde_json::to_string(keeping).map_err(io::Error::other)?;
        let mut command = Command::new(path);
        command.args(arguments).arg(what).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let mut child = command.spawn()?;
        // It outlives this process; while it does not, its end has to be taken.
        std::thread::Builder::new().name("keeper-end".into()).spawn(move || child.wait())?;
    } else {
        let (keeping, end) = (keeping.clone(), Arc::clone(&end));
        std::thread::Builder::new().name("keeper".into()).spawn(move || keeping.run(&end))?;
    }
    Ok(Started { end })
}

/// What the two threads of a keeper share.
#[derive(Debug, Default)]
struct Clock {
    until_ms: Mutex<u64>,
    changed: Condvar,
    is_over: AtomicBool,
    is_stopped: AtomicBool,
}

impl Keeping {
    fn files(&self) -> Files {
        Files::of(&self.run_dir, self.sr)
    }

    fn run(&self, end: &AtomicBool) {
        match self.own() {
            Ok(_lock) => self.keep(end),
            Err(error) => tracing::error!("SR {}: its lease has a keeper already: {error}", self.sr),
        }
    }

    /// This host has no other keeper of the SR while the file is open.
    fn own(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let mut file =
            options.create(true).truncate(false).write(true).mode(0o600).open(self.files().keeper())?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(file)
    }

    fn keep(&self, end: &AtomicBool) {
        let clock = Arc::new(Clock {
            until_ms: Mutex::new(now_ms() + validity_ms(self.silence_ms)),
            ..Clock::default()
        });
        let watching = {
            let (clock, keeping) = (Arc::clone(&clock), self.clone());
            std::thread::Builder::new().name("lease-watch".into()).spawn(move || watch(&clock, &keeping))
        };
        if let Err(error) = watching {
            tracing::error!("SR {}: its lease cannot be watched: {error}", self.sr);
            return;
        }
        self.renew_all(&clock, end);
        clock.is_over.store(true, Ordering::Release);
        clock.changed.notify_all();
    }

    fn renew_all(&self, clock: &Clock, end: &AtomicBool) {
        let (mut seen, mut counter, mut unused) = (Seen::default(), u64::from(std::process::id()) << 32, 0);
        loop {
            let began = now_ms();
            counter += 1;
            match Area::open(&self.area).and_then(|area| self.renew(&area, counter, &mut seen)) {
                Ok(None) => {
                    let until_ms = began + validity_ms(self.silence_ms);
                    *clock.until_ms.lock() = until_ms;
                    clock.changed.notify_all();
                    self.publish(until_ms, None, &seen);
                    if clock.is_stopped.swap(false, Ordering::AcqRel) {
                        tracing::warn!("SR {}: the lease is renewed, and disks go on", self.sr);
                        self.images.signal(Signal::CONT);
                    }
                }
                Ok(Some(why)) => {
                    tracing::error!(
                        "SR {}: the lease is lost: {why}; disks of the SR are ended here",
                        self.sr
                    );
                    self.publish(0, Some(why), &seen);
                    self.lose_all();
                    self.images.signal(Signal::KILL);
                    guests::end_guests(&self.run_dir, self.sr);
                    return;
                }
                Err(error) => tracing::warn!("SR {}: the lease cannot be renewed: {error}", self.sr),
            }
            // A worker that takes another's place has some time.
            unused = if self.is_used() { 0 } else { unused + 1 };
            if unused > 4 {
                self.give_up();
                return;
            }
            if self.slept(end) {
                return;
            }
        }
    }

    /// What this host had open is another's, or free.
    fn lose_all(&self) {
        let first = open_at(usize::from(self.slot));
        let sectors = Area::open(&self.area).and_then(|area| area.read(first, OPEN_SECTORS));
        let sectors = sectors.unwrap_or_else(|error| {
            tracing::error!("SR {}: what was open here is not known: {error}", self.sr);
            Vec::new()
        });
        for (vdi, _) in sectors.iter().filter_map(|sector| decode_open(sector)).flatten() {
            if let Err(error) = self.files().lose(vdi) {
                tracing::error!("SR {}: it is not noted that VDI {vdi} is lost: {error}", self.sr);
            }
        }
    }

    /// Waits for the next beat; whether it is to end.
    fn slept(&self, end: &AtomicBool) -> bool {
        let until = now_ms() + renewal(self.silence_ms).as_millis().try_into().unwrap_or(u64::MAX);
        // A thread looks often: it ends with its owner.
        let turn = if PROGRAM.get().is_some() { renewal(self.silence_ms) } else { Duration::from_millis(20) };
        while now_ms() < until {
            if end.load(Ordering::Acquire) {
                return true;
            }
            std::thread::sleep(turn);
        }
        end.load(Ordering::Acquire)
    }

    /// One beat; answers why the lease is lost, if it is.
    fn renew(&self, area: &Area, counter: u64, seen: &mut Seen) -> io::Result<Option<String>> {
        let own = beat_at(usize::from(self.slot));
        let is_ours = |sector: &[u8; SECTOR]| {
            Beat::decode(sector).is_some_and(|beat| {
                beat.host == self.host && beat.generation == self.generation && !beat.has_left
            })
        };
        let taken = || Some("its place in the SR's lease area was given to another".to_owned());
        // Never over the beat of another.
        if area.read(own, 1)?.first().is_some_and(|sector| !is_ours(sector)) {
            return Ok(taken());
        }
        let name = self.name.clone();
        let beat = Beat { host: self.host, generation: self.generation, counter, has_left: false, name };
        area.write(own, &beat.encode())?;
        // Written before it is read: a host that counts this one as dead writes that before it reads this beat. So one
        // of the two sees the other.
        let sectors = area.read(0, HEAD_SECTORS)?;
        if !is_ours(&sectors[own]) {
            return Ok(taken());
        }
        let now = now_ms();
        for slot in (0..HOSTS).filter(|slot| *slot != usize::from(self.slot)) {
            let slot_name = u8::try_from(slot).unwrap_or(u8::MAX);
            seen.look(slot_name, Beat::decode(&sectors[beat_at(slot)]).as_ref(), now);
        }
        Ok(verdict(&sectors, (self.slot, self.generation)))
    }

    fn publish(&self, until_ms: u64, lost: Option<String>, seen: &Seen) {
        let status = Status {
            slot: self.slot,
            generation: self.generation,
            until_ms,
            silence_ms: self.silence_ms,
            lost,
            seen: seen.clone(),
        };
        if let Err(error) = self.files().write(&status) {
            tracing::error!("SR {}: the state of its lease cannot be written: {error}", self.sr);
        }
    }

    /// Whether a worker, or a disk, needs the lease.
    fn is_used(&self) -> bool {
        let users = File::open(self.files().users());
        let is_locked =
            users.is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err());
        is_locked || !self.images.users().is_empty()
    }

    /// Nothing needs the lease. A change that was broken off keeps the others waiting until this host counts as dead,
    /// and is put in order by one of them then.
    fn give_up(&self) {
        let left = Area::open(&self.area).and_then(|area| {
            let turn = area.read(turn_at(usize::from(self.slot)), 1)?;
            if turn.first().is_some_and(|sector| turn_in(sector).ticket == 0) {
                leave(&area, self)?;
            }
            Ok(())
        });
        if let Err(error) = left {
            tracing::info!("SR {}: its lease ends by itself: {error}", self.sr);
        }
        self.files().remove();
    }
}

/// Says that the host has left in order. Its keeper has ended, or is the caller.
///
/// # Errors
/// The storage's.
pub(crate) fn leave(area: &Area, keeping: &Keeping) -> io::Result<()> {
    let own = beat_at(usize::from(keeping.slot));
    let beat = area.read(own, 1)?.first().and_then(|sector| Beat::decode(sector));
    match beat.filter(|beat| beat.host == keeping.host && beat.generation == keeping.generation) {
        Some(beat) => area.write(own, &Beat { has_left: true, ..beat }.encode()),
        None => Ok(()),
    }
}

/// Stops disks as soon as the lease is not certain any more, those that are started meanwhile too; ends their guests
/// before other hosts count this one as dead.
fn watch(clock: &Clock, keeping: &Keeping) {
    /// How often it looks for disks that were started since.
    const AGAIN: Duration = Duration::from_millis(250);
    let mut until_ms = clock.until_ms.lock();
    while !clock.is_over.load(Ordering::Acquire) {
        let left = until_ms.saturating_sub(now_ms());
        if left > 0 {
            clock.changed.wait_for(&mut until_ms, Duration::from_millis(left));
            continue;
        }
        if !clock.is_stopped.swap(true, Ordering::AcqRel) {
            let images = &keeping.images;
            tracing::error!("the lease of {images:?} could not be renewed in time: its disks are stopped");
        }
        keeping.images.signal(Signal::STOP);
        if now_ms() >= *until_ms + grace_ms(keeping.silence_ms) {
            guests::end_guests(&keeping.run_dir, keeping.sr);
        }
        clock.changed.wait_for(&mut until_ms, AGAIN);
    }
}
