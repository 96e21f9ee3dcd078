//! A child into its parent, so that the child can be taken out of the chain.
//!
//! What the child has, it hides from the parent: writing it into the parent changes nothing that a reader of the child
//! sees, at no moment. A kill therefore leaves both valid, and a second run writes the same bytes again.

use std::path::Path;

use tapio_types::{Access, Span};

use super::image::{Image, OpenOptions};
use super::modify::resize_fast;
use super::parent::{ParentLink, resolve_parent};
use crate::continuation::check_not_below_standby;
use crate::error::{FormatError, FormatErrorKind, Result, corrupt, invalid};
use crate::medium::{FileMedium, Medium, PageBuffer};
use crate::vhd::{DiskType, FOOTER_LEN, SECTOR_LEN, bitmap};

/// What a child is merged into.
#[derive(Debug)]
pub enum CoalesceTarget<M> {
    /// A raw file or device.
    Raw(M),
    /// A VHD of any kind.
    Vhd(Box<Image<M>>),
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalesced {
    /// Sectors written into the parent.
    pub sectors: u64,
    /// Sectors of zeros that were left out because the parent reads as zeros there anyway.
    pub sectors_skipped: u64,
}

/// Merges the image at `path` into its parent. `progress` is called with blocks done and blocks in all.
///
/// # Errors
/// `InvalidArgument` without a parent; those of finding and opening it; as [`coalesce`].
pub fn coalesce_path(path: &Path, sparse: bool, progress: impl FnMut(u32, u32)) -> Result<Coalesced> {
    let child = Image::open(path, OpenOptions::READ)?;
    child.check_settled()?;
    check_not_below_standby(path)?;
    let target = match resolve_parent(&child)? {
        ParentLink::None => {
            return Err(invalid("is no differencing disk: there is nothing to merge it into").with_path(path));
        }
        ParentLink::Raw(parent) => {
            check_not_below_standby(&parent)?;
            CoalesceTarget::Raw(FileMedium::open(&parent, Access::ReadWrite)?)
        }
        ParentLink::Vhd(parent) => {
            let parent = Image::open(&parent, OpenOptions::WRITE)?;
            let recorded = child.header().map(|header| header.parent_uuid);
            if recorded != Some(parent.footer().uuid) {
                return Err(corrupt("is not the parent that the child recorded: their UUIDs differ")
                    .with_path(parent.path()));
            }
            CoalesceTarget::Vhd(Box::new(parent))
        }
    };
    coalesce(&child, target, sparse, progress)
}

/// Merges `child` into `target`. A target smaller than the child is made as large first.
///
/// With `sparse`, zeros are not written where the parent has none of its own and nothing below it.
///
/// # Errors
/// `OutOfSpace`, `InvalidArgument` for a parent that cannot grow, those of the media. What was merged until then
/// stays merged; both images are valid.
pub fn coalesce<M: Medium, P: Medium>(
    child: &Image<M>,
    target: CoalesceTarget<P>,
    sparse: bool,
    mut progress: impl FnMut(u32, u32),
) -> Result<Coalesced> {
    let blocks = child.bat().len();
    let mut reported = 0;
    let done = coalesce_paced(child, target, sparse, |block, _| {
        if block >= reported {
            progress(block, blocks);
            reported = block + blocks / 1000 + 1;
        }
        Ok(false)
    })?;
    progress(blocks, blocks);
    Ok(done)
}

/// As [`coalesce`]; before each block of the child, `pace` is told the block and what was done so far. It may wait,
/// ends the merge by an error, and answers whether what was done is made durable first.
///
/// # Errors
/// As [`coalesce`], and those of `pace`: what was merged until then stays merged; both images are valid.
pub fn coalesce_paced<M: Medium, P: Medium>(
    child: &Image<M>,
    mut target: CoalesceTarget<P>,
    sparse: bool,
    mut pace: impl FnMut(u32, Coalesced) -> Result<bool>,
) -> Result<Coalesced> {
    grow(&mut target, child.virtual_len())?;
    let mut done = Coalesced::default();
    let mut data = PageBuffer::new(child.block_len() as usize);
    for (block, _) in child.bat().allocated() {
        if pace(block, done)? {
            target.commit()?;
        }
        merge_block(child, &mut target, block, sparse, &mut data, &mut done)?;
    }
    match &mut target {
        CoalesceTarget::Raw(_) => target.commit()?,
        CoalesceTarget::Vhd(parent) => parent.finish()?,
    }
    Ok(done)
}

impl<P: Medium> CoalesceTarget<P> {
    /// Makes what was merged so far visible and durable.
    fn commit(&mut self) -> Result<()> {
        match self {
            Self::Raw(medium) => {
                medium.flush().map_err(|error| FormatError::io("cannot flush the parent", error))
            }
            Self::Vhd(parent) => parent.commit(),
        }
    }
}

fn merge_block<M: Medium, P: Medium>(
    child: &Image<M>,
    target: &mut CoalesceTarget<P>,
    block: u32,
    sparse: bool,
    data: &mut [u8],
    done: &mut Coalesced,
) -> Result<()> {
    let (Some(map), Some(data_offset)) = (child.bitmap(block)?, child.data_offset(block)) else {
        return Ok(());
    };
    let block_start = u64::from(block) * u64::from(child.block_len());
    let sectors =
        ((child.virtual_len() - block_start) / SECTOR_LEN).min(child.block_sectors() as u64) as usize;
    for (present, first, count) in bitmap::runs(&map, 0, sectors) {
        if !present {
            continue;
        }
        let within = first as u64 * SECTOR_LEN;
        let run = &mut data[..count * SECTOR_LEN as usize];
        child.read_bytes(data_offset + within, run)?;
        let at = block_start + within;
        if sparse && is_zero(run) && reads_as_zeros(target, at, run.len() as u64) {
            done.sectors_skipped += count as u64;
            continue;
        }
        match target {
            CoalesceTarget::Raw(medium) => medium
                .write_at(at, run)
                .map_err(|error| FormatError::io("cannot write the raw parent", error).with_offset(at))?,
            CoalesceTarget::Vhd(parent) => parent.write_at(at, run)?,
        }
        done.sectors += count as u64;
    }
    Ok(())
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// Whether the target surely reads as zeros in a range, which a table alone can tell.
fn reads_as_zeros<P: Medium>(target: &CoalesceTarget<P>, at: u64, len: u64) -> bool {
    let CoalesceTarget::Vhd(parent) = target else { return false };
    let block_len = u64::from(parent.block_len());
    let blocks = at / block_len..(at + len).div_ceil(block_len);
    parent.footer().disk_type == DiskType::Dynamic
        && blocks
            .into_iter()
            .all(|block| u32::try_from(block).is_ok_and(|block| parent.block_sector(block).is_none()))
}

/// Makes the target at least `len` bytes large.
fn grow<P: Medium>(target: &mut CoalesceTarget<P>, len: u64) -> Result<()> {
    match target {
        CoalesceTarget::Raw(medium) => {
            let io = |error| FormatError::io("cannot make the raw parent as large as the child", error);
            let now = medium.len().map_err(io)?;
            if now >= len {
                return Ok(());
            }
            if medium.is_device() {
                return Err(FormatError::new(
                    FormatErrorKind::OutOfSpace,
                    format!(
                        "the parent is a device of {now} bytes and the child has {len}: make the device larger"
                    ),
                ));
            }
            if !now.is_multiple_of(SECTOR_LEN) {
                // The last piece was no part of the disk. As one it reads as zero, as all that is new.
                medium.set_len(now / SECTOR_LEN * SECTOR_LEN).map_err(io)?;
            }
            medium.set_len(len).map_err(io)?;
            medium.flush().map_err(io)
        }
        CoalesceTarget::Vhd(parent) if parent.virtual_len() >= len => Ok(()),
        CoalesceTarget::Vhd(parent) if parent.footer().disk_type == DiskType::Fixed => {
            grow_fixed(parent, len)
        }
        CoalesceTarget::Vhd(parent) => resize_fast(parent, len),
    }
}

/// Makes a fixed disk larger: a second footer first, then the old one made zero, then the size. The disk's bytes
/// read the same at every moment, and there is a footer at the end at every moment.
pub(super) fn grow_fixed<P: Medium>(parent: &mut Image<P>, len: u64) -> Result<()> {
    let len = len.next_multiple_of(SECTOR_LEN);
    let old = parent.footer().encode();
    let old_at = parent.medium_len()?.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64;
    if parent.medium().is_device() {
        if old_at < len {
            return Err(FormatError::new(
                FormatErrorKind::OutOfSpace,
                format!("the device has no room for a fixed disk of {len} bytes: make it larger"),
            )
            .with_path(parent.path()));
        }
    } else if old_at < len {
        parent.write_bytes(len, &old)?;
        parent.flush()?;
        parent.zero(Span::new(old_at, FOOTER_LEN as u64))?;
        parent.flush()?;
    }
    *parent.footer_mut() = parent.footer().resized(len);
    parent.write_footer()
}
