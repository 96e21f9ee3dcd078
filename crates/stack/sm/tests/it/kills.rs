//! A process that dies at every named step of every change. The tests run themselves as that process.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tapio_format::vhd::offline::{CheckOptions, SnapshotOptions, check_path, snapshot};
use tapio_sm::{CloneJournal, ForkKind, Merge, NewVdi, STEPS, Sr};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{
    Busy, Disk, Place, Watch, blocks_of, byte_of, died, driver, make, new_vdi, read, write,
};

const MIB: u64 = 1 << 20;
/// Where a disk writes that runs while its log changes.
const LIVE_AT: u64 = 6 * MIB;
const CHILD: &str = "TAPIO_SM_TEST_CHILD";

/// What the process does that dies.
const CHANGES: &[&str] = &[
    "create-vhd",
    "create-raw",
    "fork-vhd",
    "fork-vhd-live",
    "fork-raw",
    "fork-single",
    "fork-empty",
    "resize",
    "resize-raw",
    "destroy",
    "destroy-data",
    "destroy-log",
    "destroy-log-live",
    "cbt-enable",
    "cbt-enable-live",
    "cbt-disable",
    "cbt-disable-live",
    "cbt-unusable",
    "fork-tracked",
    "fork-tracked-live",
    "fork-tracked-paused-live",
    "fork-unusable",
    "resize-tracked",
    "introduce",
    "fill",
    "merge",
    "merge-raw",
    "merge-grow",
    "merge-grow-live",
    "relink",
    "relink-raw",
    "relink-live",
    "leaf",
    "leaf-grow",
    "leaf-live",
    "attach",
];

/// The child: not a test by itself.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD) else { return };
    let [dir, sr, change, step, vdi, other, origin]: [&str; 7] =
        job.split('|').collect::<Vec<_>>().try_into().expect("seven words");
    let uuid = |text: &str| Uuid::try_parse(text).expect("a UUID");
    let config = tapio_sm::Config::from([("location".to_string(), format!("{dir}/images"))]);
    let ctx = Watch { die_at: Some(step.to_string()), ..Watch::default() };
    let attached = driver(Path::new(dir), "file").attach(&ctx, uuid(sr), &config).unwrap();
    run(attached.as_ref(), &ctx, change, [vdi, other, origin].map(uuid)).unwrap();
    // It came to the end: this step is not one of this change.
    std::process::exit(0);
}

fn run(
    sr: &dyn Sr,
    ctx: &Watch,
    change: &str,
    [vdi, other, origin]: [Uuid; 3],
) -> Result<(), tapio_types::ApiError> {
    if let Some(change) = change.strip_suffix("-live") {
        let pauses_only = change.ends_with("-paused");
        let disk = Disk { pauses_only, ..Disk::start(&sr.activate(ctx, origin, Access::ReadWrite)?) };
        let disk = Arc::new(disk);
        disk.write(LIVE_AT, 8);
        ctx.live.lock().unwrap().insert(origin, Arc::clone(&disk));
        let done = run(sr, ctx, change, [vdi, other, origin]);
        ctx.live.lock().unwrap().clear();
        disk.close();
        return sr.deactivate(ctx, origin).and(done);
    }
    let new = |format| NewVdi { uuid: other, ..new_vdi(8 * MIB, format) };
    match change {
        "create-vhd" => sr.create(ctx, &new("vhd")).map(|_| ()),
        "create-raw" => sr.create(ctx, &new("raw")).map(|_| ()),
        "fork-vhd" | "fork-raw" | "fork-empty" => sr.fork(ctx, vdi, other, ForkKind::Clone).map(|_| ()),
        "fork-single" => sr.fork(ctx, vdi, other, ForkKind::Single).map(|_| ()),
        "resize" | "resize-raw" => sr.resize(ctx, vdi, 8192 * MIB).map(|_| ()),
        "destroy" | "destroy-log" => sr.destroy(ctx, vdi),
        "destroy-data" => sr.destroy_data(ctx, vdi).map(|_| ()),
        "cbt-enable" => sr.track_changes(ctx, vdi, true).map(|_| ()),
        "cbt-unusable" => {
            sr.activate(ctx, vdi, Access::ReadWrite)?;
            sr.deactivate(ctx, vdi)
        }
        "cbt-disable" => sr.track_changes(ctx, vdi, false).map(|_| ()),
        "fork-tracked" | "fork-tracked-paused" | "fork-unusable" => {
            sr.fork(ctx, vdi, other, ForkKind::Snapshot).map(|_| ())
        }
        "resize-tracked" => sr.resize(ctx, vdi, 8192 * MIB).map(|_| ()),
        "introduce" => sr.introduce(ctx, other, "foreign.vhd").map(|_| ()),
        "fill" => {
            let from = sr.activate(ctx, vdi, Access::ReadOnly)?.chain;
            sr.fill(ctx, other, &from, None)
        }
        _ if is_merge(change) => merge_down(sr, ctx, vdi),
        _ if change.starts_with("leaf") => merge_leaf(sr, ctx, vdi),
        "attach" => Ok(()),
        _ => panic!("no change is called {change}"),
    }
}

fn is_merge(change: &str) -> bool {
    change.starts_with("merge") || change.starts_with("relink")
}

/// A merge of an image into its parent, by a caller that holds all VDIs.
fn merge_of(sr: &dyn Sr, ctx: &Watch, image: Uuid, parent: Uuid) -> Result<Merge, tapio_types::ApiError> {
    let held = sr.scan(ctx)?.iter().filter(|info| info.managed).map(|info| info.uuid).collect();
    Ok(Merge { image, parent, held })
}

/// The base copy below the VDI goes into its own parent, if it has one still.
fn merge_down(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(), tapio_types::ApiError> {
    let Some(image) = sr.vdi(ctx, vdi)?.parent else { return Ok(()) };
    let Some(parent) = sr.vdi(ctx, image)?.parent else { return Ok(()) };
    let merge = merge_of(sr, ctx, image, parent)?;
    if sr.merge_cost(ctx, &merge)?.must_grow {
        sr.grow_base(ctx, &merge)?;
    }
    sr.merge(ctx, &merge, 0)?;
    let merged = sr.relink(ctx, &merge)?;
    assert_eq!(merged.gone, [image]);
    assert!(merged.changed.iter().any(|info| info.uuid == vdi && info.parent == Some(parent)), "{merged:?}");
    Ok(())
}

/// The VDI goes into its parent, if it has one still.
fn merge_leaf(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(), tapio_types::ApiError> {
    let Some(parent) = sr.vdi(ctx, vdi)?.parent else { return Ok(()) };
    let merge = merge_of(sr, ctx, vdi, parent)?;
    assert_eq!(sr.merge_leaf(ctx, &merge)?.gone, [parent]);
    Ok(())
}

/// Runs the child; whether it died at the step.
fn dies(before: &Before, change: &str, step: &str) -> bool {
    let Before { place, vdi, other, origin, .. } = before;
    let job = format!("{}|{}|{change}|{step}|{vdi}|{other}|{origin}", place.dir.path().display(), place.sr);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["kills::child", "--exact", "--nocapture"])
        .env(CHILD, job)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    died(child, &format!("{change} at {step}"))
}

/// What there was before the change: a VDI with 1 at 0 and 2 at 4 MiB, and one beside it with 3 at 0.
struct Before {
    place: Place,
    vdi: Uuid,
    beside: Uuid,
    other: Uuid,
    /// The VDI, or what it is a snapshot of.
    origin: Uuid,
    /// What keeps the log of the VDI from being used.
    _busy: Option<Busy>,
    /// A snapshot before, from which changed blocks are tracked.
    first: Option<Uuid>,
}

fn before(change: &str) -> Before {
    let place = Place::new();
    let sr = place.create();
    let format = if change.ends_with("-raw") { "raw" } else { "vhd" };
    let vdi = make(sr.as_ref(), 8 * MIB, format);
    let beside = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), beside, 0, 3);
    write(sr.as_ref(), vdi, 0, 1);
    write(sr.as_ref(), vdi, 4 * MIB, 2);
    let (mut other, origin, mut vdi, mut first) = (Uuid::new_v4(), vdi, vdi, None);
    let ctx = Watch::default();
    let snapshot = || sr.fork(&ctx, origin, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made.uuid;
    match change {
        // What the VDI has at 4 MiB was written after the first snapshot.
        _ if is_tracked(change) => {
            sr.track_changes(&ctx, vdi, true).unwrap();
            first = Some(snapshot());
            write(sr.as_ref(), vdi, 4 * MIB, 2);
            if change.starts_with("destroy") {
                vdi = snapshot();
                write(sr.as_ref(), origin, MIB, 7);
            }
        }
        // Below an empty leaf, and below the leaf that is destroyed, are two base copies.
        "fork-empty" | "destroy" => {
            sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Single).unwrap();
            if change == "destroy" {
                write(sr.as_ref(), vdi, 512, 5);
                sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Single).unwrap();
            }
        }
        // Base copy, base copy with 5 at 512, the VDI and a sibling of it.
        _ if is_merge(change) => {
            sr.fork(&ctx, vdi, other, ForkKind::Single).unwrap();
            if change.contains("-grow") {
                sr.resize(&ctx, vdi, 8192 * MIB).unwrap();
            }
            write(sr.as_ref(), vdi, 512, 5);
            write(sr.as_ref(), vdi, 4 * MIB + 512, 5);
            other = snapshot();
        }
        _ if change.starts_with("leaf") => {
            sr.fork(&ctx, vdi, other, ForkKind::Single).unwrap();
            if change.contains("-grow") {
                sr.resize(&ctx, vdi, 8192 * MIB).unwrap();
            }
            write(sr.as_ref(), vdi, 512, 5);
        }
        "introduce" => {
            let foreign = make(sr.as_ref(), 8 * MIB, "vhd");
            write(sr.as_ref(), foreign, 0, 6);
            let from = place.images().join(format!("{foreign}.vhd"));
            std::fs::rename(from, place.images().join("foreign.vhd")).unwrap();
        }
        "fill" => other = make(sr.as_ref(), 8 * MIB, "vhd"),
        _ => {}
    }
    let log = place.images().join(format!("{vdi}.cbtlog"));
    let _busy = change.ends_with("-unusable").then(|| Busy::put(&log));
    Before { place, vdi, beside, other, origin, first, _busy }
}

fn is_tracked(change: &str) -> bool {
    change.contains("-tracked")
        || change.starts_with("destroy-")
        || change.starts_with("cbt-disable")
        || change.ends_with("-unusable")
}

/// What changed, by the blocks of 64 KiB.
fn changed(sr: &dyn Sr, from: Uuid, to: Uuid) -> Result<BTreeSet<u64>, tapio_types::ApiError> {
    sr.changed_blocks(&Watch::default(), from, to).map(|text| blocks_of(&text))
}

/// Once all is in order again, what was written since the first snapshot is known, or tracking has ended.
fn check_log(before: &Before, sr: &dyn Sr, change: &str, what: &str) {
    let ctx = Watch::default();
    let snapshot = || sr.fork(&ctx, before.origin, Uuid::new_v4(), ForkKind::Snapshot).unwrap().made;
    let last = snapshot();
    if change.starts_with("cbt") {
        assert_eq!(last.cbt_enabled, change.starts_with("cbt-enable"), "{what}");
    }
    if change.starts_with("cbt-enable") {
        write(sr, before.origin, 2 * MIB, 9);
        assert_eq!(changed(sr, last.uuid, snapshot().uuid).unwrap(), BTreeSet::from([32]), "{what}");
    }
    let Some(first) = before.first else { return };
    if change == "fork-unusable" {
        // The snapshot is there, and no list lacks what was written.
        match changed(sr, first, last.uuid) {
            Ok(changed) => assert!(changed.contains(&64), "{what}: {changed:?}"),
            Err(error) => assert_eq!(error.code, "SR_BACKEND_FAILURE_460", "{what}"),
        }
        return;
    }
    if change.starts_with("cbt-disable") || change == "cbt-unusable" {
        assert!(changed(sr, first, last.uuid).is_err(), "{what}");
        return;
    }
    let changed = changed(sr, first, last.uuid).unwrap_or_else(|error| panic!("{what}: {error}"));
    let wanted = [64].into_iter().chain(change.starts_with("destroy").then_some(16));
    let wanted: BTreeSet<u64> = wanted.chain(change.ends_with("-live").then_some(LIVE_AT / 65536)).collect();
    assert!(changed.is_superset(&wanted), "{what}: {changed:?}");
    // A process that dies loses what it had not written back; else nothing but the changes is known.
    let is_exact = changed == wanted;
    assert!(is_exact || change.ends_with("-live"), "{what}: {changed:?}");
}

/// Everything that must hold, whether the change happened or not.
fn check(before: &Before, change: &str, step: &str) {
    let Before { place, vdi, beside, other, .. } = before;
    let what = format!("{change} at {step}: {:?}", place.files());
    let ctx = Watch::default();
    let sr = place.attach();
    let found = sr.scan(&ctx).unwrap();
    for info in &found {
        assert!(!info.sm_config.contains_key("damaged"), "{what}: {info:?}");
    }
    let known: BTreeSet<Uuid> = found.iter().map(|info| info.uuid).collect();
    assert!(known.contains(beside) && read(sr.as_ref(), *beside, 0) == 3, "{what}");
    // Only images, the mark and the foreign file are left: no journals, nothing half made.
    for name in place.files() {
        let image = name.rsplit_once('.').and_then(|(stem, _)| Uuid::try_parse(stem).ok());
        assert!(image.is_some_and(|uuid| known.contains(&uuid)) || name == "foreign.vhd", "{what}: {name}");
        if name.ends_with(".vhd") {
            for report in check_path(&place.images().join(&name), &CheckOptions::default()).unwrap() {
                assert!(report.is_valid(), "{what}: {name}: {report:?}");
            }
        }
    }
    let parents: BTreeSet<Uuid> = found.iter().filter_map(|info| info.parent).collect();
    for info in found.iter().filter(|info| !info.managed) {
        assert!(parents.contains(&info.uuid), "{what}: a base copy that no image needs");
    }
    let data = |vdi: Uuid| [0, 4 * MIB].map(|at| read(sr.as_ref(), vdi, at));
    let managed = |vdi: &Uuid| found.iter().any(|info| info.uuid == *vdi && info.managed);
    let has_data = |vdi: &Uuid| found.iter().any(|info| info.uuid == *vdi && !info.is_metadata);
    match change {
        _ if change.starts_with("destroy") => {
            if has_data(vdi) {
                assert_eq!(data(*vdi), [1, 2], "{what}");
            }
        }
        _ => {
            assert!(managed(vdi), "{what}");
            assert_eq!(data(*vdi), [1, 2], "{what}");
        }
    }
    if change.starts_with("fork") && managed(other) {
        assert_eq!(data(*other), [1, 2], "{what}");
    }
    if change == "introduce" {
        assert!(managed(other) != place.images().join("foreign.vhd").exists(), "{what}");
    }
    if is_merge(change) || change.starts_with("leaf") {
        assert_eq!(read(sr.as_ref(), *vdi, 512), 5, "{what}");
        if is_merge(change) {
            assert_eq!([0, 512, 4 * MIB].map(|at| read(sr.as_ref(), *other, at)), [1, 5, 2], "{what}");
        }
    }
    if change == "fill" && step == "fill:done" {
        assert_eq!(data(*other), [1, 2], "{what}");
    }
    // And the same again, as far as it has not happened.
    match change {
        "create-vhd" | "create-raw" | "introduce" if managed(other) => {}
        _ if change.starts_with("fork-") && change != "fork-single" && managed(other) => {}
        "destroy" | "destroy-log" | "destroy-log-live" if !managed(vdi) => {}
        _ => run(sr.as_ref(), &ctx, change, [*vdi, *other, before.origin])
            .unwrap_or_else(|error| panic!("{what}: {error}")),
    }
    match change {
        "destroy" | "destroy-log" | "destroy-log-live" => assert!(sr.vdi(&ctx, *vdi).is_err()),
        "destroy-data" => assert!(sr.vdi(&ctx, *vdi).unwrap().is_metadata),
        "resize" | "resize-raw" | "resize-tracked" => {
            assert_eq!(sr.vdi(&ctx, *vdi).unwrap().virtual_size, 8192 * MIB);
            assert_eq!(data(*vdi), [1, 2]);
        }
        "fork-vhd" | "fork-raw" | "fork-empty" | "fill" => assert_eq!(data(*other), [1, 2], "{what}"),
        "introduce" => assert_eq!(read(sr.as_ref(), *other, 0), 6),
        _ => {}
    }
    if is_tracked(change) || change.starts_with("cbt") {
        check_log(before, sr.as_ref(), change, &what);
    }
}

#[test]
fn a_kill_at_any_step_loses_nothing() {
    let changes = std::sync::Mutex::new(CHANGES.iter());
    let reached = std::sync::Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(change) = changes.lock().unwrap().next().copied() else { return };
                    let prefix = change.split('-').next().unwrap();
                    for (step, _) in STEPS.iter().filter(|(step, _)| {
                        let of = step.split(':').next().unwrap().rsplit('-').next().unwrap();
                        // A log that changes with a destroy or a snapshot has steps of its own.
                        let has_log_steps = matches!(change, "destroy-log-live" | "fork-unusable");
                        of == prefix
                            || (has_log_steps && of == "cbt")
                            || (prefix == "attach" && *step == "sr-attach:mounted")
                    }) {
                        let before = before(change);
                        if dies(&before, change, step) {
                            reached.lock().unwrap().insert(*step);
                            check(&before, change, step);
                        }
                    }
                }
            });
        }
    });
    let reached = reached.into_inner().unwrap();
    let missed: Vec<_> = STEPS
        .iter()
        .map(|(step, _)| *step)
        // Steps of whole SRs: kills_of_srs. Of plugins, and in a Ceph cluster: host::plugins and host::ceph of the
        // end-to-end tests. Of volumes: `volumes`, over a double of LVM. A
        // login needs a target: uml-iscsi.sh. Of repairs: vms::repairs of tapio-core.
        .filter(|step| {
            let elsewhere =
                ["sr-create", "sr-erase", "external", "rbd-", "lv:", "sr-attach:logged-in", "recover:"];
            !reached.contains(step) && !elsewhere.iter().any(|prefix| step.starts_with(prefix))
        })
        .collect();
    assert_eq!(missed, [""; 0], "steps that no change came to");
}

#[test]
fn a_disk_that_waited_when_the_daemon_died_goes_on() {
    let closed = ["fork:sibling-made", "fork:paused", "fork:swapped", "fork:hidden"];
    let running = ["fork:held", "fork:swapped", "fork:leaf-swapped", "fork:hidden"];
    let of = |change, steps: [&'static str; 4]| steps.map(|step| (change, step));
    for (change, step) in of("fork-vhd", closed).into_iter().chain(of("fork-vhd-live", running)) {
        let images = if ["fork:sibling-made", "fork:paused", "fork:held"].contains(&step) { 1 } else { 2 };
        let before = before(change);
        assert!(dies(&before, change, step), "{change} at {step}");
        let ctx = Watch::default();
        let disk = Arc::new(Disk::default());
        ctx.live.lock().unwrap().insert(before.vdi, Arc::clone(&disk));
        let sr = before.place.driver("file").attach(&ctx, before.place.sr, &before.place.config).unwrap();
        disk.write(512, 9);
        let (chain, leaf) = disk.open.lock().unwrap().take().expect("it runs");
        drop(leaf);
        assert_eq!(chain.layers.len(), images, "{step}");
        assert_eq!([0, 512, 4 * MIB].map(|at| byte_of(&chain, at)), [1, 9, 2], "{step}");
        if images == 2 {
            assert_eq!(read(sr.as_ref(), before.other, 512), 0, "{step}");
        }
    }
}

#[test]
fn disks_that_waited_in_a_merge_go_on() {
    let steps = [
        ("relink-live", "relink:journal", 2),
        ("relink-live", "relink:paused", 2),
        ("relink-live", "relink:child", 2),
        ("relink-live", "relink:image-gone", 2),
        ("merge-grow-live", "merge:grow-journal", 3),
        ("merge-grow-live", "merge:grow-paused", 3),
        ("merge-grow-live", "merge:grown", 3),
        ("leaf-live", "leaf:paused", 2),
        ("leaf-live", "leaf:copied", 2),
        ("leaf-live", "leaf:shown", 2),
        ("leaf-live", "leaf:named", 1),
    ];
    for (change, step, images) in steps {
        let before = before(change);
        assert!(dies(&before, change, step), "{step}");
        let ctx = Watch::default();
        let disk = Arc::new(Disk::default());
        ctx.live.lock().unwrap().insert(before.vdi, Arc::clone(&disk));
        let sr = before.place.driver("file").attach(&ctx, before.place.sr, &before.place.config).unwrap();
        disk.write(1024, 9);
        let (chain, leaf) = disk.open.lock().unwrap().take().expect("it runs");
        drop(leaf);
        assert_eq!(chain.layers.len(), images, "{step}");
        assert_eq!([0, 512, 1024, 4 * MIB].map(|at| byte_of(&chain, at)), [1, 5, 9, 2], "{step}");
        ctx.live.lock().unwrap().clear();
        assert!(sr.scan(&ctx).unwrap().iter().all(|info| !info.sm_config.contains_key("damaged")), "{step}");
    }
}

/// Where a file system has no links the base copy takes the VDI's only name.
#[test]
fn a_fork_without_links_is_undone_too() {
    for has_leaf in [false, true] {
        for format in ["vhd", "raw"] {
            let place = Place::new();
            let sr = place.create();
            let vdi = make(sr.as_ref(), 8 * MIB, format);
            write(sr.as_ref(), vdi, 0, 1);
            let (base, new) = (Uuid::new_v4(), Uuid::new_v4());
            let at = |name: String| place.images().join(name);
            let journal = CloneJournal { vdi, base, new: Some(new) };
            std::fs::write(at(journal.file_name()), journal.encode()).unwrap();
            std::fs::rename(at(format!("{vdi}.{format}")), at(format!("{base}.{format}"))).unwrap();
            if has_leaf {
                let options = SnapshotOptions {
                    raw_parent: format == "raw",
                    keep_empty: true,
                    ..SnapshotOptions::default()
                };
                for child in [format!("{vdi}.vhd.new"), format!("{new}.vhd")] {
                    snapshot(&at(child), &at(format!("{base}.{format}")), &options).unwrap();
                }
            }
            drop(sr);
            let sr = place.attach();
            assert_eq!(place.files(), [format!("{vdi}.{format}")]);
            assert_eq!(read(sr.as_ref(), vdi, 0), 1);
        }
    }
}

#[test]
fn leftovers_of_the_dead_go_and_those_of_the_living_stay() {
    let place = Place::new();
    let sr = place.create();
    let vdi = make(sr.as_ref(), 2 * MIB, "vhd");
    let dead = {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    };
    let own = format!(".vhd-{}-1.partial", std::process::id());
    for name in
        [format!(".vhd-{dead}-0.partial"), own.clone(), format!("{vdi}.vhd.new"), format!("clone_{vdi}")]
    {
        std::fs::write(place.images().join(name), "x").unwrap();
    }
    std::fs::write(place.images().join("notes.txt"), "mine").unwrap();
    assert_eq!(sr.scan(&Watch::default()).unwrap().len(), 1);
    assert_eq!(place.files(), [own, format!("{vdi}.vhd"), "notes.txt".into()]);
}
