//! Whether an image was made from another.

use tapio_format::live::{Layer, vhd};
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Storage;
use tapio_types::ImageKind;

/// The image below a differencing disk must be the one it was made from.
pub(crate) fn check_parent<S: Storage>(child: &vhd::VhdLayer<S>, parent: &Layer<S>) -> Result<()> {
    let Some(wanted) = child.parent_uuid() else {
        return Err(FormatError::new(FormatErrorKind::InvalidArgument, "the image above has no parent"));
    };
    match parent {
        Layer::Vhd(parent) if parent.uuid() != wanted => Err(FormatError::new(
            FormatErrorKind::Corrupt,
            format!("this image is {}, but the one above was made from {wanted}", parent.uuid()),
        )),
        Layer::Raw(raw) if raw.kind() == ImageKind::Raw && !wanted.is_nil() => Err(FormatError::new(
            FormatErrorKind::Corrupt,
            format!("the image above was made from VHD {wanted}, not from a raw image"),
        )),
        _ => Ok(()),
    }
}
