//! What a disk has beside its images: the log of changed blocks, and the leaf that takes over when there is no space.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tapio_block::{Op, Signal, StandbyOptions, TapOptions};
use tapio_format::FormatError;
use tapio_format::cbt::{BLOCK_LEN, Log};
use tapio_format::vhd::offline::{ParentFacts, Shape, create_on};
use tapio_format::vhd::{Footer, KeyHash, time};
use tapio_ring::PageBuf;
use tapio_ring::sim::{Broken, Durable, Random};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, SECTOR_LEN, Span};

use crate::model::{Model, fill, stamp_of};
use crate::rig::{Content, DISK_LEN, Process, Rig, RigKind, place};
use crate::story::End;

const LOG: &str = "log";

fn put_log(rig: &Rig, consistent: i32) {
    let mut log = Log::create_on(Vec::new(), DISK_LEN).expect("made");
    let header = tapio_format::cbt::LogHeader { consistent, ..*log.header() };
    log.set_header(header).expect("memory");
    let mut bytes = header.encode().to_vec();
    bytes.resize(tapio_format::cbt::log_len(DISK_LEN) as usize, 0);
    rig.host.put(Path::new(LOG), &bytes);
}

/// What the log says: whether it is to be trusted, and the blocks.
fn read_log(rig: &Rig) -> (i32, Vec<bool>) {
    let log = Log::open_on(Content(rig.host.content(Path::new(LOG)), false)).expect("a log");
    let mut blocks = Vec::new();
    let read = log.read_bitmap(|piece| {
        blocks.extend(piece.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)));
        Ok::<_, FormatError>(())
    });
    read.expect("readable");
    (log.header().consistent, blocks)
}

async fn change(process: &Process, random: &mut Random, stamp: u64) -> Result<Span, String> {
    let sectors = place(random);
    let span = Span::new(sectors.start * SECTOR_LEN, (sectors.end - sectors.start) * SECTOR_LEN);
    let mut page = PageBuf::zeroed(span.len as usize);
    page.chunks_exact_mut(SECTOR_LEN as usize).for_each(|sector| fill(stamp, sector));
    let op = match random.below(4) {
        0 => Op::WriteZeroes { unmap: true, durable: false },
        1 => Op::Discard,
        _ => Op::Write { durable: random.chance(1, 2) },
    };
    process.ask(op, span, &page).await.map_err(|error| error.to_string())?;
    Ok(span)
}

/// Sessions of changes on one log, each ended by a close or a kill: after a close the log has exactly what changed in
/// all sessions since it was last trusted, after a kill it is not trusted.
pub fn logged(seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0xcb7);
    let kind = RigKind::ALL[random.below(RigKind::ALL.len() as u64) as usize];
    let mut rig = Rig::new(kind, seed);
    rig.grow(kind);
    put_log(&rig, 1);
    let mut expected = vec![false; DISK_LEN.div_ceil(BLOCK_LEN) as usize];
    for session in 0..3u64 {
        let kill = session == 2 && random.chance(1, 2);
        let cut = random.chance(1, 2);
        let process = rig.process();
        let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
        let taps = TapOptions { log: Some(LOG.into()), ..TapOptions::default() };
        let mut chance = random.clone();
        random.next();
        let count = 1 + random.below(12);
        let done = process.run(async move {
            let text = |error: FormatError| error.to_string();
            running.core.resume_with(&spec, &taps).await.map_err(text)?;
            let mut changed = Vec::new();
            for number in 0..count {
                changed.push(change(&running, &mut chance, session * 100 + number + 1).await?);
            }
            if !kill {
                running.core.close().await.map_err(text)?;
            }
            Ok::<_, String>(changed)
        });
        process.sim.end();
        for span in done.expect("the power stays on")? {
            for block in span.start / BLOCK_LEN..=(span.start + span.len - 1) / BLOCK_LEN {
                expected[block as usize] = true;
            }
        }
        if cut {
            rig.host.power_cut();
            rig.memory = Arc::default();
        } else {
            rig.host.process_killed();
        }
        let (consistent, blocks) = read_log(&rig);
        match (kill, consistent) {
            (true, 0) => return Ok(()),
            (false, 1) if blocks == expected => {}
            (_, consistent) => {
                return Err(format!(
                    "session {session}, killed: {kill}: consistent {consistent}, {blocks:?} for {expected:?}"
                ));
            }
        }
    }
    Ok(())
}

/// What is refused, and that a log which is not trusted does not become trusted by being closed.
pub fn refused() -> Result<(), String> {
    let rig = Rig::new(RigKind::Raw, 1);
    rig.host.put(Path::new("short"), &[0; 60]);
    let other = Log::create_on(Vec::new(), DISK_LEN / 2).map_err(|error| error.to_string())?;
    let mut bytes = other.header().encode().to_vec();
    bytes.resize(4096, 0);
    rig.host.put(Path::new("other"), &bytes);
    put_log(&rig, 0);
    for (path, access, wanted) in [
        ("missing", Access::ReadWrite, Some("cannot open the log")),
        ("short", Access::ReadWrite, Some("needs 64")),
        ("other", Access::ReadWrite, Some("cbt-util set -s")),
        (LOG, Access::ReadOnly, Some("not written")),
        (LOG, Access::ReadWrite, None),
    ] {
        let process = rig.process();
        let (running, spec) = (process.clone(), rig.spec(access));
        let taps = TapOptions { log: Some(path.into()), ..TapOptions::default() };
        let opened = process.run(async move {
            running.core.resume_with(&spec, &taps).await?;
            running.core.close().await
        });
        process.sim.end();
        let told = opened.expect("the power stays on").err().map(|error| error.to_string());
        let fits = match (&told, wanted) {
            (Some(told), Some(wanted)) => told.contains(wanted),
            (None, None) => true,
            _ => false,
        };
        if !fits {
            return Err(format!("{path}: {told:?}, not {wanted:?}"));
        }
    }
    if read_log(&rig).0 == 0 { Ok(()) } else { Err("a log became trusted by itself".into()) }
}

/// An empty standby, made from the leaf or from the leaf's parent.
fn put_standby(rig: &Rig, is_child: bool) -> LayerSpec {
    let parent = &rig.images[usize::from(!is_child)].1;
    let content = rig.host.content(parent);
    let mut bytes = [0; 512];
    content.read(content.len() - 512, &mut bytes);
    let facts = ParentFacts {
        uuid: Footer::decode(&bytes).expect("a closed image ends in its footer").0.uuid,
        timestamp: time::from_unix(1_700_000_000),
        relative_path: format!("./{}", parent.display()),
        name: parent.display().to_string(),
        key_hash: KeyHash::default(),
    };
    let path = PathBuf::from("second");
    let mut medium = Content(Durable::default(), false);
    create_on(&mut medium, &Shape::Differencing(facts), DISK_LEN, 0).expect("an image can be made");
    rig.host.put_content(&path, medium.0, false);
    LayerSpec { kind: ImageKind::Vhd, path }
}

/// The disk as the command opens it that names `leaf` and `standby`: with both if the note beside the leaf says so.
fn with_standby(rig: &Rig, standby: &LayerSpec, used: &Arc<AtomicU32>) -> (ChainSpec, TapOptions) {
    let mut spec = rig.spec(Access::ReadWrite);
    let took_over =
        rig.notes.lock().expect("no panic").continued.get(&spec.layers[0].path) == Some(&standby.path);
    if took_over {
        spec.layers.insert(0, standby.clone());
    }
    let used = Arc::clone(used);
    let on_use = Signal(Arc::new(move || {
        used.fetch_add(1, Ordering::SeqCst);
    }));
    let image = standby.clone();
    (spec, TapOptions { standby: Some(StandbyOptions { image, took_over, on_use }), ..TapOptions::default() })
}

/// A leaf whose storage is full: writes go to the standby, and everything is read as it was written, at once, after a
/// pause, and by the process that the same command starts when this one was killed or the power went.
pub fn standby(seed: u64, cut: Option<u64>) -> Result<u64, String> {
    let mut random = Random::new(seed ^ 0x57a);
    let mut rig = Rig::new(RigKind::Two, seed);
    rig.grow(RigKind::Two);
    let leaf = rig.images[0].1.clone();
    let second = put_standby(&rig, random.chance(1, 2));
    let used: Arc<AtomicU32> = Arc::default();
    let model: Rc<RefCell<Model>> = Rc::default();
    let end = [End::Close, End::PowerCut, End::Kill][random.below(3) as usize];
    let full_after = random.below(30);
    let mut changes = 0;
    for life in 0..2 {
        let process = rig.process();
        let (running, host, writing) = (process.clone(), rig.host.clone(), Rc::clone(&model));
        let (spec, taps) = with_standby(&rig, &second, &used);
        let (there, standby, signal) = (rig.clone(), second.clone(), Arc::clone(&used));
        let seeds: Vec<u64> = (0..4).map(|_| random.next()).collect();
        let full = leaf.clone();
        let before = rig.host.changed();
        rig.host.cut_after(cut.filter(|_| life == 0));
        let done = process.run(async move {
            let text = |error: FormatError| error.to_string();
            running.core.resume_with(&spec, &taps).await.map_err(text)?;
            host.break_file(&full, if life == 0 { full_after } else { 0 }, Broken::Full);
            all_write(&running, &writing, &seeds).await?;
            read_back(&running, &writing).await?;
            let before = running.core.redirected_sectors();
            if (before > 0) != (signal.load(Ordering::SeqCst) > 0) {
                return Err(format!("not told of {before} redirected sectors"));
            }
            if life == 1 {
                running.core.pause().await.map_err(text)?;
                let (spec, taps) = with_standby(&there, &standby, &signal);
                running.core.resume_with(&spec, &taps).await.map_err(text)?;
                read_back(&running, &writing).await?;
            }
            if end == End::Close {
                running.core.close().await.map_err(text)?;
            }
            Ok::<_, String>(())
        });
        process.sim.end();
        if let Some(ended) = done {
            ended.map_err(|why| format!("life {life}, {why}"))?;
        }
        let after_cut = end == End::PowerCut || (end == End::Close && rig.host.is_dark());
        if after_cut {
            rig.host.power_cut();
            rig.memory = Arc::default();
        } else {
            rig.host.process_killed();
        }
        rig.host.cut_after(None);
        rig.host.mend_file(&leaf);
        if life == 0 {
            changes = rig.host.changed() - before;
        }
        verify(&rig, &second, &used, &model, after_cut)
            .map_err(|why| format!("life {life}, {end:?}, opened again, {why}"))?;
    }
    Ok(changes)
}

/// Opens the disk as its command does and compares what was written.
fn verify(
    rig: &Rig,
    second: &LayerSpec,
    used: &Arc<AtomicU32>,
    model: &RefCell<Model>,
    after_cut: bool,
) -> Result<(), String> {
    let process = rig.process();
    let running = process.clone();
    let (spec, taps) = with_standby(rig, second, used);
    let found = process.run(async move {
        running.core.resume_with(&spec, &taps).await.map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for sector in sectors() {
            found.push((sector, read_sector(&running, sector).await?));
        }
        running.core.close().await.map_err(|error| error.to_string())?;
        Ok::<_, String>(found)
    });
    process.sim.end();
    let mut model = model.borrow_mut();
    for (sector, stamp) in found.expect("the power stays on")? {
        match after_cut {
            true => model.check_after_cut(sector, stamp)?,
            false => model.check_after_kill(sector, stamp)?,
        }
    }
    rig.check(false)
}

/// What the clients write: a sector here and there, in all blocks.
fn sectors() -> impl ExactSizeIterator<Item = u64> {
    (0..DISK_LEN as usize / SECTOR_LEN as usize).step_by(331).map(|sector| sector as u64)
}

/// Four clients write sectors of their own, and flush now and then.
async fn all_write(process: &Process, model: &Rc<RefCell<Model>>, seeds: &[u64]) -> Result<(), String> {
    let tasks = tapio_ring::Io::tasks(&process.sim).clone();
    let (left, failed) = (Rc::new(std::cell::Cell::new(seeds.len())), Rc::new(RefCell::new(None)));
    for (index, seed) in seeds.iter().enumerate() {
        let (process, model) = (process.clone(), Rc::clone(model));
        let (left, failed, mut random) = (Rc::clone(&left), Rc::clone(&failed), Random::new(*seed));
        tasks.spawn(async move {
            let count = sectors().len() as u64 / 4;
            for _ in 0..12 {
                let index = random.below(count) as usize * 4 + index;
                let sector = sectors().nth(index).expect("there are more");
                let stamp = model.borrow_mut().fresh_stamp();
                let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
                fill(stamp, &mut page[..SECTOR_LEN as usize]);
                let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
                let durable = random.chance(1, 4);
                let issued = model.borrow_mut().begin(sector..sector + 1, stamp, false);
                let done = process.ask(Op::Write { durable }, span, &page).await;
                model.borrow_mut().end(sector..sector + 1, issued, done.is_ok(), durable);
                if let Err(error) = done {
                    *failed.borrow_mut() = Some(format!("there is somewhere to write, and {error}"));
                }
            }
            left.set(left.get() - 1);
        });
    }
    while left.get() > 0 {
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
    }
    failed.borrow_mut().take().map_or(Ok(()), Err)
}

async fn read_sector(process: &Process, sector: u64) -> Result<u64, String> {
    let page = PageBuf::zeroed(SECTOR_LEN as usize);
    let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
    process.ask(Op::Read, span, &page).await.map_err(|error| error.to_string())?;
    stamp_of(&page[..SECTOR_LEN as usize])
}

async fn read_back(process: &Process, model: &RefCell<Model>) -> Result<(), String> {
    for sector in sectors() {
        let began = model.borrow_mut().tick();
        let found = read_sector(process, sector).await?;
        model.borrow().check_read(sector, found, began)?;
    }
    Ok(())
}

/// The same with the power going, or the process dying, at each change of a file.
pub fn standby_at_every_change(seed: u64) -> Result<(), String> {
    let changes = standby(seed, None)?;
    for cut in 1..=changes {
        standby(seed, Some(cut)).map_err(|why| format!("at change {cut} of {changes}: {why}"))?;
    }
    Ok(())
}
