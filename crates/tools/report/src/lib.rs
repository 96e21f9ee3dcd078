//! How the tools print and fail.
//!
//! [`failure`]: a sentence, the system's words for the error, and its number as exit status. [`size`]: numbers of
//! bytes. [`plot`]: pictures as SVG. [`trace`]: where the time of requests goes, as a table and as a picture.
//! [`queue`]: what the layers of a disk hold.

pub mod failure;
pub mod plot;
pub mod queue;
pub mod size;
pub mod trace;
