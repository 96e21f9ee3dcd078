//! Mirrors on the simulator: guests write while a disk is copied, and at a chosen point something happens.
//!
//! Whatever it is, guests hear of no error, and the first side equals the model. A mirror that says it is in sync has
//! both sides alike, byte for byte; after a switch-over the second side equals the model.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tapio_block::{CopyWhat, DiskError, JobState, MirrorOptions, MirrorPhase, Op};
use tapio_format::vhd::offline::{Image, OpenOptions, Shape, create_on};
use tapio_ring::sim::{Broken, Durable, Faults, Random, SimHost};
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, SECTOR_LEN, Span};

use crate::model::{Model, fill, stamp_of};
use crate::rig::{Content, DISK_LEN, Process, Rig, RigKind, ZONE_SECTORS, ZONES, place};

const SECTOR: usize = SECTOR_LEN as usize;
/// A block of an image.
const BLOCK: u64 = 2 << 20;

/// What happens to a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The disk moves to the second side.
    Pivot,
    /// The second side breaks, and comes back or not.
    Loss(Broken),
    /// Reads of the first side fail and its holes are slow to punch, while few bitmaps are in memory: guests may hear
    /// of errors, and what a request has done on one side alone is known.
    NearFails,
    /// The power goes around the switch-over.
    CutAtPivot,
    Cancel,
    Pause,
    Kill,
    PowerCut,
}

impl Fate {
    pub const ALL: [Self; 9] = [
        Self::Pivot,
        Self::NearFails,
        Self::CutAtPivot,
        Self::Loss(Broken::Failing),
        Self::Loss(Broken::Stuck),
        Self::Cancel,
        Self::Pause,
        Self::Kill,
        Self::PowerCut,
    ];
}

struct World {
    rig: Rig,
    random: Random,
    model: Rc<RefCell<Model>>,
    target: PathBuf,
    target_kind: ImageKind,
}

/// Clients that write until they are told to stop.
struct Load {
    stop: Cell<bool>,
    /// The storage fails now and then.
    may_fail: Cell<bool>,
    left: Cell<usize>,
    failure: RefCell<Option<String>>,
}

/// What the process found when its part of the story was over.
enum Told {
    /// The disk is on the first side, closed or not.
    Source,
    /// It is on the second.
    Target,
}

/// One seed. `after` is where it happens: after so many operations on the second side, changes of files, or
/// milliseconds.
pub fn run(fate: Fate, seed: u64, after: Option<u64>) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0x0dd);
    let kind = RigKind::ALL[random.below(RigKind::ALL.len() as u64) as usize];
    let mut rig = Rig::new(kind, seed);
    let mut target_kind = [ImageKind::Raw, ImageKind::Vhd][random.below(2) as usize];
    if fate == Fate::NearFails {
        (rig.bitmaps_kept, target_kind) = (1, ImageKind::Raw);
    }
    let target = PathBuf::from("target");
    let mut content = Content(Durable::default(), false);
    match target_kind {
        ImageKind::Raw => content.0.set_len(DISK_LEN),
        _ => create_on(&mut content, &Shape::Dynamic, DISK_LEN, 0).map_err(|error| error.to_string())?,
    }
    rig.host.put_content(&target, content.0, false);
    let mut world = World { rig, random, model: Rc::default(), target, target_kind };
    // Data in every layer.
    loop {
        world.fill_closed()?;
        if !world.rig.grow(kind) {
            break;
        }
    }
    world.story(fate, after)
}

/// A disk whose blocks lie in any order is copied to an empty image, in which they lie in the order of the disk.
pub fn in_order(seed: u64) -> Result<(), String> {
    let rig = Rig::new(RigKind::Dynamic, seed);
    let target = PathBuf::from("target");
    let mut content = Content(Durable::default(), false);
    create_on(&mut content, &Shape::Dynamic, DISK_LEN, 0).map_err(|error| error.to_string())?;
    rig.host.put_content(&target, content.0, false);
    let layer = LayerSpec { kind: ImageKind::Vhd, path: target.clone() };
    let spec = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
    let (process, source) = (rig.process(), rig.spec(Access::ReadWrite));
    let running = process.clone();
    let done = process.run(async move {
        let text = |error: tapio_format::FormatError| error.to_string();
        running.core.resume(&source).await.map_err(text)?;
        let mut random = Random::new(seed);
        let zones = DISK_LEN / BLOCK;
        for _ in 0..3 * zones {
            let mut page = PageBuf::zeroed(SECTOR);
            fill(1, &mut page);
            let span = Span::new(random.below(zones) * BLOCK, SECTOR_LEN);
            let written = running.ask(Op::Write { durable: false }, span, &page).await;
            written.map_err(|error| error.to_string())?;
        }
        let job = running.core.mirror_start(&spec, MirrorOptions::default()).await.map_err(text)?;
        while matches!(job.info().state, JobState::Running) {
            sleep(&running, 1).await;
        }
        running.core.mirror_cancel().await.map_err(text)?;
        running.core.close().await.map_err(text)
    });
    process.sim.end();
    done.ok_or("the power went")??;
    let content = Content(rig.host.content(&target), false);
    let image = Image::open_on(content, &target, OpenOptions::READ).map_err(|error| error.to_string())?;
    let places: Vec<u32> = image.bat().allocated().map(|(_, sector)| sector).collect();
    if places.len() < 2 || !places.is_sorted() {
        return Err(format!("the blocks lie at {places:?}"));
    }
    Ok(())
}

impl World {
    fn target_spec(&self) -> ChainSpec {
        let layer = LayerSpec { kind: self.target_kind, path: self.target.clone() };
        ChainSpec { layers: vec![layer], access: Access::ReadWrite }
    }

    fn fill_closed(&mut self) -> Result<(), String> {
        let process = self.rig.process();
        let (running, spec) = (process.clone(), self.rig.spec(Access::ReadWrite));
        let load = start_load(&mut self.random, 3);
        let (model, seeds) = (Rc::clone(&self.model), load.1);
        let load = load.0;
        let done = process.run(async move {
            running.core.resume(&spec).await.map_err(|error| error.to_string())?;
            begin(&running, &model, &load, seeds);
            sleep(&running, 5).await;
            end(&running, &load).await?;
            running.core.close().await.map_err(|error| error.to_string())
        });
        process.sim.end();
        self.rig.host.process_killed();
        done.expect("the power stays on")
    }

    fn story(&mut self, fate: Fate, after: Option<u64>) -> Result<(), String> {
        let random = &mut self.random;
        let after = after.unwrap_or_else(|| match fate {
            Fate::PowerCut => 1 + random.below(400),
            Fate::Loss(_) => random.below(200),
            _ => random.below(60),
        });
        let options = MirrorOptions {
            copy: [CopyWhat::Allocated, CopyWhat::Everything][random.below(2) as usize],
            rate: if random.chance(1, 4) { 20 << 20 } else { 0 },
            timeout: Duration::from_millis(if fate == Fate::NearFails { 60_000 } else { 60 }),
        };
        let load = start_load(random, 1 + random.clone().below(6));
        let comes_back = random.chance(2, 3);
        let (source, target) = (self.rig.spec(Access::ReadWrite), self.target_spec());
        let process = self.rig.process();
        if fate == Fate::PowerCut {
            self.rig.host.cut_after(Some(after));
        }
        let (running, model, host) = (process.clone(), Rc::clone(&self.model), self.rig.host.clone());
        let path = self.target.clone();
        let raw = self.target_kind == ImageKind::Raw;
        let work = async move {
            let text = |error: tapio_format::FormatError| error.to_string();
            let (load, seeds) = load;
            running.core.resume(&source).await.map_err(text)?;
            begin(&running, &model, &load, seeds);
            sleep(&running, 1).await;
            if let Fate::Loss(how @ Broken::Failing) = fate {
                host.break_file(&path, after, how);
            }
            let job = match running.core.mirror_start(&target, options).await {
                Ok(job) => job,
                // It broke before the mirror had begun.
                Err(_) if matches!(fate, Fate::Loss(_)) => {
                    end(&running, &load).await?;
                    return Ok(Told::Source);
                }
                Err(error) => return Err(error.to_string()),
            };
            if let Fate::Loss(how @ Broken::Stuck) = fate {
                host.break_file(&path, after, how);
            }
            match fate {
                Fate::Kill | Fate::Cancel | Fate::Pause => sleep(&running, after).await,
                Fate::PowerCut => loop {
                    sleep(&running, 1000).await;
                },
                Fate::Loss(_) => {
                    for _ in 0..150 {
                        if running
                            .core
                            .mirror_status()
                            .is_some_and(|status| status.phase == MirrorPhase::Degraded)
                        {
                            break;
                        }
                        sleep(&running, 1).await;
                    }
                }
                Fate::Pivot => {}
                Fate::NearFails => near_fails(&running, &host, &load).await?,
                Fate::CutAtPivot => {
                    in_sync(&running).await?;
                    host.cut_after(Some(after % 40 + 1));
                }
            }
            match fate {
                Fate::Kill => return Ok(Told::Source),
                Fate::Cancel => {
                    running.core.mirror_cancel().await.map_err(text)?;
                    end(&running, &load).await?;
                    running.core.close().await.map_err(text)?;
                    return Ok(Told::Source);
                }
                Fate::Pause => {
                    // Guests wait meanwhile, so they are told to stop before.
                    load.stop.set(true);
                    running.core.pause().await.map_err(text)?;
                    if !matches!(job.info().state, JobState::Cancelled)
                        || running.core.mirror_status().is_some()
                    {
                        return Err(format!("a pause left the mirror {:?}", job.info().state));
                    }
                    return Ok(Told::Source);
                }
                Fate::Loss(how) => {
                    if running.core.mirror_status().is_none_or(|status| status.phase != MirrorPhase::Degraded)
                    {
                        // It has enough already, or is lost just now.
                        host.mend_file(&path);
                        sleep(&running, 100).await;
                    }
                    let phase = running.core.mirror_status().map(|status| status.phase);
                    if phase == Some(MirrorPhase::Degraded) && comes_back {
                        host.mend_file(&path);
                        if how == Broken::Stuck {
                            // What is stuck ends after an hour; until then there is no going on.
                            let early = running.core.mirror_resume().await;
                            end(&running, &load).await?;
                            sleep(&running, 3_700_000).await;
                            load.stop.set(false);
                            begin(&running, &model, &load, vec![after + 7, after + 8]);
                            if early.is_ok() {
                                return Err("the mirror went on with requests unanswered".into());
                            }
                        }
                        // What was asked before the loss is answered soon.
                        for _ in 0..20 {
                            if running.core.mirror_status().is_some_and(|status| status.unanswered > 0) {
                                sleep(&running, 1).await;
                            }
                        }
                        running.core.mirror_resume().await.map_err(text)?;
                    } else if phase == Some(MirrorPhase::Degraded) {
                        if running.core.mirror_pivot().await.is_ok() {
                            return Err("switched over to a side that was lost".into());
                        }
                        end(&running, &load).await?;
                        running.core.close().await.map_err(text)?;
                        return Ok(Told::Source);
                    }
                }
                Fate::NearFails => {
                    end(&running, &load).await?;
                    alike(&running, &host, Some(&path)).await?;
                    load.stop.set(false);
                    begin(&running, &model, &load, vec![after]);
                }
                Fate::Pivot | Fate::PowerCut | Fate::CutAtPivot => {}
            }
            // In sync while guests write, again and again; then switched over.
            for round in 0..if fate == Fate::CutAtPivot { 0 } else { 3 } {
                in_sync(&running).await?;
                if round == 1 {
                    end(&running, &load).await?;
                    in_sync(&running).await?;
                    alike(&running, &host, raw.then_some(path.as_path())).await?;
                    load.stop.set(false);
                    begin(&running, &model, &load, vec![after, after + 1]);
                }
                sleep(&running, 3).await;
            }
            loop {
                in_sync(&running).await?;
                // A discard may have come between.
                if let Ok(pivoted) = running.core.mirror_pivot().await {
                    if running.core.spec().as_ref() != Some(&pivoted.spec) || pivoted.spec != target {
                        return Err(format!("switched over to {:?}", pivoted.spec));
                    }
                    break;
                }
            }
            sleep(&running, 3).await;
            end(&running, &load).await?;
            running.core.close().await.map_err(text)?;
            Ok(Told::Target)
        };
        let told = process.run(work);
        process.sim.end();
        self.rig.host.mend_file(&self.target);
        let dark = self.rig.host.is_dark();
        if dark {
            self.rig.host.power_cut();
            self.rig.memory = std::sync::Arc::default();
        } else {
            self.rig.host.process_killed();
        }
        self.rig.host.cut_after(None);
        match told {
            Some(Err(why)) => Err(why),
            Some(Ok(Told::Target)) => self.verify(&self.target_spec(), false),
            Some(Ok(Told::Source)) => self.verify(&self.rig.spec(Access::ReadWrite), false),
            None if dark => {
                let newest = self.rig.notes.lock().expect("no panic").newest(&self.rig.command);
                let moved = newest == self.target && fate == Fate::CutAtPivot;
                let spec = if moved { self.target_spec() } else { self.rig.spec(Access::ReadWrite) };
                self.verify(&spec, true)
            }
            None => Err("the story came to no end".into()),
        }
    }

    /// Opens `spec`, to which the command of the disk leads, and compares every sector of the zones with the model.
    fn verify(&self, spec: &ChainSpec, after_cut: bool) -> Result<(), String> {
        let newest = self.rig.notes.lock().expect("no panic").newest(&self.rig.command);
        if newest != spec.layers[0].path {
            return Err(format!("the command leads to {} and not to {spec:?}", newest.display()));
        }
        let mut rig = self.rig.clone();
        if spec.layers[0].path == self.target {
            // It is not encrypted, whatever the first side is.
            rig.keys = Default::default();
        }
        let process = rig.process();
        let (running, spec) = (process.clone(), spec.clone());
        let found = process.run(async move {
            running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
            let mut found = Vec::new();
            for zone in ZONES {
                let page = PageBuf::zeroed(ZONE_SECTORS as usize * SECTOR);
                let span = Span::new(zone * SECTOR_LEN, ZONE_SECTORS * SECTOR_LEN);
                running.ask(Op::Read, span, &page).await.map_err(|error| format!("zone {zone}: {error}"))?;
                for (index, sector) in page[..span.len as usize].chunks_exact(SECTOR).enumerate() {
                    found.push((zone + index as u64, stamp_of(sector)?));
                }
            }
            running.core.close().await.map_err(|error| error.to_string())?;
            Ok::<_, String>(found)
        });
        process.sim.end();
        let mut model = self.model.borrow_mut();
        for (sector, stamp) in found.expect("the power stays on")? {
            if after_cut {
                model.check_after_cut(sector, stamp)?;
            } else {
                model.check_after_kill(sector, stamp)?;
            }
        }
        drop(model);
        self.rig.check(false)
    }
}

async fn sleep(process: &Process, milliseconds: u64) {
    let tasks = process.sim.tasks();
    tasks.sleep_until(tasks.turn_ns() + milliseconds * 1_000_000).await;
}

fn start_load(random: &mut Random, clients: u64) -> (Rc<Load>, Vec<u64>) {
    let load = Load {
        stop: Cell::new(false),
        may_fail: Cell::new(false),
        left: Cell::new(0),
        failure: RefCell::new(None),
    };
    (Rc::new(load), (0..clients).map(|_| random.next()).collect())
}

fn begin(process: &Process, model: &Rc<RefCell<Model>>, load: &Rc<Load>, seeds: Vec<u64>) {
    for seed in seeds {
        let (running, model, load) = (process.clone(), Rc::clone(model), Rc::clone(load));
        load.left.set(load.left.get() + 1);
        process.sim.tasks().spawn(async move {
            let mut random = Random::new(seed);
            while !load.stop.get() && load.failure.borrow().is_none() {
                if let Err(why) = request(&running, &model, &mut random, &load.may_fail).await {
                    *load.failure.borrow_mut() = Some(why);
                }
                if random.chance(1, 3) {
                    let tasks = running.sim.tasks();
                    tasks.sleep_until(tasks.turn_ns() + random.below(3_000_000)).await;
                }
            }
            load.left.set(load.left.get() - 1);
        });
    }
}

async fn end(process: &Process, load: &Load) -> Result<(), String> {
    load.stop.set(true);
    while load.left.get() > 0 {
        sleep(process, 1).await;
    }
    load.failure.borrow_mut().take().map_or(Ok(()), Err)
}

/// The first side fails for a while and is whole again; the mirror goes on and is in sync. There are no writes then.
async fn near_fails(process: &Process, host: &SimHost, load: &Load) -> Result<(), String> {
    in_sync(process).await?;
    load.may_fail.set(true);
    host.set_faults(Faults { read_eio: 1_500, slow: 800, ..Faults::default() });
    sleep(process, 60_000).await;
    host.set_faults(Faults::default());
    end(process, load).await?;
    load.may_fail.set(false);
    // A copy that could not read the first side gives the mirror up.
    while process.core.mirror_status().is_some_and(|status| status.phase == MirrorPhase::Degraded) {
        let unanswered = process.core.mirror_status().is_some_and(|status| status.unanswered > 0);
        if unanswered {
            sleep(process, 10).await;
        } else {
            process.core.mirror_resume().await.map_err(|error| error.to_string())?;
        }
    }
    in_sync(process).await
}

/// One request; none may fail unless its storage does.
async fn request(
    process: &Process,
    model: &RefCell<Model>,
    random: &mut Random,
    may_fail: &Cell<bool>,
) -> Result<(), String> {
    let sectors = place(random);
    let span = Span::new(sectors.start * SECTOR_LEN, (sectors.end - sectors.start) * SECTOR_LEN);
    let mut page = PageBuf::zeroed(span.len as usize);
    // The gate is closed while a mirror begins and ends.
    while !process.has_room() {
        sleep(process, 1).await;
    }
    let said = |result: Result<(), DiskError>| match result {
        Ok(()) => Ok(true),
        Err(_) if may_fail.get() => Ok(false),
        Err(error) => Err(format!("a guest was told '{error}' at {span:?}")),
    };
    let durable = random.chance(1, 6);
    // Where the first side fails, it is discards that have to find out what they left.
    let what = if may_fail.get() && random.chance(1, 2) { 12 } else { random.below(20) };
    match what {
        0..=10 => {
            let stamp = model.borrow_mut().fresh_stamp();
            page.chunks_exact_mut(SECTOR).for_each(|sector| fill(stamp, sector));
            let issued = model.borrow_mut().begin(sectors.clone(), stamp, false);
            let ok = said(process.ask(Op::Write { durable }, span, &page).await)?;
            model.borrow_mut().end(sectors, issued, ok, durable);
        }
        11 => {
            let issued = model.borrow_mut().begin(sectors.clone(), 0, false);
            let op = Op::WriteZeroes { unmap: random.chance(1, 2), durable };
            let ok = said(process.ask(op, span, &page).await)?;
            model.borrow_mut().end(sectors, issued, ok, durable);
        }
        12 => {
            let issued = model.borrow_mut().begin(sectors.clone(), 0, true);
            let ok = said(process.ask(Op::Discard, span, &page).await)?;
            model.borrow_mut().end(sectors, issued, ok, false);
        }
        13 => {
            let began = model.borrow_mut().tick();
            if said(process.ask(Op::Flush, Span::default(), &page).await)? {
                model.borrow_mut().flushed(began);
            }
        }
        _ => {
            let began = model.borrow_mut().tick();
            if !said(process.ask(Op::Read, span, &page).await)? {
                return Ok(());
            }
            let model = model.borrow();
            for (index, sector) in page[..span.len as usize].chunks_exact(SECTOR).enumerate() {
                model.check_read(sectors.start + index as u64, stamp_of(sector)?, began)?;
            }
        }
    }
    Ok(())
}

async fn in_sync(process: &Process) -> Result<(), String> {
    for _ in 0..60_000 {
        match process.core.mirror_status().map(|status| status.phase) {
            Some(MirrorPhase::InSync) => return Ok(()),
            Some(MirrorPhase::Copying) => sleep(process, 1).await,
            other => return Err(format!("the mirror is {other:?} and was to be in sync")),
        }
    }
    Err(format!("not in sync after a minute: {:?}", process.core.mirror_status()))
}

/// Both sides are the same, every byte. There are no writes.
async fn alike(process: &Process, host: &tapio_ring::sim::SimHost, raw: Option<&Path>) -> Result<(), String> {
    let Some(path) = raw else { return Ok(()) };
    let content = host.content(path);
    const PIECE: u64 = 1 << 20;
    for at in (0..DISK_LEN).step_by(PIECE as usize) {
        let len = PIECE.min(DISK_LEN - at);
        let page = PageBuf::zeroed(PIECE as usize);
        process.ask(Op::Read, Span::new(at, len), &page).await.map_err(|error| error.to_string())?;
        let mut other = vec![0; len as usize];
        content.read(at, &mut other);
        if let Some(differs) = page.iter().zip(&other).position(|(one, two)| one != two) {
            return Err(format!("in sync, and byte {} differs", at + differs as u64));
        }
    }
    Ok(())
}

/// How many operations on the second side, or changes of files, the short story takes.
pub const STEPS: u64 = 40;
