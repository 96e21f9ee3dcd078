//! Repairs of the doctor's that are killed: the next start, and the same repair once more, finish them.

use tapio_format::vhd::offline::Chain;

use crate::kill::{collect, first_vbd, for_each, log, perform, run, vm};
use crate::rig::{MIB, Rig};

/// What a diagnosis finds, but for settings of the host that runs the test.
fn findings(rig: &Rig) -> Vec<serde_json::Value> {
    let host = rig.stack.db.all("host")[0].reference.clone();
    let answer = rig.text("host.diagnose", vec![host.into()]);
    let found: Vec<serde_json::Value> = serde_json::from_str(&answer).expect("findings");
    let own = ["cpu-", "disk-", "write-cache-", "log-", "sr-nearly-", "network-"];
    let is_own = |kind: &str| own.iter().any(|own| kind.starts_with(own));
    found.into_iter().filter(|one| !one["kind"].as_str().is_some_and(is_own)).collect()
}

/// A repair of the doctor's that is killed at a step: the next start, and the same repair once more, leave nothing to
/// be found, and the disk holds what it held.
fn killed_in_a_repair(task: &'static str, step: &str) {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dir = scratch.path();
    let status = run(dir, task, Some(step));
    assert_eq!(status, 137, "{task} does not come to {step}: {}", log(dir));
    let rig = Rig::again(dir);
    let vdi = rig.get("VBD", &first_vbd(&rig)).text("VDI").to_owned();
    let sr = rig.get("VDI", &vdi).text("SR").to_owned();
    rig.call("SR.scan", vec![sr.into()]);
    collect(&rig);
    let left = findings(&rig);
    assert!(left.is_empty(), "{task} {step}: {left:?}");
    assert_eq!(rig.get("VDI", &vdi).int("virtual_size"), 4 * MIB, "{task} {step}");
    let mut sector = [0; 512];
    Chain::open(&rig.file(&vdi)).expect("its chain").read_at(0, &mut sector).expect("in it");
    assert_eq!(sector, [b'a'; 512], "{task} {step}");
    // What had no record has one: no image is lost.
    let images = std::fs::read_dir(dir.join("sr")).expect("the SR's directory").flatten();
    let names: Vec<_> = images.map(|image| image.file_name()).collect();
    let is_image = |name: &&std::ffi::OsString| name.to_string_lossy().ends_with(".vhd");
    assert_eq!(names.iter().filter(is_image).count(), 3, "{task} {step}: {names:?}");
    assert_eq!(rig.stack.db.all("VDI").len(), 3, "{task} {step}");
    rig.check_real();
}

#[test]
fn a_repair_that_is_killed_is_finished() {
    // Four leftovers of kills are put in order one after the other.
    let mut stories: Vec<(&str, String)> =
        (1..=4).map(|number| ("sr-scan", format!("recover:some:{number}"))).collect();
    // The SR is scanned when it is made, when it is attached, and for the repair.
    stories.push(("sr-scan", "sr-scan:seen:2".to_owned()));
    stories.push(("sr-collect", "gc:garbage-gone".to_owned()));
    for_each(stories, |(task, step)| killed_in_a_repair(task, &step));
}

#[test]
fn a_release_that_is_killed_is_finished() {
    for step in [Some("vdi-deactivate:closed"), None] {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path();
        assert_eq!(run(dir, "vm-start", None), 0, "{}", log(dir));
        let status = run(dir, "vdi-release", step);
        assert_eq!(status, if step.is_some() { 137 } else { 0 }, "{}", log(dir));
        let rig = Rig::again(dir);
        rig.check_real();
        let left = findings(&rig);
        assert!(left.is_empty(), "{step:?}: {left:?}");
        // The guest runs and has the other disk; the released one can be plugged again.
        assert_eq!(rig.get("VM", &vm(&rig)).text("power_state"), "Running");
        perform(&rig, "vbd-plug");
        rig.check_real();
        perform(&rig, "vm-shutdown");
        rig.check_real();
    }
}
