//! Loop devices, by their ioctls (`linux/loop.h`). To be used [aside](super::aside) wherever the file below is ours.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const LOOP_CLR_FD: libc::Ioctl = 0x4c01;
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4c07;
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;

const FLAG_READ_ONLY: u32 = 1;
const FLAG_DIRECT_IO: u32 = 16;
/// Others take free devices too: so often another one is tried.
const TRIES: u32 = 64;
/// Between two looks at whether a device is free.
const LOOK_TIME: Duration = Duration::from_millis(5);

/// `struct loop_info64`.
#[repr(C)]
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
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Info>() == 232 && size_of::<Config>() == 304);

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn open(path: &Path, write: bool, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(write).custom_flags(flags | libc::O_CLOEXEC).open(path)
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Puts a free loop device over `file`, with sectors of `sector_len` bytes; gives its path.
///
/// Its I/O goes past the page cache of the file, where the kernel can: requests then run in parallel instead of
/// one at a time (4 KiB writes at depth 32: two to eight times as many), the host does not keep everything twice, and
/// what others write to the disk is seen. The kernel that cannot goes through the page cache by itself.
pub fn attach(file: &Path, sector_len: u32, read_only: bool) -> io::Result<PathBuf> {
    let control_path = Path::new("/dev/loop-control");
    let control = open(control_path, true, 0).map_err(|error| named(control_path, &error))?;
    let backing = open(file, !read_only, 0).map_err(|error| named(file, &error))?;
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        // SAFETY: takes no pointers.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = open(&path, !read_only, 0).map_err(|error| named(&path, &error))?;
        // SAFETY: an all-zero configuration is a valid value: no limit, no offset, no flags.
        let mut config: Config = unsafe { std::mem::zeroed() };
        config.fd = backing.as_raw_fd() as u32;
        config.block_size = sector_len;
        config.info.flags = FLAG_DIRECT_IO | if read_only { FLAG_READ_ONLY } else { 0 };
        let name = file.as_os_str().as_bytes();
        for (place, byte) in config.info.file_name[..63].iter_mut().zip(name) {
            *place = *byte;
        }
        let configure = |config: &Config| {
            // SAFETY: the configuration is valid for reading and its descriptor open.
            check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, std::ptr::from_ref(config)) })
        };
        let refused = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
        let configured = configure(&config).or_else(|error| {
            // The flag is refused by kernels that do not know it in this place.
            config.info.flags &= !FLAG_DIRECT_IO;
            if refused(&error) { configure(&config) } else { Err(error) }
        });
        match configured {
            Ok(_) => return Ok(path),
            // Another process took the device first.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
            Err(error) => return Err(named(&path, &error)),
        }
    }
    Err(last)
}

/// The file that a loop device is over, by sysfs: `None` for a free device.
pub fn backing_file(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?;
    let text = fs::read(Path::new("/sys/block").join(name).join("loop/backing_file")).ok()?;
    let text = text.strip_suffix(b"\n").unwrap_or(&text);
    // A file whose name is gone, as after a lazy unmount, has this behind it.
    let text = text.strip_suffix(b" (deleted)").unwrap_or(text);
    Some(PathBuf::from(OsStr::from_bytes(text)))
}

/// Takes a loop device off its file, if it still is over `file`, and waits until it is free. False when it is still
/// in use: then the kernel frees it after its last user.
pub fn detach(device: &Path, file: &Path, within: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + within;
    loop {
        if backing_file(device).as_deref() != Some(file) {
            return Ok(true);
        }
        let handle = open(device, false, 0).map_err(|error| named(device, &error))?;
        // SAFETY: takes no pointers.
        match check(unsafe { libc::ioctl(handle.as_raw_fd(), LOOP_CLR_FD) }) {
            // ENXIO: it is free by now.
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO)) => return Ok(true),
            // EBUSY: another detach is in progress.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(named(device, &error)),
        }
        drop(handle);
        if backing_file(device).as_deref() != Some(file) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(LOOK_TIME);
    }
}

/// Lets a loop device take the size that its file has now.
pub fn resize(device: &Path) -> io::Result<()> {
    let handle = open(device, false, 0).map_err(|error| named(device, &error))?;
    // SAFETY: takes no pointers.
    check(unsafe { libc::ioctl(handle.as_raw_fd(), LOOP_SET_CAPACITY) }).map(drop)
}

/// Every loop device whose file lies below `dir`, with that file.
pub fn below(dir: &Path) -> Vec<(PathBuf, PathBuf)> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name());
    let devices = names.filter(|name| name.as_bytes().starts_with(b"loop"));
    devices
        .map(|name| Path::new("/dev").join(name))
        .filter_map(|device| backing_file(&device).map(|file| (device, file)))
        .filter(|(_, file)| file.starts_with(dir))
        .collect()
}

/// Whether a block device is claimed for exclusive use: by a mount, a volume manager, another disk process.
pub fn is_claimed(device: &Path) -> bool {
    let claimed = open(device, false, libc::O_EXCL | libc::O_NONBLOCK);
    claimed.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}
