//! Histories of measurements, as round-robin databases keep them.
//!
//! ```text
//!   value of a source ──rate──▶ step (5 s) ──consolidation──▶ archives: 5 s, 1 min, 1 h, 1 day
//!                                                             each with a bounded number of rows
//! ```
//!
//! A [`History`] is what is recorded of one object: sources (a gauge, a counter of which the rate is of interest, an
//! amount since the last sample) and the archives of each. Rates and consolidation follow rrdtool's rules, so that
//! rrdtool reads what [`xml::dump`] writes and goes on with it to the same figures. [`updates`] is the excerpt of
//! several histories that clients of XenServer ask for, [`mod@file`] the form on disk, and [`alarm`] thresholds of
//! sources.
//!
//! Memory is bounded and grows with age alone: a source of four archives has at most 774 rows of 4 bytes for each
//! consolidation function, [`Layout::source_len_max`]. This crate knows no clock, no directory and no object of XenAPI.

pub mod alarm;
mod archive;
mod figure;
pub mod file;
mod function;
mod history;
pub mod json;
mod layout;
mod source;
pub mod updates;
pub mod xml;

pub use function::Consolidation;
pub use history::{History, Sample, UpdateError};
pub use layout::{HEARTBEAT_S, Layout, Span, XFF};
pub use source::{Kind, Source};

#[cfg(test)]
mod tests;
