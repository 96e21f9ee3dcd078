//! What a user without rights tries.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

/// The user that has nothing.
const NOBODY: libc::uid_t = 65534;

/// Runs `work` in a thread of user nobody: no groups, no capabilities. Credentials are a thread's own as long as the
/// system calls are made directly, so the rest of the test stays root.
pub fn as_nobody<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        let id = libc::c_long::from(NOBODY as i32);
        // SAFETY: the calls take numbers, and an empty list of groups. The capabilities go with the user.
        let became = unsafe {
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
                && libc::syscall(libc::SYS_setresgid, id, id, id) == 0
                && libc::syscall(libc::SYS_setresuid, id, id, id) == 0
        };
        assert!(became, "cannot become nobody: {}", io::Error::last_os_error());
        work()
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A thread of the user nobody has that user's credentials, and the test's other threads keep theirs.
pub fn nobody_dares() {
    let (uid, status) =
        as_nobody(|| (rustix::process::geteuid().as_raw(), fs::read_to_string("/proc/thread-self/status")));
    assert_eq!(uid, NOBODY);
    let status = status.expect("its status");
    let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    assert_eq!(of("CapEff:"), Some("0000000000000000"));
    assert_eq!(of("CapPrm:"), Some("0000000000000000"));
    assert_eq!(of("Groups:"), Some(""));
    assert!(rustix::process::geteuid().is_root(), "the other threads keep their user");
}

/// What worked.
#[derive(Debug, Default)]
pub struct Attempts {
    pub done: Vec<(&'static str, String)>,
}

impl Attempts {
    fn note(&mut self, action: &'static str, what: &Path) {
        self.done.push((action, what.display().to_string()));
    }

    /// Looks at a path, and takes locks; changes nothing.
    pub fn look(&mut self, path: &Path) {
        // What cannot even be looked at may still be opened by its name, so that decides nothing.
        let kind = fs::symlink_metadata(path).map(|data| data.file_type());
        if kind.as_ref().is_ok_and(|kind| kind.is_symlink()) {
            // What it leads to is a path of its own.
            return;
        }
        if fs::read_dir(path).is_ok() {
            self.note("list", path);
        }
        if kind.as_ref().map_or(true, |kind| kind.is_socket()) && UnixStream::connect(path).is_ok() {
            self.note("connect", path);
        }
        // Not blocking: a FIFO is not waited for.
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
        let open = |options: &mut OpenOptions| options.custom_flags(flags).open(path);
        for (action, opened) in
            [("read", open(OpenOptions::new().read(true))), ("write", open(OpenOptions::new().write(true)))]
        {
            let Ok(file) = opened else { continue };
            if !file.metadata().is_ok_and(|data| data.is_dir()) {
                self.note(action, path);
            }
            // A lock that its owner holds at this moment is one that could be taken at another.
            let locked = matches!(file.try_lock_shared(), Ok(()) | Err(TryLockError::WouldBlock));
            if locked && !self.done.iter().any(|(did, what)| *did == "lock" && Path::new(what) == path) {
                self.note("lock", path);
            }
        }
    }

    /// Changes what can be changed.
    pub fn change(&mut self, path: &Path) {
        let beside = path.join("unprivileged");
        if OpenOptions::new().write(true).create_new(true).open(&beside).is_ok() {
            self.note("create-in", path);
            let _ = fs::remove_file(&beside);
        }
        if fs::set_permissions(path, fs::Permissions::from_mode(0o777)).is_ok() {
            self.note("chmod", path);
        }
        if fs::rename(path, path.with_extension("moved")).is_ok() {
            self.note("rename", path);
            let _ = fs::rename(path.with_extension("moved"), path);
        }
        if fs::remove_file(path).is_ok() || fs::remove_dir(path).is_ok() {
            self.note("unlink", path);
        }
    }

    /// A process: its memory, its files, a signal.
    pub fn process(&mut self, pid: u32) {
        let at = |name: &str| format!("/proc/{pid}/{name}");
        for name in ["mem", "environ", "maps", "stack", "cmdline", "status"] {
            let read = File::open(at(name)).and_then(|mut file| {
                // Opening is not enough: some are checked when they are read. Of the memory nothing lies at zero.
                let mut bytes = [0; 64];
                match name {
                    "mem" => Ok(0),
                    _ => io::Read::read(&mut file, &mut bytes),
                }
            });
            if read.is_ok() {
                self.done.push(("read", format!("/proc/PID/{name}")));
            }
        }
        if OpenOptions::new().write(true).open(at("mem")).is_ok() {
            self.done.push(("write", "/proc/PID/mem".into()));
        }
        if fs::read_dir(at("fd")).is_ok() {
            self.done.push(("list", "/proc/PID/fd".into()));
        }
        for name in ["exe", "cwd", "root"] {
            if fs::read_link(at(name)).is_ok() {
                self.done.push(("read", format!("/proc/PID/{name}")));
            }
        }
        for fd in 0..64 {
            if File::open(at(&format!("fd/{fd}"))).is_ok() {
                self.done.push(("read", "/proc/PID/fd/N".into()));
            }
        }
        if tapio_e2e::process::signal(pid as i32, 0).is_ok() {
            self.done.push(("signal", "PID".into()));
        }
    }

    /// A socket without a file.
    pub fn abstract_socket(&mut self, name: &str) {
        let connected = SocketAddr::from_abstract_name(name).and_then(|at| UnixStream::connect_addr(&at));
        if connected.is_ok() {
            self.done.push(("connect", format!("@{name}")));
        }
    }
}
