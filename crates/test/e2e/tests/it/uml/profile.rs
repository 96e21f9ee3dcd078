//! `tapio profile` on targets of device-mapper and software RAID in a guest. The stories are in
//! `tests/guest/uml-profile.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Some twenty seconds where nothing else runs.
const LIMIT: Duration = Duration::from_secs(150);

#[test]
#[ignore = "it compares times: for a host where nothing else runs"]
fn targets_are_recognised_and_left_as_they_were() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "mdadm", "dmsetup", "losetup", "blockdev");
    let scratch = Scratch::on_disk();
    let disk =
        DiskOptions::raw(&scratch.raw_image("profiled.raw", 64 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new("profile", &disk.vhost).with("bin", &programs).within(LIMIT);
    let report = guest.run(&scratch);
    disk.stop();
    for part in ["delay_ms", "ratio", "stripes", "disk", "sr"] {
        report.text(part);
    }
}
