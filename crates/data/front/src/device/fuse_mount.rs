//! Mounts of exported files.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags};

/// The kernel's name of the file system, as mount lists show it.
pub(super) const FS_TYPE: &str = "fuse.tapio";

/// Mounts the file system of a connection to the kernel.
pub(super) fn mount(fuse: &File, dir: &Path, read_only: bool) -> io::Result<()> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        fuse.as_raw_fd()
    );
    let options = CString::new(options).map_err(io::Error::other)?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, read_only);
    Ok(rustix::mount::mount(c"tapio-disk", dir, FS_TYPE, flags, options.as_c_str())?)
}

/// Takes a mount out of the tree at once; the file system goes with its last user.
pub(super) fn unmount(dir: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}
