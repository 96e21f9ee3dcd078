//! Devices by their names, numbers and nodes, as sysfs has them.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes of the sectors that sysfs counts in, whatever sectors a device has.
const SECTOR_LEN: u64 = 512;

/// Where devices are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    root: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self::below("/")
    }
}

/// What a device is, as far as its settings depend on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A local disk with moving heads.
    Rotating,
    /// A local disk without.
    SolidState,
    /// A disk of an iSCSI target, or behind Fibre Channel.
    San,
    /// A disk of a storage cluster or another host, by its own driver: `rbd`, `nbd`.
    Network,
    /// Software RAID.
    Raid,
    /// A device of device-mapper: a logical volume, a multipath map, an encrypted device.
    Mapped,
    /// A file as a device.
    Loop,
    /// A drive for CDs and DVDs.
    Cd,
    /// Memory.
    Memory,
}

impl Kind {
    /// As `VDI.sm_config:device-kind` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rotating => "rotating",
            Self::SolidState => "solid-state",
            Self::San => "san",
            Self::Network => "network",
            Self::Raid => "raid",
            Self::Mapped => "mapped",
            Self::Loop => "loop",
            Self::Cd => "cd",
            Self::Memory => "memory",
        }
    }
}

/// A block device, as it was when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// The kernel's name, as `sdb1`.
    pub name: String,
    /// Its directory in sysfs.
    pub place: PathBuf,
    /// That of the disk: its own, unless it is a partition.
    pub disk_place: PathBuf,
    /// Its node.
    pub node: PathBuf,
    /// Major and minor number.
    pub numbers: (u32, u32),
    /// Bytes.
    pub size: u64,
    /// What it is; of a partition, what its disk is.
    pub kind: Kind,
    /// Its number, if it is a partition.
    pub partition: Option<u32>,
    /// Whether the kernel refuses writes.
    pub is_read_only: bool,
    /// Bytes of a sector.
    pub sector_len: u32,
    /// Bytes that the device writes at once without reading before.
    pub physical_sector_len: u32,
    /// Bytes that one discard may have; 0 for a device that takes nothing back.
    pub discard_max: u64,
}

impl BlockDevice {
    /// The name of the disk: its own, unless it is a partition.
    pub fn disk(&self) -> String {
        name_of(&self.disk_place)
    }
}

fn name_of(place: &Path) -> String {
    // A slash in a name is an exclamation mark in sysfs.
    place.file_name().unwrap_or_default().to_string_lossy().replace('!', "/")
}

impl Host {
    /// Looks below another root, as a test does.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The path below the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Whether this is the host itself, whose nodes are devices.
    pub fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }

    /// A file of sysfs without the blanks around it; none where it is not there or empty.
    pub fn text(path: &Path) -> Option<String> {
        let text = fs::read_to_string(path).ok()?;
        let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// A number in a file of sysfs.
    pub fn number(path: &Path) -> Option<u64> {
        Self::text(path)?.parse().ok()
    }

    /// Every device that has a size, by name.
    pub fn all(&self) -> Vec<BlockDevice> {
        let entries = fs::read_dir(self.path("sys/class/block"));
        let mut all: Vec<_> = entries
            .map(|entries| entries.flatten().filter_map(|entry| self.at_place(&entry.path())).collect())
            .unwrap_or_default();
        all.retain(|device: &BlockDevice| device.size > 0);
        all.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        all
    }

    /// The device of this name, with its size or without.
    pub fn named(&self, name: &str) -> Option<BlockDevice> {
        let is_name = !name.is_empty() && name != ".." && name != ".";
        let place = self.path("sys/class/block").join(name.replace('/', "!"));
        is_name.then(|| self.at_place(&place)).flatten()
    }

    /// The device with these numbers.
    pub fn numbered(&self, (major, minor): (u32, u32)) -> Option<BlockDevice> {
        self.at_place(&self.path("sys/dev/block").join(format!("{major}:{minor}")))
    }

    /// The device that a path leads to.
    ///
    /// # Errors
    /// It leads nowhere, or to something else.
    pub fn at(&self, path: &Path) -> io::Result<BlockDevice> {
        let data = fs::metadata(path)?;
        let found = if data.file_type().is_block_device() {
            self.numbered((libc::major(data.rdev()), libc::minor(data.rdev())))
        } else if self.is_real() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no block device"));
        } else {
            self.named(&name_of(&fs::canonicalize(path)?))
        };
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the kernel has no such device any more"))
    }

    fn at_place(&self, place: &Path) -> Option<BlockDevice> {
        let place = fs::canonicalize(place).ok()?;
        let dev = Self::text(&place.join("dev"))?;
        let (major, minor) = dev.split_once(':')?;
        let partition = Self::number(&place.join("partition")).and_then(|number| u32::try_from(number).ok());
        let disk_place = if partition.is_some() { place.parent()?.to_path_buf() } else { place.clone() };
        let queue = disk_place.join("queue");
        let length = |file: &str, default| {
            Self::number(&queue.join(file)).and_then(|len| u32::try_from(len).ok()).unwrap_or(default)
        };
        let name = name_of(&place);
        let is_read_only = Self::number(&place.join("ro")).unwrap_or(0) != 0;
        let kind = kind_of(&disk_place);
        Some(BlockDevice {
            node: self.path("dev").join(&name),
            numbers: (major.parse().ok()?, minor.parse().ok()?),
            size: Self::number(&place.join("size")).unwrap_or(0).saturating_mul(SECTOR_LEN),
            is_read_only: is_read_only || kind == Kind::Cd,
            kind,
            partition,
            sector_len: length("logical_block_size", 512),
            physical_sector_len: length("physical_block_size", 512),
            discard_max: Self::number(&queue.join("discard_max_bytes")).unwrap_or(0),
            name,
            place,
            disk_place,
        })
    }

    /// Bytes of a device at an offset, fewer where it ends.
    ///
    /// # Errors
    /// The device's.
    pub fn read(&self, device: &BlockDevice, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut file = File::open(&device.node)?;
        file.seek(SeekFrom::Start(at))?;
        let mut bytes = Vec::with_capacity(len);
        file.take(len as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

fn kind_of(disk_place: &Path) -> Kind {
    let name = name_of(disk_place);
    let has = |file: &str| disk_place.join(file).exists();
    let is_below = |prefix: &str| {
        disk_place.components().any(|part| {
            let part = part.as_os_str().to_string_lossy();
            part.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    match () {
        () if has("dm") => Kind::Mapped,
        () if has("md") => Kind::Raid,
        () if has("loop") || name.starts_with("loop") => Kind::Loop,
        () if name.starts_with("rbd") || name.starts_with("nbd") || name.starts_with("drbd") => Kind::Network,
        () if name.starts_with("ram") || name.starts_with("zram") => Kind::Memory,
        () if Host::number(&disk_place.join("device/type")) == Some(5) || name.starts_with("sr") => Kind::Cd,
        // The transport's session, or the port of the other side, is above the disk.
        () if is_below("session") || is_below("rport-") => Kind::San,
        () if Host::number(&disk_place.join("queue/rotational")) == Some(1) => Kind::Rotating,
        () => Kind::SolidState,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A host whose sysfs is files of a directory.
    pub struct Made {
        dir: tempfile::TempDir,
        pub host: Host,
    }

    impl Made {
        pub fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for made in ["sys/class/block", "sys/dev/block", "dev", "proc/self"] {
                fs::create_dir_all(dir.path().join(made)).unwrap();
            }
            let host = Host::below(dir.path());
            Self { dir, host }
        }

        pub fn root(&self) -> &Path {
            self.dir.path()
        }

        /// Adds a device: its place below `sys/devices`, and files of its directory.
        pub fn add(&self, place: &str, numbers: &str, files: &[(&str, &str)]) {
            let at = self.root().join("sys/devices").join(place);
            fs::create_dir_all(&at).unwrap();
            let name = at.file_name().unwrap().to_owned();
            for (file, text) in [("dev", numbers), ("size", "2048")].iter().chain(files) {
                let path = at.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}\n")).unwrap();
            }
            symlink(&at, self.root().join("sys/class/block").join(&name)).unwrap();
            symlink(&at, self.root().join("sys/dev/block").join(numbers)).unwrap();
            fs::write(self.root().join("dev").join(&name), [0; 4096]).unwrap();
        }

        pub fn device(&self, name: &str) -> BlockDevice {
            self.host.named(name).unwrap()
        }
    }

    #[test]
    fn a_device_is_known_by_name_number_and_node() {
        let made = Made::new();
        let files = [("queue/rotational", "1"), ("queue/discard_max_bytes", "0"), ("size", "4096")];
        made.add("pci0/host0/target0/block/sda", "8:0", &files);
        made.add("pci0/host0/target0/block/sda/sda1", "8:1", &[("partition", "1"), ("ro", "1")]);
        made.add("virtual/block/loop7", "7:7", &[("size", "0")]);
        let names: Vec<_> = made.host.all().into_iter().map(|device| device.name).collect();
        assert_eq!(names, ["sda", "sda1"], "what has no size is no device");
        let part = made.device("sda1");
        assert_eq!((part.partition, part.disk(), part.kind), (Some(1), "sda".into(), Kind::Rotating));
        assert!(part.is_read_only && part.size == 1 << 20);
        assert_eq!(made.host.numbered((8, 1)), Some(part.clone()));
        symlink(&part.node, made.root().join("dev/link")).unwrap();
        assert_eq!(made.host.at(&made.root().join("dev/link")).unwrap(), part);
        assert!(made.host.at(&made.root().join("dev/none")).is_err());
        assert_eq!(made.host.named(".."), None);
    }

    #[test]
    fn kinds_are_told_by_where_a_disk_is() {
        let made = Made::new();
        made.add("platform/host3/session1/target3:0:0/block/sdb", "8:16", &[("queue/rotational", "1")]);
        made.add("pci0/host4/rport-4:0-1/target/block/sdc", "8:32", &[]);
        made.add("virtual/block/dm-0", "253:0", &[("dm/name", "x")]);
        made.add("virtual/block/md0", "9:0", &[("md/level", "raid1")]);
        made.add("virtual/block/loop0", "7:0", &[("loop/backing_file", "/x")]);
        made.add("rbd/block/rbd0", "250:0", &[]);
        made.add("pci0/nvme0/nvme0n1", "259:0", &[("queue/rotational", "0")]);
        made.add("pci0/host1/block/sr0", "11:0", &[("device/type", "5")]);
        let kind = |name: &str| made.device(name).kind;
        assert_eq!((kind("sdb"), kind("sdc"), kind("rbd0")), (Kind::San, Kind::San, Kind::Network));
        assert_eq!((kind("dm-0"), kind("md0"), kind("loop0")), (Kind::Mapped, Kind::Raid, Kind::Loop));
        assert_eq!((kind("nvme0n1"), kind("sr0")), (Kind::SolidState, Kind::Cd));
        assert!(made.device("sr0").is_read_only);
    }
}
