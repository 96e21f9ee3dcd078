//! The rules about the parent: what the header says of it, the locators, and the parent itself.

use std::path::Path;

use super::{CLOCK_SLACK_S, CheckOptions, FindingKind, Report, Severity};
use crate::error::FormatErrorKind;
use crate::medium::Medium;
use crate::vhd::offline::parent::{find_parent, locator_path};
use crate::vhd::offline::{Image, OpenOptions};
use crate::vhd::{DiskType, FOOTER_LEN, Header, PlatformCode, layout, time};

pub(super) fn check_differencing_header<M: Medium>(
    image: &Image<M>,
    header: &Header,
    options: &CheckOptions,
    report: &mut Report,
) {
    let mut error = |sentence: String| {
        report.error(FindingKind::DifferencingHeader, format!("differencing header is invalid: {sentence}"));
    };
    if image.footer().disk_type == DiskType::Differencing {
        if !options.ignore_timestamps && header.parent_timestamp > time::now().saturating_add(CLOCK_SLACK_S) {
            error(format!("the parent is of the future: {}", time::to_text(header.parent_timestamp)));
        }
        if image.parent_name().is_none() {
            error("the parent's name cannot be read".into());
        }
    } else {
        if header.parent_name.iter().any(|&byte| byte != 0) || !header.parent_uuid.is_nil() {
            error("a disk without a parent names one".into());
        }
        if header.locators.iter().any(|entry| entry.code != PlatformCode::None) {
            error("a disk without a parent has parent locators".into());
        }
        if header.parent_timestamp != 0 {
            error("a disk without a parent has a parent's time".into());
        }
    }
}
/// The rules about locators: whole, one of a kind, naming the parent in the header, leading to it.
pub(super) fn check_locators<M: Medium>(image: &Image<M>, options: &CheckOptions, report: &mut Report) {
    let Some(header) = image.header() else { return };
    let name = image.parent_name().unwrap_or_default();
    let room = image.medium().len().unwrap_or(0).saturating_sub(FOOTER_LEN as u64);
    let mut found = 0;
    for (index, entry) in header.locators.iter().enumerate() {
        if entry.code == PlatformCode::None {
            if *entry != crate::vhd::LocatorEntry::NONE {
                report.error(
                    FindingKind::Locator,
                    format!("invalid parent locator {index}: not used, but not zero"),
                );
            }
            continue;
        }
        if header.locators[..index].iter().any(|before| before.code == entry.code) {
            report.error(
                FindingKind::Locator,
                format!("duplicate platform code in locator {index}: {}", entry.code.as_str()),
            );
            continue;
        }
        if entry.reserved != 0
            || layout::locator_end(entry).is_none_or(|end| end > room)
            || entry.data_offset == 0
        {
            report.error(
                FindingKind::Locator,
                format!("invalid parent locator {index}: it has no proper place"),
            );
            continue;
        }
        if !entry.code.is_readable() {
            continue;
        }
        let recorded = match locator_path(image, entry) {
            Ok(recorded) => recorded,
            Err(error) => {
                report.error(FindingKind::Locator, format!("error reading parent locator {index}: {error}"));
                continue;
            }
        };
        let file = Path::new(&recorded).file_name().and_then(|file| file.to_str()).unwrap_or_default();
        if file != name {
            report.error(
                FindingKind::Locator,
                format!("parent locator {index} name ({file}) does not match header name ({name})"),
            );
        }
        match find_parent(image.path(), &recorded) {
            Ok(parent) => {
                found += 1;
                check_parent(image, header, &parent, options, report);
            }
            Err(error) => {
                let kind = match error.kind() {
                    FormatErrorKind::Missing => FindingKind::ParentMissing,
                    _ => FindingKind::Parent,
                };
                report.error(kind, format!("error resolving {recorded}: {error}"));
            }
        }
    }
    if found == 0 {
        report.error(FindingKind::Parent, format!("could not find parent {name}"));
    }
}

fn check_parent<M: Medium>(
    image: &Image<M>,
    header: &Header,
    parent: &Path,
    options: &CheckOptions,
    report: &mut Report,
) {
    let same =
        |report: &Report, sentence: &str| report.findings.iter().any(|finding| finding.sentence == sentence);
    let mut once = |severity, sentence: String| {
        // Three locators usually lead to the one parent.
        if !same(report, &sentence) {
            report.add(FindingKind::Parent, severity, sentence);
        }
    };
    if !image.has_raw_parent() && !options.ignore_parent_uuid {
        match Image::open(parent, OpenOptions::LOOK) {
            Ok(found) if found.footer().uuid != header.parent_uuid => once(
                Severity::Error,
                format!(
                    "invalid parent {}: its UUID is {} and {} was recorded",
                    parent.display(),
                    found.footer().uuid,
                    header.parent_uuid
                ),
            ),
            Ok(_) => {}
            Err(error) => once(Severity::Error, format!("error opening parent: {error}")),
        }
    }
    // A parent that was hidden or coalesced into has a new time, and that is how every chain is made: no error.
    let mtime = std::fs::metadata(parent).map(|facts| std::os::unix::fs::MetadataExt::mtime(&facts));
    if !options.ignore_timestamps
        && mtime.is_ok_and(|mtime| time::from_unix(mtime) != header.parent_timestamp)
    {
        once(Severity::Warning, format!("parent {} changed after the child was made", parent.display()));
    }
}
