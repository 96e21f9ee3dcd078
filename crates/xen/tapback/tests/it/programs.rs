//! The program itself, between our xenstored and a real disk process (`cargo build -p tapio-disk` first).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tapio_control::{RunDir, list};
use tapio_sys::process::Signal;
use tapio_tapback::serving;
use tapio_xenstore::{Client, Nodes};
use tapio_xenstored::serve::Running;

use crate::world::{World, vbd};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A program that ends with the test.
struct Program {
    child: Child,
    lines: Receiver<String>,
}

impl Program {
    fn tapback(store: &Path, run: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tapio-tapback"));
        command.arg("--xenstored").arg(store).arg("--run-dir").arg(run);
        Self::start(command)
    }

    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, lines }
    }

    #[track_caller]
    fn says(&self, part: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => said.push(line),
                Err(_) => panic!("it never said {part:?}: {said:#?}"),
            }
        }
    }

    fn signal(&self, signal: i32) {
        // The process is our child and was not waited for.
        let signal = Signal::from_named_raw(signal).expect("a signal");
        tapio_sys::process::signal(self.child.id(), signal).expect("sent");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn disk_program() -> PathBuf {
    let tapback = Path::new(env!("CARGO_BIN_EXE_tapio-tapback"));
    let disk = tapback.with_file_name("tapio-disk");
    assert!(disk.exists(), "the disk program is built first: cargo build -p tapio-disk");
    disk
}

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < TIMEOUT, "it never came to this: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_real_disk_process_is_found_asked_and_obeyed() {
    let dir = tempfile::tempdir().unwrap();
    let (run, image) = (dir.path().join("run"), dir.path().join("disk"));
    std::fs::create_dir(&run).unwrap();
    std::fs::create_dir(dir.path().join("shm")).unwrap();
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let mut disk = Command::new(disk_program());
    disk.env("TAPIO_RUN_DIR", &run).env("TAPIO_SHM_DIR", dir.path().join("shm")).arg("--foreground");
    disk.arg("--image").arg(format!("raw:{}", image.display()));
    disk.arg("--nbd-unix").arg(dir.path().join("nbd"));
    let _disk = Program::start(disk);
    let rundir = RunDir::new(&run);
    until("the disk is there", || list(&rundir).unwrap().iter().any(|row| row.path.is_some()));

    let store = Running::start(&dir.path().join("socket")).unwrap();
    let tapback = Program::tapback(store.path(), &run);
    tapback.says("serves backend/vbd3 of domain 0");
    let mut client = Client::connect(store.path()).unwrap();
    let id = vbd(5, 51712);
    // Found by its image alone, as 'tap-ctl list' shows it.
    let mut nodes = World::back_nodes(id, 0, 0);
    nodes[3] = (World::back(id, "params"), image.display().to_string());
    nodes.push((World::front(id, "state"), "1".into()));
    client.transaction(|t| t.write_many(&nodes)).unwrap();
    let state = |client: &mut Client, wanted: &str| {
        until(&format!("state {wanted}"), || {
            client.read_text(&World::back(id, "state")).unwrap().as_deref() == Some(wanted)
        });
    };
    state(&mut client, "2");
    // The ring is refused here, by the disk process and for a reason of this host: there is no such domain, and
    // mostly no hypervisor. What it says comes from there.
    let ring = [("ring-ref", "8"), ("event-channel", "9"), ("protocol", "x86_64-abi"), ("state", "3")];
    let ring = ring.map(|(name, value)| (World::front(id, name), value));
    client.transaction(|t| t.write_many(&ring)).unwrap();
    let why = tapback.says("5,51712: ");
    assert!(why.contains("xen") || why.contains("Xen") || why.contains("grant"), "{why}");

    // It is killed and comes back, and the device with it.
    drop(tapback);
    assert_eq!(serving(&rundir, "vbd3"), None);
    let tapback = Program::tapback(store.path(), &run);
    tapback.says("5,51712: ");
    client.write(&World::front(id, "state"), "6").unwrap();
    state(&mut client, "6");
    let pid = tapback.child.id();
    assert_eq!(serving(&rundir, "vbd3"), Some(Some(pid)));

    // A second one is told so; the first ends in order.
    let mut second = Program::tapback(store.path(), &run);
    second.says(&format!("another tapback serves vbd3 (process {pid})"));
    assert_eq!(second.child.wait().unwrap().code(), Some(1));
    let mut tapback = tapback;
    tapback.signal(libc::SIGTERM);
    tapback.says("ends; 0 of 1 disks stay connected");
    assert!(tapback.child.wait().unwrap().success());
}

#[test]
fn without_xenstored_it_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = Program::tapback(&dir.path().join("nowhere"), dir.path());
    let why = program.says("nowhere");
    assert!(why.contains("xenstored"), "{why}");
    assert_eq!(program.child.wait().unwrap().code(), Some(1));
}

#[test]
fn a_xenstored_that_comes_back_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let store = Running::start(&path).unwrap();
    let tapback = Program::tapback(&path, dir.path());
    tapback.says("serves backend/vbd3");
    drop(store);
    tapback.says("connecting again");
    let store = Running::start(&path).unwrap();
    tapback.says("connected to xenstored again");
    let mut client = Client::connect(store.path()).unwrap();
    let id = vbd(5, 51712);
    client.transaction(|t| t.write_many(&World::back_nodes(id, 1, 1))).unwrap();
    until("it works", || client.read_text(&World::back(id, "state")).unwrap().as_deref() == Some("2"));
}
