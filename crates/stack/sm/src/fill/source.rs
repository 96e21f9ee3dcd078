//! What a copy or an export reads: images in files and on devices, or an image of a Ceph cluster.

use std::io;
use std::sync::Arc;

use tapio_format::vhd::offline::{Chain, Layer};
use tapio_format::{FileMedium, FormatError};
use tapio_rbd::{Cluster, Image, Mode, RbdError, Target};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, SECTOR_LEN, Span};

use crate::errors;

/// A disk that is read.
pub(crate) enum Source {
    /// A chain of images.
    Files(Chain<FileMedium>),
    /// An image of Ceph, or a snapshot of one.
    Ceph(CephDisk),
}

/// An open image of Ceph.
#[derive(Clone, Debug)]
pub(crate) struct CephDisk {
    pub(crate) image: Arc<Image>,
    len: u64,
}

/// An error of an image of Ceph, as those of other images come.
pub(crate) fn as_format(error: RbdError) -> FormatError {
    let errno = error.errno();
    FormatError::io(error.to_string(), io::Error::from_raw_os_error(errno))
}

impl CephDisk {
    /// Opens the image of a chain; for writing it holds the image's lock.
    ///
    /// # Errors
    /// It is not there, is written by another client, or the cluster does not answer.
    pub(crate) fn open(name: &str, access: Access) -> Result<Self, ApiError> {
        let target: Target = name.parse().map_err(|error| errors::fail(65, error))?;
        let open = || {
            let pool = Cluster::shared(&target.connect)?.pool(&target.pool, target.namespace.as_deref())?;
            let image = match access {
                Access::ReadOnly => pool.open(&target.image, target.snapshot.as_deref(), Mode::Read)?,
                Access::ReadWrite => {
                    let image = pool.open(&target.image, None, Mode::Write)?;
                    image.take_lock()?;
                    image
                }
            };
            let len = image.length()? / SECTOR_LEN * SECTOR_LEN;
            Ok(Self { image: Arc::new(image), len })
        };
        open().map_err(|error: RbdError| match error.errno() {
            libc::EBUSY => errors::fail(46, error),
            _ => errors::fail(65, error),
        })
    }

    /// Where there is data in `span`, of the image itself or of what it begins at.
    pub(crate) fn data(&self, span: Span) -> Result<Vec<Span>, RbdError> {
        let mut found = Vec::new();
        let end = span.start + span.len;
        self.image.diff(None, (span.start, span.len), true, true, |diff| {
            let (start, stop) = (diff.start.max(span.start), (diff.start + diff.len).min(end));
            if diff.has_data && start < stop {
                found.push(Span::new(start, stop - start));
            }
        })?;
        Ok(found)
    }
}

impl Source {
    /// Opens the images of a chain for reading.
    ///
    /// # Errors
    /// Those of the images; a chain that a killed process left as only its successor can show it.
    pub(crate) fn open(spec: &ChainSpec) -> Result<Self, ApiError> {
        if let Some(name) = ceph_name(spec) {
            return CephDisk::open(name, Access::ReadOnly).map(Self::Ceph);
        }
        let chain = Chain::open_spec(spec).map_err(|error| errors::image(65, &error))?;
        for layer in chain.layers() {
            if let Layer::Vhd(image) = layer {
                image.check_settled().map_err(|error| errors::image(46, &error))?;
            }
        }
        Ok(Self::Files(chain))
    }

    /// Bytes.
    pub(crate) fn virtual_len(&self) -> u64 {
        match self {
            Self::Files(chain) => chain.virtual_len(),
            Self::Ceph(disk) => disk.len,
        }
    }

    /// Fills `into` from `at` on.
    ///
    /// # Errors
    /// Those of the images.
    pub(crate) fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), FormatError> {
        match self {
            Self::Files(chain) => chain.read_at(at, into),
            Self::Ceph(disk) => disk.image.read_at(at, into).map_err(as_format),
        }
    }

    /// The chain, if it is one.
    pub(crate) const fn files(&self) -> Option<&Chain<FileMedium>> {
        match self {
            Self::Files(chain) => Some(chain),
            Self::Ceph(_) => None,
        }
    }

    /// Whether no image holds anything of `span`, so that it reads as zero for sure.
    ///
    /// # Errors
    /// Those of the images.
    pub(crate) fn is_empty(&self, span: Span) -> Result<bool, FormatError> {
        match self {
            Self::Files(chain) => Ok(chain.extents(span)?.iter().all(|extent| extent.place.is_none())),
            Self::Ceph(disk) => Ok(disk.data(span).map_err(as_format)?.is_empty()),
        }
    }
}

/// The name of the image of a chain that is one of Ceph.
pub(crate) fn ceph_name(spec: &ChainSpec) -> Option<&str> {
    let leaf = spec.layers.first().filter(|layer| layer.kind == ImageKind::Rbd)?;
    leaf.path.to_str()
}
