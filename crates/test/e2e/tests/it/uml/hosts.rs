//! Two hosts on one LUN, without a pool: two guests that have the same file as their disk, each with a `tapiod` of its
//! own. The stories are in `tests/guest/uml-hosts.sh`.

use std::path::Path;
use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::{Guest, Uml};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// A quarter of a minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(1200);

macro_rules! needs_lvm {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm");
    };
}

/// A guest that runs a case on the LUN; `dir` is where it is told things.
fn host(scratch: &Scratch, (case, lun, dir): (&str, &Path, &Path)) -> Guest {
    let own = DiskOptions::raw(&scratch.raw_image(&format!("{case}.raw"), 8 << 20)).vhost_user();
    let disk = own.start(&scratch.join(case));
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new(case, &disk.vhost).shared(lun).with("bin", &programs);
    let guest = guest.with("dir", &dir.display().to_string()).within(LIMIT).start(scratch);
    std::mem::forget(disk);
    guest
}

fn tell(dir: &Path, name: &str, what: &str) {
    let fresh = dir.join(format!(".{name}"));
    std::fs::write(&fresh, what).and_then(|()| std::fs::rename(&fresh, dir.join(name))).expect("room");
}

/// 16 MiB of words that do not repeat.
fn pattern() -> Vec<u8> {
    (0_u32..4 << 20).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect()
}

#[test]
fn two_hosts_share_a_lun_and_one_is_killed_in_a_snapshot() {
    needs_lvm!();
    let scratch = Scratch::on_disk();
    let lun = scratch.raw_image("lun.raw", 160 << 20);
    let dir = scratch.join("told");
    for each in [&dir, &scratch.join("hosts_one"), &scratch.join("hosts_two")] {
        std::fs::create_dir(each).expect("room");
    }
    std::fs::write(dir.join("pattern"), pattern()).expect("room");
    let mut one = host(&scratch, ("hosts_one", &lun, &dir));
    let mut two = host(&scratch, ("hosts_two", &lun, &dir));
    one.wait_for("plugged", 1);
    let report = one.report();
    tell(&dir, "sr", &format!("{} {}\n", report.text("sr"), report.text("vdi")));
    two.wait_for("refused", 1);
    tell(&dir, "snapshot", "now\n");
    one.wait_for("stopped", 1);
    one.kill();
    tell(&dir, "killed", "now\n");
    two.finish().text("survived");
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes growths of volumes"]
fn thin_disks_of_two_hosts_grow_on_one_lun_and_one_host_dies_in_a_growth() {
    needs_lvm!();
    let scratch = Scratch::on_disk();
    let lun = scratch.raw_image("lun.raw", 3 << 30);
    let dir = scratch.join("told");
    for each in [&dir, &scratch.join("thin_hosts_one"), &scratch.join("thin_hosts_two")] {
        std::fs::create_dir(each).expect("room");
    }
    std::fs::write(dir.join("pattern"), pattern()).expect("room");
    let mut one = host(&scratch, ("thin_hosts_one", &lun, &dir));
    let mut two = host(&scratch, ("thin_hosts_two", &lun, &dir));
    one.wait_for("plugged", 1);
    let report = one.report();
    for name in ["first", "second", "sr"] {
        tell(&dir, name, &format!("{}\n", report.text(name)));
    }
    two.wait_for("ready", 1);
    tell(&dir, "go", "now\n");
    one.wait_for("written", 1);
    two.wait_for("written", 1);
    tell(&dir, "stop", "now\n");
    one.wait_for("stopped", 1);
    one.kill();
    tell(&dir, "killed", "now\n");
    two.finish().text("holds");
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes SRs of one VDI"]
fn an_sr_of_one_vdi_lives_is_copied_and_goes_as_one() {
    needs_lvm!();
    super::volume_groups::on_two_disks("single_vdi", [("a.raw", 128 << 20), ("b.raw", 128 << 20)], LIMIT)
        .text("single");
}
