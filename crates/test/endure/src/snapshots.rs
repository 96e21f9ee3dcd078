//! A leg with one disk of a running VM: snapshots of the VM come every second and go again, all but a few, while
//! clients write and garbage collections merge what is left of them.
//!
//! Chains have to stay short and space has to come back; what the disk holds, and what each snapshot held when it was
//! made, is compared byte by byte. The daemon is killed at any moment, and the disk process goes on; the disk process
//! is killed in the middle of snapshots, and another takes its place.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::disk::{text, vhd_util};
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::process::{poll_until, run as run_command};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{Daemon, DaemonOptions, Session};

use crate::load::{Target, Trouble, Troubles, Worker, verify};
use crate::model::{Model, Range, SECTOR_LEN};
use crate::random::Random;
use crate::report::{Finding, Report, words_of};

/// The name of the leg.
pub const NAME: &str = "snapshots";

/// Bytes of the disk.
const LEN: u64 = 48 << 20;

/// Connections to the disk.
const CLIENTS: u32 = 2;

/// Snapshots that stay.
const KEPT: usize = 3;

/// The schedule makes no more snapshots while the SR has so many images: the collection has to come along.
const IMAGES_MAX: usize = 20;

/// How long the end of a collection may take on a busy host.
const LIMIT: Duration = Duration::from_secs(300);

/// A snapshot of the VM, its disk, and what that holds, where no client wrote while it was made.
struct Snapshot {
    vm: String,
    vdi: String,
    model: Option<Model>,
}

struct Leg<'a> {
    report: &'a Report,
    dir: &'a Path,
    target: &'a Target,
    random: Random,
    options: DaemonOptions,
    daemon: Option<Daemon>,
    session: Option<Session>,
    sr: String,
    vm: String,
    snapshots: Vec<Snapshot>,
}

type Outcome<T = ()> = Result<T, Finding>;

impl Leg<'_> {
    fn start(&mut self) {
        let daemon = self.options.start();
        self.session = Some(daemon.login());
        self.daemon = Some(daemon);
    }

    fn socket(&self) -> &Path {
        &self.daemon.as_ref().expect("the daemon runs").socket
    }

    fn pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, |daemon| daemon.process.pid())
    }

    /// A call that must work: one that does not is a panic, and so a finding.
    fn call(&self, method: &str, params: &[Value]) -> Value {
        self.session.as_ref().expect("the daemon runs").call(method, params)
    }

    fn text(&self, method: &str, params: &[Value]) -> String {
        self.call(method, params).as_str().expect("a text").to_owned()
    }

    /// A running VM with one disk, which NBD clients reach beside its guest.
    fn set_up(&mut self) {
        self.start();
        let pool = self.call("pool.get_all", &[])[0].clone();
        self.sr = self.text("pool.get_default_SR", &[pool]);
        self.call("SR.add_to_other_config", &[json!(self.sr), json!("gc-quiet"), json!("1")]);
        let record =
            json!({"name_label": "vm", "platform": {"driver": "sim"}, "other_config": {"driver": "sim"}});
        self.vm = self.text("VM.create", &[record]);
        let record = json!({"SR": self.sr, "virtual_size": LEN, "type": "user", "name_label": "disk"});
        let vdi = self.text("VDI.create", &[record]);
        let record = json!({"VM": self.vm, "VDI": vdi, "userdevice": "0", "mode": "RW", "type": "Disk"});
        self.call("VBD.create", &[record]);
        self.call("VM.start", &[json!(self.vm), json!(false), json!(false)]);
        self.reach();
    }

    fn tapio(&self, words: &[&str]) -> String {
        let mut command = Command::new(our("tapio"));
        command.env("TAPIO_RUN_DIR", self.dir.join("run/disk")).env("TAPIO_SHM_DIR", self.dir.join("shm"));
        run_command(command.args(words)).ok()
    }

    /// The disk's process and its number there, once it has images open.
    fn disk(&self) -> Option<(i32, u64)> {
        let listed: Value = serde_json::from_str(&self.tapio(&["disk", "list", "--json"])).expect("JSON");
        let is_open = |disk: &&Value| disk["image"].is_string();
        let disk = listed.as_array().expect("a list").iter().find(is_open)?.clone();
        let number = |name: &str| disk[name].as_u64().unwrap_or_else(|| panic!("{name} of {disk}"));
        Some((i32::try_from(number("pid")).expect("a process"), number("minor")))
    }

    /// Lets NBD clients reach the disk.
    fn reach(&self) {
        let (pid, minor) = self.disk().expect("the disk is plugged");
        let (pid, minor, socket) = (pid.to_string(), minor.to_string(), text(&self.target.socket));
        self.tapio(&["disk", "front", "add", "-p", &pid, "-m", &minor, "--nbd-unix", socket]);
    }

    /// What is there now, for people.
    fn state(&self) -> String {
        let images = self.images();
        let held: u64 =
            images.iter().filter_map(|image| image.metadata().ok()).map(|data| data.blocks() * 512).sum();
        let chain = self.disk().map_or(0, |(pid, minor)| {
            let words = ["tap-ctl", "stats", "-p", &pid.to_string(), "-m", &minor.to_string()];
            let stats: Value = serde_json::from_str(&self.tapio(&words)).expect("JSON");
            stats["images"].as_array().map_or(0, Vec::len)
        });
        format!(
            "{} images of {} MiB, {} in the chain, {} snapshots",
            images.len(),
            held >> 20,
            chain,
            self.snapshots.len()
        )
    }

    /// The images in the SR.
    fn images(&self) -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir(self.dir.join("sr")).expect("the SR").flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|kind| kind == "vhd"))
            .collect()
    }

    /// Makes a snapshot of the VM; without requests in flight, what it holds is known.
    fn snapshot(&mut self) {
        let target = self.target;
        let is_quiet = self.random.once_in(3);
        let gate = is_quiet.then(|| target.gate.write().expect("no holder panics"));
        let vm = self.text("VM.snapshot", &[json!(self.vm), json!("kept")]);
        let model = is_quiet.then(|| target.model.lock().expect("no holder panics").clone());
        drop(gate);
        let vbds = self.call("VM.get_VBDs", &[json!(vm)]);
        let vdi = self.text("VBD.get_VDI", &[vbds[0].clone()]);
        self.snapshots.push(Snapshot { vm, vdi, model });
        self.report.done("VM.snapshot");
    }

    /// Reads a snapshot, if it is known what it holds, and destroys it.
    fn destroy(&mut self, number: usize) -> Outcome {
        let Snapshot { vm, vdi, model } = self.snapshots.remove(number);
        if let Some(model) = model {
            self.compare(&vdi, model)?;
            self.report.done("snapshot that was compared");
        }
        self.call("VM.destroy", &[json!(vm)]);
        self.call("VDI.destroy", &[json!(vdi)]);
        self.report.done("VDI.destroy of a snapshot");
        Ok(())
    }

    /// Compares what a VDI holds with what it has to.
    fn compare(&self, vdi: &str, mut model: Model) -> Outcome {
        const STEP: u64 = 2048;
        let wrong = |what: String| self.target.finding(format!("snapshot {vdi}: {what}"));
        let mut stream = UnixStream::connect(self.socket()).expect("it is served");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        let head = format!("GET /export_raw_vdi?vdi={vdi} HTTP/1.0\r\nhost: x\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("sent");
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).expect("an answer") == 1 {
            head.push(byte[0]);
        }
        if !head.starts_with(b"HTTP/1.0 200") && !head.starts_with(b"HTTP/1.1 200") {
            return Err(wrong(format!("is not exported: {}", String::from_utf8_lossy(&head))));
        }
        let mut bytes = vec![0; (STEP * SECTOR_LEN) as usize];
        for first in (0..model.count()).step_by(STEP as usize) {
            let range = Range { first, count: STEP.min(model.count() - first) };
            let piece = &mut bytes[..range.len() as usize];
            stream.read_exact(piece).map_err(|error| wrong(format!("ends early: {error}")))?;
            model.read(range, piece).map_err(wrong)?;
            self.report.load.verified.fetch_add(range.len(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Asks for a snapshot, and does not wait for the answer, but for a moment.
    fn begin_snapshot(&mut self) -> UnixStream {
        let session = self.session.as_ref().expect("the daemon runs");
        let params = json!([session.reference, self.vm, "cut off"]);
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "VM.snapshot", "params": params}).to_string();
        let head = format!("POST /jsonrpc HTTP/1.0\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        let wait = Duration::from_micros(self.random.below(150_000));
        let mut stream = UnixStream::connect(self.socket()).expect("it is served");
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("sent");
        thread::sleep(wait);
        stream
    }

    /// Kills the disk process while a snapshot is made; another takes its place. What was answered stays.
    fn kill_disk(&mut self) -> Outcome {
        let (before, _) = self.disk().expect("the disk is plugged");
        self.target.troubles.begin(Trouble::Down);
        let mut stream = self.begin_snapshot();
        // It carries the name of this leg's directory.
        let _ = tapio_e2e::process::signal(before, libc::SIGKILL);
        let mut answer = String::new();
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        stream.read_to_string(&mut answer).expect("an answer");
        let again = poll_until(LIMIT, || self.disk().filter(|(pid, _)| *pid != before));
        if again.is_none() {
            return Err(self.target.finding("no other process takes the place of the disk's"));
        }
        self.reach();
        self.target.troubles.end(Trouble::Down);
        self.report.done(match answer.contains("\"result\"") {
            true => "kill of the disk in a snapshot that was made",
            false => "kill of the disk in a snapshot that failed",
        });
        self.look("of the disk process")
    }

    /// Kills the daemon while it makes a snapshot, or whatever it does else; what is there then counts.
    fn kill(&mut self) -> Outcome {
        let _stream = self.begin_snapshot();
        self.session = None;
        if let Some(mut daemon) = self.daemon.take() {
            daemon.process.kill();
        }
        self.start();
        self.report.done("kill of the daemon");
        // Answered when what was cut off is finished or undone.
        self.call("VM.set_name_description", &[json!(self.vm), json!("killed once more")]);
        self.look("of the daemon")
    }

    /// Takes in snapshots whose making was cut off by a kill `of`; all others must be there.
    fn look(&mut self, of: &str) -> Outcome {
        let there = self.call("VM.get_snapshots", &[json!(self.vm)]);
        let there: Vec<String> = serde_json::from_value(there).expect("references");
        let lost = self.snapshots.iter().find(|snapshot| !there.contains(&snapshot.vm));
        if let Some(lost) = lost {
            return Err(self.target.finding(format!("snapshot {} is gone after a kill {of}", lost.vm)));
        }
        let known: BTreeSet<&String> = self.snapshots.iter().map(|snapshot| &snapshot.vm).collect();
        let made: Vec<String> = there.iter().filter(|vm| !known.contains(vm)).cloned().collect();
        for vm in made {
            let vbds = self.call("VM.get_VBDs", &[json!(vm)]);
            let vdi = self.text("VBD.get_VDI", &[vbds[0].clone()]);
            self.snapshots.push(Snapshot { vm, vdi, model: None });
        }
        Ok(())
    }

    fn step(&mut self) -> Outcome {
        thread::sleep(Duration::from_millis(200 + self.random.below(1200)));
        let step = self.target.step.fetch_add(1, Ordering::Relaxed) + 1;
        self.target.model.lock().expect("no holder panics").step(step);
        let images = self.images().len();
        self.report.note(NAME, step, &self.state());
        if self.random.once_in(12) {
            return self.kill();
        }
        if self.random.once_in(8) {
            return self.kill_disk();
        }
        if images > IMAGES_MAX {
            self.report.done("wait for the collection");
            let is_short = || (self.images().len() <= IMAGES_MAX || self.report.is_ending()).then_some(());
            let waited = poll_until(LIMIT, is_short);
            return waited.ok_or_else(|| {
                self.target.finding(format!("the SR has {} images after {LIMIT:?}", self.images().len()))
            });
        }
        self.snapshot();
        while self.snapshots.len() > KEPT {
            let number = self.random.below(self.snapshots.len() as u64) as usize;
            self.destroy(number)?;
        }
        Ok(())
    }

    /// Collects until nothing is left to be done.
    fn collect(&self) -> Outcome {
        self.call("SR.collect_garbage", &[json!(self.sr), json!(false)]);
        let mut left = Value::Null;
        let done = poll_until(LIMIT, || {
            left = self.call("SR.collect_garbage", &[json!(self.sr), json!(true)]);
            (left == json!([])).then_some(())
        });
        done.ok_or_else(|| self.target.finding(format!("after {LIMIT:?} the collection has left {left}")))
    }

    /// What there is in the end: short chains, and with the last snapshot gone one image, no larger than the disk.
    fn finish(&mut self) -> Outcome {
        while self.snapshots.len() > KEPT {
            self.destroy(0)?;
        }
        self.collect()?;
        // Each snapshot has an image and one that it shares; so has the disk.
        let (images, max) = (self.images().len(), 2 * self.snapshots.len() + 1);
        if images > max {
            return Err(self.target.finding(format!("the SR has {images} images, and needs {max}")));
        }
        verify(self.target, self.report)?;
        while !self.snapshots.is_empty() {
            self.destroy(0)?;
        }
        self.collect()?;
        verify(self.target, self.report)?;
        self.call("VM.hard_shutdown", &[json!(self.vm)]);
        let images = self.images();
        let held: u64 =
            images.iter().filter_map(|image| image.metadata().ok()).map(|data| data.blocks() * 512).sum();
        if images.len() != 1 || held > LEN + (LEN >> 3) {
            return Err(self.target.finding(format!("{} images with {held} bytes are left", images.len())));
        }
        for image in &images {
            let said = vhd_util(&["check", "-n", text(image)]).ok();
            if !said.contains("is valid") {
                return Err(self.target.finding(said));
            }
        }
        if let Some(daemon) = self.daemon.take() {
            daemon.stop();
        }
        self.report.done("one image at the end");
        Ok(())
    }

    fn live(&mut self) -> Outcome {
        self.set_up();
        let (target, report) = (self.target, self.report);
        thread::scope(|scope| {
            for number in 0..CLIENTS {
                let worker = Worker::new(target, report, number);
                scope.spawn(move || worker.run());
            }
            // Clients end when the run does: a panic here must not leave them waiting for ever.
            let lived = catch_unwind(AssertUnwindSafe(|| {
                while !report.is_ending() {
                    self.step()?;
                }
                Ok(())
            }));
            let lived = lived.unwrap_or_else(|panic| Err(target.finding(words_of(panic.as_ref()))));
            lived.inspect_err(|_| report.end())
        })?;
        if report.is_clean() { self.finish() } else { Ok(()) }
    }
}

/// Runs the leg until the run ends. `Err` is why it cannot run here.
pub fn run(dir: &Path, report: &Report) -> Result<(), String> {
    let mut scratch = Scratch::below(dir);
    let target = Target {
        name: NAME.into(),
        socket: scratch.join("run/nbd"),
        model: Mutex::new(Model::new(9, LEN)),
        gate: RwLock::new(()),
        troubles: Troubles::default(),
        sizes: 0.into(),
        step: 0.into(),
        rest: Duration::from_micros(300),
        discards: true,
        disk: 9,
    };
    let mut leg = Leg {
        report,
        dir: scratch.path(),
        target: &target,
        random: Random::new(report.seed, NAME),
        options: DaemonOptions::new(&scratch).default_sr(),
        daemon: None,
        session: None,
        sr: String::new(),
        vm: String::new(),
        snapshots: Vec::new(),
    };
    let lived = catch_unwind(AssertUnwindSafe(|| leg.live()));
    let lived = lived.unwrap_or_else(|panic| Err(target.finding(words_of(panic.as_ref()))));
    let daemon = leg.pid();
    if let Some(mut daemon) = leg.daemon.take() {
        daemon.process.kill();
    }
    for pid in left_behind(scratch.path(), daemon) {
        // It carries the name of this leg's directory.
        let _ = tapio_e2e::process::signal(pid, libc::SIGKILL);
    }
    if let Err(finding) = lived {
        report.found(finding);
    }
    if report.has_found(NAME) {
        scratch.keep();
        eprintln!("{NAME}: the SR, the state and logs stay in {}", scratch.path().display());
    }
    Ok(())
}
