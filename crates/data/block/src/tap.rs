//! What else hears of a disk's changes: a mirror and a log of changed blocks.

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Io, Storage};
use tapio_types::{Access, ChainSpec, LayerSpec, Span};

use crate::chain::Chain;
use crate::changes::ChangeLog;
use crate::core::Core;
use crate::mirror::{Mirror, MirrorOptions};

/// What a disk is opened with beside its images.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// Every change goes there too.
    pub mirror: Option<(ChainSpec, MirrorOptions)>,
    /// Where writes go once the leaf's storage is full.
    pub standby: Option<StandbyOptions>,
    /// The log of changed blocks.
    pub log: Option<PathBuf>,
}

/// A differencing image that becomes the leaf when the storage of the leaf is full.
#[derive(Clone, Debug)]
pub struct StandbyOptions {
    /// The image.
    pub image: LayerSpec,
    /// It took over in an earlier life of the disk: it is the first image of the chain that is opened with it, and the
    /// second is the one that was full.
    pub took_over: bool,
    /// Called on the data thread when it comes into use.
    pub on_use: Signal,
}

/// Something to call.
#[derive(Clone)]
pub struct Signal(pub Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signal")
    }
}

/// Who hears of changes. A request that has begun stays with whom it found.
#[derive(Debug)]
pub(crate) struct Tap<S: Storage> {
    pub mirror: Option<Rc<Mirror<S>>>,
    pub log: Option<Rc<ChangeLog<S>>>,
}

impl<S: Storage> Default for Tap<S> {
    fn default() -> Self {
        Self { mirror: None, log: None }
    }
}

impl<S: Storage> Clone for Tap<S> {
    fn clone(&self) -> Self {
        Self { mirror: self.mirror.clone(), log: self.log.clone() }
    }
}

impl<S: Storage> Tap<S> {
    /// Notes that `span` is about to change; nothing for a flush, which has none.
    pub fn note(&self, span: Span) {
        if let Some(log) = &self.log {
            log.note(span);
        }
    }
}

impl<I: Io> Core<I> {
    /// Changes who hears of changes.
    pub(crate) fn change_tap(&self, change: impl FnOnce(&mut Tap<I::Store>)) {
        let mut slot = self.tap.borrow_mut();
        let mut tap = slot.as_ref().map_or_else(Tap::default, |tap| Tap::clone(tap));
        change(&mut tap);
        let used = tap.mirror.is_some() || tap.log.is_some();
        *slot = used.then(|| Rc::new(tap));
        self.tapped.set(used);
    }

    /// Opens what a disk on `chain` is to have beside it. The mirror still has to be run.
    ///
    /// # Errors
    /// One of them cannot be opened; the others are closed again. The disk is read-only.
    pub(crate) async fn open_beside(&self, chain: &Chain<I::Store>, beside: &Beside) -> Result<()> {
        let wanted = beside.mirror.is_some() || beside.standby.is_some() || beside.log.is_some();
        if wanted && chain.access() == Access::ReadOnly {
            let detail = "a disk that is not written has no second image and no log: open it without them";
            return Err(FormatError::new(FormatErrorKind::ReadOnly, detail));
        }
        let opened = self.try_open_beside(chain, beside).await;
        if opened.is_err() {
            self.close_beside().await;
        }
        opened
    }

    async fn try_open_beside(&self, chain: &Chain<I::Store>, beside: &Beside) -> Result<()> {
        if let Some(path) = &beside.log {
            let opened = match self.open_file(path, Access::ReadWrite, "the log of changed blocks").await {
                Ok(store) => ChangeLog::open(store, chain.len()).await,
                Err(error) => Err(error),
            };
            let log = Rc::new(opened.map_err(|error| error.with_path(path))?);
            self.change_tap(|tap| tap.log = Some(log));
        }
        if let Some(standby) = &beside.standby {
            self.open_standby(chain, standby).await?;
        }
        if let Some((target, options)) = &beside.mirror {
            let mirror = self.mirror_onto(chain, target, options.clone()).await?;
            self.change_tap(|tap| tap.mirror = Some(mirror));
        }
        Ok(())
    }

    /// Makes what stands beside the images ready for a disk of `len` bytes, before the images grow.
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

    /// Closes what a disk has beside its images, which are closed; its mirror has ended by then.
    pub(crate) async fn close_beside(&self) {
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
