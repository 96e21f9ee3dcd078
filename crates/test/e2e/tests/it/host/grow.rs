//! Disks that become larger while they are used.

use std::path::Path;

use tapio_e2e::client::{nbdinfo, nbdsh};
use tapio_e2e::disk::{DiskOptions, Host, Tap, assert_vhd_valid, create_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, run};
use tapio_e2e::scratch::Scratch;

use super::MIB;

fn grow(host: &Host, tap: &Tap, size: &str) -> Finished {
    run(&mut host.tapio(&["disk", "grow", &tap.minor.to_string(), size, "--json"]))
}

fn grown_to(host: &Host, tap: &Tap, size: &str) -> u64 {
    let said: serde_json::Value = serde_json::from_str(&grow(host, tap, size).ok()).expect("JSON");
    assert_eq!(said["minor"], tap.minor);
    said["len"].as_u64().expect("a number")
}

fn size(tap: &Tap) -> u64 {
    nbdinfo(&tap.uri())["export-size"].as_u64().expect("a size")
}

/// Writes and reads back until it is done, and in the middle lets `change` happen.
fn under_load(uri: &str, change: impl FnOnce()) {
    let load = "import os
for turn in range(300):
    at = (turn * 7919 % 480) * 131072
    data = os.urandom(65536)
    h.pwrite(data, at)
    if turn % 20 == 0: h.flush()
    assert h.pread(65536, at) == data, at";
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| nbdsh(uri, load));
        change();
        assert!(loading.join().is_ok(), "the load failed");
    });
}

fn make(path: &Path, mib: u64, room_mib: u64) -> String {
    vhd_util(&["create", "-n", text(path), "-s", &mib.to_string(), "-S", &room_mib.to_string()]).ok();
    format!("vhd:{}", text(path))
}

#[test]
fn a_vhd_with_room_in_its_table_grows_in_place() {
    needs!("nbdsh", "nbdinfo");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.join("a.vhd");
    let tap = host.create(&make(&image, 64, 4096));
    under_load(&tap.uri(), || {
        assert_eq!(grown_to(&host, &tap, "301MiB"), 301 * MIB, "not rounded to whole blocks");
        assert_eq!(grown_to(&host, &tap, "1GiB"), 1024 * MIB);
    });
    assert_eq!(size(&tap), 1024 * MIB);
    nbdsh(
        &tap.uri(),
        "assert h.pread(512, 1000 << 20) == b'\\0' * 512\nh.pwrite(b'e' * 512, (1024 << 20) - 512)",
    );
    let refused = grow(&host, &tap, "64MiB").fails();
    assert!(refused.contains("not made smaller"), "{refused}");
    // A process that dies right after it has grown.
    let uri = tap.uri();
    nbdsh(&uri, "h.flush()");
    tap.kill();
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(
        &disk.uri(),
        "assert h.get_size() == 1024 << 20\nassert h.pread(512, (1024 << 20) - 512) == b'e' * 512",
    );
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn a_vhd_without_room_grows_while_its_guest_waits() {
    needs!("nbdsh", "nbdinfo");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    nbdsh(&tap.uri(), "h.pwrite(b'first' * 1024, 63 << 20)");
    under_load(&tap.uri(), || assert_eq!(grown_to(&host, &tap, "40GiB"), 40960 * MIB));
    assert_eq!(size(&tap), 40960 * MIB);
    nbdsh(
        &tap.uri(),
        "assert h.pread(5120, 63 << 20) == b'first' * 1024\nh.pwrite(b'e' * 512, (40 << 30) - 512)\nh.flush()",
    );
    tap.destroy();
    assert_vhd_valid(&image);
    assert!(!scratch.join("a.vhd.resize-journal").exists());
}

#[test]
fn raw_and_fixed_images_grow() {
    needs!("nbdsh", "nbdinfo");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let fixed = scratch.join("f.vhd");
    vhd_util(&["create", "-n", text(&fixed), "-s", "64", "-r"]).ok();
    let raw = scratch.raw_image("a.raw", 64 * MIB);
    for image in [format!("aio:{}", text(&raw)), format!("vhd:{}", text(&fixed))] {
        let tap = host.create(&image);
        under_load(&tap.uri(), || assert_eq!(grown_to(&host, &tap, "96M"), 96 * MIB, "{image}"));
        nbdsh(
            &tap.uri(),
            "assert h.get_size() == 96 << 20\nh.pwrite(b'e' * 512, (96 << 20) - 512)\nh.flush()",
        );
        tap.destroy();
    }
    assert_vhd_valid(&fixed);
}

#[test]
fn a_resize_that_was_broken_off_is_put_in_order() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'kept' * 1024, 0)\nh.flush()");
    disk.stop();
    let journal = scratch.join("a.vhd.resize-journal");
    for step in ["BEGIN", "DATA_MOVED", "METADATA_MOVED"] {
        let mut resize = tapio_e2e::disk::tapio(&["vhd-util", "resize", "-n", text(&image), "-s", "40960"]);
        resize.args(["-j", text(&journal)]).env(format!("VHD_UTIL_TEST_FAIL_RESIZE_{step}"), "1");
        assert!(!run(&mut resize).status.success());
        assert!(journal.exists(), "{step}: nothing was broken off");
        let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
        nbdsh(
            &disk.uri(),
            "assert h.get_size() == 64 << 20\nassert h.pread(4096, 0) == b'kept' * 1024\nh.pwrite(b'x' * 512, 8192)",
        );
        disk.stop();
        assert!(!journal.exists());
        assert_vhd_valid(&image);
    }
}
