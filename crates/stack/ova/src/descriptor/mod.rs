//! The descriptor: what VMs a package has, and which of its files are their disks.

mod read;
mod units;
mod write;

pub(crate) use write::{Written, write};

/// A file of the package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRef {
    /// As disks name it.
    pub id: String,
    /// The name of the member.
    pub href: String,
    /// Its bytes, if the descriptor says.
    pub size: Option<u64>,
    /// Whether gzip packed it, as the descriptor says.
    pub(crate) is_packed: bool,
    /// Why it cannot be read, if it cannot.
    pub(crate) unread: Option<String>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualDisk {
    /// As drives name it.
    pub id: String,
    /// The id of its file; a disk without one is empty.
    pub file: Option<String>,
    /// Bytes as a guest sees it.
    pub capacity: Option<u64>,
    /// Whether it is a difference to another disk.
    pub(crate) has_parent: bool,
}

/// What a VM is started by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Firmware {
    /// A BIOS.
    #[default]
    Bios,
    /// UEFI.
    Uefi,
}

/// A drive of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drive {
    /// The index of its disk among those of the descriptor; none of a CD drive.
    pub disk: Option<usize>,
    /// Where it is: the order of its controller, and its address there.
    pub(crate) place: (u64, u64),
}

/// A network interface of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// The name of the network.
    pub network: String,
    /// Its hardware address, if one is given.
    pub mac: String,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct System {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Virtual processors.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// What it is started by.
    pub firmware: Firmware,
    /// Its drives, in their order.
    pub drives: Vec<Drive>,
    /// Its network interfaces, in their order.
    pub nics: Vec<Nic>,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Files of the package.
    pub files: Vec<FileRef>,
    /// Disks.
    pub disks: Vec<VirtualDisk>,
    /// VMs.
    pub systems: Vec<System>,
}
