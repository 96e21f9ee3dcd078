//! A finding as clients get it.

use std::fmt::Display;

use serde::Serialize;
use tapio_model::findings::{self, Severity};
use tapio_model::{ApiError, Value};
use uuid::Uuid;

/// Findings that one answer lists; those that matter most come first.
const FINDINGS_MAX: usize = 2_000;

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A row of [`findings::FINDINGS`].
    pub kind: &'static str,
    /// `error`, `warning` or `note`.
    pub severity: &'static str,
    /// UUID of the SR it is about, if it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sr: Option<Uuid>,
    /// What it is about: a UUID, a file, a device, the number of a process.
    pub object: String,
    /// What was seen.
    pub detail: String,
    /// What it means, from its row.
    pub means: &'static str,
    /// The next step, from its row.
    pub suggests: &'static str,
    /// The message that repairs it, if one can without risk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repair: Option<&'static str>,
    #[serde(skip)]
    rank: u8,
}

impl Finding {
    /// One of this kind.
    pub(super) fn new(kind: &'static str, object: impl Display, detail: impl Into<String>) -> Self {
        let row = findings::finding(kind);
        debug_assert!(row.is_some(), "{kind} is no row");
        let severity = row.map_or(Severity::Note, |row| row.severity);
        Self {
            kind,
            severity: severity.name(),
            sr: None,
            object: object.to_string(),
            detail: detail.into(),
            means: row.map_or("", |row| row.means),
            suggests: row.map_or("", |row| row.suggests),
            repair: row.and_then(|row| row.repair).map(findings::Repair::message),
            rank: match severity {
                Severity::Error => 0,
                Severity::Warning => 1,
                Severity::Note => 2,
            },
        }
    }

    pub(super) fn of_sr(self, sr: Uuid) -> Self {
        Self { sr: Some(sr), ..self }
    }
}

/// The answer: a list, the ones that matter most first.
pub(super) fn json(mut found: Vec<Finding>) -> Result<Value, ApiError> {
    found.sort_by(|a, b| (a.rank, a.sr, a.kind, &a.object).cmp(&(b.rank, b.sr, b.kind, &b.object)));
    found.truncate(FINDINGS_MAX);
    let text = serde_json::to_string(&found);
    text.map(Value::string).map_err(|error| ApiError::internal(format!("findings are no text: {error}")))
}
