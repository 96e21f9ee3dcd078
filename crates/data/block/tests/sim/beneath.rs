//! Zeroes under which a discard takes the block away.

use std::cell::Cell;
use std::rc::Rc;

use tapio_block::Op;
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::model::{fill, stamp_of};
use crate::rig::{Rig, RigKind};

const BLOCK: Span = Span::new(4096 * SECTOR_LEN, 4096 * SECTOR_LEN);
/// In the block, with sectors between them that were never written: zeroes go there in two writes.
const SECTORS: [Span; 2] =
    [Span::new(BLOCK.start + SECTOR_LEN, SECTOR_LEN), Span::new(BLOCK.start + 2000 * SECTOR_LEN, SECTOR_LEN)];

/// Zeroes are being written to a block when a discard gives it back; they are answered, and the process is killed.
pub fn run(kind: RigKind, seed: u64) -> Result<(), String> {
    let rig = Rig::new(kind, seed);
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let told = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        for span in SECTORS {
            let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
            fill(1, &mut page[..SECTOR_LEN as usize]);
            let written = running.ask(Op::Write { durable: true }, span, &page).await;
            written.map_err(|error| error.to_string())?;
        }
        let tasks = running.sim.tasks();
        let ended = Rc::new(Cell::new(None));
        let (asking, end) = (running.clone(), Rc::clone(&ended));
        tasks.spawn(async move {
            let zeroes = Op::WriteZeroes { unmap: true, durable: false };
            end.set(Some(asking.ask(zeroes, BLOCK, &PageBuf::zeroed(SECTOR_LEN as usize)).await));
        });
        // The zeroes come first: their first write is in flight and takes longer than this.
        tasks.sleep_until(tasks.turn_ns() + 1_000).await;
        let discarded = running.ask(Op::Discard, BLOCK, &PageBuf::zeroed(SECTOR_LEN as usize)).await;
        discarded.map_err(|error| error.to_string())?;
        loop {
            match ended.take() {
                Some(told) => return told.map_err(|error| error.to_string()),
                None => tasks.sleep_until(tasks.turn_ns() + 1_000).await,
            }
        }
    });
    told.expect("the power stays on")?;
    process.sim.end();
    rig.host.process_killed();
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let told = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        for span in SECTORS {
            let page = PageBuf::zeroed(SECTOR_LEN as usize);
            running.ask(Op::Read, span, &page).await.map_err(|error| error.to_string())?;
            let found = stamp_of(&page[..SECTOR_LEN as usize])?;
            if found != 0 {
                return Err(format!("sector {} holds write {found} again", span.start / SECTOR_LEN));
            }
        }
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    told.expect("the power stays on")?;
    rig.check(false)
}
