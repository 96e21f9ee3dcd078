//! `iscsi`, `hba`, `lvmoiscsi` and `lvmohba` SRs: `tapiod` and `xe` in a guest that has both sides of iSCSI. The
//! stories are in `tests/guest/uml-iscsi.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Half of a minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(300);

fn run(case: &str, parts: &[&str]) {
    run_within(LIMIT, case, parts);
}

fn run_within(limit: Duration, case: &str, parts: &[&str]) {
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("luns.raw", 384 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new(case, &disk.vhost).with("bin", &programs).within(limit);
    let report = guest.run(&scratch);
    disk.stop();
    for part in parts {
        report.text(part);
    }
}

macro_rules! needs_iscsi {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "iscsiadm", "iscsid", "losetup", "lvm");
    };
}

#[test]
fn luns_are_disks_of_vms_through_lost_sessions_and_kills() {
    needs_iscsi!();
    run("iscsi", &["probes", "luns", "again", "hba", "kills"]);
}

#[test]
fn volumes_on_luns_live_through_lost_sessions() {
    needs_iscsi!();
    run("iscsi_volumes", &["volumes"]);
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes SRs of one VDI"]
fn an_sr_of_one_vdi_has_a_lun_of_its_own() {
    needs_iscsi!();
    run_within(3 * LIMIT, "iscsi_one_vdi", &["lvmoiscsi", "lvmohba"]);
}
