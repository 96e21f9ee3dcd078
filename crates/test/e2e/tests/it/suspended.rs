//! A guest that is suspended and goes on, and that goes back to a checkpoint: what it had in its memory and on its disk
//! is there, and both are of one moment.

use tapio_e2e::process::run_within;

use crate::consoles::reached_by_those_who_may;
use crate::machines::Guest;
use crate::media;

/// The story.
pub fn memory_and_disks_of_one_moment(guest: &mut Guest) {
    let has_balloon =
        tapio_e2e::guest::Qemu::kernel().is_ok_and(|dir| dir.join("virtio_balloon.ko").exists());
    assert!(has_balloon, "the lane's kernel has no virtio_balloon: scripts/setup clients fetches it");
    media::library(guest);
    guest.ok(&["vm-cd-add", "vm=guest", "cd-name=cd.iso", "device=3"]);
    // No device but the serial console is left anyway; the command line is as it was told.
    assert_eq!(
        guest.ok(&["vm-density", "level=low"]),
        "1 VMs are set; 0 of them take it at their next start\n"
    );
    let parallel = ["vm-list", "name-label=guest", "params=platform", "--minimal"];
    assert!(guest.value(&parallel).contains("parallel: none"));
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]);
    guest.ok(&["vm-param-set", &format!("uuid={vm}"), "platform:vnc=true"]);
    // Room for more processors. What the emulator has is what it says when it is to have fewer.
    guest.ok(&["vm-param-set", &format!("uuid={vm}"), "VCPUs-max=3"]);
    // Half of what its emulator has, until it gets more.
    guest.ok(&["vm-memory-dynamic-range-set", "vm=guest", "min=128MiB", "max=128MiB"]);
    guest.start();
    let memory = |guest: &Guest, mib: u64| {
        guest.ok(&["vm-memory-target-wait", "vm=guest"]);
        let actual = guest.value(&["vm-list", "name-label=guest", "params=memory-actual", "--minimal"]);
        assert!(actual.parse::<u64>().is_ok_and(|bytes| bytes.abs_diff(mib << 20) <= 1 << 20), "{actual}");
        let said = guest.shell("set -- $(grep MemTotal /proc/meminfo); echo \"= $2\"");
        said[0].parse::<u64>().expect("KiB")
    };
    let processors = |guest: &Guest, count: u32| {
        let number = ["vm-list", "name-label=guest", "params=VCPUs-number", "--minimal"];
        assert_eq!(guest.value(&number), count.to_string());
        let mut fewer = guest.world.xe();
        fewer.args(["vm-vcpu-hotplug", "vm=guest", "new-vcpus=1"]);
        let refused = run_within(&mut fewer, std::time::Duration::from_secs(60)).stderr;
        assert!(
            refused.contains(&format!("it has {count} processors, and driver qemu takes none")),
            "{refused}"
        );
    };
    guest.ok(&["vm-vcpu-hotplug", "vm=guest", "new-vcpus=2"]);
    processors(guest, 2);
    let few = memory(guest, 128);
    assert!(few < 128 << 10, "the guest's kernel has {few} KiB");
    reached_by_those_who_may(guest);
    media::come_and_go(guest);
    media::outlive_their_processes(guest);
    // In the memory alone, on the disk and not synced, and a program that runs.
    let written = guest.shell(
        "mkdir -p /tmp/m; echo first >/tmp/m/word; \
         dd if=/dev/urandom of=/tmp/m/data bs=64k count=16 2>/dev/null; \
         dd if=/tmp/m/data of=/dev/vdb bs=64k 2>/dev/null; \
         (while :; do n=$((n + 1)); echo $n >/tmp/m/n; usleep 50000; done) & \
         set -- $(sha256sum /tmp/m/data); echo \"= $1\"",
    );
    assert_eq!(written.len(), 1);
    guest.ok(&["vm-suspend", "vm=guest"]);
    let field =
        |name: &str| guest.value(&["vm-list", "name-label=guest", &format!("params={name}"), "--minimal"]);
    assert_eq!(field("power-state"), "suspended");
    let image = guest.value(&["vdi-list", "type=Suspend", "params=uuid", "--minimal"]);
    assert_eq!(field("suspend-VDI-uuid"), image);
    let limit = std::time::Duration::from_secs(60);
    let refused = run_within(guest.world.xe().args(["vm-start", "vm=guest"]), limit);
    assert!(refused.stderr.contains("suspended"), "{refused:?}");
    guest.ok(&["vm-resume", "vm=guest"]);
    assert_eq!(field("power-state"), "running");
    processors(guest, 2);
    guest.ok(&["vm-vcpu-hotplug", "vm=guest", "new-vcpus=3"]);
    assert!(memory(guest, 128).abs_diff(few) < 4 << 10, "as it was before");
    guest.ok(&["vm-memory-target-set", "vm=guest", "target=192MiB"]);
    let more = memory(guest, 192) - few;
    assert!(more > 60 << 10, "the guest's kernel has {more} KiB more");
    assert_eq!(guest.value(&["vdi-list", "type=Suspend", "params=uuid", "--minimal"]), "");
    let check = "sync; echo 3 >/proc/sys/vm/drop_caches; set -- $(dd if=/dev/vdb bs=64k count=16 2>/dev/null | sha256sum); \
                 echo \"= $1\"; echo \"= $(cat /tmp/m/word)\"; a=$(cat /tmp/m/n); usleep 300000; \
                 [ $(cat /tmp/m/n) -gt $a ] && echo '= runs'";
    let first = [written[0].as_str(), "first", "runs"];
    assert_eq!(guest.shell(check), first, "as it was before");
    // A checkpoint while it runs, and other contents after it.
    let kept = guest.value(&["vm-checkpoint", "vm=guest", "new-name-label=kept"]);
    assert_eq!(field("power-state"), "running");
    let second = guest.shell(
        "echo second >/tmp/m/word; dd if=/dev/zero of=/dev/vdb bs=64k count=16 conv=fsync 2>/dev/null; \
         echo \"= $(cat /tmp/m/word)\"",
    );
    assert_eq!(second, ["second"]);
    guest.ok(&["snapshot-revert", &format!("snapshot-uuid={kept}")]);
    assert_eq!(field("power-state"), "suspended");
    guest.ok(&["vm-resume", "vm=guest"]);
    assert_eq!(guest.shell(check), first, "as it was at the checkpoint");
    processors(guest, 3);
    guest.ok(&["snapshot-uninstall", &format!("uuid={kept}"), "--force"]);
    // One that is suspended can be switched off: its memory goes.
    guest.ok(&["vm-suspend", "vm=guest"]);
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    assert_eq!(field("power-state"), "halted");
    assert_eq!(guest.value(&["vdi-list", "type=Suspend", "params=uuid", "--minimal"]), "");
    assert_eq!(guest.ok(&["vm-uninstall", "vm=guest", "--force"]), "All objects destroyed\n");
}
