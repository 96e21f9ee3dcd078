//! The rules for the two footers and the header.

use tapio_types::Span;

use super::{CLOCK_SLACK_S, CheckOptions, FindingKind, Report, Severity, read};
use crate::error::Result;
use crate::medium::Medium;
use crate::vhd::footer::{
    COOKIE, COOKIE_DISABLED, CREATOR_VERSION, FEATURE_RESERVED, FEATURE_TEMPORARY, NO_HEADER, VERSION,
};
use crate::vhd::{
    BLOCK_LEN, DiskType, FOOTER_LEN, Footer, Geometry, HEADER_LEN, Header, Mark, SECTOR_LEN, time,
};

pub(super) fn check_footers<M: Medium>(
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
    // In front of a fixed disk are the guest's own data, and no copy to look at.
    if primary.disk_type == DiskType::Fixed && primary.cookie == COOKIE {
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
    // The mark of a process of ours that has the image open, or was killed with it, is no damage.
    let backup = match Mark::on(&backup) {
        Some(_) => Footer { creator_os: primary.creator_os, checksum: primary.checksum, ..backup },
        None => backup,
    };
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
        return vec!["it does not begin with 'conectix'".into()];
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
    // As a number, as XenServer's tools compare it: they also refuse the largest geometry, by which QEMU says that the
    // size alone counts, and a storage manager acts on their verdict.
    let geometry_fits = footer.geometry.to_u32() <= Geometry::for_len(footer.current_len).to_u32();
    rule(geometry_fits, &|| {
        format!(
            "geometry too large: it counts {} bytes, the disk has {}",
            footer.geometry.len(),
            footer.current_len
        )
    });
    rule(footer.saved <= 1, &|| format!("saved state {}", footer.saved));
    rule(footer.hidden <= 1, &|| format!("hidden state {}", footer.hidden));
    rule(footer.reserved.iter().all(|&byte| byte == 0), &|| "its reserved bytes are not zero".into());
    rule(!footer.uuid.is_nil(), &|| "it has no UUID".into());
    broken
}

pub(super) fn check_header<M: Medium>(
    medium: &M,
    len: u64,
    footer: &Footer,
    report: &mut Report,
) -> Result<()> {
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
    // Behind metadata there is a whole footer: only those of fixed disks may have 511 bytes.
    let data_end = len.saturating_sub(FOOTER_LEN as u64);
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
