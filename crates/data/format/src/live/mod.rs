//! Images in use: where each layer of a chain keeps a guest's bytes.
//!
//! A layer answers *where* and keeps its metadata; it never moves guest data. The chain walk above it
//! (`tapio-block`) moves bytes between the guest and the layer's storage:
//!
//! ```text
//!   read:   lookup ──Miss──▶ load ──▶ lookup        then read from the place
//!   write:  prepare ──▶ the place to write to        then write, then written() makes it visible
//!   flush:  sync ──▶ data durable, then metadata, each format in its own order
//! ```

mod group;
mod layer;
mod mapping;
mod raw;
pub mod vhd;

pub use layer::{Layer, SharedLayer, SharedMapping};
pub use mapping::{Extent, Lookup, Place};
pub use raw::RawLayer;
