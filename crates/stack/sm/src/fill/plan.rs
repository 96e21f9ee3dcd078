//! Which sectors are to be copied, told from what the images hold, before any data are read.

use std::os::unix::fs::MetadataExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tapio_format::vhd::offline::{Chain, Layer};
use tapio_format::{FileMedium, FormatError};
use tapio_types::{ChainSpec, Span};

use super::source::{Source, as_format};

/// How much is moved at once: a block of a VHD.
pub(crate) const PIECE_LEN: u64 = 2 << 20;

/// What an image says of sectors that are to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Anything.
    Data,
    /// Zeros, for sure.
    Zeros,
}

/// How the sectors are found.
#[derive(Debug)]
pub(crate) enum Plan {
    /// All that any image of the source holds.
    Everything,
    /// What is held by the images in which the two disks differ: so many on top of each.
    Above { own: usize, theirs: usize },
    /// The disks have no image in common: their contents are compared.
    Compared,
}

impl Plan {
    pub(crate) fn new(
        source: &Source,
        other: Option<&Source>,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Self {
        let (Some(other), Some(base)) = (other, base) else { return Self::Everything };
        let (Some(source), Some(other)) = (source.files(), other.files()) else { return Self::Compared };
        let ids = |chain: &Chain<FileMedium>, spec: &ChainSpec| -> Vec<Option<(u64, u64)>> {
            debug_assert_eq!(chain.layers().len(), spec.layers.len());
            let id = |path| std::fs::metadata(path).map(|data| (data.dev(), data.ino())).ok();
            spec.layers.iter().map(|layer| id(&layer.path)).collect()
        };
        let (own, theirs) = (ids(source, from), ids(other, base));
        let pairs = own.iter().rev().zip(theirs.iter().rev());
        let common = pairs.take_while(|(a, b)| a.is_some() && a == b).count();
        // A disk that was made longer after the other was taken has sectors that the other's images do not tell of.
        if common == 0 || source.virtual_len() != other.virtual_len() {
            return Self::Compared;
        }
        Self::Above { own: own.len() - common, theirs: theirs.len() - common }
    }

    /// Whether zeros count: what is copied is laid over other contents.
    pub(crate) fn is_delta(&self) -> bool {
        !matches!(self, Self::Everything)
    }

    /// Whether both disks are read.
    pub(crate) fn compares(&self) -> bool {
        matches!(self, Self::Compared)
    }

    /// The sectors of `span` to be copied, in order.
    pub(crate) fn wanted(
        &self,
        source: &Source,
        other: Option<&Source>,
        span: Span,
    ) -> Result<Vec<(Span, Holds)>, FormatError> {
        let mut wanted = Vec::new();
        let count = match self {
            Self::Above { own, .. } => *own,
            _ => usize::MAX,
        };
        add(source, span, count, &mut wanted)?;
        if let (Some(other), Self::Above { .. } | Self::Compared) = (other, self) {
            let theirs = if let Self::Above { theirs, .. } = self { *theirs } else { usize::MAX };
            let there = span.prefix(other.virtual_len().saturating_sub(span.start));
            if !there.is_empty() {
                let before = wanted.len();
                add(other, there, theirs, &mut wanted)?;
                // What the other's images hold says nothing of what the source holds there.
                wanted[before..].iter_mut().for_each(|(_, holds)| *holds = Holds::Data);
            }
        }
        Ok(joined(wanted))
    }
}

/// Adds what the first `count` images of the chain hold of `span`.
fn add(
    source: &Source,
    span: Span,
    count: usize,
    wanted: &mut Vec<(Span, Holds)>,
) -> Result<(), FormatError> {
    let chain = match source {
        Source::Files(chain) => chain,
        Source::Ceph(disk) => {
            let data = disk.data(span).map_err(as_format)?;
            wanted.extend(data.into_iter().map(|span| (span, Holds::Data)));
            return Ok(());
        }
    };
    for extent in chain.extents(span)? {
        let Some((layer, offset)) = extent.place.filter(|(layer, _)| *layer < count) else { continue };
        match &chain.layers()[layer] {
            Layer::Raw { medium, .. } => add_raw(medium, extent.span, offset, wanted),
            Layer::Vhd(_) => wanted.push((extent.span, Holds::Data)),
        }
    }
    Ok(())
}

/// A raw image holds all of its sectors; in a file, holes are known to be zero.
fn add_raw(medium: &FileMedium, span: Span, offset: u64, wanted: &mut Vec<(Span, Holds)>) {
    let mut at = 0;
    while at < span.len {
        let here = offset + at;
        let (data, hole) = (seek(medium, SeekFrom::Data(here)), seek(medium, SeekFrom::Hole(here)));
        let left = span.len - at;
        let (len, holds) = match (data, hole) {
            // Behind the last data.
            (Err(Errno::NXIO), _) => (left, Holds::Zeros),
            (Ok(data), _) if data > here => (left.min(data - here), Holds::Zeros),
            (Ok(_), Ok(hole)) if hole > here => (left.min(hole - here), Holds::Data),
            // A file system, or a device, that does not tell.
            _ => (left, Holds::Data),
        };
        // Whole sectors: holes end where the file system's blocks do, the file where it likes.
        let len = len.next_multiple_of(tapio_types::SECTOR_LEN).min(left);
        wanted.push((Span::new(span.start + at, len), holds));
        at += len;
    }
}

/// The next place of a kind from `at` on.
fn seek(medium: &FileMedium, to: SeekFrom) -> Result<u64, Errno> {
    // The file's position is of no interest: all threads read and write at offsets of their own.
    rustix::fs::seek(medium.file(), to)
}

/// In order and without overlap; where two say something of the same sectors, data count.
fn joined(mut wanted: Vec<(Span, Holds)>) -> Vec<(Span, Holds)> {
    wanted.sort_by_key(|(span, holds)| (span.start, *holds == Holds::Zeros));
    let mut parts: Vec<(Span, Holds)> = Vec::with_capacity(wanted.len());
    for (span, holds) in wanted {
        let Some((last, last_holds)) = parts.last_mut() else {
            parts.push((span, holds));
            continue;
        };
        let last_end = last.start + last.len;
        let end = span.start + span.len;
        if span.start > last_end || (span.start == last_end && holds != *last_holds) {
            parts.push((span, holds));
        } else if holds == *last_holds || span.start == last_end {
            last.len = last.len.max(end - last.start);
        } else {
            // Zeros and data over each other: reading tells.
            *last_holds = Holds::Data;
            last.len = last.len.max(end - last.start);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_joined_and_data_win() {
        let (a, b) = (Holds::Data, Holds::Zeros);
        let span = Span::new;
        assert_eq!(joined(vec![(span(4, 4), a), (span(0, 4), a)]), [(span(0, 8), a)]);
        assert_eq!(joined(vec![(span(0, 4), b), (span(4, 4), a)]), [(span(0, 4), b), (span(4, 4), a)]);
        assert_eq!(joined(vec![(span(0, 8), b), (span(4, 8), a)]), [(span(0, 12), a)]);
        assert_eq!(joined(vec![(span(0, 8), a), (span(2, 2), a)]), [(span(0, 8), a)]);
        assert_eq!(joined(vec![(span(9, 1), b), (span(0, 8), a)]), [(span(0, 8), a), (span(9, 1), b)]);
    }
}
