//! The hypervisor by its devices: plain ioctls of `/dev/xen/gntdev`, `/dev/xen/evtchn` and `/dev/xen/gntalloc`.
//!
//! [`GrantDevice`] is another domain's memory, [`EventDevice`] an event channel, [`SharedPages`] memory of our own that
//! another domain may use. Each can be made of an open descriptor too: a process in a sandbox is given those.
//! [`request`] has the numbers of the ioctls, for a system call filter.

mod event;
mod grant;
mod present;
pub mod request;
mod share;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;

pub use event::EventDevice;
pub use grant::{CopySegment, GrantDevice, MappedGrants, UnmapAction};
pub use present::{is_control_domain, is_xen};
pub use share::SharedPages;

/// Opens a device of the hypervisor.
fn open(path: &str) -> io::Result<File> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.map_err(|error| {
        let next = match error.kind() {
            io::ErrorKind::NotFound if !is_xen() => "this host does not run on Xen",
            io::ErrorKind::NotFound => "load the modules xen-gntdev, xen-evtchn and xen-gntalloc",
            io::ErrorKind::PermissionDenied => "only root may use it",
            _ => "the kernel's log may say more",
        };
        io::Error::new(error.kind(), format!("cannot open {path}: {error}; {next}"))
    })
}

/// An ioctl, repeated when a signal came first; what it returned.
///
/// # Safety
/// `argument` is what this request reads and writes, and stays valid for the call.
unsafe fn call<T>(fd: RawFd, request: u32, argument: *mut T) -> io::Result<u32> {
    loop {
        // SAFETY: the caller's promise.
        let answer = unsafe { libc::ioctl(fd, request.into(), argument) };
        match u32::try_from(answer) {
            Ok(answer) => return Ok(answer),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests;
