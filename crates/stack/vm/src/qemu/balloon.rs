//! Memory that a guest gives back while it runs, and takes again: a balloon of virtio.
//!
//! The emulator has memory for the most that the VM may have. The guest's balloon takes the rest of it away from the
//! guest's kernel, and the emulator gives that back to the host. The balloon has no timer and is not asked: it is told
//! a size, and reports each change of its own.

use serde_json::{Value, json};
use tapio_types::ApiError;

use super::DriverVm;
use crate::errors::not_allowed;
use crate::traits::{MEMORY_MAX, VmSpec};

/// Least memory of a guest: firmware, kernel and our initramfs.
pub(super) const MEMORY_MIN: u64 = 32 << 20;

/// Bytes of memory of the emulator of a VM with a balloon; none for a VM without one.
pub(super) fn most(spec: &VmSpec) -> Option<u64> {
    let mib = spec.platform.get(MEMORY_MAX)?.parse::<u64>().ok().filter(|mib| *mib < 1 << 24)?;
    Some((mib << 20).max(spec.memory))
}

/// The bytes that a guest has, in a word of the emulator that they have changed.
pub(super) fn changed(line: &Value) -> Option<u64> {
    (line["event"] == "BALLOON_CHANGE").then(|| line["data"]["actual"].as_u64()).flatten()
}

impl DriverVm {
    /// The bytes that the guest has now; none without a balloon.
    ///
    /// # Errors
    /// The emulator's.
    pub(super) fn memory(&self) -> Result<Option<u64>, ApiError> {
        if most(&self.saved().spec).is_none() {
            return Ok(None);
        }
        Ok(self.run("query-balloon", json!({}))?["actual"].as_u64())
    }

    /// Tells the guest how much it shall have. A guest that has no driver for that keeps all.
    ///
    /// # Errors
    /// `OPERATION_NOT_ALLOWED`; the emulator's.
    pub(super) fn set_memory(&self, bytes: u64) -> Result<(), ApiError> {
        let Some(most) = most(&self.saved().spec) else {
            let why = "it was started by an earlier version, without a balloon: shut it down and start it";
            return Err(not_allowed(self.vm, why));
        };
        if bytes < MEMORY_MIN {
            let why = format!("a guest cannot go on with {bytes} bytes of memory: at least {MEMORY_MIN}");
            return Err(not_allowed(self.vm, why));
        }
        if bytes > most {
            let why =
                format!("its emulator has {most} bytes: shut it down, set memory_static_max, and start it");
            return Err(not_allowed(self.vm, why));
        }
        self.run("balloon", json!({ "value": bytes })).map(drop)
    }

    /// Before a guest begins: what it shall have of the emulator's memory.
    ///
    /// # Errors
    /// The emulator's.
    pub(super) fn set_first_memory(&self) -> Result<(), ApiError> {
        let spec = self.saved().spec;
        match most(&spec) {
            Some(most) if spec.memory < most => self.set_memory(spec.memory),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_told_by_the_emulator() {
        let line = json!({ "event": "BALLOON_CHANGE", "data": { "actual": 134_217_728 } });
        assert_eq!(changed(&line), Some(134_217_728));
        assert_eq!(changed(&json!({ "event": "RESUME", "data": { "actual": 1 } })), None);
        assert_eq!(changed(&json!({ "event": "BALLOON_CHANGE", "data": { "actual": -1 } })), None);
    }
}
