//! What an image is and how a chain of them is named.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the bytes of an image are to be understood.
///
/// Always stated by the caller that opens the image, never guessed from bytes that a guest can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageKind {
    /// The disk's bytes as they are. tapdisk calls this type `aio`.
    Raw,
    /// Virtual Hard Disk, fixed, dynamic or differencing.
    Vhd,
    /// The bytes of a remote export as they are. What names it stands where other kinds have a path:
    /// `nbd:nbd://host/export`, or tapdisk's `nbd:/path/to/socket` and `nbd:address:port`.
    Nbd,
    /// The bytes of an image of a Ceph cluster as they are. Its name, too, stands where other kinds have a path:
    /// `rbd:pool/image`, or `rbd:pool/namespace/image@snapshot?conf=/etc/ceph/ceph.conf`.
    Rbd,
}

impl ImageKind {
    /// Whether the image is a file or a block device of this host, so that its name is a path.
    pub const fn is_local(self) -> bool {
        !matches!(self, Self::Nbd | Self::Rbd)
    }
}

impl fmt::Display for ImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Vhd => "vhd",
            Self::Nbd => "nbd",
            Self::Rbd => "rbd",
        })
    }
}

/// Why a `type:/path` argument was not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseImageError(String);

impl fmt::Display for ParseImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ParseImageError {}

impl FromStr for ImageKind {
    type Err = ParseImageError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "raw" | "aio" => Ok(Self::Raw),
            "vhd" => Ok(Self::Vhd),
            "nbd" => Ok(Self::Nbd),
            "rbd" => Ok(Self::Rbd),
            _ => {
                let why = format!(
                    "unknown image type '{name}': use 'vhd', 'aio' (raw), 'nbd' (a remote export) or 'rbd' (of Ceph)"
                );
                Err(ParseImageError(why))
            }
        }
    }
}

/// Splits `type:/path` as `tap-ctl -a` takes it.
pub fn parse_type_and_path(text: &str) -> Result<LayerSpec, ParseImageError> {
    let (kind, path) = text.split_once(':').ok_or_else(|| {
        ParseImageError(format!("'{text}' is not of the form type:/path, as vhd:/disks/a.vhd"))
    })?;
    if path.is_empty() {
        return Err(ParseImageError(format!("'{text}' names no path")));
    }
    Ok(LayerSpec { kind: kind.parse()?, path: Path::new(path).to_path_buf() })
}

/// Whether the opener will write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Reads only; nothing on disk changes.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// How to read it.
    pub kind: ImageKind,
    /// Where it is; for a kind that is not local, what names it.
    pub path: PathBuf,
}

/// As `tap-ctl` takes and lists it: storage managers know raw images by tapdisk's word alone.
impl fmt::Display for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ImageKind::Raw => write!(f, "aio:{}", self.path.display()),
            kind => write!(f, "{kind}:{}", self.path.display()),
        }
    }
}

/// The images of a disk, leaf first, base last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainSpec {
    /// Leaf first.
    pub layers: Vec<LayerSpec>,
    /// How the leaf is opened; every layer below it is read only.
    pub access: Access,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_image_is_listed_by_the_name_that_storage_managers_know() {
        for text in ["aio:/d/a.img", "raw:/d/a.img"] {
            let layer = parse_type_and_path(text).expect("an image");
            assert_eq!((layer.kind, layer.to_string().as_str()), (ImageKind::Raw, "aio:/d/a.img"));
        }
        assert_eq!(parse_type_and_path("vhd:/d/a.vhd").expect("an image").to_string(), "vhd:/d/a.vhd");
    }
}
