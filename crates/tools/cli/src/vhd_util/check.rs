//! `check`: the rules that an image must keep.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tapio_format::vhd::bitmap;
use tapio_format::vhd::offline::{CheckOptions, Report, SectorCounts, Severity, check_path};

use super::output::Failure;

/// Check that an image is whole
///
/// Ends with `NAME is valid` and status 0, or says which rules are broken, with status 22; 2 if its parent is not
/// there.
#[derive(Debug, Args)]
pub(super) struct Check {
    /// The image
    #[arg(short = 'n', value_name = "FILE")]
    name: PathBuf,
    /// Overlook an unusable footer at the end
    #[arg(short = 'i')]
    ignore_footer: bool,
    /// Overlook a parent with another UUID than recorded
    #[arg(short = 'I')]
    ignore_parent_uuid: bool,
    /// Overlook times
    #[arg(short = 't')]
    ignore_timestamps: bool,
    /// Check all parents too
    #[arg(short = 'p')]
    parents: bool,
    /// Read all data and check them against the bitmaps
    #[arg(short = 'b')]
    bitmaps: bool,
    /// Do not look for overlapping blocks
    #[arg(short = 'B', conflicts_with_all = ["bitmaps", "stats"])]
    skip_overlap: bool,
    /// Count sectors
    #[arg(short = 's')]
    stats: bool,
    /// Print findings as JSON
    #[arg(long)]
    json: bool,
}

impl Check {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let options = CheckOptions {
            ignore_footer: self.ignore_footer,
            ignore_parent_uuid: self.ignore_parent_uuid,
            ignore_timestamps: self.ignore_timestamps,
            parents: self.parents,
            bitmaps: self.bitmaps,
            counts: self.stats,
            skip_overlap: self.skip_overlap,
        };
        // A directory is no image with something wrong, but that is how XenServer's tool has it.
        let reports = check_path(&self.name, &options).map_err(|error| match error.errno() {
            libc::EISDIR => Failure::invalid(error.to_string()),
            _ => error.into(),
        })?;
        let valid = reports.iter().all(Report::is_valid);
        if self.json {
            writeln!(out, "{:#}", as_json(&reports, valid))?;
        } else {
            for report in &reports {
                for finding in &report.findings {
                    match finding.severity {
                        Severity::Warning => eprintln!("vhd-util: {}: {finding}", report.path.display()),
                        Severity::Error => writeln!(out, "vhd-util: {}: {finding}", report.path.display())?,
                    }
                }
                if report.is_valid() && !self.stats {
                    writeln!(out, "{} is valid", report.path.display())?;
                }
            }
            if self.stats && valid {
                print_counts(&reports, out)?;
            }
        }
        match reports.iter().map(Report::errno).find(|&errno| errno != 0) {
            Some(errno) => Err(Failure::silent(errno)),
            None => Ok(()),
        }
    }
}

fn as_json(reports: &[Report], valid: bool) -> serde_json::Value {
    let image = |report: &Report| {
        let findings: Vec<_> = report
            .findings
            .iter()
            .map(|finding| {
                json!({
                    "kind": finding.kind.as_str(),
                    "severity": match finding.severity {
                        Severity::Warning => "warning",
                        Severity::Error => "error",
                    },
                    "message": finding.sentence,
                })
            })
            .collect();
        json!({
            "name": report.path,
            "valid": report.is_valid(),
            "findings": findings,
            "sectors_allocated": report.counts.as_ref().map(|counts| counts.allocated),
            "sectors_written": report.counts.as_ref().map(|counts| counts.written),
        })
    };
    json!({ "valid": valid, "images": reports.iter().map(image).collect::<Vec<_>>() })
}

/// Sectors of each image, base first, and for children those that the images below them do not have.
fn print_counts(reports: &[Report], out: &mut dyn Write) -> Result<(), Failure> {
    let name = |path: &Path| {
        path.file_name().map_or_else(|| path.display().to_string(), |n| n.display().to_string())
    };
    let mut below: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    let mut previous: Option<&SectorCounts> = None;
    for report in reports.iter().rev() {
        let Some(counts) = &report.counts else { continue };
        write!(
            out,
            "{}: secs allocated: {:#x} secs written: {:#x} ({:.2}%)",
            name(&report.path),
            counts.allocated,
            counts.written,
            percent(counts.written, counts.allocated)
        )?;
        if let Some(previous) = previous {
            let not_in_parent = unique(counts, &previous.blocks);
            let not_in_ancestors = unique(counts, &below);
            write!(
                out,
                " secs not in parent: {not_in_parent:#x} ({:.2}%) secs not in ancestors: {not_in_ancestors:#x} \
                 ({:.2}%)",
                percent(not_in_parent, counts.written),
                percent(not_in_ancestors, counts.written)
            )?;
        }
        writeln!(out)?;
        for (&block, map) in &counts.blocks {
            let union = below.entry(block).or_insert_with(|| vec![0; counts.block_sectors.div_ceil(8)]);
            for (index, byte) in union.iter_mut().enumerate() {
                *byte |= map.get(index).copied().unwrap_or(0xff);
            }
        }
        previous = Some(counts);
    }
    Ok(())
}

/// Sectors that are in `counts` and not in `others`; an empty map stands for a whole block.
fn unique(counts: &SectorCounts, others: &BTreeMap<u32, Vec<u8>>) -> u64 {
    let full = vec![0xff; counts.block_sectors.div_ceil(8)];
    let whole = |map: &Vec<u8>| if map.is_empty() { full.clone() } else { map.clone() };
    let mut count = 0;
    for (block, map) in &counts.blocks {
        let mut map = whole(map);
        if let Some(other) = others.get(block).map(whole) {
            for (mine, theirs) in map.iter_mut().zip(other) {
                *mine &= !theirs;
            }
        }
        count += bitmap::count_set(&map, counts.block_sectors) as u64;
    }
    count
}

fn percent(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 * 100.0 }
}
