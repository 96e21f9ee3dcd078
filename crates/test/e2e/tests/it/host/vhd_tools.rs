//! Images that others write open here, and images that we write open there.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::{copy_out, nbdsh, random_file, sha256, tool};
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::Running;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_fixtures::unmounting::unmount;

use super::MIB;

#[test]
fn a_dynamic_and_a_fixed_vhd_by_qemu_img_are_served() {
    needs!("qemu-img", "nbdcopy");
    let scratch = Scratch::on_disk();
    let original = scratch.join("original.raw");
    random_file(&original, 24 * MIB);
    for subformat in ["dynamic", "fixed"] {
        let image = scratch.join(&format!("{subformat}.vhd"));
        let options = format!("subformat={subformat},force_size=on");
        tool(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "vpc", "-o", &options, text(&original), text(&image)],
        )
        .ok();
        let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
        let copy = scratch.join("copy.raw");
        copy_out(&disk.uri(), &copy);
        assert_eq!(sha256(&copy), sha256(&original), "{subformat}");
        // And written to, after which QEMU still reads it.
        nbdsh(&disk.uri(), "h.pwrite(b'q' * 8192, 12345 * 512)\nh.flush()");
        copy_out(&disk.uri(), &copy);
        disk.stop();
        tool("qemu-img", &["compare", "-f", "vpc", "-F", "raw", text(&image), text(&copy)]).ok();
    }
}

#[test]
fn qemu_img_reads_a_dynamic_vhd_that_we_wrote() {
    needs!("qemu-img", "nbdcopy");
    let scratch = Scratch::on_disk();
    let original = scratch.join("original.raw");
    random_file(&original, 30 * MIB);
    let image = create_vhd(scratch.join("a.vhd"), 30);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    tool("nbdcopy", &["--flush", text(&original), &disk.uri()]).ok();
    disk.stop();
    tool("qemu-img", &["compare", "-f", "vpc", "-F", "raw", text(&image), text(&original)]).ok();
    assert_vhd_valid(&image);
}

/// Three levels with different content in each: whole blocks, `few` bytes inside a block, and a block that only the
/// base has.
fn chain_of_three(scratch: &Scratch, few: u64) -> (std::path::PathBuf, std::path::PathBuf) {
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let write = |image: &Path, script: &str| {
        let disk = DiskOptions::vhd(image).nbd().start(scratch.path());
        nbdsh(&disk.uri(), script);
        disk.stop();
    };
    write(&base, "h.pwrite(b'b' * (6 << 20), 0)\nh.pwrite(b'B' * (2 << 20), 20 << 20)\nh.flush()");
    let middle = snapshot_vhd(scratch.join("middle.vhd"), &base);
    let few_at = (4 << 20) + few;
    write(
        &middle,
        &format!("h.pwrite(b'm' * (2 << 20), 2 << 20)\nh.pwrite(b'M' * {few}, {few_at})\nh.flush()"),
    );
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &middle);
    write(&leaf, "h.pwrite(b'l' * 4096, 3 << 20)\nh.pwrite(b'L' * 65536, 30 << 20)\nh.flush()");
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    let check = "
expected = bytearray(32 << 20)
def put(at, data): expected[at:at + len(data)] = data
put(0, b'b' * (6 << 20)); put(20 << 20, b'B' * (2 << 20))
put(2 << 20, b'm' * (2 << 20)); put(few_at, b'M' * few)
put(3 << 20, b'l' * 4096); put(30 << 20, b'L' * 65536)
assert h.pread(32 << 20, 0) == expected
";
    nbdsh(&disk.uri(), &format!("few, few_at = {few}, {few_at}\n{check}"));
    let copy = scratch.join("chain.raw");
    copy_out(&disk.uri(), &copy);
    disk.stop();
    (leaf, copy)
}

#[test]
fn libvhdi_reads_a_chain_that_we_wrote() {
    needs!("vhdiinfo", "vhdimount", "umount");
    if !Path::new("/dev/fuse").exists() {
        skip("needs /dev/fuse");
        return;
    }
    let scratch = Scratch::on_disk();
    // Eight sectors, a whole byte of the block's bitmap: where a byte has some bits set, libvhdi 20210425 reads zeroes
    // for the sectors after them that only the parent has.
    let (leaf, copy) = chain_of_three(&scratch, 4096);
    let info = tool("vhdiinfo", &[text(&leaf)]).ok();
    assert!(info.contains("ifferential") || info.contains("ifferencing"), "{info}");
    let mount = scratch.join("mount");
    std::fs::create_dir(&mount).expect("a directory");
    // -v keeps it in the foreground, so that it is our child.
    let mut vhdimount = Command::new("vhdimount");
    vhdimount.args(["-v", text(&leaf), text(&mount)]).current_dir(scratch.path());
    let mut process = Running::start(&mut vhdimount, &scratch.join("vhdimount.log"));
    // One file per level of the chain; the last is the leaf as a guest sees it.
    let file = process.wait_for("mounted image", Duration::from_secs(60), || {
        let mut names: Vec<_> = std::fs::read_dir(&mount).ok()?.flatten().map(|entry| entry.path()).collect();
        names.sort();
        names.pop()
    });
    let digest = sha256(&file);
    unmount(&mount);
    process.wait(Duration::from_secs(60));
    assert_eq!(digest, sha256(&copy));
}

#[test]
fn offline_coalesce_keeps_every_byte() {
    needs!("nbdcopy");
    let scratch = Scratch::on_disk();
    let (leaf, copy) = chain_of_three(&scratch, 512);
    let said = vhd_util(&["coalesce", "-n", text(&leaf)]).ok();
    assert!(said.starts_with("Coalesced ") && said.contains("sectors"), "{said:?}");
    // The child's content is in the parent now.
    let middle = scratch.join("middle.vhd");
    assert_vhd_valid(&middle);
    let disk = DiskOptions::vhd(&middle).nbd().start(scratch.path());
    let after = scratch.join("after.raw");
    copy_out(&disk.uri(), &after);
    disk.stop();
    assert_eq!(sha256(&after), sha256(&copy));
    // Once more, into the base.
    vhd_util(&["coalesce", "-n", text(&middle)]).ok();
    let base = scratch.join("base.vhd");
    assert_vhd_valid(&base);
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    copy_out(&disk.uri(), &after);
    disk.stop();
    assert_eq!(sha256(&after), sha256(&copy));
}

#[test]
fn vhd_util_says_what_the_storage_manager_parses() {
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 64);
    assert_eq!(std::fs::metadata(&base).expect("it exists").len(), 3584);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let query = |arguments: &[&str]| vhd_util(arguments).ok();
    let name = text(&base);
    let lines = query(&["query", "--debug", "-vsfp", "-n", name]);
    let expected = format!("64\n3584\n{name} has no parent\nhidden: 0\n");
    assert_eq!(lines, expected);
    vhd_util(&["set", "-n", name, "-f", "hidden", "-v", "1"]).ok();
    assert_eq!(query(&["query", "-f", "-n", name]), "hidden: 1\n");
    assert_eq!(query(&["query", "-p", "-n", text(&leaf)]).trim(), name);
    assert_eq!(query(&["query", "-d", "-n", text(&leaf)]), "chain depth: 2\n");
    let pattern = format!("{}/*.vhd", scratch.path().display());
    let scan = query(&["scan", "-f", "-m", &pattern]);
    assert_eq!(scan.lines().count(), 2, "{scan}");
    assert!(scan.lines().all(|line| line.contains("capacity=67108864")), "{scan}");
    assert!(scan.contains("hidden=1 parent=none"), "{scan}");
}
