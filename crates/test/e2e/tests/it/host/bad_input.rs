//! Images that cannot be served: one clear error each, and an ordinary exit.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::{Scratch, SmallFileSystem};
use tapio_e2e::tools::skip;

use super::MIB;

/// Where `vhd-util create` puts the block table.
const BAT_OFFSET: u64 = 1536;

/// The message must name the object and say one of these words about it; it is short, and no crash report.
#[track_caller]
fn assert_clear(said: &str, object: &str, causes: &[&str]) {
    assert!(said.contains(object), "{object:?} is not named in: {said}");
    let lower = said.to_lowercase();
    assert!(causes.iter().any(|cause| lower.contains(cause)), "none of {causes:?} in: {said}");
    assert!(!lower.contains("panicked") && !lower.contains("backtrace"), "{said}");
    assert!(said.trim().lines().count() <= 6, "a report instead of an error: {said}");
}

/// An image with a few blocks of data.
fn filled_vhd(scratch: &Scratch, name: &str) -> std::path::PathBuf {
    let image = create_vhd(scratch.join(name), 32);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'd' * (8 << 20), 0)\nh.flush()");
    disk.stop();
    image
}

fn overwrite(image: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(image).expect("the image opens");
    file.write_all_at(bytes, at).expect("the image can be written");
}

#[test]
fn a_file_that_is_not_there() {
    let scratch = Scratch::on_disk();
    let said = DiskOptions::vhd(&scratch.join("nowhere.vhd")).nbd().refused(scratch.path());
    assert_clear(&said, "nowhere.vhd", &["no such file", "not exist", "not found"]);
}

#[test]
fn a_file_that_is_no_vhd() {
    let scratch = Scratch::on_disk();
    for (name, len) in [("empty.vhd", 0), ("short.vhd", 100), ("zeroes.vhd", MIB)] {
        let said = DiskOptions::vhd(&scratch.raw_image(name, len)).nbd().refused(scratch.path());
        assert_clear(&said, name, &["vhd", "footer", "cookie", "short"]);
    }
}

#[test]
fn a_parent_that_is_gone() {
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    std::fs::remove_file(&base).expect("the parent can be removed");
    let said = DiskOptions::vhd(&leaf).nbd().refused(scratch.path());
    assert_clear(&said, "base.vhd", &["parent", "no such file", "not found"]);
    assert!(said.contains("leaf.vhd"), "whose parent is it? {said}");
}

#[test]
fn a_chain_that_bites_its_tail() {
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let (middle, leaf) = (scratch.join("middle.vhd"), scratch.join("leaf.vhd"));
    // -e: otherwise the child of an empty image becomes the child of that image's parent.
    vhd_util(&["snapshot", "-n", text(&middle), "-p", text(&base), "-e"]).ok();
    vhd_util(&["snapshot", "-n", text(&leaf), "-p", text(&middle), "-e"]).ok();
    // The tool may see it coming; then the loop is made by exchanging files, which it cannot see.
    if !vhd_util(&["modify", "-n", text(&middle), "-p", text(&leaf)]).status.success() {
        std::fs::copy(&leaf, &base).expect("the base is replaced by its grandchild");
    }
    let said = DiskOptions::vhd(&leaf).nbd().refused(scratch.path());
    assert_clear(&said, ".vhd", &["loop", "cycle", "ancestor", "uuid"]);
}

#[test]
fn an_image_that_was_cut_off() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = filled_vhd(&scratch, "cut.vhd");
    let file = OpenOptions::new().write(true).open(&image).expect("the image opens");
    file.set_len(5 * MIB).expect("the image can be cut");
    let said = DiskOptions::vhd(&image).nbd().refused(scratch.path());
    assert_clear(&said, "cut.vhd", &["end", "beyond", "past", "trunc", "short", "outside"]);
    let checked = vhd_util(&["check", "-n", text(&image)]);
    assert!(!checked.status.success(), "{checked}");
}

#[test]
fn two_blocks_in_one_place() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = filled_vhd(&scratch, "overlap.vhd");
    let file = OpenOptions::new().read(true).open(&image).expect("the image opens");
    let mut first = [0; 4];
    file.read_exact_at(&mut first, BAT_OFFSET).expect("the block table");
    assert_ne!(first, [0xff; 4], "the first block was written");
    overwrite(&image, BAT_OFFSET + 4, &first);
    let said = DiskOptions::vhd(&image).nbd().refused(scratch.path());
    assert_clear(&said, "overlap.vhd", &["overlap", "same", "twice", "share"]);
    let checked = vhd_util(&["check", "-n", text(&image)]);
    assert!(!checked.status.success(), "{checked}");
}

#[test]
fn a_block_inside_the_headers() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = filled_vhd(&scratch, "inside.vhd");
    overwrite(&image, BAT_OFFSET, &1_u32.to_be_bytes());
    let said = DiskOptions::vhd(&image).nbd().refused(scratch.path());
    assert_clear(&said, "inside.vhd", &["header", "metadata", "overlap", "before", "inside"]);
}

#[test]
fn an_unknown_type_of_image() {
    let scratch = Scratch::on_disk();
    let image = scratch.raw_image("a.raw", MIB);
    let binary = tapio_e2e::tools::our("tapio-disk");
    let socket = scratch.join("n.sock");
    let odd = format!("floppy:{}", image.display());
    let mut command = Command::new(binary);
    command.args(["--foreground", "--image", &odd, "--nbd-unix", text(&socket)]);
    let said = run(&mut command).fails();
    assert_clear(&said, "floppy", &["type", "kind"]);
}

#[test]
fn an_image_on_a_read_only_file_system() {
    let small = match SmallFileSystem::mount(16 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let image = create_vhd(small.path().join("a.vhd"), 8);
    run(Command::new("mount").args(["-o", "remount,ro"]).arg(small.path())).ok();
    let said = DiskOptions::vhd(&image).nbd().refused(scratch.path());
    assert_clear(&said, "a.vhd", &["read-only"]);
    // Reading it is another matter.
    let disk = DiskOptions::vhd(&image).arg("--read-only").nbd().start(scratch.path());
    nbdsh(&disk.uri(), "assert h.is_read_only()\nassert h.pread(4096, 0) == bytes(4096)");
    disk.stop();
}
