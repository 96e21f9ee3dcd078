//! Sectors through a chain: each from the first layer that has it, zeros where none has.

use std::path::Path;

use tapio_types::{Access, ChainSpec, ImageKind, Span};

use super::image::{Image, OpenOptions};
use super::parent::resolve_chain;
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::{SECTOR_LEN, bitmap};

/// One image of a chain, open.
#[derive(Debug)]
pub enum Layer<M> {
    /// The disk's bytes as they are.
    Raw {
        /// The bytes.
        medium: M,
        /// The bytes of the disk: the whole sectors that there are.
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
            ImageKind::Vhd => Ok(Layer::Vhd(Box::new(Image::open(&layer.path, OpenOptions::READ)?))),
            ImageKind::Nbd | ImageKind::Rbd => Err(FormatError::new(
                FormatErrorKind::Unsupported,
                "a remote export cannot be part of what is done offline",
            )
            .with_path(&layer.path)),
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
        Ok(Self::Raw { medium, len: len / SECTOR_LEN * SECTOR_LEN })
    }

    /// Virtual size in bytes.
    pub fn virtual_len(&self) -> u64 {
        match self {
            Self::Raw { len, .. } => *len,
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
        for extent in self.extents(span)? {
            let Some((layer, offset)) = extent.place else { continue };
            let start = (extent.span.start - at) as usize;
            self.layers[layer].read_bytes(offset, &mut into[start..start + extent.span.len as usize])?;
        }
        Ok(())
    }

    /// Where each sector of `span` is, in no order; neighbours in one place are one extent.
    ///
    /// # Errors
    /// Those of the media.
    pub fn extents(&self, span: Span) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        // What the layers above did not have. Each layer takes its part away from it.
        let mut wanted = vec![span];
        for (index, layer) in self.layers.iter().enumerate() {
            let mut left = Vec::new();
            for piece in wanted {
                let there = piece.prefix(layer.virtual_len().saturating_sub(piece.start));
                let beyond = piece.skip(there.len);
                if !there.is_empty() {
                    layer.extents(index, there, &mut extents, &mut left)?;
                }
                // A layer that is shorter than the one above ends the disk there: the layers below it are not asked.
                if !beyond.is_empty() {
                    extents.push(Extent { span: beyond, place: None });
                }
            }
            wanted = left;
            if wanted.is_empty() {
                break;
            }
        }
        extents.extend(wanted.into_iter().map(|span| Extent { span, place: None }));
        Ok(extents)
    }
}

/// Sectors of a disk that are together in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which sectors, in bytes of the disk.
    pub span: Span,
    /// The layer that has them, counted from the leaf, and the byte in its file; `None` where none has: zeros.
    pub place: Option<(usize, u64)>,
}

impl<M: Medium> Layer<M> {
    /// Adds what the layer has of `piece` to `extents`, and what it has not to `left`.
    fn extents(
        &self,
        index: usize,
        piece: Span,
        extents: &mut Vec<Extent>,
        left: &mut Vec<Span>,
    ) -> Result<()> {
        let image = match self {
            Self::Vhd(image) if image.header().is_some() => image,
            _ => {
                extents.push(Extent { span: piece, place: Some((index, piece.start)) });
                return Ok(());
            }
        };
        let block_len = u64::from(image.block_len());
        let mut rest = piece;
        while !rest.is_empty() {
            let within = rest.start % block_len;
            let here = rest.prefix(block_len - within);
            let block = u32::try_from(rest.start / block_len).unwrap_or(u32::MAX);
            if let (Some(map), Some(data)) = (image.bitmap(block)?, image.data_offset(block)) {
                let first = (within / SECTOR_LEN) as usize;
                let end = first + (here.len / SECTOR_LEN) as usize;
                for (present, start, count) in bitmap::runs(&map, first, end) {
                    let start = start as u64 * SECTOR_LEN;
                    let span = Span::new(rest.start - within + start, count as u64 * SECTOR_LEN);
                    if present {
                        extents.push(Extent { span, place: Some((index, data + start)) });
                    } else {
                        push(left, span);
                    }
                }
            } else {
                push(left, here);
            }
            rest = rest.skip(here.len);
        }
        Ok(())
    }

    /// Reads bytes of the layer's file.
    fn read_bytes(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match self {
            Self::Vhd(image) => image.read_bytes(offset, into),
            Self::Raw { medium, .. } => medium
                .read_at(offset, into)
                .map_err(|error| FormatError::io("cannot read the raw image", error).with_offset(offset)),
        }
    }
}

/// Adds a span, joined to the one before where they touch: a disk of many empty blocks stays one span.
fn push(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.end() == Some(span.start) => last.len += span.len,
        _ => spans.push(span),
    }
}
