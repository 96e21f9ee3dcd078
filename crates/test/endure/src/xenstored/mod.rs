//! A leg with our xenstored: clients that change and compare their parts of the tree, while the daemon is killed, ended
//! and replaced by live updates, also while it starts.
//!
//! Each client knows all of its part. A change that was acknowledged is there, after a kill too; one that was not is
//! there as a whole or not at all, and from the first look on that is what has to be there. A live update ends no
//! connection and no transaction.

mod wire;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tapio_e2e::process::{Running, poll_until};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

use self::wire::{Client, Failure};
use crate::load::{Before, Trouble, Troubles};
use crate::random::Random;
use crate::report::{Finding, Report, words_of};

/// The name of the leg.
pub const NAME: &str = "xenstored";

const CLIENTS: u64 = 3;

/// How long an answer, a start, an end or an update may take on a busy host.
const LIMIT: Duration = Duration::from_secs(120);

/// A client looks at all of its part once in so many times.
const LOOK_ODDS: u64 = 60;

/// What a client has below its own node: paths from there, and values. The own node is the empty path.
type Tree = BTreeMap<String, Vec<u8>>;

type Outcome<T = ()> = Result<T, Finding>;

/// What clients and schedule share.
struct Shared<'a> {
    report: &'a Report,
    socket: PathBuf,
    troubles: Troubles,
    step: AtomicU64,
}

impl Shared<'_> {
    fn finding(&self, what: impl Into<String>) -> Finding {
        Finding { leg: NAME.into(), step: self.step.load(Ordering::Relaxed), what: what.into() }
    }
}

/// A client that changes its part of the tree.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    random: Random,
    /// The own node.
    node: String,
    known: Tree,
    /// What it may be instead: a change had no answer.
    perhaps: Option<Tree>,
    written: u64,
}

/// A change of a part.
enum Change {
    Write(String, Vec<u8>),
    Remove(String),
}

impl Change {
    fn apply(&self, tree: &mut Tree) {
        match self {
            Self::Write(path, value) => {
                for (at, _) in path.match_indices('/') {
                    tree.entry(path[..at].to_owned()).or_default();
                }
                tree.insert(path.clone(), value.clone());
            }
            Self::Remove(path) => {
                tree.retain(|other, _| other != path && !other.starts_with(&format!("{path}/")));
            }
        }
    }

    fn ask(&self, node: &str, client: &mut Client, transaction: u32) -> Result<(), Failure> {
        match self {
            Self::Write(path, value) => client.write(transaction, &format!("{node}{path}"), value),
            Self::Remove(path) => client.remove(transaction, &format!("{node}{path}")),
        }
    }
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, number: u64) -> Self {
        Self {
            shared,
            random: Random::new(shared.report.seed, &format!("{NAME}/client {number}")),
            node: format!("/endure/{number}"),
            known: Tree::new(),
            perhaps: None,
            written: 0,
        }
    }

    /// Works until the run ends; its part as it should be then.
    fn run(mut self) -> Outcome<Self> {
        let mut begun = false;
        while !self.shared.report.is_ending() {
            let (mut client, connected) = self.connect()?;
            let ended = if begun { self.look(&mut client) } else { self.begin(&mut client) };
            begun |= ended.is_ok();
            let ended = ended.and_then(|()| self.work(&mut client));
            match ended {
                Ok(()) => {}
                Err(End::Found(what)) => return Err(self.shared.finding(format!("{}: {what}", self.node))),
                Err(End::Failed(Failure::Io(_))) if self.shared.troubles.excuse(connected, Trouble::Down) => {
                    self.shared.report.load.failed.fetch_add(1, Ordering::Relaxed);
                }
                Err(End::Failed(failure)) => {
                    let said = format!("{}: a request failed without a reason: {failure}", self.node);
                    return Err(self.shared.finding(said));
                }
            }
        }
        Ok(self)
    }

    fn connect(&self) -> Outcome<(Client, Before)> {
        let until = Instant::now() + LIMIT;
        loop {
            let before = self.shared.troubles.before();
            match Client::connect(&self.shared.socket, LIMIT) {
                Ok(client) => {
                    self.shared.report.load.connections.fetch_add(1, Ordering::Relaxed);
                    return Ok((client, before));
                }
                Err(error) if Instant::now() > until => {
                    return Err(self.shared.finding(format!("no connection within {LIMIT:?}: {error}")));
                }
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Makes the own node.
    fn begin(&mut self, client: &mut Client) -> Result<(), End> {
        client.write(0, &self.node, b"")?;
        self.known = Tree::from([(String::new(), Vec::new())]);
        self.perhaps = None;
        Ok(())
    }

    /// Works on a connection until the run ends or something does.
    fn work(&mut self, client: &mut Client) -> Result<(), End> {
        while !self.shared.report.is_ending() {
            match self.random.below(LOOK_ODDS) {
                0 => self.look(client)?,
                1..=9 => self.transaction(client)?,
                10..=29 => self.read(client)?,
                _ => {
                    let change = self.choose(&self.known.clone());
                    self.change(|node, client| change.ask(node, client, 0), client, &[&change])?;
                }
            }
            self.shared.report.load.answered.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Asks for changes; until that is answered they may be there or not, all of them.
    fn change(
        &mut self,
        ask: impl FnOnce(&str, &mut Client) -> Result<(), Failure>,
        client: &mut Client,
        changes: &[&Change],
    ) -> Result<(), End> {
        let mut next = self.known.clone();
        changes.iter().for_each(|change| change.apply(&mut next));
        self.perhaps = Some(next);
        ask(&self.node, client)?;
        self.known = self.perhaps.take().unwrap_or_default();
        Ok(())
    }

    fn choose(&mut self, tree: &Tree) -> Change {
        if self.random.once_in(6) && tree.len() > 1 {
            let index = 1 + self.random.below(tree.len() as u64 - 1) as usize;
            let path = tree.keys().nth(index).expect("it is below the length");
            return Change::Remove(path.clone());
        }
        let mut path = String::new();
        for _ in 0..=self.random.below(3) {
            path.push_str(&format!("/{}", self.random.below(6)));
        }
        self.written += 1;
        let len = [8, 40, 1500][self.random.below(3) as usize];
        let value = format!("{}:{}:", self.node, self.written).bytes().cycle().take(len).collect();
        Change::Write(path, value)
    }

    /// A few changes that are there together or not at all, or that are taken back.
    fn transaction(&mut self, client: &mut Client) -> Result<(), End> {
        let number = client.begin()?;
        let mut inside = self.known.clone();
        let mut changes = Vec::new();
        for _ in 0..=self.random.below(6) {
            let change = self.choose(&inside);
            change.ask(&self.node, client, number)?;
            change.apply(&mut inside);
            changes.push(change);
        }
        let found = self.fetch(client, number)?;
        if found != inside {
            return Err(End::Found(format!("in a transaction, {}", differs(&found, &inside))));
        }
        if self.random.once_in(4) {
            return Ok(client.end(number, false)?);
        }
        let changes: Vec<&Change> = changes.iter().collect();
        match self.change(|_, client| client.end(number, true), client, &changes) {
            // Another client has changed what it saw: nothing was changed.
            Err(End::Failed(Failure::Refused(name))) if name == "EAGAIN" => {
                self.perhaps = None;
                self.shared.report.refused("transaction", "another changed the same");
                Ok(())
            }
            done => done,
        }
    }

    fn read(&mut self, client: &mut Client) -> Result<(), End> {
        let index = self.random.below(self.known.len() as u64) as usize;
        let (path, value) = self.known.iter().nth(index).expect("it is below the length");
        let found = client.read(0, &format!("{}{path}", self.node))?;
        self.shared.report.load.verified.fetch_add(found.len() as u64, Ordering::Relaxed);
        if found == *value {
            return Ok(());
        }
        Err(End::Found(format!("{path} holds {:?} instead of {:?}", text(&found), text(value))))
    }

    /// Everything below a node.
    fn fetch(&self, client: &mut Client, transaction: u32) -> Result<Tree, Failure> {
        let mut tree = Tree::new();
        let mut left = vec![String::new()];
        while let Some(path) = left.pop() {
            let whole = format!("{}{path}", self.node);
            let value = client.read(transaction, &whole)?;
            left.extend(client.directory(transaction, &whole)?.iter().map(|name| format!("{path}/{name}")));
            self.shared.report.load.verified.fetch_add(value.len() as u64, Ordering::Relaxed);
            tree.insert(path, value);
        }
        Ok(tree)
    }

    /// Compares all of it.
    fn look(&mut self, client: &mut Client) -> Result<(), End> {
        let found = self.fetch(client, 0)?;
        if self.perhaps.as_ref() == Some(&found) {
            self.known = found;
        } else if found != self.known {
            let or = if self.perhaps.is_some() { ", nor with the change that had no answer" } else { "" };
            return Err(End::Found(format!("{}{or}", differs(&found, &self.known))));
        }
        self.perhaps = None;
        Ok(())
    }
}

/// Why work on a connection ended.
enum End {
    Failed(Failure),
    Found(String),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(&value[..value.len().min(60)]).into_owned()
}

/// The first difference in words.
fn differs(found: &Tree, known: &Tree) -> String {
    let paths = found.keys().chain(known.keys()).filter(|path| found.get(*path) != known.get(*path));
    let say = |value: Option<&Vec<u8>>| value.map_or("nothing".into(), |value| format!("{:?}", text(value)));
    match paths.min() {
        Some(path) => {
            format!("'{path}' holds {} instead of {}", say(found.get(path)), say(known.get(path)))
        }
        None => "the tree is as it should be".into(),
    }
}

/// The daemon.
struct Daemon<'a> {
    shared: &'a Shared<'a>,
    dir: &'a Path,
    process: Option<Running>,
    starts: u64,
}

impl Daemon<'_> {
    /// Starts it, and waits until it answers: a connection alone may be one to what the killed one left.
    fn start(&mut self) {
        let mut command = Command::new(our("tapio-xenstored"));
        command.args(["--domains", "none", "--socket"]).arg(&self.shared.socket);
        command.arg("--state-dir").arg(self.dir.join("state"));
        self.starts += 1;
        let mut process =
            Running::start(&mut command, &self.dir.join(format!("xenstored.{}.log", self.starts)));
        let ready = || Client::connect(&self.shared.socket, LIMIT).ok()?.directory(0, "/").ok();
        process.wait_for("its socket", LIMIT, ready);
        self.process = Some(process);
    }

    fn process(&mut self) -> &mut Running {
        self.process.as_mut().expect("it runs between two steps")
    }

    fn kill(&mut self) {
        self.shared.troubles.begin(Trouble::Down);
        self.process().kill();
    }

    fn again(&mut self) {
        self.start();
        self.shared.troubles.end(Trouble::Down);
    }

    /// Asks for a live update.
    fn update(&mut self) {
        self.process().signal(libc::SIGUSR1);
    }

    fn assert_running(&mut self) -> Outcome {
        let Some(status) = self.process().ended() else { return Ok(()) };
        let log = self.process().log();
        Err(self.shared.finding(format!("tapio-xenstored ended by itself ({status}); its log:\n{log}")))
    }
}

/// Whether the daemon has begun again with the state of another.
fn is_restored(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().contains("--restore=")
}

fn step(daemon: &mut Daemon<'_>, random: &mut Random) -> Outcome {
    let report = daemon.shared.report;
    let number = daemon.shared.step.fetch_add(1, Ordering::Relaxed) + 1;
    let chance = random.below(7);
    let mut moment = |most_ms: u64| thread::sleep(Duration::from_micros(random.below(most_ms * 1000)));
    let note = |what: &str| report.note(NAME, number, what);
    match chance {
        0 | 1 => {
            note("kill");
            daemon.kill();
            moment(20);
            daemon.again();
            report.done("kill of xenstored");
        }
        2 => {
            note("kill in a live update");
            daemon.update();
            moment(30);
            daemon.kill();
            daemon.again();
            report.done("kill in a live update");
        }
        3 => {
            note("live update during the start");
            daemon.kill();
            daemon.start();
            daemon.update();
            daemon.shared.troubles.end(Trouble::Down);
            let pid = daemon.process().pid();
            let updated = poll_until(LIMIT, || (is_restored(pid)).then_some(()));
            daemon.assert_running()?;
            updated.ok_or_else(|| daemon.shared.finding("no live update after a start"))?;
            report.done("live update during the start");
        }
        4 => {
            note("stop");
            daemon.shared.troubles.begin(Trouble::Down);
            daemon.process().stop(LIMIT);
            daemon.again();
            report.done("stop and start of xenstored");
        }
        _ => {
            note("live update");
            daemon.update();
            report.done("live update");
        }
    }
    Ok(())
}

/// Runs the leg until the run ends. `Err` is why it cannot run here.
pub fn run(dir: &Path, report: &Report) -> Result<(), String> {
    let mut scratch = Scratch::below(dir);
    let shared =
        Shared { report, socket: scratch.join("socket"), troubles: Troubles::default(), step: 0.into() };
    let mut daemon = Daemon { shared: &shared, dir: scratch.path(), process: None, starts: 0 };
    let lived = catch_unwind(AssertUnwindSafe(|| live(&mut daemon)));
    let lived = lived.unwrap_or_else(|panic| Err(shared.finding(words_of(panic.as_ref()))));
    drop(daemon);
    if let Err(finding) = lived {
        report.found(finding);
    }
    if report.has_found(NAME) {
        scratch.keep();
        eprintln!("{NAME}: state and logs stay in {}", scratch.path().display());
    }
    Ok(())
}

fn live(daemon: &mut Daemon<'_>) -> Outcome {
    let shared = daemon.shared;
    daemon.start();
    let workers = thread::scope(|scope| {
        let workers: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn(move || {
                    let done = Worker::new(shared, number).run();
                    done.inspect_err(|finding| shared.report.found(finding.clone()))
                })
            })
            .collect();
        let mut random = Random::new(shared.report.seed, NAME);
        // Clients end when the run does: a panic here must not leave them waiting for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            while !shared.report.is_ending() {
                thread::sleep(Duration::from_millis(20 + random.below(400)));
                step(daemon, &mut random)?;
                daemon.assert_running()?;
            }
            Ok(())
        }));
        let outcome = outcome.unwrap_or_else(|panic| Err(shared.finding(words_of(panic.as_ref()))));
        if outcome.is_err() {
            shared.report.end();
        }
        let workers: Vec<_> = workers.into_iter().filter_map(|worker| worker.join().ok()?.ok()).collect();
        outcome.map(|()| workers)
    })?;
    // What each of them knows is there after one more kill.
    daemon.kill();
    daemon.again();
    for mut worker in workers {
        let (mut client, _) = worker.connect()?;
        match worker.look(&mut client) {
            Ok(()) => {}
            Err(End::Found(what)) => {
                return Err(shared.finding(format!("at the end, {}: {what}", worker.node)));
            }
            Err(End::Failed(failure)) => return Err(shared.finding(format!("at the end: {failure}"))),
        }
    }
    daemon.process().stop(LIMIT);
    shared.report.done("final look at the tree");
    Ok(())
}
