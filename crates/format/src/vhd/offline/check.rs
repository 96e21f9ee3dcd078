//! The rules that an image must keep, and the findings where it does not.
//!
//! Every rule is looked at, not only up to the first that is broken. What a reader would overlook is a warning: the
//! image is still valid. [`check`] works on any medium, so that a simulator can ask it after each power cut.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use tapio_types::{Access, Span};

use super::image::{Image, OpenOptions};
use super::parent::{ParentLink, find_parent, locator_path, resolve_parent};
use crate::error::{FormatError, Result};
use crate::medium::{FileMedium, Medium};
use crate::vhd::footer::{
    COOKIE, COOKIE_DISABLED, CREATOR_VERSION, FEATURE_RESERVED, FEATURE_TEMPORARY, NO_HEADER, VERSION,
};
use crate::vhd::{
    BLOCK_LEN, BatmapHeader, CHAIN_DEPTH_MAX, DiskType, FOOTER_LEN, Footer, Geometry, HEADER_LEN, Header,
    PlatformCode, SECTOR_LEN, batmap, bitmap, header, layout, time,
};

/// How far ahead of the present a time in an image may be: clocks of hosts differ.
const CLOCK_SLACK_S: u32 = 1800;
/// The most findings kept of one kind: a table of garbage has millions.
const FINDINGS_MAX: usize = 32;

/// What to look at and what to overlook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// Overlook an unusable footer at the end where its copy at the start is whole.
    pub ignore_footer: bool,
    /// Overlook a parent whose UUID is not the one recorded.
    pub ignore_parent_uuid: bool,
    /// Overlook times in the future.
    pub ignore_timestamps: bool,
    /// Go through all parents too.
    pub parents: bool,
    /// Read all data: sectors whose bit is clear should be zero.
    pub bitmaps: bool,
    /// Count sectors.
    pub counts: bool,
    /// Do not look for blocks that overlap.
    pub skip_overlap: bool,
}

/// Whether the image is invalid for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Odd, but every reader copes.
    Warning,
    /// The image is not valid.
    Error,
}

/// What part of an image a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FindingKind {
    /// The length of the file.
    Length,
    /// The footer at the end.
    PrimaryFooter,
    /// The footer's copy at the start.
    BackupFooter,
    /// The two are not the same.
    FootersDiffer,
    /// A broken-off resize has disabled the image.
    Disabled,
    /// The header.
    Header,
    /// The fields of the header about the parent.
    DifferencingHeader,
    /// An entry of the block table.
    Table,
    /// Two blocks in one place.
    Overlap,
    /// The batmap.
    Batmap,
    /// A parent locator.
    Locator,
    /// The parent.
    Parent,
    /// A block's bitmap.
    Bitmap,
}

impl FindingKind {
    /// The kind as one word, for machines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::PrimaryFooter => "primary-footer",
            Self::BackupFooter => "backup-footer",
            Self::FootersDiffer => "footers-differ",
            Self::Disabled => "disabled",
            Self::Header => "header",
            Self::DifferencingHeader => "differencing-header",
            Self::Table => "table",
            Self::Overlap => "overlap",
            Self::Batmap => "batmap",
            Self::Locator => "locator",
            Self::Parent => "parent",
            Self::Bitmap => "bitmap",
        }
    }
}

/// One rule broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about.
    pub kind: FindingKind,
    /// Whether the image is invalid for it.
    pub severity: Severity,
    /// A sentence.
    pub sentence: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        f.write_str(&self.sentence)
    }
}

/// Sectors of one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SectorCounts {
    /// Sectors in blocks that are in the image.
    pub allocated: u64,
    /// Of these, the ones whose bit is set.
    pub written: u64,
    /// Bitmaps of the blocks by number; an empty one stands for a block that is there as a whole.
    pub blocks: BTreeMap<u32, Vec<u8>>,
    /// Sectors in a block.
    pub block_sectors: usize,
}

/// What a check found in one image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The image.
    pub path: PathBuf,
    /// Rules broken, in the order of the file.
    pub findings: Vec<Finding>,
    /// Sectors, if asked for.
    pub counts: Option<SectorCounts>,
}

impl Report {
    /// Whether the image keeps all rules that make it valid.
    pub fn is_valid(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity == Severity::Warning)
    }

    fn add(&mut self, kind: FindingKind, severity: Severity, sentence: impl Into<String>) {
        if self.findings.iter().filter(|finding| finding.kind == kind).count() < FINDINGS_MAX {
            self.findings.push(Finding { kind, severity, sentence: sentence.into() });
        }
    }

    fn error(&mut self, kind: FindingKind, sentence: impl Into<String>) {
        self.add(kind, Severity::Error, sentence);
    }

    fn warn(&mut self, kind: FindingKind, sentence: impl Into<String>) {
        self.add(kind, Severity::Warning, sentence);
    }
}

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

fn check_footers<M: Medium>(
    medium: &M,
    len: u64,
    options: &CheckOptions,
    report: &mut Report,
) -> Result<Option<Footer>> {
    let short = len % SECTOR_LEN == SECTOR_LEN - 1;
    if len < FOOTER_LEN as u64 - 1 || (!short && !len.is_multiple_of(SECTOR_LEN)) {
        report.error(
            FindingKind::Length,
            format!("a file of {len} bytes cannot be a VHD: they are whole sectors"),
        );
        return Ok(None);
    }
    let footer_len = if short { FOOTER_LEN - 1 } else { FOOTER_LEN };
    let mut primary_bytes = [0; FOOTER_LEN];
    read(medium, len - footer_len as u64, &mut primary_bytes[..footer_len])?;
    let primary = Footer::parse(&primary_bytes);
    let broken = footer_rules(&primary, &primary_bytes, options);
    let severity = if options.ignore_footer { Severity::Warning } else { Severity::Error };
    for sentence in &broken {
        report.add(FindingKind::PrimaryFooter, severity, format!("primary footer invalid: {sentence}"));
    }
    if primary.cookie == COOKIE_DISABLED {
        report.error(
            FindingKind::Disabled,
            "a resize was broken off half-way: run 'vhd-util revert' with its journal",
        );
    }
    if broken.is_empty() && primary.disk_type == DiskType::Fixed {
        return Ok(Some(primary));
    }
    if !broken.is_empty() && !options.ignore_footer && primary.cookie != COOKIE {
        return Ok(None);
    }
    if len < (FOOTER_LEN + HEADER_LEN) as u64 {
        report.error(FindingKind::Length, format!("a file of {len} bytes has no room for a header"));
        return Ok(None);
    }
    let mut backup_bytes = [0; FOOTER_LEN];
    read(medium, 0, &mut backup_bytes)?;
    let backup = Footer::parse(&backup_bytes);
    let backup_broken = footer_rules(&backup, &backup_bytes, options);
    for sentence in &backup_broken {
        report.error(FindingKind::BackupFooter, format!("backup footer invalid: {sentence}"));
    }
    if !backup_broken.is_empty() {
        return Ok(broken.is_empty().then_some(primary));
    }
    if !broken.is_empty() {
        return Ok(Some(backup));
    }
    let visible = Footer { hidden: primary.hidden, checksum: primary.checksum, ..backup };
    let same = primary == backup || (backup.is_old_creator() && visible == primary);
    if !same {
        report.add(FindingKind::FootersDiffer, severity, "primary and backup footers do not match");
    }
    Ok(Some(primary))
}

/// The rules for one footer that are broken, as ends of a sentence.
fn footer_rules(footer: &Footer, bytes: &[u8; FOOTER_LEN], options: &CheckOptions) -> Vec<String> {
    let mut broken = Vec::new();
    let mut rule = |holds: bool, sentence: &dyn Fn() -> String| {
        if !holds {
            broken.push(sentence());
        }
    };
    if footer.cookie != COOKIE && footer.cookie != COOKIE_DISABLED {
        return vec![format!(
            "it does not begin with 'conectix' but with '{}'",
            footer.cookie.escape_ascii()
        )];
    }
    if let Err(error) = Footer::decode(bytes) {
        return vec![error.detail().to_string()];
    }
    rule(footer.features & FEATURE_RESERVED != 0, &|| "the reserved feature bit is clear".into());
    rule(footer.features & !(FEATURE_RESERVED | FEATURE_TEMPORARY) == 0, &|| {
        format!("unknown features {:#x}", footer.features)
    });
    rule(footer.version == VERSION, &|| format!("format version {:#010x}", footer.version));
    rule(footer.disk_type.is_dynamic() || footer.data_offset == NO_HEADER, &|| {
        format!("a fixed disk with a header at {:#x}", footer.data_offset)
    });
    rule(options.ignore_timestamps || footer.timestamp <= time::now().saturating_add(CLOCK_SLACK_S), &|| {
        format!("it was made in the future: {}", time::to_text(footer.timestamp))
    });
    rule(!footer.is_by_tapdisk() || footer.creator_version <= CREATOR_VERSION, &|| {
        format!("creator version {:#010x} is newer than known", footer.creator_version)
    });
    // The largest geometry is how QEMU says that the size alone counts.
    let geometry_fits = footer.geometry == Geometry::MAX
        || footer.geometry.len() <= Geometry::for_len(footer.current_len).len();
    rule(geometry_fits, &|| {
        format!("its geometry of {} bytes is larger than the disk", footer.geometry.len())
    });
    rule(footer.saved <= 1, &|| format!("saved state {}", footer.saved));
    rule(footer.hidden <= 1, &|| format!("hidden state {}", footer.hidden));
    rule(footer.reserved.iter().all(|&byte| byte == 0), &|| "its reserved bytes are not zero".into());
    rule(!footer.uuid.is_nil(), &|| "it has no UUID".into());
    broken
}

fn check_header<M: Medium>(medium: &M, len: u64, footer: &Footer, report: &mut Report) -> Result<()> {
    let at = footer.data_offset;
    if at.checked_add(HEADER_LEN as u64).is_none_or(|end| end > len) {
        report.error(FindingKind::Header, format!("header is invalid: it cannot be at byte {at}"));
        return Ok(());
    }
    if at != FOOTER_LEN as u64 {
        report.warn(
            FindingKind::Header,
            format!("the header is at byte {at} and not right behind the footer's copy"),
        );
    }
    let mut bytes = [0; HEADER_LEN];
    read(medium, at, &mut bytes)?;
    let header = match Header::decode(&bytes) {
        Ok(header) => header,
        Err(error) => {
            report.error(FindingKind::Header, format!("header is invalid: {}", error.detail()));
            return Ok(());
        }
    };
    let data_end = len.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64;
    let table = Span::new(header.table_offset, u64::from(header.entries_max) * 4);
    if !table.fits(data_end)
        || header.table_offset < at + HEADER_LEN as u64 && header.table_offset + table.len > at
    {
        report.error(
            FindingKind::Header,
            format!(
                "header is invalid: a table of {} entries cannot be at byte {}",
                header.entries_max, table.start
            ),
        );
    }
    if header.reserved1 != 0 || header.reserved2.iter().any(|&byte| byte != 0) {
        report.error(FindingKind::Header, "header is invalid: its reserved bytes are not zero");
    }
    if header.block_len != BLOCK_LEN {
        report.warn(FindingKind::Header, format!("blocks have {} bytes and not 2 MiB", header.block_len));
    }
    if let Err(error) = header.entries_for(footer.current_len) {
        report.error(FindingKind::Table, error.detail().to_string());
    }
    Ok(())
}

fn check_differencing_header<M: Medium>(
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

fn check_table<M: Medium>(
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

fn check_batmap<M: Medium>(image: &Image<M>, header: &Header, len: u64, report: &mut Report) -> Result<()> {
    if !image.footer().may_have_batmap() {
        return Ok(());
    }
    let mut error =
        |sentence: &str| report.error(FindingKind::Batmap, format!("batmap is invalid: {sentence}"));
    let required = batmap::is_required(image.footer());
    let at = batmap::header_offset(header);
    let room = len.next_multiple_of(SECTOR_LEN) - FOOTER_LEN as u64;
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

fn check_bitmaps<M: Medium>(image: &Image<M>, options: &CheckOptions, report: &mut Report) -> Result<()> {
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
                    // What a writer stopped between data and bitmap leaves: odd, and read by nobody.
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

/// The rules about locators: whole, one of a kind, naming the parent in the header, leading to it.
fn check_locators<M: Medium>(image: &Image<M>, options: &CheckOptions, report: &mut Report) {
    let Some(header) = image.header() else { return };
    let name = image.parent_name().unwrap_or_default();
    let room =
        image.medium().len().unwrap_or(0).next_multiple_of(SECTOR_LEN).saturating_sub(FOOTER_LEN as u64);
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
            Err(error) => report.error(FindingKind::Parent, format!("error resolving {recorded}: {error}")),
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

const _: () = assert!(header::TABLE_OFFSET == (FOOTER_LEN + HEADER_LEN) as u64);
