//! Two disk processes on one device of a kernel that has device-mapper and throttles: `tests/guest/uml-fairness.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

const LIMIT: Duration = Duration::from_secs(240);

#[test]
fn a_device_is_shared_by_bytes_whatever_the_requests() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "dmsetup");
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("a.raw", 16 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapio-bench").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new("fairness", &disk.vhost).with("bin", &programs).within(LIMIT);
    let report = guest.run(&scratch);
    disk.stop();
    // The device is the file system's below dm-delay and the loop device.
    assert!(!report.text("device").contains("not shared"), "{report:?}");
    let (free, even) = (report.number("ratio_off"), report.number("ratio_on"));
    assert!(free > 400, "without sharing the large requests get most of it: {report:?}");
    assert!(even < 200 && even > 50, "{report:?}");
}
