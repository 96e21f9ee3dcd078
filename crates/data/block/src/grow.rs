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
        let len = len.checked_next_multiple_of(self.sector_len().into()).unwrap_or(u64::MAX);
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
            self.check_standby_grows().map_err(|error| error.with_path(leaf))?;
            // First, so that no change is missed; a log with room to spare does no harm.
            self.grow_beside(len).await?;
            let grown = chain.grow(len).await;
            if let Err(error) = &grown
                && error.kind() == FormatErrorKind::NeedsPause
                && (self.tapped.get() || self.standby.borrow().is_some())
            {
                let detail = "a disk with a log of changed blocks or a second image does not grow through a pause of \
                              its own: pause it, resize the image, and resume it with them";
                return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(leaf));
            }
            grown.map_err(|error| error.with_path(leaf))?;
        }
        let gone = || FormatError::new(FormatErrorKind::InvalidArgument, "the disk is closed");
        self.geometry().ok_or_else(gone)
    }
}
