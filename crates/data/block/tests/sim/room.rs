//! A device that becomes longer when the disk asks: how long writes wait, what waits where no owner answers, and what a
//! death leaves at every change, with the owner half way through. And one that becomes shorter when a guest has given
//! blocks back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tapio_block::Op;
use tapio_format::live::vhd::{AskForRoom, RoomGauge, RoomPlace, RoomWanted};
use tapio_format::vhd::Footer;
use tapio_ring::sim::SimHost;
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, Span};

use crate::rig::{Process, Rig, RigKind, read, write};

const BLOCK_LEN: u64 = 2 << 20;
const EXTENT: u64 = 4 << 20;
const MS: u64 = 1_000_000;
/// Blocks that are written: far more than the device has room for at first.
const BLOCKS: u64 = 24;
const DEPTH: u64 = 4;

/// Hears what the disk wants, as long as the toolstack lives.
#[derive(Debug, Default)]
struct Ear {
    wanted: Mutex<Option<RoomWanted>>,
    is_deaf: std::sync::atomic::AtomicBool,
}

impl AskForRoom for Ear {
    fn ask(&self, wanted: &RoomWanted) {
        if !self.is_deaf.load(std::sync::atomic::Ordering::Relaxed) {
            *self.wanted.lock().expect("no panic") = Some(*wanted);
        }
    }
}

/// The owner of the device, as the worker of an SR is.
#[derive(Clone)]
struct Owner {
    host: SimHost,
    path: PathBuf,
    ear: Arc<Ear>,
    gauge: Arc<RoomGauge>,
    /// How long it takes for a growth.
    takes_ns: u64,
    /// It tells the disk that it has done it.
    tells: bool,
    /// Bytes that the device may have.
    limit: Rc<Cell<u64>>,
    /// Its journal: the length before a growth that is not over.
    journal: Rc<Cell<Option<u64>>>,
    /// The footer, while the device becomes shorter.
    shortens: Rc<Cell<Option<[u8; 512]>>>,
    ends: Rc<Cell<bool>>,
}

impl Owner {
    fn of(rig: &mut Rig, takes_ns: u64, tells: bool) -> Self {
        let (ear, gauge) = (Arc::<Ear>::default(), Arc::<RoomGauge>::default());
        rig.room = RoomPlace::new(Arc::<Ear>::clone(&ear), Arc::clone(&gauge));
        Self {
            host: rig.host.clone(),
            path: rig.images[0].1.clone(),
            ear,
            gauge,
            takes_ns,
            tells,
            limit: Rc::new(Cell::new(u64::MAX)),
            journal: Rc::default(),
            shortens: Rc::default(),
            ends: Rc::default(),
        }
    }

    fn hears(&self, hears: bool) {
        self.ear.is_deaf.store(!hears, std::sync::atomic::Ordering::Relaxed);
    }

    fn len(&self) -> u64 {
        self.host.content(&self.path).len()
    }

    /// Serves the disk until it ends.
    async fn run(self, process: Process) {
        let tasks = process.sim.tasks().clone();
        while !self.ends.get() {
            let wanted = self.ear.wanted.lock().expect("no panic").take();
            let old = self.len();
            if let Some(spare) = wanted.filter(|wanted| wanted.wanted < wanted.len) {
                self.take(&process, spare.wanted.next_multiple_of(EXTENT)).await;
                continue;
            }
            let goal = wanted.map_or(0, |wanted| {
                // A little at a time, so that there are many growths.
                wanted.wanted.min(old + 2 * EXTENT).next_multiple_of(EXTENT).min(self.limit.get())
            });
            if goal <= old {
                tasks.sleep_until(tasks.turn_ns() + MS).await;
                continue;
            }
            self.journal.set(Some(old));
            tasks.sleep_until(tasks.turn_ns() + self.takes_ns / 2).await;
            self.host.lengthen(&self.path, goal);
            tasks.sleep_until(tasks.turn_ns() + self.takes_ns / 2).await;
            self.put_footer(old);
            self.journal.set(None);
            if self.tells {
                process.core.look_for_room().await.expect("a device can be looked at");
            }
        }
    }

    fn put_footer(&self, old: u64) {
        let mut footer = [0; 512];
        self.host.content(&self.path).read(old - 512, &mut footer);
        assert!(Footer::decode(&footer).is_ok(), "the footer was at the old end");
        self.host.scribble(&self.path, self.len() - 512, &footer);
    }

    /// Makes the device shorter, if the disk does not need the rest.
    async fn take(&self, process: &Process, to: u64) {
        let (tasks, from) = (process.sim.tasks().clone(), self.len());
        if to >= from {
            return;
        }
        let mut footer = [0; 512];
        self.host.content(&self.path).read(from - 512, &mut footer);
        self.shortens.set(Some(footer));
        if process.core.shorten(from, to).await.is_ok() {
            tasks.sleep_until(tasks.turn_ns() + self.takes_ns).await;
            self.host.shorten(&self.path, to);
            tasks.sleep_until(tasks.turn_ns() + self.takes_ns).await;
        }
        self.shortens.set(None);
    }

    /// A successor puts in order what this one left.
    fn recover(&self) {
        if let Some(footer) = self.shortens.take() {
            self.host.scribble(&self.path, self.len() - 512, &footer);
        }
        if let Some(old) = self.journal.take() {
            self.put_footer(old);
        }
    }
}

fn prepared(seed: u64, takes_ns: u64, tells: bool) -> (Rig, Owner) {
    let mut rig = Rig::new(RigKind::Device, seed);
    let owner = Owner::of(&mut rig, takes_ns, tells);
    (rig, owner)
}

async fn opened(process: &Process, rig: &Rig) -> Result<(), String> {
    process.core.resume(&rig.spec(Access::ReadWrite)).await.map_err(|error| error.to_string())?;
    process.core.grow(BLOCKS * BLOCK_LEN).await.map(drop).map_err(|error| error.to_string())
}

/// What was answered, and what was flushed then.
#[derive(Clone, Default)]
struct Done {
    answered: Rc<RefCell<BTreeSet<u64>>>,
    durable: Rc<RefCell<BTreeSet<u64>>>,
    longest_ns: Rc<Cell<u64>>,
}

/// Writes the first sector of every block, `DEPTH` at a time, with `rest_ns` between.
async fn load(process: &Process, rest_ns: u64, done: &Done) -> Result<(), String> {
    let tasks = process.sim.tasks().clone();
    let (next, ended) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let failed = Rc::new(RefCell::new(None));
    for _ in 0..DEPTH {
        let (process, done, tasks) = (process.clone(), done.clone(), tasks.clone());
        let (next, ended, failed) = (Rc::clone(&next), Rc::clone(&ended), Rc::clone(&failed));
        process.sim.tasks().clone().spawn(async move {
            while next.get() < BLOCKS {
                let block = next.replace(next.get() + 1);
                let began = Io::now_ns(&process.sim);
                match write(&process, block * BLOCK_LEN, block + 1).await {
                    Ok(()) => drop(done.answered.borrow_mut().insert(block)),
                    Err(why) => *failed.borrow_mut() = Some(why),
                }
                done.longest_ns.set(done.longest_ns.get().max(Io::now_ns(&process.sim) - began));
                tasks.sleep_until(tasks.turn_ns() + rest_ns).await;
            }
            ended.set(ended.get() + 1);
        });
    }
    while ended.get() < DEPTH {
        tasks.sleep_until(tasks.turn_ns() + MS).await;
    }
    failed.take().map_or(Ok(()), Err)
}

async fn flush(process: &Process, done: &Done) -> Result<(), String> {
    let before = done.answered.borrow().clone();
    let flushed = process.ask(Op::Flush, Span::default(), &PageBuf::zeroed(1)).await;
    flushed.map_err(|error| error.to_string())?;
    done.durable.borrow_mut().extend(before);
    Ok(())
}

async fn holds_all(process: &Process) -> Result<(), String> {
    for block in 0..BLOCKS {
        let found = read(process, block * BLOCK_LEN).await?;
        if found != block + 1 {
            return Err(format!("block {block} holds write {found}"));
        }
    }
    Ok(())
}

/// A writer that leaves time for growths never waits for one.
pub fn in_time() -> Result<(), String> {
    let (rig, owner) = prepared(1, 100 * MS, true);
    let process = rig.process();
    let (running, disk, working, done) = (process.clone(), rig.clone(), owner.clone(), Done::default());
    let told = done.clone();
    let ended = process.run(async move {
        opened(&running, &disk).await?;
        running.sim.tasks().spawn(working.clone().run(running.clone()));
        // The first growths: the device is full at the beginning.
        running.sim.tasks().sleep_until(running.sim.tasks().turn_ns() + 500 * MS).await;
        load(&running, 200 * MS, &told).await?;
        holds_all(&running).await?;
        working.ends.set(true);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    ended.expect("the power stays on")?;
    rig.check(false)?;
    match done.longest_ns.get() {
        longest if longest > 20 * MS => Err(format!("the longest write took {} us", longest / 1000)),
        _ => Ok(()),
    }
}

/// Without an owner writes wait and are not answered, reads go on, the disk can be paused; when there is an owner again
/// all goes on, told or not.
pub fn no_owner(tells: bool) -> Result<(), String> {
    let (rig, owner) = prepared(2, 10 * MS, tells);
    let process = rig.process();
    let (running, disk, working, done) = (process.clone(), rig.clone(), owner.clone(), Done::default());
    let ended = process.run(async move {
        let tasks = running.sim.tasks().clone();
        opened(&running, &disk).await?;
        working.hears(false);
        tasks.spawn(working.clone().run(running.clone()));
        let (loading, told) = (running.clone(), done.clone());
        let is_over = Rc::new(Cell::new(None));
        let over = Rc::clone(&is_over);
        tasks.spawn(async move { over.set(Some(load(&loading, 0, &told).await)) });
        tasks.sleep_until(tasks.turn_ns() + 20_000 * MS).await;
        let written = done.answered.borrow().len() as u64;
        let waiting = running.core.waiting_for_space() as u64;
        if written == 0 || written >= BLOCKS || waiting != DEPTH || is_over.take().is_some() {
            return Err(format!("{written} writes were answered and {waiting} wait"));
        }
        let facts = working.gauge.facts();
        if facts.waiting.is_none() || facts.wanted <= facts.len || facts.len != working.len() {
            return Err(format!("the gauge shows {facts:?} of {} bytes", working.len()));
        }
        if read(&running, 0).await? != 1 {
            return Err("what was written is not read".into());
        }
        flush(&running, &done).await?;
        // As for a snapshot.
        running.core.pause().await.map_err(|error| error.to_string())?;
        running.core.resume(&disk.spec(Access::ReadWrite)).await.map_err(|error| error.to_string())?;
        tasks.sleep_until(tasks.turn_ns() + 3_000 * MS).await;
        // A full SR: some room, and then none.
        working.limit.set(working.len() + EXTENT);
        working.hears(true);
        tasks.sleep_until(tasks.turn_ns() + 5_000 * MS).await;
        let more = done.answered.borrow().len() as u64;
        if more <= written || more >= BLOCKS || running.core.waiting_for_space() == 0 {
            return Err(format!("{more} writes were answered, {written} before"));
        }
        working.limit.set(u64::MAX);
        let until = tasks.turn_ns() + 120_000 * MS;
        loop {
            match is_over.take() {
                Some(ended) => break ended?,
                None if tasks.turn_ns() > until => return Err("writes wait although there is room".into()),
                None => tasks.sleep_until(tasks.turn_ns() + MS).await,
            }
        }
        holds_all(&running).await?;
        working.ends.set(true);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    ended.expect("the power stays on")?;
    rig.check(false)
}

/// A disk whose device is long enough asks for nothing, and a reader never asks.
pub fn nothing_to_ask() -> Result<(), String> {
    let mut rig = Rig::new(RigKind::Device, 4);
    let owner = Owner::of(&mut rig, 0, false);
    let process = rig.process();
    let (running, disk, asked) = (process.clone(), rig.clone(), owner.clone());
    let ended = process.run(async move {
        running.core.resume(&disk.spec(Access::ReadWrite)).await.map_err(|error| error.to_string())?;
        write(&running, 0, 1).await?;
        let tasks = running.sim.tasks().clone();
        tasks.sleep_until(tasks.turn_ns() + 5_000 * MS).await;
        let facts = asked.gauge.facts();
        let wanted = asked.ear.wanted.lock().expect("no panic").take();
        if wanted.is_some() || facts.wanted != 0 || facts.len != asked.len() {
            return Err(format!("asked for {wanted:?}, {facts:?}"));
        }
        running.core.close().await.map_err(|error| error.to_string())?;
        match asked.gauge.facts().len {
            0 => Ok(()),
            len => Err(format!("the gauge of a closed disk shows {len} bytes")),
        }
    });
    process.sim.end();
    ended.expect("the power stays on")
}

/// The disk grows with the power cut, and the process killed, at every change; the owner is half way through or not,
/// and tells of growths or not.
pub fn killed() -> Result<(), String> {
    for tells in [true, false] {
        let (story, changes) = begun(tells, None);
        if story.done.durable.borrow().len() as u64 != BLOCKS {
            return Err(format!("{} blocks are durable", story.done.durable.borrow().len()));
        }
        // All of them where a number of seeds is asked for; every seventh, beginning with another one each time, else.
        let each = if std::env::var_os("TAPIO_SEEDS").is_some() { 1 } else { 7 };
        for cut in (1 + u64::from(tells)..=changes).step_by(each) {
            let (story, _) = begun(tells, Some(cut));
            story.end(cut % 2 == 0).map_err(|why| format!("cut at {cut}, told: {tells}: {why}"))?;
        }
    }
    Ok(())
}

/// Blocks that the guest keeps.
const KEPT: u64 = 2;

/// A guest gives blocks back, the device becomes shorter, and longer again when they are written: with the power cut,
/// and the process killed, at every change.
pub fn shortened() -> Result<(), String> {
    let (story, changes) = given_back(None);
    if story.done.durable.borrow().len() as u64 != BLOCKS {
        return Err(format!("{} blocks are durable", story.done.durable.borrow().len()));
    }
    let each = if std::env::var_os("TAPIO_SEEDS").is_some() { 1 } else { 13 };
    for cut in (1..=changes).step_by(each) {
        let (story, _) = given_back(Some(cut));
        story.end(cut % 2 == 0).map_err(|why| format!("cut at {cut} of {changes}: {why}"))?;
    }
    Ok(())
}

fn given_back(cut: Option<u64>) -> (Story, u64) {
    let (rig, owner) = prepared(5, 20 * MS, true);
    let process = rig.process();
    let (running, disk, working) = (process.clone(), rig.clone(), owner.clone());
    let (done, before) = (Done::default(), Rc::new(Cell::new(0)));
    let (told, changed) = (done.clone(), Rc::clone(&before));
    let ended = process.run(async move {
        let tasks = running.sim.tasks().clone();
        opened(&running, &disk).await?;
        tasks.spawn(working.clone().run(running.clone()));
        load(&running, 0, &Done::default()).await?;
        flush(&running, &Done::default()).await?;
        told.answered.borrow_mut().extend(0..KEPT);
        told.durable.borrow_mut().extend(0..KEPT);
        changed.set(disk.host.changed());
        disk.host.cut_after(cut);
        let long = working.len();
        let rest = Span::new(KEPT * BLOCK_LEN, (BLOCKS - KEPT) * BLOCK_LEN);
        let given = running.ask(Op::Discard, rest, &PageBuf::zeroed(1)).await;
        given.map_err(|error| error.to_string())?;
        // The guest goes on meanwhile.
        let until = tasks.turn_ns() + 30_000 * MS;
        while working.len() > long / 2 {
            if tasks.turn_ns() > until {
                let (now, facts) = (working.len(), working.gauge.facts());
                return Err(format!("the device had {long} bytes and has {now} still: {facts:?}"));
            }
            write(&running, 0, 1).await?;
            let rest = if working.shortens.get().is_some() { 2 } else { 500 };
            tasks.sleep_until(tasks.turn_ns() + rest * MS).await;
        }
        load(&running, 0, &told).await?;
        holds_all(&running).await?;
        flush(&running, &told).await?;
        if working.len() < BLOCKS * BLOCK_LEN {
            return Err(format!("the device has {} bytes for all blocks", working.len()));
        }
        working.ends.set(true);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    assert!(!matches!(ended, Some(Err(_))), "{ended:?}");
    let changes = rig.host.changed() - before.get();
    (Story { rig, owner, done }, changes)
}

struct Story {
    rig: Rig,
    owner: Owner,
    done: Done,
}

fn begun(tells: bool, cut: Option<u64>) -> (Story, u64) {
    let (rig, owner) = prepared(3, 4 * MS, tells);
    let process = rig.process();
    let (running, disk, working, done) = (process.clone(), rig.clone(), owner.clone(), Done::default());
    let (told, before) = (done.clone(), Rc::new(Cell::new(0)));
    let changed = Rc::clone(&before);
    let ended = process.run(async move {
        opened(&running, &disk).await?;
        changed.set(disk.host.changed());
        disk.host.cut_after(cut);
        running.sim.tasks().spawn(working.clone().run(running.clone()));
        load(&running, 0, &told).await?;
        flush(&running, &told).await?;
        working.ends.set(true);
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    assert!(!matches!(ended, Some(Err(_))), "{ended:?}");
    let changes = rig.host.changed() - before.get();
    (Story { rig, owner, done }, changes)
}

impl Story {
    fn end(mut self, kill: bool) -> Result<(), String> {
        if kill {
            self.rig.host.process_killed();
        } else {
            self.rig.host.power_cut();
            self.rig.memory = Arc::default();
        }
        self.rig.host.cut_after(None);
        // The worker comes before a disk process.
        self.owner.recover();
        self.rig.check(true)?;
        let process = self.rig.process();
        let (running, spec) = (process.clone(), self.rig.spec(Access::ReadWrite));
        let kept =
            if kill { self.done.answered.borrow().clone() } else { self.done.durable.borrow().clone() };
        let owner = Owner { ends: Rc::default(), ..self.owner.clone() };
        let found = process.run(async move {
            running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
            for block in 0..BLOCKS {
                let found = read(&running, block * BLOCK_LEN).await?;
                if found != block + 1 && (found != 0 || kept.contains(&block)) {
                    return Err(format!("block {block} holds write {found}"));
                }
            }
            // And it goes on.
            running.sim.tasks().spawn(owner.clone().run(running.clone()));
            load(&running, 0, &Done::default()).await?;
            holds_all(&running).await?;
            owner.ends.set(true);
            running.core.close().await.map_err(|error| error.to_string())
        });
        process.sim.end();
        found.expect("the power stays on")?;
        self.rig.check(false)
    }
}
