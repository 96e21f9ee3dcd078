//! First writes to blocks: how long they wait for space and for the log, and what a death leaves while space is made
//! and given back. Time is the simulator's, so it is exact.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_block::Op;
use tapio_ring::sim::Latency;
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::rig::{Process, Rig, RigKind, read, write};

const BLOCK_LEN: u64 = 2 << 20;
const MS: u64 = 1_000_000;
const DEPTH: u64 = 32;
/// Blocks of the disk once it has grown.
const BLOCKS: u64 = 280;
/// Longer than a reserve is kept that nothing is taken from.
const IDLE_NS: u64 = 12_000 * MS;

fn prepared(kind: RigKind) -> Rig {
    let mut rig = Rig::new(kind, 1);
    while rig.grow(kind) {}
    rig
}

async fn opened(process: &Process, rig: &Rig) -> Result<(), String> {
    process.core.resume(&rig.spec(Access::ReadWrite)).await.map_err(|error| error.to_string())?;
    let grown = process.core.grow(BLOCKS * BLOCK_LEN).await.map_err(|error| error.to_string())?;
    if grown.len == BLOCKS * BLOCK_LEN { Ok(()) } else { Err(format!("the disk has {} bytes", grown.len)) }
}

/// Clients that write to `places` in turn, [`DEPTH`] at a time, and rest for `rest_ns` between two writes. How long
/// each write took, in their order.
async fn load(process: &Process, places: Vec<u64>, rest_ns: u64) -> Result<Vec<u64>, String> {
    let tasks = process.sim.tasks().clone();
    let (took, ended) = (Rc::new(RefCell::new(vec![0; places.len()])), Rc::new(Cell::new(0)));
    let (next, failed) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new(None)));
    let places = Rc::new(places);
    for _ in 0..DEPTH {
        let (process, places, tasks) = (process.clone(), Rc::clone(&places), tasks.clone());
        let (took, ended) = (Rc::clone(&took), Rc::clone(&ended));
        let (next, failed) = (Rc::clone(&next), Rc::clone(&failed));
        process.sim.tasks().clone().spawn(async move {
            while next.get() < places.len() {
                let index = next.replace(next.get() + 1);
                let began = Io::now_ns(&process.sim);
                if let Err(why) = write(&process, places[index], 1).await {
                    *failed.borrow_mut() = Some(why);
                }
                took.borrow_mut()[index] = Io::now_ns(&process.sim) - began;
                if rest_ns > 0 {
                    tasks.sleep_until(tasks.turn_ns() + rest_ns).await;
                }
            }
            ended.set(ended.get() + 1);
        });
    }
    while ended.get() < DEPTH {
        tasks.sleep_until(tasks.turn_ns() + MS).await;
    }
    match failed.take() {
        Some(why) => Err(why),
        None => Ok(took.take()),
    }
}

fn timed(kind: RigKind, flush_ns: u64, places: Vec<u64>, rest_ns: u64) -> Result<Vec<u64>, String> {
    let rig = prepared(kind);
    let process = rig.process();
    let (running, disk) = (process.clone(), rig.clone());
    let done = process.run(async move {
        opened(&running, &disk).await?;
        disk.host.set_latency(Some(Latency { operation_ns: MS / 10, flush_ns }));
        let took = load(&running, places, rest_ns).await?;
        disk.host.set_latency(None);
        running.core.close().await.map_err(|error| error.to_string())?;
        Ok::<_, String>(took)
    });
    process.sim.end();
    let took = done.expect("the power stays on")?;
    rig.check(false)?;
    Ok(took)
}

/// Every write takes a new block, on a storage that flushes in 5 ms: only those wait that came before there was any
/// space, for the run that was under way and for one that has room for all of them.
pub fn new_blocks(kind: RigKind) -> Result<(), String> {
    let blocks: Vec<u64> = (0..BLOCKS).map(|block| block * 37 % BLOCKS * BLOCK_LEN).collect();
    let took = timed(kind, 5 * MS, blocks.clone(), 16 * MS)?;
    let longest = took.iter().max().copied().unwrap_or(0);
    let late = took.iter().skip(DEPTH as usize).filter(|&&took| took > 2 * MS).count();
    if longest > 13 * MS || late > 0 {
        return Err(format!(
            "the longest write took {} us; {late} of those that found space waited",
            longest / 1000
        ));
    }
    // As fast as the storage takes them: then all wait for space, each for one run.
    let longest = timed(kind, 5 * MS, blocks, 0)?.into_iter().max().unwrap_or(0);
    if longest > 13 * MS {
        return Err(format!("the longest write took {} us", longest / 1000));
    }
    Ok(())
}

/// Every write leaves a record, and the log fills up faster than batches are written: a write waits for the rest of one
/// batch, not for another one.
pub fn new_sectors(kind: RigKind) -> Result<(), String> {
    let sectors = (0..16_000).map(|index| (index % 4 * 4096 + index / 4) * SECTOR_LEN).collect();
    let longest = timed(kind, 20 * MS, sectors, 0)?.into_iter().max().unwrap_or(0);
    // A batch flushes twice.
    if longest > 45 * MS { Err(format!("the longest write took {} us", longest / 1000)) } else { Ok(()) }
}

/// Blocks that the story below writes: enough for several runs, some of which begin while places are taken.
const FEW: u64 = 20;

/// How far the story has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Come {
    #[default]
    Opened,
    /// Half of the blocks are durable.
    Flushed,
    /// And the reserve was given back.
    Idle,
    Ended,
}

/// Space is made, given back and made again, with the power cut, and the process killed, at every change.
pub fn made_and_given_back(kind: RigKind) -> Result<(), String> {
    let (rig, come, before) = begun(kind, None);
    if come != Come::Ended {
        return Err(format!("the story ends at {come:?}"));
    }
    for cut in 1..=rig.host.changed() - before {
        for kill in [false, true] {
            let (rig, come, _) = begun(kind, Some(cut));
            end(rig, kill, come).map_err(|why| format!("cut at {cut}, kill: {kill}, {come:?}: {why}"))?;
        }
    }
    Ok(())
}

/// Lets the story happen until the power goes; how far it came, and how many changes the host had seen before.
fn begun(kind: RigKind, cut: Option<u64>) -> (Rig, Come, u64) {
    let rig = prepared(kind);
    let process = rig.process();
    let (come, before) = (Rc::new(Cell::new(Come::default())), Rc::new(Cell::new(0)));
    let (running, disk) = (process.clone(), rig.clone());
    let (told, changed) = (Rc::clone(&come), Rc::clone(&before));
    let done = process.run(async move {
        opened(&running, &disk).await?;
        changed.set(disk.host.changed());
        disk.host.cut_after(cut);
        let tasks = running.sim.tasks().clone();
        let leaf = disk.images[0].1.clone();
        load(&running, (0..FEW / 2).map(|block| block * BLOCK_LEN).collect(), 0).await?;
        flush(&running).await?;
        told.set(Come::Flushed);
        let held = disk.host.content(&leaf).len();
        tasks.sleep_until(tasks.turn_ns() + IDLE_NS).await;
        let left = disk.host.content(&leaf).len();
        if left >= held {
            return Err(format!("the image has {left} bytes, and had {held} while it was written to"));
        }
        told.set(Come::Idle);
        load(&running, (FEW / 2..FEW).map(|block| block * BLOCK_LEN).collect(), 0).await?;
        flush(&running).await?;
        told.set(Come::Ended);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    assert!(!matches!(done, Some(Err(_))), "{done:?}");
    (rig, come.get(), before.get())
}

async fn flush(process: &Process) -> Result<(), String> {
    process.ask(Op::Flush, Span::default(), &PageBuf::zeroed(1)).await.map_err(|error| error.to_string())
}

fn end(mut rig: Rig, kill: bool, come: Come) -> Result<(), String> {
    if kill {
        rig.host.process_killed();
    } else {
        rig.host.power_cut();
        rig.memory = std::sync::Arc::default();
    }
    rig.host.cut_after(None);
    rig.check(true)?;
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let found = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
        for block in 0..FEW {
            let found = read(&running, block * BLOCK_LEN).await?;
            let durable = if block < FEW / 2 { come >= Come::Flushed } else { come == Come::Ended };
            if found != 1 && (durable || found != 0) {
                return Err(format!("block {block} holds write {found}"));
            }
        }
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    found.expect("the power stays on")?;
    rig.check(false)
}
