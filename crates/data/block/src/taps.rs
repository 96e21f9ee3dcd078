//! The taps of a disk (mirror, standby, log) are opened, grown and closed with its images.

use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;
use tapio_types::Access;

use crate::chain::Chain;
use crate::changes::ChangeLog;
use crate::core::Core;
use crate::tap::{Tap, TapOptions};

impl<I: Io> Core<I> {
    /// Sets which receivers hear of changes.
    pub(crate) fn change_tap(&self, change: impl FnOnce(&mut Tap<I::Store>)) {
        let mut slot = self.tap.borrow_mut();
        let mut tap = slot.as_ref().map_or_else(Tap::default, |tap| Tap::clone(tap));
        change(&mut tap);
        let used = tap.mirror.is_some() || tap.log.is_some();
        *slot = used.then(|| Rc::new(tap));
        self.tapped.set(used);
        self.look_at_sharing();
    }

    /// Opens the taps of a disk on `chain`. The mirror still has to be run.
    ///
    /// # Errors
    /// One of them cannot be opened; the others are closed again. The disk is read-only.
    pub(crate) async fn open_tap(&self, chain: &Chain<I::Store>, taps: &TapOptions) -> Result<()> {
        let wanted = taps.mirror.is_some() || taps.standby.is_some() || taps.log.is_some();
        if wanted && chain.access() == Access::ReadOnly {
            let detail = "a disk that is not written has no second image and no log: open it without them";
            return Err(FormatError::new(FormatErrorKind::ReadOnly, detail));
        }
        let opened = self.try_open_tap(chain, taps).await;
        if opened.is_err() {
            self.close_tap().await;
        }
        opened
    }

    async fn try_open_tap(&self, chain: &Chain<I::Store>, taps: &TapOptions) -> Result<()> {
        if let Some(path) = &taps.log {
            let opened = match self.open_file(path, Access::ReadWrite, "the log of changed blocks").await {
                Ok(store) => ChangeLog::open(store, chain.len()).await,
                Err(error) => Err(error),
            };
            let log = Rc::new(opened.map_err(|error| error.with_path(path))?);
            self.change_tap(|tap| tap.log = Some(log));
        }
        if let Some(standby) = &taps.standby {
            self.open_standby(chain, standby).await?;
        }
        if let Some((target, options)) = &taps.mirror {
            let mirror = self.mirror_onto(chain, target, options.clone()).await?;
            self.change_tap(|tap| tap.mirror = Some(mirror));
        }
        Ok(())
    }

    /// Prepares the taps for a disk of `len` bytes, before the images grow.
    ///
    /// # Errors
    /// The disk has a mirror, whose second side cannot grow; the log cannot be made longer.
    pub async fn grow_beside(&self, len: u64) -> Result<()> {
        let Some(tap) = self.tap.borrow().clone() else { return Ok(()) };
        if tap.mirror.is_some() {
            let detail = "a disk with a mirror does not grow: end the mirror first";
            return Err(FormatError::new(FormatErrorKind::InvalidArgument, detail));
        }
        match &tap.log {
            Some(log) => log.grow(len).await,
            None => Ok(()),
        }
    }

    /// Closes the taps of a disk whose images are closed; its mirror has ended by then.
    pub(crate) async fn close_tap(&self) {
        self.close_standby().await;
        let tap = self.tap.borrow_mut().take();
        self.tapped.set(false);
        if let Some(log) = tap.and_then(|tap| tap.log.clone())
            && let Err(error) = log.close().await
        {
            (self.options.report)(&format!("the log of changed blocks is not complete: {error}"));
        }
    }
}
