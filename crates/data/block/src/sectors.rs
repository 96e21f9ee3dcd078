//! Sectors as guests are told of them: 512 bytes, or 4096. Requests are in units of 512 bytes either way; a storage
//! with longer sectors serves parts of them.

use tapio_format::live::Layer;
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Storage;
use tapio_types::{ImageKind, SECTOR_LEN};

use crate::chain::Chain;
use crate::port::Extent;

/// The longest sectors that guests are told of.
const SECTOR_LEN_MAX: u32 = 4096;

/// What a disk of these images is served as where nothing else is wanted: a raw device is its disk, also below
/// snapshots; a VHD has sectors of 512 bytes, wherever it lies.
fn natural<S: Storage>(chain: &Chain<S>) -> u32 {
    let of = |layer: &Layer<S>| match layer.kind() {
        ImageKind::Vhd => SECTOR_LEN as u32,
        ImageKind::Raw | ImageKind::Nbd | ImageKind::Rbd => {
            layer.store().info().sector_len.min(SECTOR_LEN_MAX)
        }
    };
    let longest = chain.links().iter().map(|link| of(&link.layer)).max().unwrap_or(SECTOR_LEN as u32);
    if chain.len().is_multiple_of(longest.into()) { longest } else { SECTOR_LEN as u32 }
}

/// What guests are told: what they were `told` before, or what is `wanted`, or what the images have.
///
/// # Errors
/// The disk is no whole number of such sectors.
pub(crate) fn settle<S: Storage>(chain: &Chain<S>, told: Option<u32>, wanted: Option<u32>) -> Result<u32> {
    let len = told.or(wanted).unwrap_or_else(|| natural(chain));
    let bytes = chain.len();
    if bytes.is_multiple_of(len.into()) {
        return Ok(len);
    }
    let detail = match told {
        Some(_) => format!(
            "guests were told of sectors of {len} bytes, and {bytes} bytes are no whole number of them: make the image \
             longer, or close the disk and open it again for guests that start anew"
        ),
        None => format!(
            "{bytes} bytes are no whole number of sectors of {len}: choose sectors of 512 bytes, or make the image \
             longer"
        ),
    };
    let path = &chain.links()[0].spec().path;
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(path))
}

/// How many extents to ask for, so that those of `unit` bytes are `count_max` or there is at least one.
pub(crate) fn count_for(count_max: usize, unit: u32) -> usize {
    if u64::from(unit) > SECTOR_LEN {
        count_max.max(2 * (u64::from(unit) / SECTOR_LEN) as usize)
    } else {
        count_max
    }
}

/// The extents in whole units of `unit` bytes, at most `count_max`: a unit that has data anywhere is data. What is left
/// at the end is a part of a unit only where `to_end` says that nothing more was asked about.
pub(crate) fn in_units(extents: Vec<Extent>, unit: u32, count_max: usize, to_end: bool) -> Vec<Extent> {
    let unit = u64::from(unit);
    if unit <= SECTOR_LEN {
        return extents;
    }
    let mut found: Vec<Extent> = Vec::new();
    let mut add = |new: Extent| match found.last_mut() {
        Some(last) if (last.hole, last.zero) == (new.hole, new.zero) => last.len += new.len,
        _ if new.len > 0 => found.push(new),
        _ => {}
    };
    // The unit that several extents have parts of.
    let mut open = Extent { len: 0, hole: true, zero: true };
    for mut extent in extents {
        if open.len > 0 {
            let part = extent.len.min(unit - open.len);
            open = Extent {
                len: open.len + part,
                hole: open.hole && extent.hole,
                zero: open.zero && extent.zero,
            };
            extent.len -= part;
            if open.len < unit {
                continue;
            }
            add(open);
        }
        add(Extent { len: extent.len / unit * unit, ..extent });
        open = Extent { len: extent.len % unit, ..extent };
    }
    if to_end {
        add(open);
    }
    found.truncate(count_max.max(1));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_with_data_anywhere_is_data() {
        let data = |len| Extent { len, hole: false, zero: false };
        let hole = |len| Extent { len, hole: true, zero: true };
        let units = |extents: &[Extent], to_end| in_units(extents.to_vec(), 4096, 16, to_end);
        assert_eq!(units(&[hole(8192), data(4096)], true), [hole(8192), data(4096)]);
        assert_eq!(units(&[hole(4608), data(512), hole(3072)], true), [hole(4096), data(4096)]);
        assert_eq!(units(&[data(512), hole(512), data(512), hole(6656)], true), [data(4096), hole(4096)]);
        // The rest of the last unit is not known.
        assert_eq!(units(&[hole(4096), data(512), hole(512)], false), [hole(4096)]);
        assert_eq!(units(&[hole(4096), data(512), hole(512)], true), [hole(4096), data(1024)]);
        // Nothing is changed for sectors of 512 bytes.
        assert_eq!(in_units(vec![data(512), hole(512)], 512, 2, false), [data(512), hole(512)]);
    }

    #[test]
    fn what_is_asked_for_always_makes_one_unit() {
        let extents: Vec<Extent> = (0..count_for(1, 4096))
            .map(|index| Extent { len: 512, hole: index % 2 == 0, zero: false })
            .collect();
        assert!(in_units(extents, 4096, 1, false)[0].len >= 4096);
    }
}
