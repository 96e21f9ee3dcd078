//! What a disk has beside its images: the log of changed blocks, and the leaf that takes over when there is no space.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tapio_block::{Beside, Op, Signal, StandbyOptions};
use tapio_format::FormatError;
use tapio_format::cbt::{BLOCK_LEN, Log};
use tapio_format::vhd::offline::{ParentFacts, Shape, create_on};
use tapio_format::vhd::{Footer, KeyHash, time};
use tapio_ring::PageBuf;
use tapio_ring::sim::{Broken, Durable, Random};
use tapio_types::{Access, ImageKind, LayerSpec, SECTOR_LEN, Span};

use crate::model::{fill, stamp_of};
use crate::rig::{Content, DISK_LEN, Kind, Process, Rig, place};

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
    let kind = Kind::ALL[random.below(Kind::ALL.len() as u64) as usize];
    let mut rig = Rig::new(kind, seed);
    rig.grow(kind);
    put_log(&rig, 1);
    let mut expected = vec![false; DISK_LEN.div_ceil(BLOCK_LEN) as usize];
    for session in 0..3u64 {
        let kill = session == 2 && random.chance(1, 2);
        let cut = random.chance(1, 2);
        let process = rig.process();
        let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
        let beside = Beside { log: Some(LOG.into()), ..Beside::default() };
        let mut chance = random.clone();
        random.next();
        let count = 1 + random.below(12);
        let done = process.run(async move {
            let text = |error: FormatError| error.to_string();
            running.core.resume_with(&spec, &beside).await.map_err(text)?;
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
    let rig = Rig::new(Kind::Raw, 1);
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
        let beside = Beside { log: Some(path.into()), ..Beside::default() };
        let opened = process.run(async move {
            running.core.resume_with(&spec, &beside).await?;
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

/// A leaf whose storage is full: writes go to the standby, and everything is read as it was written.
pub fn standby(seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0x57a);
    let mut rig = Rig::new(Kind::Two, seed);
    rig.grow(Kind::Two);
    let (leaf, content) = (rig.images[0].1.clone(), rig.host.content(&rig.images[0].1));
    let mut bytes = [0; 512];
    content.read(content.len() - 512, &mut bytes);
    let facts = ParentFacts {
        uuid: Footer::decode(&bytes).map_err(|error| error.to_string())?.0.uuid,
        timestamp: time::from_unix(1_700_000_000),
        relative_path: format!("./{}", leaf.display()),
        name: leaf.display().to_string(),
        key_hash: KeyHash::default(),
    };
    let second = PathBuf::from("second");
    let mut medium = Content(Durable::default(), false);
    create_on(&mut medium, &Shape::Differencing(facts), DISK_LEN, 0).map_err(|error| error.to_string())?;
    rig.host.put_content(&second, medium.0, false);
    let used = Arc::new(AtomicU32::new(0));
    let signal = Arc::clone(&used);
    let beside = Beside {
        standby: Some(StandbyOptions {
            image: LayerSpec { kind: ImageKind::Vhd, path: second.clone() },
            on_use: Signal(Arc::new(move || {
                signal.fetch_add(1, Ordering::SeqCst);
            })),
        }),
        ..Beside::default()
    };
    let process = rig.process();
    let (running, spec, host) = (process.clone(), rig.spec(Access::ReadWrite), rig.host.clone());
    let full_after = random.below(30);
    let seeds: Vec<u64> = (0..4).map(|_| random.next()).collect();
    let kill = random.chance(1, 3);
    let done = process.run(async move {
        let text = |error: FormatError| error.to_string();
        running.core.resume_with(&spec, &beside).await.map_err(text)?;
        host.break_file(&leaf, full_after, Broken::Full);
        let left = Rc::new(std::cell::Cell::new(seeds.len()));
        let written: Rc<std::cell::RefCell<Vec<(u64, u64)>>> = Rc::default();
        for (index, seed) in seeds.into_iter().enumerate() {
            let (running, left, written) = (running.clone(), Rc::clone(&left), Rc::clone(&written));
            running.sim.host();
            let tasks = tapio_ring::Io::tasks(&running.sim).clone();
            tasks.spawn(async move {
                let mut random = Random::new(seed);
                for number in 0..20u64 {
                    // Each client has sectors of its own, so that every write is the last of its sector or not.
                    let sector = random.below(DISK_LEN / SECTOR_LEN / 4) * 4 + index as u64;
                    let stamp = 1 + number * 10 + index as u64;
                    let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
                    fill(stamp, &mut page[..SECTOR_LEN as usize]);
                    let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
                    let done = running.ask(Op::Write { durable: random.chance(1, 4) }, span, &page).await;
                    done.expect("there is somewhere to write");
                    written.borrow_mut().retain(|(other, _)| *other != sector);
                    written.borrow_mut().push((sector, stamp));
                }
                left.set(left.get() - 1);
            });
        }
        while left.get() > 0 {
            let tasks = tapio_ring::Io::tasks(&running.sim);
            tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        }
        let written = written.borrow().clone();
        read_back(&running, &written).await?;
        let redirected = running.core.redirected_sectors();
        if !kill {
            running.core.close().await.map_err(text)?;
        }
        Ok::<_, String>((redirected, written))
    });
    process.sim.end();
    let (redirected, written) = done.expect("the power stays on")?;
    rig.host.process_killed();
    rig.host.mend_file(&rig.images[0].1);
    let was_used = used.load(Ordering::SeqCst);
    if was_used != u32::from(redirected > 0) {
        return Err(format!("told {was_used} times of {redirected} redirected sectors"));
    }
    if redirected > 0 {
        rig.images.insert(0, (ImageKind::Vhd, second, false));
    }
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let found = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        read_back(&running, &written).await?;
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    found.expect("the power stays on").map_err(|why| format!("opened again, {why}"))?;
    rig.check(false)
}

async fn read_back(process: &Process, written: &[(u64, u64)]) -> Result<(), String> {
    for (sector, stamp) in written {
        let page = PageBuf::zeroed(SECTOR_LEN as usize);
        let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
        process.ask(Op::Read, span, &page).await.map_err(|error| error.to_string())?;
        let found = stamp_of(&page[..SECTOR_LEN as usize])?;
        if found != *stamp {
            return Err(format!("sector {sector} holds {found}, not {stamp}"));
        }
    }
    Ok(())
}
