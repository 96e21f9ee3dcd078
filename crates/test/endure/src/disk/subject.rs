//! A disk under test: its images, its process, and the commands of a user on both.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::Duration;

use tapio_e2e::disk::{tapio, text};
use tapio_e2e::process::{Finished, Running, run_within};
use tapio_e2e::tools::our;

use crate::load::{Target, Trouble, connect};
use crate::model::Model;
use crate::random::Random;
use crate::report::{Finding, Report};

/// How long a command may take on a busy host.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(300);

/// How long a disk process may take to start or to end.
const PROCESS_LIMIT: Duration = Duration::from_secs(120);

/// Sectors of a block of a VHD.
const BLOCK_SECTORS: u64 = 4096;

/// A result with what is wrong.
pub type Outcome<T = ()> = Result<T, Finding>;

/// An image and its type, as `vhd:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// `vhd` or `aio`.
    pub kind: &'static str,
    /// Where it is.
    pub path: PathBuf,
}

impl Image {
    /// A VHD.
    pub const fn vhd(path: PathBuf) -> Self {
        Self { kind: "vhd", path }
    }

    /// A raw image.
    pub const fn raw(path: PathBuf) -> Self {
        Self { kind: "aio", path }
    }

    /// As programs are told.
    pub fn name(&self) -> String {
        format!("{}:{}", self.kind, self.path.display())
    }

    /// As `list` shows it.
    fn is_listed_as(&self, args: &str) -> bool {
        args.split_once(':').is_some_and(|(_, path)| Path::new(path) == self.path)
    }
}

/// How a disk is made and served.
#[derive(Debug)]
pub struct Setup {
    /// The name of the leg, which is the name of its directory too.
    pub name: String,
    /// Number of the disk in what it holds.
    pub disk: u16,
    /// Where its images are.
    pub images: PathBuf,
    /// Where its sockets and logs are.
    pub dir: PathBuf,
    /// Bytes.
    pub len: u64,
    /// More arguments of the disk process.
    pub arguments: Vec<String>,
    /// A client waits this long after each request.
    pub rest: Duration,
    /// Whether clients discard and zero.
    pub discards: bool,
    /// Whether the image is an encrypted VHD, whose discards are of another kind.
    pub is_encrypted: bool,
}

/// A disk under test.
#[derive(Debug)]
pub struct Subject<'a> {
    /// What its clients know.
    pub target: &'a Target,
    /// The record of the run.
    pub report: &'a Report,
    /// Chance of its schedule.
    pub random: Random,
    /// Its images, the leaf first.
    pub chain: Vec<Image>,
    setup: &'a Setup,
    process: Option<Running>,
    images_made: u64,
    /// The image in the command that starts its process, which may be older than the leaf.
    command_image: Option<Image>,
}

impl Setup {
    /// What clients need to know.
    pub fn target(&self) -> Target {
        let model = Model::new(self.disk, self.len);
        let model = if self.is_encrypted { model.encrypted(BLOCK_SECTORS) } else { model };
        Target {
            name: self.name.clone(),
            socket: self.dir.join("nbd"),
            model: Mutex::new(model),
            gate: RwLock::new(()),
            troubles: crate::load::Troubles::default(),
            sizes: 0.into(),
            step: 0.into(),
            rest: self.rest,
            discards: self.discards,
            disk: self.disk,
        }
    }
}

impl<'a> Subject<'a> {
    /// A disk with these images, not served yet.
    pub fn new(setup: &'a Setup, target: &'a Target, report: &'a Report, chain: Vec<Image>) -> Self {
        let random = Random::new(report.seed, &setup.name);
        Self { target, report, random, chain, setup, process: None, images_made: 0, command_image: None }
    }

    /// What is wrong, with the step.
    pub fn finding(&self, what: impl Into<String>) -> Finding {
        self.target.finding(what)
    }

    /// A line of the log.
    pub fn note(&self, said: &str) {
        self.report.note(&self.target.name, self.target.step.load(Ordering::Relaxed), said);
    }

    /// Where its images are.
    pub fn images(&self) -> &Path {
        &self.setup.images
    }

    /// The image that is written.
    pub fn leaf(&self) -> &Image {
        &self.chain[0]
    }

    /// A path where no image was before.
    pub fn fresh(&mut self, extension: &str) -> PathBuf {
        self.images_made += 1;
        self.setup.images.join(format!("{}.{extension}", self.images_made))
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.target.model.lock().expect("no holder panics").count() * crate::model::SECTOR_LEN
    }

    /// Deletes images that the disk does not need any more.
    pub fn remove(&self, images: &[Image]) {
        for image in images {
            // What is not there needs no removal.
            let _ = std::fs::remove_file(&image.path);
        }
    }

    fn on_host(&self, command: &mut Command) {
        command.env("TAPIO_RUN_DIR", self.setup.dir.join("run"));
        command.env("TAPIO_SHM_DIR", self.setup.dir.join("shm"));
    }

    /// `tapio ARGS` to its end.
    pub fn tapio(&self, args: &[&str]) -> Finished {
        let mut command = tapio(args);
        self.on_host(&mut command);
        run_within(&mut command, COMMAND_LIMIT)
    }

    /// `tapio ARGS`, which goes on while the schedule does other things.
    pub fn tapio_beside(&self, args: &[&str]) -> Running {
        let mut command = tapio(args);
        self.on_host(&mut command);
        Running::start(&mut command, &self.setup.dir.join("command.log"))
    }

    /// `tapio vhd-util ARGS`, which has to succeed.
    pub fn vhd_util(&self, args: &[&str]) -> Outcome<String> {
        let finished = self.tapio(&[&["vhd-util"], args].concat());
        if finished.status.success() { Ok(finished.stdout) } else { Err(self.finding(finished.to_string())) }
    }

    /// `tapio disk WORDS -p PID -m MINOR ARGS` to its end.
    pub fn disk(&self, words: &[&str], args: &[&str]) -> Finished {
        let (pid, minor) = self.which();
        self.tapio(&[&["disk"], words, &["-p", &pid, "-m", &minor], args].concat())
    }

    /// The same while the schedule does other things.
    pub fn disk_beside(&self, words: &[&str], args: &[&str]) -> Running {
        let (pid, minor) = self.which();
        self.tapio_beside(&[&["disk"], words, &["-p", &pid, "-m", &minor], args].concat())
    }

    /// `tapio disk grow` to its end.
    pub fn disk_grow(&self, len: u64) -> Finished {
        self.tapio(&["disk", "grow", "0", &len.to_string()])
    }

    /// `tap-ctl COMMAND -p PID -m MINOR ARGS` to its end.
    pub fn tap_ctl(&self, command: &str, args: &[&str]) -> Finished {
        let (pid, minor) = self.which();
        self.tapio(&[&["tap-ctl", command, "-p", &pid, "-m", &minor], args].concat())
    }

    /// Process id and minor number, as arguments. The directory of control sockets has this disk alone.
    fn which(&self) -> (String, String) {
        let pid = self.process.as_ref().map_or(0, Running::pid);
        (pid.to_string(), "0".into())
    }

    /// A number of the disk's counters.
    pub fn counter(&self, name: &str) -> Option<u64> {
        let said = self.tap_ctl("stats", &[]).stdout;
        serde_json::from_str::<serde_json::Value>(&said).ok()?[name].as_u64()
    }

    /// Starts the process and waits until it takes connections: by the command that it was started with before, which
    /// has to find the image that is the leaf now.
    pub fn start(&mut self) -> Outcome {
        let chain = self.chain.clone();
        self.start_among(vec![chain])
    }

    /// The same where a change of the images was broken off: the disk is on one of these chains then.
    pub fn start_among(&mut self, chains: Vec<Vec<Image>>) -> Outcome {
        let image = self.command_image.get_or_insert_with(|| self.chain[0].clone()).name();
        let mut command = Command::new(our("tapio-disk"));
        self.on_host(&mut command);
        command.args(["--foreground", "--minor", "0", "--image", &image]);
        command.arg("--nbd-unix").arg(&self.target.socket).args(&self.setup.arguments);
        let log = self.setup.dir.join("disk.log");
        let mut process = Running::start(&mut command, &log);
        let ready = || connect(&self.target.socket).ok().map(|client| client.disconnect().is_ok());
        process.wait_for("answer on the NBD socket", PROCESS_LIMIT, ready);
        self.process = Some(process);
        let listed = self.listed();
        let is_on = |chain: &Vec<Image>| listed.as_deref().is_some_and(|args| chain[0].is_listed_as(args));
        let Some(chain) = chains.iter().find(|chain| is_on(chain)) else {
            let leaves: Vec<String> = chains.iter().map(|chain| chain[0].name()).collect();
            let said = format!("started by {image}, the disk should be on {}", leaves.join(" or "));
            return Err(self.finding(format!("{said}; the list says {listed:?}")));
        };
        self.chain = chain.clone();
        self.target.troubles.end(Trouble::Down);
        Ok(())
    }

    /// The next start is by the image that is the leaf then: the owner of the disk has changed the command.
    pub fn follow_leaf(&mut self) {
        self.command_image = None;
    }

    /// Ends the process as a crash does. Mostly the next is started with the same command.
    pub fn kill(&mut self) {
        if self.random.once_in(4) {
            self.follow_leaf();
        }
        self.target.troubles.begin(Trouble::Down);
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
        self.was_killed();
    }

    /// The same for a process that the kernel may hold until its storage answers: `meanwhile` runs between the kill and
    /// the wait for the end.
    pub fn kill_while(&mut self, meanwhile: impl FnOnce(&mut Self, &mut Running)) {
        self.target.troubles.begin(Trouble::Down);
        if let Some(mut process) = self.process.take() {
            process.signal(libc::SIGKILL);
            meanwhile(self, &mut process);
            process.wait(PROCESS_LIMIT);
        }
        self.was_killed();
    }

    /// The process is gone. What it answered before is noted first: its clients notice the end by themselves.
    fn was_killed(&self) {
        let _gate = self.target.gate.write().expect("no holder panics");
        self.target.model.lock().expect("no holder panics").killed();
    }

    /// Ends the process in order.
    pub fn stop(&mut self) {
        self.target.troubles.begin(Trouble::Down);
        if let Some(mut process) = self.process.take() {
            process.stop(PROCESS_LIMIT);
        }
        self.target.model.lock().expect("no holder panics").closed();
    }

    /// The process has not ended by itself.
    pub fn assert_running(&mut self) -> Outcome {
        let ended = self.process.as_mut().and_then(Running::ended);
        let Some(status) = ended else { return Ok(()) };
        let log = self.process.as_ref().map(Running::log).unwrap_or_default();
        Err(self.finding(format!("the disk process ended by itself ({status}); its log:\n{log}")))
    }

    /// The disk is on the image that the schedule believes to be the leaf.
    pub fn assert_leaf(&self) -> Outcome {
        let listed = self.listed();
        if listed.as_deref().is_some_and(|args| self.leaf().is_listed_as(args)) {
            return Ok(());
        }
        Err(self.finding(format!("the disk should be on {}, the list says {listed:?}", self.leaf().name())))
    }

    /// The image of the disk in `tap-ctl list`.
    pub fn listed(&self) -> Option<String> {
        let said = self.tapio(&["tap-ctl", "list"]).stdout;
        said.lines().find_map(|line| Some(line.split_once("args=")?.1.to_string()))
    }

    /// `vhd-util check` is content with all images; only while none is written.
    pub fn check_images(&self) -> Outcome {
        if self.leaf().kind != "vhd" {
            return Ok(());
        }
        let leaf = text(&self.leaf().path);
        self.vhd_util(&["check", "-n", leaf, "-p"])?;
        let depth = self.vhd_util(&["query", "-n", leaf, "-d"])?;
        let expected = format!("chain depth: {}", self.chain.len());
        if depth.trim() != expected {
            return Err(self.finding(format!("{leaf}: {} instead of {expected}", depth.trim())));
        }
        Ok(())
    }

    /// Whether a command succeeded; `false` when it was refused with one of the errors that may come now.
    pub fn judge(&self, action: &str, finished: &Finished, allowed: &[i32]) -> Outcome<bool> {
        if finished.status.success() {
            self.report.done(action);
            return Ok(true);
        }
        match finished.status.code() {
            Some(code) if allowed.contains(&code) => {
                let why = std::io::Error::from_raw_os_error(code).to_string();
                let said =
                    if finished.stderr.trim().is_empty() { &finished.stdout } else { &finished.stderr };
                self.note(&format!("{action} was refused: {}", said.trim()));
                self.report.refused(action, &why);
                Ok(false)
            }
            _ => Err(self.finding(finished.to_string())),
        }
    }

    /// A moment that no two steps have in common.
    pub fn moment(&mut self, longest_ms: u64) {
        thread::sleep(Duration::from_micros(self.random.below(longest_ms * 1000)));
    }
}
