//! The log of changed blocks of an image that is written by this process and not by a disk's.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use tapio_format::cbt::{Log, LogHeader, bitmap_len, blocks_of, set_blocks};
use tapio_format::{FileMedium, FormatError, FormatErrorKind};
use tapio_types::{Access, Span};

use crate::lvm::names::{image_of, log_volume};

/// The extension of a log, which lies beside its image.
const EXTENSION: &str = "cbtlog";

/// The log of an image, in a directory or a group of volumes.
fn beside(image: &Path) -> PathBuf {
    let volume = image.file_name().and_then(|name| name.to_str()).and_then(image_of);
    match volume {
        Some((vdi, _)) => image.with_file_name(log_volume(vdi)),
        None => image.with_extension(EXTENSION),
    }
}

/// An open log. Until it is closed it says that it is not complete.
#[derive(Debug)]
pub(super) struct ImageLog {
    log: Log<FileMedium>,
    before: LogHeader,
    changed: Vec<u8>,
}

impl ImageLog {
    /// The log of an image with a disk of `len` bytes; none if its changed blocks are not tracked.
    pub(super) fn open(image: &Path, len: u64) -> Result<Option<Self>, FormatError> {
        let path = beside(image);
        // A volume's path is a link.
        let is_volume = std::fs::metadata(&path).is_ok_and(|data| data.file_type().is_block_device());
        if !is_volume && !std::fs::symlink_metadata(&path).is_ok_and(|data| data.is_file()) {
            return Ok(None);
        }
        let mut log = match Log::open(&path, Access::ReadWrite) {
            // What uses it next finds it damaged, and everything counts as changed.
            Err(error) if is_damage(&error) => return Ok(None),
            opened => opened?,
        };
        let before = *log.header();
        log.set_header(LogHeader { consistent: 0, ..before }).map_err(|error| error.with_path(&path))?;
        if before.size < len {
            log.grow(len).map_err(|error| error.with_path(&path))?;
        }
        let changed = vec![0; usize::try_from(bitmap_len(log.header().size)).unwrap_or(usize::MAX)];
        Ok(Some(Self { log, before, changed }))
    }

    /// Notes that `span` is about to be written.
    pub(super) fn note(&mut self, span: Span) {
        set_blocks(&mut self.changed, blocks_of(span));
    }

    /// Writes it back once the image is durable.
    pub(super) fn close(mut self) -> Result<(), FormatError> {
        self.log.add(&self.changed)?;
        self.log.set_header(self.before)
    }
}

fn is_damage(error: &FormatError) -> bool {
    matches!(error.kind(), FormatErrorKind::NotThisFormat | FormatErrorKind::Corrupt)
}
