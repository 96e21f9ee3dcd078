//! What `vhd-util` does: work on images that no guest has open.
//!
//! ```text
//! image     open: footer, header, table, batmap, with every tolerance    write      sectors into an image, crash-safe
//! create    new images                  parent     which the parent is, whole chains
//! chain     sectors through a chain     coalesce   a child into its parent
//! check     the rules, as findings      scan       many images in a line each
//! modify    single facts                reparent   another parent (relink: its steps)
//! resize    a larger table, journalled  copy       whole contents
//! ```
//!
//! A kill at any point of any of these leaves images that open and hold what they held, and the operation can be
//! repeated. The order that gives this is stated where it is kept: `write` for data, `create` for new images.

mod chain;
mod check;
mod coalesce;
mod copy;
mod create;
mod footer;
mod image;
mod modify;
mod names;
mod parent;
mod partial;
mod recover;
pub(crate) mod relink;
mod reparent;
mod resize;
mod scan;
mod write;

pub use chain::{Chain, Extent, Layer};
pub use check::{
    CheckOptions, Finding, FindingKind, Report, SectorCounts, Severity, View, check, check_image, check_path,
};
pub use coalesce::{CoalesceTarget, Coalesced, coalesce, coalesce_paced, coalesce_path};
pub use copy::{copy, fill, fill_table, repair};
pub use create::{ParentFacts, Shape, SnapshotOptions, create, create_on, snapshot};
pub use footer::read_footer;
pub use image::{Batmap, Image, OpenOptions};
pub use modify::{kill_data, resize_fast, set_hidden, set_key_hash, set_marker, set_physical_len, set_uuid};
pub use names::{canonical, relative};
pub use parent::{ParentLink, chain_depth, locator_path, resolve_chain, resolve_parent, unresolved_parent};
pub use partial::remove_orphans;
pub use recover::{finish_resize, journal_beside};
pub use reparent::{set_parent, set_parent_facts, set_parent_with};
pub use resize::{ResizeStep, resize_journalled, resize_with_journal, revert, revert_path};
pub use scan::{ScanEntry, ScanFailure, scan_image, scan_volume};
