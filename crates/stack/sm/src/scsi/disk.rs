//! SCSI disks: which there are, and what is known of one.

use std::fmt;
use std::path::{Path, PathBuf};

use super::tree::Tree;
use super::vpd::Pages;

/// The place of a disk: host, channel, target and LUN, as `2:0:0:5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: u32,
    pub(crate) channel: u32,
    pub(crate) target: u32,
    pub(crate) lun: u64,
}

impl Address {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let mut next = || parts.next().and_then(|part| part.parse::<u64>().ok());
        let (host, channel, target, lun) = (next()?, next()?, next()?, next()?);
        let small = |number: u64| u32::try_from(number).ok();
        let address = Self { host: small(host)?, channel: small(channel)?, target: small(target)?, lun };
        (address.to_string() == text).then_some(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.host, self.channel, self.target, self.lun)
    }
}

/// One path to a LUN: a disk as this host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) address: Address,
    /// As `sdb`.
    pub(crate) name: String,
    /// The identity of what it leads to.
    pub(crate) scsi_id: String,
    /// Its directory in sysfs.
    directory: PathBuf,
}

impl Disk {
    /// The disk at an address; none where it has no identity, is no disk, or is just being made or removed.
    pub(crate) fn at(tree: &Tree, address: Address) -> Option<Self> {
        Self::read(tree, address, &tree.sys("class/scsi_device").join(address.to_string()).join("device"))
    }

    fn read(tree: &Tree, address: Address, directory: &Path) -> Option<Self> {
        let name = tree.names(&directory.join("block")).into_iter().next()?;
        let scsi_id = Attributes::read(tree, directory).pages().scsi_id()?;
        Some(Self { address, name, scsi_id, directory: directory.to_path_buf() })
    }

    /// As `/dev/sdb`.
    pub(crate) fn node(&self, tree: &Tree) -> PathBuf {
        tree.dev(&self.name)
    }

    /// Bytes.
    pub(crate) fn size(&self, tree: &Tree) -> u64 {
        let sectors = tree.text(&self.directory.join("block").join(&self.name).join("size"));
        sectors.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0).saturating_mul(512)
    }

    pub(crate) fn vendor(&self, tree: &Tree) -> String {
        tree.text(&self.directory.join("vendor")).unwrap_or_default()
    }

    pub(crate) fn serial(&self, tree: &Tree) -> String {
        Attributes::read(tree, &self.directory).pages().serial()
    }

    /// Whether the kernel uses this path now.
    pub(crate) fn is_running(&self, tree: &Tree) -> bool {
        tree.text(&self.directory.join("state")).is_none_or(|state| state == "running")
    }

    /// Has the kernel ask the disk for its size and names again.
    pub(crate) fn ask_again(&self, tree: &Tree) {
        // One that is gone is found by the next look.
        let _ = tree.write(&self.directory.join("rescan"), "1");
    }
}

struct Attributes {
    designators: Vec<u8>,
    serial: Vec<u8>,
    vendor: String,
    model: String,
}

impl Attributes {
    fn read(tree: &Tree, directory: &Path) -> Self {
        Self {
            designators: tree.bytes(&directory.join("vpd_pg83")).unwrap_or_default(),
            serial: tree.bytes(&directory.join("vpd_pg80")).unwrap_or_default(),
            vendor: tree.text(&directory.join("vendor")).unwrap_or_default(),
            model: tree.text(&directory.join("model")).unwrap_or_default(),
        }
    }

    fn pages(&self) -> Pages<'_> {
        Pages {
            designators: &self.designators,
            serial: &self.serial,
            vendor: &self.vendor,
            model: &self.model,
        }
    }
}

/// The disks of a target, whose directory is `targetH:C:T`; in order of their LUNs.
pub(crate) fn of_target(tree: &Tree, directory: &Path) -> Vec<Disk> {
    let addresses = tree.names(directory).into_iter().filter_map(|name| Address::parse(&name));
    let mut disks: Vec<Disk> = addresses
        .filter_map(|address| Disk::read(tree, address, &directory.join(address.to_string())))
        .collect();
    disks.sort_by_key(|disk| disk.address);
    disks
}

/// Every SCSI disk of this host, in order of their addresses.
pub(crate) fn all(tree: &Tree) -> Vec<Disk> {
    let addresses = tree.names(&tree.sys("class/scsi_disk")).into_iter();
    let mut disks: Vec<Disk> = addresses
        .filter_map(|name| Address::parse(&name))
        .filter_map(|address| {
            Disk::read(tree, address, &tree.sys("class/scsi_disk").join(address.to_string()).join("device"))
        })
        .collect();
    disks.sort_by_key(|disk| disk.address);
    disks
}
