//! A raw disk on a remote export, whose connection is lost and whose server is restarted while requests are in flight.

use std::path::Path;

use tapio_block::{DiskError, Op};
use tapio_ring::PageBuf;
use tapio_ring::sim::{Faults, Random};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::model::{fill, stamp_of};
use crate::rig::{Rig, RigKind};

const SECTORS: u64 = 32;

/// What is known of a sector.
#[derive(Clone, Debug)]
struct Known {
    /// The contents that a reader may find after everything volatile is gone, in the order of their writes, and whether
    /// the write was answered well.
    possible: Vec<(u64, bool)>,
    /// It was written since the last flush that failed, which took back what was answered before.
    fresh: bool,
}

impl Known {
    fn may_hold(&self, stamp: u64) -> bool {
        self.possible.iter().any(|(possible, _)| *possible == stamp)
    }

    /// A flush went well: the last write that was answered is durable. One that failed later may have happened.
    fn flushed(&mut self) {
        if self.fresh
            && let Some(last) = self.possible.iter().rposition(|(_, answered)| *answered)
        {
            self.possible.drain(..last);
        }
    }
}

/// Writes, reads and flushes one after the other; in the end the power goes, and every sector holds what the last good
/// flush promised or something that came after it.
pub fn run(seed: u64) -> Result<(), String> {
    let rig = Rig::new(RigKind::OnRemote, seed);
    let process = rig.process();
    let (spec, host) = (rig.spec(Access::ReadWrite), rig.host.clone());
    let running = process.clone();
    let told = process.run(async move {
        let mut random = Random::new(seed ^ 0xbeef);
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        host.set_faults(Faults { connection_loss: 500, ..Faults::default() });
        let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
        let first = Known { possible: vec![(0, true)], fresh: false };
        let mut known = vec![first; SECTORS as usize];
        let mut good = 0;
        for stamp in 1..200u64 {
            let sector = random.below(SECTORS);
            let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
            match random.below(8) {
                0 => match running.ask(Op::Flush, Span::default(), &page).await {
                    Ok(()) => {
                        good += 1;
                        known.iter_mut().for_each(Known::flushed);
                    }
                    Err(DiskError::Io(_)) => known.iter_mut().for_each(|sector| sector.fresh = false),
                    Err(error) => return Err(format!("a flush failed with {error}")),
                },
                1 => {
                    if running.ask(Op::Read, span, &page).await.is_ok() {
                        let found = stamp_of(&page[..SECTOR_LEN as usize])?;
                        let seen = &known[sector as usize];
                        if !seen.may_hold(found) {
                            return Err(format!("sector {sector} reads as {found}, possible are {seen:?}"));
                        }
                    }
                }
                _ => {
                    fill(stamp, &mut page[..SECTOR_LEN as usize]);
                    let answered = running.ask(Op::Write { durable: false }, span, &page).await.is_ok();
                    let seen = &mut known[sector as usize];
                    seen.possible.push((stamp, answered));
                    seen.fresh |= answered;
                }
            }
        }
        Ok((known, good))
    });
    process.sim.end();
    let (known, good) = told.ok_or("the power stays on")??;
    rig.host.power_cut();
    let left = rig.host.content(Path::new("remote"));
    for (sector, seen) in known.iter().enumerate() {
        let mut bytes = [0; SECTOR_LEN as usize];
        left.read(sector as u64 * SECTOR_LEN, &mut bytes);
        let found = stamp_of(&bytes)?;
        if !seen.may_hold(found) {
            return Err(format!("sector {sector} holds {found} after {good} flushes, possible are {seen:?}"));
        }
    }
    Ok(())
}
