//! What a guest's process can touch of this host: nothing but its own.
//!
//! A guest that takes over its emulator (or a kernel of User-mode Linux that was made for it) is then a program of this
//! host. Between fork and exec it gives up, in this order and for good:
//!
//! 1. the host's files: its root is one in memory with the system's programs, its kernel and its own directory
//!    (`tapio_sandbox::mounts`); its networks, names and queues are its own, too;
//! 2. privileges: it becomes a user of its own ([`crate::users`]), has no capabilities and cannot gain any;
//! 3. files once more, by Landlock, which also holds where the first step is not possible; and TCP, signals and
//!    abstract sockets beyond its own processes, as far as the kernel knows them;
//! 4. system calls that it has no reason to make (`calls`).
//!
//! What is not possible on a host (no root, no Landlock, no namespaces in a container) is said once, and left out, or
//! refused with `guest-sandbox = require`. Everything is prepared in the daemon; the child allocates nothing.

pub(crate) mod calls;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use tapio_sandbox::bpf::{self, Program};
use tapio_sandbox::capability;
use tapio_sandbox::landlock::{self, Ruleset, right};
use tapio_sandbox::mounts::{Access, Root};
use tapio_sys::process::is_root;

use self::calls::Emulator;
use crate::place::Place;
use crate::settings::{GuestSandbox, Settings};

/// What every guest's process sees of the host, read only: programs and libraries, and how these are found.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
];

/// Devices that every guest's process may open.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// Memory that User-mode Linux takes of its file system in memory, in addition to the guest's own.
const MEMORY_SPARE: u64 = 64 << 20;

const READ: u64 = right::READ_FILE | right::READ_DIR;
const RUN: u64 = READ | right::EXECUTE;
const WRITE_FILE: u64 = right::READ_FILE | right::WRITE_FILE | right::TRUNCATE;
const WRITE: u64 = READ
    | WRITE_FILE
    | right::REMOVE_DIR
    | right::REMOVE_FILE
    | right::MAKE_DIR
    | right::MAKE_REG
    | right::MAKE_SOCK
    | right::MAKE_FIFO;
const HANDLED: u64 = WRITE | right::EXECUTE | right::MAKE_CHAR | right::MAKE_BLOCK | right::MAKE_SYM;

/// What one guest needs of the host.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    pub emulator: Emulator,
    /// Programs of the host, and libraries put before them: executed.
    pub programs: Vec<PathBuf>,
    /// Files of the host: read.
    pub files: Vec<PathBuf>,
    /// Files in the VM's own directory that are written, apart from those in [`Place::own`].
    pub written: Vec<PathBuf>,
    /// Files of the host that are disks of the guest, and belong to its user.
    pub disks: Vec<PathBuf>,
    /// Devices of the host.
    pub devices: Vec<PathBuf>,
    /// Bytes of memory that it keeps in `/dev/shm`.
    pub memory: u64,
}

/// What this host can do.
#[derive(Debug)]
struct Abilities {
    is_root: bool,
    /// Why there can be no root of a guest's own.
    roots: Result<(), String>,
    landlock: Option<i64>,
}

/// What a guest gives up, ready to be done.
#[derive(Debug, Default)]
pub(crate) struct Confinement {
    root: Option<Root>,
    dir: CString,
    user: Option<(u32, u32)>,
    /// Groups in addition to its own: those of devices.
    groups: Vec<u32>,
    is_narrow: bool,
    /// The version of Landlock, and what is allowed.
    files: Option<(i64, Vec<(CString, u64)>)>,
    calls: Program,
}

fn name(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Found out once, by trying.
fn abilities(settings: &Settings) -> &'static Abilities {
    static KNOWN: OnceLock<Abilities> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let is_root = is_root();
        let roots = if is_root { try_root(settings) } else { Err("the daemon is not root".to_owned()) };
        let found = Abilities { is_root, roots, landlock: landlock::version() };
        if settings.guest_sandbox != GuestSandbox::Off {
            if !is_root {
                tracing::warn!("guests run as the daemon's own user: only root can give each its own");
            }
            if let Err(why) = &found.roots {
                tracing::warn!("guests have no namespaces of their own: {why}");
            }
            if found.landlock.is_none() {
                tracing::warn!("this kernel has no Landlock: permissions say which files a guest may touch");
            }
        }
        found
    })
}

/// Where the roots of guests are put: an empty directory, which each guest sees something else over.
fn root_dir(settings: &Settings) -> io::Result<PathBuf> {
    let dir = settings.machines_dir().join("root");
    tapio_sys::private::make_dir(&dir, 0o711)?;
    fs::canonicalize(dir)
}

/// A root with what every guest sees.
fn system_root(settings: &Settings) -> io::Result<Root> {
    let mut root = Root::new(&root_dir(settings)?)?;
    for path in SYSTEM {
        root.show_as_is(Path::new(path))?;
    }
    for path in DEVICES {
        root.show(Path::new(path), Access::Device)?;
    }
    root.processes()?;
    Ok(root)
}

/// Makes a root in a child that ends at once.
fn try_root(settings: &Settings) -> Result<(), String> {
    let told = |error: io::Error| error.to_string();
    let root = system_root(settings).map_err(told)?;
    let mut command = Command::new("/bin/true");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    // SAFETY: `enter` makes async-signal-safe calls only, and so does `say`.
    unsafe {
        command.pre_exec(move || root.enter().map_err(|(step, error)| say(step, error)));
    }
    let ended = command.status().map_err(told)?;
    if ended.success() { Ok(()) } else { Err(format!("a trial ended with {ended}")) }
}

/// Names a step that failed where the emulator's messages go; allocates nothing.
fn say(step: &str, error: io::Error) -> io::Error {
    for text in ["confining the guest: this step failed: ", step, "\n"] {
        let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
    }
    // The parent is told the number alone.
    io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EPERM))
}

impl Confinement {
    /// What a guest gives up that needs this.
    ///
    /// # Errors
    /// A sentence: this host cannot do all of it and settings require that, or a path is not there.
    pub(crate) fn of(settings: &Settings, place: &Place, needs: &Needs) -> Result<Self, String> {
        let told = |error: io::Error| error.to_string();
        let mut made = Self { dir: name(&place.own()).map_err(told)?, user: place.user(), ..Self::default() };
        for device in &needs.devices {
            // A group that may use it; where others may there is nothing to do.
            if let Ok(data) = fs::metadata(device)
                && data.mode() & 0o060 == 0o060
                && data.gid() != 0
            {
                made.groups.push(data.gid());
            }
        }
        if settings.guest_sandbox == GuestSandbox::Off {
            return Ok(made);
        }
        let can = abilities(settings);
        if settings.guest_sandbox == GuestSandbox::Require {
            let missing = match (&can.roots, can.landlock, made.user) {
                (Err(why), _, _) => Some(format!("namespaces of its own ({why})")),
                (_, None, _) => Some("Landlock".to_owned()),
                (_, _, None) => Some("a user of its own (guest-users)".to_owned()),
                _ => None,
            };
            if let Some(missing) = missing {
                return Err(format!(
                    "this host cannot give the guest {missing}, and guest-sandbox is 'require'; 'on' in tapiod.conf \
                     does without"
                ));
            }
        }
        if can.roots.is_ok() {
            made.root = Some(made.root_of(settings, place, needs).map_err(told)?);
        }
        if let Some(version) = can.landlock {
            made.files = Some((version, rules(place, needs).map_err(told)?));
        }
        made.is_narrow = true;
        made.calls = calls::filter(needs.emulator);
        debug_assert!(can.is_root || made.user.is_none());
        Ok(made)
    }

    /// Whether the guest sees only what is shown to it.
    pub(crate) fn has_root(&self) -> bool {
        self.root.is_some()
    }

    fn root_of(&self, settings: &Settings, place: &Place, needs: &Needs) -> io::Result<Root> {
        let (uid, gid) = self.user.unwrap_or((0, 0));
        let mut root = system_root(settings)?;
        root.memory(Path::new("/dev/shm"), needs.memory + MEMORY_SPARE, uid, gid)?;
        for path in needs.programs.iter().chain(&needs.files) {
            root.show(path, Access::Read)?;
        }
        root.show(&fs::canonicalize(place.dir())?, Access::Write)?;
        for disk in &needs.disks {
            root.show(disk, Access::Write)?;
        }
        for device in &needs.devices {
            root.device(device, uid, gid)?;
        }
        Ok(root)
    }

    /// Gives it all up. Between fork and exec: allocates nothing, makes async-signal-safe calls only. A step that fails
    /// is named on the error output.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn enter(&self) -> io::Result<()> {
        let told = |step: &'static str| move |error: io::Error| say(step, error);
        if let Some(root) = &self.root {
            root.enter().map_err(|(step, error)| say(step, error))?;
        }
        rustix::process::chdir(self.dir.as_c_str())
            .map_err(|error| say("entering its directory", error.into()))?;
        if let Some((uid, gid)) = self.user {
            capability::bound(0).map_err(told("the bounding set"))?;
            capability::set_groups(&self.groups).map_err(told("its groups"))?;
            capability::become_user(uid, gid).map_err(told("its user"))?;
        }
        if !self.is_narrow {
            return Ok(());
        }
        capability::set(0).map_err(told("its capabilities"))?;
        capability::no_new_privileges().map_err(told("no new privileges"))?;
        if let Some((version, rules)) = &self.files {
            let ruleset = Ruleset::new(*version, HANDLED, true).map_err(told("rules for files"))?;
            for (path, rights) in rules {
                ruleset.allow(path, *rights).map_err(told("a rule for files"))?;
            }
            ruleset.enforce().map_err(told("rules for files"))?;
        }
        bpf::install(&self.calls).map_err(told("the filter of system calls"))
    }
}

/// What Landlock allows.
fn rules(place: &Place, needs: &Needs) -> io::Result<Vec<(CString, u64)>> {
    let system = SYSTEM.iter().map(|path| (PathBuf::from(path), RUN));
    let devices = DEVICES.iter().map(PathBuf::from).chain(needs.devices.iter().cloned());
    let own = [
        (PathBuf::from("/proc"), READ),
        (PathBuf::from("/dev/shm"), WRITE),
        (place.dir().to_path_buf(), READ),
        (place.own(), WRITE),
    ];
    let all = system
        .chain(devices.map(|path| (path, WRITE_FILE)))
        .chain(needs.programs.iter().map(|path| (path.clone(), RUN)))
        .chain(needs.files.iter().map(|path| (path.clone(), READ)))
        .chain(needs.written.iter().chain(&needs.disks).map(|path| (path.clone(), WRITE_FILE)))
        .chain(own);
    all.map(|(path, rights)| Ok((name(&path)?, rights))).collect()
}

/// A file that a client chose and that the guest's process reads: itself if every user may read it, otherwise a copy in
/// the VM's directory.
///
/// # Errors
/// The file system's.
pub(crate) fn readable(place: &Place, file: &Path, copy: &str) -> io::Result<PathBuf> {
    let mode = fs::metadata(file)?.mode();
    if place.user().is_none() || mode & 0o004 != 0 {
        return Ok(file.to_path_buf());
    }
    let own = place.join(copy);
    fs::copy(file, &own)?;
    // Its directory lets no other user pass.
    fs::set_permissions(&own, fs::Permissions::from_mode(0o644 | (mode & 0o111)))?;
    Ok(own)
}

#[cfg(test)]
mod tests;
