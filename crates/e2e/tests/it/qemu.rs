//! Debian's kernel under QEMU's emulator: virtio over PCI, two queues.

use tapio_e2e::client::sha256;
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd};
use tapio_e2e::guest::{Qemu, Report};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

const MIB: u64 = 1 << 20;

/// Boots the guest, or says why it cannot.
fn boot(case: &str, options: &DiskOptions, scratch: &Scratch) -> Option<Report> {
    let kernel = match Qemu::kernel() {
        Ok(kernel) => kernel,
        Err(reason) => {
            skip(&reason);
            return None;
        }
    };
    let disk = options.clone().vhost_user().arg("--queues").arg("2").start(scratch.path());
    let report = Qemu::new(case, &disk.vhost).start(&kernel, scratch).finish();
    disk.stop();
    Some(report)
}

#[test]
fn both_queues_carry_data_to_a_raw_image() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let scratch = Scratch::in_memory();
    let image = scratch.raw_image("a.raw", 32 * MIB);
    let Some(report) = boot("pattern", &DiskOptions::raw(&image), &scratch) else { return };
    assert_eq!(report.number("sectors"), 32 * MIB / 512);
    assert_eq!(report.number("queues"), 2);
    assert_eq!(report.text("write_cache"), "write back");
    assert!(report.number("discard_max") > 0, "{report:?}");
    // The guest wrote the disk from end to end: the file must hold exactly what it read back.
    assert_eq!(sha256(&image), report.text("pattern"));
}

#[test]
fn a_file_system_on_a_vhd() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let Some(report) = boot("fs", &DiskOptions::vhd(&image), &scratch) else { return };
    assert_eq!(report.number("sectors"), 64 * MIB / 512);
    assert!(!report.text("tree").is_empty());
    assert_vhd_valid(&image);
}
