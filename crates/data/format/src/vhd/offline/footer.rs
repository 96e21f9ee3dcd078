//! Finding the footer of an image that may be damaged.

use crate::error::{FormatError, FormatErrorKind, Result, corrupt};
use crate::medium::Medium;
use crate::vhd::mark::unmarked;
use crate::vhd::{FOOTER_LEN, Footer, FooterSource, SECTOR_LEN, Tolerance};

/// The footer of the image on `medium`: at the end, or 511 bytes long at the end, or its copy at the start.
///
/// The copy counts only for a disk that has a header: in a fixed disk the guest's own data are there.
///
/// # Errors
/// What is wrong with the footer at the end, where no other can be used either.
pub fn read_footer<M: Medium>(
    medium: &M,
    use_backup: bool,
) -> Result<(Footer, FooterSource, Vec<Tolerance>)> {
    let len = medium.len().map_err(|error| FormatError::io("cannot find the length", error))?;
    if len < FOOTER_LEN as u64 - 1 {
        return Err(FormatError::new(
            FormatErrorKind::NotThisFormat,
            format!("{len} bytes are too few for a VHD, which has a footer of 512 bytes"),
        )
        .with_errno(if len == 0 { libc::EPIPE } else { libc::EIO }));
    }
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        medium
            .read_at(at, &mut bytes)
            .map_err(|error| FormatError::io("cannot read the footer", error).with_offset(at))?;
        Ok::<_, FormatError>(bytes)
    };
    let whole = |bytes: Vec<u8>| {
        let mut footer = [0; FOOTER_LEN];
        footer[..bytes.len()].copy_from_slice(&bytes);
        footer
    };
    let short = len % SECTOR_LEN == SECTOR_LEN - 1;
    let tail = if short {
        let at = len - (FOOTER_LEN as u64 - 1);
        let mut bytes = [0; FOOTER_LEN - 1];
        bytes.copy_from_slice(&read(at, FOOTER_LEN - 1)?);
        let wrong = |error: FormatError| if at == 0 { error.with_errno(libc::EIO) } else { error };
        Footer::decode_short(&bytes).map_err(|error| wrong(error.with_offset(at)))
    } else if len >= FOOTER_LEN as u64 {
        let at = len - FOOTER_LEN as u64;
        Footer::decode(&whole(read(at, FOOTER_LEN)?)).map_err(|error| error.with_offset(at))
    } else {
        Err(FormatError::new(FormatErrorKind::NotThisFormat, "no footer"))
    };
    let source = if short { FooterSource::Short } else { FooterSource::Primary };
    let error = match tail {
        Ok((footer, tolerance)) if !use_backup => {
            return Ok((footer, source, tolerance.into_iter().collect()));
        }
        Ok(_) => None,
        Err(error) => Some(error),
    };
    let backup = if len >= FOOTER_LEN as u64 {
        Footer::decode(&whole(read(0, FOOTER_LEN)?)).map_err(|error| error.with_offset(0))
    } else {
        Err(FormatError::new(FormatErrorKind::NotThisFormat, "no copy of the footer"))
    };
    match backup {
        Ok((footer, tolerance)) if footer.disk_type.is_dynamic() => {
            let mut tolerances: Vec<_> = tolerance.into_iter().collect();
            tolerances.push(Tolerance::BackupFooter);
            Ok((unmarked(&footer), FooterSource::Backup, tolerances))
        }
        Ok(_) => Err(error.unwrap_or_else(|| corrupt("a fixed disk has no copy of its footer"))),
        Err(backup) => Err(error.unwrap_or(backup)),
    }
}
