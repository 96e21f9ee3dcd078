//! What a check is asked and what it says.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

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
    /// A recorded parent that is not there.
    ParentMissing,
    /// The parent.
    Parent,
    /// A block's bitmap.
    Bitmap,
}

impl FindingKind {
    /// The kind as one word, for programs.
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
            Self::ParentMissing => "parent-missing",
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

    /// The number that stands for what was found, 0 for a valid image: that of a missing file where the first broken
    /// rule is that the parent is there.
    pub fn errno(&self) -> i32 {
        match self.findings.iter().find(|finding| finding.severity == Severity::Error) {
            None => 0,
            Some(Finding { kind: FindingKind::ParentMissing, .. }) => libc::ENOENT,
            Some(_) => libc::EINVAL,
        }
    }

    pub(super) fn add(&mut self, kind: FindingKind, severity: Severity, sentence: impl Into<String>) {
        if self.findings.iter().filter(|finding| finding.kind == kind).count() < FINDINGS_MAX {
            self.findings.push(Finding { kind, severity, sentence: sentence.into() });
        }
    }

    pub(super) fn error(&mut self, kind: FindingKind, sentence: impl Into<String>) {
        self.add(kind, Severity::Error, sentence);
    }

    pub(super) fn warn(&mut self, kind: FindingKind, sentence: impl Into<String>) {
        self.add(kind, Severity::Warning, sentence);
    }
}
