//! A leg with the toolstack: VDIs are made, snapshotted, cloned and destroyed, plugged into a running VM and unplugged,
//! one operation after the other, while the daemon and its disk processes are killed.
//!
//! After each operation the database, the files of the SR and the disk processes have to agree with each other and with
//! what was answered. An operation whose daemon was killed has happened or not; nothing else has.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::process::poll_until;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

use crate::random::Random;
use crate::report::{Finding, Report, words_of};

/// The name of the leg.
pub const NAME: &str = "toolstack";

const VDIS_MAX: usize = 10;

const VBDS_MAX: usize = 5;

/// Bytes of a VDI.
const VDI_LEN: u64 = 8 << 20;

/// Timeout of a call, and of the wait after it until all views agree, on a busy host.
const LIMIT: Duration = Duration::from_secs(120);

type Outcome<T = ()> = Result<T, Finding>;

/// Why a call has no result.
enum Failure {
    /// The daemon was killed.
    Gone,
    /// Code and parameters.
    Refused(Vec<String>),
}

/// A session, as a program of a user has it: the daemon may be killed in the middle of a call.
#[derive(Clone)]
struct Session {
    socket: PathBuf,
    reference: String,
}

impl Session {
    fn ask(&self, method: &str, params: &[Value]) -> Result<Value, Failure> {
        let all: Vec<Value> = std::iter::once(json!(self.reference)).chain(params.iter().cloned()).collect();
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": all}).to_string();
        let head =
            format!("POST /jsonrpc HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        let answer = UnixStream::connect(&self.socket).and_then(|mut stream| {
            stream.set_read_timeout(Some(LIMIT))?;
            stream.write_all(format!("{head}{body}").as_bytes())?;
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text)
        });
        let text = answer.map_err(|_| Failure::Gone)?;
        let body = text.split_once("\r\n\r\n").map(|(_, body)| body);
        // Half an answer is none.
        let mut answer: Value = body.and_then(|body| serde_json::from_str(body).ok()).ok_or(Failure::Gone)?;
        match answer.get("error") {
            None => Ok(answer["result"].take()),
            Some(error) => {
                let params = error["data"].as_array().cloned().unwrap_or_default();
                let words = std::iter::once(&error["message"]).chain(&params);
                Err(Failure::Refused(
                    words.map(|word| word.as_str().unwrap_or_default().to_owned()).collect(),
                ))
            }
        }
    }
}

/// An operation, and what it may change.
#[derive(Clone, Debug)]
enum Operation {
    Create,
    Snapshot(String),
    Clone(String),
    Destroy(String),
    Connect(String),
    Plug(String),
    Unplug(String),
    Disconnect(String),
}

impl Operation {
    const fn name(&self) -> &'static str {
        match self {
            Self::Create => "VDI.create",
            Self::Snapshot(_) => "VDI.snapshot",
            Self::Clone(_) => "VDI.clone",
            Self::Destroy(_) => "VDI.destroy",
            Self::Connect(_) => "VBD.create",
            Self::Plug(_) => "VBD.plug",
            Self::Unplug(_) => "VBD.unplug",
            Self::Disconnect(_) => "VBD.destroy",
        }
    }
}

/// A VBD, and whether its disk is plugged.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Vbd {
    vdi: String,
    plugged: bool,
}

/// What there has to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    vdis: BTreeSet<String>,
    vbds: BTreeMap<String, Vbd>,
}

impl Known {
    /// After an operation that is known to have happened; `made` is the object that it made.
    fn after(mut self, operation: &Operation, made: &str) -> Self {
        match operation {
            Operation::Create | Operation::Snapshot(_) | Operation::Clone(_) => {
                self.vdis.insert(made.into());
            }
            Operation::Destroy(vdi) => {
                self.vdis.remove(vdi);
            }
            Operation::Connect(vdi) => {
                self.vbds.insert(made.into(), Vbd { vdi: vdi.clone(), plugged: false });
            }
            Operation::Plug(vbd) | Operation::Unplug(vbd) => {
                if let Some(vbd) = self.vbds.get_mut(vbd) {
                    vbd.plugged = matches!(operation, Operation::Plug(_));
                }
            }
            Operation::Disconnect(vbd) => {
                self.vbds.remove(vbd);
            }
        }
        self
    }

    /// The object that is here and not there, or nothing.
    fn made_since(&self, before: &Self) -> String {
        let vbds = self.vbds.keys().filter(|vbd| !before.vbds.contains_key(*vbd));
        self.vdis.difference(&before.vdis).chain(vbds).next().cloned().unwrap_or_default()
    }
}

/// What is killed in the middle of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    Nothing,
    Daemon,
    Disk,
    Both,
}

struct Leg<'a> {
    report: &'a Report,
    dir: &'a Path,
    random: Random,
    options: DaemonOptions,
    daemon: Option<Daemon>,
    session: Session,
    sr: String,
    vm: String,
    known: Known,
    step: u64,
    made: u64,
}

impl Leg<'_> {
    fn finding(&self, what: impl Into<String>) -> Finding {
        Finding { leg: NAME.into(), step: self.step, what: what.into() }
    }

    fn start(&mut self) {
        let daemon = self.options.start();
        self.session = Session { socket: daemon.socket.clone(), reference: daemon.login().reference };
        self.daemon = Some(daemon);
    }

    fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.process.kill();
        }
    }

    fn pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, |daemon| daemon.process.pid())
    }

    /// A call that must work.
    fn call(&self, method: &str, params: &[Value]) -> Outcome<Value> {
        self.session.ask(method, params).map_err(|failure| match failure {
            Failure::Gone => self.finding(format!("{method} has no answer")),
            Failure::Refused(words) => self.finding(format!("{method}: {words:?}")),
        })
    }

    fn text(&self, method: &str, params: &[Value]) -> Outcome<String> {
        Ok(self.call(method, params)?.as_str().unwrap_or_default().to_owned())
    }

    /// A running VM without disks, of the driver that starts no process.
    fn set_up(&mut self) -> Outcome {
        self.start();
        let pool = self.call("pool.get_all", &[])?[0].clone();
        self.sr = self.text("pool.get_default_SR", &[pool])?;
        let record = json!({
            "name_label": "vm", "name_description": "", "user_version": 1, "is_a_template": false,
            "affinity": "OpaqueRef:NULL", "memory_static_max": 64 << 20, "memory_dynamic_max": 64 << 20,
            "memory_dynamic_min": 64 << 20, "memory_static_min": 64 << 20, "VCPUs_params": {},
            "VCPUs_max": 1, "VCPUs_at_startup": 1, "actions_after_shutdown": "destroy",
            "actions_after_reboot": "restart", "actions_after_crash": "destroy", "PV_bootloader": "",
            "PV_kernel": "", "PV_ramdisk": "", "PV_args": "", "PV_bootloader_args": "", "PV_legacy_args": "",
            "HVM_boot_policy": "", "HVM_boot_params": {}, "platform": {"driver": "sim"}, "PCI_bus": "",
            "other_config": {"driver": "sim"}, "recommendations": "",
        });
        self.vm = self.text("VM.create", &[record])?;
        self.call("VM.start", &[json!(self.vm), json!(false), json!(false)])?;
        Ok(())
    }

    fn choose(&mut self) -> Operation {
        let (vdis, vbds) = (&self.known.vdis, &self.known.vbds);
        let free: Vec<&String> =
            vdis.iter().filter(|vdi| !vbds.values().any(|vbd| vbd.vdi == **vdi)).collect();
        let of = |plugged: bool| -> Vec<&String> {
            vbds.iter().filter(|(_, vbd)| vbd.plugged == plugged).map(|(name, _)| name).collect()
        };
        let all: Vec<&String> = vdis.iter().collect();
        type Make = fn(String) -> Operation;
        let mut choices: Vec<(Vec<&String>, Make, u64)> = vec![
            (of(false), Operation::Plug, 4),
            (of(true), Operation::Unplug, 3),
            (of(false), Operation::Disconnect, 1),
        ];
        if vdis.len() < VDIS_MAX {
            choices.push((all.clone(), Operation::Snapshot, 2));
            choices.push((all, Operation::Clone, 2));
        }
        if vbds.len() < VBDS_MAX {
            choices.push((free.clone(), Operation::Connect, 3));
        }
        choices.push((free, Operation::Destroy, 3));
        choices.retain(|(objects, ..)| !objects.is_empty());
        let create = if vdis.len() < VDIS_MAX { 2 } else { 0 };
        let sum: u64 = create + choices.iter().map(|(_, _, weight)| weight).sum::<u64>();
        let mut ticket = self.random.below(sum.max(1));
        for (objects, make, weight) in &choices {
            if ticket < *weight {
                return make(objects[self.random.below(objects.len() as u64) as usize].clone());
            }
            ticket -= weight;
        }
        Operation::Create
    }

    fn parameters(&mut self, operation: &Operation) -> Vec<Value> {
        self.made += 1;
        match operation {
            Operation::Create => vec![json!({
                "SR": self.sr, "virtual_size": VDI_LEN, "name_label": format!("disk {}", self.made),
                "type": "user", "sharable": false, "read_only": false, "other_config": {},
            })],
            Operation::Snapshot(vdi) | Operation::Clone(vdi) => vec![json!(vdi), json!({})],
            Operation::Connect(vdi) => vec![json!({
                "VM": self.vm, "VDI": vdi, "userdevice": "autodetect", "bootable": false, "mode": "RW",
                "type": "Disk", "unpluggable": true, "empty": false, "other_config": {},
                "qos_algorithm_type": "", "qos_algorithm_params": {},
            })],
            Operation::Destroy(object)
            | Operation::Plug(object)
            | Operation::Unplug(object)
            | Operation::Disconnect(object) => vec![json!(object)],
        }
    }

    /// An operation, in the middle of which something is killed.
    fn step(&mut self) -> Outcome {
        self.step += 1;
        let operation = self.choose();
        let kill = match self.random.below(8) {
            0 | 1 => Kill::Daemon,
            2 => Kill::Disk,
            3 => Kill::Both,
            _ => Kill::Nothing,
        };
        self.report.note(NAME, self.step, &format!("{operation:?}, kill: {kill:?}"));
        let (params, session) = (self.parameters(&operation), self.session.clone());
        let wait = Duration::from_micros(self.random.below(60_000));
        let answer = thread::scope(|scope| {
            let (method, params) = (operation.name(), &params);
            let asked = scope.spawn(move || session.ask(method, params));
            if kill != Kill::Nothing {
                thread::sleep(wait);
            }
            if matches!(kill, Kill::Disk | Kill::Both) {
                self.kill_a_disk();
            }
            if matches!(kill, Kill::Daemon | Kill::Both) {
                self.kill();
            }
            asked.join().unwrap_or(Err(Failure::Gone))
        });
        if self.daemon.is_none() {
            self.start();
        }
        let before = self.known.clone();
        let wanted: Vec<Known> = match &answer {
            Ok(made) => vec![before.clone().after(&operation, made.as_str().unwrap_or_default())],
            Err(Failure::Gone) if matches!(kill, Kill::Daemon | Kill::Both) => {
                let made = self.find()?.made_since(&before);
                vec![before.clone().after(&operation, &made), before]
            }
            Err(Failure::Refused(words)) if kill != Kill::Nothing => {
                self.report.note(NAME, self.step, &format!("refused: {words:?}"));
                self.report.refused(operation.name(), words.first().map_or("", String::as_str));
                vec![before]
            }
            Err(Failure::Refused(words)) => {
                return Err(self.finding(format!("{operation:?} was refused: {words:?}")));
            }
            Err(Failure::Gone) => return Err(self.finding(format!("{operation:?} has no answer"))),
        };
        self.known = self.agree(&wanted)?;
        let load = &self.report.load;
        if answer.is_ok() {
            self.report.done(operation.name());
            load.answered.fetch_add(1, Ordering::Relaxed);
        } else {
            load.failed.fetch_add(1, Ordering::Relaxed);
        }
        match kill {
            Kill::Nothing => {}
            Kill::Daemon => self.report.done("kill of the daemon"),
            Kill::Disk => self.report.done("kill of a plugged disk"),
            Kill::Both => self.report.done("kill of the daemon and a disk"),
        }
        Ok(())
    }

    /// Kills the process of some plugged disk.
    fn kill_a_disk(&mut self) {
        let disks = left_behind(self.dir, self.pid());
        if disks.is_empty() {
            return;
        }
        let pid = disks[self.random.below(disks.len() as u64) as usize];
        // It carries the name of this leg's directory.
        let _ = tapio_e2e::process::signal(pid, libc::SIGKILL);
    }

    /// What the database has.
    fn find(&self) -> Outcome<Known> {
        let vdis = self.call("VDI.get_all_records", &[])?;
        let vdis = vdis.as_object().into_iter().flatten();
        let vdis = vdis.filter(|(_, vdi)| vdi["SR"] == json!(self.sr) && vdi["managed"] == json!(true));
        let vbds = self.call("VBD.get_all_records", &[])?;
        let vbds = vbds.as_object().into_iter().flatten().filter(|(_, vbd)| vbd["VM"] == json!(self.vm));
        Ok(Known {
            vdis: vdis.map(|(name, _)| name.clone()).collect(),
            vbds: vbds
                .map(|(name, vbd)| {
                    let vdi = vbd["VDI"].as_str().unwrap_or_default().to_owned();
                    (name.clone(), Vbd { vdi, plugged: vbd["currently_attached"] == json!(true) })
                })
                .collect(),
        })
    }

    /// Waits until the database is one of these, and all else agrees with it: some of what a killed daemon left half
    /// done is put in order after the next has begun to serve.
    fn agree(&self, wanted: &[Known]) -> Outcome<Known> {
        let mut last = Ok(String::new());
        let agreed = poll_until(LIMIT, || {
            let compared = self.compare(wanted);
            let result = compared.as_ref().ok().and_then(|compared| compared.as_ref().ok().cloned());
            last = compared.map(|compared| compared.err().unwrap_or_default());
            (result.is_some() || last.is_err()).then_some(result)
        });
        match (agreed.flatten(), last) {
            (Some(known), _) => Ok(known),
            (None, Err(finding)) => Err(finding),
            (None, Ok(why)) => Err(self.finding(format!("{LIMIT:?} after an operation, {why}"))),
        }
    }

    /// Compares database, files and processes with each other and with what is wanted; `Err` in words.
    fn compare(&self, wanted: &[Known]) -> Outcome<Result<Known, String>> {
        let found = self.find()?;
        if !wanted.contains(&found) {
            return Ok(Err(format!("the database has {found:?} instead of one of {wanted:?}")));
        }
        let vdis = self.call("VDI.get_all_records", &[])?;
        let vbds = self.call("VBD.get_all_records", &[])?;
        let every = |records: &Value| -> Vec<Value> {
            records.as_object().into_iter().flatten().map(|(_, record)| record.clone()).collect()
        };
        let word = |record: &Value, field: &str| record[field].as_str().unwrap_or_default().to_owned();
        let (vdis, vbds) = (every(&vdis), every(&vbds));
        if let Some(busy) = vdis.iter().chain(&vbds).find(|record| record["current_operations"] != json!({}))
        {
            return Ok(Err(format!("{} is busy: {}", word(busy, "uuid"), busy["current_operations"])));
        }
        let vdis: Vec<Value> = vdis.into_iter().filter(|vdi| vdi["SR"] == json!(self.sr)).collect();
        let known: BTreeSet<String> = vdis.iter().map(|vdi| word(vdi, "uuid")).collect();
        let files = match self.files() {
            Ok(files) => files,
            Err(why) => {
                // The worker of a killed daemon ends a moment later. What it leaves after its successor has begun is
                // cleared away by the next look at the SR, and this is one.
                self.call("SR.scan", &[json!(self.sr)])?;
                return Ok(Err(why));
            }
        };
        if files != known {
            return Ok(Err(format!("the SR has the files {files:?}, and the database {known:?}")));
        }
        let parents: BTreeSet<String> =
            vdis.iter().filter_map(|vdi| Some(vdi["sm_config"]["vhd-parent"].as_str()?.to_owned())).collect();
        let orphan =
            vdis.iter().find(|vdi| vdi["managed"] == json!(false) && !parents.contains(&word(vdi, "uuid")));
        if let Some(orphan) = orphan {
            return Ok(Err(format!("nothing is based on the base copy {}", word(orphan, "uuid"))));
        }
        let plugged = vbds.iter().filter(|vbd| vbd["currently_attached"] == json!(true));
        let mut plugged: Vec<String> = plugged.map(|vbd| word(vbd, "uuid")).collect();
        let mut served: Vec<String> = left_behind(self.dir, self.pid()).into_iter().map(vbd_of).collect();
        plugged.sort();
        served.sort();
        if plugged != served {
            return Ok(Err(format!("disks {plugged:?} are plugged, and processes serve {served:?}")));
        }
        Ok(Ok(found))
    }

    /// The UUIDs of the images in the SR; `Err` names a file that is none.
    fn files(&self) -> Result<BTreeSet<String>, String> {
        let entries = std::fs::read_dir(self.dir.join("sr")).map_err(|error| error.to_string())?;
        let mut names = BTreeSet::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            match name.rsplit_once('.') {
                Some((uuid, "vhd" | "raw")) if !uuid.starts_with('.') => {
                    names.insert(uuid.to_owned());
                }
                _ if name == ".sr-uuid" => {}
                _ => return Err(format!("the SR has a file {name}")),
            }
        }
        Ok(names)
    }

    fn live(&mut self) -> Outcome {
        self.set_up()?;
        self.known = self.agree(&[Known::default()])?;
        while !self.report.is_ending() {
            self.step()?;
        }
        if !self.report.is_clean() {
            return Ok(());
        }
        // All of it goes, and nothing stays.
        let kept = self.known.clone();
        self.call("VM.hard_shutdown", &[json!(self.vm)])?;
        for vbd in kept.vbds.keys() {
            self.call("VBD.destroy", &[json!(vbd)])?;
        }
        for vdi in &kept.vdis {
            self.call("VDI.destroy", &[json!(vdi)])?;
        }
        self.agree(&[Known::default()])?;
        if let Some(daemon) = self.daemon.take() {
            daemon.stop();
        }
        self.report.done("an SR that is empty at the end");
        Ok(())
    }
}

/// The VBD whose disk a process serves, or what it is.
fn vbd_of(pid: i32) -> String {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut words = environment.split(|byte| *byte == 0);
    let vbd = words.find_map(|word| word.strip_prefix(b"TAPIO_VBD="));
    vbd.map_or_else(|| format!("process {pid}"), |vbd| String::from_utf8_lossy(vbd).into_owned())
}

/// Runs the leg until the run ends. `Err` is why it cannot run here.
pub fn run(dir: &Path, report: &Report) -> Result<(), String> {
    let mut scratch = Scratch::below(dir);
    let mut leg = Leg {
        report,
        dir: scratch.path(),
        random: Random::new(report.seed, NAME),
        options: DaemonOptions::new(&scratch).default_sr(),
        daemon: None,
        session: Session { socket: PathBuf::new(), reference: String::new() },
        sr: String::new(),
        vm: String::new(),
        known: Known::default(),
        step: 0,
        made: 0,
    };
    let lived = catch_unwind(AssertUnwindSafe(|| leg.live()));
    let lived = lived.unwrap_or_else(|panic| Err(leg.finding(words_of(panic.as_ref()))));
    leg.kill();
    for pid in left_behind(scratch.path(), 0) {
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
