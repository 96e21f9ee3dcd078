//! How a disk behaves, and what it is opened with in addition to its images.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tapio_format::Result;
use tapio_format::live::vhd::{BITMAPS_KEPT, IntentPlace, RoomPlace, SpaceMode};
use tapio_format::vhd::Keys;
use tapio_format::vhd::offline::ParentFacts;
use tapio_types::{ChainSpec, LayerSpec, TransferSizes};

use crate::mirror::MirrorOptions;
use crate::notes::Notes;
use crate::stages::REQUEST_TIMEOUT;

/// What a guest sees when the storage is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum NoSpace {
    /// The request fails with ENOSPC.
    #[default]
    Fail,
    /// The request waits until there is space.
    Wait,
}

/// How a disk behaves.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// When the storage is full.
    pub no_space: NoSpace,
    /// Whether new blocks get space at once.
    pub space: SpaceMode,
    /// Where the intent log is.
    pub intent: IntentPlace,
    /// What a child, the first path, records about its parent, the second, but for the parent's UUID.
    pub parent_facts: fn(&Path, &Path) -> Result<ParentFacts>,
    /// Where it is noted which image the disk goes on with, for the process that starts it next.
    pub notes: Notes,
    /// The keys of encrypted images.
    pub keys: Keys,
    /// How many bitmaps of each image stay in memory.
    pub bitmaps_kept: usize,
    /// Where a leaf asks for room that its device has not.
    pub room: RoomPlace,
    /// Bytes of a sector as guests are told, 512 or 4096; what the images have without.
    pub sector_len: Option<u32>,
    /// How long a request may take; for ever without. See [`crate::Completion::give_up`].
    pub request_timeout: Option<Duration>,
    /// How data goes to the storages.
    pub transfers: TransferSizes,
    /// Where sentences for the log go. Called for changes of state and failures, never per request.
    pub report: fn(&str),
}

impl Default for CoreOptions {
    fn default() -> Self {
        Self {
            no_space: NoSpace::default(),
            space: SpaceMode::default(),
            intent: IntentPlace::default(),
            parent_facts: ParentFacts::names,
            notes: Notes::default(),
            keys: Keys::default(),
            bitmaps_kept: BITMAPS_KEPT,
            room: RoomPlace::default(),
            sector_len: None,
            request_timeout: Some(REQUEST_TIMEOUT),
            transfers: TransferSizes::default(),
            report: |line| eprintln!("{line}"),
        }
    }
}

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
