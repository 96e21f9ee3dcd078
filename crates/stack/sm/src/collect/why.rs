//! Why an image is left alone.

use std::fmt;

use uuid::Uuid;

/// Why an image is left alone. Shown as a sentence with the next step, where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The SR's `other_config` says so.
    Off {
        /// The key.
        key: &'static str,
    },
    /// The VDI's `sm_config` says so.
    OffForVdi,
    /// Something keeps the chain of a disk as it is.
    Held {
        /// The disk.
        vdi: Uuid,
        /// What does, as "a copy".
        by: String,
    },
    /// An image of the SR cannot be read: it may be based on the one that would go.
    Unreadable {
        /// That image.
        image: Uuid,
    },
    /// The parent would have to grow by more than is free.
    NoSpace {
        /// Bytes.
        needs: u64,
        /// Bytes.
        free: u64,
    },
    /// The image is smaller than what is below it: its disks would become longer.
    Smaller {
        /// The larger image.
        parent: Uuid,
    },
    /// The disk's base copy is raw, and a disk does not become raw.
    RawBase,
    /// The disk is written faster than it is merged.
    Busy,
    /// The chain has no room for the base copy that a merge of a disk makes.
    Deep,
    /// It failed in this collection.
    Failed {
        /// With this error.
        error: String,
    },
}

impl Why {
    /// Whether it may be over without a change of a setting or of the images.
    pub const fn may_pass(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::Busy | Self::NoSpace { .. } | Self::Failed { .. })
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off { key } => write!(f, "switched off by other_config:{key}=false of the SR"),
            Self::OffForVdi => write!(f, "switched off by sm_config:leaf-coalesce=false of the VDI"),
            Self::Held { vdi, by } => write!(f, "{by} has VDI {vdi} open: wait for its end"),
            Self::Unreadable { image } => write!(
                f,
                "image {image} of the SR cannot be read, and may be based on it: see 'vhd-util check', or remove that \
                 image"
            ),
            Self::NoSpace { needs, free } => {
                write!(f, "needs {needs} bytes for a while, and {free} are free: make room in the SR")
            }
            Self::Smaller { parent } => write!(f, "image {parent} below it is larger than what is above it"),
            Self::RawBase => write!(f, "its base copy is raw: copy the VDI to get rid of it"),
            Self::Busy => write!(f, "it is written faster than it is merged"),
            Self::Deep => write!(f, "its chain has no room for one more image until others are merged"),
            Self::Failed { error } => write!(f, "failed: {error}"),
        }
    }
}
