//! Loop devices, without a program for each.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

// linux/loop.h, linux/fs.h
const LOOP_CLR_FD: u64 = 0x4c01;
const LOOP_SET_STATUS64: u64 = 0x4c04;
const LOOP_CONFIGURE: u64 = 0x4c0a;
const LOOP_CTL_GET_FREE: u64 = 0x4c82;
const BLKROSET: u64 = 0x125d;
const BLKFLSBUF: u64 = 0x1261;
/// How often another free device is asked for, when others take them too.
const TRIES: usize = 200;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    names: [u64; 16],
    key: [u64; 4],
    init: [u64; 2],
}

impl Info {
    const fn of(offset: u64, size_limit: u64) -> Self {
        Self {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset,
            size_limit,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: 0,
            names: [0; 16],
            key: [0; 4],
            init: [0; 2],
        }
    }
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const CONTROL: &str = "/dev/loop-control";

/// A loop device, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Loop(u32);

/// An ioctl whose argument is a number.
fn told(fd: RawFd, request: u64, argument: u64) -> io::Result<i32> {
    // SAFETY: the descriptor is open, and none of the requests that come here takes the argument for a pointer.
    let done = unsafe { libc::ioctl(fd, request as libc::Ioctl, argument) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// An ioctl that reads a structure.
fn given<T>(fd: RawFd, request: u64, argument: &T) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the kernel reads a structure of this layout from the argument.
    let done = unsafe { libc::ioctl(fd, request as libc::Ioctl, std::ptr::from_ref(argument)) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Loop {
    /// A free one, over a part of a file.
    pub(super) fn over(file: &Path, offset: u64, len: u64) -> io::Result<Self> {
        let backing = File::options().read(true).write(true).open(file)?;
        // While another one is looked for, one that was given to another test may be open here for a moment.
        let control = File::open(CONTROL)?;
        rustix::fs::flock(&control, rustix::fs::FlockOperation::LockExclusive)?;
        let mut last = io::Error::other("no loop device is free");
        for _ in 0..TRIES {
            let found = Self(told(control.as_raw_fd(), LOOP_CTL_GET_FREE, 0)?.unsigned_abs());
            // It takes writes as it was opened here.
            let opened = File::options().read(true).write(true).open(found.path());
            let done = opened.and_then(|device| {
                let fd = backing.as_raw_fd().unsigned_abs();
                let config = Config { fd, block_size: 512, info: Info::of(offset, len), reserved: [0; 8] };
                given(device.as_raw_fd(), LOOP_CONFIGURE, &config)
            });
            match done {
                Ok(()) => {
                    // An earlier user may have left that.
                    found.set_writable(true)?;
                    return Ok(found);
                }
                // Another process was faster.
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn open(self) -> io::Result<File> {
        File::options().read(true).open(self.path())
    }

    pub(super) fn path(self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.0))
    }

    pub(super) fn set_len(self, offset: u64, len: u64) -> io::Result<()> {
        let device = self.open()?;
        for _ in 0..TRIES {
            match given(device.as_raw_fd(), LOOP_SET_STATUS64, &Info::of(offset, len)) {
                // Pages that are being written.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                done => return done,
            }
        }
        Err(io::Error::other("the loop device stays busy"))
    }

    pub(super) fn set_writable(self, is_writable: bool) -> io::Result<()> {
        let refuses = i32::from(!is_writable);
        given(self.open()?.as_raw_fd(), BLKROSET, &refuses)
    }

    /// Writes what is in memory of it, and forgets it.
    pub(super) fn forget(self) -> io::Result<()> {
        told(self.open()?.as_raw_fd(), BLKFLSBUF, 0).map(drop)
    }

    /// Whether this process, or the one that started it, has it open.
    pub(super) fn is_open(self) -> bool {
        let path = self.path();
        let control = File::open(CONTROL);
        let _no_search = control
            .as_ref()
            .map(|control| rustix::fs::flock(control, rustix::fs::FlockOperation::LockShared));
        let parent = std::os::unix::process::parent_id();
        ["self".to_owned(), parent.to_string()].iter().any(|process| {
            let entries = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|link| link == path))
        })
    }

    /// Gives it back, if it is over a file of this directory still.
    pub(super) fn end(self, dir: &Path) {
        let backing = std::fs::read_to_string(format!("/sys/block/loop{}/loop/backing_file", self.0));
        if backing.is_ok_and(|file| Path::new(file.trim()).starts_with(dir))
            && let Ok(device) = self.open()
        {
            let _ = self.set_writable(true);
            let _ = told(device.as_raw_fd(), LOOP_CLR_FD, 0);
        }
    }
}

/// The first byte from `at` on that the file holds; none behind its last one.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    use rustix::fs::SeekFrom;
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(at) => Ok(Some(at)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
