//! All short histories of a small disk: every sequence of operations, on every kind of chain, with every end.

use tapio_block::Op;
use tapio_ring::PageBuf;
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::model::{Stamp, fill, stamp_of};
use crate::rig::{Process, Rig, RigKind};

/// Operations in a history.
const LEN: u32 = 3;
/// The sectors that are used: two in one block, one in another.
const SECTORS: [u64; 3] = [0, 9, 4096];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Write(usize),
    /// All three places and what lies between the first two.
    WriteAcross,
    Zero(usize),
    /// Both places of the first block.
    ZeroBlock,
    Discard(usize),
    /// All blocks.
    DiscardAll,
    Flush,
    /// The images are closed and opened again.
    Reopen,
}

const STEPS: [Step; 9] = [
    Step::Write(0),
    Step::Write(2),
    Step::WriteAcross,
    Step::Zero(0),
    Step::ZeroBlock,
    Step::Discard(1),
    Step::DiscardAll,
    Step::Flush,
    Step::Reopen,
];

pub fn run() {
    for kind in [RigKind::Dynamic, RigKind::Device, RigKind::Two, RigKind::Encrypted] {
        for number in 0..(STEPS.len() as u64).pow(LEN) {
            let history: Vec<Step> = digits(number).collect();
            for kill in [false, true] {
                if let Err(why) = one(kind, &history, kill) {
                    panic!("{kind:?} {history:?}, killed at the end: {kill}: {why}");
                }
            }
        }
    }
}

fn digits(number: u64) -> impl Iterator<Item = Step> {
    let base = STEPS.len() as u64;
    (0..LEN).map(move |place| STEPS[(number / base.pow(place) % base) as usize])
}

/// What each of the sectors must hold; `None` where a discard left it open.
type Expected = [Option<Stamp>; 3];

fn one(kind: RigKind, history: &[Step], kill: bool) -> Result<(), String> {
    let mut rig = Rig::new(kind, 1);
    rig.grow(kind);
    let process = rig.process();
    let (running, spec, steps) = (process.clone(), rig.spec(Access::ReadWrite), history.to_vec());
    let done = process.run(async move {
        let mut expected: Expected = [Some(0); 3];
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        for (index, step) in steps.iter().enumerate() {
            step_once(&running, *step, index as Stamp + 1, &mut expected).await?;
            if *step == Step::Reopen {
                running.core.pause().await.map_err(|error| error.to_string())?;
                running.core.resume(&spec).await.map_err(|error| error.to_string())?;
            }
            verify(&running, &expected).await.map_err(|why| format!("after step {index}: {why}"))?;
        }
        if !kill {
            running.core.close().await.map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(expected)
    });
    process.sim.end();
    let expected = done.expect("the power stays on")?;
    rig.host.process_killed();
    rig.check(kill)?;
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let again = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| format!("cannot be opened again: {error}"))?;
        verify(&running, &expected).await?;
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    again.expect("the power stays on")?;
    rig.check(false)
}

async fn step_once(
    process: &Process,
    step: Step,
    stamp: Stamp,
    expected: &mut Expected,
) -> Result<(), String> {
    let span_of = |sector: u64, count: u64| Span::new(sector * SECTOR_LEN, count * SECTOR_LEN);
    let write = async |span: Span| {
        let mut page = PageBuf::zeroed(span.len as usize);
        page.chunks_exact_mut(SECTOR_LEN as usize).for_each(|sector| fill(stamp, sector));
        process.ask(Op::Write { durable: false }, span, &page).await.map_err(|error| error.to_string())
    };
    let order = async |op: Op, span: Span| {
        process.ask(op, span, &PageBuf::zeroed(1)).await.map_err(|error| error.to_string())
    };
    match step {
        Step::Write(index) => {
            write(span_of(SECTORS[index], 1)).await?;
            expected[index] = Some(stamp);
        }
        Step::WriteAcross => {
            write(span_of(0, SECTORS[2] + 1)).await?;
            *expected = [Some(stamp); 3];
        }
        Step::Zero(index) => {
            order(Op::WriteZeroes { unmap: false, durable: false }, span_of(SECTORS[index], 1)).await?;
            expected[index] = Some(0);
        }
        Step::ZeroBlock => {
            order(Op::WriteZeroes { unmap: true, durable: false }, span_of(0, 4096)).await?;
            expected[..2].fill(Some(0));
        }
        Step::DiscardAll => {
            order(Op::Discard, span_of(0, crate::rig::DISK_LEN / SECTOR_LEN)).await?;
            let open = |before: &Option<Stamp>| before.filter(|stamp| *stamp == 0);
            *expected = expected.each_ref().map(open);
        }
        Step::Discard(index) => {
            order(Op::Discard, span_of(SECTORS[index], 1)).await?;
            if expected[index] != Some(0) {
                expected[index] = None;
            }
        }
        Step::Flush => order(Op::Flush, Span::default()).await?,
        Step::Reopen => {}
    }
    Ok(())
}

async fn verify(process: &Process, expected: &Expected) -> Result<(), String> {
    for (sector, wanted) in SECTORS.iter().zip(expected) {
        let page = PageBuf::zeroed(SECTOR_LEN as usize);
        let span = Span::new(sector * SECTOR_LEN, SECTOR_LEN);
        process.ask(Op::Read, span, &page).await.map_err(|error| error.to_string())?;
        let found = stamp_of(&page[..SECTOR_LEN as usize])?;
        if wanted.is_some_and(|wanted| wanted != found) {
            return Err(format!("sector {sector} holds {found}, not {wanted:?}"));
        }
    }
    Ok(())
}
