//! The formats that disks have in packages that are written.

/// What the files of disks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// Stream-optimised VMDKs, which every reader knows.
    #[default]
    Vmdk,
    /// Dynamic VHDs, for XenServer and Hyper-V.
    Vhd,
}

impl DiskFormat {
    /// The end of a file's name.
    pub(crate) const fn ending(self) -> &'static str {
        match self {
            Self::Vmdk => "vmdk",
            Self::Vhd => "vhd",
        }
    }
}
