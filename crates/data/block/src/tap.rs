//! What else hears of a disk's changes: a mirror and a log of changed blocks.

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use tapio_ring::Storage;
use tapio_types::{ChainSpec, LayerSpec, Span};

use crate::changes::ChangeLog;
use crate::mirror::{Mirror, MirrorOptions};

/// The taps of a disk: what it is opened with in addition to its images.
#[derive(Clone, Debug, Default)]
pub struct TapOptions {
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

/// The receivers of changes. A request that has begun reports to those that it found.
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
