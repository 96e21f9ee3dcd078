//! What the process does that dies, what there was before, and what must hold afterwards.

use std::collections::BTreeSet;
use std::sync::Arc;

use tapio_format::cbt::{Log, LogHeader, SIZE_MAX};
use tapio_format::{FileMedium, Medium as _};
use tapio_sm::{Config, ForkKind, Merge, NewVdi, OpenSpec, RoomSpare, RoomWanted, Sr, VdiInfo};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::{MIB, Volumes};
use crate::support::{Disk, Watch, blocks_of, make, new_vdi, read, write};

/// Where a disk writes that runs while something changes.
const LIVE_AT: u64 = 7 * MIB;
/// Where it writes once it has room: more blocks than its volume had room for.
const ROOM_AT: [u64; 3] = [8 * MIB, 10 * MIB, 12 * MIB];

/// Each change of an SR.
pub const CHANGES: &[&str] = &[
    "create-vhd",
    "create-raw",
    "thin",
    "introduce",
    "resize",
    "resize-raw",
    "resize-thin",
    "fork-snapshot",
    "fork-clone",
    "fork-live",
    "fork-thin",
    "fork-raw",
    "fork-single",
    "fork-empty",
    "destroy",
    "fill",
    "write-thin",
    "merge",
    "merge-thin",
    "merge-raw",
    "merge-live",
    "leaf",
    "leaf-thin",
    "leaf-live",
    "resize-live",
    "room-thin-live",
    "room-two-thin-live",
    "spare-thin-live",
    "fork-pause-live",
    "cbt-enable",
    "cbt-enable-live",
    "cbt-disable",
    "cbt-disable-live",
    "cbt-unusable",
    "fork-tracked",
    "fork-tracked-live",
    "fork-tracked-pause-live",
    "resize-tracked",
    "destroy-log",
    "destroy-log-live",
    "destroy-data",
];

pub struct Before {
    pub place: Volumes,
    pub vdi: Uuid,
    pub beside: Uuid,
    pub other: Uuid,
    /// The VDI, or what it is a snapshot of.
    pub origin: Uuid,
    /// A snapshot before, from which changed blocks are tracked.
    pub first: Option<Uuid>,
}

fn is_tracked(change: &str) -> bool {
    ["tracked", "destroy-", "cbt-disable", "cbt-unusable"].iter().any(|word| change.contains(word))
}

fn merge_of(sr: &dyn Sr, ctx: &Watch, image: Uuid, parent: Uuid) -> Result<Merge, ApiError> {
    let held = sr.scan(ctx)?.iter().filter(|info| info.managed).map(|info| info.uuid).collect();
    Ok(Merge { image, parent, held })
}

/// What there is before a change: a VDI with 1 at 0 and 2 at 4 MiB, and one beside it with 3 at 0.
pub fn before(change: &str) -> Option<Before> {
    let mut place = Volumes::new()?;
    if change.contains("-thin") {
        place.config.insert("allocation".into(), "thin".into());
    }
    let has_room = change.starts_with("room") || change.starts_with("spare");
    if has_room {
        for key in ["allocation-quantum", "allocation-quantum-max"] {
            place.config.insert(key.into(), "4MiB".into());
        }
    }
    let sr = place.create();
    let sr = sr.as_ref();
    let format = if change.contains("-raw") { "raw" } else { "vhd" };
    let size = if has_room { 24 * MIB } else { 8 * MIB };
    let mut vdi = make(sr, size, format);
    let beside = make(sr, 8 * MIB, "vhd");
    write(sr, beside, 0, 3);
    write(sr, vdi, 0, 1);
    write(sr, vdi, 4 * MIB, 2);
    let mut other = Uuid::new_v4();
    let ctx = Watch::default();
    let origin = vdi;
    let mut first = None;
    let fork = |kind| sr.fork(&ctx, origin, Uuid::new_v4(), kind).unwrap().made.uuid;
    match change {
        // What the VDI has at 4 MiB was written after the first snapshot.
        _ if is_tracked(change) => {
            sr.track_changes(&ctx, vdi, true).unwrap();
            first = Some(fork(ForkKind::Snapshot));
            write(sr, vdi, 4 * MIB, 2);
            if change.starts_with("destroy") {
                vdi = fork(ForkKind::Snapshot);
                write(sr, origin, MIB, 7);
            }
            if change == "cbt-unusable" {
                spoil(&place, sr, vdi);
            }
        }
        "fork-empty" => drop(fork(ForkKind::Single)),
        "destroy" => {
            fork(ForkKind::Single);
            write(sr, vdi, 512, 5);
            fork(ForkKind::Single);
        }
        // Base copy, base copy with 5, the VDI and a snapshot of it.
        _ if change.starts_with("merge") => {
            fork(ForkKind::Single);
            if change.ends_with("-raw") {
                sr.resize(&ctx, vdi, 16 * MIB).unwrap();
            }
            write(sr, vdi, 512, 5);
            write(sr, vdi, 4 * MIB + 512, 5);
            write(sr, vdi, 6 * MIB, 6);
            other = fork(ForkKind::Snapshot);
        }
        _ if change.starts_with("leaf") => {
            fork(ForkKind::Single);
            write(sr, vdi, 512, 5);
            write(sr, vdi, 6 * MIB, 6);
        }
        "introduce" => {
            let foreign = make(sr, 8 * MIB, "vhd");
            write(sr, foreign, 0, 6);
            place.host.rename(&format!("VHD-{foreign}"), "foreign");
        }
        "fill" => other = make(sr, 8 * MIB, "vhd"),
        _ => {}
    }
    Some(Before { place, vdi, beside, other, origin, first })
}

/// Makes the log of a VDI one of a disk that is larger than the SR has room for.
fn spoil(place: &Volumes, sr: &dyn Sr, vdi: Uuid) {
    let ctx = Watch::default();
    let log = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().log.unwrap();
    let header = Log::open_header(&log, Access::ReadOnly).map(|log| *log.header()).unwrap();
    let spoiled = LogHeader { size: SIZE_MAX, ..header };
    FileMedium::open(&place.host.path(&format!("{vdi}.cbtlog")), Access::ReadWrite)
        .unwrap()
        .write_at(0, &spoiled.encode())
        .unwrap();
    sr.deactivate(&ctx, vdi).unwrap();
}

/// What is asked of an SR that becomes thin.
fn thin() -> Config {
    Config::from([("allocation-quantum".to_owned(), (8 * MIB).to_string())])
}

/// Makes the change; `begins` is called when a disk runs that has it open.
pub fn run(
    sr: &dyn Sr,
    ctx: &Watch,
    change: &str,
    [vdi, other, origin]: [Uuid; 3],
    begins: &dyn Fn(),
) -> Result<(), ApiError> {
    if let Some(change) = change.strip_suffix("-live") {
        let with = sr.activate(ctx, origin, Access::ReadWrite)?;
        let disk = Disk { pauses_only: change.ends_with("-pause"), ..Disk::default() };
        let disk = Arc::new(disk);
        disk.open(&with);
        disk.write(LIVE_AT, 8);
        ctx.live.lock().unwrap().insert(origin, Arc::clone(&disk));
        let second = if change.starts_with("room-two") { Some(second(sr, ctx, other)?) } else { None };
        let done = run(sr, ctx, change, [vdi, other, origin], begins);
        disk.write(LIVE_AT + 512, 8);
        if change.starts_with("room") && done.is_ok() {
            let both = [Some((&disk, &with)), second.as_ref().map(|(disk, with)| (disk, with))];
            for (disk, with) in both.into_iter().flatten() {
                // As the disk does that finds its footer at the new end.
                disk.close();
                disk.open(with);
                ROOM_AT.into_iter().for_each(|at| disk.write(at, 4));
            }
        }
        ctx.live.lock().unwrap().clear();
        disk.close();
        if let Some((second, _)) = second {
            second.close();
            sr.deactivate(ctx, other)?;
        }
        return sr.deactivate(ctx, origin).and(done);
    }
    begins();
    let new = |format| NewVdi { uuid: other, name_label: "new".into(), ..new_vdi(8 * MIB, format) };
    let fork = |kind| sr.fork(ctx, vdi, other, kind).map(drop);
    match change {
        "create-vhd" => sr.create(ctx, &new("vhd")).map(drop),
        "create-raw" => sr.create(ctx, &new("raw")).map(drop),
        "thin" => sr.make_thin(ctx, &thin()),
        "introduce" => sr.introduce(ctx, other, "foreign").map(drop),
        _ if change.starts_with("resize") => sr.resize(ctx, vdi, 24 * MIB).map(drop),
        "fork-single" => fork(ForkKind::Single),
        "fork-clone" | "fork-empty" => fork(ForkKind::Clone),
        // Of one whose changed blocks are not tracked.
        "fork-raw" => fork(ForkKind::Clone),
        _ if change.starts_with("fork") => fork(ForkKind::Snapshot),
        "destroy" | "destroy-log" => sr.destroy(ctx, vdi),
        "destroy-data" => sr.destroy_data(ctx, vdi).map(drop),
        "cbt-enable" => sr.track_changes(ctx, vdi, true).map(drop),
        "cbt-disable" => sr.track_changes(ctx, vdi, false).map(drop),
        "cbt-unusable" => {
            sr.activate(ctx, vdi, Access::ReadWrite)?;
            sr.deactivate(ctx, vdi)
        }
        "fill" => {
            let from = sr.activate(ctx, vdi, Access::ReadOnly)?.chain;
            let done = sr.fill(ctx, other, &from, None);
            sr.deactivate(ctx, vdi).and(done)
        }
        "room-thin" => make_room(sr, ctx, &[vdi]),
        "room-two-thin" => make_room(sr, ctx, &[vdi, other]),
        "spare-thin" => take_room(sr, ctx, vdi),
        "write-thin" => {
            write(sr, vdi, 2 * MIB, 4);
            Ok(())
        }
        _ if change.starts_with("merge") => merge_down(sr, ctx, vdi),
        _ if change.starts_with("leaf") => merge_leaf(sr, ctx, vdi),
        _ => panic!("no change is called {change}"),
    }
}

/// A second running disk, which is made if it is not there.
fn second(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(Arc<Disk>, OpenSpec), ApiError> {
    if sr.vdi(ctx, vdi).is_err() {
        sr.create(ctx, &NewVdi { uuid: vdi, name_label: "second".into(), ..new_vdi(24 * MIB, "vhd") })?;
    }
    let with = sr.activate(ctx, vdi, Access::ReadWrite)?;
    let disk = Arc::new(Disk::start(&with));
    disk.write(LIVE_AT, 8);
    ctx.live.lock().unwrap().insert(vdi, Arc::clone(&disk));
    Ok((disk, with))
}

/// The volumes of running disks become longer by an extent each.
fn make_room(sr: &dyn Sr, ctx: &Watch, vdis: &[Uuid]) -> Result<(), ApiError> {
    let (mut wanted, mut expected) = (Vec::new(), Vec::new());
    for vdi in vdis {
        let len = sr.vdi(ctx, *vdi)?.physical_utilisation;
        wanted.push(RoomWanted { vdi: *vdi, len: len + 1 });
        expected.push((*vdi, len + 4 * MIB));
    }
    let made = sr.make_room(ctx, &wanted)?;
    assert!(!made.is_full && !made.is_short && made.refused.is_empty(), "{made:?}");
    let longer: Vec<_> = made.longer.iter().map(|info| (info.uuid, info.physical_utilisation)).collect();
    assert_eq!(longer, expected, "{made:?}");
    // What is said of them is what is there.
    for info in &made.longer {
        assert_eq!(&sr.vdi(ctx, info.uuid)?, info);
    }
    Ok(())
}

/// The volume of the running disk becomes as short as its image.
fn take_room(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(), ApiError> {
    let disk = Arc::clone(&ctx.live.lock().unwrap()[&vdi]);
    let enough = disk.open.lock().unwrap().as_ref().expect("it runs").1.physical_len();
    let len = sr.vdi(ctx, vdi)?.physical_utilisation;
    let taken = sr.take_room(ctx, &[RoomSpare { vdi, enough }])?;
    assert!(taken.refused.is_empty(), "{taken:?}");
    let shorter: Vec<_> = taken.shorter.iter().map(|info| (info.uuid, info.physical_utilisation)).collect();
    let to = enough.next_multiple_of(4 * MIB);
    assert!(shorter == [(vdi, to)] && to < len, "{taken:?}, before {len}");
    // No more of it is worth a change.
    assert_eq!(sr.take_room(ctx, &[RoomSpare { vdi, enough }])?, tapio_sm::RoomTaken::default());
    Ok(())
}

/// The base copy below the VDI goes into its own parent, if it has one still.
fn merge_down(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(), ApiError> {
    let Some(image) = sr.vdi(ctx, vdi)?.parent else { return Ok(()) };
    let Some(parent) = sr.vdi(ctx, image)?.parent else { return Ok(()) };
    let merge = merge_of(sr, ctx, image, parent)?;
    assert!(!sr.merge_cost(ctx, &merge)?.must_grow);
    sr.merge(ctx, &merge, 0)?;
    let merged = sr.relink(ctx, &merge)?;
    assert_eq!(merged.gone, [image]);
    Ok(())
}

/// The VDI goes into its parent, if it has one still.
fn merge_leaf(sr: &dyn Sr, ctx: &Watch, vdi: Uuid) -> Result<(), ApiError> {
    let Some(parent) = sr.vdi(ctx, vdi)?.parent else { return Ok(()) };
    let merge = merge_of(sr, ctx, vdi, parent)?;
    assert_eq!(sr.merge_leaf(ctx, &merge)?.gone, [parent]);
    Ok(())
}

fn data(sr: &dyn Sr, vdi: Uuid) -> [u8; 2] {
    [0, 4 * MIB].map(|at| read(sr, vdi, at))
}

/// Everything that must hold after a kill, whether the change happened or not; then the change is made again.
pub fn check(before: &Before, change: &str, what: &str) {
    let Before { place, vdi, beside, other, .. } = before;
    let ctx = Watch::default();
    let attached = place.attach(&ctx);
    let sr = attached.as_ref();
    let _ = sr.scan(&ctx);
    if change == "introduce" && place.names().iter().any(|name| name == "foreign") {
        // It is none of the SR's until it is introduced.
        sr.introduce(&ctx, *other, "foreign").unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let found = place.check(sr, what);
    let has_data = |vdi: &Uuid| found.iter().any(|info| info.uuid == *vdi && !info.is_metadata);
    let managed = |vdi: &Uuid| found.iter().any(|info: &VdiInfo| info.uuid == *vdi && info.managed);
    assert!(managed(beside) && read(sr, *beside, 0) == 3, "{what}: the VDI beside");
    if !change.starts_with("destroy") || has_data(vdi) {
        assert!(managed(vdi), "{what}: the VDI is gone");
        assert_eq!(data(sr, *vdi), [1, 2], "{what}");
    }
    if change.starts_with("destroy-") {
        assert_eq!([read(sr, before.origin, MIB), data(sr, before.origin)[1]], [7, 2], "{what}");
    }
    if change.starts_with("fork") && managed(other) {
        assert_eq!(data(sr, *other), [1, 2], "{what}");
    }
    if change.ends_with("-live") {
        assert_eq!(read(sr, before.origin, LIVE_AT), 8, "{what}: what the guest wrote");
    }
    if change.starts_with("merge") || change.starts_with("leaf") {
        assert_eq!([512, 6 * MIB].map(|at| read(sr, *vdi, at)), [5, 6], "{what}");
        if change.starts_with("merge") {
            assert_eq!([512, 6 * MIB].map(|at| read(sr, *other, at)), [5, 6], "{what}");
            assert_eq!(data(sr, *other), [1, 2], "{what}");
        }
    }
    again(before, sr, change, managed(vdi), managed(other))
        .unwrap_or_else(|error| panic!("{what}, again: {error}"));
    place.check(sr, &format!("{what}, again"));
    match change {
        "destroy" | "destroy-log" | "destroy-log-live" => assert!(sr.vdi(&ctx, *vdi).is_err(), "{what}"),
        "destroy-data" => assert!(sr.vdi(&ctx, *vdi).unwrap().is_metadata, "{what}"),
        _ if change.starts_with("resize") => {
            assert_eq!(sr.vdi(&ctx, *vdi).unwrap().virtual_size, 24 * MIB, "{what}");
            assert_eq!(read(sr, *vdi, 23 * MIB), 0, "{what}: what came is zero");
            write(sr, *vdi, 23 * MIB, 7);
            assert_eq!(data(sr, *vdi), [1, 2], "{what}");
        }
        "introduce" => assert_eq!(read(sr, *other, 0), 6, "{what}"),
        "thin" => {
            // The next attach knows it by the SR alone.
            let new = make(sr, 64 * MIB, "vhd");
            drop(attached);
            let sr = place.attach(&ctx);
            let shapes = [*vdi, *beside, new].map(|vdi| {
                let info = sr.vdi(&ctx, vdi).unwrap();
                (info.sm_config["allocation"].clone(), info.physical_utilisation < info.virtual_size)
            });
            let (thick, thin) = (("thick".to_owned(), false), ("thin".to_owned(), true));
            assert_eq!(shapes, [thick.clone(), thick, thin], "{what}");
            sr.destroy(&ctx, new).unwrap();
            drop(sr);
            return check_written(before, place.attach(&ctx).as_ref(), change, what);
        }
        "create-raw" | "create-vhd" => {
            assert_eq!(data(sr, *other), [0, 0], "{what}");
            write(sr, *other, 7 * MIB, 1);
        }
        _ if change.starts_with("room") => {
            assert_eq!(ROOM_AT.map(|at| read(sr, *vdi, at)), [4; 3], "{what}");
            if change.starts_with("room-two") {
                assert_eq!(ROOM_AT.map(|at| read(sr, *other, at)), [4; 3], "{what}");
                assert_eq!([0, 512].map(|more| read(sr, *other, LIVE_AT + more)), [8, 0], "{what}");
            }
        }
        "write-thin" => assert_eq!(read(sr, *vdi, 2 * MIB), 4, "{what}"),
        "fork-single" => {}
        _ if change.starts_with("fork") || change == "fill" => {
            assert_eq!(data(sr, *other), [1, 2], "{what}");
        }
        _ => {}
    }
    check_written(before, sr, change, what);
}

/// Goes on with it.
fn check_written(before: &Before, sr: &dyn Sr, change: &str, what: &str) {
    let place = &before.place;
    if is_tracked(change) || change.starts_with("cbt") {
        check_log(before, sr, change, what);
    }
    if change != "destroy" {
        let vdi = before.origin;
        write(sr, vdi, 6 * MIB, 9);
        assert_eq!([data(sr, vdi)[1], read(sr, vdi, 6 * MIB)], [2, 9], "{what}");
    }
    place.check(sr, &format!("{what}, written"));
}

/// What changed, by the blocks of 64 KiB.
fn changed(sr: &dyn Sr, from: Uuid, to: Uuid) -> Result<BTreeSet<u64>, ApiError> {
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
    if change.starts_with("cbt") {
        assert!(changed(sr, first, last.uuid).is_err(), "{what}");
        return;
    }
    let changed = changed(sr, first, last.uuid).unwrap_or_else(|error| panic!("{what}: {error}"));
    let wanted = [64].into_iter().chain(change.starts_with("destroy").then_some(16));
    let wanted = wanted.chain(change.starts_with("resize").then_some(23 * 16));
    let wanted: BTreeSet<u64> = wanted.chain(change.ends_with("-live").then_some(LIVE_AT / 65536)).collect();
    assert!(changed.is_superset(&wanted), "{what}: {changed:?}");
    // A process that dies loses what it had not written back; else nothing but the changes is known.
    assert!(changed == wanted || change.ends_with("-live"), "{what}: {changed:?}");
}

/// The same change once more, as far as it has not happened.
fn again(before: &Before, sr: &dyn Sr, change: &str, has_vdi: bool, has_other: bool) -> Result<(), ApiError> {
    let ctx = Watch::default();
    match change {
        "create-vhd" | "create-raw" | "introduce" if has_other => Ok(()),
        _ if change.starts_with("fork") && change != "fork-single" && has_other => Ok(()),
        "destroy" | "destroy-log" | "destroy-log-live" if !has_vdi => Ok(()),
        _ => run(sr, &ctx, change, [before.vdi, before.other, before.origin], &|| ()),
    }
}

/// The device config in a word.
pub fn said(config: &Config) -> String {
    config.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(";")
}

pub fn heard(text: &str) -> Config {
    let pair = |word: &str| word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    text.split(';').filter_map(pair).collect()
}
