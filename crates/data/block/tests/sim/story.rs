//! What happens in a run.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_block::{DiskError, Op};
use tapio_ring::sim::{Faults, Random};
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::changes::Plan;
use crate::model::{Model, fill, stamp_of};
use crate::pages::Pool;
use crate::rig::{Process, Rig, RigKind, ZONE_SECTORS, ZONES, blocks, in_zones, place};

const SECTOR: usize = SECTOR_LEN as usize;

/// How a phase ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Close,
    PowerCut,
    Kill,
}

pub struct World {
    pub rig: Rig,
    random: Random,
    pub model: Rc<RefCell<Model>>,
    /// At the end of a phase the storage works, and a flush must succeed.
    must_recover: bool,
}

/// One seed: layers are put on one after the other, with a few phases of work on each.
pub fn run(kind: RigKind, seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0xfeed);
    let mut world = World {
        rig: Rig::new(kind, seed),
        model: Rc::default(),
        random: random.clone(),
        must_recover: false,
    };
    loop {
        for _ in 0..1 + random.below(3) {
            let end = [End::Close, End::PowerCut, End::PowerCut, End::Kill][random.below(4) as usize];
            let faults = random.chance(1, 4);
            // A process dies between two changes to a file as the power goes there.
            let is_cut = match end {
                End::Close => false,
                End::PowerCut => random.chance(3, 4),
                End::Kill => random.chance(1, 2),
            };
            let cut = is_cut.then(|| 1 + random.below(120));
            world.phase(end, faults, cut)?;
        }
        // The layer that comes next needs a parent that was closed.
        world.phase(End::Close, false, None)?;
        if !world.rig.grow(kind) {
            return Ok(());
        }
    }
}

/// Grows the chain with closed phases, so that the leaf is new.
pub fn prepared(kind: RigKind, seed: u64) -> Result<World, String> {
    let mut world = World {
        rig: Rig::new(kind, seed),
        model: Rc::default(),
        random: Random::new(seed),
        must_recover: false,
    };
    loop {
        let parents = world.rig.images.len();
        if !world.rig.grow(kind) {
            return Ok(world);
        }
        // Data below the new leaf.
        if parents > 1 {
            world.phase(End::Close, false, None)?;
        }
    }
}

/// How many changes the short story makes.
pub fn count_changes(kind: RigKind, seed: u64) -> Result<u64, String> {
    let mut world = prepared(kind, seed)?;
    let before = world.rig.host.changed();
    world.phase(End::Close, false, None)?;
    Ok(world.rig.host.changed() - before)
}

/// The short story with the power cut after `cut` changes.
pub fn cut_at(kind: RigKind, seed: u64, cut: u64) -> Result<(), String> {
    let mut world = prepared(kind, seed)?;
    world.phase(End::PowerCut, false, Some(cut))?;
    world.phase(End::Close, false, None)
}

/// How many writes, flushes and changes of length the short story makes.
pub fn count_operations(kind: RigKind, seed: u64) -> Result<u64, String> {
    let mut world = prepared(kind, seed)?;
    let before = world.rig.host.operations();
    world.phase(End::Close, false, None)?;
    Ok(world.rig.host.operations() - before)
}

/// The short story with EIO for `count` of these after the first `before`: data, bitmaps, table, footer, flushes alike.
/// When the storage works again everything can be made durable, and then the power goes.
pub fn eio_at(kind: RigKind, seed: u64, before: u64, count: u64) -> Result<(), String> {
    let mut world = prepared(kind, seed)?;
    world.must_recover = true;
    world.rig.host.fail_after(before, count);
    world.phase(End::PowerCut, false, None)?;
    world.phase(End::Close, false, None)
}

/// One write is stuck for an hour; others begin and end meanwhile, a pause does not end before it does.
pub fn stuck(kind: RigKind) -> Result<(), String> {
    let world = prepared(kind, 3)?;
    let process = world.rig.process();
    let spec = world.rig.spec(Access::ReadWrite);
    let (running, host) = (process.clone(), world.rig.host.clone());
    let told = process.run(async move {
        let text = |error: tapio_format::FormatError| error.to_string();
        running.core.resume(&spec).await.map_err(text)?;
        let tasks = running.sim.tasks().clone();
        // Written once before, so that only the data of the write is in flight when it is stuck.
        let page = PageBuf::zeroed(SECTOR);
        let first = Span::new(0, SECTOR_LEN);
        running.ask(Op::Write { durable: true }, first, &page).await.map_err(|error| error.to_string())?;
        let began = tasks.turn_ns();
        host.set_faults(Faults { stuck: 10_000, ..Faults::default() });
        let ended = Rc::new(RefCell::new(None));
        let (waiting, end) = (running.clone(), Rc::clone(&ended));
        tasks.spawn(async move {
            let page = PageBuf::zeroed(SECTOR);
            let result = waiting.ask(Op::Write { durable: false }, first, &page).await;
            *end.borrow_mut() = Some(result);
        });
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        host.set_faults(Faults::default());
        for sector in 1..64 {
            let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
            let written = running.ask(Op::Write { durable: false }, span, &page).await;
            written.and(running.ask(Op::Read, span, &page).await).map_err(|error| error.to_string())?;
        }
        let meanwhile = tasks.turn_ns() - began;
        if ended.borrow().is_some() || meanwhile > 60_000_000_000 {
            return Err(format!("others took {meanwhile} ns"));
        }
        running.core.pause().await.map_err(text)?;
        let paused = tasks.turn_ns() - began;
        let outcome = ended.borrow_mut().take();
        match outcome {
            Some(Ok(())) if paused > 3_600_000_000_000 => Ok(()),
            other => Err(format!("paused after {paused} ns with the stuck write at {other:?}")),
        }
    });
    process.sim.end();
    told.expect("the power stays on")
}

impl World {
    fn phase(&mut self, end: End, faults: bool, cut: Option<u64>) -> Result<(), String> {
        self.phase_with(end, faults, cut, None)
    }

    /// A phase in which the chain changes, too.
    pub fn phase_with(
        &mut self,
        end: End,
        faults: bool,
        cut: Option<u64>,
        changes: Option<Plan>,
    ) -> Result<(), String> {
        self.work(end, faults, cut, changes)?;
        self.verify(end)
    }

    /// A phase after which the contents have not been checked yet.
    pub fn work(
        &mut self,
        end: End,
        faults: bool,
        cut: Option<u64>,
        changes: Option<Plan>,
    ) -> Result<(), String> {
        let process = self.rig.process();
        self.rig.host.cut_after(cut);
        if faults {
            // On a leaf that is reached so, writes may be gone before a flush says it: that is for a test of its own.
            let connection_loss = if self.rig.images.len() > 1 { 100 } else { 0 };
            self.rig.host.set_faults(Faults {
                read_eio: 50,
                write_eio: 100,
                flush_eio: 100,
                no_space: 300,
                slow: 20,
                stuck: 2,
                connection_loss,
                cancels: 5_000,
            });
            self.rig.notes.lock().expect("no panic").fails_each = Some(3);
        }
        let spec = self.rig.spec(Access::ReadWrite);
        let (threads, thread_seed) = (self.random.below(4) as usize, self.random.next());
        let pool = self.random.chance(1, 3).then(|| Pool::new(1 + self.random.below(4) as u32));
        let clients = 1 + self.random.below(8);
        let seeds: Vec<u64> = (0..clients).map(|_| self.random.next()).collect();
        let (model, must_recover) = (Rc::clone(&self.model), self.must_recover);
        let running = process.clone();
        let images = Rc::new(RefCell::new(self.rig.clone()));
        let changed = Rc::clone(&images);
        if let Some(pool) = &pool {
            drop(process.core.admission().set_pages(Some(pool.member())));
        }
        let work = async move {
            // Opening may meet a fault; then there is nothing to do in this phase.
            if running.core.resume(&spec).await.is_err() {
                return Ok(false);
            }
            if threads > 0 {
                running.add_queue_threads(threads, thread_seed);
            }
            let left = Rc::new(RefCell::new(seeds.len() + usize::from(changes.is_some())));
            let failure: Rc<RefCell<Option<String>>> = Rc::default();
            if let Some(plan) = changes {
                let (process, left, failure) = (running.clone(), Rc::clone(&left), Rc::clone(&failure));
                running.sim.tasks().spawn(async move {
                    if let Err(why) = crate::changes::manager(&process, &changed, plan).await {
                        *failure.borrow_mut() = Some(why);
                    }
                    *left.borrow_mut() -= 1;
                });
            }
            for seed in seeds {
                let (process, model) = (running.clone(), Rc::clone(&model));
                let (left, failure) = (Rc::clone(&left), Rc::clone(&failure));
                running.sim.tasks().spawn(async move {
                    if let Err(why) = client(&process, &model, Random::new(seed)).await {
                        *failure.borrow_mut() = Some(why);
                    }
                    *left.borrow_mut() -= 1;
                });
            }
            // Ever longer: what is stuck is so for an hour.
            let mut pause_ns = 1_000_000;
            while *left.borrow() > 0 {
                let tasks = running.sim.tasks();
                tasks.sleep_until(tasks.turn_ns() + pause_ns).await;
                pause_ns += pause_ns / 16;
            }
            if let Some(why) = failure.borrow_mut().take() {
                return Err(why);
            }
            if must_recover {
                running.sim.host().fail_after(0, 0);
                let (began, page) = (model.borrow_mut().tick(), PageBuf::zeroed(SECTOR));
                let flushed = running.ask(Op::Flush, Span::default(), &page).await;
                flushed.map_err(|error| format!("a flush fails on a storage that works again: {error}"))?;
                model.borrow_mut().flushed(began);
            }
            Ok(true)
        };
        let outcome = process.run(work);
        let opened = match outcome {
            Some(Err(why)) => return Err(why),
            Some(Ok(opened)) => opened,
            None => true,
        };
        let mut closed = false;
        if end == End::Close && outcome.is_some() && opened {
            let core = Rc::clone(&process.core);
            closed = matches!(process.run(async move { core.close().await }), Some(Ok(())));
            if let Some(pool) = pool.filter(|pool| closed && pool.free() != pool.pages) {
                return Err(format!("pages are missing at the end: {pool:?}"));
            }
        }
        process.end();
        let core = Rc::downgrade(&process.core);
        drop(process);
        if core.upgrade().is_some() {
            return Err("something of the process keeps the disk when all of it is gone".into());
        }
        self.rig.images.clone_from(&images.borrow().images);
        self.rig.made = images.borrow().made;
        self.rig.host.set_faults(Faults::default());
        self.rig.host.fail_after(0, 0);
        if end == End::PowerCut || (end == End::Close && self.rig.host.is_dark()) {
            self.rig.host.power_cut();
            self.rig.memory = std::sync::Arc::default();
        } else {
            self.rig.host.process_killed();
        }
        self.rig.host.cut_after(None);
        // An image that a fault kept from being closed during a commit is put in order at the next opening, too.
        let in_order = closed && !(faults && changes.is_some());
        self.rig.check(!in_order).map_err(|why| format!("before it is opened again after {end:?}: {why}"))?;
        // The next start of the disk knows its command and the notes beside its images.
        self.rig.images = self.rig.started_again();
        self.rig.notes.lock().expect("no panic").fails_each = None;
        Ok(())
    }

    /// Opens the disk again, without faults, and compares every sector of the zones.
    pub fn verify(&mut self, end: End) -> Result<(), String> {
        let process = self.rig.process();
        let spec = self.rig.spec(Access::ReadWrite);
        let running = process.clone();
        let found = process.run(async move {
            running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
            let mut found = Vec::new();
            for zone in ZONES {
                let page = PageBuf::zeroed(ZONE_SECTORS as usize * SECTOR);
                let span = Span::new(zone * SECTOR_LEN, ZONE_SECTORS * SECTOR_LEN);
                running.ask(Op::Read, span, &page).await.map_err(|error| format!("zone {zone}: {error}"))?;
                for (index, sector) in page[..span.len as usize].chunks_exact(SECTOR).enumerate() {
                    found.push((
                        zone + index as u64,
                        stamp_of(sector).map_err(|why| format!("sector {}: {why}", zone + index as u64))?,
                    ));
                }
            }
            running.core.close().await.map_err(|error| error.to_string())?;
            Ok::<_, String>(found)
        });
        process.sim.end();
        let found = found.expect("the power stays on")?;
        let mut model = self.model.borrow_mut();
        for (sector, stamp) in found {
            let checked = if end == End::PowerCut {
                model.check_after_cut(sector, stamp)
            } else {
                model.check_after_kill(sector, stamp)
            };
            checked.map_err(|why| format!("after {end:?}: {why}"))?;
        }
        drop(model);
        self.rig.check(false).map_err(|why| format!("after {end:?} and opening again: {why}"))
    }
}

/// A client: random requests one after the other, each checked against the model.
async fn client(process: &Process, model: &Rc<RefCell<Model>>, mut random: Random) -> Result<(), String> {
    for _ in 0..10 + random.below(30) {
        if random.chance(1, 40) {
            // Long enough for metadata to be written back by itself.
            let tasks = process.sim.tasks();
            tasks.sleep_until(tasks.turn_ns() + 1_500_000_000).await;
        }
        if !process.core.transfers().is_off() && random.chance(1, 3) {
            neighbours(process, model, &mut random).await;
            continue;
        }
        let sectors = place(&mut random);
        let span = Span::new(sectors.start * SECTOR_LEN, (sectors.end - sectors.start) * SECTOR_LEN);
        let mut page = PageBuf::zeroed(span.len as usize);
        match random.below(23) {
            20..=22 => whole_blocks(process, model, &mut random).await,
            0..=8 => {
                let durable = random.chance(1, 6);
                let stamp = model.borrow_mut().fresh_stamp();
                page.chunks_exact_mut(SECTOR).for_each(|sector| fill(stamp, sector));
                let issued = model.borrow_mut().begin(sectors.clone(), stamp, false);
                let result = process.ask(Op::Write { durable }, span, &page).await;
                model.borrow_mut().end(sectors, issued, result.is_ok(), durable);
            }
            9 => {
                let durable = random.chance(1, 6);
                let issued = model.borrow_mut().begin(sectors.clone(), 0, false);
                let op = Op::WriteZeroes { unmap: random.chance(1, 2), durable };
                let result = process.ask(op, span, &page).await;
                model.borrow_mut().end(sectors, issued, result.is_ok(), durable);
            }
            10 => {
                // Afterwards the sectors may be zero, or what they were.
                let issued = model.borrow_mut().begin(sectors.clone(), 0, true);
                let result = process.ask(Op::Discard, span, &page).await;
                model.borrow_mut().end(sectors, issued, result.is_ok(), false);
            }
            11..=12 => {
                let began = model.borrow_mut().tick();
                if process.ask(Op::Flush, Span::default(), &page).await.is_ok() {
                    model.borrow_mut().flushed(began);
                }
            }
            _ => {
                let began = model.borrow_mut().tick();
                match process.ask(Op::Read, span, &page).await {
                    Ok(()) => {}
                    Err(DiskError::Io(_)) => continue,
                    Err(error) => return Err(format!("a read gave {error}")),
                }
                let model = model.borrow();
                for (index, sector) in page[..span.len as usize].chunks_exact(SECTOR).enumerate() {
                    let number = sectors.start + index as u64;
                    let stamp = stamp_of(sector).map_err(|why| format!("sector {number}: {why}"))?;
                    model.check_read(number, stamp, began)?;
                }
            }
        }
    }
    Ok(())
}

/// Writes to neighbouring places, all sent at the same time.
async fn neighbours(process: &Process, model: &Rc<RefCell<Model>>, random: &mut Random) {
    let zone = ZONES[random.below(ZONES.len() as u64) as usize];
    let mut next = zone + random.below(ZONE_SECTORS - 9);
    let left = Rc::new(Cell::new(2 + random.below(2)));
    let tasks = process.sim.tasks();
    for _ in 0..left.get() {
        let sectors = next..next + 1 + random.below(3);
        next = sectors.end;
        let stamp = model.borrow_mut().fresh_stamp();
        let (process, model, left) = (process.clone(), Rc::clone(model), Rc::clone(&left));
        tasks.spawn(async move {
            let span = Span::new(sectors.start * SECTOR_LEN, (sectors.end - sectors.start) * SECTOR_LEN);
            let mut page = PageBuf::zeroed(span.len as usize);
            page.chunks_exact_mut(SECTOR).for_each(|sector| fill(stamp, sector));
            let issued = model.borrow_mut().begin(sectors.clone(), stamp, false);
            let result = process.ask(Op::Write { durable: false }, span, &page).await;
            model.borrow_mut().end(sectors, issued, result.is_ok(), false);
            left.set(left.get() - 1);
        });
    }
    while left.get() > 0 {
        tasks.sleep_until(tasks.turn_ns() + 100_000).await;
    }
}

/// Discards, or writes zeroes to, whole blocks and what is around them.
async fn whole_blocks(process: &Process, model: &RefCell<Model>, random: &mut Random) {
    let sectors = blocks(random);
    let span = Span::new(sectors.start * SECTOR_LEN, (sectors.end - sectors.start) * SECTOR_LEN);
    let (is_discard, durable) = (random.chance(1, 2), random.chance(1, 6));
    let op = if is_discard { Op::Discard } else { Op::WriteZeroes { unmap: true, durable } };
    let begin = |part: std::ops::Range<u64>| (model.borrow_mut().begin(part.clone(), 0, is_discard), part);
    let begun: Vec<_> = in_zones(&sectors).into_iter().map(begin).collect();
    let result = process.ask(op, span, &PageBuf::zeroed(SECTOR)).await;
    for (issued, part) in begun {
        model.borrow_mut().end(part, issued, result.is_ok(), durable && !is_discard);
    }
}
