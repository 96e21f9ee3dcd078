//! The plain sector model: which contents each sector may have.

use std::collections::BTreeMap;

/// What a sector holds: 0 for zeroes, otherwise the number of the write that filled it.
pub type Stamp = u64;

/// A write that a sector has seen, or may have.
#[derive(Clone, Debug)]
struct Candidate {
    stamp: Stamp,
    issued: u64,
    /// When it was answered; never for one that is in flight.
    acked: Option<u64>,
    /// Answered with an error, or only a hint: it may have happened, and hides nothing.
    weak: bool,
    /// It was durable when it was answered.
    durable: bool,
}

/// A counter of moments: every event of the test has its own.
#[derive(Clone, Debug, Default)]
pub struct Model {
    sectors: BTreeMap<u64, Vec<Candidate>>,
    now: u64,
    next_stamp: Stamp,
    /// When the last flush that was answered began.
    flushed: u64,
}

impl Model {
    /// The next moment.
    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// A stamp that no write had before.
    pub fn fresh_stamp(&mut self) -> Stamp {
        self.next_stamp += 1;
        self.next_stamp
    }

    /// A write of `stamp` to `sectors` begins; returns when.
    pub fn begin(&mut self, sectors: std::ops::Range<u64>, stamp: Stamp, weak: bool) -> u64 {
        let issued = self.tick();
        for sector in sectors {
            let seen = self.sectors.entry(sector).or_insert_with(|| vec![before_all(0)]);
            seen.push(Candidate { stamp, issued, acked: None, weak, durable: false });
        }
        issued
    }

    /// The write that began at `issued` was answered.
    pub fn end(&mut self, sectors: std::ops::Range<u64>, issued: u64, ok: bool, durable: bool) {
        let now = self.tick();
        for sector in sectors {
            for candidate in self.sectors.get_mut(&sector).into_iter().flatten() {
                if candidate.issued == issued {
                    candidate.acked = Some(now);
                    candidate.weak |= !ok;
                    candidate.durable = ok && durable;
                }
            }
        }
    }

    /// A flush that began at `began` was answered.
    pub fn flushed(&mut self, began: u64) {
        self.flushed = self.flushed.max(began);
    }

    /// Which stamps a reader may find in `sector`, when everything answered up to `horizon` must be visible, and
    /// after a power
    /// cut also everything that was durable when it was answered.
    fn possible(&self, sector: u64, horizon: u64, after_cut: bool) -> Vec<Stamp> {
        let Some(seen) = self.sectors.get(&sector) else { return vec![0] };
        let hidden = |candidate: &Candidate| {
            candidate.acked.is_some_and(|acked| {
                seen.iter().any(|later| {
                    let sure =
                        (after_cut && later.durable) || later.acked.is_some_and(|acked| acked <= horizon);
                    later.issued > acked && !later.weak && sure
                })
            })
        };
        seen.iter().filter(|candidate| !hidden(candidate)).map(|candidate| candidate.stamp).collect()
    }

    /// Checks what a read that began at `began` found.
    pub fn check_read(&self, sector: u64, found: Stamp, began: u64) -> Result<(), String> {
        let possible = self.possible(sector, began, false);
        if possible.contains(&found) {
            return Ok(());
        }
        let seen = self.sectors.get(&sector);
        Err(format!("sector {sector} reads as write {found}, possible are {possible:?} of {seen:?}"))
    }

    /// Checks what is in `sector` after the power went, and takes it as the truth from now on.
    pub fn check_after_cut(&mut self, sector: u64, found: Stamp) -> Result<(), String> {
        self.settle(sector, found, self.flushed, true)
    }

    /// Checks what is in `sector` after the process died or the disk was closed, and takes it as the truth.
    pub fn check_after_kill(&mut self, sector: u64, found: Stamp) -> Result<(), String> {
        self.settle(sector, found, u64::MAX, false)
    }

    fn settle(&mut self, sector: u64, found: Stamp, horizon: u64, after_cut: bool) -> Result<(), String> {
        let possible = self.possible(sector, horizon, after_cut);
        if !possible.contains(&found) {
            let seen = self.sectors.get(&sector);
            return Err(format!(
                "sector {sector} holds write {found}, possible are {possible:?} of {seen:?}"
            ));
        }
        self.sectors.insert(sector, vec![before_all(found)]);
        Ok(())
    }
}

fn before_all(stamp: Stamp) -> Candidate {
    Candidate { stamp, issued: 0, acked: Some(0), weak: false, durable: true }
}

/// The 512 bytes of a sector with this stamp.
pub fn fill(stamp: Stamp, sector: &mut [u8]) {
    for word in sector.chunks_exact_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
}

/// The stamp of 512 bytes; an error for bytes that no write ever wrote.
pub fn stamp_of(sector: &[u8]) -> Result<Stamp, String> {
    let first = u64::from_le_bytes(sector[..8].try_into().expect("eight bytes"));
    if sector.chunks_exact(8).all(|word| word == first.to_le_bytes()) {
        return Ok(first);
    }
    Err(format!("bytes that were never written: {:?} ...", &sector[..24]))
}
