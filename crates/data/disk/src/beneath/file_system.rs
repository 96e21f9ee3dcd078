//! What a file system is, by its magic number and its mount.

use std::fs;
use std::path::{Path, PathBuf};

/// What a file system stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// A server at the other end of a network, by this protocol.
    Network(&'static str),
    /// A process of this host, which reads and writes wherever it likes.
    User,
    /// This host's memory.
    Memory,
    /// A device, or something that is not known.
    Other,
}

/// Magic numbers (`linux/magic.h`, and the sources of those that are not there).
const NETWORK: [(u32, &str); 12] = [
    (0x0000_6969, "nfs"),
    (0x0000_517b, "smb"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb3"),
    (0x00c3_6400, "ceph"),
    (0x0102_1997, "9p"),
    (0x7375_7245, "coda"),
    (0x5346_414f, "afs"),
    (0x6b41_4653, "kafs"),
    (0x0bd0_0bd0, "lustre"),
    (0x1983_0326, "beegfs"),
    (0x2003_0528, "orangefs"),
];
const FUSE: u32 = 0x6573_5546;
const MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// What the magic number says.
pub const fn by_magic(magic: u32) -> FileSystem {
    let mut index = 0;
    while index < NETWORK.len() {
        if NETWORK[index].0 == magic {
            return FileSystem::Network(NETWORK[index].1);
        }
        index += 1;
    }
    if magic == FUSE {
        return FileSystem::User;
    }
    if magic == MEMORY[0] || magic == MEMORY[1] {
        return FileSystem::Memory;
    }
    FileSystem::Other
}

/// What the file system of this path is.
pub fn of(path: &Path) -> FileSystem {
    // The number has 32 bits; the field's width and sign differ between processors.
    rustix::fs::statfs(path).map_or(FileSystem::Other, |found| by_magic(found.f_type as u32))
}

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    point: PathBuf,
    /// `ext4`, `fuse.sshfs`.
    pub kind: String,
    /// Its device, or what stands for one.
    pub source: String,
}

impl Mount {
    /// The one that holds a path: the last of those with the longest mount point.
    pub fn of(path: &Path, mounts: &[Self]) -> Option<Self> {
        let holds = mounts.iter().filter(|mount| path.starts_with(&mount.point));
        holds.max_by_key(|mount| mount.point.components().count()).cloned()
    }
}

/// The mounts of this process; none where the list cannot be read.
pub fn mounts(mountinfo: &Path) -> Vec<Mount> {
    let text = fs::read_to_string(mountinfo).unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

/// `36 35 98:0 /root /point options optional - kind source options` (proc(5)).
fn parse(line: &str) -> Option<Mount> {
    let (place, system) = line.split_once(" - ")?;
    let point = unescaped(place.split(' ').nth(4)?);
    let mut words = system.split(' ');
    let (kind, source) = (words.next()?, words.next()?);
    Some(Mount { point: point.into(), kind: kind.to_owned(), source: unescaped(source) })
}

/// Blanks are written as `\040` and the like.
fn unescaped(text: &str) -> String {
    let (mut out, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match value {
            Some(value) => {
                out.push(value);
                rest = &after[3..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_a_network_are_known_by_their_numbers() {
        assert_eq!(by_magic(0x6969), FileSystem::Network("nfs"));
        assert_eq!(by_magic(0xff53_4d42), FileSystem::Network("cifs"));
        assert_eq!(by_magic(0xef53), FileSystem::Other, "ext4");
        assert_eq!(by_magic(0x6573_5546), FileSystem::User);
        assert_eq!(of(Path::new("/proc")), FileSystem::Other);
    }

    #[test]
    fn a_path_belongs_to_the_mount_that_is_deepest_and_last() {
        let lines = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                     40 22 0:40 / /run/a\\040b rw - fuse.sshfs host:/dir rw\n\
                     41 22 0:41 / /run/a\\040b rw master:2 - btrfs /dev/sdb rw\n\
                     nonsense\n";
        let mounts: Vec<Mount> = lines.lines().filter_map(parse).collect();
        assert_eq!(mounts.len(), 3);
        let kind = |path: &str| Mount::of(Path::new(path), &mounts).expect("mounted").kind;
        assert_eq!(kind("/run/a b/image"), "btrfs");
        assert_eq!(kind("/run/other"), "ext4");
    }
}
