//! The daemon's side: a driver, and an SR, whose work is done by a worker.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::UNFINISHED;
use super::link::{Failure, Worker};
use super::message::{Answer, Task};
use super::process::{Launch, Process};
use crate::errors;
use crate::traits::{
    Config, Ctx, DriverInfo, Fork, ForkKind, Fragmentation, Merge, MergeCost, Merged, NewSr, NewVdi, Oddity,
    OpenSpec, Origin, ProbeAnswer, RoomMade, RoomSpare, RoomTaken, RoomWanted, Sr, SrDriver, SrStat, VdiInfo,
};
use crate::transfer::{Export, Import};

/// Workers that are left behind, of all SRs together, before no probe and no new SR starts another one.
const LEFT_MAX: usize = 32;

/// How long a worker that was killed may take to end before it counts as left behind.
const KILLED: Duration = Duration::from_secs(1);

/// How often that is looked at.
const TURN: Duration = Duration::from_millis(2);

/// How workers are started, and how long they may be silent.
#[derive(Clone, Debug)]
pub struct Options {
    /// Starts one.
    pub launch: Arc<dyn Launch>,
    /// Longest silence in an operation on a VDI, and in a copy. Attaching, scanning, making and probing an SR may
    /// take [`LONG`] times as long: they check file systems and read every image.
    pub limit: Duration,
}

/// See [`Options::limit`].
const LONG: u32 = 4;

/// These drivers, each working in workers.
pub fn drivers(local: Vec<Arc<dyn SrDriver>>, options: &Options) -> Vec<Arc<dyn SrDriver>> {
    Workers::new(options).drivers(local)
}

/// Makes drivers work in workers; what is known of workers that were left behind is shared by all of them.
#[derive(Clone, Debug)]
pub struct Workers(Arc<Pool>);

impl Workers {
    /// None was started yet.
    pub fn new(options: &Options) -> Self {
        Self(Arc::new(Pool { options: options.clone(), left: Mutex::default() }))
    }

    /// These drivers, each working in workers.
    pub fn drivers(&self, local: Vec<Arc<dyn SrDriver>>) -> Vec<Arc<dyn SrDriver>> {
        let remote = |driver: Arc<dyn SrDriver>| -> Arc<dyn SrDriver> {
            let (info, key, origin) = (driver.info(), driver.key(), driver.origin());
            Arc::new(Remote { info, key, origin, pool: Arc::clone(&self.0) })
        };
        local.into_iter().map(remote).collect()
    }
}

/// A worker that does not end.
#[derive(Debug)]
struct Left {
    sr: Option<Uuid>,
    process: Arc<dyn Process>,
    doing: &'static str,
    since: Instant,
}

/// What all drivers share.
#[derive(Debug)]
struct Pool {
    options: Options,
    left: Mutex<Vec<Left>>,
}

impl Pool {
    /// Refuses what a worker that is left behind stands in the way of.
    fn check(&self, sr: Option<Uuid>, doing: &str) -> Result<(), ApiError> {
        let mut left = self.left.lock();
        left.retain(|left| {
            let is_there = !left.process.has_ended();
            if !is_there {
                let (pid, after) = (left.process.id(), left.since.elapsed().as_secs());
                tracing::info!(
                    pid,
                    "a process that was left behind in its storage has ended after {after} s"
                );
            }
            is_there
        });
        if let (Some(sr), Some(of_sr)) = (sr, left.iter().find(|left| sr.is_some() && left.sr == sr)) {
            let text = format!(
                "SR {sr}: process {} waits in the kernel for its storage since {} s ('{}'), and nothing else may work \
                 on the SR before that ends; see to the storage (dmesg, its server), then repeat",
                of_sr.process.id(),
                of_sr.since.elapsed().as_secs(),
                of_sr.doing,
            );
            return Err(errors::fail_with(47, text, UNFINISHED));
        }
        if left.len() >= LEFT_MAX {
            let text =
                format!("{doing}: {LEFT_MAX} processes wait in the kernel for storage that hangs; see to it");
            return Err(errors::fail_with(47, text, UNFINISHED));
        }
        Ok(())
    }

    fn start(&self, sr: Option<Uuid>, doing: &str) -> Result<Arc<Worker>, ApiError> {
        self.check(sr, doing)?;
        let started = Worker::start(&*self.options.launch);
        let failed = |error| ApiError::internal(format!("{doing}: no process for the storage: {error}"));
        started.map(Arc::new).map_err(failed)
    }

    /// One call, and what it means for the worker that it failed.
    fn call(
        &self,
        worker: &Worker,
        ctx: &dyn Ctx,
        sr: Option<Uuid>,
        (task, data): (&Task, Option<OwnedFd>),
    ) -> Result<(Answer, Vec<VdiInfo>), ApiError> {
        let limit = match task {
            Task::Probe { .. } | Task::Make { .. } | Task::Attach { .. } => self.options.limit * LONG,
            Task::Scan | Task::Look | Task::Inspect | Task::Detach | Task::Erase => self.options.limit * LONG,
            _ => self.options.limit,
        };
        let began = Instant::now();
        let failure = match worker.call(ctx, (task, data), limit) {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        let (doing, pid) = (task.name(), worker.process().id());
        let whose = sr.map_or_else(|| "the storage".to_owned(), |sr| format!("SR {sr}"));
        let after = began.elapsed().as_secs();
        let text = match failure {
            Failure::Refused(error) => return Err(error),
            Failure::Silent => {
                let end = self.abandon(worker, sr, doing);
                let silent = limit.as_secs();
                format!(
                    "{whose} did not answer '{doing}' for {silent} s: its storage hangs. Process {pid}, which worked \
                     on it, {end}; see to the storage (dmesg, its server), then repeat"
                )
            }
            Failure::Cancelled => {
                let end = self.abandon(worker, sr, doing);
                tracing::warn!(pid, "'{doing}' of {whose} was cancelled and went on; its process {end}");
                return Err(ApiError::new(
                    "TASK_CANCELLED",
                    [String::new(), String::new(), UNFINISHED.to_owned()],
                ));
            }
            Failure::Ended => {
                self.abandon(worker, sr, doing);
                format!(
                    "{whose}: process {pid}, which worked on it, ended after {after} s of '{doing}', or was ended \
                     because another operation got no answer; what was half done is put in order by the next. Repeat"
                )
            }
            Failure::Nonsense(why) => {
                let end = self.abandon(worker, sr, doing);
                format!(
                    "{whose}: process {pid}, which worked on it, answered nonsense to '{doing}' ({why}); it {end}"
                )
            }
        };
        tracing::error!("{text}");
        Err(errors::fail_with(47, text, UNFINISHED))
    }

    /// Ends a worker; one that does not end is left behind. Answers what became of it.
    fn abandon(&self, worker: &Worker, sr: Option<Uuid>, doing: &'static str) -> &'static str {
        if !worker.give_up() {
            // Another thread ends it.
            return "is ended";
        }
        let process = worker.process();
        process.kill();
        let until = Instant::now() + KILLED;
        while Instant::now() < until {
            if process.has_ended() {
                return "was killed";
            }
            std::thread::sleep(TURN);
        }
        let pid = process.id();
        let whose = sr.map_or_else(|| "a storage".to_owned(), |sr| format!("SR {sr}"));
        tracing::error!(
            pid,
            "a process is left behind: the kernel holds it in '{doing}' on {whose}, which hangs"
        );
        self.left.lock().push(Left { sr, process, doing, since: Instant::now() });
        "was killed and does not end, because the kernel waits for the storage"
    }

    /// Ends a worker that has nothing to do.
    fn dismiss(&self, worker: &Worker, sr: Option<Uuid>) {
        self.abandon(worker, sr, "nothing");
    }
}

/// A driver whose SRs have a worker each.
#[derive(Debug)]
struct Remote {
    info: &'static DriverInfo,
    key: String,
    origin: Option<&'static Origin>,
    pool: Arc<Pool>,
}

impl Remote {
    /// A call that a worker of its own does.
    fn once(&self, ctx: &dyn Ctx, sr: Option<Uuid>, task: &Task) -> Result<Answer, ApiError> {
        let worker = self.pool.start(sr, task.name())?;
        let done = self.pool.call(&worker, ctx, sr, (task, None));
        self.pool.dismiss(&worker, sr);
        done.map(|(answer, _)| answer)
    }
}

fn misunderstood<T>(task: &str) -> Result<T, ApiError> {
    Err(ApiError::internal(format!("a worker answered something else than was asked: {task}")))
}

impl SrDriver for Remote {
    fn info(&self) -> &'static DriverInfo {
        self.info
    }

    fn probe(&self, ctx: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let task = Task::Probe { driver: self.key.clone(), config: config.clone() };
        match self.once(ctx, None, &task)? {
            Answer::Probe(answer) => Ok(answer),
            _ => misunderstood("probe"),
        }
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, size: u64) -> Result<(), ApiError> {
        self.make(ctx, sr, &NewSr { config: config.clone(), size, ..NewSr::default() }).map(drop)
    }

    fn key(&self) -> String {
        self.key.clone()
    }

    fn origin(&self) -> Option<&'static Origin> {
        self.origin
    }

    fn make(&self, ctx: &dyn Ctx, sr: Uuid, new: &NewSr) -> Result<Option<Config>, ApiError> {
        match self.once(ctx, Some(sr), &Task::Make { driver: self.key.clone(), sr, new: new.clone() })? {
            Answer::Config(config) => Ok(config),
            Answer::Nothing => Ok(None),
            _ => misunderstood("create SR"),
        }
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let remote = RemoteSr {
            pool: Arc::clone(&self.pool),
            driver: self.key.clone(),
            keeps_open: self.origin.is_some(),
            keeps_names: self.origin.is_some() || self.info.capabilities.contains(&"VDI_UPDATE"),
            sr,
            config: Mutex::new(config.clone()),
            state: Mutex::new(State { worker: None, is_starting: false, attempts: 0, failed: None }),
            changed: Condvar::new(),
        };
        remote.worker(ctx)?;
        Ok(Box::new(remote))
    }
}

/// An attached SR.
struct RemoteSr {
    pool: Arc<Pool>,
    driver: String,
    /// What it made ready stays so when its worker ends.
    keeps_open: bool,
    /// It is told what its VDIs are called.
    keeps_names: bool,
    sr: Uuid,
    /// What the next worker attaches it with.
    config: Mutex<Config>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    worker: Option<Arc<Worker>>,
    /// One caller attaches the SR by a new worker; the others wait for what comes of it.
    is_starting: bool,
    attempts: u64,
    failed: Option<(u64, ApiError)>,
}

impl fmt::Debug for RemoteSr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteSr").field("sr", &self.sr).finish_non_exhaustive()
    }
}

impl RemoteSr {
    /// The worker; another one, to which the SR is attached first, where the last one is gone.
    fn worker(&self, ctx: &dyn Ctx) -> Result<Arc<Worker>, ApiError> {
        let mut state = self.state.lock();
        let mut awaited = None;
        loop {
            if let Some(worker) = &state.worker {
                if worker.is_usable() {
                    return Ok(Arc::clone(worker));
                }
                self.pool.dismiss(worker, Some(self.sr));
                state.worker = None;
            }
            if !state.is_starting {
                match (awaited, &state.failed) {
                    (Some(awaited), Some((attempt, error))) if *attempt == awaited => {
                        return Err(error.clone());
                    }
                    _ => break,
                }
            }
            awaited = Some(state.attempts);
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            self.changed.wait_for(&mut state, Duration::from_millis(200));
        }
        state.is_starting = true;
        state.attempts += 1;
        let attempt = state.attempts;
        drop(state);
        let started = self.start(ctx);
        let mut state = self.state.lock();
        state.is_starting = false;
        match &started {
            Ok(worker) => state.worker = Some(Arc::clone(worker)),
            Err(error) => state.failed = Some((attempt, error.clone())),
        }
        drop(state);
        self.changed.notify_all();
        started
    }

    fn start(&self, ctx: &dyn Ctx) -> Result<Arc<Worker>, ApiError> {
        let worker = self.pool.start(Some(self.sr), "attach")?;
        let task =
            Task::Attach { driver: self.driver.clone(), sr: self.sr, config: self.config.lock().clone() };
        let attached = self.pool.call(&worker, ctx, Some(self.sr), (&task, None));
        if attached.is_err() {
            self.pool.dismiss(&worker, Some(self.sr));
        }
        attached.map(|_| worker)
    }

    fn call(&self, ctx: &dyn Ctx, task: &Task) -> Result<(Answer, Vec<VdiInfo>), ApiError> {
        let worker = self.worker(ctx)?;
        self.pool.call(&worker, ctx, Some(self.sr), (task, None))
    }

    /// A call whose data go over a socket of their own.
    fn transfer(&self, ctx: &dyn Ctx, task: &Task, data: OwnedFd) -> Result<(), ApiError> {
        let worker = self.worker(ctx)?;
        self.pool.call(&worker, ctx, Some(self.sr), (task, Some(data))).map(drop)
    }

    fn vdi_of(&self, ctx: &dyn Ctx, task: &Task) -> Result<VdiInfo, ApiError> {
        match self.call(ctx, task)?.0 {
            Answer::Vdi(info) => Ok(info),
            _ => misunderstood(task.name()),
        }
    }

    fn merged(&self, ctx: &dyn Ctx, task: &Task) -> Result<Merged, ApiError> {
        match self.call(ctx, task)? {
            (Answer::Gone(gone), changed) => Ok(Merged { changed, gone }),
            _ => misunderstood(task.name()),
        }
    }

    fn done(&self, ctx: &dyn Ctx, task: &Task) -> Result<(), ApiError> {
        self.call(ctx, task).map(drop)
    }
}

impl Drop for RemoteSr {
    fn drop(&mut self) {
        if let Some(worker) = self.state.lock().worker.take() {
            self.pool.dismiss(&worker, Some(self.sr));
        }
    }
}

impl Sr for RemoteSr {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        match self.call(ctx, &Task::Stat)?.0 {
            Answer::Stat(stat) => Ok(stat),
            _ => misunderstood("stat"),
        }
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.call(ctx, &Task::Scan).map(|(_, images)| images)
    }

    fn look(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        self.call(ctx, &Task::Look).map(|(_, images)| images)
    }

    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::Vdi { vdi })
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::Create(new.clone()))
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::Introduce { vdi, location: location.to_owned() })
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        self.done(ctx, &Task::Destroy { vdi })
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::Resize { vdi, bytes })
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, new: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        match self.call(ctx, &Task::Fork { vdi, new, kind })?.0 {
            Answer::Fork(fork) => Ok(*fork),
            _ => misunderstood("snapshot or clone"),
        }
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.done(ctx, &Task::Fill { into, from: from.clone(), base: base.cloned() })
    }

    fn export(&self, ctx: &dyn Ctx, what: &Export, to: OwnedFd) -> Result<(), ApiError> {
        self.transfer(ctx, &Task::Export(what.clone()), to)
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.transfer(ctx, &Task::Import(what.clone()), from)
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        match self.call(ctx, &Task::Activate { vdi, access })?.0 {
            Answer::Disk(disk) => Ok(disk),
            _ => misunderstood("activate"),
        }
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::TrackChanges { vdi, wanted })
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.vdi_of(ctx, &Task::DestroyData { vdi })
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        match self.call(ctx, &Task::ChangedBlocks { from, to })?.0 {
            Answer::Text(text) => Ok(text),
            _ => misunderstood("list changed blocks"),
        }
    }

    fn collect_garbage(&self, ctx: &dyn Ctx) -> Result<Vec<Uuid>, ApiError> {
        self.merged(ctx, &Task::CollectGarbage).map(|merged| merged.gone)
    }

    fn fragmentation(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Fragmentation, ApiError> {
        match self.call(ctx, &Task::Fragmentation { vdi })?.0 {
            Answer::Fragmentation(found) => Ok(found),
            _ => misunderstood("look how an image lies"),
        }
    }

    fn continued(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<Option<Uuid>, ApiError> {
        match self.call(ctx, &Task::Continued { vdi })?.0 {
            Answer::Continued(by) => Ok(by),
            _ => misunderstood("look for what continues a VDI"),
        }
    }

    fn make_room(&self, ctx: &dyn Ctx, wanted: &[RoomWanted]) -> Result<RoomMade, ApiError> {
        match self.call(ctx, &Task::MakeRoom(wanted.to_vec()))?.0 {
            Answer::Room(made) => Ok(made),
            _ => misunderstood("make room for disks"),
        }
    }

    fn take_room(&self, ctx: &dyn Ctx, spare: &[RoomSpare]) -> Result<RoomTaken, ApiError> {
        match self.call(ctx, &Task::TakeRoom(spare.to_vec()))?.0 {
            Answer::RoomTaken(taken) => Ok(taken),
            _ => misunderstood("take room back from disks"),
        }
    }

    fn merge_cost(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<MergeCost, ApiError> {
        match self.call(ctx, &Task::MergeCost(merge.clone()))?.0 {
            Answer::Cost(cost) => Ok(cost),
            _ => misunderstood("look at a merge"),
        }
    }

    fn grow_base(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<(), ApiError> {
        self.done(ctx, &Task::GrowBase(merge.clone()))
    }

    fn merge(&self, ctx: &dyn Ctx, merge: &Merge, rate: u64) -> Result<(), ApiError> {
        self.done(ctx, &Task::Merge { merge: merge.clone(), rate })
    }

    fn relink(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.merged(ctx, &Task::Relink(merge.clone()))
    }

    fn merge_leaf(&self, ctx: &dyn Ctx, merge: &Merge) -> Result<Merged, ApiError> {
        self.merged(ctx, &Task::MergeLeaf(merge.clone()))
    }

    fn time_limit(&self) -> Option<Duration> {
        Some(self.pool.options.limit)
    }

    fn inspect(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        match self.call(ctx, &Task::Inspect)?.0 {
            Answer::Text(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::internal(format!("a worker's oddities: {error}"))),
            _ => misunderstood("inspect"),
        }
    }

    /// What a worker knows of active VDIs ends with it: there is nothing to undo in another worker, and a caller that
    /// deactivates a VDI does not wait for a storage that hangs.
    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        if self.keeps_open {
            return match self.done(ctx, &Task::Deactivate { vdi }) {
                Err(error) if super::is_unfinished(&error) => {
                    tracing::error!(sr = %self.sr, %vdi, %error, "it may stay ready in its plugin until it is used again");
                    Ok(())
                }
                done => done,
            };
        }
        let worker = self.state.lock().worker.clone().filter(|worker| worker.is_usable());
        let Some(worker) = worker else { return Ok(()) };
        let task = Task::Deactivate { vdi };
        let done = self.pool.call(&worker, ctx, Some(self.sr), (&task, None));
        match done {
            Err(error) if super::is_unfinished(&error) => Ok(()),
            done => done.map(drop),
        }
    }

    fn make_thin(&self, ctx: &dyn Ctx, config: &Config) -> Result<(), ApiError> {
        self.done(ctx, &Task::MakeThin { config: config.clone() })?;
        self.config.lock().extend(config.clone());
        Ok(())
    }

    fn rename(&self, ctx: &dyn Ctx, vdi: Uuid, name: &str, description: &str) -> Result<(), ApiError> {
        if !self.keeps_names {
            return Ok(());
        }
        let (name, description) = (name.to_owned(), description.to_owned());
        self.done(ctx, &Task::Rename { vdi, name, description })
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.done(ctx, &Task::Detach) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.done(ctx, &Task::Erase) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
