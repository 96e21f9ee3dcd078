//! What all drivers are told.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tapio_log::Rotation;

use crate::users::UserRange;

/// Whether guests are confined (`guest-sandbox`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestSandbox {
    /// They are not: for debugging. They have a user of their own all the same, if there is one.
    Off,
    /// As far as this host can.
    On,
    /// In every way, or they do not start.
    Require,
}

/// Where kernels and ramdisks are by default: the host's own, those of Tapio's administrator, and
/// those of XenServer.
pub const KERNEL_DIRS: [&str; 4] =
    ["/boot", "/usr/lib/tapio/kernels", "/var/lib/tapio/kernels", "/var/lib/xcp/guest"];

/// Bytes from which on a console is rotated if no other number is set.
pub const CONSOLE_LOG_SIZE: u64 = 1 << 20;

/// What all drivers are told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directories of VMs are below it (`vm/UUID`); empty after a reboot.
    pub run_dir: PathBuf,
    /// Where variables of UEFI firmware are kept, a file a VM; they outlive a reboot of the host if it does.
    pub nvram_dir: PathBuf,
    /// Where tapback's log is on hosts without a journal.
    pub log_dir: PathBuf,
    /// When that log is rotated, and how many parts of all logs are kept.
    pub rotation: Rotation,
    /// Bytes from which on consoles and the words of emulators are rotated: they are in the run directory, in memory.
    pub console_log_size: u64,
    /// Each guest runs as a user of its own out of these; as the daemon itself where there are none.
    pub guest_users: Option<UserRange>,
    /// Whether guests are confined.
    pub guest_sandbox: GuestSandbox,
    /// User-mode Linux: the kernel of VMs that bring none.
    pub uml: PathBuf,
    /// Where the modules of that kernel are, by its version.
    pub uml_modules: PathBuf,
    /// The emulator.
    pub qemu: PathBuf,
    /// Where kernels and ramdisks may lie that clients name: directories, or single files. `uml` always may.
    pub kernel_dirs: Vec<PathBuf>,
    /// A static busybox, of which the guests that bring no ramdisk are made.
    pub busybox: PathBuf,
    /// Xen.
    pub xen: XenSettings,
    /// `libtapio_uml_preload.so`, where it is installed: User-mode Linux needs it on processors with AMX.
    pub uml_preload: Option<PathBuf>,
}

/// What the driver of Xen's domains is told.
#[derive(Clone, Debug)]
pub struct XenSettings {
    /// xl(1).
    pub xl: PathBuf,
    /// The file that says whether this is a control domain (`/proc/xen/capabilities`).
    pub capabilities: PathBuf,
    /// xenstored's socket; what `XENSTORED_PATH` and the system say without.
    pub store: Option<PathBuf>,
    /// The program that connects guests to disk processes. It is started if no process holds its lock; none: it is
    /// never started.
    pub tapback: Option<PathBuf>,
    /// Where it holds its lock: the directory of the disk processes' control sockets.
    pub control_dir: PathBuf,
}

impl Default for XenSettings {
    fn default() -> Self {
        let control = std::env::var_os("TAPIO_RUN_DIR").filter(|dir| !dir.is_empty());
        Self {
            xl: find("xl"),
            capabilities: "/proc/xen/capabilities".into(),
            store: None,
            tapback: Some(beside("tapio-tapback")),
            control_dir: control.map_or_else(|| "/run/blktap-control".into(), PathBuf::from),
        }
    }
}

impl Settings {
    /// The host's own programs, wherever they are installed.
    pub fn new(run_dir: &Path) -> Self {
        Self {
            run_dir: run_dir.to_path_buf(),
            nvram_dir: run_dir.join("nvram"),
            log_dir: run_dir.to_path_buf(),
            rotation: Rotation::default(),
            console_log_size: CONSOLE_LOG_SIZE,
            guest_users: tapio_sys::process::is_root().then_some(UserRange::DEFAULT),
            guest_sandbox: GuestSandbox::On,
            uml: find("linux.uml"),
            uml_modules: "/usr/lib/uml/modules".into(),
            qemu: find("qemu-system-x86_64"),
            kernel_dirs: KERNEL_DIRS.map(PathBuf::from).into(),
            busybox: find("busybox"),
            xen: XenSettings::default(),
            uml_preload: preload(),
        }
    }

    /// When consoles and the words of emulators are rotated.
    pub(crate) fn console_rotation(&self) -> Rotation {
        Rotation { len_max: self.console_log_size, ..self.rotation }
    }

    /// Where the directories of VMs are, without links on the way: a guest's process sees its own directory under
    /// this name and no other.
    pub(crate) fn machines_dir(&self) -> PathBuf {
        std::fs::canonicalize(&self.run_dir).unwrap_or_else(|_| self.run_dir.clone()).join("vm")
    }
}

/// A program in PATH or the system's directories; its bare name where there is none, so that an error names it.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system =
        ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    let found = std::env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| {
        file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    });
    found.unwrap_or_else(|| program.into())
}

/// A program of ours: beside this one, or where others are.
fn beside(program: &str) -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(program)));
    beside.filter(|file| file.exists()).unwrap_or_else(|| find(program))
}

/// The library beside our program, above it (where tests are built), or where packages put it.
fn preload() -> Option<PathBuf> {
    const NAME: &str = "libtapio_uml_preload.so";
    let program = std::env::current_exe().ok();
    let beside =
        program.iter().flat_map(|program| program.ancestors().skip(1).take(2).map(|dir| dir.join(NAME)));
    let installed =
        ["/usr/lib/tapio", "/usr/local/lib/tapio", "/usr/local/lib"].map(|dir| Path::new(dir).join(NAME));
    beside.chain(installed).find(|file| file.exists())
}
