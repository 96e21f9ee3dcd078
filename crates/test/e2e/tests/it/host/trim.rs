//! What a client trims goes back to the file system, and the image stays valid.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use tapio_e2e::client::{copy_out, nbdsh, random_file};
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::poll_until;
use tapio_e2e::scratch::Scratch;

use super::MIB;

/// Bytes that the file takes on the disk.
fn used(path: &Path) -> u64 {
    path.metadata().expect("the image is there").blocks() * 512
}

fn blocks(path: &Path) -> u64 {
    let said = vhd_util(&["query", "-n", text(path), "-a"]).ok();
    said.trim().parse().unwrap_or_else(|error| panic!("{said:?}: {error}"))
}

#[test]
fn trimmed_blocks_go_back_to_the_file_system_and_are_used_again() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(
        &disk.uri(),
        "for at in range(16): h.pwrite(bytes([at + 1]) * (2 << 20), at * (2 << 20))\nh.flush()",
    );
    let before = used(&image);
    assert!(before >= 32 * MIB, "{before}");
    // Whole blocks, two and a half, and two halves one after the other.
    nbdsh(
        &disk.uri(),
        "h.trim(8 << 20, 0)\nh.zero(5 << 20, 10 << 20)\nh.trim(1 << 20, 20 << 20)\nh.trim(1 << 20, 21 << 20)\nh.flush()",
    );
    let less = poll_until(Duration::from_secs(60), || (used(&image) <= before - 14 * MIB).then_some(()));
    assert!(less.is_some(), "{before} bytes became {}", used(&image));
    disk.stop();
    let len = image.metadata().expect("the image is there").len();
    // Their places serve new blocks.
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "for at in range(20, 24): h.pwrite(b'n' * 4096, at * (2 << 20))\nh.flush()");
    let copy = scratch.join("copy.raw");
    copy_out(&disk.uri(), &copy);
    disk.stop();
    assert_vhd_valid(&image);
    assert_eq!(blocks(&image), 16 - 4 - 2 - 1 + 4);
    assert_eq!(
        image.metadata().expect("the image is there").len(),
        len,
        "new blocks were put behind the old ones"
    );
    let bytes = std::fs::read(&copy).expect("the copy");
    let at = |mib: u64| bytes[(mib * MIB) as usize];
    assert_eq!([at(0), at(7), at(10), at(14), at(20), at(21), at(40)], [0, 0, 0, 0, 0, 0, b'n']);
    assert_eq!([at(8), at(15), at(16), at(22), at(30)], [5, 8, 9, 12, 16]);
}

#[test]
fn a_trimmed_block_of_a_child_does_not_show_its_parent() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'p' * (4 << 20), 0)\nh.flush()");
    disk.stop();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    // Two blocks over data of the parent, two over nothing.
    nbdsh(
        &disk.uri(),
        "h.pwrite(b'c' * (8 << 20), 0)\nh.flush()\nh.trim(2 << 20, 0)\nh.trim(2 << 20, 6 << 20)\nh.flush()",
    );
    let read = nbdsh(&disk.uri(), "print([h.pread(512, at << 20)[0] for at in (0, 2, 4, 6)])");
    assert_eq!(read.trim(), format!("[0, {c}, {c}, 0]", c = b'c'));
    disk.stop();
    assert_vhd_valid(&leaf);
    assert_eq!(blocks(&leaf), 3, "the block over the parent's data stays");
}

#[test]
fn an_image_that_is_trimmed_empty_becomes_small() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 48);
    let empty = image.metadata().expect("the image is there").len();
    let original = scratch.join("original.raw");
    random_file(&original, 48 * MIB);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    tapio_e2e::client::tool("nbdcopy", &["--flush", text(&original), &disk.uri()]).ok();
    nbdsh(&disk.uri(), "h.trim(h.get_size(), 0)");
    disk.stop();
    assert_vhd_valid(&image);
    assert_eq!((blocks(&image), image.metadata().expect("the image is there").len()), (0, empty));
}
