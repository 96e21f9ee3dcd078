//! Where the time of a request goes.

use std::cell::Cell;

use tapio_stat::trace::Clock;

/// When a request went to its storages and when the last of them answered, by the clock that is read once a turn;
/// for a request that is traced also by a clock of its own.
#[derive(Debug, Default)]
pub struct Meter {
    /// Zero: not yet. The clock has run for a while when the first request comes.
    issued_ns: Cell<u64>,
    returned_ns: Cell<u64>,
    clock: Option<Clock>,
    stamps: Cell<(u64, u64)>,
}

impl Meter {
    /// A meter that reads `clock` too.
    pub(crate) fn traced(clock: Option<Clock>) -> Self {
        Self { clock, ..Self::default() }
    }

    /// Whether the request is traced.
    pub(crate) const fn is_traced(&self) -> bool {
        self.clock.is_some()
    }

    /// When the first transfer began and the last one ended, in ticks of the request's own clock; zero for what was
    /// not.
    pub(crate) const fn stamps(&self) -> (u64, u64) {
        self.stamps.get()
    }

    /// A transfer begins.
    pub fn issued(&self, now_ns: u64) {
        if self.issued_ns.get() == 0 {
            self.issued_ns.set(now_ns.max(1));
            if let Some(clock) = self.clock {
                self.stamps.set((clock.now(), 0));
            }
        }
    }

    /// A transfer has ended.
    pub fn returned(&self, now_ns: u64) {
        self.returned_ns.set(now_ns.max(1));
        if let Some(clock) = self.clock {
            self.stamps.set((self.stamps.get().0, clock.now()));
        }
    }

    /// The stages of a request that was born, started and ended at these times.
    pub fn stages(&self, born_ns: u64, started_ns: u64, ended_ns: u64) -> StageTimes {
        // A request that needed no storage spent all its time here.
        let known = |ns: u64| (ns > 0).then_some(ns);
        let returned = known(self.returned_ns.get()).unwrap_or(ended_ns);
        let issued = known(self.issued_ns.get()).unwrap_or(returned);
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
