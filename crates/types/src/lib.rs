//! Words shared by every part of Tapio: spans, image kinds and the description of a chain.
//!
//! This crate knows nobody and everybody may know it. It holds no behaviour beyond arithmetic on its own types.

mod device;
mod image;
mod span;

pub use device::DeviceHow;
pub use image::{Access, ChainSpec, ImageKind, LayerSpec, ParseImageError, parse_type_and_path};
pub use span::{SECTOR_LEN, Span};
