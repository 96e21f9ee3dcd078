//! Which files a thread, and all it starts, may touch: Landlock (Linux 5.13 and later).

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;

/// Rights, from `linux/landlock.h`.
pub mod right {
    /// Executing a file.
    pub const EXECUTE: u64 = 1;
    /// Opening a file for writing.
    pub const WRITE_FILE: u64 = 1 << 1;
    /// Opening a file for reading.
    pub const READ_FILE: u64 = 1 << 2;
    /// Listing a directory.
    pub const READ_DIR: u64 = 1 << 3;
    /// Removing or renaming a directory.
    pub const REMOVE_DIR: u64 = 1 << 4;
    /// Removing or renaming a file.
    pub const REMOVE_FILE: u64 = 1 << 5;
    /// Making a node of a character device.
    pub const MAKE_CHAR: u64 = 1 << 6;
    /// Making a directory.
    pub const MAKE_DIR: u64 = 1 << 7;
    /// Making a file.
    pub const MAKE_REG: u64 = 1 << 8;
    /// Making a socket.
    pub const MAKE_SOCK: u64 = 1 << 9;
    /// Making a named pipe.
    pub const MAKE_FIFO: u64 = 1 << 10;
    /// Making a node of a block device.
    pub const MAKE_BLOCK: u64 = 1 << 11;
    /// Making a symbolic link.
    pub const MAKE_SYM: u64 = 1 << 12;
    /// Cutting a file. Since version 3 of the interface.
    pub const TRUNCATE: u64 = 1 << 14;
}

/// What of the rights a file can have, rather than a directory.
pub const OF_FILES: u64 = right::EXECUTE | right::WRITE_FILE | right::READ_FILE | right::TRUNCATE;

/// `LANDLOCK_ACCESS_NET_BIND_TCP` and `_CONNECT_TCP`, since version 4.
const NET_ALL: u64 = 0b11;
/// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET` and `_SIGNAL`, since version 6.
const SCOPE_ALL: u64 = 0b11;

const RULE_PATH_BENEATH: libc::c_int = 1;
const CREATE_RULESET_VERSION: u32 = 1;

/// `struct landlock_ruleset_attr`; older kernels know a shorter one.
#[repr(C)]
struct Attributes {
    files: u64,
    net: u64,
    scoped: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct Beneath {
    allowed: u64,
    parent: i32,
}

/// The version of the kernel's interface; `None` without.
pub fn version() -> Option<i64> {
    // SAFETY: asking for the version takes no memory.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u64>(),
            0usize,
            CREATE_RULESET_VERSION,
        )
    };
    (version > 0).then_some(version)
}

/// Rules that are not in force yet. Nothing here allocates.
#[derive(Debug)]
pub struct Ruleset {
    fd: OwnedFd,
    handled: u64,
}

impl Ruleset {
    /// Nothing of `handled` is allowed anywhere yet. With `is_apart` there is no TCP either, and neither signals to
    /// processes nor connections to abstract sockets outside, as far as `version` goes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(version: i64, handled: u64, is_apart: bool) -> io::Result<Self> {
        let handled = if version >= 3 { handled } else { handled & !right::TRUNCATE };
        let attributes = Attributes { files: handled, net: NET_ALL, scoped: SCOPE_ALL };
        let fields = match version {
            6.. if is_apart => 3,
            4.. if is_apart => 2,
            _ => 1,
        };
        // SAFETY: the structure has at least that many fields of eight bytes.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const attributes,
                fields * size_of::<u64>(),
                0u32,
            )
        };
        let fd = i32::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, handled })
    }

    /// Allows these rights on a path and below; what is not there cannot be touched anyway.
    ///
    /// # Errors
    /// The kernel's.
    pub fn allow(&self, path: &CStr, rights: u64) -> io::Result<()> {
        let fd = match open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::ACCESS | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let is_dir = FileType::from_raw_mode(fstat(&fd)?.st_mode).is_dir();
        let rights = if is_dir { rights } else { rights & OF_FILES };
        let beneath = Beneath { allowed: rights & self.handled, parent: fd.as_raw_fd() };
        // SAFETY: the structure is what this kind of rule takes, and lives across the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.fd.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const beneath,
                0u32,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Puts the rules in force for this thread and all it starts, for good. Privileges must be given up before
    /// (`PR_SET_NO_NEW_PRIVS`).
    ///
    /// # Errors
    /// The kernel's.
    pub fn enforce(&self) -> io::Result<()> {
        // SAFETY: only numbers are passed.
        let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.fd.as_raw_fd(), 0u32) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
