//! Disks as devices of a host with ublk and nbd: a VM with our programs inside.

use tapio_e2e::guest::{DeviceVm, Report};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

/// What a device of 320 MiB must be, and that both file systems were made, filled, checked and compared on it.
fn judge_file_systems(report: &Report, how: &str) {
    let of = |key: &str| format!("{how}.{key}");
    assert_eq!(report.number(&of("sectors")), 320 << 11, "{report:?}");
    assert_eq!(report.text(&of("write_cache")), "write back");
    assert!(report.number(&of("discard_max")) > 0, "{report:?}");
    for fs in ["ext4", "xfs"] {
        assert_eq!(report.text(&of(fs)).len(), 64, "a digest");
    }
}

/// The same of a device that outlives its process.
fn judge(report: &Report, how: &str) {
    judge_file_systems(report, how);
    let of = |key: &str| format!("{how}.{key}");
    assert_eq!(report.text(&of("fua")), "1");
    // Killed under a writer, started again: the guest has compared what it wrote.
    assert!(report.number(&of("survived")) > 0);
    let refused = report.text(&of("refused"));
    assert!(refused.contains("clean --waiting"), "{refused}");
}

#[test]
fn devices_carry_file_systems_and_those_of_ublk_and_nbd_survive_their_process() {
    needs!(
        DeviceVm::TOOLS[0],
        DeviceVm::TOOLS[1],
        DeviceVm::TOOLS[2],
        DeviceVm::TOOLS[3],
        DeviceVm::TOOLS[4],
        DeviceVm::TOOLS[5]
    );
    let kernel = match DeviceVm::kernel() {
        Ok(kernel) => kernel,
        Err(reason) => return skip(&reason),
    };
    let scratch = Scratch::in_memory();
    let report = DeviceVm::new("devices").start(&kernel, &scratch).finish();
    for kind in ["ublk", "nbd", "fuse"] {
        assert_eq!(report.text(&format!("probe.{kind}")).trim(), "works", "{report:?}");
    }
    judge_file_systems(&report, "fuse");
    assert_eq!(report.number("fuse.direct"), 1, "the loop device goes past the page cache");
    judge(&report, "ublk");
    assert!(report.number("ublk.write_zeroes_max") > 0, "{report:?}");
    judge(&report, "nbd");
    assert_eq!(report.number("nbd.stalled"), 1);
}
