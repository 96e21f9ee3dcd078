//! Where the time of a request goes.

use std::cell::Cell;

/// When a request went to its storages and when the last of them answered, by the clock that is read once a turn.
#[derive(Debug, Default)]
pub struct Meter {
    issued_ns: Cell<Option<u64>>,
    returned_ns: Cell<Option<u64>>,
}

impl Meter {
    /// A transfer begins.
    pub fn issued(&self, now_ns: u64) {
        if self.issued_ns.get().is_none() {
            self.issued_ns.set(Some(now_ns));
        }
    }

    /// A transfer has ended.
    pub fn returned(&self, now_ns: u64) {
        self.returned_ns.set(Some(now_ns));
    }

    /// The stages of a request that was born, started and ended at these times.
    pub fn stages(&self, born_ns: u64, started_ns: u64, ended_ns: u64) -> StageTimes {
        // A request that needed no storage spent all its time here.
        let returned = self.returned_ns.get().unwrap_or(ended_ns);
        let issued = self.issued_ns.get().unwrap_or(returned);
        StageTimes {
            queued_ns: started_ns.saturating_sub(born_ns),
            image_ns: issued.saturating_sub(started_ns),
            kernel_ns: returned.saturating_sub(issued),
            completing_ns: ended_ns.saturating_sub(returned),
        }
    }
}

/// How long a request stayed in each stage, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Taken from the guest, waiting to be started.
    pub queued_ns: u64,
    /// In the image layer before its first transfer: metadata, space.
    pub image_ns: u64,
    /// From its first transfer to the answer to its last.
    pub kernel_ns: u64,
    /// From then until it was answered: metadata that had to follow, and its turn.
    pub completing_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_whole() {
        let meter = Meter::default();
        for (issued, returned) in [(30, 40), (35, 70), (36, 60)] {
            meter.issued(issued);
            meter.returned(returned);
        }
        meter.returned(70);
        let stages = meter.stages(10, 20, 75);
        let want = StageTimes { queued_ns: 10, image_ns: 10, kernel_ns: 40, completing_ns: 5 };
        assert_eq!(stages, want);
    }

    #[test]
    fn a_request_without_transfers_spends_nothing_in_the_kernel() {
        let stages = Meter::default().stages(10, 20, 75);
        assert_eq!((stages.kernel_ns, stages.image_ns), (0, 55));
    }
}
