//! fio with verification over NBD.

use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd};
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

/// Random writes of mixed sizes, every block carrying a checksum of its content and place, then all read back.
fn verify(options: &DiskOptions, scratch: &Scratch) {
    let disk = options.clone().nbd().start(scratch.path());
    let uri = format!("--uri={}", disk.uri());
    let mut fio = Command::new("fio");
    fio.args([
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bsrange=4k-128k",
        "--bs_unaligned=0",
    ]);
    fio.args(["--blockalign=4k", "--iodepth=32", "--size=96m", "--io_size=96m", "--randseed=20"]);
    fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--fsync=64", "--output-format=terse"]);
    fio.current_dir(scratch.path());
    let finished = run_within(&mut fio, Duration::from_secs(240));
    finished.ok();
    disk.stop();
}

fn has_nbd_engine() -> bool {
    let engines = run_within(Command::new("fio").arg("--enghelp"), Duration::from_secs(60)).ok();
    let found = engines.lines().any(|line| line.trim() == "nbd");
    if !found {
        skip("needs fio with the nbd engine");
    }
    found
}

#[test]
fn random_writes_into_an_empty_vhd_read_back() {
    needs!("fio");
    if !has_nbd_engine() {
        return;
    }
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 128);
    verify(&DiskOptions::vhd(&image), &scratch);
    assert_vhd_valid(&image);
}

#[test]
fn random_writes_into_the_leaf_of_a_chain_read_back() {
    needs!("fio");
    if !has_nbd_engine() {
        return;
    }
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 128);
    verify(&DiskOptions::vhd(&base), &scratch);
    let middle = snapshot_vhd(scratch.join("middle.vhd"), &base);
    verify(&DiskOptions::vhd(&middle), &scratch);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &middle);
    verify(&DiskOptions::vhd(&leaf), &scratch);
    for image in [&base, &middle, &leaf] {
        assert_vhd_valid(image);
    }
}

#[test]
fn random_writes_into_a_raw_image_read_back() {
    needs!("fio");
    if !has_nbd_engine() {
        return;
    }
    let scratch = Scratch::on_disk();
    verify(&DiskOptions::raw(&scratch.raw_image("a.raw", 128 << 20)), &scratch);
}
