//! A storage that answers late or never, and what its requests become.

use std::rc::Rc;

use tapio_block::{DiskError, JobState, Op};
use tapio_ring::sim::Faults;
use tapio_ring::{Io, PageBuf};
use tapio_types::{Access, SECTOR_LEN, Span};

use crate::model::{fill, stamp_of};
use crate::rig::{Process, Rig, RigKind};

const SECOND_NS: u64 = 1_000_000_000;
const TIMED_OUT: DiskError = DiskError::Io(libc::ETIMEDOUT);
const SECTOR: Span = Span::new(0, SECTOR_LEN);
const OTHER: Span = Span::new(64 * SECTOR_LEN, SECTOR_LEN);

fn page(stamp: u64) -> Rc<PageBuf> {
    let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
    fill(stamp, &mut page[..SECTOR_LEN as usize]);
    Rc::new(page)
}

async fn write(process: &Process, span: Span, stamp: u64) -> Result<(), DiskError> {
    process.ask_or_give_up(Op::Write { durable: false }, span, page(stamp)).await
}

async fn read(process: &Process, span: Span) -> Result<u64, String> {
    let page = page(0);
    process.ask_or_give_up(Op::Read, span, Rc::clone(&page)).await.map_err(|error| error.to_string())?;
    stamp_of(&page[..SECTOR_LEN as usize])
}

fn expect(what: &str, found: impl PartialEq<bool>) -> Result<(), String> {
    if found == true { Ok(()) } else { Err(what.to_string()) }
}

/// Opens a chain, writes both sectors once so that later writes are one operation each, and runs `story`.
fn on<F: Future<Output = Result<(), String>>>(
    kind: RigKind,
    story: impl FnOnce(Process) -> F + 'static,
) -> Result<(), String> {
    on_rig(&Rig::new(kind, 5), story)
}

fn on_rig<F: Future<Output = Result<(), String>>>(
    rig: &Rig,
    story: impl FnOnce(Process) -> F + 'static,
) -> Result<(), String> {
    let process = rig.process();
    let (running, spec) = (process.clone(), rig.spec(Access::ReadWrite));
    let told = process.run(async move {
        running.core.resume(&spec).await.map_err(|error| error.to_string())?;
        for span in [SECTOR, OTHER] {
            let durable = Op::Write { durable: true };
            running.ask_or_give_up(durable, span, page(1)).await.map_err(|error| error.to_string())?;
        }
        story(running.clone()).await?;
        running.core.close().await.map_err(|error| error.to_string())
    });
    process.sim.end();
    told.expect("the power stays on")?;
    rig.check(false)
}

/// The kernel does not let go: the client is told, whatever meets the write waits for it, everything else goes on.
pub fn told(kind: RigKind) -> Result<(), String> {
    on(kind, |process| async move {
        let (tasks, host) = (process.sim.tasks().clone(), process.sim.host().clone());
        host.set_faults(Faults { stuck: 10_000, ..Faults::default() });
        let (began, waiting) = (tasks.turn_ns(), process.clone());
        let late = Rc::new(std::cell::Cell::new(None));
        let end = Rc::clone(&late);
        tasks.spawn(async move {
            let result = write(&waiting, SECTOR, 2).await;
            end.set(Some((result, waiting.sim.tasks().turn_ns())));
        });
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        host.set_faults(Faults::default());
        tasks.sleep_until(began + 110 * SECOND_NS).await;
        expect("it was answered before its time", late.get().is_none())?;
        tasks.sleep_until(began + 125 * SECOND_NS).await;
        let (result, when) = late.get().ok_or("it was not answered")?;
        let seconds = (when - began) / SECOND_NS;
        expect(
            &format!("it ended with {result:?} after {seconds} s"),
            result == Err(TIMED_OUT) && seconds == 121,
        )?;
        expect("it is not counted", process.core.stuck() == 1)?;
        // Elsewhere nothing has happened.
        write(&process, OTHER, 3).await.map_err(|error| error.to_string())?;
        expect("the other sector", read(&process, OTHER).await? == 3)?;
        // Here the late write would come on top of a newer one: that waits, and is late itself.
        let behind = write(&process, SECTOR, 4).await;
        expect(&format!("behind it: {behind:?}"), behind == Err(TIMED_OUT))?;
        tasks.sleep_until(began + 4_000 * SECOND_NS).await;
        expect("all have ended", process.core.stuck() == 0)?;
        expect("the first came, the second never began", read(&process, SECTOR).await? == 2)?;
        write(&process, SECTOR, 5).await.map_err(|error| error.to_string())?;
        expect("the sector", read(&process, SECTOR).await? == 5)
    })
}

/// The kernel lets go: the request fails at its time.
pub fn cancelled(kind: RigKind) -> Result<(), String> {
    on(kind, |process| async move {
        let (tasks, host) = (process.sim.tasks().clone(), process.sim.host().clone());
        host.set_faults(Faults { stuck: 10_000, cancels: 10_000, ..Faults::default() });
        let began = tasks.turn_ns();
        let result = write(&process, SECTOR, 2).await;
        let seconds = (tasks.turn_ns() - began) / SECOND_NS;
        expect(
            &format!("it ended with {result:?} after {seconds} s"),
            result == Err(TIMED_OUT) && seconds == 120,
        )?;
        host.set_faults(Faults::default());
        expect("nothing is stuck", process.core.stuck() == 0)?;
        expect("nothing of it happened", read(&process, SECTOR).await? == 1)?;
        write(&process, SECTOR, 3).await.map_err(|error| error.to_string())?;
        expect("the sector", read(&process, SECTOR).await? == 3)
    })
}

/// A change that had to wait for a request in vain says for which, and that is all that happened.
pub fn named() -> Result<(), String> {
    let mut rig = Rig::new(RigKind::Two, 5);
    rig.grow(RigKind::Two);
    on_rig(&rig, |process| async move {
        let (tasks, host) = (process.sim.tasks().clone(), process.sim.host().clone());
        host.set_faults(Faults { stuck: 10_000, ..Faults::default() });
        let waiting = process.clone();
        tasks.spawn(async move {
            let _ = write(&waiting, OTHER, 2).await;
        });
        tasks.sleep_until(tasks.turn_ns() + 1_000_000).await;
        host.set_faults(Faults::default());
        let leaf = process.core.spec().ok_or("it runs")?.layers[0].path.clone();
        let job = process.core.commit(&leaf, 0).map_err(|error| error.to_string())?;
        while !job.info().state.has_ended() {
            tasks.sleep_until(tasks.turn_ns() + SECOND_NS).await;
        }
        let JobState::Failed(error) = job.info().state else {
            return Err(format!("the commit is {}", job.info().state));
        };
        let (said, wanted) =
            (error.to_string(), "1 request did not end within 2000 ms (the longest, a write of 512");
        expect(
            &format!("it said '{said}'"),
            said.contains(wanted) && said.contains(" bytes at 32768, has taken 2"),
        )?;
        tasks.sleep_until(tasks.turn_ns() + 4_000 * SECOND_NS).await;
        expect("the leaf is the leaf", process.core.spec().is_some_and(|spec| spec.layers[0].path == leaf))?;
        expect("the other sector", read(&process, OTHER).await? == 2)
    })
}
