//! Debian's kernel under QEMU's emulator: virtio over PCI, two queues.

mod browser;
mod cloud_image;
mod devices;
mod driver;
mod firmware;
mod guest_agent;
mod network;
mod screen;
mod toolstack;

use std::path::PathBuf;
use std::time::Duration;

use tapio_e2e::client::sha256;
use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, snapshot_vhd, text};
use tapio_e2e::guest::{Qemu, Qmp, Report};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

const MIB: u64 = 1 << 20;

/// The kernel to boot, or why there is none.
fn kernel() -> Option<PathBuf> {
    Qemu::kernel().map_err(|reason| skip(&reason)).ok()
}

/// Boots the guest, or says why it cannot.
fn boot(
    case: &str,
    options: &DiskOptions,
    scratch: &Scratch,
    change: impl FnOnce(Qemu) -> Qemu,
) -> Option<Report> {
    let kernel = kernel()?;
    let disk = options.clone().vhost_user().arg("--queues").arg("2").start(scratch.path());
    let report = change(Qemu::new(case, &disk.vhost)).start(&kernel, scratch).finish();
    disk.stop();
    Some(report)
}

#[test]
fn both_queues_carry_data_to_a_raw_image() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let scratch = Scratch::in_memory();
    let image = scratch.raw_image("a.raw", 32 * MIB);
    let Some(report) = boot("pattern", &DiskOptions::raw(&image), &scratch, |qemu| qemu) else { return };
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
    let Some(report) = boot("fs", &DiskOptions::vhd(&image), &scratch, |qemu| qemu) else { return };
    assert_eq!(report.number("sectors"), 64 * MIB / 512);
    assert!(!report.text("tree").is_empty());
    assert_vhd_valid(&image);
}

#[test]
fn packed_rings_carry_data_and_file_systems() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let scratch = Scratch::in_memory();
    let image = scratch.raw_image("a.raw", 32 * MIB);
    let report = boot("pattern", &DiskOptions::raw(&image), &scratch, Qemu::packed);
    let Some(report) = report else { return };
    // Bit 34 of the features that driver and device agreed on.
    assert_eq!(report.text("features").as_bytes().get(34), Some(&b'1'), "{report:?}");
    assert_eq!(sha256(&image), report.text("pattern"));
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let report = boot("fs", &DiskOptions::vhd(&image), &scratch, Qemu::packed);
    assert!(!report.expect("it ran before").text("tree").is_empty());
    assert_vhd_valid(&image);
}

/// QEMU tries to reach a disk process that is gone once a second: every kill is a pause of about that.
fn killed_under_load(change: impl FnOnce(Qemu) -> Qemu, kills: u64) {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 64);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let options = DiskOptions::vhd(&leaf).vhost_user().arg("--queues").arg("2");
    let mut disk = options.start(scratch.path());
    let rounds = (2 * kills).to_string();
    let qemu = Qemu::new("load", &disk.vhost).reconnecting().with("rounds", &rounds);
    let mut guest = change(qemu).start(&kernel, &scratch);
    for kill in 0..kills {
        guest.wait_for("round", kill);
        // In the middle of writing, of reading, between both.
        std::thread::sleep(Duration::from_millis(kill * 37 % 150));
        disk.process.kill();
        options.restart(scratch.path(), &mut disk);
    }
    let report = guest.finish();
    println!("{kills} kills, {} rounds; longest write {} ms", rounds, report.text("longest_write_ms"));
    assert_eq!(report.number("round"), 2 * kills);
    disk.stop();
    assert_vhd_valid(&leaf);
    assert_vhd_valid(&base);
}

#[test]
fn a_guest_goes_on_while_its_disk_process_is_killed_again_and_again() {
    killed_under_load(|qemu| qemu, 20);
}

#[test]
fn a_guest_with_packed_rings_goes_on_while_its_disk_process_is_killed() {
    killed_under_load(Qemu::packed, 6);
}

/// The guest moves from one QEMU to another, and its disk from one process to another, while it writes and verifies.
/// The second process knows the disk but has no image open until the first has closed it.
fn migrated_under_load(change: impl Fn(Qemu) -> Qemu) {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let (scratch, there) = (Scratch::on_disk(), Scratch::on_disk());
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let name = format!("vhd:{}", text(&image));
    let (here_socket, there_socket) = (scratch.join("vhost.sock"), there.join("vhost.sock"));
    let arriving = Host::new(&there).create(&name);
    arriving.add_vhost_user_queues(&there_socket, 2);
    arriving.ctl("pause", &[]).ok();
    let leaving = Host::new(&scratch).create(&name);
    leaving.add_vhost_user_queues(&here_socket, 2);
    let (qmp, gate) = (scratch.join("qmp.sock"), there.join("gate.sock"));
    let qemu = |socket| change(Qemu::new("load", socket).with("rounds", "60"));
    let mut guest = qemu(&here_socket).qmp(&qmp).start(&kernel, &scratch);
    let mut arrived = qemu(&there_socket).incoming(&gate).start(&kernel, &there);
    guest.wait_for("round", 5);
    arrived.wait_until_listening(&gate);
    // This takes a second or two, and the guest's page cache changes all the while.
    Qmp::connect(&qmp).migrate(&gate, 64 * MIB);
    let left_after = guest.report().number("round");
    // The first disk process hands the image over; the guest waits for its second half a moment.
    leaving.ctl("pause", &[]).ok();
    arriving.ctl("unpause", &[]).ok();
    let report = arrived.finish();
    println!("moved in round {left_after}; longest write {} ms", report.text("longest_write_ms"));
    assert!(left_after > 5 && left_after < 60, "moved in round {left_after}");
    assert_eq!(report.number("round"), 60);
    guest.kill();
    leaving.destroy();
    arriving.destroy();
    assert_vhd_valid(&image);
}

#[test]
fn a_guest_migrates_live_from_one_disk_process_to_another() {
    migrated_under_load(|qemu| qemu);
}

#[test]
fn a_guest_with_packed_rings_migrates_live() {
    migrated_under_load(Qemu::packed);
}

/// The guest's kernel notices a disk that grows while it is used, and can use what was added.
#[test]
fn a_guest_hears_of_a_disk_that_grows() {
    needs!(Qemu::TOOLS[0], Qemu::TOOLS[1]);
    let Some(kernel) = kernel() else { return };
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    let socket = scratch.join("vhost.sock");
    tap.add_vhost_user_queues(&socket, 2);
    let mut guest = Qemu::new("grow", &socket).start(&kernel, &scratch);
    guest.wait_for("ready", 1);
    run(&mut host.tapio(&["disk", "grow", &tap.minor.to_string(), "96MiB"])).ok();
    let report = guest.finish();
    assert_eq!((report.number("sectors"), report.number("grown")), (64 * MIB / 512, 96 * MIB / 512));
    tap.destroy();
    assert_vhd_valid(&image);
}
