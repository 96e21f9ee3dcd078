//! What a driver sees of the toolstack while it works, and what the toolstack makes of its errors.

use std::collections::BTreeMap;

use tapio_model::ApiError;
use tapio_sm::{ApiSession, Ctx, LiveDisk, Notice, SrStat, VdiInfo};
use uuid::Uuid;

use super::records::Alert;
use super::{Call, plugin_api};
use crate::db::reference_of;

/// A call as a driver sees it; its progress is a part of the call's.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    call: &'a Call,
    from: f64,
    to: f64,
}

impl<'a> Work<'a> {
    /// The driver's work is all there is.
    pub(super) const fn new(call: &'a Call) -> Self {
        Self { call, from: 0.0, to: 1.0 }
    }

    /// The driver's work is this part of the whole, 0 to 1.
    pub(super) const fn part(call: &'a Call, from: f64, to: f64) -> Self {
        Self { call, from, to }
    }
}

/// What a VDI without its log loses.
const NOT_TRACKED: &str = "changed blocks are tracked no longer; take a full backup, and enable it again";

impl Ctx for Work<'_> {
    fn is_cancelled(&self) -> bool {
        self.call.progress.is_cancelled()
    }

    fn progress(&self, fraction: f64) {
        self.call.progress.set(self.from + (self.to - self.from) * fraction.clamp(0.0, 1.0));
    }

    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        self.call.part.disks.live(vdi)
    }

    fn is_managed(&self, vdi: Uuid) -> bool {
        let vdi = self.call.part.db.get("VDI", &reference_of(vdi));
        vdi.is_ok_and(|vdi| vdi.bool("managed"))
    }

    fn notice(&self, vdi: Uuid, notice: Notice, why: &str) {
        let (name, more) = match notice {
            Notice::LogIncomplete => {
                ("VDI_CBT_METADATA_INCONSISTENT", "everything counts as changed in the next list")
            }
            Notice::LogGone => ("VDI_CBT_METADATA_INCONSISTENT", NOT_TRACKED),
            Notice::SnapshotUntracked => {
                ("VDI_CBT_SNAPSHOT_FAILED", "the snapshot is in no list of changed blocks")
            }
            Notice::ResizeUntracked => ("VDI_CBT_RESIZE_FAILED", NOT_TRACKED),
        };
        let db = &self.call.part.db;
        let about = vdi.to_string();
        Alert { name, priority: 3, class: "VDI", about: &about }.post(db, &format!("{why}: {more}"));
        if notice == Notice::LogGone {
            // Where the call answers nothing of the VDI, its record follows here.
            let told = db.change(|change| match change.get("VDI", &reference_of(vdi)) {
                Ok(vdi) if vdi.bool("cbt_enabled") => change.set("VDI", &vdi.reference, "cbt_enabled", false),
                _ => Ok(()),
            });
            if let Err(error) = told {
                tracing::warn!(%vdi, %error, "the record still says that changed blocks are tracked");
            }
        }
    }

    fn step(&self, name: &'static str) {
        crate::plan::steps::step(name);
    }

    fn holders(&self, vdi: Uuid) -> usize {
        self.call.part.state().holders.get(&reference_of(vdi)).map_or(0, BTreeMap::len)
    }

    fn api(&self, sr: Option<Uuid>) -> Result<Box<dyn ApiSession>, ApiError> {
        plugin_api::open(&self.call.part, sr)
    }

    fn records(&self, sr: Uuid, vdi: Option<Uuid>) -> Result<Vec<VdiInfo>, ApiError> {
        Ok(plugin_api::known(&self.call.part, sr, vdi))
    }

    fn sizes(&self, sr: Uuid) -> Result<SrStat, ApiError> {
        plugin_api::sizes(&self.call.part, sr)
    }
}

/// What an error is about. Drivers know UUIDs, clients references; and XenAPI has codes of its own for some errors of
/// drivers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names<'a> {
    pub(super) sr: &'a str,
    pub(super) vdi: &'a str,
    /// What was done, as `snapshot`.
    pub(super) op: &'a str,
}

impl Names<'_> {
    /// The error as clients know it.
    pub(super) fn translate(self, call: &Call, error: ApiError) -> ApiError {
        let text = || error.params.get(1).cloned().unwrap_or_default();
        match &*error.code {
            "SR_BACKEND_FAILURE_16" | "SR_DEVICE_IN_USE" => {
                tracing::warn!(sr = self.sr, %error, "the storage is in use");
                ApiError::bare("SR_DEVICE_IN_USE")
            }
            "VDI_READONLY" => ApiError::new("VDI_READONLY", [self.vdi]),
            "VDI_IS_ENCRYPTED" => ApiError::new("VDI_IS_ENCRYPTED", [self.vdi]),
            "VDI_TOO_LARGE" => {
                let max = error.params.get(1).cloned().unwrap_or_default();
                ApiError::new("VDI_TOO_LARGE", [self.vdi.to_owned(), max])
            }
            "SR_BACKEND_FAILURE_24" | "VDI_IN_USE" => ApiError::new("VDI_IN_USE", [self.vdi, self.op]),
            "SR_BACKEND_FAILURE_38" => ApiError::new("UNIMPLEMENTED_IN_SM_BACKEND", [text()]),
            "SR_BACKEND_FAILURE_39" => ApiError::bare("SR_NOT_EMPTY"),
            "SR_BACKEND_FAILURE_144" | "VDI_MISSING" => ApiError::new("VDI_MISSING", [self.sr, self.vdi]),
            "TASK_CANCELLED" => ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]),
            _ => error,
        }
    }
}

/// Whether a driver says that there is no such image.
pub(super) fn is_missing(error: &ApiError) -> bool {
    // Not 46, which is an image that is there and cannot be used now.
    matches!(&*error.code, "SR_BACKEND_FAILURE_144" | "VDI_MISSING")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_image_is_known_by_its_codes() {
        assert!(is_missing(&ApiError::backend(144, "gone", "")));
        assert!(is_missing(&ApiError::new("VDI_MISSING", ["sr", "vdi"])));
        assert!(!is_missing(&ApiError::backend(46, "in use", "")));
        assert!(!is_missing(&ApiError::backend(44, "full", "")));
    }
}
