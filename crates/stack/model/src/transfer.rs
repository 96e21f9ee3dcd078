//! Disks that come and go over HTTP, as the server of the API and the toolstack speak of them.

use crate::ApiError;

/// How a disk is written as a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the disk.
    Raw,
    /// A VHD.
    Vhd,
    /// Pieces with their places; imports alone.
    Chunked,
}

impl ImageFormat {
    /// The suffix of a file.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Raw | Self::Chunked => "raw",
            Self::Vhd => "vhd",
        }
    }
}

/// How an archive of a VM is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArchiveCompression {
    /// Not at all.
    #[default]
    None,
    /// By gzip.
    Gzip,
    /// By zstd.
    Zstd,
}

/// What a client asks for. VDIs and SRs are references or UUIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// A VDI is sent.
    Export {
        /// It.
        vdi: String,
        /// The VDI that a VHD is the difference to.
        base: Option<String>,
        /// How.
        format: ImageFormat,
        /// The byte of the stream with which it begins.
        start: u64,
    },
    /// A VDI is received.
    Import {
        /// It; none for a new one.
        vdi: Option<String>,
        /// The SR of a new one.
        sr: Option<String>,
        /// How.
        format: ImageFormat,
        /// The byte of a raw disk with which the stream begins.
        start: u64,
        /// Bytes of the stream, where its sender knows them.
        len: Option<u64>,
    },
    /// A VM is sent as an XVA archive.
    ExportVm {
        /// It.
        vm: String,
        /// How the archive is compressed.
        compression: ArchiveCompression,
        /// Whether the archive says in which state the VM is.
        preserve_power_state: bool,
    },
    /// VMs are received as an XVA archive.
    ImportVm {
        /// The SR of their disks; none for the pool's default.
        sr: Option<String>,
        /// Whether they keep their UUIDs and addresses.
        restore: bool,
        /// Whether wrong checksums and versions that are not newer are taken.
        force: bool,
    },
    /// The records of VMs are sent, without the contents of their disks.
    ExportMetadata {
        /// The VM; none for all but the templates that came with the toolstack.
        vm: Option<String>,
    },
    /// The records of VMs are received, whose disks are here.
    ImportMetadata {
        /// Whether they keep their UUIDs and addresses.
        restore: bool,
        /// Whether disks that are not here are left out, and versions that are not newer are taken.
        force: bool,
        /// Whether it is only looked whether it could be done.
        dry_run: bool,
        /// UUIDs of disks of the archive, and those of the disks here that stand for them.
        vdis: Vec<(String, String)>,
    },
    /// The memory of a guest is received that comes from another host of the pool.
    Memory {
        /// The VM's reference.
        vm: String,
    },
    /// The database is sent.
    ExportDatabase,
    /// The database is received.
    ImportDatabase {
        /// Whether it is only looked what would change.
        dry_run: bool,
        /// Whether it may be of another pool, of a newer version, or odd.
        force: bool,
    },
    /// This host is sent: its database, and the files of its daemon.
    ExportHost,
    /// The same is received.
    ImportHost {
        /// Whether it is only looked what would change.
        dry_run: bool,
        /// Whether it may be of another host, of a newer version, or odd.
        force: bool,
    },
    /// Nothing: it is only looked whether this import would be accepted.
    Probe {
        /// The VDI; none for a new one.
        vdi: Option<String>,
    },
}

/// What a transfer is about, which decides the host that does it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferPlace {
    /// A VDI, by reference or UUID.
    Vdi(String),
    /// An SR, by reference or UUID.
    Sr(String),
    /// A VM, by reference or UUID.
    Vm(String),
}

/// Another host that does a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherHost {
    /// `ADDRESS` or `ADDRESS:PORT` of its HTTPS.
    pub address: String,
    /// What the client is to name there as its session: it is good for this transfer alone.
    pub session: String,
}

/// A request for a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The session.
    pub session: String,
    /// The task that a client made for it.
    pub task: Option<String>,
    /// What is asked for, or what is wrong with it: that is how the task ends.
    pub asked: Result<Asked, ApiError>,
}

/// A transfer that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Its task.
    pub task: String,
    /// The UUID of the VDI or of the VM; none of one that is made.
    pub vdi: Option<String>,
}
