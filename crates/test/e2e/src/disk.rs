//! The disk process and the tools around it, driven from outside.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::{Finished, Running, poll_until, run};
use crate::scratch::Scratch;
use crate::tools::our;

/// How long a disk process may take until its sockets answer. It needs milliseconds; a busy host needs more.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How long an orderly end may take.
pub const STOP_LIMIT: Duration = Duration::from_secs(60);

/// `tapio COMMAND ...`, ready for more arguments.
#[track_caller]
pub fn tapio(args: &[&str]) -> Command {
    let mut command = Command::new(our("tapio"));
    command.args(args);
    command
}

/// `tapio vhd-util ...` to its end.
#[track_caller]
pub fn vhd_util(args: &[&str]) -> Finished {
    run(tapio(&["vhd-util"]).args(args))
}

/// Text of a path that the tests made themselves.
#[track_caller]
pub fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// `vhd-util create`; the path comes back for chaining.
#[track_caller]
pub fn create_vhd(path: PathBuf, size_mib: u64) -> PathBuf {
    vhd_util(&["create", "-n", text(&path), "-s", &size_mib.to_string()]).ok();
    path
}

/// `vhd-util snapshot`: a new leaf over `parent`.
#[track_caller]
pub fn snapshot_vhd(path: PathBuf, parent: &Path) -> PathBuf {
    vhd_util(&["snapshot", "-n", text(&path), "-p", text(parent)]).ok();
    path
}

/// `vhd-util check` must be content with the image (and, with `-p`, its parents).
#[track_caller]
pub fn assert_vhd_valid(path: &Path) {
    let said = vhd_util(&["check", "-n", text(path)]).ok();
    assert!(said.trim_end().ends_with("is valid"), "vhd-util check said {said:?}");
}

/// What to start a disk process with.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    image: String,
    arguments: Vec<String>,
    nbd: bool,
    vhost_user: bool,
}

impl DiskOptions {
    /// A raw image.
    pub fn raw(path: &Path) -> Self {
        Self::image(format!("aio:{}", path.display()))
    }

    /// A VHD and its parents.
    pub fn vhd(path: &Path) -> Self {
        Self::image(format!("vhd:{}", path.display()))
    }

    /// An export of another NBD server.
    pub fn remote(uri: &str) -> Self {
        Self::image(format!("nbd:{uri}"))
    }

    /// Any image, as `type:...`.
    pub fn image(image: String) -> Self {
        Self { image, arguments: Vec::new(), nbd: false, vhost_user: false }
    }

    /// With an NBD server on a UNIX socket.
    #[must_use]
    pub fn nbd(mut self) -> Self {
        self.nbd = true;
        self
    }

    /// With a vhost-user-blk socket.
    #[must_use]
    pub fn vhost_user(mut self) -> Self {
        self.vhost_user = true;
        self
    }

    /// With one more argument.
    #[must_use]
    pub fn arg(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_string());
        self
    }

    fn command(&self, dir: &Path, nbd: &Path, vhost: &Path) -> Command {
        let mut command = Command::new(our("tapio-disk"));
        // Every disk process has a control socket; this one is for this test alone.
        command.env("TAPIO_RUN_DIR", dir.join("run"));
        command.args(["--foreground", "--image", &self.image]);
        if self.nbd {
            command.arg("--nbd-unix").arg(nbd);
        }
        if self.vhost_user {
            command.arg("--vhost-user").arg(vhost);
        }
        command.args(&self.arguments);
        command
    }

    /// Starts the process and waits until its sockets are there. `dir` receives the sockets and the log.
    #[track_caller]
    pub fn start(&self, dir: &Path) -> Disk {
        self.start_with(dir, |_| ())
    }

    /// The same with the control sockets and the shared memory of `host`.
    #[track_caller]
    pub fn start_on(&self, host: &Host, dir: &Path) -> Disk {
        self.start_with(dir, |command| {
            host.on_host(command);
        })
    }

    #[track_caller]
    fn start_with(&self, dir: &Path, change: impl FnOnce(&mut Command)) -> Disk {
        let number = SEQUENCE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let nbd = dir.join(format!("nbd{number}.sock"));
        let vhost = dir.join(format!("vhost{number}.sock"));
        let log = dir.join(format!("disk{number}.log"));
        let mut command = self.command(dir, &nbd, &vhost);
        change(&mut command);
        let mut process = Running::start(&mut command, &log);
        if self.nbd {
            // Connecting is harmless: a client that says nothing and leaves is everyday life for an NBD server.
            process.wait_for("answer on the NBD socket", START_LIMIT, || UnixStream::connect(&nbd).ok());
        }
        if self.vhost_user {
            // Not by connecting: a vhost-user back end serves one front end and takes the first that comes.
            process.wait_for("vhost-user socket", START_LIMIT, || vhost.exists().then_some(()));
        }
        Disk { process, nbd, vhost }
    }

    /// Starts a process in the place of one that was killed: with the same command, on the same sockets. Does not wait
    /// for it: a client of the first finds the second.
    #[track_caller]
    pub fn restart(&self, dir: &Path, killed: &mut Disk) {
        let log = killed.process.log_path().to_path_buf();
        killed.process = Running::start(&mut self.command(dir, &killed.nbd, &killed.vhost), &log);
    }

    /// Starts a process that must refuse this image, and gives what it said on standard error.
    #[track_caller]
    pub fn refused(&self, dir: &Path) -> String {
        run(&mut self.command(dir, &dir.join("refused-nbd.sock"), &dir.join("refused-vhost.sock"))).fails()
    }
}

static SEQUENCE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// A running disk process.
#[derive(Debug)]
pub struct Disk {
    /// The process.
    pub process: Running,
    /// Its NBD socket, if it was asked for.
    pub nbd: PathBuf,
    /// Its vhost-user socket, if it was asked for.
    pub vhost: PathBuf,
}

impl Disk {
    /// The NBD URI of the default export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.nbd.display())
    }

    /// Asks it to end, waits, and checks that it left no socket behind.
    #[track_caller]
    pub fn stop(mut self) {
        self.process.stop(STOP_LIMIT);
        assert!(!self.nbd.exists(), "{} was left behind", self.nbd.display());
        assert!(!self.vhost.exists(), "{} was left behind", self.vhost.display());
    }

    /// Kills it as a crash would.
    pub fn crash(mut self) {
        self.process.kill();
    }
}

/// Control sockets and statistics of one test, apart from those of the host and of other tests.
#[derive(Debug, Clone)]
pub struct Host {
    run: PathBuf,
    shm: PathBuf,
}

impl Host {
    /// Below `scratch`.
    #[track_caller]
    pub fn new(scratch: &Scratch) -> Self {
        let shm = scratch.join("shm");
        std::fs::create_dir(&shm).unwrap_or_else(|error| panic!("cannot create {}: {error}", shm.display()));
        Self { run: scratch.join("run"), shm }
    }

    /// Where control sockets are.
    pub fn run_dir(&self) -> &Path {
        &self.run
    }

    /// `tapio COMMAND ...` on this host, ready for more arguments.
    #[track_caller]
    pub fn tapio(&self, args: &[&str]) -> Command {
        let mut command = tapio(args);
        self.on_host(&mut command);
        command
    }

    /// Points a command that starts one of our programs at this host.
    pub fn on_host<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("TAPIO_RUN_DIR", &self.run).env("TAPIO_SHM_DIR", &self.shm).env("TAPIO_DEVICES", "1")
    }

    /// `tapio tap-ctl ...` to its end.
    #[track_caller]
    pub fn tap_ctl(&self, args: &[&str]) -> Finished {
        run(self.tapio(&["tap-ctl"]).args(args))
    }

    /// `tap-ctl list` in a pipe: `pid=N minor=N state=0xN args=TYPE:PATH`, fields that do not apply left out.
    #[track_caller]
    pub fn list(&self) -> Vec<Row> {
        self.tap_ctl(&["list"]).ok().lines().map(parse_row).collect()
    }

    /// `tap-ctl create -a IMAGE`, then found in the list by its image.
    #[track_caller]
    pub fn create(&self, image: &str) -> Tap {
        self.tap_ctl(&["create", "-a", image]).ok();
        self.find(image)
    }

    /// The same for a disk that may have so many threads.
    #[track_caller]
    pub fn create_with_threads(&self, image: &str, threads: usize) -> Tap {
        let mut create = self.tapio(&["tap-ctl", "create", "-a", image]);
        run(create.env("TAPIO_THREADS", threads.to_string())).ok();
        self.find(image)
    }

    /// The disk with this image, which a `tap-ctl create` has made.
    #[track_caller]
    pub fn find(&self, image: &str) -> Tap {
        let row = self.list().into_iter().find(|row| row.args.as_deref() == Some(image));
        let row = row.unwrap_or_else(|| panic!("{image} is not listed after create: {:?}", self.list()));
        let (pid, minor) = (row.pid.expect("an open disk has a process"), row.minor.expect("and a minor"));
        Tap { host: self.clone(), pid, minor, closed: false }
    }
}

/// A disk that `tap-ctl create` started: a daemon, known by its process id and minor.
#[derive(Debug)]
pub struct Tap {
    host: Host,
    /// Process id.
    pub pid: u32,
    /// Minor number.
    pub minor: u32,
    closed: bool,
}

impl Tap {
    /// The disk with this image, however it was started.
    #[track_caller]
    pub fn found(host: &Host, image: &str) -> Self {
        let row = host.list().into_iter().find(|row| row.args.as_deref() == Some(image));
        let row = row.unwrap_or_else(|| panic!("{image} is not listed: {:?}", host.list()));
        let (pid, minor) = (row.pid.expect("an open disk has a process"), row.minor.expect("and a minor"));
        Self { host: host.clone(), pid, minor, closed: false }
    }

    /// The process has ended in another way.
    pub fn forget(mut self) {
        self.closed = true;
    }

    /// Runs `tap-ctl COMMAND -p PID -m MINOR ARGS`.
    #[track_caller]
    pub fn ctl(&self, command: &str, args: &[&str]) -> Finished {
        let (pid, minor) = (self.pid.to_string(), self.minor.to_string());
        self.host.tap_ctl(&[&[command, "-p", &pid, "-m", &minor], args].concat())
    }

    /// `tapio disk front add`: offers the running disk to a guest.
    #[track_caller]
    pub fn add_vhost_user(&self, socket: &Path) {
        self.add_vhost_user_queues(socket, 1);
    }

    /// [`Tap::add_vhost_user`] with several queues.
    #[track_caller]
    pub fn add_vhost_user_queues(&self, socket: &Path, queues: u32) {
        let (pid, minor, queues) = (self.pid.to_string(), self.minor.to_string(), queues.to_string());
        let which = ["disk", "front", "add", "-p", &pid, "-m", &minor];
        let arguments = [&which[..], &["--vhost-user", text(socket), "--queues", &queues]].concat();
        run(&mut self.host.tapio(&arguments)).ok();
        assert!(socket.exists(), "no socket at {} after front add", socket.display());
    }

    /// The URI of the NBD server that every disk made by `tap-ctl` has.
    pub fn uri(&self) -> String {
        let socket = self.host.run.join(format!("nbd{}.{}", self.pid, self.minor));
        format!("nbd+unix:///?socket={}", socket.display())
    }

    /// Its row of `tap-ctl list`, if it has one.
    #[track_caller]
    pub fn row(&self) -> Option<Row> {
        self.host.list().into_iter().find(|row| row.pid == Some(self.pid) && row.minor == Some(self.minor))
    }

    /// `tap-ctl destroy`, after which the process must be gone.
    #[track_caller]
    pub fn destroy(mut self) {
        self.ctl("destroy", &[]).ok();
        self.closed = true;
        let gone = poll_until(STOP_LIMIT, || (!is_alive(self.pid)).then_some(()));
        assert!(gone.is_some(), "process {} is still there after destroy", self.pid);
        assert_eq!(self.row(), None);
    }

    /// Kills the process as a crash would, and waits until it is gone.
    #[track_caller]
    pub fn kill(mut self) {
        self.kill_now();
        let gone = poll_until(STOP_LIMIT, || (!is_alive(self.pid)).then_some(()));
        assert!(gone.is_some(), "process {} survived", self.pid);
        self.closed = true;
    }

    fn kill_now(&self) {
        let pid = i32::try_from(self.pid).expect("process ids are positive i32");
        // The id is that of the process which `create` reported on this test's own control directory.
        let _ = crate::process::signal(pid, libc::SIGKILL);
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // Not closed: the test failed half-way. The process is a daemon and would stay for ever.
        if !self.closed && is_alive(self.pid) {
            self.kill_now();
        }
    }
}

/// Whether a process exists and is not just waiting to be reaped.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A row of `tap-ctl list` as a program reads it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Row {
    /// Process id.
    pub pid: Option<u32>,
    /// Minor number.
    pub minor: Option<u32>,
    /// State bits.
    pub state: Option<u32>,
    /// `type:/path`.
    pub args: Option<String>,
}

#[track_caller]
fn parse_row(line: &str) -> Row {
    let mut row = Row::default();
    // `args` comes last and its path may hold spaces.
    let (fields, args) = match line.split_once("args=") {
        Some((fields, args)) => (fields, Some(args.to_string())),
        None => (line, None),
    };
    row.args = args;
    for field in fields.split_whitespace() {
        let Some((key, value)) = field.split_once('=') else { panic!("odd field {field:?} in {line:?}") };
        let number = match value.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => value.parse(),
        };
        let number = Some(number.unwrap_or_else(|error| panic!("{field:?} in {line:?}: {error}")));
        match key {
            "pid" => row.pid = number,
            "minor" => row.minor = number,
            "state" => row.state = number,
            _ => panic!("unknown field {field:?} in {line:?}"),
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_list_are_read_whole() {
        let row = parse_row("pid=17168 minor=2 state=0x2a args=vhd:/a path/t.vhd");
        let args = Some("vhd:/a path/t.vhd".to_string());
        assert_eq!(row, Row { pid: Some(17168), minor: Some(2), state: Some(0x2a), args });
        assert_eq!(parse_row("minor=0"), Row { minor: Some(0), ..Row::default() });
    }
}
