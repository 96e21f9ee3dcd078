//! Where a copy goes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tapio_format::vhd::DiskType;
use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_format::{FileMedium, FormatError, FormatErrorKind, Medium};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, Span};

use super::Filled;
use super::log::ImageLog;
use super::source::{CephDisk, Source, as_format, ceph_name};
use crate::errors;

/// The leaf that is written, and the whole disk as it was before.
pub(crate) struct Target {
    leaf: Leaf,
    path: PathBuf,
    before: Source,
    is_fresh: bool,
    scratch: Vec<u8>,
    /// The log of changed blocks, if they are tracked.
    log: Option<ImageLog>,
}

enum Leaf {
    Raw(FileMedium),
    Vhd(Box<Image<FileMedium>>),
    Ceph(CephDisk),
}

impl Target {
    /// # Errors
    /// `VDI_IN_USE`-like where a process has it open, those of the images.
    pub(crate) fn open(spec: &ChainSpec) -> Result<Self, ApiError> {
        let fail = |error: FormatError| match error.errno() {
            libc::EBUSY => errors::fail(46, error),
            _ => errors::image(65, &error),
        };
        let Some(layer) = spec.layers.first() else {
            return Err(ApiError::internal("a copy into a chain without images"));
        };
        let path = layer.path.clone();
        if let Some(name) = ceph_name(spec) {
            return Self::in_ceph(name, path);
        }
        let leaf = match layer.kind {
            ImageKind::Vhd => Leaf::Vhd(Box::new(Image::open(&path, OpenOptions::WRITE).map_err(fail)?)),
            ImageKind::Raw => Leaf::Raw(FileMedium::open(&path, Access::ReadWrite).map_err(fail)?),
            ImageKind::Nbd | ImageKind::Rbd => {
                return Err(errors::fail(66, "a copy goes into a raw image or a VHD"));
            }
        };
        let is_fresh = match &leaf {
            Leaf::Vhd(image) => {
                image.footer().disk_type == DiskType::Dynamic && image.allocated_blocks() == 0
            }
            Leaf::Raw(medium) => {
                medium.file().metadata().is_ok_and(|data| data.is_file() && data.blocks() == 0)
            }
            Leaf::Ceph(_) => false,
        };
        let before = Chain::open_spec(spec).map_err(fail)?;
        let log = ImageLog::open(&path, before.virtual_len()).map_err(fail)?;
        let before = Source::Files(before);
        Ok(Self { leaf, path, before, is_fresh, scratch: Vec::new(), log })
    }

    /// An image of Ceph, whose changes the cluster itself knows.
    fn in_ceph(name: &str, path: PathBuf) -> Result<Self, ApiError> {
        let disk = CephDisk::open(name, Access::ReadWrite)?;
        let before = Source::Ceph(disk.clone());
        let all = Span::new(0, before.virtual_len());
        let is_fresh = before.is_empty(all).map_err(|error| errors::image(65, &error))?;
        Ok(Self { leaf: Leaf::Ceph(disk), path, before, is_fresh, scratch: Vec::new(), log: None })
    }

    fn note(&mut self, span: Span) {
        if let Some(log) = &mut self.log {
            log.note(span);
        }
    }

    /// All of it was written, by other means.
    pub(super) fn note_all(&mut self) {
        self.note(Span::new(0, self.virtual_len()));
    }

    /// The whole disk as it was before.
    pub(crate) fn before(&self) -> &Source {
        &self.before
    }

    pub(crate) fn virtual_len(&self) -> u64 {
        self.before.virtual_len()
    }

    /// Whether it reads as zeros everywhere.
    pub(crate) fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// The file of a raw target.
    pub(crate) fn raw(&self) -> Option<(&FileMedium, &Path)> {
        match &self.leaf {
            Leaf::Raw(medium) => Some((medium, &self.path)),
            Leaf::Vhd(_) | Leaf::Ceph(_) => None,
        }
    }

    /// Writes the runs of a piece. Zeros are left out where the target reads as zeros, unless they count (a delta).
    pub(crate) fn write(&mut self, piece: &Filled, zeros_count: bool) -> Result<(), FormatError> {
        for run in &piece.runs {
            let at = piece.span.start + run.start as u64;
            if !run.is_zero {
                self.write_data(at, &piece.data[run.start..run.start + run.len])?;
            } else if zeros_count || !self.was_zero(at, run.len)? {
                self.write_zeros(Span::new(at, run.len as u64))?;
            }
        }
        Ok(())
    }

    /// Reads whole sectors as they were before.
    ///
    /// # Errors
    /// Those of the images.
    pub(crate) fn read_before(&self, at: u64, into: &mut [u8]) -> Result<(), FormatError> {
        super::read_or_zeros(Some(&self.before), at, into)
    }

    /// Whether the target read as zeros there before the copy began. No copy comes to the same sectors twice.
    fn was_zero(&mut self, at: u64, len: usize) -> Result<bool, FormatError> {
        if self.is_fresh {
            return Ok(true);
        }
        let span = Span::new(at, len as u64);
        if self.before.is_empty(span)? {
            return Ok(true);
        }
        self.scratch.resize(len, 0);
        self.before.read_at(at, &mut self.scratch)?;
        Ok(self.scratch.iter().all(|&byte| byte == 0))
    }

    fn write_data(&mut self, at: u64, bytes: &[u8]) -> Result<(), FormatError> {
        self.note(Span::new(at, bytes.len() as u64));
        match &mut self.leaf {
            Leaf::Vhd(image) => image.write_at(at, bytes),
            Leaf::Raw(medium) => medium.write_at(at, bytes).map_err(|error| {
                FormatError::io("cannot write", error).with_offset(at).with_path(&self.path)
            }),
            Leaf::Ceph(disk) => disk.image.write_at(at, bytes).map_err(as_format),
        }
    }

    fn write_zeros(&mut self, span: Span) -> Result<(), FormatError> {
        self.note(span);
        match &mut self.leaf {
            Leaf::Raw(medium) => medium.zero(span).map_err(|error| {
                FormatError::io("cannot clear", error).with_offset(span.start).with_path(&self.path)
            }),
            Leaf::Ceph(disk) => disk.image.zero_at(span.start, span.len).map_err(as_format),
            Leaf::Vhd(image) => {
                const PIECE: usize = 64 << 10;
                let zeros = vec![0; PIECE.min(usize::try_from(span.len).unwrap_or(PIECE))];
                let mut left = span;
                while !left.is_empty() {
                    let here = left.prefix(zeros.len() as u64);
                    image.write_at(here.start, &zeros[..here.len as usize])?;
                    left = left.skip(here.len);
                }
                Ok(())
            }
        }
    }

    /// Makes everything visible and durable.
    pub(crate) fn finish(self) -> Result<(), FormatError> {
        match self.leaf {
            Leaf::Vhd(mut image) => image.commit(),
            Leaf::Ceph(disk) => disk.image.flush().map_err(as_format),
            Leaf::Raw(medium) => medium
                .file()
                .sync_all()
                .map_err(|error| FormatError::io("cannot flush", error).with_path(&self.path)),
        }
        .map_err(
            |error| {
                if error.kind() == FormatErrorKind::Io { error.with_path(&self.path) } else { error }
            },
        )
        .and_then(|()| self.log.map_or(Ok(()), ImageLog::close))
    }
}
