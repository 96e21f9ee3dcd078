//! What disk processes that died left on this host: mounts of exported files, and loop devices over them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_sys::process::Stat;

use super::aside::aside;
use super::{fuse_mount, loop_device};

/// How long cleaning up may take in all.
const CLEAN_MAX: Duration = Duration::from_secs(10);
/// How long a left-over loop device may take.
const DETACH_MAX: Duration = Duration::from_secs(1);

/// The name of a mount, or of a device's owner, for this process and the disk `minor`: `PID-START.MINOR`, where START
/// tells processes with the same number apart.
pub(super) fn own_name(minor: u16) -> String {
    let pid = std::process::id();
    format!("{pid}-{}.{minor}", start_of(pid).unwrap_or(0))
}

/// When a process began, in ticks since the host did; `None` when there is no such process.
fn start_of(pid: u32) -> Option<u64> {
    Stat::of(pid).ok().map(|stat| stat.start)
}

/// Whether the process that made a name of this kind is gone.
pub(super) fn is_left_over(name: &str) -> bool {
    let parsed = name.rsplit_once('.').and_then(|(process, _)| process.split_once('-'));
    let Some((pid, start)) = parsed.and_then(|(pid, start)| Some((pid.parse().ok()?, start.parse().ok()?)))
    else {
        return false;
    };
    start_of(pid) != Some(start)
}

/// The places below `dir` where an exported file is mounted, as a list of mounts (`/proc/self/mountinfo`) has them.
fn mounts(dir: &Path, list: &[u8]) -> Vec<PathBuf> {
    let lines = list.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b' ');
            let place = unescape(fields.nth(4)?);
            let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
            let place = PathBuf::from(OsStr::from_bytes(&place));
            (kind == fuse_mount::FS_TYPE.as_bytes() && place.parent() == Some(dir)).then_some(place)
        })
        .collect()
}

/// Blanks and backslashes are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = |digits: &[u8]| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        };
        match (first, after.get(..3).and_then(octal)) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// Removes what dead processes left below `dir`, the directory of mounts; returns what was removed.
///
/// # Errors
/// The lists of the kernel cannot be read, or it takes too long.
pub fn clean(dir: &Path) -> io::Result<Vec<PathBuf>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let dir = dir.canonicalize()?;
    aside(CLEAN_MAX, move || {
        let mut cleaned = Vec::new();
        let left_over = |path: &Path| path.file_name().and_then(OsStr::to_str).is_some_and(is_left_over);
        for (device, file) in loop_device::below(&dir) {
            if file.parent().is_some_and(left_over) && loop_device::detach(&device, &file, DETACH_MAX).is_ok()
            {
                cleaned.push(device);
            }
        }
        for place in mounts(&dir, &fs::read("/proc/self/mountinfo")?) {
            if left_over(&place) && fuse_mount::unmount(&place).is_ok() {
                cleaned.push(place);
            }
        }
        for entry in fs::read_dir(&dir)?.flatten() {
            if left_over(&entry.path()) {
                // Only an empty directory goes, and only one that is no mount.
                let _ = fs::remove_dir(entry.path());
            }
        }
        Ok(cleaned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_mounts_are_not_left_over_and_those_of_the_dead_are() {
        assert!(!is_left_over(&own_name(3)));
        let pid = std::process::id();
        assert!(is_left_over(&format!("{pid}-1.3")), "another process had this number before");
        assert!(is_left_over("4194305-77.0"), "no process has such a number");
        for foreign in ["lost+found", "7.3", "x-y.3", "7-8", ""] {
            assert!(!is_left_over(foreign), "{foreign}");
        }
    }

    #[test]
    fn only_our_mounts_below_the_directory_are_found() {
        let list = b"36 35 0:41 / /run/x/1-2.3 rw,nosuid - fuse.tapio tapio-disk rw,user_id=0\n\
            37 35 0:42 / /run/y/1-2.3 rw shared:5 - fuse.tapio tapio-disk rw\n\
            38 35 0:43 / /run/x/4-5.6 rw - fuse.other x rw\n\
            39 35 0:44 / /run/x/a\\040b rw master:1 - fuse.tapio tapio-disk rw\n\
            torn line\n";
        let found = mounts(Path::new("/run/x"), list);
        assert_eq!(found, [PathBuf::from("/run/x/1-2.3"), PathBuf::from("/run/x/a b")]);
    }

    #[test]
    fn cleaning_where_nothing_is_does_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(clean(&dir.path().join("missing")).unwrap(), Vec::<PathBuf>::new());
        fs::create_dir(dir.path().join("4194305-77.0")).unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        assert_eq!(clean(dir.path()).unwrap(), Vec::<PathBuf>::new());
        assert!(!dir.path().join("4194305-77.0").exists());
        assert!(dir.path().join("other").exists());
    }
}
