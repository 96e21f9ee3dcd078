//! Words shared by every part of Tapio: spans, image kinds, the description of a chain, limits.
//!
//! It depends on no other crate of Tapio; all may depend on it. Its only behaviour is arithmetic on its own types.

mod api_error;
mod blkif;
mod device;
mod image;
mod limits;
mod size;
mod span;
mod transfers;

pub use api_error::ApiError;
pub use blkif::{Movement, RingState, RingTuning};
pub use device::DeviceHow;
pub use image::{Access, ChainSpec, ImageKind, LayerSpec, ParseImageError, parse_type_and_path};
pub use limits::{BPS_MAX, BURST_MS_DEFAULT, BURST_MS_MAX, IOPS_MAX, IoLimits, LimitError};
pub use size::parse_bytes;
pub use span::{SECTOR_LEN, Span};
pub use transfers::TransferSizes;
