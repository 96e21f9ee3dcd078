//! By how much each volume becomes longer at once: twice as much as the last time while growths of one disk follow each
//! other quickly, less again after a rest. So a disk that is written without an end grows seldom, and one that is
//! written now and then takes little more than it holds.
//!
//! Known as long as this process lives: its successor begins with the least.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;

/// A growth that follows within this time is twice as large. After it, the step halves each time this passes.
const SOON: Duration = Duration::from_secs(10);

/// The last growth of a disk.
#[derive(Clone, Copy, Debug)]
struct Last {
    step: u64,
    at: Instant,
}

/// The last growths of the disks of an SR.
#[derive(Debug, Default)]
pub(super) struct Steps(Mutex<HashMap<Uuid, Last>>);

impl Steps {
    /// By how much the volume of a disk becomes longer now, between `least` and `most` bytes.
    pub(super) fn next(&self, vdi: Uuid, (least, most): (u64, u64), now: Instant) -> u64 {
        let Some(last) = self.0.lock().get(&vdi).copied() else { return least.min(most) };
        let rests = now.saturating_duration_since(last.at).as_secs() / SOON.as_secs();
        let step = match u32::try_from(rests) {
            Ok(0) => last.step.saturating_mul(2),
            Ok(rests) => last.step.checked_shr(rests).unwrap_or(0),
            Err(_) => 0,
        };
        step.max(least).min(most)
    }

    /// It has become longer by `step`.
    pub(super) fn note(&self, vdi: Uuid, step: u64, now: Instant) {
        self.0.lock().insert(vdi, Last { step, at: now });
    }

    /// The disk is not used any more.
    pub(super) fn forget(&self, vdi: Uuid) {
        self.0.lock().remove(&vdi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn steps_follow_how_quickly_growths_follow_each_other() {
        let (steps, vdi, began) = (Steps::default(), Uuid::from_u128(1), Instant::now());
        let bounds = (64 * MIB, 1024 * MIB);
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(steps.next(vdi, bounds, at(0)), 64 * MIB);
        for (second, step) in [(0, 64), (2, 128), (4, 256), (6, 512), (8, 1024), (10, 1024)] {
            assert_eq!(steps.next(vdi, bounds, at(second)), step * MIB, "second {second}");
            steps.note(vdi, step * MIB, at(second));
        }
        assert_eq!(steps.next(Uuid::from_u128(2), bounds, at(10)), 64 * MIB, "another disk");
        for (second, step) in [(19, 1024), (21, 512), (31, 256), (200, 64), (1 << 40, 64)] {
            assert_eq!(steps.next(vdi, bounds, at(second)), step * MIB, "second {second}");
        }
        assert_eq!(steps.next(vdi, (64 * MIB, 80 * MIB), at(10)), 80 * MIB, "little is free");
        steps.forget(vdi);
        assert_eq!(steps.next(vdi, bounds, at(10)), 64 * MIB);
    }
}
