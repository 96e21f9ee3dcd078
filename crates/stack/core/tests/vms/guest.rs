//! What guests report of themselves, and snapshots of guests that hold still; the guests are simulated.

use std::time::{Duration, Instant};

use tapio_model::Value;

use crate::rig::{MIB, Rig};

fn started(platform: &[(&str, &str)]) -> (Rig, String) {
    let rig = Rig::pretended();
    let (sr, vm) = (rig.make_sr(), rig.make_vm(platform));
    rig.make_vbd(&vm, &rig.make_vdi(&sr, MIB));
    rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
    (rig, vm)
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_frozen(rig: &Rig, vm: &str) -> bool {
    let uuid = rig.get("VM", vm).uuid().expect("a UUID").simple().to_string();
    rig.dir.join("run/vm").join(uuid).join("frozen").exists()
}

fn quiet(rig: &Rig, vm: &str) -> Result<Value, tapio_model::ApiError> {
    rig.try_call("VM.snapshot_with_quiesce", vec![vm.into(), "quiet".into()])
}

#[test]
fn a_guest_with_an_agent_is_known_while_it_runs() {
    let (rig, vm) = started(&[("sim-agent", "yes")]);
    let metrics = || rig.get("VM_guest_metrics", rig.get("VM", &vm).text("guest_metrics"));
    wait_for("the guest reports itself", || metrics().bool("live"));
    let known = metrics();
    assert_eq!(known.map("networks").get("0/ip").map(String::as_str), Some("192.0.2.5"));
    assert_eq!(known.map("os_version").get("name").map(String::as_str), Some("Simulated 1"));
    assert_eq!(known.map("os_version").get("major").map(String::as_str), Some("1"));
    assert_eq!(known.map("memory").get("total").map(String::as_str), Some("65536"));
    assert_eq!(known.map("disks").get("0").map(String::as_str), Some("vda,/,ext4"));
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    let known = metrics();
    assert!(!known.bool("live") && known.map("networks").is_empty(), "a VM that is off has no address");
    assert!(!known.map("os_version").is_empty(), "what it was is known");
}

#[test]
fn a_quiet_snapshot_is_of_a_guest_that_is_frozen_and_thaws() {
    let (rig, vm) = started(&[("sim-agent", "yes")]);
    let made = quiet(&rig, &vm).expect("a snapshot");
    let made = rig.get("VM", made.as_str().expect("a reference"));
    let info = made.map("snapshot_info");
    assert_eq!(info.get("disk-snapshot-type").map(String::as_str), Some("quiesced"));
    assert!(!is_frozen(&rig, &vm));
    rig.check(None);
    rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    assert_eq!(quiet(&rig, &vm).expect_err("it is off").code, "VM_BAD_POWER_STATE");
}

#[test]
fn a_guest_is_thawed_however_its_snapshot_ends() {
    for (agent, more, wanted) in [
        (None, ("", ""), Some("VM_SNAPSHOT_WITH_QUIESCE_NOT_SUPPORTED")),
        (Some("silent"), ("", ""), Some("VM_SNAPSHOT_WITH_QUIESCE_PLUGIN_DEOS_NOT_RESPOND")),
        // It thaws by itself: its snapshot is no better than another.
        (Some("short"), ("", ""), Some("VM_SNAPSHOT_WITH_QUIESCE_FAILED")),
        // It freezes, and says so too late.
        (Some("yes"), ("sim-freeze-ms", "1500"), Some("VM_SNAPSHOT_WITH_QUIESCE_PLUGIN_DEOS_NOT_RESPOND")),
        // It is asked to thaw until it does.
        (Some("sticky"), ("", ""), None),
    ] {
        let platform: Vec<_> = agent.map(|agent| ("sim-agent", agent)).into_iter().chain([more]).collect();
        let (rig, vm) = started(&platform);
        rig.call("VM.add_to_other_config", vec![vm.as_str().into(), "quiesce-timeout".into(), "1".into()]);
        let managed = || rig.stack.db.all("VDI").iter().filter(|vdi| vdi.bool("managed")).count();
        let before = managed();
        let asked = quiet(&rig, &vm);
        assert_eq!(asked.as_ref().err().map(|error| &*error.code), wanted, "{agent:?}: {asked:?}");
        wait_for("it thaws", || !is_frozen(&rig, &vm));
        wait_for("the note goes", || rig.stack.db.notes("machines/").is_empty());
        let kept = rig.stack.db.find("VM", "name_label", "quiet").len();
        assert_eq!(kept, usize::from(wanted.is_none()), "{agent:?}");
        if wanted.is_some() {
            assert_eq!(managed(), before, "{agent:?}: no disk is left");
        }
        rig.check(None);
    }
}

#[test]
fn guests_are_asked_for_what_they_can_do() {
    let (rig, vm) = started(&[("sim-agent", "yes")]);
    let ask = |plugin: &str, function: &str| {
        let args = Value::string_map::<&str, &str>([]);
        rig.refused("VM.call_plugin", vec![vm.as_str().into(), plugin.into(), function.into(), args])
    };
    assert_eq!(
        ask("guest-agent-operation", "trim").code,
        "VM_LACKS_FEATURE",
        "the simulated guest has no disks"
    );
    assert_eq!(ask("guest-agent-operation", "disk-stats").code, "VM_LACKS_FEATURE");
    assert_eq!(ask("guest-agent-operation", "format").code, "XENAPI_MISSING_PLUGIN");
}
