//! A process that dies at every named step of every change, and before each program of LVM that it runs. The tests run
//! themselves as that process.
//!
//! A run takes every step once, in one of its stories, some programs, and some recoveries. `TAPIO_ALL_KILLS=1` takes
//! all of them: each step and each program of each story, and each program of each recovery. `TAPIO_ONLY=merge` runs
//! the stories whose names have that.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use tapio_sm::STEPS;
use tapio_sm::lvm::double::Host;
use uuid::Uuid;

use super::stories::{Before, CHANGES, before, check, heard, run, said};
use crate::support::{Watch, died, driver};

const CHILD: &str = "TAPIO_SM_TEST_VOLUMES_CHILD";
/// After a kill at one of these the recovery is killed as well, before its first program, then before its second, and
/// so on, until it has come to its end.
const KILLED_AGAIN: &[&str] = &[
    "lv:fork-leaf-named",
    "lv:fork-base-named",
    "lv:fork-log-named",
    "lv:inflate-longer",
    "lv:relink-child",
    "lv:leaf-shown",
    "lv:leaf-named",
    "lv:room-longer",
    "lv:spare-ended",
];

/// Where the process dies.
#[derive(Clone, Copy, Debug)]
enum At {
    Step(&'static str),
    /// Before the program of this number that the change runs.
    Program(u64),
    /// The same of the recovery when the SR is attached.
    Recovery(u64),
}

/// The child: not a test by itself.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD) else { return };
    let [dir, sr, config, change, step, program, vdi, other, origin]: [&str; 9] =
        job.split('|').collect::<Vec<_>>().try_into().expect("nine words");
    let uuid = |text: &str| Uuid::try_parse(text).expect("a UUID");
    let host = Host::again(Path::new(dir)).unwrap();
    let dies_at = || {
        if let Ok(program) = program.parse::<u64>() {
            host.die_at(host.count() + program);
        }
    };
    if change == "recovery" {
        dies_at();
    }
    let quiet = Watch::default();
    let attached = driver(Path::new(dir), "lvm").attach(&quiet, uuid(sr), &heard(config)).unwrap();
    if change == "recovery" {
        std::process::exit(0);
    }
    let ctx = Watch { die_at: Some(step.to_string()), ..Watch::default() };
    run(attached.as_ref(), &ctx, change, [vdi, other, origin].map(uuid), &dies_at).unwrap();
    // It came to the end: this step is not one of this change.
    std::process::exit(0);
}

/// Whether a change dies at a step.
pub fn dies_at_step(before: &Before, change: &str, step: &'static str) -> bool {
    dies(before, change, At::Step(step))
}

/// Runs the child; whether it died.
fn dies(before: &Before, change: &str, at: At) -> bool {
    let Before { place, vdi, other, origin, .. } = before;
    let (change, step, program) = match at {
        At::Step(step) => (change, step, String::new()),
        At::Program(number) => (change, "", number.to_string()),
        At::Recovery(number) => ("recovery", "", number.to_string()),
    };
    let (dir, config) = (place.dir.path().display(), said(&place.config));
    let job = format!("{dir}|{}|{config}|{change}|{step}|{program}|{vdi}|{other}|{origin}", place.sr);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["volumes::kills::child", "--exact", "--nocapture"])
        .env(CHILD, job)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    died(child, &format!("{change} at {at:?}"))
}

/// Kills in a change, and looks at what came of each. None where there is no place for it.
fn kills(change: &str, is_full: bool, claimed: &Mutex<BTreeSet<&'static str>>) -> Option<()> {
    let before = before(change)?;
    let host = &before.place.host;
    let saved = host.save().unwrap();
    // Once without a kill, for what there is.
    let ctx = Watch::default();
    let attached = before.place.attach(&Watch::default());
    let first = Cell::new(0);
    let ids = [before.vdi, before.other, before.origin];
    run(attached.as_ref(), &ctx, change, ids, &|| first.set(host.count())).unwrap();
    drop(attached);
    let programs = host.count() - first.get();
    let steps: BTreeSet<&'static str> = ctx.steps.lock().unwrap().iter().copied().collect();
    let mut places: Vec<At> = Vec::new();
    {
        let mut claimed = claimed.lock().unwrap();
        let own = steps.iter().filter(|step| claimed.insert(step) || is_full);
        places.extend(own.map(|step| At::Step(step)));
    }
    // Programs that one process of LVM runs have no step between them.
    if is_full || change.starts_with("room-two") {
        places.extend((1..=programs).map(At::Program));
    } else {
        // Another one for each change.
        places.push(At::Program(1 + change.bytes().map(u64::from).sum::<u64>() % programs));
    }
    for at in places {
        host.restore(&saved).unwrap();
        before.place.forget();
        assert!(dies(&before, change, at), "{change} at {at:?}: it does not die");
        let is_again = is_full || matches!(at, At::Step(step) if KILLED_AGAIN.contains(&step));
        let killed = if is_again {
            (1..).take_while(|at| dies(&before, change, At::Recovery(*at))).count()
        } else {
            0
        };
        host.reload().unwrap();
        check(&before, change, &format!("{change} at {at:?}, its recovery killed {killed} times"));
    }
    Some(())
}

#[test]
fn a_kill_anywhere_loses_nothing() {
    let is_full = std::env::var_os("TAPIO_ALL_KILLS").is_some();
    let only = std::env::var("TAPIO_ONLY").unwrap_or_default();
    let changes = Mutex::new(CHANGES.iter().filter(|change| change.contains(&*only)));
    let reached = Mutex::new(BTreeSet::new());
    let is_skipped = Mutex::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(change) = changes.lock().unwrap().next().copied() else { return };
                    if kills(change, is_full, &reached).is_none() {
                        *is_skipped.lock().unwrap() = true;
                    }
                }
            });
        }
    });
    if is_skipped.into_inner().unwrap() || !only.is_empty() {
        return;
    }
    let reached = reached.into_inner().unwrap();
    let steps = STEPS.iter().map(|(step, _)| *step).filter(|step| step.starts_with("lv:"));
    // Of a copy that gets names of its own: whole_srs.
    let missed: Vec<_> =
        steps.filter(|step| !reached.contains(step) && !step.starts_with("lv:resign")).collect();
    assert_eq!(missed, [""; 0], "steps that no change came to");
}
