//! A disk's mirror, as the other threads of the process order it.

use std::time::Duration;

use tapio_format::FormatError;
use tapio_types::ChainSpec;

use super::{MirrorOptions, MirrorStatus, Pivoted};
use crate::disk::{Disk, DiskFailure};

impl Disk {
    /// Begins a mirror; see [`crate::Core::mirror_start`]. Gives the number of its job.
    ///
    /// # Errors
    /// Those of the mirror; not within the time (it may begin later then).
    pub fn mirror_start(
        &self,
        target: ChainSpec,
        options: MirrorOptions,
        within: Duration,
    ) -> Result<u32, DiskFailure> {
        Ok(self.remote().call_async(within, move |world| async move {
            Ok::<_, FormatError>(world.core.mirror_start(&target, options).await?.id())
        })??)
    }

    /// What the mirror says of itself, if there is one.
    ///
    /// # Errors
    /// The thread does not answer.
    pub fn mirror_status(&self, within: Duration) -> Result<Option<MirrorStatus>, DiskFailure> {
        Ok(self.remote().call(within, |world| world.core.mirror_status())?)
    }

    /// Goes on with a mirror that was lost; see [`crate::Core::mirror_resume`].
    ///
    /// # Errors
    /// Those of the mirror; not within the time.
    pub fn mirror_resume(&self, within: Duration) -> Result<(), DiskFailure> {
        Ok(self.remote().call_async(within, |world| async move { world.core.mirror_resume().await })??)
    }

    /// Switches over to the second side; see [`crate::Core::mirror_pivot`].
    ///
    /// # Errors
    /// Those of the mirror; not within the time.
    pub fn mirror_pivot(&self, within: Duration) -> Result<Pivoted, DiskFailure> {
        Ok(self.remote().call_async(within, |world| async move { world.core.mirror_pivot().await })??)
    }

    /// Ends the mirror and keeps the first side.
    ///
    /// # Errors
    /// There is none; not within the time.
    pub fn mirror_cancel(&self, within: Duration) -> Result<(), DiskFailure> {
        Ok(self.remote().call_async(within, |world| async move { world.core.mirror_cancel().await })??)
    }

    /// Lets the copy move `rate` bytes a second; 0 is no limit.
    ///
    /// # Errors
    /// There is no mirror; the thread does not answer.
    pub fn mirror_set_rate(&self, rate: u64, within: Duration) -> Result<(), DiskFailure> {
        Ok(self.remote().call(within, move |world| world.core.mirror_set_rate(rate))??)
    }
}
