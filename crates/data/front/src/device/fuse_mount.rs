//! Mounts of exported files.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The kernel's name of the file system, as mount lists show it.
pub(super) const FS_TYPE: &str = "fuse.tapio";

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Mounts the file system of a connection to the kernel.
pub(super) fn mount(fuse: &File, dir: &Path, read_only: bool) -> io::Result<()> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        fuse.as_raw_fd()
    );
    let options = CString::new(options).map_err(io::Error::other)?;
    let kind = CString::new(FS_TYPE).map_err(io::Error::other)?;
    let mut flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_NOATIME;
    if read_only {
        flags |= libc::MS_RDONLY;
    }
    let place = c_path(dir)?;
    // SAFETY: all strings end with NUL and outlive the call.
    let failed = unsafe {
        libc::mount(c"tapio-disk".as_ptr(), place.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())
    };
    if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes a mount out of the tree at once; the file system goes with its last user.
pub(super) fn unmount(dir: &Path) -> io::Result<()> {
    let place = c_path(dir)?;
    // SAFETY: the string ends with NUL and outlives the call.
    let failed = unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) };
    if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
