//! Single facts of an image: hidden flag, marker, sizes.

use uuid::Uuid;

use super::image::Image;
use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::Medium;
use crate::vhd::footer::CREATOR_VERSION;
use crate::vhd::{FOOTER_LEN, KeyHash, SECTOR_LEN, bat::ENTRIES_PER_SECTOR, batmap};

/// Hides a node from lists, or shows it again.
///
/// On a full file system the copy at the start is written at least, which needs no space: a node that is being
/// deleted to make room can then still be marked.
///
/// # Errors
/// Those of the medium.
pub fn set_hidden<M: Medium>(image: &mut Image<M>, hidden: u8) -> Result<()> {
    image.footer_mut().hidden = hidden;
    match image.write_footer() {
        Err(error)
            if error.kind() == FormatErrorKind::OutOfSpace
                && hidden != 0
                && image.footer.disk_type.is_dynamic() =>
        {
            Ok(())
        }
        done => done,
    }
}

/// Gives the image another UUID. Its children know it by the old one.
///
/// # Errors
/// Those of the medium.
pub fn set_uuid<M: Medium>(image: &mut Image<M>, uuid: Uuid) -> Result<()> {
    image.footer_mut().uuid = uuid;
    image.write_footer()
}

/// Sets the marker, a byte in the batmap's header for any program's use.
///
/// # Errors
/// `Unsupported` in an image without a batmap; those of the medium.
pub fn set_marker<M: Medium>(image: &mut Image<M>, marker: u8) -> Result<()> {
    change_batmap_header(image, |header| header.marker = marker)
}

/// Sets the hash of the key that the image's data are encrypted with.
///
/// # Errors
/// As [`set_marker`].
pub fn set_key_hash<M: Medium>(image: &mut Image<M>, key_hash: KeyHash) -> Result<()> {
    change_batmap_header(image, |header| header.key_hash = key_hash)
}

fn change_batmap_header<M: Medium>(
    image: &mut Image<M>,
    change: impl FnOnce(&mut batmap::BatmapHeader),
) -> Result<()> {
    let (Some(header), Some(batmap)) = (&image.header, &mut image.batmap) else {
        return Err(FormatError::new(
            FormatErrorKind::Unsupported,
            "has no batmap to keep this in: only dynamic images by tapdisk's tools or ours have one",
        )
        .with_path(&image.path));
    };
    change(&mut batmap.header);
    let (at, bytes) = (batmap::header_offset(header), batmap.header.encode());
    image.write_bytes(at, &bytes)?;
    image.flush()
}

/// Puts the footer at the end of `len` bytes: after a device was made larger, before it is made smaller.
///
/// # Errors
/// `InvalidArgument` where data would be lost; those of the medium.
pub fn set_physical_len<M: Medium>(image: &mut Image<M>, len: u64) -> Result<()> {
    let least = image.physical_len();
    if len < least || !len.is_multiple_of(SECTOR_LEN) {
        return Err(invalid(format!(
            "a physical size of {len} bytes cannot be: it must be whole sectors and at least {least} bytes"
        ))
        .with_path(&image.path));
    }
    let footer = image.footer.encode();
    image.write_bytes(len - FOOTER_LEN as u64, &footer)?;
    image.flush()?;
    if !image.medium.is_device() && image.medium_len()? > len {
        let path = &image.path;
        image
            .medium
            .set_len(len)
            .map_err(|error| FormatError::io("cannot cut the file off", error).with_path(path))?;
        image.flush()?;
    }
    Ok(())
}

/// Forgets all data of the image itself; it then reads as its parent, or as zeros.
///
/// # Errors
/// `Unsupported` for a fixed disk; those of the medium.
pub fn kill_data<M: Medium>(image: &mut Image<M>) -> Result<()> {
    let Some(header) = image.header.clone() else {
        return Err(FormatError::new(FormatErrorKind::Unsupported, "a fixed disk has no blocks to forget")
            .with_path(&image.path)
            .with_errno(libc::ENOSYS));
    };
    // The batmap first: a bit for a block that is not there would be damage, a missing bit costs nothing.
    if let Some(mut batmap) = image.batmap.take() {
        if batmap.map.iter().any(|&byte| byte != 0) {
            batmap.map.fill(0);
            batmap.header.checksum = batmap.header.map_checksum(&batmap.map, image.footer.current_len);
            image.write_bytes(batmap.header.offset, &batmap.map)?;
            image.write_bytes(batmap::header_offset(&header), &batmap.header.encode())?;
            image.flush()?;
        }
        image.batmap = Some(batmap);
    }
    image.bat = crate::vhd::Bat::new(image.bat.len());
    for start in (0..image.bat.len()).step_by(ENTRIES_PER_SECTOR) {
        image.write_bat_sector(start)?;
    }
    image.flush()?;
    image.end = crate::vhd::layout::metadata_end(&header, image.batmap.as_ref().map(|batmap| &batmap.header));
    image.pending = super::image::Pending::default();
    image.full.clear();
    if image.medium.is_device() { Ok(()) } else { image.write_footer() }
}

/// Makes the virtual disk `len` bytes large, rounded up to whole sectors, within what the table has entries for.
///
/// # Errors
/// `InvalidArgument` for a smaller size and for one beyond the table; those of the medium.
pub fn resize_fast<M: Medium>(image: &mut Image<M>, len: u64) -> Result<()> {
    let Some(header) = &image.header else {
        return Err(invalid("a fixed disk has no room to grow within").with_path(&image.path));
    };
    let len = len.checked_next_multiple_of(SECTOR_LEN).unwrap_or(u64::MAX);
    if len < image.footer.current_len {
        return Err(invalid(format!(
            "{len} bytes are less than the present {} bytes: a disk is not made smaller",
            image.footer.current_len
        ))
        .with_path(&image.path));
    }
    let Ok(entries) = header.entries_for(len) else {
        return Err(invalid(format!(
            "not enough metadata space reserved for {len} bytes: the table has {} entries; use 'vhd-util resize -j'",
            header.entries_max
        ))
        .with_path(&image.path));
    };
    // Entries beyond the old size are trusted from now on: they must be empty, whatever once stood there.
    let old = image.bat.len();
    image.bat.resize(entries);
    let first = old - old % ENTRIES_PER_SECTOR as u32;
    for start in (first..entries).step_by(ENTRIES_PER_SECTOR) {
        image.write_bat_sector(start)?;
    }
    image.flush()?;
    image.footer = image.footer.resized(len);
    debug_assert!(image.footer.creator_version <= CREATOR_VERSION || !image.footer.is_by_tapdisk());
    image.write_footer()
}
