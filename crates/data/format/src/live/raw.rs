//! A raw image: the disk's bytes as they are.

use std::cell::Cell;

use tapio_ring::Storage;
use tapio_types::{ImageKind, SECTOR_LEN, Span};

use super::mapping::{Extent, Place};
use crate::error::{FormatError, FormatErrorKind, Result};

/// A raw file or block device.
#[derive(Debug)]
pub struct RawLayer<S> {
    /// Where the bytes are.
    pub store: S,
    virtual_len: Cell<u64>,
    kind: ImageKind,
}

impl<S: Storage> RawLayer<S> {
    /// The image in `store`. A last piece shorter than a sector is not part of the disk, as for tapdisk.
    pub fn new(store: S) -> Self {
        let virtual_len = store.len() / SECTOR_LEN * SECTOR_LEN;
        Self { store, virtual_len: Cell::new(virtual_len), kind: ImageKind::Raw }
    }

    /// The data of a fixed VHD: raw, with a footer behind it.
    pub const fn fixed_vhd(store: S, virtual_len: u64) -> Self {
        Self { store, virtual_len: Cell::new(virtual_len), kind: ImageKind::Vhd }
    }

    /// Raw, or a fixed VHD.
    pub const fn kind(&self) -> ImageKind {
        self.kind
    }

    /// Bytes of the disk.
    pub const fn virtual_len(&self) -> u64 {
        self.virtual_len.get()
    }

    /// Every byte is where it is.
    pub fn lookup(&self, want: Span) -> Extent {
        Extent { len: want.len, place: Place::Data { offset: want.start } }
    }

    /// Makes the image longer.
    ///
    /// # Errors
    /// `NeedsPause` for a fixed VHD, whose footer would be in the way; the storage's.
    pub async fn grow(&self, len: u64) -> Result<()> {
        if self.kind != ImageKind::Raw {
            return Err(FormatError::new(
                FormatErrorKind::NeedsPause,
                "a fixed VHD grows only while it is paused: pause the disk, use 'vhd-util resize', resume it",
            ));
        }
        let len = len.checked_next_multiple_of(SECTOR_LEN).unwrap_or(u64::MAX);
        let failed = |error| FormatError::io(format!("cannot make the image {len} bytes long"), error);
        if !self.store.len().is_multiple_of(SECTOR_LEN) {
            // The last piece was no part of the disk. As one it reads as zero, as all that is new.
            self.store.set_len(self.virtual_len.get()).await.map_err(failed)?;
        }
        self.store.set_len(len).await.map_err(failed)?;
        self.store.flush().await.map_err(failed)?;
        self.virtual_len.set(len);
        Ok(())
    }
}
