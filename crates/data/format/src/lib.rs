//! Image formats: raw and VHD; codecs, live mapping, offline tools.
//!
//! ```text
//!   error      one error type: kind, image, place, sentence, source
//!   continuation   notes of which image a disk went on with
//!   cbt        the log of changed blocks: codec and offline work
//!   medium     a flat run of bytes for the offline tools: a file, a device, or memory
//!   vhd/       footer header locator bat batmap bitmap geometry layout    pure functions on bytes
//!   vhd/offline    create parent check coalesce query scan ...            synchronous, on a medium
//! ```
//!
//! Nothing here knows a front end, a request of a guest, or the toolstack.

pub mod cbt;
pub mod continuation;
mod error;
pub mod live;
pub mod medium;
pub mod vhd;

pub use error::{FormatError, FormatErrorKind, Result};
pub use medium::{FileMedium, Medium, PageBuffer};
