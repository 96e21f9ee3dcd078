//! SRs of logical volumes (`lvm`): `tapiod` and `xe` in a guest that has device-mapper, on two disks of ours.
//! The stories are in `tests/guest/uml-volumes.sh`.

use std::time::Duration;

use tapio_e2e::guest::{Report, Uml};
use tapio_e2e::needs;

use super::volume_groups::on_two_disks;

/// Half of a minute where nothing else runs: each of LVM's programs looks at all devices.
const LIMIT: Duration = Duration::from_secs(200);

macro_rules! needs_lvm {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm", "qemu-img", "qemu-io");
    };
}

fn run(case: &str) -> Report {
    on_two_disks(case, [("a.raw", 320 << 20), ("b.raw", 256 << 20)], LIMIT)
}

#[test]
fn an_sr_of_volumes_lives_from_its_making_to_its_end() {
    needs_lvm!();
    run("volumes").text("life");
}

#[test]
fn an_sr_of_volumes_made_by_hand_is_taken_in_and_ours_is_read_by_others() {
    needs_lvm!();
    let report = run("volumes_others");
    for part in ["hand", "sectors"] {
        report.text(part);
    }
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes its steps"]
fn what_a_kill_leaves_among_volumes_is_put_in_order() {
    needs_lvm!();
    let report = run("volumes_kills");
    for part in ["create", "resize", "fork", "data"] {
        report.text(part);
    }
}

#[test]
fn a_copy_of_an_sr_gets_uuids_of_its_own_whatever_breaks_it_off() {
    needs_lvm!();
    run("resign").text("kills");
}
