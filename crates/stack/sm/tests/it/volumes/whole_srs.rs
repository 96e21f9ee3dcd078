//! A process that dies while it makes, erases or resigns a whole SR: at each step, and before each program of LVM.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use tapio_sm::lvm::double::Host;
use tapio_sm::{ForkKind, STEPS};
use uuid::Uuid;

use super::stories::{heard, said};
use super::{MIB, Volumes};
use crate::support::{Watch, died, driver, fork, make, read, write};

const CHILD: &str = "TAPIO_SM_TEST_WHOLE_VOLUMES_CHILD";

/// The child: not a test by itself.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD) else { return };
    let [dir, sr, config, what, step, program]: [&str; 6] =
        job.split('|').collect::<Vec<_>>().try_into().expect("six words");
    let (sr, config) = (Uuid::try_parse(sr).expect("a UUID"), heard(config));
    let host = Host::again(Path::new(dir)).unwrap();
    if let Ok(program) = program.parse::<u64>() {
        host.die_at(program);
    }
    let ctx = Watch { die_at: Some(step.to_string()), ..Watch::default() };
    let lvm = driver(Path::new(dir), "lvm");
    match what {
        "make" => lvm.create(&ctx, sr, &config, 0).unwrap(),
        "erase" => lvm.attach(&ctx, sr, &config).unwrap().erase(&ctx).map_err(|(_, error)| error).unwrap(),
        _ => resign(Path::new(dir), &ctx, &config),
    }
    std::process::exit(0);
}

/// It ends with an error that says that all is well.
fn resign(dir: &Path, ctx: &Watch, config: &tapio_sm::Config) {
    let done = driver(dir, "relvm").create(ctx, Uuid::new_v4(), config, 0).unwrap_err();
    assert!(done.to_string().contains("success"), "{done}");
}

fn dies(place: &Volumes, what: &str, step: &str, program: u64) -> bool {
    let (dir, config) = (place.dir.path().display(), said(&place.config));
    let program = if program > 0 { program.to_string() } else { String::new() };
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["volumes::whole_srs::child", "--exact", "--nocapture"])
        .env(CHILD, format!("{dir}|{}|{config}|{what}|{step}|{program}", place.sr))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    died(child, &format!("{what} at '{step}' or program {program}"))
}

/// The steps of a change, then programs until it comes to its end.
fn everywhere(
    what: &str,
    prefixes: &[&str],
    mut kill: impl FnMut(&str, u64) -> bool,
) -> BTreeSet<&'static str> {
    let mut reached = BTreeSet::new();
    let steps = STEPS.iter().map(|(step, _)| *step);
    for step in steps.filter(|step| prefixes.iter().any(|prefix| step.starts_with(prefix))) {
        if kill(step, 0) {
            reached.insert(step);
        }
    }
    let programs = (1..).take_while(|program| kill("", *program)).count();
    assert!(programs > 3, "{what} runs {programs} programs");
    reached
}

#[test]
fn an_sr_that_was_half_made_or_half_erased_blocks_no_other() {
    let Some(mut place) = Volumes::new() else { return };
    let ctx = Watch::default();
    let empty = place.host.save().unwrap();
    let use_and_erase = |place: &mut Volumes, what: &str| {
        place.host.reload().unwrap();
        let lvm = place.driver("lvm");
        let sr = lvm.attach(&ctx, place.sr, &place.config).or_else(|_| {
            // Another one takes its place.
            place.sr = Uuid::new_v4();
            lvm.create(&ctx, place.sr, &place.config, 0)?;
            lvm.attach(&ctx, place.sr, &place.config)
        });
        let sr = sr.unwrap_or_else(|error| panic!("{what}: {error}"));
        let vdi = make(sr.as_ref(), 4 * MIB, "vhd");
        write(sr.as_ref(), vdi, MIB, 8);
        assert_eq!(read(sr.as_ref(), vdi, MIB), 8, "{what}");
        place.check(sr.as_ref(), what);
        sr.destroy(&ctx, vdi).unwrap();
        sr.erase(&ctx).map_err(|(_, error)| error).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(place.names().is_empty(), "{what}");
    };
    let reached = everywhere("make", &["sr-create"], |step, program| {
        place.host.restore(&empty).unwrap();
        let died = dies(&place, "make", step, program);
        use_and_erase(&mut place, &format!("made up to '{step}' or program {program}"));
        died
    });
    let made = ["sr-create:begin", "sr-create:grouped", "sr-create:marked", "sr-create:volume-made"];
    assert_eq!(reached, BTreeSet::from(made));
    place.host.restore(&empty).unwrap();
    drop(place.create());
    let full = place.host.save().unwrap();
    let sr = place.sr;
    let reached = everywhere("erase", &["sr-erase", "sr-attach"], |step, program| {
        place.host.restore(&full).unwrap();
        place.forget();
        place.sr = sr;
        let died = dies(&place, "erase", step, program);
        use_and_erase(&mut place, &format!("erased up to '{step}' or program {program}"));
        died
    });
    assert_eq!(reached, BTreeSet::from(["sr-attach:mounted", "sr-erase:begin", "sr-erase:group-gone"]));
}

#[test]
fn a_copy_that_is_half_resigned_goes_on() {
    let Some(mut place) = Volumes::new() else { return };
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    fork(sr.as_ref(), vdi, ForkKind::Snapshot);
    write(sr.as_ref(), vdi, MIB, 2);
    let raw = make(sr.as_ref(), 8 * MIB, "raw");
    write(sr.as_ref(), raw, 4 * MIB, 3);
    sr.rename(&ctx, vdi, "data", "").unwrap();
    sr.rename(&ctx, raw, "raw", "").unwrap();
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
    let (old, saved) = (place.sr, place.host.save().unwrap());
    let reached = everywhere("resign", &["lv:resign"], |step, program| {
        let what = format!("resigned up to '{step}' or program {program}");
        place.host.restore(&saved).unwrap();
        let died = dies(&place, "resign", step, program);
        place.host.reload().unwrap();
        if died {
            resign(place.dir.path(), &ctx, &place.config);
        }
        let probed = place.driver("lvm").probe(&ctx, &place.config).unwrap();
        place.sr = probed.results[0].sr.unwrap().0;
        assert_ne!(place.sr, old, "{what}");
        let sr = place.attach(&ctx);
        let found = place.check(sr.as_ref(), &what);
        let named =
            |name: &str| found.iter().find(|info| info.name_label.as_deref() == Some(name)).unwrap().uuid;
        assert_eq!([0, MIB].map(|at| read(sr.as_ref(), named("data"), at)), [1, 2], "{what}");
        assert_eq!(read(sr.as_ref(), named("raw"), 4 * MIB), 3, "{what}");
        let snapshot = found
            .iter()
            .find(|info| info.told.as_ref().is_some_and(|told| told.snapshot_of == Some(named("data"))));
        assert_eq!([0, MIB].map(|at| read(sr.as_ref(), snapshot.unwrap().uuid, at)), [1, 0], "{what}");
        assert!(found.iter().all(|info| info.uuid != vdi && info.uuid != raw), "{what}");
        died
    });
    let steps = STEPS.iter().map(|(step, _)| *step).filter(|step| step.starts_with("lv:resign"));
    assert_eq!(reached, steps.collect());
}
