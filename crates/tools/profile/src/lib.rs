//! Profiles of storage targets: what a disk, an array or a LUN is, where it is fast, and which settings suit it.
//!
//! ```text
//!   target: open, refuse what is in use ─▶ Device (bare: io_uring; simulated: a model with a clock of its own)
//!   scan ─▶ zones, thin areas      geometry ─▶ stripe      sweep ─▶ depth, delay, limit     schedulers     costs
//!                                     findings ─▶ advice ─▶ report: text, JSON, pictures, page, settings
//! ```
//!
//! Requests are made by [`tapio_load`], reads alone unless the caller allows writes. Conclusions rest on minima and
//! medians: other load on the host makes requests slower and never faster.

mod advice;
mod ageing;
mod bare;
mod costs;
mod device;
mod facts;
mod findings;
mod geometry;
mod pace;
mod profile;
pub mod report;
mod scan;
mod schedulers;
#[cfg(test)]
mod simulated;
mod sweep;
pub mod target;

pub use advice::Advice;
pub use ageing::{Ageing, AgeingOptions, AgeingRun, ageing};
pub use device::{Device, Sample, Shape};
pub use findings::Finding;
pub use pace::{Pace, Progress};
pub use profile::{Options, Parts, Profile, profile};
pub use scan::ScanOptions;
pub use sweep::SweepOptions;
