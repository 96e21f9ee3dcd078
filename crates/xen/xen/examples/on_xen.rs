//! Tries the hypervisor's devices where there is one: in a dom0, as root, without any guest.
//!
//! The domain grants pages to itself, maps and copies them, and sends itself events. Prints a line `RESULT name=ok` for
//! each part and ends with 1 at the first that fails; ends with 2 where there is no Xen.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tapio_xen::domain::{PAGE_LEN, grant_status};
use tapio_xen::sys::{EventDevice, GrantDevice, SharedPages, UnmapAction, is_control_domain, is_xen};
use tapio_xen::{Channel, CopyBatch, Direction, Domain, GrantRef, Mapped, Rights};

type Outcome = Result<(), Box<dyn Error>>;
type Part = fn() -> Outcome;

/// The control domain is number 0, and here both sides of everything.
const SELF: u32 = 0;

fn demand(holds: bool, what: &str) -> Outcome {
    if holds { Ok(()) } else { Err(what.into()) }
}

fn byte_at(at: *const u8) -> u8 {
    // SAFETY: all callers give a pointer into pages that they keep mapped.
    unsafe { at.read_volatile() }
}

fn mapping() -> Outcome {
    let shared = SharedPages::new(0, 5, Rights::Write)?;
    let domain = Domain::Xen(GrantDevice::open(SELF)?);
    for page in 0..5 {
        // SAFETY: inside the five pages.
        unsafe { shared.as_ptr().as_ptr().add(page * PAGE_LEN).write_bytes(page as u8 + 1, PAGE_LEN) };
    }
    let mut grants = shared.grants().to_vec();
    grants.reverse();
    let mapped = domain.map(&grants, Rights::Write)?;
    demand(mapped.len() == 5 * PAGE_LEN, "as many bytes as five pages")?;
    for page in 0..5 {
        let last = mapped.as_ptr().wrapping_add(page * PAGE_LEN + PAGE_LEN - 1);
        demand(byte_at(last) == 5 - page as u8, "pages lie in the order of their grants")?;
    }
    // SAFETY: inside the mapping.
    unsafe { mapped.as_ptr().add(7).write_volatile(99) };
    let theirs = shared.as_ptr().as_ptr().wrapping_add(4 * PAGE_LEN + 7);
    demand(byte_at(theirs) == 99, "what is written there is written here")?;
    if let Mapped::Xen(pages) = &mapped {
        pages.on_unmap(UnmapAction::ClearByte(7))?;
    }
    drop(mapped);
    demand(byte_at(theirs) == 0, "a byte is cleared when the mapping ends")?;
    demand(
        domain.map(&[GrantRef(0x00ff_fff0)], Rights::Read).is_err(),
        "a grant that is not there is not mapped",
    )
}

fn read_only() -> Outcome {
    let shared = SharedPages::new(0, 1, Rights::Read)?;
    let domain = Domain::Xen(GrantDevice::open(SELF)?);
    drop(domain.map(shared.grants(), Rights::Read)?);
    demand(domain.map(shared.grants(), Rights::Write).is_err(), "a read-only grant is not mapped for writing")
}

fn copying() -> Outcome {
    let shared = SharedPages::new(0, 2, Rights::Write)?;
    let domain = Domain::Xen(GrantDevice::open(SELF)?);
    let mut ours: Vec<u8> = (0..3 * PAGE_LEN).map(|at| (at % 251) as u8).collect();
    let want = ours[100..100 + PAGE_LEN].to_vec();
    let mut batch = CopyBatch::default();
    // SAFETY: all pieces lie inside `ours`, which outlives both copies.
    unsafe {
        let at = ours.as_mut_ptr();
        let (first, second) = (shared.grants()[0], shared.grants()[1]);
        batch.push(Direction::ToDomain, SELF, first, 0, at.add(100), PAGE_LEN as u16);
        batch.push(Direction::ToDomain, SELF, second, 512, at, 512);
        batch.push(Direction::ToDomain, SELF, GrantRef(0x00ff_fff0), 0, at, 512);
        // More than the kernel gives the hypervisor at once.
        for piece in 0..40 {
            batch.push(Direction::ToDomain, SELF, second, 1024 + piece * 64, at.add(64), 64);
        }
    }
    domain.copy(&mut batch)?;
    demand(batch.status(0).is_ok() && batch.status(1).is_ok(), "both copies are done")?;
    demand(batch.status(2) == Err(grant_status::BAD_GNTREF), "a grant that is not there is named")?;
    demand((3..43).all(|index| batch.status(index).is_ok()), "all of a long batch are done")?;
    let shown = (0..PAGE_LEN).all(|at| byte_at(shared.as_ptr().as_ptr().wrapping_add(at)) == want[at]);
    demand(shown, "a copy across a border of our pages is whole")?;
    batch.clear();
    // SAFETY: as above.
    unsafe {
        let into = ours.as_mut_ptr().add(2 * PAGE_LEN);
        batch.push(Direction::FromDomain, SELF, shared.grants()[0], 8, into, 1000);
    }
    domain.copy(&mut batch)?;
    demand(batch.status(0).is_ok() && ours[2 * PAGE_LEN..][..1000] == want[8..1008], "and back again")
}

fn events() -> Outcome {
    let offered = EventDevice::offer(SELF)?;
    let port = offered.port();
    let front = Channel::Xen(offered);
    let back = Channel::Xen(EventDevice::bind(SELF, port)?);
    let arrives = |channel: &Channel| -> Result<bool, Box<dyn Error>> {
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            if channel.take()? {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    };
    // Both ends are told of a new binding, one way or the other; that is not what is tried here.
    std::thread::sleep(Duration::from_millis(50));
    let _ = (front.take()?, back.take()?);
    for _ in 0..3 {
        front.notify()?;
        demand(arrives(&back)?, "the front end wakes the back end")?;
        back.notify()?;
        demand(arrives(&front)?, "the back end wakes the front end")?;
        demand(!back.take()? && !front.take()?, "an event comes once")?;
    }
    drop(back);
    let again = Channel::Xen(EventDevice::bind(SELF, port)?);
    let _ = again.take()?;
    front.notify()?;
    demand(arrives(&again)?, "a back end that came back is woken")?;
    demand(EventDevice::bind(SELF, 0xfff_fff).is_err(), "a port that is not there is not bound")
}

fn main() -> ExitCode {
    if !is_xen() {
        eprintln!("this host does not run on Xen");
        return ExitCode::from(2);
    }
    println!("RESULT control-domain={}", is_control_domain());
    let parts: [(&str, Part); 4] =
        [("mapping", mapping), ("read-only", read_only), ("copying", copying), ("events", events)];
    for (name, part) in parts {
        match part() {
            Ok(()) => println!("RESULT {name}=ok"),
            Err(error) => {
                println!("RESULT {name}=failed: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
