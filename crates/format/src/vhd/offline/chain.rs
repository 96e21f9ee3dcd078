//! Sectors through a chain: each from the first layer that has it, zeros where none has.

use std::path::Path;

use tapio_types::{Access, ChainSpec, ImageKind, Span};

use super::image::{Image, OpenOptions};
use super::parent::resolve_chain;
use crate::error::{FormatError, Result, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::{SECTOR_LEN, bitmap};

/// One image of a chain, open.
#[derive(Debug)]
pub enum Layer<M> {
    /// The disk's bytes as they are.
    Raw {
        /// The bytes.
        medium: M,
        /// The bytes of the disk: what there is, up to a whole sector.
        len: u64,
    },
    /// A VHD.
    Vhd(Box<Image<M>>),
}

/// Images of a disk, leaf first.
#[derive(Debug)]
pub struct Chain<M> {
    layers: Vec<Layer<M>>,
}

impl Chain<FileMedium> {
    /// Opens the whole chain of the VHD at `path`, every image for reading.
    ///
    /// # Errors
    /// As [`resolve_chain`] and [`Image::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_spec(&resolve_chain(path, Access::ReadOnly)?)
    }

    /// Opens the images of `spec`, every one for reading.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn open_spec(spec: &ChainSpec) -> Result<Self> {
        let open = |layer: &tapio_types::LayerSpec| match layer.kind {
            ImageKind::Raw => Layer::raw(FileMedium::open(&layer.path, Access::ReadOnly)?, &layer.path),
            _ => Ok(Layer::Vhd(Box::new(Image::open(&layer.path, OpenOptions::LOOK)?))),
        };
        Ok(Self { layers: spec.layers.iter().map(open).collect::<Result<_>>()? })
    }
}

impl<M: Medium> Layer<M> {
    /// A raw layer.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn raw(medium: M, path: &Path) -> Result<Self> {
        let len =
            medium.len().map_err(|error| FormatError::io("cannot find the length", error).with_path(path))?;
        Ok(Self::Raw { medium, len })
    }

    /// Virtual size in bytes.
    pub fn virtual_len(&self) -> u64 {
        match self {
            Self::Raw { len, .. } => len.next_multiple_of(SECTOR_LEN),
            Self::Vhd(image) => image.virtual_len(),
        }
    }
}

impl<M: Medium> Chain<M> {
    /// A chain of these layers, leaf first.
    pub fn new(layers: Vec<Layer<M>>) -> Self {
        Self { layers }
    }

    /// The layers, leaf first.
    pub fn layers(&self) -> &[Layer<M>] {
        &self.layers
    }

    /// Virtual size of the leaf in bytes.
    pub fn virtual_len(&self) -> u64 {
        self.layers.first().map_or(0, Layer::virtual_len)
    }

    /// Reads whole sectors at byte `at` of the virtual disk.
    ///
    /// # Errors
    /// `InvalidArgument` outside of the disk or off sectors; those of the media.
    pub fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let span = Span::new(at, into.len() as u64);
        if !span.is_aligned(SECTOR_LEN) || !span.fits(self.virtual_len()) {
            return Err(invalid(format!(
                "cannot read {} bytes at byte {at} of a disk of {} bytes",
                span.len,
                self.virtual_len()
            )));
        }
        into.fill(0);
        // What the layers above did not have. Each layer takes its part away from it.
        let mut wanted = vec![span];
        for layer in &self.layers {
            let mut left = Vec::new();
            for piece in wanted {
                let below = layer.virtual_len();
                let piece = piece.prefix(below.saturating_sub(piece.start));
                if piece.is_empty() {
                    continue;
                }
                let from = (piece.start - at) as usize;
                read_layer(layer, piece, &mut into[from..from + piece.len as usize], &mut left)?;
            }
            if left.is_empty() {
                break;
            }
            wanted = left;
        }
        Ok(())
    }
}

/// Reads what `layer` has of `piece` and adds what it has not to `left`.
fn read_layer<M: Medium>(layer: &Layer<M>, piece: Span, into: &mut [u8], left: &mut Vec<Span>) -> Result<()> {
    let image = match layer {
        Layer::Raw { medium, len } => {
            let there =
                into.len().min(usize::try_from(len.saturating_sub(piece.start)).unwrap_or(usize::MAX));
            return medium.read_at(piece.start, &mut into[..there]).map_err(|error| {
                FormatError::io("cannot read the raw image", error).with_offset(piece.start)
            });
        }
        Layer::Vhd(image) => image,
    };
    if image.header().is_none() {
        return image.read_bytes(piece.start, into);
    }
    let block_len = u64::from(image.block_len());
    let mut rest = piece;
    while !rest.is_empty() {
        let within = rest.start % block_len;
        let here = rest.prefix(block_len - within);
        let block = u32::try_from(rest.start / block_len).unwrap_or(u32::MAX);
        match (image.bitmap(block)?, image.data_offset(block)) {
            (Some(map), Some(data)) => {
                let first = (within / SECTOR_LEN) as usize;
                let end = first + (here.len / SECTOR_LEN) as usize;
                for (present, start, count) in bitmap::runs(&map, first, end) {
                    let at = rest.start - within + start as u64 * SECTOR_LEN;
                    let len = count as u64 * SECTOR_LEN;
                    let from = (at - piece.start) as usize;
                    if present {
                        image.read_bytes(
                            data + start as u64 * SECTOR_LEN,
                            &mut into[from..from + len as usize],
                        )?;
                    } else {
                        push(left, Span::new(at, len));
                    }
                }
            }
            _ => push(left, here),
        }
        rest = rest.skip(here.len);
    }
    Ok(())
}

/// Adds a span, joined to the one before where they touch: a disk of many empty blocks stays one span.
fn push(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.end() == Some(span.start) => last.len += span.len,
        _ => spans.push(span),
    }
}
