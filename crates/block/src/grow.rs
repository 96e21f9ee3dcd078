//! A larger disk, while guests use it.

use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::Access;

use crate::core::Core;
use crate::port::Geometry;

impl<I: Io> Core<I> {
    /// Makes the disk at least `len` bytes long by making its leaf so, and gives what guests are to be told. A VHD
    /// takes whole blocks.
    ///
    /// # Errors
    /// The disk is not running or not writable, another change is at work, `len` is less than what it has;
    /// `NeedsPause` where the leaf cannot grow while it is in use; the storage's.
    pub async fn grow(self: &Rc<Self>, len: u64) -> Result<Geometry> {
        let _change = self.begin_change("growing the disk")?;
        let chain = self.running_chain()?;
        let leaf = &chain.links()[0].spec.path;
        if chain.access() == Access::ReadOnly {
            return Err(FormatError::new(FormatErrorKind::ReadOnly, "a read-only disk cannot grow"));
        }
        if len < chain.len() {
            let detail =
                format!("{len} bytes are fewer than the disk's {}: it is not made smaller", chain.len());
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(leaf));
        }
        if len > chain.len() {
            chain.grow(len).await.map_err(|error| error.with_path(leaf))?;
        }
        let gone = || FormatError::new(FormatErrorKind::InvalidArgument, "the disk is closed");
        self.geometry().ok_or_else(gone)
    }
}
