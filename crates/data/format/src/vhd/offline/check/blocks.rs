//! The rules for the block table, the batmap and the bitmaps.

use super::{CheckOptions, FindingKind, Report, SectorCounts};
use crate::error::Result;
use crate::medium::Medium;
use crate::vhd::offline::Image;
use crate::vhd::{BatmapHeader, FOOTER_LEN, Header, SECTOR_LEN, batmap, bitmap, layout};

pub(super) fn check_table<M: Medium>(
    image: &Image<M>,
    header: &Header,
    len: u64,
    options: &CheckOptions,
    report: &mut Report,
) {
    let block_sectors = layout::block_span_len(header.block_len) / SECTOR_LEN;
    let metadata = layout::metadata_end(header, image.batmap().map(|batmap| &batmap.header)) / SECTOR_LEN;
    let from_backup = image.footer_source() == crate::vhd::FooterSource::Backup;
    // Without a footer at the end, the last block may reach right to it.
    let room =
        if from_backup { len } else { len.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64 } / SECTOR_LEN;
    for (block, sector) in image.bat().allocated() {
        let end = u64::from(sector) + block_sectors;
        if u64::from(sector) < metadata {
            report.error(FindingKind::Table, format!("block {block} (offset {sector:#x}) clobbers headers"));
        }
        if end > room {
            report.error(FindingKind::Table, format!("block {block} (offset {sector:#x}) clobbers footer"));
        }
    }
    if options.skip_overlap {
        return;
    }
    let mut places: Vec<(u32, u32)> =
        image.bat().allocated().map(|(block, sector)| (sector, block)).collect();
    places.sort_unstable();
    for pair in places.windows(2) {
        let ((first, a), (second, b)) = (pair[0], pair[1]);
        if u64::from(second) < u64::from(first) + block_sectors {
            report.error(
                FindingKind::Overlap,
                format!("block {a} (offset {first:#x}) clobbers block {b} (offset {second:#x})"),
            );
        }
    }
}

pub(super) fn check_batmap<M: Medium>(
    image: &Image<M>,
    header: &Header,
    len: u64,
    report: &mut Report,
) -> Result<()> {
    if !image.footer().may_have_batmap() {
        return Ok(());
    }
    let mut error =
        |sentence: &str| report.error(FindingKind::Batmap, format!("batmap is invalid: {sentence}"));
    let required = batmap::is_required(image.footer());
    let at = batmap::header_offset(header);
    let room = len.saturating_sub(FOOTER_LEN as u64);
    if at.saturating_add(batmap::HEADER_LEN as u64) > room {
        if required {
            error("there is no room for it");
        }
        return Ok(());
    }
    let mut bytes = [0; batmap::HEADER_LEN];
    image.read_bytes(at, &mut bytes)?;
    let found = match BatmapHeader::decode(&bytes, header) {
        Ok(found) => found,
        Err(_) if !required => return Ok(()),
        Err(wrong) => {
            error(wrong.detail());
            return Ok(());
        }
    };
    if found.offset.saturating_add(found.len()) > room {
        error("it reaches beyond the end");
        return Ok(());
    }
    let Some(batmap) = image.batmap() else {
        error("its checksum is wrong");
        return Ok(());
    };
    for (full, first, count) in bitmap::runs(&batmap.map, 0, image.bat().len() as usize) {
        for block in (first..first + count).filter(|_| full).map(|block| block as u32) {
            if image.bat().entry(block).is_none() {
                report.error(FindingKind::Batmap, format!("batmap shows unallocated block {block} full"));
            }
        }
    }
    Ok(())
}

pub(super) fn check_bitmaps<M: Medium>(
    image: &Image<M>,
    options: &CheckOptions,
    report: &mut Report,
) -> Result<()> {
    let block_sectors = image.block_sectors();
    let mut counts = SectorCounts { block_sectors, ..SectorCounts::default() };
    let mut data = vec![0; image.block_len() as usize];
    for (block, _) in image.bat().allocated() {
        let (Some(map), Some(at)) = (image.bitmap_on_disk(block)?, image.data_offset(block)) else {
            continue;
        };
        let written = bitmap::count_set(&map, block_sectors);
        if image.is_block_full(block) && written < block_sectors {
            report.warn(
                FindingKind::Bitmap,
                format!("batmap shows block {block} full where its bitmap has {written} sectors of {block_sectors}"),
            );
        }
        if options.bitmaps {
            image.read_bytes(at, &mut data)?;
            for (present, first, count) in bitmap::runs(&map, 0, block_sectors) {
                let sectors = data.chunks_exact(SECTOR_LEN as usize).enumerate().skip(first).take(count);
                for (sector, _) in
                    sectors.filter(|(_, bytes)| !present && bytes.iter().any(|&byte| byte != 0))
                {
                    // What a writer stopped between data and bitmap leaves: odd, and never read.
                    report.warn(
                        FindingKind::Bitmap,
                        format!("sector {sector:#x} of block {block:#x} has data where bitmap is clear"),
                    );
                }
            }
        }
        counts.allocated += block_sectors as u64;
        counts.written += written as u64;
        if options.counts {
            counts.blocks.insert(block, if written == block_sectors { Vec::new() } else { map });
        }
    }
    if options.counts {
        report.counts = Some(counts);
    }
    Ok(())
}
