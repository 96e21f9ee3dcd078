//! OVA packages: VMs with their disks as VMware's products, VirtualBox, and others write and read them. They are made
//! of XVA archives and become XVA archives, so that the toolstack makes and reads one kind of stream.
//!
//! ```text
//!   tar
//!     name.ovf          the VMs: processors, memory, disks, networks, in XML (DSP0243, OVF 1.1): `descriptor`
//!     name-disk1.vmdk   a disk, as a VMDK (`vmdk`) or a VHD (`vhd`); in others' packages also raw, or packed by gzip
//!                       (`spool`)
//!     name.mf           the SHA-256 or SHA-1 of each file before it; between the first two, or missing, in others'
//!
//!   XVA -> OVA   [`export()`]: forward, disk by disk; sizes that are known late are written into the file's beginning
//!   OVA -> XVA   [`Package`], [`Import`]: read once for the sums, then disk by disk in the order of the disk
//! ```
//!
//! Packages come from others. Every length, place and count in them is checked against the file and against a bound
//! before memory is taken or anything is read there; names of members are compared, and never used as paths. Nothing is
//! kept of a disk but a piece of it and a table; what gzip packed is unpacked into a temporary file without a name.

mod descriptor;
mod digest;
mod disk_format;
mod error;
mod export;
mod image;
mod import;
mod package;
mod span;
mod spool;
mod tar;
#[cfg(test)]
mod tests;
mod vhd;
mod vmdk;
mod xml;

pub use descriptor::{Descriptor, Drive, FileRef, Firmware, Nic, System, VirtualDisk};
pub use error::OvaError;
pub use export::{DiskFormat, ExportOptions, SumKind, export};
pub use image::Image;
pub use import::Import;
pub use package::{Package, is_package};
pub use span::Span;
pub use spool::unpacked;

/// Bytes of the longest descriptor that is read.
pub const DESCRIPTOR_LEN_MAX: u64 = 4 << 20;

/// Bytes of the longest manifest that is read.
pub const MANIFEST_LEN_MAX: u64 = 1 << 20;

/// Files of a package, at most.
pub const FILES_MAX: usize = 1024;

/// Bytes of the largest disk that is read: 64 TiB.
pub const DISK_LEN_MAX: u64 = 64 << 40;
