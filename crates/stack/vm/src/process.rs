//! A guest's process: started apart from the daemon, found again by another one.
//!
//! Whether it lives is known by a lock that it and what it starts inherit (`lock`), so that a number given to
//! another process later cannot be taken for it. Its id (`pid`) is written by itself before the emulator is loaded,
//! so a guest that runs always has an id that the daemon can read.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, WaitOptions, getrlimit, setrlimit, setsid, waitpid};
use tapio_sys::process::{self, Signal, Stat, signal_group};
use tapio_types::ApiError;
use uuid::Uuid;

use crate::confine::Confinement;
use crate::console::cause;
use crate::errors::failed;
use crate::place::Place;
use crate::poll::{poll, polled};
use crate::settings::Settings;

/// Descriptors a guest may open: some for each of 255 disks.
const FILES_MAX: u64 = 16384;

/// A process that leads a session of its own.
#[derive(Debug)]
pub(crate) struct Process {
    pid: libc::pid_t,
    /// Becomes readable when the process ends.
    handle: OwnedFd,
}

/// The lock of a VM that has or had a process. Not made here: the VM may be forgotten meanwhile, with its directory.
fn open_lock(place: &Place) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(place.join("lock"))
}

fn make_lock(place: &Place) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(place.join("lock"))
}

/// Ends the process of a VM's guest, and its helpers, without a driver and without writing anything down: the driver's
/// next look finds it ended. Returns whether there is none any more. Guests of Xen have no process, and stay.
pub fn end_now(settings: &Settings, vm: Uuid) -> bool {
    let Ok(place) = Place::of(settings, vm) else { return false };
    Process::find(&place, None).is_none_or(|process| process.kill())
}

/// Takes the lock of a VM; none where its process holds it.
fn try_lock(file: &File) -> bool {
    file.try_lock().is_ok()
}

/// A descriptor that becomes readable when the process ends.
pub(crate) fn pidfd(pid: libc::pid_t) -> io::Result<OwnedFd> {
    process::open(u32::try_from(pid).map_err(|_| io::ErrorKind::NotFound)?)
}

fn stat(pid: libc::pid_t) -> Option<Stat> {
    Stat::of(u32::try_from(pid).ok()?).ok()
}

/// Lets a descriptor pass to the program that is started.
fn keep_open(fd: RawFd) -> io::Result<()> {
    // SAFETY: fcntl(2) on an integer; async-signal-safe.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Decimal digits without allocating; answers how many bytes of `into` are used, a line end included.
fn digits(mut number: u32, into: &mut [u8; 12]) -> usize {
    let mut reversed = [0_u8; 10];
    let mut len = 0;
    while len == 0 || number > 0 {
        reversed[len] = b'0' + (number % 10) as u8;
        number /= 10;
        len += 1;
    }
    for at in 0..len {
        into[at] = reversed[len - 1 - at];
    }
    into[len] = b'\n';
    len + 1
}

/// What a child does between fork(2) and execve(2); only async-signal-safe calls.
fn prepare(lock: &File, pid_file: &File, keep: &[RawFd]) -> io::Result<()> {
    setsid()?;
    let mut text = [0_u8; 12];
    let len = digits(std::process::id(), &mut text);
    rustix::io::write(pid_file, &text[..len])?;
    let mut files = getrlimit(Resource::Nofile);
    let raised = files.maximum.unwrap_or(FILES_MAX).min(FILES_MAX);
    files.current = files.current.map(|now| now.max(raised));
    // That a limit cannot be raised is noticed when it is hit.
    let _ = setrlimit(Resource::Nofile, files);
    // A core of a guest is its memory.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    keep_open(lock.as_raw_fd())?;
    keep.iter().try_for_each(|fd| keep_open(*fd))
}

/// Opens a file of the VM to which its process appends; it can be shortened meanwhile.
pub(crate) fn open_log(place: &Place, name: &str) -> io::Result<File> {
    let path = place.join(name);
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
    if let Some((uid, gid)) = place.user() {
        std::os::unix::fs::fchown(&file, Some(uid), Some(gid))?;
    }
    Ok(file)
}

impl Process {
    /// Starts a program, confined, in its part of the VM's directory, in a session of its own, with
    /// `emulator.log` as its output and
    /// the descriptors `keep` under their own numbers.
    ///
    /// # Errors
    /// The VM has a process already, or the program cannot be started.
    pub(crate) fn spawn(
        place: &Place,
        vm: Uuid,
        mut command: Command,
        keep: &[RawFd],
        confinement: Confinement,
    ) -> Result<Self, ApiError> {
        let program = Path::new(command.get_program()).display().to_string();
        let told = |error: io::Error| {
            // A step of the child that failed is named in its log.
            let why = cause(place, &error.to_string());
            failed(vm, format!("cannot start {program}"), why)
        };
        let lock = make_lock(place).map_err(told)?;
        if !try_lock(&lock) {
            return Err(failed(vm, format!("cannot start {program}"), "a process of this VM still runs"));
        }
        let log = open_log(place, "emulator.log").map_err(told)?;
        let pid_file = File::create(place.join("pid")).map_err(told)?;
        let errors = log.try_clone().map_err(told)?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let keep = keep.to_vec();
        let child = move || prepare(&lock, &pid_file, &keep).and_then(|()| confinement.enter());
        // SAFETY: `prepare` and `enter` make async-signal-safe calls only, on descriptors that outlive the start.
        unsafe { command.pre_exec(child) };
        let child = command.spawn().map_err(told)?;
        let pid = libc::pid_t::try_from(child.id()).map_err(|error| failed(vm, "a process id", error))?;
        // `child` is dropped without waiting: the process is collected in `status`.
        let handle = pidfd(pid).map_err(told)?;
        Ok(Self { pid, handle })
    }

    /// The VM's process, if it lives; `started` tells it from another with its id, where it is known.
    pub(crate) fn find(place: &Place, started: Option<u64>) -> Option<Self> {
        let lock = open_lock(place).ok()?;
        if try_lock(&lock) {
            return None;
        }
        let pid: libc::pid_t = fs::read_to_string(place.join("pid")).ok()?.trim().parse().ok()?;
        let found = (pid > 1).then(|| pidfd(pid).ok()).flatten().map(|handle| Self { pid, handle });
        let is_ours = stat(pid).is_some_and(|stat| {
            !stat.has_ended() && stat.session == pid && started.is_none_or(|known| known == stat.start)
        });
        if is_ours && found.is_some() {
            return found;
        }
        if pid > 1 {
            // Its helpers still hold the lock, without a leader and without a guest to serve. While they live, no other
            // group can get the group's number.
            let _ = signal_group(pid.unsigned_abs(), Signal::KILL);
        }
        None
    }

    /// Its id.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// When it started, in the kernel's ticks.
    pub(crate) fn started(&self) -> Option<u64> {
        stat(self.pid).map(|stat| stat.start)
    }

    /// Readable when it has ended.
    pub(crate) fn handle(&self) -> RawFd {
        self.handle.as_raw_fd()
    }

    /// Waits for its end; whether it has ended.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        poll(&mut [polled(self.handle(), libc::POLLIN)], until)
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.wait(Instant::now())
    }

    /// Ends it and what it started at once; whether it is gone within some seconds.
    pub(crate) fn kill(&self) -> bool {
        if self.has_ended() {
            return true;
        }
        // The process leads this group and has not ended, so the number is its.
        let _ = signal_group(self.pid.unsigned_abs(), Signal::KILL);
        self.wait(Instant::now() + Duration::from_secs(5))
    }

    /// Ends what it started and left behind when it ended. While any of that lives, its group's number is its own.
    pub(crate) fn end_rest(&self, place: &Place) {
        let is_held = open_lock(place).is_ok_and(|lock| !try_lock(&lock));
        if is_held {
            // Only members of this group hold the lock.
            let _ = signal_group(self.pid.unsigned_abs(), Signal::KILL);
        }
    }

    /// Collects it if it is a child of this process, and says how it ended; none where another daemon had started it.
    pub(crate) fn status(&self) -> Option<ExitStatus> {
        let (_, status) = waitpid(Pid::from_raw(self.pid), WaitOptions::NOHANG).ok()??;
        Some(ExitStatus::from_raw(status.as_raw()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confine::Needs;
    use crate::confine::calls::Emulator;

    fn place(dir: &Path) -> (Place, Settings, Uuid) {
        let (settings, vm) = (Settings::new(dir), Uuid::new_v4());
        let place = Place::of(&settings, vm).unwrap();
        place.make(&settings).unwrap();
        (place, settings, vm)
    }

    fn confined(settings: &Settings, place: &Place) -> Confinement {
        let needs = Needs {
            emulator: Emulator::Uml,
            programs: Vec::new(),
            files: Vec::new(),
            written: Vec::new(),
            disks: Vec::new(),
            devices: Vec::new(),
            memory: 0,
        };
        Confinement::of(settings, place, &needs).unwrap()
    }

    fn sleeper() -> Command {
        let mut command = Command::new("sleep");
        command.arg("600");
        command
    }

    #[test]
    fn a_process_is_found_by_its_lock_and_not_by_its_number_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (place, settings, vm) = place(dir.path());
        assert!(Process::find(&place, None).is_none());
        let process = Process::spawn(&place, vm, sleeper(), &[], confined(&settings, &place)).unwrap();
        let again = Process::find(&place, process.started()).expect("it runs");
        assert_eq!(again.pid(), process.pid());
        assert!(
            Process::spawn(&place, vm, sleeper(), &[], confined(&settings, &place)).is_err(),
            "two at a time"
        );
        assert!(!process.has_ended());
        assert!(process.kill());
        assert_eq!(process.status().and_then(|status| status.signal()), Some(libc::SIGKILL));
        // The number may be another process's now: here it is, literally, this test's.
        fs::write(place.join("pid"), std::process::id().to_string()).unwrap();
        assert!(Process::find(&place, None).is_none());
    }

    #[test]
    fn what_a_dead_process_left_behind_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (place, settings, vm) = place(dir.path());
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 600 & exec true"]);
        let process = Process::spawn(&place, vm, shell, &[], confined(&settings, &place)).unwrap();
        assert!(process.wait(Instant::now() + Duration::from_secs(60)));
        assert!(
            Process::spawn(&place, vm, sleeper(), &[], confined(&settings, &place)).is_err(),
            "its child holds the lock"
        );
        process.end_rest(&place);
        let until = Instant::now() + Duration::from_secs(60);
        while !try_lock(&open_lock(&place).unwrap()) {
            assert!(Instant::now() < until, "the child survived");
            poll(&mut [], Instant::now() + Duration::from_millis(5));
        }
        // The VM is forgotten meanwhile, by a shutdown.
        fs::remove_file(place.join("lock")).unwrap();
        process.end_rest(&place);
        assert!(!place.join("lock").exists(), "its directory would stay for ever");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (place, settings, vm) = place(dir.path());
        let error =
            Process::spawn(&place, vm, Command::new("/no/such/program"), &[], confined(&settings, &place))
                .unwrap_err();
        assert!(error.params[0].contains("/no/such/program"), "{error}");
        assert!(Process::find(&place, None).is_none(), "nothing is left");
    }

    #[test]
    fn digits_are_those_of_the_number() {
        for number in [0, 7, 10, 4_294_967_295] {
            let mut text = [0; 12];
            let len = digits(number, &mut text);
            assert_eq!(std::str::from_utf8(&text[..len]).unwrap(), format!("{number}\n"));
        }
    }
}
