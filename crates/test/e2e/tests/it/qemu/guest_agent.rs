//! Agents in guests of QEMU, under the daemon: what they report, quiet snapshots, clean ends.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::find;

use super::kernel;
use crate::machines::Guest;
use crate::media;

const LIMIT: Duration = Duration::from_secs(180);

/// Puts an ext4 file system on a disk of the VM.
#[track_caller]
fn make_ext4(guest: &Guest, place: usize) {
    let image = guest.world.scratch.join("ext4.raw");
    std::fs::File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("an image");
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image)).ok();
    let (vdi, file) = (format!("uuid={}", guest.vdi_at(place)), format!("filename={}", text(&image)));
    guest.ok(&["vdi-import", &vdi, &file, "format=raw"]);
}

/// Whether the ext4 file system in an image has a journal that must be replayed: the superblock at 1024, incompatible
/// features at 0x60 in it, of which 4 is "needs recovery" (Linux, Documentation/filesystems/ext4/super.rst).
fn needs_recovery(image: &Path) -> bool {
    let file = std::fs::File::open(image).expect("the image");
    let mut superblock = [0; 1024];
    file.read_exact_at(&mut superblock, 1024).expect("a superblock");
    assert_eq!(superblock[0x38..0x3a], [0x53, 0xef], "an ext4 file system");
    superblock[0x60] & 4 != 0
}

/// A snapshot's copy of the disk at a place.
#[track_caller]
fn disk_of(guest: &Guest, snapshot: &str, place: usize) -> PathBuf {
    let (vm, place) = (format!("vm-uuid={snapshot}"), format!("userdevice={place}"));
    guest.content(&guest.value(&["vbd-list", &vm, &place, "params=vdi-uuid", "--minimal"]))
}

/// A snapshot under load is of a file system that needs its journal, a quiet one is not, and the guest writes on.
#[track_caller]
fn quiet_and_other_snapshots(guest: &Guest) {
    let quiet = guest.value(&["vm-snapshot-with-quiesce", "vm=guest", "new-name-label=quiet"]);
    let other = guest.value(&["vm-snapshot", "vm=guest", "new-name-label=other"]);
    assert!(!needs_recovery(&disk_of(guest, &quiet, 1)), "its file system was frozen");
    assert!(needs_recovery(&disk_of(guest, &other, 1)), "this one was in use");
    let info = guest.value(&["snapshot-param-get", &format!("uuid={quiet}"), "param-name=snapshot-info"]);
    assert!(info.contains("quiesced"), "{info}");
}

/// A field of the guest's metrics, once it is there.
#[track_caller]
fn reported(guest: &Guest, field: &str, wanted: &str) -> String {
    let vm = format!("uuid={}", guest.value(&["vm-list", "name-label=guest", "--minimal"]));
    let mut last = String::new();
    let found = poll_until(LIMIT, || {
        last = guest.value(&["vm-param-get", &vm, &format!("param-name={field}")]);
        last.contains(wanted).then(|| last.clone())
    });
    found.unwrap_or_else(|| panic!("{field} is {last:?} and has no {wanted:?}"))
}

/// The guest mounts what cloud-init would, by its label.
#[track_caller]
fn settings_are_read(guest: &Guest) {
    let seen = guest.shell(
        "mkdir -p /tmp/seed; for d in /dev/sr*; do mount -t iso9660 -o ro $d /tmp/seed 2>/dev/null && break; done; \
         dd if=$d bs=2k skip=16 count=1 2>/dev/null | tail -c +41 | head -c 6 | sed 's/^/= /'; echo; \
         cd /tmp/seed; for f in *; do echo \"= $f: $(head -n 1 $f)\"; done; cd /; umount /tmp/seed",
    );
    assert_eq!(seen.first().map(String::as_str), Some("CIDATA"), "the label by which cloud-init finds it");
    let meta = seen.get(1).map_or("", String::as_str);
    assert!(meta.starts_with("meta-data: {\"instance-id\":") && meta.contains("\"guest\""), "{seen:?}");
    assert_eq!(seen[2..], ["network-config: version: 2", "user-data: #cloud-config"]);
}

/// Our own agent in our initramfs, and a drive on a SCSI controller that comes while the VM runs.
#[test]
fn our_agent_reports_its_guest_and_holds_it_still() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1], "nbdcopy", "mkfs.ext4");
    let Some(kernel) = kernel() else { return };
    let kernel = format!("PV-kernel={}", text(&kernel.join("vmlinuz")));
    let more = [kernel.as_str(), "platform:accel=tcg", "platform:cd=scsi"];
    let guest = Guest::install("Tapio QEMU guest", LIMIT, &more);
    make_ext4(&guest, 1);
    media::library(&guest);
    guest.ok(&["vm-cd-add", "vm=guest", "cd-name=cd.iso", "device=3"]);
    let file = |name: &str, text: &str| {
        let path = guest.world.scratch.join(name);
        std::fs::write(&path, text).expect("written");
        format!("{name}={}", tapio_e2e::disk::text(&path))
    };
    let (user, network) =
        (file("user-data", "#cloud-config\nhostname: cloud\n"), file("network-config", "version: 2\n"));
    guest.value(&["vm-cloud-init-add", "vm=guest", &user, &network, "device=4"]);
    guest.start();
    settings_are_read(&guest);
    media::come_and_go(&guest);
    guest.shell(
        "mkdir -p /tmp/m; mount -t ext4 /dev/vdb /tmp/m; \
         (n=0; while :; do n=$((n + 1)); echo $n >/tmp/m/$((n % 64)); done) &",
    );
    reported(&guest, "memory", "total:");
    reported(&guest, "os-version", "uname: 6.");
    reported(&guest, "other", "agent: tapio");
    quiet_and_other_snapshots(&guest);
    let vm = format!("vm-uuid={}", guest.value(&["vm-list", "name-label=guest", "--minimal"]));
    let trimmed = guest.value(&["vm-call-plugin", &vm, "plugin=guest-agent-operation", "fn=trim"]);
    assert!(trimmed.parse::<u64>().expect("a number") > 1 << 20, "{trimmed} bytes are discarded");
    guest.ok(&["vm-shutdown", "vm=guest"]);
    assert_eq!(reported(&guest, "networks", ""), "");
    guest.world.finish();
}

/// Debian's qemu-guest-agent, in a guest that has no agent of ours and watches no button.
#[test]
fn qemus_agent_reports_its_guest_and_holds_it_still() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1], "qemu-ga", "nbdcopy", "mkfs.ext4");
    let Some(kernel) = kernel() else { return };
    let (scratch, agent) = (Scratch::on_disk(), find("qemu-ga").expect("the caller has asked for it"));
    let ramdisk = scratch.join("agent.cpio");
    Qemu::write_agent(&ramdisk, &kernel, &agent);
    let kernels = format!("kernel-dirs={}, {}", kernel.display(), scratch.path().display());
    let words = [
        format!("PV-kernel={}", text(&kernel.join("vmlinuz"))),
        format!("PV-ramdisk={}", text(&ramdisk)),
        "platform:accel=tcg".into(),
    ];
    let guest =
        Guest::install_with("Tapio QEMU guest", LIMIT, &words.each_ref().map(String::as_str), &kernels);
    make_ext4(&guest, 1);
    guest.ok(&["vm-start", "vm=guest"]);
    reported(&guest, "other", "agent: qemu-guest-agent");
    reported(&guest, "os-version", "name: A test guest");
    reported(&guest, "disks", "/mnt,ext4");
    if kernel.join("dummy.ko").exists() {
        reported(&guest, "networks", "0/ip: 192.0.2.7");
    }
    quiet_and_other_snapshots(&guest);
    let vm = format!("vm-uuid={}", guest.value(&["vm-list", "name-label=guest", "--minimal"]));
    let trimmed = guest.value(&["vm-call-plugin", &vm, "plugin=guest-agent-operation", "fn=trim"]);
    assert!(trimmed.parse::<u64>().expect("a number") > 1 << 20, "{trimmed} bytes are discarded");
    guest.ok(&["vm-shutdown", "vm=guest"]);
    assert_eq!(guest.value(&["vm-list", "name-label=guest", "params=power-state", "--minimal"]), "halted");
    guest.world.finish();
}
