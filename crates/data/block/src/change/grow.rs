//! A larger disk, while guests use it.

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::Access;

use super::Change;
use crate::port::Geometry;

impl<I: Io> Change<I> {
    /// See [`crate::Core::grow`].
    pub(super) async fn grow(self, len: u64) -> Result<Geometry> {
        let core = &self.core;
        let (chain, standby, taps) = (core.running_chain()?, core.changes.standby(), &core.stages.taps);
        let len = len.checked_next_multiple_of(core.life.sector_len().into()).unwrap_or(u64::MAX);
        let leaf = &chain.links()[0].spec().path;
        if chain.access() == Access::ReadOnly {
            return Err(FormatError::new(FormatErrorKind::ReadOnly, "a read-only disk cannot grow"));
        }
        if len < chain.len() {
            let detail =
                format!("{len} bytes are fewer than the disk's {}: it is not made smaller", chain.len());
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(leaf));
        }
        if len > chain.len() {
            standby.check_grows().map_err(|error| error.with_path(leaf))?;
            // First, so that no change is missed; a log with room to spare does no harm.
            taps.grow(len).await?;
            let grown = chain.grow(len).await;
            if let Err(error) = &grown
                && error.kind() == FormatErrorKind::NeedsPause
                && (taps.any() || standby.is_there())
            {
                let detail = "a disk with a log of changed blocks or a second image does not grow through a pause of \
                              its own: pause it, resize the image, and resume it with them";
                return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(leaf));
            }
            grown.map_err(|error| error.with_path(leaf))?;
        }
        let gone = || FormatError::new(FormatErrorKind::InvalidArgument, "the disk is closed");
        core.geometry().ok_or_else(gone)
    }
}
