use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tapio_control::command as ask;
use tapio_control::{Client, Errno, Front, OpenArguments, OwnClient, ProcessState, RunDir, list, processes};
use tapio_stat::{ShmRoot, disks, vbds};

/// A directory of sockets and counters of its own, and the processes started in it.
struct Site {
    dir: tempfile::TempDir,
    run: RunDir,
    started: Vec<i32>,
}

/// A child that does not outlive a test that fails.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        // Ended and waited for in a test that went well: both calls only say so.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const LIMIT: Duration = Duration::from_secs(60);

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the process runs; one that has ended and waits for its parent does not.
fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.trim_start().chars().next())
        .is_some_and(|state| state != 'Z')
}

fn signal(pid: i32, number: i32) {
    // The number is that of a process this test has started and not yet waited for, or seen running.
    let (pid, signal) = (Pid::from_raw(pid).expect("a number"), Signal::from_named_raw(number));
    kill_process(pid, signal.expect("a signal")).expect("sent");
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        fs::create_dir(dir.path().join("shm")).expect("made");
        let run = RunDir::new(dir.path().join("run"));
        Self { dir, run, started: Vec::new() }
    }

    fn shm(&self) -> ShmRoot {
        ShmRoot::new(self.dir.path().join("shm"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tapio-disk"));
        command.env("TAPIO_RUN_DIR", self.run.path()).env("TAPIO_SHM_DIR", self.path("shm"));
        command
    }

    /// Starts one in the background, as tap-ctl does.
    fn spawn(&mut self) -> i32 {
        let out = self.command().stdin(Stdio::null()).output().expect("started");
        assert!(out.status.success(), "{out:?}");
        let printed = String::from_utf8(out.stdout).expect("text");
        let pid = RunDir::pid_in(printed.lines().next().expect("a line")).expect("a socket");
        assert_eq!(printed.trim(), self.run.socket(pid).display().to_string());
        self.started.push(pid);
        pid
    }

    /// Starts one in the foreground with a raw image.
    fn serve(&self, arguments: &[&str]) -> Serving {
        let image = format!("aio:{}", self.raw().display());
        let mut command = self.command();
        command.args(["--foreground", "--image", &image]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Serving(command.spawn().expect("started"))
    }

    fn raw(&self) -> PathBuf {
        let path = self.path("disk.raw");
        fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("made");
        path
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for pid in &self.started {
            if runs(*pid) {
                signal(*pid, libc::SIGKILL);
            }
        }
    }
}

/// Waits until the process has done everything that its start does. Its counters and its sockets come one after the
/// other, and it answers last.
fn serves(site: &Site, process: &Serving) {
    wait_for("an answer", || OwnClient::connect(&site.run, process.0.id() as i32).ok());
}

fn gone(pid: i32) {
    wait_for("the process to end", || (!runs(pid)).then_some(()));
}

#[test]
fn it_lives_from_the_handshake_to_the_last_detach() {
    let mut site = Site::new();
    let pid = site.spawn();
    let client = Client::new(&site.run, pid);
    assert_eq!(client.pid(), Ok(pid));
    let (minor, _) = site.run.minors().allocate().expect("free");
    client.attach(minor).expect("attached");
    assert_eq!(site.run.minors().free(minor).expect_err("attached").errno, Errno::EAGAIN);
    let image = format!("aio:{}", site.raw().display());
    let info =
        client.open(minor, &OpenArguments { image: image.clone(), ..Default::default() }).expect("open");
    assert_eq!((info.sectors, info.sector_size), (2048, 512));
    assert!(site.run.nbd_socket(pid as u32, minor).exists(), "clients of tapdisk find its NBD server");
    assert_eq!(vbds(&site.shm()).expect("listed").len(), 1);
    let row = &list(&site.run).expect("listed")[0];
    assert_eq!((row.pid, row.state, row.kind.as_deref()), (Some(pid), Some(0), Some("aio")));
    client.pause(minor, Some(LIMIT)).expect("paused");
    assert_eq!(list(&site.run).expect("listed")[0].state, Some(0x2a));
    client.resume(minor, &Default::default()).expect("resumed");
    assert!(client.stats(minor).expect("stats").contains(&format!("\"name\": \"{image}\"")));
    client.close(minor, false, Some(LIMIT)).expect("closed");
    client.detach(minor).expect("detached");
    gone(pid);
    assert!(!site.run.socket(pid).exists());
    assert_eq!(disks(&site.shm()).expect("listed").len(), 0);
    site.run.minors().free(minor).expect("free");
}

/// Asks for the handshake's beginning of the export `name` and gives its length in bytes, if the server has it.
fn export_len(socket: &Path, name: &str) -> Option<u64> {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).expect("the server listens");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    // C_FIXED_NEWSTYLE | C_NO_ZEROES, then NBD_OPT_EXPORT_NAME: answered by the length, or by the end.
    stream.write_all(&3u32.to_be_bytes()).expect("sent");
    stream.write_all(b"IHAVEOPT").expect("sent");
    stream.write_all(&1u32.to_be_bytes()).expect("sent");
    stream.write_all(&(name.len() as u32).to_be_bytes()).expect("sent");
    stream.write_all(name.as_bytes()).expect("sent");
    let mut answer = [0; 10];
    stream.read_exact(&mut answer).ok()?;
    answer[..8].try_into().ok().map(u64::from_be_bytes)
}

#[test]
fn disks_share_a_socket_under_names_of_their_own() {
    let mut site = Site::new();
    let pid = site.spawn();
    let client = Client::new(&site.run, pid);
    let socket = site.path("shared.sock");
    let disks: Vec<u16> = [("a", 1u64 << 20), ("b", 2 << 20)]
        .into_iter()
        .map(|(name, len)| {
            let image = site.path(name);
            fs::File::create(&image).and_then(|file| file.set_len(len)).expect("made");
            let (minor, _) = site.run.minors().allocate().expect("free");
            client.attach(minor).expect("attached");
            let image = format!("aio:{}", image.display());
            client.open(minor, &OpenArguments { image, ..Default::default() }).expect("open");
            minor
        })
        .collect();
    let add = |minor: u16, export: &str| {
        let front =
            Front::NbdUnix { path: socket.clone(), listener: None, export: export.into(), read_only: false };
        let mut own = OwnClient::connect(&site.run, pid).expect("the process answers");
        own.call(&ask::FrontAdd { minor, front, vbd: None }, &[], Some(LIMIT))
    };
    let first = add(disks[0], "a").expect("added");
    add(disks[1], "b").expect("added to the same socket");
    let again = add(disks[1], "a").expect_err("the name is taken, on this socket");
    assert!(!again.message.is_empty());
    assert_eq!((export_len(&socket, "a"), export_len(&socket, "b")), (Some(1 << 20), Some(2 << 20)));
    assert_eq!(export_len(&socket, "c"), None);
    let mut own = OwnClient::connect(&site.run, pid).expect("the process answers");
    own.call(&ask::FrontRemove { minor: disks[0], front: first.id, force: false }, &[], Some(LIMIT))
        .expect("removed");
    assert_eq!((export_len(&socket, "a"), export_len(&socket, "b")), (None, Some(2 << 20)));
    for minor in disks {
        client.close(minor, false, Some(LIMIT)).expect("closed");
        client.detach(minor).expect("detached");
        site.run.minors().free(minor).expect("free");
    }
    gone(pid);
    assert!(!socket.exists());
}

#[test]
fn a_bad_start_is_told_to_the_starter() {
    let site = Site::new();
    let missing = format!("vhd:{}", site.path("missing.vhd").display());
    let out = site
        .command()
        .args(["--image", &missing, "--nbd-unix"])
        .arg(site.path("s"))
        .output()
        .expect("started");
    assert_eq!(out.status.code(), Some(Errno::ENOENT.raw()));
    assert!(String::from_utf8_lossy(&out.stderr).contains("missing.vhd"), "{out:?}");
    assert!(out.stdout.is_empty(), "{out:?}");
    assert_eq!(processes(&site.run).expect("listed"), []);
    assert_eq!(site.run.minors().allocated(), Ok(vec![]));
    let out = site.command().arg("--imgae").output().expect("started");
    assert_eq!(out.status.code(), Some(Errno::EINVAL.raw()));
}

#[test]
fn a_signal_ends_it_cleanly() {
    let site = Site::new();
    let socket = site.path("s");
    let mut child = site.serve(&["--nbd-unix", socket.to_str().expect("text")]);
    serves(&site, &child);
    let _talking = OwnClient::connect(&site.run, child.0.id() as i32).expect("greeted");
    signal(child.0.id() as i32, libc::SIGTERM);
    let status = wait_for("the end", || child.0.try_wait().expect("waited"));
    assert_eq!(status.code(), Some(0));
    assert!(!socket.exists() && !site.run.socket(child.0.id() as i32).exists());
    assert_eq!(site.run.minors().allocated(), Ok(vec![]), "the number it took for itself is free");
    assert_eq!(left(&site.path("shm")), Vec::<PathBuf>::new());
}

/// Files below a directory.
fn left(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("listed").map(|entry| entry.expect("entry").path()) {
        if entry.is_dir() { found.extend(left(&entry)) } else { found.push(entry) }
    }
    found
}

#[test]
fn the_next_one_cleans_up_after_a_death() {
    let mut site = Site::new();
    let socket = site.path("s");
    let mut child = site.serve(&["--nbd-unix", socket.to_str().expect("text")]);
    let dead = child.0.id() as i32;
    serves(&site, &child);
    signal(dead, libc::SIGKILL);
    child.0.wait().expect("waited");
    assert!(!left(&site.path("shm")).is_empty() && site.run.socket(dead).exists(), "a death leaves files");
    assert_eq!(processes(&site.run).expect("listed")[0].state, ProcessState::Stale);

    let next = site.spawn();
    assert!(!site.run.socket(dead).exists());
    assert_eq!(left(&site.path("shm")), Vec::<PathBuf>::new());
    // The socket of the dead one is replaced, too.
    let mut again = site.serve(&["--nbd-unix", socket.to_str().expect("text"), "--minor", "5"]);
    serves(&site, &again);
    signal(again.0.id() as i32, libc::SIGTERM);
    assert!(again.0.wait().expect("waited").success());
    let mut own = OwnClient::connect(&site.run, next).expect("greeted");
    own.call(&ask::Quit { force: false }, &[], Some(LIMIT)).expect("ends");
    gone(next);
}

#[test]
fn a_vhost_user_starter_hands_its_socket_over() {
    let site = Site::new();
    let path = site.path("v");
    let listener = UnixListener::bind(&path).expect("bound");
    let fd = listener.as_raw_fd();
    let mut command = site.command();
    command.args(["--fd", "7", "--blk-file"]).arg(site.raw()).stderr(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: dup2 may be called between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::dup2(fd, 7) {
            7 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = Serving(command.spawn().expect("started"));
    drop(listener);
    let connected =
        wait_for("a server on the socket", || std::os::unix::net::UnixStream::connect(&path).ok());
    wait_for("the client to be seen", || {
        let fronts = OwnClient::connect(&site.run, child.0.id() as i32)
            .ok()?
            .call(&ask::FrontList { minor: 0 }, &[], Some(LIMIT))
            .ok()?;
        (fronts.first()?.connections == 1).then_some(())
    });
    drop(connected);
    signal(child.0.id() as i32, libc::SIGTERM);
    assert!(wait_for("the end", || child.0.try_wait().expect("waited")).success());
}

#[test]
fn capabilities_and_help_are_printed() {
    let site = Site::new();
    let say = |option: &str| {
        let out = site.command().arg(option).output().expect("started");
        assert!(out.status.success(), "{option}");
        String::from_utf8(out.stdout).expect("text")
    };
    let capabilities: serde_json::Value = serde_json::from_str(&say("--print-capabilities")).expect("JSON");
    assert_eq!(capabilities["type"], "block");
    assert!(say("--help").contains("--vhost-user PATH"));
    assert!(say("--version").starts_with("tapio-disk "));
}
