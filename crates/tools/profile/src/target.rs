//! Opening a target, and refusing to write to one that is in use.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{major, minor};
use tapio_control::{ControlError, Errno};
use tapio_report::failure::Result;

use crate::bare::Bare;
use crate::facts::{self, Facts};

/// A target that is open.
#[derive(Debug)]
pub struct Target {
    /// Where requests go.
    pub bare: Bare,
    /// What the kernel says of it.
    pub facts: Facts,
    /// Numbers of a block device.
    pub numbers: Option<(u32, u32)>,
    /// Requests go past the page cache.
    pub direct: bool,
    /// Who uses it, if known: figures contain what they do.
    pub users: Vec<String>,
}

const SYS: &str = "/sys";

/// Opens a file or block device. With `write`, a target that anything uses is refused.
///
/// # Errors
/// It is not there, is neither a file nor a block device, or is in use.
pub fn open(path: &Path, write: bool) -> Result<Target> {
    let failed =
        |error: &std::io::Error| ControlError::io(format_args!("cannot open {}", path.display()), error);
    let meta = fs::metadata(path).map_err(|error| failed(&error))?;
    let is_device = meta.file_type().is_block_device();
    if !is_device && !meta.is_file() {
        let what = format!("{} is neither a file nor a block device", path.display());
        return Err(ControlError::new(Errno::EINVAL, what)
            .next("give a device as /dev/sdb, a file, or the UUID of an SR"));
    }
    let numbers = is_device.then(|| (major(meta.rdev()), minor(meta.rdev())));
    let users = match numbers {
        Some(numbers) => users(Path::new(SYS), Path::new("/proc"), numbers),
        None => users_of_file(path),
    };
    if let (true, [user, ..]) = (write, &users[..]) {
        return Err(in_use(path, user));
    }
    // The kernel refuses while another program has mounted it or built upon it, and keeps others off meanwhile.
    let exclusive = if write && is_device { libc::O_EXCL } else { 0 };
    let open = |direct: i32| {
        OpenOptions::new()
            .read(true)
            .write(write)
            .custom_flags(direct | exclusive | libc::O_CLOEXEC)
            .open(path)
    };
    let (mut file, direct) = match open(libc::O_DIRECT) {
        Ok(file) => (file, true),
        // A file system in memory has no page cache to go past.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            (open(0).map_err(|error| failed(&error))?, false)
        }
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(in_use(path, "the kernel says that it is claimed"));
        }
        Err(error) => return Err(failed(&error)),
    };
    if write && !is_device {
        leased(&file, path)?;
    }
    let len = file.seek(SeekFrom::End(0)).map_err(|error| failed(&error))?;
    let facts = numbers.map(|numbers| Facts::of(Path::new(SYS), numbers)).unwrap_or_default();
    let sector_len = facts.logical_block.unwrap_or(if direct { file_sector(&file) } else { 512 });
    if len < sector_len {
        return Err(ControlError::new(Errno::EINVAL, format!("{} is empty", path.display())).next(
            "there is nothing to measure: give a target with data, or make the file as large as an image",
        ));
    }
    Ok(Target { bare: Bare::new(file, len, sector_len), facts, numbers, direct, users })
}

fn in_use(path: &Path, user: &str) -> ControlError {
    let what = format!("{} is not written, because it is in use: {user}", path.display());
    ControlError::new(Errno::EBUSY, what)
        .next("free it, or leave out --destroy-contents: reads are always allowed")
}

/// The smallest read past the page cache that the file takes.
fn file_sector(file: &File) -> u64 {
    use std::os::unix::fs::FileExt;
    let mut memory = vec![0u8; 8192];
    let first = memory.as_ptr().align_offset(4096);
    let memory = &mut memory[first..first + 512];
    if file.read_at(memory, 0).is_ok() { 512 } else { 4096 }
}

/// Refuses a file that another program has open.
fn leased(file: &File, path: &Path) -> Result<()> {
    // SAFETY: the call takes numbers only.
    let lease = |kind: i32| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
    if lease(libc::F_WRLCK) == 0 {
        lease(libc::F_UNLCK);
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EBUSY) => Err(in_use(path, "another program has it open")),
        // File systems without leases: it cannot be known.
        _ => Ok(()),
    }
}

/// Loop devices over a file.
fn users_of_file(path: &Path) -> Vec<String> {
    let own = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let loops = fs::read_dir(Path::new(SYS).join("block")).into_iter().flatten().flatten();
    let used = loops.filter(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(backing.trim_end()) == own
    });
    used.map(|entry| format!("the device {} lies on it", entry.file_name().to_string_lossy())).collect()
}

/// Who uses a device or a part of it: mounts, swap, and devices upon it.
pub(crate) fn users(sys: &Path, proc: &Path, numbers: (u32, u32)) -> Vec<String> {
    let own = facts::directory(sys, numbers);
    let mut parts = vec![own.clone()];
    let inner = fs::read_dir(&own).into_iter().flatten().flatten().map(|entry| entry.path());
    parts.extend(inner.filter(|path| path.join("partition").exists()));
    let mounts = fs::read_to_string(proc.join("self/mountinfo")).unwrap_or_default();
    let swaps = fs::read_to_string(proc.join("swaps")).unwrap_or_default();
    let mut found = Vec::new();
    for part in &parts {
        let name = part.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let device = fs::read_to_string(part.join("dev")).unwrap_or_default();
        for line in mounts.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            if words.get(2) == Some(&device.trim()) {
                found.push(format!("{name} is mounted at {}", words.get(4).unwrap_or(&"?")));
            }
        }
        let is_swap = |line: &str| line.split_whitespace().next() == Some(&format!("/dev/{name}"));
        if swaps.lines().any(is_swap) {
            found.push(format!("{name} is swap space"));
        }
        for holder in fs::read_dir(part.join("holders")).into_iter().flatten().flatten() {
            found.push(format!("{} lies on {name}", holder.file_name().to_string_lossy()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_a_disk_are_its_mounts_swaps_and_holders_and_those_of_its_parts() {
        let root = tempfile::tempdir().expect("a directory");
        let made = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("below")).expect("made");
            fs::write(path, text).expect("written");
        };
        for (name, device) in [("sda", "8:0"), ("sda/sda1", "8:1"), ("sda/sda2", "8:2"), ("sda/sda3", "8:3")]
        {
            made(&format!("sys/block/{name}/dev"), device);
            if name != "sda" {
                made(&format!("sys/block/{name}/partition"), "1");
            }
        }
        made("sys/block/sda/sda3/holders/md0/x", "");
        made(
            "proc/self/mountinfo",
            "36 35 8:1 / /mnt/a rw - ext4 /dev/sda1 rw\n37 35 9:1 / /b rw - ext4 x rw\n",
        );
        made("proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n");
        fs::create_dir_all(root.path().join("sys/dev/block")).expect("made");
        let (sys, proc) = (root.path().join("sys"), root.path().join("proc"));
        let link = |name: &str, to: &str| {
            std::os::unix::fs::symlink(sys.join("block").join(name), sys.join("dev/block").join(to))
                .expect("linked");
        };
        link("sda", "8:0");
        link("sda/sda2", "8:2");
        let mut all = users(&sys, &proc, (8, 0));
        all.sort();
        assert_eq!(all, ["md0 lies on sda3", "sda1 is mounted at /mnt/a", "sda2 is swap space"]);
        assert_eq!(users(&sys, &proc, (8, 2)), ["sda2 is swap space"]);
    }

    #[test]
    fn what_is_no_target_is_refused_with_what_to_do() {
        let root = tempfile::tempdir().expect("a directory");
        let error = open(root.path(), false).expect_err("a directory").to_string();
        assert!(error.contains("neither a file nor a block device") && error.contains("UUID"), "{error}");
        let path = root.path().join("image");
        assert!(open(&path, false).expect_err("nothing").to_string().contains("image"));
        File::create(&path).expect("made");
        assert!(open(&path, false).expect_err("empty").to_string().contains("is empty"));
        fs::write(&path, vec![1; 8192]).expect("written");
        assert_eq!(tapio_len(&open(&path, false).expect("a file")), 8192);
        // Two that write are one too many.
        let other = File::open(&path).expect("open");
        if let Err(error) = open(&path, true) {
            assert!(error.to_string().contains("another program has it open"), "{error}");
        }
        drop(other);
        open(&path, true).expect("no program has it open");
    }

    fn tapio_len(target: &Target) -> u64 {
        crate::device::Device::len(&target.bare)
    }
}
