//! Garbage collections of SRs: what they do, what switches them off, and to what they give way.

use std::time::{Duration, Instant};

use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_model::Value;

use super::faulty;
use super::rig::{MIB, Rig};

/// Collections begin when they are asked for.
const LATE: (&str, &str) = ("gc-quiet", "100000");

fn set(rig: &Rig, sr: &str, config: &[(&str, &str)]) {
    let config = Value::string_map(config.iter().copied());
    rig.call("SR.set_other_config", vec![sr.into(), config]).expect("they can be");
}

/// Writes a sector of a disk that is not in use.
fn write(rig: &Rig, vdi: &str, at: i64, byte: u8) {
    let mut image = Image::open(&rig.file("sr", vdi), OpenOptions::WRITE).expect("its image");
    image.write_at(at as u64, &[byte; 512]).and_then(|()| image.finish()).expect("room");
}

/// The first bytes of each of the first megabytes of a disk that is not in use.
fn read(rig: &Rig, vdi: &str, count: i64) -> Vec<u8> {
    let chain = Chain::open(&rig.file("sr", vdi)).expect("its chain");
    let mut sector = [0; 512];
    let mut at = |at: i64| {
        chain.read_at((at * MIB) as u64, &mut sector).expect("in it");
        sector[0]
    };
    (0..count).map(&mut at).collect()
}

fn lines(rig: &Rig, sr: &str, only_look: bool) -> Vec<String> {
    let found = rig.call("SR.collect_garbage", vec![sr.into(), only_look.into()]).expect("it is attached");
    let found = found.as_set().expect("lines").iter();
    found.map(|line| line.as_str().expect("text").to_owned()).collect()
}

fn wait(rig: &Rig, sr: &str) {
    let until = Instant::now() + Duration::from_secs(180);
    while rig.stack.storage.is_collecting(sr) {
        assert!(Instant::now() < until, "the collection does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Collects an SR; answers what was said about it before.
pub(crate) fn collect(rig: &Rig, sr: &str) -> Vec<String> {
    let lines = lines(rig, sr, false);
    wait(rig, sr);
    lines
}

/// Status and result of each collection so far.
fn tasks(rig: &Rig) -> Vec<(String, String)> {
    let tasks = rig.stack.db.all("task").into_iter();
    let tasks = tasks.filter(|task| task.text("name_label") == "Garbage Collection");
    tasks.map(|task| (task.text("status").to_owned(), task.text("result").to_owned())).collect()
}

/// A disk that was written and snapshotted in turn: megabyte `n` holds `n + 1` since before snapshot `n`.
fn tower(rig: &Rig, sr: &str, height: i64) -> (String, Vec<String>) {
    let vdi = rig.make_vdi(sr, 8 * MIB);
    let grow = |at: i64| {
        write(rig, &vdi, at * MIB, at as u8 + 1);
        rig.snapshot(&vdi)
    };
    let snapshots = (0..height).map(grow).collect();
    (vdi, snapshots)
}

fn destroy<'a>(rig: &Rig, vdis: impl IntoIterator<Item = &'a String>) {
    for vdi in vdis {
        rig.call("VDI.destroy", vec![vdi.as_str().into()]).expect("it is not in use");
    }
}

#[test]
fn chains_become_short_and_every_byte_stays() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    set(&rig, &sr, &[LATE]);
    let (vdi, snapshots) = tower(&rig, &sr, 6);
    let kept = snapshots[2].clone();
    destroy(&rig, snapshots.iter().filter(|snapshot| **snapshot != kept));
    assert_eq!(rig.images("sr").len(), 6 + 2);
    let said = lines(&rig, &sr, true);
    assert!(said.iter().any(|line| line.contains("merge base copy")), "{said:?}");
    let forecast = said.last().expect("lines");
    assert!(forecast.starts_with("in all: ") && forecast.contains(" bytes given back"), "{said:?}");
    assert!(!rig.stack.storage.is_collecting(&sr), "a dry run does nothing");
    collect(&rig, &sr);
    let right = |vdi: &str, wanted: [u8; 7]| assert_eq!(read(&rig, vdi, 7), wanted);
    right(&vdi, [1, 2, 3, 4, 5, 6, 0]);
    right(&kept, [1, 2, 3, 0, 0, 0, 0]);
    assert_eq!(rig.images("sr").len(), 3, "the disk, its snapshot, what they share");
    rig.check(&sr, "sr");
    assert_eq!(rig.vdi(&vdi).text("parent"), rig.vdi(&kept).text("parent"));
    let task = rig.stack.db.find("task", "name_label", "Garbage Collection").pop().expect("its task");
    let description = task.text("name_description");
    assert!(description.contains("in all: ") && description.contains(" bytes are free"), "{description}");
    let [(status, result)] = &*tasks(&rig) else { panic!("one task: {:?}", tasks(&rig)) };
    assert_eq!(status, "success");
    assert!(result.contains("merge base copy") && result.contains("merge VDI"), "{result}");
    destroy(&rig, [&kept]);
    collect(&rig, &sr);
    right(&vdi, [1, 2, 3, 4, 5, 6, 0]);
    assert_eq!(rig.images("sr").len(), 1, "it stands alone");
    rig.check(&sr, "sr");
    assert!(collect(&rig, &sr).is_empty());
    assert_eq!(tasks(&rig).len(), 2, "none where nothing is to be done");
}

#[test]
fn a_collection_begins_some_time_after_a_change() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    set(&rig, &sr, &[LATE]);
    let (vdi, snapshots) = tower(&rig, &sr, 3);
    destroy(&rig, &snapshots);
    assert!(!rig.stack.storage.is_collecting(&sr), "not yet");
    assert_eq!(rig.images("sr").len(), 4);
    set(&rig, &sr, &[("gc-quiet", "0")]);
    faulty::until("a collection", || rig.images("sr").len() == 1);
    wait(&rig, &sr);
    assert_eq!(read(&rig, &vdi, 4), [1, 2, 3, 0]);
    rig.check(&sr, "sr");
}

#[test]
fn what_is_switched_off_stays() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    set(&rig, &sr, &[LATE]);
    let (vdi, snapshots) = tower(&rig, &sr, 3);
    destroy(&rig, &snapshots);
    let before = rig.images("sr");
    for key in ["gc", "coalesce"] {
        set(&rig, &sr, &[LATE, (key, "false")]);
        let said = collect(&rig, &sr);
        let wanted = format!("switched off by other_config:{key}=false");
        assert!(said.iter().all(|line| line.contains(&wanted)) && !said.is_empty(), "{said:?}");
        assert_eq!(rig.images("sr"), before);
    }
    set(&rig, &sr, &[LATE, ("leaf-coalesce", "false")]);
    collect(&rig, &sr);
    assert_eq!(rig.images("sr").len(), 2, "the disk, and the base copy that it stays on");
    set(&rig, &sr, &[LATE]);
    let off = vec![vdi.as_str().into(), "leaf-coalesce".into(), "false".into()];
    rig.call("VDI.add_to_sm_config", off).expect("it can be");
    let said = collect(&rig, &sr);
    assert!(said.len() == 1 && said[0].contains("sm_config:leaf-coalesce=false"), "{said:?}");
    assert_eq!(rig.images("sr").len(), 2);
    for (key, value) in [("gc-quiet", "soon"), ("gc-rate", "-1")] {
        let config = Value::string_map([(key, value)]);
        let (code, params) = rig.refused("SR.set_other_config", vec![sr.as_str().into(), config]);
        assert_eq!(
            (&*code, params),
            ("INVALID_VALUE", vec![format!("other_config:{key}"), value.to_owned()])
        );
    }
    rig.check(&sr, "sr");
}

#[test]
fn a_collection_is_cancelled_and_gives_way() {
    let (rig, plan, sr) = faulty::rig();
    set(&rig, &sr, &[LATE]);
    let (vdi, snapshots) = tower(&rig, &sr, 4);
    destroy(&rig, &snapshots[..3]);
    let begin = || {
        plan.hold("merge");
        lines(&rig, &sr, false);
        plan.wait_for("merge");
    };
    begin();
    let task =
        rig.stack.db.all("task").into_iter().find(|task| task.text("name_label") == "Garbage Collection");
    let task = task.expect("its task");
    // What clients do goes on.
    let more = rig.snapshot(&vdi);
    let copy = rig.text("VDI.copy", Rig::copy_params(&more, &sr)).expect("readers and a merge go together");
    assert_eq!(read(&rig, &copy, 5), [1, 2, 3, 4, 0]);
    destroy(&rig, [&copy]);
    rig.call("task.cancel", vec![task.reference.as_str().into()]).expect("it can be");
    wait(&rig, &sr);
    assert_eq!(tasks(&rig).last().expect("a task").0, "cancelled");
    rig.check(&sr, "sr");
    plan.heal();
    // The images of the merge go.
    begin();
    destroy(&rig, snapshots[3..].iter().chain([&vdi, &more]));
    wait(&rig, &sr);
    plan.heal();
    wait(&rig, &sr);
    rig.check(&sr, "sr");
    assert!(rig.images("sr").is_empty(), "{:?}", rig.images("sr"));
    // The SR goes.
    let (vdi, snapshots) = tower(&rig, &sr, 3);
    destroy(&rig, &snapshots[..2]);
    begin();
    let pbd = rig.pbd(&sr);
    rig.call("PBD.unplug", vec![pbd.as_str().into()]).expect("a collection is no use of it");
    assert!(!rig.stack.storage.is_collecting(&sr));
    plan.heal();
    rig.call("PBD.plug", vec![pbd.as_str().into()]).expect("it is there");
    collect(&rig, &sr);
    assert_eq!(read(&rig, &vdi, 4), [1, 2, 3, 0]);
    assert_eq!(rig.images("sr").len(), 3);
    rig.check(&sr, "sr");
}

#[test]
fn a_copy_keeps_its_chain() {
    let (rig, plan, sr) = faulty::rig();
    set(&rig, &sr, &[LATE]);
    let (_, snapshots) = tower(&rig, &sr, 3);
    destroy(&rig, &snapshots[..2]);
    let before = rig.images("sr").len();
    plan.hold("fill");
    let task = rig.text("Async.VDI.copy", Rig::copy_params(&snapshots[2], &sr)).expect("a task");
    plan.wait_for("fill");
    let said = collect(&rig, &sr);
    assert!(said.iter().any(|line| line.contains("a copy, an export or an import")), "{said:?}");
    assert_eq!(rig.images("sr").len(), before + 1, "the copy's beside those of before");
    set(&rig, &sr, &[("gc-quiet", "0")]);
    plan.heal();
    faulty::until("the copy", || rig.get("task", &task).text("status") == "success");
    faulty::until("a collection after it", || rig.images("sr").len() == 4);
    wait(&rig, &sr);
    rig.check(&sr, "sr");
}

#[test]
fn a_job_that_fails_is_put_off_and_told() {
    let (rig, plan, sr) = faulty::rig();
    set(&rig, &sr, &[LATE]);
    let (vdi, snapshots) = tower(&rig, &sr, 3);
    destroy(&rig, &snapshots);
    for op in ["merge", "relink"] {
        plan.fail(op);
        // Else the disk goes down its chain, base copy by base copy.
        plan.fail("merge_leaf");
        collect(&rig, &sr);
        let (status, result) = tasks(&rig).pop().expect("a task");
        assert_eq!(status, "success", "{op}: it did what it could");
        assert!(result.contains("the cable is out"), "{op}: {result}");
        assert_eq!(read(&rig, &vdi, 4), [1, 2, 3, 0], "{op}");
        rig.check(&sr, "sr");
        plan.heal();
    }
    collect(&rig, &sr);
    assert_eq!(rig.images("sr").len(), 1);
    assert_eq!(read(&rig, &vdi, 4), [1, 2, 3, 0]);
    rig.check(&sr, "sr");
}

#[test]
fn products_trim_and_merge_by_the_names_of_plugins() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    set(&rig, &sr, &[LATE]);
    let host = rig.stack.db.all("host")[0].reference.clone();
    let plugin = |plugin: &str, name: &str, args: &[(&str, &str)]| {
        let args = Value::string_map(args.iter().copied());
        rig.call("host.call_plugin", vec![host.as_str().into(), plugin.into(), name.into(), args])
            .map(|said| said.as_str().expect("text").to_owned())
    };
    let (vdi, snapshots) = tower(&rig, &sr, 3);
    let (other, others) = tower(&rig, &sr, 2);
    let vm = rig.text("VM.create", vec![Value::Map([("name_label".to_owned(), "a".into())].into())]);
    let vm = vm.expect("a VM");
    let record = [("VM", vm.as_str()), ("VDI", &vdi), ("userdevice", "0"), ("mode", "RW"), ("type", "Disk")];
    let record = record.map(|(key, value)| (key.to_owned(), Value::string(value)));
    rig.text("VBD.create", vec![Value::Map(record.into_iter().collect())]).expect("a VBD");
    let of_vm = rig.get("VM", &vm).text("uuid").to_owned();
    destroy(&rig, &snapshots);
    // It says what is in its way, and waits until it is done.
    set(&rig, &sr, &[LATE, ("leaf-coalesce", "false")]);
    let refused = plugin("coalesce-leaf", "leaf-coalesce", &[("vm_uuid", &of_vm)]).expect_err("it is off");
    assert_eq!(refused.code, "XENAPI_PLUGIN_FAILURE");
    let vdi_uuid = rig.vdi(&vdi).text("uuid").to_owned();
    assert!(
        refused.params[2].contains(&vdi_uuid) && refused.params[2].contains("leaf-coalesce"),
        "{refused}"
    );
    set(&rig, &sr, &[LATE]);
    assert_eq!(plugin("coalesce-leaf", "leaf-coalesce", &[("vm_uuid", &of_vm)]), Ok("Success".to_owned()));
    assert!(rig.vdi(&vdi).is_null("parent"), "it stands alone");
    assert_eq!(read(&rig, &vdi, 4), [1, 2, 3, 0]);
    assert_eq!(read(&rig, &other, 3), [1, 2, 0]);
    assert_eq!(plugin("coalesce-leaf", "leaf-coalesce", &[("vm_uuid", &of_vm)]), Ok("Success".to_owned()));
    // Files have nothing to trim: an answer that products know.
    let sr_uuid = rig.get("SR", &sr).text("uuid").to_owned();
    let said = plugin("trim", "do_trim", &[("sr_uuid", &sr_uuid)]).expect("an answer");
    assert!(said.contains("<key>errcode</key><value>UnsupportedSRForTrim</value>"), "{said}");
    assert!(said.contains(&format!("<value>Trim on [{sr_uuid}] not supported</value>")), "{said}");
    // What is not there.
    for (name, function, code, says) in [
        ("raid.py", "check_raid_pool", "XENAPI_MISSING_PLUGIN", "raid.py"),
        ("trim", "no", "XENAPI_PLUGIN_FAILURE", "UNKNOWN_XENAPI_PLUGIN_FUNCTION"),
        ("trim", "do_trim", "XENAPI_PLUGIN_FAILURE", "non-zero exit"),
    ] {
        let error = plugin(name, function, &[]).expect_err(name);
        assert_eq!((&*error.code, &*error.params[0]), (code, says));
    }
    let error = plugin("trim", "do_trim", &[("sr_uuid", "no")]).expect_err("no such SR");
    assert_eq!(error.code, "UUID_INVALID");
    assert_eq!(others.len(), 2);
    rig.check(&sr, "sr");
}

/// A snapshot comes while the merge copies, and another at the moment before chains change; both hold what they must.
#[test]
fn snapshots_come_in_the_middle_of_a_merge() {
    let (rig, plan, sr) = faulty::rig();
    set(&rig, &sr, &[LATE]);
    for op in ["merge", "relink", "merge_leaf"] {
        let (vdi, snapshots) = tower(&rig, &sr, 4);
        destroy(&rig, &snapshots[..3]);
        let kept = if op == "merge_leaf" { &[][..] } else { &snapshots[3..] };
        if op == "merge_leaf" {
            destroy(&rig, &snapshots[3..]);
        }
        plan.hold(op);
        lines(&rig, &sr, false);
        plan.wait_for(op);
        let task = Value::Map(std::collections::BTreeMap::new());
        let task = rig.text("Async.VDI.snapshot", vec![vdi.as_str().into(), task]).expect("a task");
        plan.heal();
        faulty::until("the snapshot", || rig.get("task", &task).text("status") != "pending");
        let made = rig.get("task", &task);
        assert_eq!(made.text("status"), "success", "{op}: {:?}", made.get("error_info"));
        let made = made.text("result").trim_start_matches("<value>").trim_end_matches("</value>").to_owned();
        wait(&rig, &sr);
        write(&rig, &vdi, 5 * MIB, 9);
        assert_eq!(read(&rig, &made, 6), [1, 2, 3, 4, 0, 0], "{op}");
        assert_eq!(read(&rig, &vdi, 6), [1, 2, 3, 4, 0, 9], "{op}");
        collect(&rig, &sr);
        assert_eq!(read(&rig, &made, 6), [1, 2, 3, 4, 0, 0], "{op}");
        assert_eq!(read(&rig, &vdi, 6), [1, 2, 3, 4, 0, 9], "{op}");
        rig.check(&sr, "sr");
        destroy(&rig, kept.iter().chain([&vdi, &made]));
        collect(&rig, &sr);
        assert!(rig.images("sr").is_empty(), "{op}: {:?}", rig.images("sr"));
    }
}

/// An export and a copy begin while the merge copies, and at the moment before chains change: both hold what the VDI
/// held then.
#[test]
fn exports_and_copies_begin_in_the_middle_of_a_merge() {
    let (rig, plan, sr) = faulty::rig();
    set(&rig, &sr, &[LATE]);
    for op in ["merge", "relink", "merge_leaf"] {
        let (vdi, snapshots) = tower(&rig, &sr, 4);
        // Of the disk alone, a leaf goes into its base copy; of a snapshot, base copies go into each other.
        let (of, gone) =
            if op == "merge_leaf" { (&vdi, &snapshots[..]) } else { (&snapshots[3], &snapshots[..3]) };
        destroy(&rig, gone);
        write(&rig, &vdi, 5 * MIB, 9);
        let held: &[u8] = if op == "merge_leaf" { &[1, 2, 3, 4, 0, 9] } else { &[1, 2, 3, 4, 0, 0] };
        plan.hold(op);
        lines(&rig, &sr, false);
        plan.wait_for(op);
        let copy = rig.text("Async.VDI.copy", Rig::copy_params(of, &sr)).expect("a task");
        let exported = std::thread::scope(|scope| {
            let exporting = scope.spawn(|| rig.export(of));
            if op == "merge" {
                // Readers and a merge go together: both end before it does.
                faulty::until("the copy", || rig.get("task", &copy).text("status") != "pending");
                faulty::until("the export", || exporting.is_finished());
            }
            plan.heal();
            exporting.join().expect("no panic")
        });
        let bytes: Vec<u8> = (0..6).map(|at| exported[(at * MIB) as usize]).collect();
        assert_eq!(bytes, held, "{op}: an export");
        faulty::until("the copy", || rig.get("task", &copy).text("status") != "pending");
        let copied = rig.get("task", &copy);
        assert_eq!(copied.text("status"), "success", "{op}: {:?}", copied.get("error_info"));
        let copied =
            copied.text("result").trim_start_matches("<value>").trim_end_matches("</value>").to_owned();
        wait(&rig, &sr);
        assert_eq!(read(&rig, &copied, 6), held, "{op}: a copy");
        collect(&rig, &sr);
        assert_eq!(read(&rig, of, 6), held, "{op}");
        assert_eq!(rig.export(of).len(), exported.len(), "{op}");
        rig.check(&sr, "sr");
        let kept = if op == "merge_leaf" { &[][..] } else { &snapshots[3..] };
        destroy(&rig, kept.iter().chain([&vdi, &copied]));
        collect(&rig, &sr);
        assert!(rig.images("sr").is_empty(), "{op}: {:?}", rig.images("sr"));
    }
}
