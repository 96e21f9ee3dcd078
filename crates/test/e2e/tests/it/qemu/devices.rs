//! A guest of QEMU on a whole device of this host.

use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::guest::Qemu;
use tapio_e2e::needs;
use tapio_e2e::process::run_with_input;

use super::firmware::boot_sector;
use crate::machines::Guest;

const LIMIT: Duration = Duration::from_secs(180);

/// A loop device, which stands for a disk; given back when dropped.
struct Disk(String);

impl Disk {
    /// None where there are no loop devices to be had.
    fn over(file: &std::path::Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?.trim().to_owned();
        made.status.success().then_some(Self(name))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn a_guest_boots_from_a_device() {
    needs!(Qemu::TOOLS[0], "losetup");
    let guest = Guest::install("Other install media", LIMIT, &["platform:accel=tcg"]);
    let file = guest.world.scratch.join("disk.raw");
    let mut bytes = boot_sector("started from a whole disk\r\n");
    bytes.resize(1 << 20, 0);
    std::fs::write(&file, bytes).expect("a disk");
    let Some(disk) = Disk::over(&file) else { return tapio_e2e::tools::skip("needs loop devices") };
    let devices = format!("device-config:devices=file-{}", text(&file));
    let sr = guest.value(&["sr-create", "name-label=devices", "type=udev", &devices]);
    let vdi = guest.value(&["vdi-list", &format!("sr-uuid={sr}"), "--minimal"]);
    assert_eq!(guest.value(&["vdi-param-get", &format!("uuid={vdi}"), "param-name=location"]), disk.0);
    let vbd = guest.value(&["vbd-list", "vm-name-label=guest", "userdevice=0", "--minimal"]);
    guest.ok(&["vbd-destroy", &format!("uuid={vbd}")]);
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]);
    let (vm, vdi) = (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"));
    guest.ok(&["vbd-create", &vm, &vdi, "device=0", "bootable=true", "mode=RW", "type=Disk"]);
    guest.ok(&["vm-start", "vm=guest"]);
    let mut command = guest.world.xe();
    let timeout = format!("timeout={}", LIMIT.as_secs());
    command.args(["console", "vm=guest", "until=started from a whole disk", &timeout]);
    let nothing = std::fs::File::open("/dev/null").expect("it is there");
    let said = run_with_input(&mut command, Some(nothing), LIMIT);
    assert!(said.stdout.contains("started from a whole disk"), "{said:?}");
    guest.ok(&["vm-shutdown", "vm=guest", "--force"]);
    let pbd = guest.value(&["pbd-list", &format!("sr-uuid={sr}"), "--minimal"]);
    guest.ok(&["pbd-unplug", &format!("uuid={pbd}")]);
    guest.ok(&["sr-forget", &format!("uuid={sr}")]);
    guest.world.finish();
}
