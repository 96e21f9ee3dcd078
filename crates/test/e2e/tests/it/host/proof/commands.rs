//! `xe` beyond what one object needs: repositories, plugging, tasks and their timelines, output to the column, and
//! completion by a real bash.

use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, poll_until, run};
use tapio_e2e::tools::our;
use tapio_e2e::world::World;

fn xe(world: &World, words: &[&str]) -> Finished {
    run(world.xe().args(words))
}

#[track_caller]
fn value(world: &World, words: &[&str]) -> String {
    let out = xe(world, words).ok();
    out.strip_suffix('\n').unwrap_or_else(|| panic!("{words:?} printed {out:?}")).to_owned()
}

/// Checks the columns of records as `xe` has always printed them: the first field's name begins at the left, those of
/// the others end where the widest one does, four columns in; two empty lines come after each record.
#[track_caller]
fn assert_columns(printed: &str, records: usize) {
    let parts: Vec<&str> = printed.split_terminator("\n\n\n").collect();
    assert_eq!(parts.len(), records, "{printed:?}");
    assert!(printed.ends_with("\n\n\n"), "{printed:?}");
    for record in parts {
        let fields: Vec<(&str, &str)> =
            record.lines().map(|line| line.split_once(": ").unwrap_or_else(|| panic!("{line:?}"))).collect();
        let width = fields.iter().map(|(name, _)| name.trim().len()).max().expect("some fields") + 4;
        for (number, (name, _)) in fields.iter().enumerate() {
            let expected = match number {
                0 => format!("{:<width$}", name.trim()),
                _ => format!("{:>width$}", name.trim()),
            };
            assert_eq!(*name, expected, "{record}");
            let marks = [" ( RO)", " ( RW)", " (SRO)", " (SRW)", " (MRO)", " (MRW)"];
            let name = name.trim().trim_end_matches(" [DEPRECATED]");
            assert!(marks.iter().any(|mark| name.ends_with(mark)), "{name}");
        }
    }
}

#[test]
fn a_repository_and_its_disks() {
    let world = World::new();
    let place = world.scratch.join("more");
    let location = format!("device-config:location={}", text(&place));
    let sr = value(&world, &["sr-create", "name-label=more disks", "type=file", &location]);
    let uuid = format!("uuid={sr}");
    let printed = xe(&world, &["sr-list", &uuid]).ok();
    assert_columns(&printed, 1);
    let host = value(&world, &["host-list", "params=name-label", "--minimal"]);
    let expected = format!(
        "uuid ( RO)                : {sr}\n          name-label ( RW): more disks\n    name-description ( RW): \n                host ( RO): {host}\n                type ( RO): file\n        content-type ( RO): \n\n\n"
    );
    assert_eq!(printed, expected);
    for list in ["sr-list", "sm-list", "pbd-list", "host-list", "pool-list", "template-list", "vm-list"] {
        let one = value(&world, &[list, "params=uuid", "--minimal"]);
        let count = one.split(',').filter(|uuid| !uuid.is_empty()).count();
        assert!(one.split(',').all(|uuid| uuid.len() == 36), "{list}: {one}");
        assert_columns(&xe(&world, &[list]).ok(), count);
        assert_columns(&xe(&world, &[list, "params=all"]).ok(), count);
    }
    // Filters narrow, and can be combined; what is not there prints nothing.
    let sr_uuid = format!("sr-uuid={sr}");
    let make = |label: &str, size: &str| {
        let (label, size) = (format!("name-label={label}"), format!("virtual-size={size}"));
        value(&world, &["vdi-create", &sr_uuid, &label, &size])
    };
    let (one, two) = (make("one, two", "8MiB"), make("back\\slash", "8192kib"));
    assert_eq!(
        value(&world, &["vdi-list", &sr_uuid, "virtual-size=8388608", "--minimal"]).split(',').count(),
        2
    );
    assert_eq!(value(&world, &["vdi-list", &sr_uuid, "name-label=one, two", "--minimal"]), one);
    assert_eq!(
        value(&world, &["vdi-list", &format!("uuid={one}"), "params=name-label", "--minimal"]),
        "one\\, two"
    );
    assert_eq!(
        value(&world, &["vdi-list", &format!("uuid={two}"), "params=name-label", "--minimal"]),
        "back\\\\slash"
    );
    assert_eq!(xe(&world, &["vdi-list", "sr-name-label=nothing"]).ok(), "");
    // Only what its PBDs let go can be forgotten, and a scan finds it all again.
    let refused = xe(&world, &["sr-forget", &uuid]);
    assert_eq!((refused.status.code(), refused.stdout.as_str()), (Some(1), ""));
    assert!(refused.fails().contains(&sr), "it is named");
    assert_eq!(xe(&world, &["sr-scan", &uuid]).ok(), "");
    garbage_of_an_sr(&world, &uuid, &one);
    for vdi in [&one, &two] {
        assert_eq!(xe(&world, &["vdi-destroy", &format!("uuid={vdi}")]).ok(), "");
    }
    let probed = xe(&world, &["sr-probe", "type=file", &location]).ok();
    assert!(probed.contains("<SRlist>") && probed.contains(&sr), "{probed}");
    assert_eq!(xe(&world, &["sr-destroy", &uuid]).ok(), "");
    let gone = xe(&world, &["sr-scan", &uuid]);
    assert_eq!((gone.status.code(), gone.stdout.as_str()), (Some(1), ""));
    assert!(gone.stderr.contains(&sr), "{gone}");
    world.finish();
}

/// A snapshot comes and goes; the base copy that it leaves goes into the disk.
fn garbage_of_an_sr(world: &World, sr: &str, vdi: &str) {
    assert_eq!(xe(world, &["sr-gc", sr]).ok(), "");
    let snapshot = value(world, &["vdi-snapshot", &format!("uuid={vdi}")]);
    assert_eq!(xe(world, &["vdi-destroy", &format!("uuid={snapshot}")]).ok(), "");
    let planned = xe(world, &["sr-gc", sr, "dry-run=true"]).ok();
    assert!(planned.contains(&format!("merge VDI {vdi} into its base copy")), "{planned}");
    assert_eq!(xe(world, &["sr-gc", sr]).ok(), planned, "the dry run changed nothing");
    let is_over = || xe(world, &["sr-gc", sr, "dry-run=true"]).ok().is_empty().then_some(());
    assert!(poll_until(Duration::from_secs(60), is_over).is_some(), "it is never collected");
    let (host, uuid) = (value(world, &["host-list", "--minimal"]), sr.trim_start_matches("uuid="));
    let (host, of) = (format!("host-uuid={host}"), format!("args:sr_uuid={uuid}"));
    let said = value(world, &["host-call-plugin", &host, "plugin=trim", "fn=do_trim", &of]);
    assert!(said.contains("UnsupportedSRForTrim") && said.contains(uuid), "{said}");
    status_of_a_host(world, vdi, &host.replace("host-uuid=", "uuid="));
    assert_eq!(xe(world, &["host-evacuate", &host, "batch-size=4"]).ok(), "");
    let refused = xe(world, &["host-shutdown", &host]).fails();
    assert!(refused.contains("disable it first"), "{refused}");
    assert_eq!(xe(world, &["host-disable", &host]).ok(), "");
    let refused = xe(world, &["host-reboot", &host]).fails();
    assert!(refused.contains("host-power"), "{refused}");
    assert_eq!(xe(world, &["host-enable", &host]).ok(), "");
    let advice = xe(world, &["host-worker-pool", &host, "vms=3", "set=true"]).ok();
    let told = |name: &str| {
        let line = advice.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}: ")));
        line.and_then(|text| text.parse::<u64>().ok()).unwrap_or_else(|| panic!("no {name} in {advice}"))
    };
    assert_eq!((told("vms-at-a-time"), told("advised")), (3, (3 * told("disks-per-vm")).max(10)));
    let uuid = host.replace("host-uuid=", "uuid=");
    let config = value(world, &["host-param-get", &uuid, "param-name=other-config"]);
    assert!(config.contains(&format!("worker-pool-size: {}", told("advised"))), "{config}");
    let running = value(world, &["vm-list", "power-state=running", "is-control-domain=false", "--minimal"]);
    assert_eq!(running, "", "all VMs have ended");
    let done = value(world, &["task-list", "name-label=Garbage Collection", "params=status", "--minimal"]);
    assert_eq!(done, "success");
}

/// What prevents an evacuation, what holds disks, and what support is given; a disk of a VM is held meanwhile.
fn status_of_a_host(world: &World, vdi: &str, host: &str) {
    let vm = value(world, &["vm-install", "template=Simulated guest", "new-name-label=held"]);
    let (of_vm, of_vdi) = (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"));
    value(world, &["vbd-create", &of_vm, &of_vdi, "device=0"]);
    assert_eq!(xe(world, &["host-get-sm-diagnostics", host]).ok(), "");
    assert_eq!(xe(world, &["vm-start", &format!("uuid={vm}")]).ok(), "");
    let held = xe(world, &["host-get-sm-diagnostics", host]).ok();
    let line = format!("VM {vm} (held), device 0, RW");
    assert!(held.starts_with(vdi) && held.contains(&line), "{held}");
    let prevent = ["host-get-vms-which-prevent-evacuation", host];
    assert_eq!(xe(world, &prevent).ok(), "");
    assert_eq!(xe(world, &["vm-pause", &format!("uuid={vm}")]).ok(), "");
    assert_eq!(xe(world, &prevent).ok(), format!("{vm}: VM_BAD_POWER_STATE, running, paused\n"));
    assert_eq!(xe(world, &["vm-shutdown", &format!("uuid={vm}"), "--force"]).ok(), "");
    assert_eq!(xe(world, &["vm-destroy", &format!("uuid={vm}")]).ok(), "");
    let archive = world.scratch.join("status.tar.gz");
    let file = format!("filename={}", archive.display());
    let said = xe(world, &["host-get-system-status", &file]).ok();
    assert!(said.contains(" members"), "{said}");
    let refused = xe(world, &["host-get-system-status", &file]).fails();
    assert!(refused.contains("name another file"), "{refused}");
    for absent in ["drtask-create", "host-bugreport-upload"] {
        for said in [xe(world, &[absent]), xe(world, &["help", absent])] {
            let said = said.fails();
            assert!(said.contains(&format!("there is no {absent}: ")) && said.contains("; "), "{said}");
        }
    }
}

/// From snapshot to snapshot of a disk of 12 MiB that nothing writes to.
fn changed_blocks_of_a_disk_in_use(world: &World, vdi: &str) {
    let tracked = || value(world, &["vdi-param-get", vdi, "param-name=cbt-enabled"]);
    assert_eq!(xe(world, &["vdi-enable-cbt", vdi]).ok(), "");
    assert_eq!(tracked(), "true");
    let [first, second] = [(); 2].map(|()| value(world, &["vdi-snapshot", vdi]));
    assert_eq!(xe(world, &["vdi-data-destroy", &format!("uuid={first}")]).ok(), "");
    let kind = value(world, &["vdi-param-get", &format!("uuid={first}"), "param-name=type"]);
    assert_eq!(kind, "CBT metadata");
    let (from, to) = (format!("vdi-from-uuid={first}"), format!("vdi-to-uuid={second}"));
    assert_eq!(value(world, &["vdi-list-changed-blocks", &from, &to]), "A".repeat(32));
    let used = vdi.trim_start_matches("uuid=");
    let refused = xe(world, &["vdi-list-changed-blocks", &from, &format!("vdi-to-uuid={used}")]).fails();
    assert!(refused.contains(used), "{refused}");
    assert_eq!(xe(world, &["vdi-disable-cbt", vdi]).ok(), "");
    assert_eq!(tracked(), "false");
    for snapshot in [first, second] {
        xe(world, &["vdi-destroy", &format!("uuid={snapshot}")]).ok();
    }
}

#[test]
fn disks_of_a_running_vm_and_what_was_done() {
    let world = World::new();
    let sr = value(&world, &["sr-list", "--minimal"]);
    let vm = value(&world, &["vm-install", "template=Simulated guest", "new-name-label=busy"]);
    xe(&world, &["vm-param-set", &format!("uuid={vm}"), "platform:sim-front=vhost-user"]).ok();
    let disk = |size: &str, place: &str| {
        let (sr, size) = (format!("sr-uuid={sr}"), format!("virtual-size={size}"));
        let vdi = value(&world, &["vdi-create", &sr, "name-label=data", &size]);
        let (vm, of, place) = (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"), format!("device={place}"));
        let vbd = value(&world, &["vbd-create", &vm, &of, &place, "type=Disk", "mode=RW"]);
        (format!("uuid={vdi}"), format!("uuid={vbd}"))
    };
    let first = disk("16MiB", "0");
    assert_eq!(xe(&world, &["vm-start", "vm=busy"]).ok(), "");
    // Each step of it is in the timeline, beside the disk it was for; its task is not there any more.
    assert_eq!(value(&world, &["task-list", "--minimal"]), "");
    let mut timeline = Command::new(our("tapio"));
    timeline.args(["timeline", "--width", "100", "--", "--socket"]).arg(&world.daemon().socket);
    let drawn = run(timeline.env("HOME", world.scratch.path())).ok();
    assert!(drawn.contains(" steps, ") && drawn.contains("start a disk process VBD"), "{drawn}");
    // Hot: plugged, kept, longer, unplugged.
    let hot = disk("8MiB", "autodetect");
    let attached = |vbd: &str| value(&world, &["vbd-param-get", vbd, "param-name=currently-attached"]);
    assert_eq!(attached(&hot.1), "false");
    assert_eq!(xe(&world, &["vbd-plug", &hot.1]).ok(), "");
    assert_eq!(attached(&hot.1), "true");
    let snapshot = value(&world, &["vdi-snapshot", &hot.0]);
    assert_eq!(xe(&world, &["vdi-resize", &hot.0, "disk-size=12MiB", "online=true"]).ok(), "");
    assert_eq!(value(&world, &["vdi-param-get", &hot.0, "param-name=virtual-size"]), (12 << 20).to_string());
    assert_eq!(
        value(&world, &["vdi-param-get", &format!("uuid={snapshot}"), "param-name=virtual-size"]),
        (8 << 20).to_string()
    );
    changed_blocks_of_a_disk_in_use(&world, &hot.0);
    let host = format!("uuid={}", value(&world, &["host-list", "--minimal"]));
    let dp = hot.1.replace("uuid=", "dp=");
    let refused = xe(&world, &["host-sm-dp-destroy", &host, &dp]).fails();
    assert!(refused.contains(hot.0.trim_start_matches("uuid=")), "{refused}");
    let token = value(&world, &["vbd-pause", &hot.1]);
    let refused = xe(&world, &["vdi-snapshot", &hot.0]).fails();
    assert!(refused.contains("xe vbd-unpause uuid="), "{refused}");
    let refused = xe(&world, &["vbd-unpause", &hot.1, "token=another"]).fails();
    assert!(refused.contains("another token"), "{refused}");
    assert_eq!(xe(&world, &["vbd-unpause", &hot.1, &format!("token={token}")]).ok(), "");
    assert!(!value(&world, &["vbd-pause", &hot.1]).is_empty(), "the unplug below lets it go on");
    let twice = xe(&world, &["vbd-plug", &hot.1]);
    assert_eq!((twice.status.code(), twice.stdout.as_str()), (Some(1), ""));
    assert!(twice.stderr.lines().count() >= 2, "what, and which: {twice}");
    let used = xe(&world, &["vdi-destroy", &hot.0]).fails();
    assert!(used.contains(hot.0.trim_start_matches("uuid=")), "{used}");
    assert_eq!(xe(&world, &["vbd-unplug", &hot.1, "timeout=20"]).ok(), "");
    assert_eq!(attached(&hot.1), "false");
    assert_columns(&xe(&world, &["vbd-list", "params=all"]).ok(), 2);
    assert_columns(&xe(&world, &["vdi-list", "params=all", "managed=true"]).ok(), 3);
    xe(&world, &["vm-shutdown", "vm=busy"]).ok();
    for (vdi, vbd) in [&first, &hot] {
        xe(&world, &["vbd-destroy", vbd]).ok();
        xe(&world, &["vdi-destroy", vdi]).ok();
    }
    xe(&world, &["vdi-destroy", &format!("uuid={snapshot}")]).ok();
    xe(&world, &["vm-destroy", &format!("uuid={vm}")]).ok();
    world.finish();
}

#[test]
fn bash_completes_what_is_typed() {
    needs!("bash");
    let world = World::new();
    // As a shell does it: the script is read, and its function asked with a line and the place of the cursor in it.
    let bin = our("tapio").parent().expect("a directory").display().to_string();
    let typed = |line: &str| {
        let script = format!(
            "xe() {{ '{bin}/tapio' xe \"$@\"; }}\nsource <(xe completion bash)\n\
             COMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}}\nCOMP_WORDS=($COMP_LINE)\n\
             [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=('')\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
             compopt() {{ :; }}\n_tapio_xe\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let mut command = Command::new("bash");
        command.args(["--norc", "-c", &script]).env("TAPIO_SOCKET", &world.daemon().socket);
        let said = run(command.env("HOME", world.scratch.path())).ok();
        said.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>()
    };
    let commands = typed("xe vdi-sn");
    assert_eq!(commands, ["vdi-snapshot"]);
    let parameters = typed("xe vdi-create ");
    for name in ["sr-uuid=", "name-label=", "virtual-size="] {
        assert!(parameters.iter().any(|offered| offered == name), "{name}: {parameters:?}");
    }
    let sr = value(&world, &["sr-list", "--minimal"]);
    let offered = typed("xe sr-scan uuid=");
    assert!(offered.len() == 1 && offered[0].ends_with(&sr), "{offered:?}");
    world.finish();
}
