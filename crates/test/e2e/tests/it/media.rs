//! CD drives whose media change while the VM runs: what the guest reads, and what becomes of it when the guest locks
//! its drive, the disk process dies, or the daemon.

use tapio_e2e::left_behind::left_behind;
use tapio_e2e::process::{poll_until, run_within, signal};

use crate::machines::Guest;

/// What the guest reads of its drive: the size in sectors, and the first bytes. A drive tells of a change first: an
/// emulated IDE drive by two commands that fail.
const READ: &str = "rm -f /tmp/cd; for i in 1 2 3; do dd if=/dev/sr0 of=/tmp/cd bs=2k count=1 2>/dev/null && break; done; \
                    [ -s /tmp/cd ] && echo \"= $(cat /sys/block/sr0/size) $(head -c 3 /tmp/cd)\" || echo '= no medium'";

/// Makes an ISO library with the images `cd.iso`, 64 KiB of `c`, and `other.iso`, 128 KiB of `o`.
#[track_caller]
pub fn library(guest: &Guest) {
    let isos = guest.world.scratch.join("isos");
    std::fs::create_dir(&isos).expect("a directory");
    std::fs::write(isos.join("cd.iso"), [b'c'; 64 << 10]).expect("an image");
    std::fs::write(isos.join("other.iso"), [b'o'; 128 << 10]).expect("an image");
    let location = format!("device-config:location={}", isos.display());
    let sr =
        ["sr-create", "name-label=isos", "type=iso", "content-type=iso", "device-config:legacy_mode=true"];
    guest.ok(&[&sr[..], &[location.as_str()]].concat());
}

fn drive(guest: &Guest) -> String {
    guest.value(&["vbd-list", "vm-name-label=guest", "userdevice=3", "params=uuid", "--minimal"])
}

/// Whether the drive is empty, and whether it is plugged.
fn state(guest: &Guest, drive: &str) -> (String, String) {
    let field = |name: &str| guest.value(&["vbd-param-get", drive, &format!("param-name={name}")]);
    (field("empty"), field("currently-attached"))
}

/// Media come and go in a drive that stays.
#[track_caller]
pub fn come_and_go(guest: &Guest) {
    let drive = format!("uuid={}", drive(guest));
    assert_eq!(guest.shell(READ), ["128 ccc"]);
    assert_eq!(guest.shell("echo x 2>/dev/null >/dev/sr0 || echo '= refused'"), ["refused"]);
    guest.ok(&["vbd-eject", &drive]);
    assert_eq!(
        guest.shell(&format!("[ -e /sys/block/sr0 ] && echo '= there'; {READ}")),
        ["there", "no medium"]
    );
    assert_eq!(state(guest, &drive), ("true".into(), "true".into()));
    guest.ok(&["vm-cd-insert", "vm=guest", "cd-name=other.iso"]);
    assert_eq!(guest.shell(READ), ["256 ooo"]);
    // A drive that a program of the guest has open is locked.
    guest.shell("exec 3</dev/sr0");
    guest.ok(&["vbd-param-set", &drive, "other-config:unplug-timeout=1"]);
    let refused =
        run_within(guest.world.xe().args(["vbd-eject", &drive]), std::time::Duration::from_secs(60));
    assert!(refused.fails().contains("locked"), "the guest has locked its drive");
    assert_eq!(state(guest, &drive), ("false".into(), "true".into()));
    guest.shell("exec 3<&-");
    guest.ok(&["vbd-eject", &drive]);
    guest.ok(&["vbd-param-remove", &drive, "param-name=other-config", "param-key=unplug-timeout"]);
    guest.ok(&["vm-cd-insert", "vm=guest", "cd-name=cd.iso"]);
    assert_eq!(guest.shell(READ), ["128 ccc"]);
}

/// The disk process of the medium dies, then the daemon; the guest reads on, and the drive is the same.
#[track_caller]
pub fn outlive_their_processes(guest: &mut Guest) {
    let drive = drive(guest);
    let mark = format!("TAPIO_VBD={drive}");
    let of_drive = |guest: &Guest| {
        let all = left_behind(guest.world.scratch.path(), guest.world.daemon().process.pid());
        all.into_iter().find(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())
        })
    };
    let process = of_drive(guest).expect("the medium has a process");
    signal(process, libc::SIGKILL).expect("it is ours");
    let limit = std::time::Duration::from_secs(60);
    let other = poll_until(limit, || of_drive(guest).filter(|now| *now != process));
    assert!(other.is_some(), "no other process takes its place");
    let direct = "dd if=/dev/sr0 bs=2k skip=9 count=1 iflag=direct 2>/dev/null | head -c 3 >/tmp/cd; echo \"= $(cat /tmp/cd)\"";
    assert_eq!(guest.shell(direct), ["ccc"]);
    guest.world.kill_and_restart();
    let drive = format!("uuid={drive}");
    assert_eq!(state(guest, &drive), ("false".into(), "true".into()));
    guest.ok(&["vbd-eject", &drive]);
    assert_eq!(guest.shell(READ), ["no medium"]);
    guest.ok(&["vm-cd-insert", "vm=guest", "cd-name=cd.iso"]);
    assert_eq!(guest.shell(READ), ["128 ccc"]);
}
