//! `udev` SRs, whose VDIs are devices of the host: `tapiod` and `xe` in a guest that has software RAID, device-mapper
//! and I/O schedulers of its own. The stories are in `tests/guest/uml-devices.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// A quarter of a minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(150);

#[test]
fn devices_are_given_to_guests_and_their_queues_are_set() {
    needs!(
        Uml::TOOLS[0],
        Uml::TOOLS[1],
        Uml::TOOLS[2],
        "sfdisk",
        "mdadm",
        "dmsetup",
        "losetup",
        "blkdiscard"
    );
    let scratch = Scratch::on_disk();
    let disk =
        DiskOptions::raw(&scratch.raw_image("queued.raw", 16 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new("devices", &disk.vhost).with("bin", &programs).within(LIMIT);
    let report = guest.run(&scratch);
    disk.stop();
    for part in ["given", "discards", "plugs", "queues"] {
        report.text(part);
    }
}
