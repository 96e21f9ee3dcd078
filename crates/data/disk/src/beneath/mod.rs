//! What lies beneath an image: whether it is reached over a network, and which device holds it in the end.
//!
//! ```text
//!   image ─▶ file system ─▶ block device ─▶ slaves (dm, md) ─▶ disk, or the file of a loop device ─▶ ...
//!              statfs, mountinfo      sysfs                         a file system again
//! ```
//!
//! Two rules need it. Pages of a guest that are only mapped must not go to storage that the kernel reaches over a
//! network: it may send them again after the guest got its answer and uses the page for something else, or when the
//! page is unmapped. And disks that share a device share its throughput (`tapio_stat::share`), unless the kernel's
//! scheduler of that device does that already.

mod file_system;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tapio_types::{ChainSpec, LayerSpec};

use file_system::{FileSystem, Mount, mounts};

/// Stacks of devices are not deeper.
const DEPTH_MAX: usize = 16;
/// Schedulers of the kernel that share a device fairly between processes.
const FAIR: [&str; 2] = ["bfq", "cfq"];

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beneath {
    /// Why the storage counts as reached over a network.
    pub network: Option<String>,
    /// Numbers of the disks that hold it, `8:0`, or of the file system where no device is known.
    pub disks: BTreeSet<String>,
    /// The kernel's scheduler that shares them already, and of which device.
    pub fair: Option<String>,
}

impl Beneath {
    /// A name for what is shared: images with the same name are on the same disks. `None` where nothing is known.
    pub fn name(&self) -> Option<String> {
        let name = self.disks.iter().map(|disk| disk.replace(':', "-")).collect::<Vec<_>>().join("_");
        (!name.is_empty() && name.len() <= 64).then_some(name)
    }

    fn join(&mut self, other: Self, first: bool) {
        self.network = self.network.take().or(other.network);
        self.disks.extend(other.disks);
        // All of the disks must be shared, not one of them.
        self.fair = match (self.fair.take(), other.fair) {
            (fair, Some(other)) if first => fair.or(Some(other)),
            (Some(fair), Some(_)) => Some(fair),
            _ => None,
        };
    }
}

/// Where the kernel tells of devices and mounts: elsewhere in tests.
#[derive(Clone, Debug)]
pub struct Sources {
    sys: PathBuf,
    mountinfo: PathBuf,
}

impl Default for Sources {
    fn default() -> Self {
        Self { sys: "/sys".into(), mountinfo: "/proc/self/mountinfo".into() }
    }
}

impl Sources {
    /// Why data of this chain goes over a network, with the image that does.
    pub fn network_of(&self, chain: &ChainSpec) -> Option<String> {
        let reason = |layer: &LayerSpec| self.beneath(layer).network.map(|why| format!("{layer}: {why}"));
        chain.layers.iter().find_map(reason)
    }

    /// What lies beneath one image. What cannot be looked at is not known to be anything.
    pub fn beneath(&self, layer: &LayerSpec) -> Beneath {
        if !layer.kind.is_local() {
            return Beneath { network: Some("an NBD export".into()), ..Beneath::default() };
        }
        self.of_path(&layer.path, 0)
    }

    fn of_path(&self, path: &Path, depth: usize) -> Beneath {
        let (Ok(metadata), Ok(path)) = (path.metadata(), path.canonicalize()) else {
            return Beneath::default();
        };
        if metadata.file_type().is_block_device() {
            return self.of_device(&number(metadata.rdev()), depth);
        }
        let (device, system) = (number(metadata.dev()), file_system::of(&path));
        let mount = || Mount::of(&path, &mounts(&self.mountinfo));
        match system {
            FileSystem::Network(name) => Beneath {
                network: Some(format!("a file system of the kind {name}")),
                disks: BTreeSet::from([device]),
                fair: None,
            },
            FileSystem::User => {
                let mount = mount();
                if let Some(block) = mount.as_ref().filter(|mount| mount.kind == "fuseblk") {
                    return self.of_source(&block.source, device, depth);
                }
                let kind = mount.map_or_else(|| "fuse".to_owned(), |mount| mount.kind);
                Beneath {
                    network: Some(format!(
                        "a file system of the kind {kind}, whose process may reach it over a network"
                    )),
                    disks: BTreeSet::from([device]),
                    fair: None,
                }
            }
            FileSystem::Memory => Beneath::default(),
            FileSystem::Other if self.has_device(&device) => self.of_device(&device, depth),
            // The number is the file system's own (btrfs): the mount has the device.
            FileSystem::Other => match mount() {
                Some(mount) => self.of_source(&mount.source, device, depth),
                None => Beneath { disks: BTreeSet::from([device]), ..Beneath::default() },
            },
        }
    }

    fn of_source(&self, source: &str, device: String, depth: usize) -> Beneath {
        match Path::new(source).metadata() {
            Ok(found) if found.file_type().is_block_device() => self.of_device(&number(found.rdev()), depth),
            _ => Beneath { disks: BTreeSet::from([device]), ..Beneath::default() },
        }
    }

    fn has_device(&self, device: &str) -> bool {
        self.sys.join("dev/block").join(device).exists()
    }

    /// What lies beneath the block device of this number.
    fn of_device(&self, device: &str, depth: usize) -> Beneath {
        let known = Beneath { disks: BTreeSet::from([device.to_owned()]), ..Beneath::default() };
        let Ok(mut dir) = self.sys.join("dev/block").join(device).canonicalize() else { return known };
        if depth > DEPTH_MAX {
            return known;
        }
        if dir.join("partition").exists() {
            dir.pop();
        }
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let fair = scheduler(&dir).map(|scheduler| format!("{scheduler} of {name}"));
        if let Some(why) = network_device(&dir, &name) {
            let own = fs::read_to_string(dir.join("dev")).map_or_else(|_| device.to_owned(), trimmed);
            return Beneath { network: Some(why), disks: BTreeSet::from([own]), fair };
        }
        let mut found = Beneath::default();
        if let Ok(file) = fs::read_to_string(dir.join("loop/backing_file")) {
            found = self.of_path(Path::new(file.trim_end_matches('\n')), depth + 1);
            // The loop device's own threads send what all of its users ask for: a scheduler below sees one process.
            found.fair = None;
        } else {
            let slaves = fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
            let numbers = slaves.filter_map(|slave| fs::read_to_string(slave.path().join("dev")).ok());
            for (index, slave) in numbers.enumerate() {
                found.join(self.of_device(slave.trim(), depth + 1), index == 0);
            }
        }
        if found.disks.is_empty() {
            let own = fs::read_to_string(dir.join("dev")).map_or_else(|_| device.to_owned(), trimmed);
            found.disks.insert(own);
        }
        // What goes through this device is shared here, whatever is below.
        found.fair = fair.or(found.fair);
        found
    }
}

fn trimmed(text: String) -> String {
    text.trim().to_owned()
}

fn number(device: u64) -> String {
    format!("{}:{}", libc::major(device), libc::minor(device))
}

/// The scheduler in force, if it is a fair one: `mq-deadline [bfq] none`.
fn scheduler(dir: &Path) -> Option<&'static str> {
    let text = fs::read_to_string(dir.join("queue/scheduler")).ok()?;
    FAIR.into_iter().find(|fair| text.contains(&format!("[{fair}]")))
}

/// Why a disk is at the other end of a network, by its place in sysfs.
fn network_device(dir: &Path, name: &str) -> Option<String> {
    let numbered = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    for (prefix, kind) in [("nbd", "an NBD device"), ("rbd", "a Ceph RBD image"), ("drbd", "a DRBD device")] {
        if numbered(prefix) {
            return Some(format!("{name} is {kind}"));
        }
    }
    if name.starts_with("etherd!") {
        return Some(format!("{name} is an ATA-over-Ethernet disk"));
    }
    for part in dir.components().filter_map(|part| part.as_os_str().to_str()) {
        let is = |prefix: &str| {
            part.strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        if is("session") {
            return Some(format!("{name} is a disk of the iSCSI session {part}"));
        }
        if is("rport-") {
            return Some(format!("{name} is a disk of the Fibre Channel port {part}"));
        }
    }
    nvme_transport(dir).map(|transport| format!("{name} is an NVMe namespace over {transport}"))
}

/// The transport of an NVMe namespace that is not on this host's bus.
fn nvme_transport(dir: &Path) -> Option<String> {
    let device = dir.join("device");
    let own = fs::read_to_string(device.join("transport"));
    // Of a namespace with several paths `device` is the subsystem, which has its controllers in it.
    let paths = fs::read_dir(&device).into_iter().flatten().flatten();
    let of_paths = paths.filter_map(|path| fs::read_to_string(path.path().join("transport")).ok());
    own.into_iter()
        .chain(of_paths)
        .map(trimmed)
        .find(|transport| matches!(transport.as_str(), "tcp" | "rdma" | "fc"))
}

#[cfg(test)]
mod tests;
