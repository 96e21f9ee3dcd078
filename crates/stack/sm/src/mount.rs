//! Mounted file systems: what there is, and mounting.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// Major and minor number of the file system's device.
    pub(crate) device: (u32, u32),
    /// Where.
    pub(crate) point: PathBuf,
    /// What, as it was named when it was mounted.
    pub(crate) source: String,
}

/// What is mounted.
///
/// # Errors
/// `/proc` is not there.
pub(crate) fn mounted() -> io::Result<Vec<Mounted>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

pub(crate) fn parse(line: &[u8]) -> Option<Mounted> {
    let mut words = line.split(|&byte| byte == b' ').skip(2);
    let (major, minor) = std::str::from_utf8(words.next()?).ok()?.split_once(':')?;
    let point = unescaped(words.nth(1)?);
    // Any number of optional fields end with a dash; the type comes before the source.
    let source = words.skip_while(|word| *word != b"-").nth(2).map(unescaped)?;
    Some(Mounted {
        device: (major.parse().ok()?, minor.parse().ok()?),
        point: PathBuf::from(std::ffi::OsString::from_vec(point)),
        source: String::from_utf8_lossy(&source).into_owned(),
    })
}

/// Blanks and the like stand there as `\040`.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).filter(|digits| digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        if let (b'\\', Some(digits)) = (*first, octal) {
            let value = digits.iter().fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            bytes.push((value & 0xff) as u8);
            rest = &tail[3..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    bytes
}

/// What is mounted at `point`, the topmost where there are several.
///
/// # Errors
/// As [`mounted`].
pub(crate) fn at(point: &Path) -> io::Result<Option<Mounted>> {
    let point = fs::canonicalize(point)?;
    Ok(mounted()?.into_iter().rev().find(|mounted| mounted.point == point))
}

/// Mounts `device` at `point`. No access times: they are never read, and cost writes. No programs, no devices.
///
/// # Errors
/// The system's.
pub(crate) fn mount(device: &Path, point: &Path, kind: &str) -> io::Result<()> {
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    Ok(rustix::mount::mount(device, point, kind, flags, None)?)
}

/// Unmounts what is at `point`.
///
/// # Errors
/// EBUSY where files of it are open, and others of the system.
pub(crate) fn unmount(point: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(point, UnmountFlags::NOFOLLOW)?)
}

/// Bytes of the file system at `path`: all, and those in use.
///
/// # Errors
/// The system's.
pub(crate) fn sizes(path: &Path) -> io::Result<(u64, u64)> {
    let found = rustix::fs::statvfs(path)?;
    let used = found.f_blocks.saturating_sub(found.f_bfree);
    Ok((found.f_blocks.saturating_mul(found.f_frsize), used.saturating_mul(found.f_frsize)))
}

/// Makes the names in a directory durable.
///
/// # Errors
/// The system's.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_escapes() {
        let line = br"36 35 98:0 /mnt1 /mnt\040two rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mounted = parse(line).unwrap();
        assert_eq!(
            mounted,
            Mounted { device: (98, 0), point: PathBuf::from("/mnt two"), source: "/dev/root".into() }
        );
        for bad in [&b""[..], b"36 35", b"36 35 98 / /x", b"36 35 a:b / /x", b"36 35 9:0 / /x rw - nfs"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
        assert_eq!(unescaped(br"a\04\777b"), [b'a', b'\\', b'0', b'4', 0xff, b'b']);
    }

    #[test]
    fn the_root_is_mounted_and_has_a_size() {
        assert!(at(Path::new("/")).unwrap().is_some());
        let (all, used) = sizes(Path::new("/")).unwrap();
        assert!(all >= used && all > 0);
    }
}
