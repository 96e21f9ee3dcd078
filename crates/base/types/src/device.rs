//! How a disk becomes a block device of this host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The way a disk appears as a device of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceHow {
    /// The first of ublk, nbd and fuse that works here.
    #[default]
    Auto,
    /// The kernel's user-space block driver: `/dev/ublkbN`.
    Ublk,
    /// The kernel's NBD client on a socket pair: `/dev/nbdN`.
    Nbd,
    /// A file exported by FUSE under a loop device: `/dev/loopN`.
    Fuse,
    /// The exported file alone, without a loop device.
    FuseFile,
}

impl DeviceHow {
    /// Every way, in the order of their names' appearance in help texts.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Ublk, Self::Nbd, Self::Fuse, Self::FuseFile];

    /// Its name in commands and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Fuse => "fuse",
            Self::FuseFile => "fuse-file",
        }
    }
}

impl fmt::Display for DeviceHow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceHow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|how| how.name() == text)
            .ok_or_else(|| format!("'{text}' is no kind of device: give auto, ublk, nbd, fuse or fuse-file"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for how in DeviceHow::ALL {
            assert_eq!(how.name().parse(), Ok(how));
        }
        assert!("loop".parse::<DeviceHow>().unwrap_err().contains("fuse-file"));
    }
}
