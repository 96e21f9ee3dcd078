//! `ext` SRs over LVM: `tapiod` and `xe` in a guest that has device-mapper, on two disks of ours. The stories are in
//! `tests/guest/uml-lvm.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::{Report, Uml};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Half of a minute where nothing else runs: each of LVM's programs looks at all devices.
const LIMIT: Duration = Duration::from_secs(150);

macro_rules! needs_lvm {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm", "qemu-io", "mountpoint");
    };
}

fn run(case: &str) -> Report {
    // Of different sizes: stripes take what both have.
    on_two_disks(case, [("a.raw", 192 << 20), ("b.raw", 160 << 20)], LIMIT)
}

/// A story of the toolstack in a guest with two disks of ours, whose files have these names and bytes.
pub(super) fn on_two_disks(case: &str, sizes: [(&str, u64); 2], limit: Duration) -> Report {
    on_two_disks_of(&Scratch::on_disk(), case, sizes, limit)
}

/// The same, with the files of the disks in a directory of the caller.
pub(super) fn on_two_disks_of(
    scratch: &Scratch,
    case: &str,
    sizes: [(&str, u64); 2],
    limit: Duration,
) -> Report {
    let [first, second] = sizes.map(|(name, len)| {
        DiskOptions::raw(&scratch.raw_image(name, len)).vhost_user().start(scratch.path())
    });
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new(case, &first.vhost).disk(&second.vhost).with("bin", &programs).within(limit);
    let report = guest.run(scratch);
    first.stop();
    second.stop();
    report
}

#[test]
fn srs_over_lvm_live_and_leave_nothing() {
    needs_lvm!();
    let report = run("lvm");
    for part in ["life", "foreign", "xenserver"] {
        report.text(part);
    }
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes its steps"]
fn what_a_kill_leaves_of_a_group_blocks_no_sr() {
    needs_lvm!();
    run("lvm_kills").text("kills");
}
