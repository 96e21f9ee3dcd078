//! This host in the lease area of an SR, for the storage worker: joining, the lock among hosts, what it has open.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::Fence;
use super::area::Area;
use super::config::Wanted;
use super::disks::Images;
use super::end::lost;
use super::keeper::{self, Keeping, Started, renewal, validity_ms, verdict};
use super::layout::{
    Beat, HEAD_SECTORS, HOSTS, Header, OPEN_MAX, OPEN_SECTORS, SECTOR, Turn, beat_at, decode_open,
    encode_open, open_at, turn_at,
};
use super::seen::Health;
use super::status::{Files, Status, now_ms};
use super::turn::{Locking, Next, turn_in};
use crate::errors;
use crate::traits::Ctx;

/// How long an operation waits for other hosts.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often it looks at them.
const TURN: Duration = Duration::from_millis(20);
/// How long a host that takes a free place looks whether another takes it too; writing may take half of it.
const SETTLE: Duration = Duration::from_millis(400);

/// Where the area of an SR is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) area: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) sr: Uuid,
    pub(crate) images: Images,
}

/// A host that has a VDI open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    pub(crate) vdi: Uuid,
    pub(crate) access: Access,
    /// Of the host, for people.
    pub(crate) name: String,
    pub(crate) health: Health,
    slot: u8,
    generation: u64,
}

impl Elsewhere {
    /// Why the VDI cannot be used here so, and what to do.
    pub(crate) fn text(&self) -> String {
        let (vdi, name) = (self.vdi, &self.name);
        let how = if self.access == Access::ReadWrite { "for writing" } else { "for reading" };
        match self.health {
            Health::Alive(silent) if silent >= Duration::from_secs(10) => format!(
                "VDI {vdi} is open {how} on {name}, which was last seen {} s ago: if it is down, repeat once it counts \
                 as dead",
                silent.as_secs()
            ),
            _ => format!(
                "VDI {vdi} is open {how} on {name}: unplug it there first ('xe vbd-unplug', or stop its VM)"
            ),
        }
    }
}

/// The host.
pub(crate) struct Member {
    place: Place,
    keeping: Keeping,
    files: Files,
    /// None once it has left.
    area: RwLock<Option<Area>>,
    /// Generations of hosts that count as dead here, by slot.
    dead: Mutex<BTreeMap<u8, u64>>,
    /// VDIs that this host has open, and how often by the calls of this worker.
    open: Mutex<BTreeMap<Uuid, (Access, usize)>>,
    /// What others have open, as of one holding of the lock.
    elsewhere: Mutex<Option<(u64, HashMap<Uuid, Elsewhere>)>>,
    /// Another one for each holding of the lock; 0 while it is not held.
    holding: AtomicU64,
    holdings: AtomicU64,
    _users: File,
    _keeper: Option<Started>,
}

/// The lock of the SR among hosts.
pub(crate) struct Locked<'a>(&'a Member);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.holding.store(0, Ordering::Release);
        *self.0.elsewhere.lock() = None;
        // What a host that lost its lease had is not its own any more.
        if let Err(error) = self.0.check().and_then(|()| self.0.write_turn(&Turn::default())) {
            tracing::error!("SR {}: the lock among hosts is not given back: {error}", self.0.place.sr);
        }
    }
}

fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> ApiError + use<> {
    let path = path.to_path_buf();
    move |error| errors::io(37, what, &path, &error)
}

fn opened(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)
}

/// The greatest generation that lies there.
fn greatest(sectors: &[[u8; SECTOR]]) -> u64 {
    let beats = (0..HOSTS).filter_map(|slot| Beat::decode(&sectors[beat_at(slot)]));
    beats.map(|beat| beat.generation).max().unwrap_or(0)
}

/// The place that a host takes: its own of before, otherwise the first that is free.
fn place_for(host: Uuid, sectors: &[[u8; SECTOR]]) -> Option<(u8, Option<Beat>)> {
    let beat = |slot: &usize| Beat::decode(&sectors[beat_at(*slot)]);
    let own = (0..HOSTS).find(|slot| beat(slot).is_some_and(|beat| beat.host == host));
    let never = || (0..HOSTS).find(|slot| sectors[beat_at(*slot)].iter().all(|byte| *byte == 0));
    let left = || (0..HOSTS).find(|slot| beat(slot).is_some_and(|beat| beat.has_left));
    let slot = own.or_else(never).or_else(left)?;
    Some((u8::try_from(slot).ok()?, beat(&slot).filter(|beat| beat.host == host)))
}

impl Member {
    /// Joins the hosts of an SR. `makes` is for a place where no area may be yet; none is returned where there is none.
    ///
    /// # Errors
    /// 37: another host has this host's UUID, there is no room for one more, or the storage's.
    pub(crate) fn join(ctx: &dyn Ctx, place: Place, wanted: &Wanted) -> Result<Option<Self>, ApiError> {
        let of_area = failed("cannot use the lease area", &place.area);
        let files = Files::of(&place.run_dir, place.sr);
        let of_files = failed("cannot keep the state of the lease in", &place.run_dir);
        files.make().map_err(&of_files)?;
        let area = match Area::open(&place.area) {
            Ok(area) => area,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(of_area(error)),
        };
        let silence_ms = header(&area, place.sr, wanted.silence_ms).map_err(&of_area)?;
        let users = opened(&files.users()).map_err(&of_files)?;
        flock(&users, FlockOperation::LockShared).map_err(|error| of_files(error.into()))?;
        let keeping = Keeping {
            area: place.area.clone(),
            run_dir: place.run_dir.clone(),
            sr: place.sr,
            host: wanted.host,
            name: wanted.name.clone(),
            slot: 0,
            generation: 0,
            silence_ms,
            images: place.images.clone(),
        };
        let mut member = Self {
            place,
            keeping,
            files,
            area: RwLock::new(Some(area)),
            dead: Mutex::default(),
            open: Mutex::default(),
            elsewhere: Mutex::default(),
            holding: AtomicU64::new(0),
            holdings: AtomicU64::new(0),
            _users: users,
            _keeper: None,
        };
        match member.kept() {
            // Its keeper has outlived the worker of before.
            Some(status) => {
                member.keeping.slot = status.slot;
                member.keeping.generation = status.generation;
            }
            None => {
                member.end_keeper()?;
                member.enter(ctx)?;
                member._keeper = Some(keeper::start(&member.keeping).map_err(&of_files)?);
            }
        }
        member.with_area(|area| {
            let turn = area.read(turn_at(usize::from(member.keeping.slot)), 1)?;
            *member.dead.lock() = turn.first().map(|sector| turn_in(sector).dead).unwrap_or_default();
            Ok(())
        })?;
        member.write_turn(&Turn::default())?;
        member.recall(ctx)?;
        Ok(Some(member))
    }

    /// A good lease of this host, kept by a process.
    fn kept(&self) -> Option<Status> {
        let keeper = File::open(self.files.keeper()).ok()?;
        if flock(&keeper, FlockOperation::NonBlockingLockShared).is_ok() {
            return None;
        }
        let status = self.files.read().ok()?;
        let is_good = status.refusal(status.generation, now_ms()).is_none();
        (is_good && status.silence_ms == self.keeping.silence_ms).then_some(status)
    }

    /// No keeper of this host is left for the SR.
    fn end_keeper(&self) -> Result<(), ApiError> {
        let path = self.files.keeper();
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let Ok(file) = File::open(&path) else { return Ok(()) };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                return Ok(());
            }
            let pid = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            // The process that has the file locked wrote its number there. A thread of this one ends by itself.
            if let Some(pid) =
                pid.filter(|pid| *pid != std::process::id().cast_signed()).and_then(Pid::from_raw)
            {
                let _ = kill_process(pid, Signal::KILL);
            }
            if Instant::now() >= until {
                let text = format!(
                    "the keeper of the lease of SR {} does not end: {}",
                    self.place.sr,
                    path.display()
                );
                return Err(errors::fail(37, text));
            }
            std::thread::sleep(TURN);
        }
    }

    fn with_area<T>(&self, work: impl FnOnce(&Area) -> io::Result<T>) -> Result<T, ApiError> {
        match &*self.area.read() {
            Some(area) => work(area).map_err(failed("cannot use the lease area", &self.place.area)),
            None => {
                Err(errors::fail(37, format_args!("this host has left SR {}: plug its PBD", self.place.sr)))
            }
        }
    }

    fn head(&self) -> Result<Vec<[u8; SECTOR]>, ApiError> {
        self.with_area(|area| area.read(0, HEAD_SECTORS))
    }

    /// Takes a place in the area, with a new generation.
    fn enter(&mut self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        for _ in 0..HOSTS {
            let began = Instant::now();
            let sectors = self.head()?;
            let Some((slot, before)) = place_for(self.keeping.host, &sectors) else {
                let text =
                    format!("SR {} has {HOSTS} hosts: detach it from one ('xe pbd-unplug')", self.place.sr);
                return Err(errors::fail(37, text));
            };
            self.keeping.slot = slot;
            if before.as_ref().is_some_and(|beat| !beat.has_left) {
                self.check_own(ctx, slot, &sectors[beat_at(usize::from(slot))])?;
            }
            self.keeping.generation = greatest(&sectors).saturating_add(1);
            let wrote_ms = now_ms();
            let beat = Beat {
                host: self.keeping.host,
                generation: self.keeping.generation,
                counter: 0,
                has_left: false,
                name: self.keeping.name.clone(),
            };
            let sector = beat.encode();
            self.with_area(|area| area.write(beat_at(usize::from(slot)), &sector))?;
            if before.is_none() {
                // Another host may take the same free place at the same time. What takes it last has it.
                if began.elapsed() > SETTLE / 2 {
                    continue;
                }
                std::thread::sleep(SETTLE);
            }
            let sectors = self.head()?;
            if sectors[beat_at(usize::from(slot))] != sector || verdict(&sectors, self.identity()).is_some() {
                continue;
            }
            let status = Status {
                slot,
                generation: self.keeping.generation,
                until_ms: wrote_ms + validity_ms(self.keeping.silence_ms),
                silence_ms: self.keeping.silence_ms,
                lost: None,
                seen: super::seen::Seen::default(),
            };
            let written = self.files.write(&status);
            return written.map_err(failed("cannot keep the state of the lease in", &self.place.run_dir));
        }
        Err(errors::fail(37, format_args!("SR {}: other hosts took every free place first", self.place.sr)))
    }

    /// The place has this host's UUID, and was not left: it was this host, or another has the same UUID.
    fn check_own(&self, ctx: &dyn Ctx, slot: u8, before: &[u8; SECTOR]) -> Result<(), ApiError> {
        let until = Instant::now() + renewal(self.keeping.silence_ms) * 2;
        while Instant::now() < until {
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            std::thread::sleep(TURN.min(until.saturating_duration_since(Instant::now())));
        }
        let now = self.with_area(|area| area.read(beat_at(usize::from(slot)), 1))?;
        if now.first() == Some(before) {
            return Ok(());
        }
        let text = format!(
            "another host has this host's UUID {} and uses SR {}: was it copied? Give one of them a new one",
            self.keeping.host, self.place.sr
        );
        Err(errors::fail(37, text))
    }

    const fn identity(&self) -> (u8, u64) {
        (self.keeping.slot, self.keeping.generation)
    }

    /// What this host had open before and has still.
    fn recall(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let written = self.opened_in(usize::from(self.keeping.slot))?;
        let mut kept = Vec::new();
        for (vdi, access) in written {
            let is_used = ctx.live(vdi).is_some() || ctx.holders(vdi) > 0;
            if is_used && !self.files.is_lost(vdi) && self.elsewhere(vdi)?.is_none() {
                kept.push((vdi, access));
            }
        }
        let count = |vdi: Uuid| ctx.holders(vdi).clamp(1, OPEN_MAX);
        let kept = kept.into_iter().map(|(vdi, access)| (vdi, (access, count(vdi))));
        let mut open = self.open.lock();
        *open = kept.collect();
        self.write_open(&open)
    }

    fn write_open(&self, open: &BTreeMap<Uuid, (Access, usize)>) -> Result<(), ApiError> {
        let plain = open.iter().map(|(vdi, (access, _))| (*vdi, *access)).collect();
        let sectors = encode_open(self.keeping.generation, &plain);
        let first = open_at(usize::from(self.keeping.slot));
        self.with_area(|area| {
            let now = area.read(first, OPEN_SECTORS)?;
            let others = sectors.iter().zip(now).enumerate().filter(|(_, (sector, now))| *sector != now);
            others.into_iter().try_for_each(|(at, (sector, _))| area.write(first + at, sector))
        })
    }

    fn opened_in(&self, slot: usize) -> Result<Vec<(Uuid, Access)>, ApiError> {
        let sectors = self.with_area(|area| area.read(open_at(slot), OPEN_SECTORS))?;
        Ok(sectors.iter().filter_map(|sector| decode_open(sector)).flatten().collect())
    }

    fn write_turn(&self, turn: &Turn) -> Result<(), ApiError> {
        let turn = Turn { dead: self.dead.lock().clone(), ..turn.clone() };
        self.with_area(|area| area.write(turn_at(usize::from(self.keeping.slot)), &turn.encode()))
    }

    fn status(&self) -> Result<Status, ApiError> {
        self.files.read().map_err(failed("the state of the lease is gone:", &self.place.run_dir))
    }

    /// Counts the host of a slot as dead, if it is silent for long enough. From then on it does no step any more, or
    /// this answers that it is alive.
    fn bury(&self, slot: u8, beat: Option<&Beat>, turn: &Turn) -> Result<bool, ApiError> {
        let status = self.status()?;
        let silence = (now_ms(), u64::from(status.silence_ms));
        let health = status.seen.health(slot, beat, silence);
        let (Some(beat), Health::Dead(silent)) = (beat, health) else { return Ok(false) };
        if self.dead.lock().get(&slot) == Some(&beat.generation) {
            return Ok(true);
        }
        self.dead.lock().insert(slot, beat.generation);
        self.write_turn(turn)?;
        // The mark is there before the beat is read: see the keeper, which does it the other way round.
        let now = self.with_area(|area| area.read(beat_at(usize::from(slot)), 1))?;
        if now.first().and_then(|sector| Beat::decode(sector)).as_ref() == Some(beat) {
            let (sr, name, silent) = (self.place.sr, beat.named(), silent.as_secs());
            tracing::warn!("SR {sr}: {name} was silent for {silent} s and counts as dead");
            return Ok(true);
        }
        self.dead.lock().remove(&slot);
        self.write_turn(turn)?;
        Ok(false)
    }

    /// Takes the SR's lock among hosts. The caller has that of this host.
    ///
    /// # Errors
    /// 37: a host keeps it, or the lease is lost; `TASK_CANCELLED`.
    pub(crate) fn lock(&self, ctx: &dyn Ctx) -> Result<Locked<'_>, ApiError> {
        let until = Instant::now() + TIMEOUT;
        let mut locking = Locking::new(usize::from(self.keeping.slot));
        let outcome = loop {
            match self.try_lock(ctx, &mut locking, until) {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = outcome {
            if self.is_lost() {
                // The next worker joins with a new generation.
                lost(self, &error);
            }
            // Nothing waits for a host that does not want it any more.
            if self.check().is_ok() {
                let _ = self.write_turn(&Turn::default());
            }
            return Err(error);
        }
        self.holding.store(self.holdings.fetch_add(1, Ordering::AcqRel) + 1, Ordering::Release);
        Ok(Locked(self))
    }

    /// Whether another host counts this generation as dead, or has its place.
    fn is_lost(&self) -> bool {
        let is_lost = |status: Status| status.lost.is_some() || status.generation != self.keeping.generation;
        !self.has_left() && self.status().is_ok_and(is_lost)
    }

    /// One step on the way to the lock; whether it is had.
    fn try_lock(&self, ctx: &dyn Ctx, locking: &mut Locking, until: Instant) -> Result<bool, ApiError> {
        self.check()?;
        match locking.next() {
            Next::Enter => return Ok(true),
            Next::Write(turn) => {
                self.write_turn(&turn)?;
                locking.wrote();
            }
            Next::Look => {
                let sectors = self.head()?;
                let turns: Vec<Turn> = (0..HOSTS).map(|slot| turn_in(&sectors[turn_at(slot)])).collect();
                let beat = |slot: usize| Beat::decode(&sectors[beat_at(slot)]);
                let is_out = |slot: usize| {
                    let dead = u8::try_from(slot).ok().and_then(|slot| self.dead.lock().get(&slot).copied());
                    let blank = sectors[beat_at(slot)].iter().all(|byte| *byte == 0);
                    blank || beat(slot).is_some_and(|beat| beat.has_left || Some(beat.generation) == dead)
                };
                if let Some(before) = locking.saw(&turns, is_out) {
                    let turn = Turn { ticket: locking.ticket(), ..Turn::default() };
                    let slot = u8::try_from(before).unwrap_or(u8::MAX);
                    if !self.bury(slot, beat(before).as_ref(), &turn)? {
                        self.wait(ctx, beat(before), until)?;
                    }
                }
            }
        }
        Ok(false)
    }

    fn wait(&self, ctx: &dyn Ctx, beat: Option<Beat>, until: Instant) -> Result<(), ApiError> {
        if ctx.is_cancelled() {
            return Err(errors::cancelled());
        }
        if Instant::now() >= until {
            let name = beat.map_or_else(|| "another host".to_owned(), |beat| beat.named());
            let text = format!(
                "SR {} has been locked by {name} for {} s, which is alive: see to its toolstack ('systemctl status \
                 tapiod'), which finishes what was broken off",
                self.place.sr,
                TIMEOUT.as_secs()
            );
            return Err(errors::fail(37, text));
        }
        std::thread::sleep(TURN);
        Ok(())
    }

    /// Hosts that were here besides this one and have not left.
    fn hosts(&self) -> Result<Vec<(u8, Beat, Health)>, ApiError> {
        let (sectors, status) = (self.head()?, self.status()?);
        let others = (0..HOSTS).filter(|slot| *slot != usize::from(self.keeping.slot));
        let of = |slot: usize| {
            let beat = Beat::decode(&sectors[beat_at(slot)]).filter(|beat| !beat.has_left)?;
            let slot = u8::try_from(slot).ok()?;
            let health = status.seen.health(slot, Some(&beat), (now_ms(), u64::from(status.silence_ms)));
            Some((slot, beat, health))
        };
        Ok(others.filter_map(of).collect())
    }

    /// The same, with what they have open.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn others(&self) -> Result<Vec<(Beat, Health, Vec<Elsewhere>)>, ApiError> {
        let mut found = Vec::new();
        for (slot, beat, health) in self.hosts()? {
            let open = self.opened_in(usize::from(slot))?.into_iter().map(|(vdi, access)| Elsewhere {
                vdi,
                access,
                name: beat.named(),
                health,
                slot,
                generation: beat.generation,
            });
            let open = open.collect();
            found.push((beat, health, open));
        }
        Ok(found)
    }

    /// The host besides this one that has a VDI open and may be alive; for writing, if there are several.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn elsewhere(&self, vdi: Uuid) -> Result<Option<Elsewhere>, ApiError> {
        let holding = self.holding.load(Ordering::Acquire);
        if let Some((of, known)) = &*self.elsewhere.lock()
            && holding != 0
            && *of == holding
        {
            return Ok(known.get(&vdi).cloned());
        }
        let mut known: HashMap<Uuid, Elsewhere> = HashMap::new();
        for one in self.others()?.into_iter().flat_map(|(_, _, open)| open) {
            let is_dead = self.dead.lock().get(&one.slot) == Some(&one.generation);
            let is_more = known.get(&one.vdi).is_none_or(|other| other.access == Access::ReadOnly);
            if !is_dead && is_more {
                known.insert(one.vdi, one);
            }
        }
        let found = known.get(&vdi).cloned();
        if holding != 0 {
            *self.elsewhere.lock() = Some((holding, known));
        }
        Ok(found)
    }

    /// Counts hosts as dead that are, so that what they had open is open no more; answers their beats. The lock is
    /// held.
    fn bury_silent(&self, locked: &Locked<'_>) -> Result<Vec<(u8, Beat)>, ApiError> {
        let ticket = self.with_area(|area| area.read(turn_at(usize::from(self.keeping.slot)), 1))?;
        let turn = ticket.first().map(|sector| turn_in(sector)).unwrap_or_default();
        let mut buried = Vec::new();
        for (slot, beat, health) in locked.0.hosts()? {
            if matches!(health, Health::Dead(_)) && self.bury(slot, Some(&beat), &turn)? {
                buried.push((slot, beat));
            }
        }
        *self.elsewhere.lock() = None;
        Ok(buried)
    }

    /// Takes hosts that are dead out of the area. What they left half done is in order. The lock is held.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn forget_dead(&self, locked: &Locked<'_>) -> Result<(), ApiError> {
        for (slot, beat) in self.bury_silent(locked)? {
            // If the host is back meanwhile, it finds that its beat is not its own, and joins again.
            let left = Beat { has_left: true, ..beat };
            self.with_area(|area| area.write(beat_at(usize::from(slot)), &left.encode()))?;
        }
        Ok(())
    }

    /// This host has the VDI open from now on. The lock is held.
    ///
    /// # Errors
    /// 46: another host has it.
    pub(crate) fn hold(&self, locked: &Locked<'_>, vdi: Uuid, access: Access) -> Result<(), ApiError> {
        self.bury_silent(locked)?;
        if let Some(other) = self.elsewhere(vdi)?
            && (access == Access::ReadWrite || other.access == Access::ReadWrite)
        {
            return Err(errors::fail(46, other.text()));
        }
        let mut open = self.open.lock();
        if open.len() >= OPEN_MAX && !open.contains_key(&vdi) {
            return Err(errors::fail(
                46,
                format_args!("this host has {OPEN_MAX} VDIs of the SR open: unplug some"),
            ));
        }
        let before = open.get(&vdi).copied();
        let (known, count) = before.unwrap_or((access, 0));
        let most = if known == Access::ReadWrite { known } else { access };
        open.insert(vdi, (most, count + 1));
        let written = self.write_open(&open);
        if written.is_err() {
            match before {
                Some(before) => open.insert(vdi, before),
                None => open.remove(&vdi),
            };
        } else {
            self.files.regain(vdi);
        }
        written
    }

    /// Undoes one [`Self::hold`].
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn let_go(&self, vdi: Uuid) -> Result<(), ApiError> {
        let mut open = self.open.lock();
        let Some((_, count)) = open.get_mut(&vdi) else { return Ok(()) };
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        open.remove(&vdi);
        self.write_open(&open)
    }

    /// One of the VDIs that it has open.
    pub(crate) fn any(&self) -> Option<Uuid> {
        self.open.lock().keys().next().copied()
    }

    /// The host that shortens chains: of those that are alive, the first. None where it is this one.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn collector(&self) -> Result<Option<String>, ApiError> {
        let (sectors, status) = (self.head()?, self.status()?);
        for slot in 0..self.keeping.slot {
            let beat = Beat::decode(&sectors[beat_at(usize::from(slot))]);
            let silence = (now_ms(), u64::from(status.silence_ms));
            if let (Some(beat), Health::Alive(_)) = (&beat, status.seen.health(slot, beat.as_ref(), silence))
            {
                return Ok(Some(beat.named()));
            }
        }
        Ok(None)
    }

    /// Whether it has left: its SR is detached, or destroyed.
    pub(crate) fn has_left(&self) -> bool {
        self.area.read().is_none()
    }

    /// Leaves in order: nothing is open here.
    ///
    /// # Errors
    /// The keeper does not end.
    pub(crate) fn leave(&self) -> Result<(), ApiError> {
        let _ = self.check().and_then(|()| self.write_turn(&Turn::default()));
        if let Some(started) = &self._keeper {
            started.end();
        }
        self.end_keeper()?;
        let Some(area) = self.area.write().take() else { return Ok(()) };
        if let Err(error) = keeper::leave(&area, &self.keeping) {
            tracing::warn!("SR {}: other hosts see this one until it counts as dead: {error}", self.place.sr);
        }
        self.files.remove();
        Ok(())
    }
}

impl Member {
    /// The SR ends: the area is removed, if it is a file. The caller knows that no other host is there.
    ///
    /// # Errors
    /// The keeper does not end, or the storage's.
    pub(crate) fn end(&self) -> Result<(), ApiError> {
        self.leave()?;
        if matches!(self.place.images, Images::Group(_)) {
            return Ok(());
        }
        match std::fs::remove_file(&self.place.area) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(errors::io(63, "cannot remove", &self.place.area, &error))
            }
            _ => Ok(()),
        }
    }
}

impl Fence for Member {
    fn number(&self) -> u64 {
        self.keeping.generation
    }

    fn check(&self) -> Result<(), ApiError> {
        let since_ms = now_ms();
        loop {
            let status = self.status()?;
            let Some(why) = status.refusal(self.keeping.generation, now_ms()) else { return Ok(()) };
            // A keeper that is late may be in time still, and nothing is done meanwhile.
            let is_late = status.lost.is_none() && status.generation == self.keeping.generation;
            if !is_late || now_ms() - since_ms >= u64::from(status.silence_ms) {
                let text = format!("this host may change nothing on SR {} any more: {why}", self.place.sr);
                return Err(errors::fail(37, text));
            }
            std::thread::sleep(TURN);
        }
    }
}

/// The time of silence that an area says; one that is new, or of another SR, says the given one from now on.
fn header(area: &Area, sr: Uuid, silence_ms: u32) -> io::Result<u32> {
    let known = area.read(0, 1)?.first().and_then(|sector| Header::decode(sector));
    match known {
        Some(header) if header.sr == sr => Ok(header.silence_ms),
        other => {
            if other.is_some() {
                // A copy: hosts of the original are none of this SR.
                for at in 1..HEAD_SECTORS {
                    area.write(at, &[0; SECTOR])?;
                }
            }
            area.write(0, &Header { sr, silence_ms }.encode())?;
            Ok(silence_ms)
        }
    }
}
