//! Ways between hosts, and to the storage, are cut: a protected VM runs on one host at most, and on one in the end.
//!
//! Three hosts with a member of etcd each, in namespaces behind a router. One of them reaches the shared directory
//! through a file system that can be made to hang, as a server does that is gone.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;
use tapio_fixtures::network::{Network, child_of};
use tempfile::TempDir;

use super::ha::{lives, make_vm, resident_on};
use super::rig::{Host, first_host_at, is_missing, make_sr, send, skipped};

/// The host whose ways are cut, and that has the VM at first.
const B: usize = 1;
const PAIRS: [(usize, usize); 3] = [(0, 1), (0, 2), (1, 2)];

/// A directory that one host reaches through a process.
struct Passage {
    process: Child,
}

impl Passage {
    fn open(network: &Network, at: usize, directory: &Path) -> Self {
        let before = fs::metadata(directory).unwrap().dev();
        let mut process = network.host(at).command("bindfs");
        // Nothing is kept of what others change, and root has its rights.
        process.args(["-f", "-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0,allow_other"]);
        process.arg(directory).arg(directory).stdin(Stdio::null());
        let passage = Self { process: process.spawn().expect("bindfs") };
        let is_open = || {
            let mut stat = network.host(at).command("stat");
            let said = stat.args(["-c", "%d"]).arg(directory).output().unwrap();
            String::from_utf8_lossy(&said.stdout).trim() != before.to_string()
        };
        while !is_open() {
            std::thread::sleep(Duration::from_millis(20));
        }
        passage
    }

    fn signal(&self, signal: i32) {
        send(child_of(self.process.id()).expect("bindfs runs").cast_signed(), signal);
    }

    fn cut(&self) {
        self.signal(libc::SIGSTOP);
    }

    fn mend(&self) {
        self.signal(libc::SIGCONT);
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Disk processes, each with its host's number and its own.
type Writers = Vec<(usize, i32)>;

/// Whether a process may still do something of its own: it is neither stopped nor ended nor killed. A stopped one that
/// is killed runs once more, in the kernel alone, to end.
fn acts(pid: i32) -> Option<bool> {
    /// SIGKILL in the masks of /proc/PID/status, whose lowest bit is signal 1.
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    /// `PF_EXITING` of the kernel.
    const EXITING: u64 = 4;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let is_killed = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")));
    let is_killed =
        is_killed.map(|mask| u64::from_str_radix(mask.trim(), 16).unwrap()).any(|mask| mask & KILLED != 0);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state, and six fields later the flags (proc(5)).
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
    let is_exiting = fields[6].parse::<u64>().unwrap() & EXITING != 0;
    Some(!is_killed && !is_exiting && !fields[0].starts_with(['T', 't', 'Z', 'X']))
}

/// Disk processes that can write.
fn writers(directories: &[PathBuf]) -> Writers {
    let told: Vec<String> =
        directories.iter().map(|dir| format!("TAPIO_RUN_DIR={}", dir.join("run/disk").display())).collect();
    let place = |pid: i32| {
        let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        program.to_string_lossy().contains("tapio-disk").then_some(())?;
        let variables = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let has = |told: &String| variables.split(|byte| *byte == 0).any(|one| one == told.as_bytes());
        let host = told.iter().position(has)?;
        acts(pid)?.then_some((host, pid))
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(place).collect()
}

/// Looks all the time at how many hosts have the VM's only disk.
struct Watch {
    ended: Arc<AtomicBool>,
    twice: Arc<Mutex<Vec<Writers>>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(directories: Vec<PathBuf>) -> Self {
        let (ended, twice) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let mut watch = Self { ended: ended.clone(), twice: twice.clone(), thread: None };
        watch.thread = Some(std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let now = writers(&directories);
                if now.len() > 1 {
                    twice.lock().unwrap().push(now);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }));
        watch
    }

    fn assert_once(mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        let twice = self.twice.lock().unwrap();
        assert!(twice.is_empty(), "two hosts had the disk: {twice:?}");
    }
}

/// A pool of three with a protected VM that runs on [`B`].
struct Pool {
    // In the order in which they go.
    hosts: Vec<Host>,
    passage: Passage,
    _cluster: Cluster,
    network: Arc<Network>,
    own: Vec<Value>,
    sr: Value,
    vm: Value,
    changes: AtomicU64,
    _scratch: [TempDir; 2],
}

impl Pool {
    fn start() -> Option<Self> {
        if is_missing() {
            return None;
        }
        if Command::new("bindfs").arg("--version").output().is_err() {
            skipped("needs bindfs");
            return None;
        }
        let network = match Network::new(3) {
            Ok(network) => Arc::new(network),
            Err(why) => {
                skipped(&format!("needs network namespaces: {why}"));
                return None;
            }
        };
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("shared");
        fs::create_dir(&directory).unwrap();
        let passage = Passage::open(&network, B, &directory);
        // What etcd syncs waits for no disk: other tests write to that.
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let cluster = Cluster::start_on(&network, memory.path(), 3);
        let place = |at| Some((network.clone(), at));
        let dir = |at: usize| scratch.path().join(format!("host{at}"));
        let mut hosts = vec![first_host_at(&cluster, &dir(0), place(0))];
        let sr = make_sr(&hosts[0], &directory, true);
        for at in 1..3 {
            let host = Host::placed(&dir(at), &[], place(at));
            host.join(&hosts[0]).unwrap();
            hosts[0].until("the host has joined", || hosts[0].host_at(&host.address()).is_some());
            hosts.push(host);
        }
        let own: Vec<Value> = hosts.iter().map(|host| hosts[0].host_at(&host.address()).unwrap()).collect();
        let vm = make_vm(&hosts[0], &sr);
        let pool = Self {
            hosts,
            passage,
            _cluster: cluster,
            network,
            own,
            sr,
            vm,
            changes: 0.into(),
            _scratch: [scratch, memory],
        };
        pool.at_rest();
        let first = &pool.hosts[0];
        first.done("VM.set_ha_restart_priority", json!([pool.vm, "restart"]));
        first.done("pool.enable_ha", json!([[pool.sr], {}]));
        first.done("VM.start_on", json!([pool.vm, pool.own[B], false, false]));
        Some(pool)
    }

    fn watch(&self) -> Watch {
        Watch::start(self.hosts.iter().map(|host| host.dir.clone()).collect())
    }

    fn writers(&self) -> Writers {
        writers(&self.hosts.iter().map(|host| host.dir.clone()).collect::<Vec<_>>())
    }

    fn cut(&self, at: usize) {
        (0..3).filter(|other| *other != at).for_each(|other| self.network.cut(at, other));
    }

    fn mend(&self, at: usize) {
        (0..3).filter(|other| *other != at).for_each(|other| self.network.mend(at, other));
    }

    /// Waits until every host says that all live, that all have the SR, and that one of them decides.
    fn at_rest(&self) {
        for host in &self.hosts {
            host.until_or(
                "all hosts live and have the SR",
                || self.told(),
                || {
                    let lives = |own: &Value| {
                        let metrics = host.call("host.get_metrics", json!([own])).ok()?;
                        host.call("host_metrics.get_live", json!([metrics])).ok()?.as_bool()
                    };
                    let has =
                        |own: &Value| host.pbd_of(&self.sr, own).is_some_and(|(_, is_attached)| is_attached);
                    self.own.contains(&host.master())
                        && self.own.iter().all(|own| lives(own) == Some(true) && has(own))
                },
            );
        }
        let decides = self.hosts[0].master();
        for host in &self.hosts {
            host.until("they agree on the host that decides", || host.master() == decides);
        }
    }

    /// What each host thinks of each, and its log.
    fn told(&self) -> String {
        let one = |host: &Host| {
            let seen: Vec<_> =
                self.own.iter().map(|own| host.pbd_of(&self.sr, own).map(|(_, on)| on)).collect();
            let metrics = host.call("host_metrics.get_all_records", json!([]));
            let lives = metrics.map(|all| {
                all.as_object().into_iter().flatten().map(|(_, one)| one["live"].clone()).collect::<Vec<_>>()
            });
            format!("{}: SR {seen:?}, lives {lives:?}\n{}\n", host.dir.display(), host.log())
        };
        self.hosts.iter().map(one).collect()
    }

    /// Whether a host of this number may change the database.
    fn writes(&self, at: usize) -> bool {
        // What is there already would not be written.
        let text = self.changes.fetch_add(1, Ordering::Relaxed).to_string();
        self.hosts[at].call("VM.set_name_description", json!([self.vm, text])).is_ok()
    }

    /// The VM runs where it ran, in the process that it had.
    #[track_caller]
    fn assert_goes_on(&self, disk: i32) {
        for host in &self.hosts {
            host.until("the VM's host is known", || resident_on(host, &self.vm) == Some(self.own[B].clone()));
        }
        assert_eq!(self.writers(), [(B, disk)]);
    }

    /// Waits until the VM runs on one of the hosts that are not cut.
    fn runs_elsewhere(&self) {
        let seen_by = &self.hosts[0];
        let others = [Some(self.own[0].clone()), Some(self.own[2].clone())];
        seen_by.until_or(
            "the VM runs on another host",
            || self.told(),
            || others.contains(&resident_on(seen_by, &self.vm)),
        );
        seen_by.until("it has one disk", || self.writers().len() == 1);
        assert_ne!(self.writers()[0].0, B);
    }
}

#[test]
fn a_vm_goes_on_through_every_cut_between_hosts() {
    let Some(pool) = Pool::start() else { return };
    let watch = pool.watch();
    let [(B, disk)] = pool.writers()[..] else { panic!("it runs on one host: {:?}", pool.writers()) };
    let [a, b, c] = &pool.hosts[..] else { unreachable!("three hosts") };

    // The VM's host is alone: it beats on the storage, so nothing is started.
    pool.cut(B);
    a.until("the host is missed", || !lives(a, &pool.own[B]));
    b.until("the host that is alone changes nothing", || !pool.writes(B));
    assert!(pool.writes(0), "the majority goes on; {}", a.log());
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(pool.writers(), [(B, disk)]);
    pool.mend(B);
    pool.at_rest();
    pool.assert_goes_on(disk);

    // The host that decides is alone: another one decides.
    let decides = pool.own.iter().position(|own| *own == a.master()).unwrap();
    let seen_by = if decides == 2 { a } else { c };
    pool.cut(decides);
    seen_by.until("another host decides", || {
        pool.own.iter().enumerate().any(|(at, own)| at != decides && *own == seen_by.master())
    });
    let refused = || !pool.writes(decides);
    pool.hosts[decides].until("the one that decided changes nothing", refused);
    pool.mend(decides);
    pool.at_rest();
    pool.assert_goes_on(disk);

    // Two hosts do not hear each other, the third hears both.
    pool.network.cut(0, B);
    c.until("the third changes what it likes", || pool.writes(2));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(pool.writers(), [(B, disk)]);
    pool.network.mend(0, B);
    pool.at_rest();
    pool.assert_goes_on(disk);

    // All are alone: nothing can be changed, and nothing happens to the VM.
    PAIRS.iter().for_each(|(one, other)| pool.network.cut(*one, *other));
    for (at, host) in pool.hosts.iter().enumerate() {
        host.until("without a majority nothing is changed", || !pool.writes(at));
    }
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(pool.writers(), [(B, disk)]);
    PAIRS.iter().for_each(|(one, other)| pool.network.mend(*one, *other));
    pool.at_rest();
    pool.assert_goes_on(disk);
    watch.assert_once();
}

#[test]
fn a_vm_whose_host_loses_its_storage_runs_on_another_once() {
    let Some(pool) = Pool::start() else { return };
    let watch = pool.watch();

    // The host lives, and its storage is gone.
    pool.passage.cut();
    pool.runs_elsewhere();
    pool.passage.mend();
    pool.at_rest();
    pool.runs_elsewhere();

    // Neither host nor storage is heard of.
    let a = &pool.hosts[0];
    let decides = pool.own.iter().position(|own| *own == a.master()).unwrap();
    let decides = &pool.hosts[decides];
    decides.done("VM.hard_shutdown", json!([pool.vm]));
    // What it had is another host's, so it joins anew.
    decides.until_or(
        "the host has its storage again",
        || pool.told(),
        || decides.call("VM.start_on", json!([pool.vm, pool.own[B], false, false])).is_ok(),
    );
    assert_eq!(pool.writers().iter().map(|(at, _)| *at).collect::<Vec<_>>(), [B]);
    pool.cut(B);
    pool.passage.cut();
    pool.runs_elsewhere();
    pool.mend(B);
    pool.passage.mend();
    pool.at_rest();
    pool.runs_elsewhere();
    watch.assert_once();
}
