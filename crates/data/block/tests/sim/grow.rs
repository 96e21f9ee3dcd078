//! A disk grows while it is written to, with the power cut, and the process killed, at every change that makes.

use std::cell::Cell;
use std::rc::Rc;

use tapio_block::Op;
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::rig::{DISK_LEN, Process, Rig, RigKind, read, write};

/// Enough for the table to need another sector.
const GROWN_LEN: u64 = 300 << 20;
const BEFORE: u64 = 7;
const BEHIND: u64 = 8;

/// How far the story has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Come {
    #[default]
    Opened,
    Grown,
    Flushed,
}

pub fn run(kind: RigKind) -> Result<(), String> {
    let (rig, process) = prepared(kind);
    let before = rig.host.changed();
    let come = story(&rig, &process);
    if come != Come::Flushed {
        return Err(format!("the story ends at {come:?}"));
    }
    for cut in 1..=rig.host.changed() - before {
        for kill in [false, true] {
            let (rig, process) = prepared(kind);
            rig.host.cut_after(Some(cut));
            let come = story(&rig, &process);
            let told = |why| format!("cut at {cut}, kill: {kill}, {come:?}: {why}");
            end(rig, kill, come).map_err(told)?;
        }
    }
    Ok(())
}

fn prepared(kind: RigKind) -> (Rig, Process) {
    let mut rig = Rig::new(kind, 9);
    while rig.grow(kind) {}
    let process = rig.process();
    (rig, process)
}

fn story(rig: &Rig, process: &Process) -> Come {
    let come = Rc::new(Cell::new(Come::default()));
    let (running, spec, told) = (process.clone(), rig.spec(Access::ReadWrite), Rc::clone(&come));
    let done = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        let tasks = running.sim.tasks().clone();
        // New blocks meanwhile, which move the end of the file too.
        let beside = running.clone();
        let written = Rc::new(Cell::new(false));
        let done = Rc::clone(&written);
        tasks.spawn(async move {
            for block in 0..4 {
                // Fails when the power goes.
                let _ = write(&beside, block << 21, BEFORE).await;
            }
            done.set(true);
        });
        let grown = running.core.grow(GROWN_LEN).await.map_err(|error| error.to_string())?;
        if grown.len != GROWN_LEN {
            return Err(format!("the disk has {} bytes", grown.len));
        }
        told.set(Come::Grown);
        write(&running, GROWN_LEN - SECTOR_LEN, BEHIND).await?;
        while !written.get() {
            tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        }
        let flushed = running.ask(Op::Flush, Span::default(), &PageBuf::zeroed(1)).await;
        flushed.map_err(|error| error.to_string())?;
        told.set(Come::Flushed);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    assert!(!matches!(done, Some(Err(_))), "{done:?}");
    come.get()
}

fn end(mut rig: Rig, kill: bool, come: Come) -> Result<(), String> {
    if kill {
        rig.host.process_killed();
    } else {
        rig.host.power_cut();
        rig.memory = std::sync::Arc::default();
    }
    rig.host.cut_after(None);
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let found = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
        let len = running.core.geometry().map_or(0, |geometry| geometry.len);
        let behind = if len == GROWN_LEN { read(&running, GROWN_LEN - SECTOR_LEN).await? } else { 0 };
        let before = read(&running, 3 << 21).await?;
        running.core.close().await.map_err(|error| error.to_string())?;
        Ok::<_, String>((len, before, behind))
    });
    process.sim.end();
    let (len, before, behind) = found.expect("the power stays on")?;
    let may_be_old = come < Come::Grown;
    if len != GROWN_LEN && !(may_be_old && len == DISK_LEN) {
        return Err(format!("the disk has {len} bytes"));
    }
    let wanted = |found: u64, stamp: u64| found == stamp || (found == 0 && come < Come::Flushed);
    if !wanted(before, BEFORE) || !wanted(behind, BEHIND) {
        return Err(format!("write {before} in an old block, write {behind} in a new one"));
    }
    rig.check(false)
}
