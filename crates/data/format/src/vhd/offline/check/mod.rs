//! The rules that an image must keep, and the findings where it does not.
//!
//! Every rule is looked at, not only up to the first that is broken. What a reader would overlook is a warning: the
//! image is still valid. [`check`] works on any medium, so that a simulator can ask it after each power cut.
//!
//! ```text
//! findings   what is found     headers   footers and header     blocks   table, batmap, bitmaps     parents   locators
//! ```

mod blocks;
mod findings;
mod headers;
mod parents;

use std::io;
use std::path::Path;

use tapio_types::Access;

use super::image::{Image, OpenOptions};
use super::parent::{ParentLink, resolve_parent};
use crate::error::{FormatError, Result};
use crate::medium::{FileMedium, Medium};
use crate::vhd::{CHAIN_DEPTH_MAX, DiskType, FOOTER_LEN, SECTOR_LEN};

pub use findings::{CheckOptions, Finding, FindingKind, Report, SectorCounts, Severity};

use blocks::{check_batmap, check_bitmaps, check_table};
use headers::{check_footers, check_header};
use parents::{check_differencing_header, check_locators};

/// How far ahead of the present a time in an image may be: clocks of hosts differ.
const CLOCK_SLACK_S: u32 = 1800;

/// Checks the image at `path`, and with [`CheckOptions::parents`] the images below it, leaf first.
///
/// # Errors
/// Those of the system; a broken rule is a finding and not an error.
pub fn check_path(path: &Path, options: &CheckOptions) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    let mut next = Some(path.to_path_buf());
    while let Some(path) = next.take() {
        let medium = FileMedium::open(&path, Access::ReadOnly)?;
        let (mut report, image) = check_image(&medium, &path, options)?;
        if let Some(image) = image.filter(|image| image.footer().disk_type == DiskType::Differencing) {
            check_locators(&image, options, &mut report);
            if options.parents && report.is_valid() {
                match resolve_parent(&image) {
                    Ok(ParentLink::Vhd(parent)) if reports.len() + 1 < CHAIN_DEPTH_MAX => next = Some(parent),
                    Ok(ParentLink::Vhd(_)) => report.error(
                        FindingKind::Parent,
                        format!("the chain has more than {CHAIN_DEPTH_MAX} images, or is a loop"),
                    ),
                    Ok(_) => {}
                    Err(error) => report.error(FindingKind::Parent, error.to_string()),
                }
            }
        }
        reports.push(report);
    }
    Ok(reports)
}

/// Checks the image on `medium` by itself: all rules but those about where its parent is.
///
/// # Errors
/// Those of the medium.
pub fn check<M: Medium>(medium: &M, options: &CheckOptions) -> Result<Report> {
    Ok(check_image(medium, Path::new(""), options)?.0)
}

/// As [`check`], and the image itself where it can be opened.
///
/// # Errors
/// Those of the medium.
pub fn check_image<'m, M: Medium>(
    medium: &'m M,
    path: &Path,
    options: &CheckOptions,
) -> Result<(Report, Option<Image<View<'m, M>>>)> {
    let mut report = Report { path: path.to_path_buf(), ..Report::default() };
    let len =
        medium.len().map_err(|error| FormatError::io("cannot find the length", error).with_path(path))?;
    let Some(footer) =
        check_footers(medium, len, options, &mut report).map_err(|error| error.with_path(path))?
    else {
        return Ok((report, None));
    };
    if footer.disk_type.is_dynamic() {
        check_header(medium, len, &footer, &mut report).map_err(|error| error.with_path(path))?;
    } else if footer.current_len + FOOTER_LEN as u64 > len.next_multiple_of(SECTOR_LEN) {
        report.error(
            FindingKind::Length,
            format!("a fixed disk of {} bytes does not fit a file of {len} bytes", footer.current_len),
        );
    }
    if !report.is_valid() {
        return Ok((report, None));
    }
    let look = OpenOptions { use_backup: false, ..OpenOptions::LOOK };
    let image = match Image::open_on(View(medium), path, look) {
        Ok(image) => image,
        Err(error) if error.kind() == crate::FormatErrorKind::Io => return Err(error),
        Err(error) => {
            report.error(FindingKind::Header, error.detail().to_string());
            return Ok((report, None));
        }
    };
    if let Some(header) = image.header().cloned() {
        check_differencing_header(&image, &header, options, &mut report);
        check_table(&image, &header, len, options, &mut report);
        check_batmap(&image, &header, len, &mut report)?;
        if report.is_valid() && (options.bitmaps || options.counts) {
            check_bitmaps(&image, options, &mut report)?;
        }
    }
    Ok((report, Some(image)))
}
fn read<M: Medium>(medium: &M, at: u64, into: &mut [u8]) -> Result<()> {
    medium.read_at(at, into).map_err(|error| FormatError::io("cannot read", error).with_offset(at))
}

/// A medium that is only looked at.
#[derive(Debug)]
pub struct View<'m, M>(&'m M);

impl<M: Medium> Medium for View<'_, M> {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn is_device(&self) -> bool {
        self.0.is_device()
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(at, into)
    }
    fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EROFS))
    }
    fn set_len(&mut self, _: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EROFS))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
