//! `xe` as its users type it, against a daemon on the same host and over the network.

use std::process::Command;

use tapio_e2e::needs;
use tapio_e2e::process::{Finished, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

/// The words of one command; parameters with spaces need [`Xe::run`].
struct Xe<'a> {
    daemon: &'a Daemon,
    scratch: &'a Scratch,
}

impl Xe<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(our("tapio"));
        command.arg("xe").env("TAPIO_SOCKET", &self.daemon.socket);
        // No settings of the user that runs the test.
        command.env("HOME", self.scratch.path()).env_remove("XDG_CONFIG_HOME").env_remove("XE_EXTRA_ARGS");
        command.env_remove("XE_PASSWORD");
        command
    }

    fn run(&self, words: &[&str]) -> Finished {
        run(self.command().args(words))
    }

    #[track_caller]
    fn ok(&self, words: &str) -> String {
        self.run(&words.split(' ').collect::<Vec<_>>()).ok()
    }

    /// The value that a command prints.
    #[track_caller]
    fn value(&self, words: &str) -> String {
        let out = self.ok(words);
        out.strip_suffix('\n').unwrap_or_else(|| panic!("{words} printed {out:?}")).to_owned()
    }

    #[track_caller]
    fn fails(&self, words: &str) -> String {
        self.run(&words.split(' ').collect::<Vec<_>>()).fails()
    }
}

#[test]
fn disks_from_their_making_to_their_end() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };

    let sr = xe.value("sr-list type=file --minimal");
    assert_eq!(sr.len(), 36, "{sr}");
    let vdi = xe
        .value(&format!("vdi-create sr-uuid={sr} name-label=data virtual-size=8MiB other-config:owner=joe"));
    let record = xe.ok(&format!("vdi-list uuid={vdi}"));
    let expected = format!(
        "uuid ( RO)                : {vdi}\n          name-label ( RW): data\n    name-description ( RW): \n             sr-uuid ( RO): {sr}\n        virtual-size ( RO): 8388608\n            sharable ( RO): false\n           read-only ( RO): false\n\n\n"
    );
    assert_eq!(record, expected);

    let field = |name: &str| xe.value(&format!("vdi-param-get uuid={vdi} param-name={name}"));
    assert_eq!(field("type"), "User");
    assert_eq!(field("snapshot-of"), "<not in database>");
    assert_eq!(field("other-config"), "owner: joe");
    xe.ok(&format!("vdi-param-set uuid={vdi} name-label=new other-config:owner=eve"));
    xe.ok(&format!("vdi-param-add uuid={vdi} param-name=tags param-key=a,b"));
    assert_eq!(field("name-label"), "new");
    assert_eq!(xe.value(&format!("vdi-param-get uuid={vdi} param-name=other-config param-key=owner")), "eve");
    assert_eq!(xe.value("vdi-list tags:contains=a,b other-config:owner=eve params=uuid --minimal"), vdi);
    assert_eq!(xe.value("vdi-list other-config:owner=joe --minimal"), "");
    assert_eq!(xe.ok("vdi-list name-label=nothing"), "");

    let snapshot = xe.value(&format!("vdi-snapshot uuid={vdi}"));
    assert_eq!(field("snapshots"), snapshot);
    xe.ok(&format!("vdi-resize uuid={vdi} disk-size=12MiB"));
    assert_eq!(field("virtual-size"), (12 << 20).to_string());
    let copy = xe.value(&format!("vdi-copy uuid={snapshot} sr-uuid={sr}"));
    for uuid in [&snapshot, &copy, &vdi] {
        xe.ok(&format!("vdi-destroy uuid={uuid}"));
    }
    assert_eq!(xe.value("vdi-list managed=true --minimal"), "");
    // No command leaves a task behind, whether it worked or not.
    assert!(!xe.run(&["vdi-destroy", "uuid=00000000-0000-0000-0000-000000000000"]).status.success());
    assert_eq!(xe.value("task-list --minimal"), "");
    daemon.stop();
}

#[test]
fn failures_name_what_and_why() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };

    assert_eq!(xe.fails("vdi-create"), "Required parameter not found: sr-uuid\nFor usage run: 'xe help'\n");
    assert!(xe.fails("vdi-frob").starts_with("Unknown command: vdi-frob\n"));
    let unknown = xe.fails("vdi-destroy uuid=0d5f1c34-0000-4000-8000-000000000001");
    assert!(unknown.ends_with("type: VDI\nuuid: 0d5f1c34-0000-4000-8000-000000000001\n"), "{unknown}");
    let sr = xe.value("sr-list --minimal");
    let type_ = xe.fails(&format!("sr-param-set uuid={sr} type=ext"));
    assert_eq!(type_, "Error: type cannot be changed\n");
    let vdi = xe.value(&format!("vdi-create sr-uuid={sr} name-label=x virtual-size=4MiB"));
    let smaller = xe.fails(&format!("vdi-resize uuid={vdi} disk-size=1MiB"));
    assert!(smaller.starts_with("Error code: SR_BACKEND_FAILURE_79\nError parameters: , "), "{smaller}");
    let key = xe.fails(&format!("vdi-param-get uuid={vdi} param-name=other-config param-key=x"));
    assert_eq!(key, "Error: Key x not found in map other-config\n");
    let error = run(xe.command().args(["--socket", "/nonexistent/socket", "sr-list"])).fails();
    assert!(error.contains("/nonexistent/socket") && error.contains("tapiod"), "{error}");
    xe.ok(&format!("vdi-destroy uuid={vdi}"));
    daemon.stop();
}

#[test]
fn over_the_network_with_a_certificate_seen_before() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).tls().start();
    daemon.add_user("joe", "read-only", "correct-horse-9");
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let server = daemon.https.as_deref().and_then(|url| url.strip_prefix("https://")).expect("an address");
    let remote = |password: &str, words: &[&str]| {
        let mut command = xe.command();
        run(command.env("XE_PASSWORD", password).args(["-s", server, "-u", "joe"]).args(words))
    };

    let first = remote("correct-horse-9", &["host-list", "--minimal"]);
    assert!(first.stderr.contains("is remembered in"), "{first}");
    let local = xe.value("host-list --minimal");
    assert_eq!(first.ok().trim(), local);
    let second = remote("correct-horse-9", &["host-list", "--minimal"]);
    assert_eq!(second.stderr, "");
    assert!(remote("wrong", &["host-list"]).fails().starts_with("The account or the password is wrong.\n"));
    let denied =
        remote("correct-horse-9", &["host-param-set", &format!("uuid={local}"), "name-label=x"]).fails();
    assert!(denied.starts_with("The role of the session does not allow this.\n"), "{denied}");

    // Another certificate under the same address is refused before a password is sent.
    let known = scratch.path().join(".config/tapio/known_hosts");
    let text = std::fs::read_to_string(&known).expect("written");
    let (before, _) = text.trim_end().rsplit_once(':').expect("a fingerprint");
    std::fs::write(&known, format!("{before}:{}\n", "0".repeat(64))).expect("written");
    let changed = remote("correct-horse-9", &["host-list"]).fails();
    assert!(changed.contains("another certificate than it did before"), "{changed}");
    daemon.stop();
}

#[test]
fn a_vm_with_disks_and_its_timeline() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let sr = xe.value("sr-list --minimal");
    let install = xe.run(&["vm-install", "template=Simulated guest", "new-name-label=one"]).ok();
    let vm = install.trim();
    // One disk that is the VM's own, and one that was there before it.
    xe.ok("vm-disk-add vm=one device=0 disk-size=4MiB");
    let before = xe.value(&format!("vdi-create sr-uuid={sr} name-label=before virtual-size=4MiB"));
    xe.ok(&format!("vbd-create vm-uuid={vm} device=1 vdi-uuid={before}"));
    let disks = xe.ok("vm-disk-list vm=one");
    assert!(disks.starts_with("Disk 0 VBD:\nuuid ( RO)             : "), "{disks}");
    assert!(disks.contains("\nDisk 1 VDI:\n"), "{disks}");

    let start = xe.command().args(["vm-start", "vm=one"]).spawn().expect("started");
    xe.ok("event-wait class=vm name-label=one power-state=running");
    assert!(start.wait_with_output().expect("ended").status.success());
    assert_eq!(
        xe.value("vbd-list vm-name-label=one currently-attached=true --minimal").split(',').count(),
        2
    );

    // A task that its client does not destroy, so that its steps can be looked at.
    let session = daemon.login();
    let vm_ref = session.text("VM.get_by_uuid", &[vm.into()]);
    let task = session.text("Async.VM.hard_shutdown", &[vm_ref.into()]);
    xe.ok("event-wait class=vm name-label=one power-state=halted");
    xe.ok("event-wait class=task name-label=Async.VM.hard_shutdown status=success");
    let mut timeline = Command::new(our("tapio"));
    timeline.args(["timeline", &task, "--width", "100", "--", "--socket"]).arg(&daemon.socket);
    let drawn = run(timeline.env("HOME", scratch.path())).ok();
    assert!(drawn.lines().count() >= 3 && drawn.contains(" steps, "), "{drawn}");

    assert_eq!(xe.ok("vm-uninstall vm=one --force"), "All objects destroyed\n");
    assert_eq!(xe.value("vdi-list --minimal"), before, "only the VM's own disk goes with it");
    daemon.stop();
}

#[test]
fn what_is_not_understood_is_refused_and_the_host_is_no_vm() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let sr = xe.value("sr-list type=file --minimal");
    let said = xe.fails(&format!("vdi-create sr-uuid={sr} name-label=x virtual-size=4MiB tags:red=true"));
    assert!(said.contains("tags is no map: give tags=VALUE"), "{said}");
    let said = xe.fails(&format!("vdi-create sr-uuid={sr} name-label=x virtual-size=4MiB colour=red"));
    assert!(said.contains("Unknown parameter 'colour'"), "{said}");
    assert!(xe.fails("vdi-list tags:red=true").contains("tags is a set: give tags:contains=VALUE"));
    assert_eq!(xe.value("vdi-list --minimal"), "", "nothing was made");
    // All VMs there are but the host's own.
    for name in ["one", "two"] {
        let name = format!("new-name-label={name}");
        xe.run(&["vm-install", "template=Simulated guest", &name]).ok();
    }
    xe.ok("vm-start --multiple");
    let running = |more: &str| xe.value(&format!("vm-list power-state=running {more} --minimal"));
    assert_eq!(running("is-control-domain=false").split(',').count(), 2);
    xe.ok("vm-shutdown --multiple --force");
    assert_eq!(running("is-control-domain=false"), "");
    let host = running("is-control-domain=true");
    assert_eq!(host.len(), 36, "{host}");
    for command in ["vm-shutdown --force", "vm-reboot --force", "vm-start"] {
        let said = xe.fails(&format!("{command} uuid={host}"));
        assert!(said.contains("No matching"), "{command}: {said}");
    }
    daemon.stop();
}

#[test]
fn names_do_not_command_a_terminal() {
    needs!("python3");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let name = "evil \u{1b}]0;title\u{7}\u{1b}[2J\u{9b}2J name";
    let vm = xe.run(&["vm-install", "template=Simulated guest", &format!("new-name-label={name}")]).ok();
    let uuid = format!("uuid={}", vm.trim());
    let words = ["vm-list", uuid.as_str(), "params=name-label"];
    assert!(xe.run(&words).ok().contains(name), "a pipe gets the name to the letter");
    let on_a_terminal = |words: &[&str]| {
        let plain = xe.command();
        let mut command = Command::new("python3");
        command.args(["-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"]);
        command.arg(plain.get_program()).args(plain.get_args()).args(words);
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        run(&mut command)
    };
    let missing = format!("name-label={name}");
    for words in
        [&words[..], &["vm-list", &uuid, "params=name-label", "--minimal"], &["vm-start", &missing, "on=x"]]
    {
        let said = on_a_terminal(words);
        let said = format!("{}{}", said.stdout, said.stderr);
        assert!(!said.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{said:?}");
    }
    let listed = on_a_terminal(&words).ok();
    assert!(listed.contains("evil \\u{1b}]0;title\\u{7}\\u{1b}[2J\\u{9b}2J name"), "{listed:?}");
    daemon.stop();
}

#[test]
fn a_type_of_sr_that_is_not_there_lists_those_that_are() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    for command in ["sr-create name-label=x", "sr-probe", "sr-probe-ext"] {
        let said = xe.fails(&format!("{command} type=lvmofcoe"));
        assert!(
            said.contains("no SR type 'lvmofcoe'; there are: btrfs, ext, file, hba, iscsi, iso, lvm, lvmohba, lvmoiscsi, nfs, rbd, \
                 relvm, relvmohba, relvmoiscsi, smb, udev, xfs"),
            "{command}: {said}"
        );
    }
    daemon.stop();
}

#[test]
fn interfaces_of_vms() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let vm = xe.run(&["vm-install", "template=Simulated guest", "new-name-label=one"]).ok();
    let vm = vm.trim();
    let net = xe.value("network-create name-label=net MTU=9000");
    let make = |more: &str| format!("vif-create vm-uuid={vm} network-uuid={net} {more}");
    let first = xe.value(&make("device=0 mac=random"));
    let field = |vif: &str, name: &str| xe.value(&format!("vif-param-get uuid={vif} param-name={name}"));
    assert_eq!((field(&first, "MAC").len(), field(&first, "MTU")), (17, "9000".to_owned()));
    assert_eq!(field(&first, "MAC-autogenerated"), "true");
    assert!(xe.fails(&make("device=0")).contains("already.\ndevice: 0\n"));
    assert!(xe.fails(&make("device=1 mac=x")).contains("MAC: x\n"));
    let second = xe.value(&make("device=autodetect mac=00:16:3e:00:00:01"));
    assert_eq!((field(&second, "device"), field(&second, "MAC-autogenerated")), ("1".into(), "false".into()));
    let copy = xe.value("vm-clone vm=one new-name-label=two");
    let macs = |vm: &str| xe.value(&format!("vif-list vm-uuid={vm} params=MAC --minimal"));
    assert_eq!(macs(&copy).split(',').count(), 2);
    assert!(!macs(&copy).contains("00:16:3e:00:00:01"), "a clone has addresses of its own");
    let snapshot = xe.value("vm-snapshot vm=one new-name-label=kept");
    assert!(macs(&snapshot).contains("00:16:3e:00:00:01"), "a snapshot keeps them");
    xe.ok(&format!("vif-destroy uuid={second}"));
    xe.ok(&format!("snapshot-revert snapshot-uuid={snapshot}"));
    assert!(macs(vm).contains("00:16:3e:00:00:01"), "and the VM that goes back to it gets them");
    let refused = xe.fails(&format!("snapshot-revert snapshot-uuid={vm}"));
    assert!(refused.contains("Only to a snapshot can a VM go back."), "{refused}");
    xe.ok("vm-uninstall vm=one --force");
    xe.ok(&format!("vm-destroy uuid={copy}"));
    xe.ok(&format!("snapshot-destroy uuid={snapshot}"));
    assert_eq!(xe.value("vif-list --minimal"), "");
    daemon.stop();
}

#[test]
fn shells_are_offered_what_is_there() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let sr = xe.value("sr-list --minimal");
    let offered = |line: &str| xe.run(&["__complete", "zsh", line]).ok();
    assert_eq!(offered("xe sr-param-list uuid="), format!("uuid={sr}\n"));
    assert!(offered("xe vm-install template=Sim").starts_with("template=Simulated\\ guest\n"));
    assert!(offered("xe sr-create type=").contains("type=file\n"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(xe.ok(&format!("completion {shell}")).contains("__complete"));
    }
    daemon.stop();
}

#[test]
fn what_is_known_of_vms_hosts_and_srs_and_what_is_not_here() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let xe = Xe { daemon: &daemon, scratch: &scratch };
    let sr = xe.value("sr-list type=file --minimal");
    let vm = xe.value("vm-create name-label=box memory=64MiB");
    xe.ok("vm-disk-add vm=box disk-size=8MiB device=0");
    let snapshot = xe.value("vm-snapshot vm=box new-name-label=before");
    let disks = xe.ok(&format!("snapshot-disk-list uuid={snapshot} vdi-params=virtual-size"));
    assert!(
        disks.starts_with("Disk 0 VBD:\n") && disks.contains("virtual-size ( RO)    : 8388608\n"),
        "{disks}"
    );

    let capacity = |name: &str, template: &str| {
        let all = xe.ok(&format!("sr-capacity uuid={sr} template={template} --json"));
        let all: serde_json::Value = serde_json::from_str(&all).expect("JSON");
        all[0][name].clone()
    };
    assert_eq!(capacity("virtual-allocation", &snapshot), 16 << 20);
    assert_eq!(capacity("template-size", &snapshot), 8 << 20);
    let free = capacity("free", &snapshot).as_i64().expect("a number");
    let fits = capacity("vms-that-fit-the-free-space", &snapshot).as_i64().expect("a number");
    // Other programs write to this file system meanwhile.
    assert!(fits > 0 && fits.abs_diff(free / (8 << 20)) < 4096, "{fits} of {free}");

    let network = xe.value("network-create name-label=lan");
    let vif = xe.value(&format!("vif-create vm-uuid={vm} device=0 network-uuid={network} mac=random"));
    assert_eq!(xe.value("vm-vif-list vm=box --minimal"), vif);
    assert_eq!(xe.value("vm-compute-maximum-memory vm=box total=1GiB"), (1 << 30).to_string());
    assert!(xe.fails("vm-compute-maximum-memory vm=box total=0").contains("total"));
    assert_eq!(
        xe.value("vm-is-bios-customized vm=box"),
        "The BIOS strings of this VM have not yet been set."
    );
    assert_eq!(xe.value("host-is-in-emergency-mode"), "false");
    assert!(xe.ok("host-cpu-info").contains("cpu_count"), "{}", xe.ok("host-cpu-info"));
    assert!(!xe.value("host-cpu-list --minimal").is_empty());
    xe.ok("pool-sync-database");

    let plan = "vmss-create name-label=nightly type=snapshot frequency=weekly schedule:days=Monday,Friday";
    assert!(xe.fails(&format!("{plan} schedule:hour=24")).contains("schedule:hour"));
    let plan = xe.value(&format!("{plan} schedule:hour=3 retained-snapshots=1"));
    xe.ok(&format!("vm-param-set uuid={vm} snapshot-schedule={plan}"));
    assert_eq!(xe.value(&format!("vmss-param-get uuid={plan} param-name=VMs")), vm);
    assert_eq!(
        xe.value(&format!("vmss-run uuid={plan}")),
        "1 of 1 VMs have a snapshot, 0 older ones are removed"
    );
    let taken = xe.value("snapshot-list is-vmss-snapshot=true --minimal");
    xe.ok(&format!("vmss-run uuid={plan}"));
    let next = xe.value("snapshot-list is-vmss-snapshot=true --minimal");
    assert!(next.len() == 36 && next != taken, "{taken} made room for {next}");
    xe.ok(&format!("vmss-destroy uuid={plan}"));
    xe.ok(&format!("snapshot-uninstall uuid={next} --force"));
    let shop = xe.value("appliance-create name-label=shop");
    xe.run(&["vm-install", "template=Simulated guest", "new-name-label=web"]).ok();
    let web = xe.value("vm-list name-label=web --minimal");
    xe.ok(&format!("vm-param-set uuid={web} appliance={shop} order=1 start-delay=0"));
    xe.ok(&format!("appliance-start uuid={shop}"));
    assert_eq!(xe.value("vm-list name-label=web params=power-state --minimal"), "running");
    xe.ok(&format!("appliance-shutdown uuid={shop} --force"));
    assert_eq!(xe.value("vm-list name-label=web params=power-state --minimal"), "halted");
    xe.ok(&format!("appliance-destroy uuid={shop}"));
    let apart = xe.value("vm-group-create name-label=apart placement=anti-affinity");
    xe.ok(&format!("vm-param-set uuid={web} groups=apart"));
    assert_eq!(xe.value("vm-group-list placement=anti_affinity params=VMs --minimal"), web);
    assert_eq!(xe.value(&format!("vm-list groups:contains={apart} params=uuid --minimal")), web);
    xe.ok(&format!("vm-param-clear uuid={web} param-name=groups"));
    assert_eq!(xe.value(&format!("vm-group-param-get uuid={apart} param-name=VMs")), "");
    xe.ok(&format!("vm-group-destroy uuid={apart}"));
    xe.ok("vm-uninstall vm=web --force");
    let status = xe.ok(&format!("diagnostic-vm-status uuid={vm}"));
    assert!(status.contains("attachable ( RO): true") && status.contains("can-boot ( RO)"), "{status}");

    let pool = xe.value("pool-list --minimal");
    for (name, priority) in [("LATE", 1), ("SOON", 3)] {
        xe.ok(&format!("message-create name={name} priority={priority} body=x pool-uuid={pool}"));
    }
    xe.ok("message-destroy-all priority=3 after=2026-01-01T00:00:00Z");
    assert_eq!(xe.value("message-list name=SOON --minimal"), "");
    assert_eq!(xe.value("message-list name=LATE params=name --minimal"), "LATE");
    xe.ok("message-destroy-all before=20990101T00:00:00Z");
    assert_eq!(xe.value("message-list --minimal"), "");

    // Classes without objects are lists without lines; a feature that is not here says what to do instead.
    assert_eq!(xe.ok("vgpu-list"), "");
    let said = xe.fails("vgpu-create uuid=1");
    assert!(said.contains("Error: there is no vgpu-create: "), "{said}");
}
