//! User-mode Linux with its disk on our vhost-user socket.

mod bench;
mod browser;
mod cloud_init;
mod devices;
mod driver;
mod hosts;
mod luns;
mod many;
mod profile;
mod queue;
mod shares;
mod thin;
mod toolstack;
mod volume_groups;
mod volumes;
mod writes;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use tapio_e2e::client::sha256;
use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

const MIB: u64 = 1 << 20;

macro_rules! needs_uml {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], Uml::TOOLS[3]);
    };
}

#[test]
fn the_guest_sees_what_the_disk_offers() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("a.raw", 64 * MIB)).vhost_user().start(scratch.path());
    let report = Uml::new("probe", &disk.vhost).run(&scratch);
    assert_eq!(report.number("sectors"), 64 * MIB / 512);
    assert_eq!(report.number("read_only"), 0);
    assert_eq!(report.text("write_cache"), "write back");
    assert!(report.number("discard_max") > 0, "{report:?}");
    assert!(report.number("write_zeroes_max") > 0, "{report:?}");
    assert_eq!(report.text("serial"), "a");
    disk.stop();
}

#[test]
fn ext4_on_a_raw_image() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("a.raw", 256 * MIB)).vhost_user().start(scratch.path());
    let made = Uml::new("fs", &disk.vhost).with("fs", "ext4").run(&scratch);
    // The same process takes a second guest after the first has gone.
    let read = Uml::new("verify", &disk.vhost).with("fs", "ext4").run(&scratch);
    assert_eq!(made.text("tree"), read.text("tree"));
    disk.stop();
}

/// Makes a file system in the base, changes it in two more layers, and reads each state back through a fresh process.
fn file_system_on_three_levels(fs: &str, size_mib: u64) {
    let scratch = Scratch::on_disk();
    let guest = |case: &str, image: &Path| {
        let disk = DiskOptions::vhd(image).vhost_user().start(scratch.path());
        let report = Uml::new(case, &disk.vhost).with("fs", fs).with("name", "added").run(&scratch);
        disk.stop();
        report
    };
    let base = create_vhd(scratch.join("base.vhd"), size_mib);
    let made = guest("fs", &base);
    assert_eq!(guest("verify", &base).text("tree"), made.text("tree"));
    let middle = snapshot_vhd(scratch.join("middle.vhd"), &base);
    let changed = guest("change", &middle);
    assert_ne!(changed.text("tree"), made.text("tree"));
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &middle);
    assert_eq!(guest("verify", &leaf).text("tree"), changed.text("tree"));
    let changed_again = guest("change", &leaf);
    assert_ne!(changed_again.text("tree"), changed.text("tree"));
    // Writing to a child changes no parent.
    assert_eq!(guest("verify", &leaf).text("tree"), changed_again.text("tree"));
    for image in [&base, &middle, &leaf] {
        assert_vhd_valid(image);
    }
    assert_eq!(guest("verify", &middle).text("tree"), changed.text("tree"));
}

#[test]
fn ext4_on_a_chain_of_three() {
    needs_uml!();
    file_system_on_three_levels("ext4", 256);
}

#[test]
fn xfs_on_a_chain_of_three() {
    needs_uml!();
    file_system_on_three_levels("xfs", 512);
}

#[test]
fn a_read_only_disk_refuses_writes_and_goes_on_reading() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let image = scratch.raw_image("a.raw", 64 * MIB);
    let disk = DiskOptions::raw(&image).arg("--read-only").vhost_user().start(scratch.path());
    let report = Uml::new("read_only", &disk.vhost).run(&scratch);
    assert_eq!(report.number("read_only"), 1);
    disk.stop();
}

#[test]
fn a_guest_that_is_killed_leaves_a_valid_image_and_a_usable_disk() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 512);
    let disk = DiskOptions::vhd(&image).vhost_user().start(scratch.path());
    let stop_dir = scratch.path().display().to_string();
    let mut guest = Uml::new("load", &disk.vhost).with("dir", &stop_dir).start(&scratch);
    guest.wait_for("round", 5);
    guest.kill();
    let report = Uml::new("probe", &disk.vhost).run(&scratch);
    assert_eq!(report.number("sectors"), 512 * MIB / 512);
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn snapshots_under_the_guests_load_keep_every_write() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 512);
    let tap = Host::new(&scratch).create(&format!("vhd:{}", text(&base)));
    let socket = scratch.join("vhost.sock");
    tap.add_vhost_user(&socket);
    let mut guest = Uml::new("load", &socket).with("dir", text(scratch.path())).start(&scratch);
    guest.wait_for("round", 3);
    let mut chain = vec![base];
    let mut frozen = Vec::new();
    for number in 0..3 {
        let rounds = guest.report().number("round");
        let started = Instant::now();
        tap.ctl("pause", &[]).ok();
        let parent = chain.last().expect("the chain has a base").clone();
        let leaf = snapshot_vhd(scratch.join(&format!("leaf{number}.vhd")), &parent);
        tap.ctl("unpause", &["-a", &format!("vhd:{}", text(&leaf))]).ok();
        let stall = started.elapsed();
        assert!(stall.as_secs() < 10, "the guest was held for {stall:?}");
        frozen.push(sha256(&parent));
        chain.push(leaf);
        guest.wait_for("round", rounds + 3);
    }
    std::fs::write(scratch.join("stop"), "").expect("the stop file");
    let report = guest.finish();
    tap.destroy();
    for (image, digest) in chain.iter().zip(&frozen) {
        assert_eq!(&sha256(image), digest, "{} changed under its child", image.display());
    }
    for image in &chain {
        assert_vhd_valid(image);
    }
    // What the guest wrote before, between and after, read by a new process and a new guest.
    let disk =
        DiskOptions::vhd(chain.last().expect("the chain has a leaf")).vhost_user().start(scratch.path());
    let read = Uml::new("verify", &disk.vhost).run(&scratch);
    assert_eq!(read.text("tree"), report.text("tree"));
    disk.stop();
}

#[test]
fn a_trimmed_file_system_is_intact() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    for vhd in [true, false] {
        let options = if vhd {
            DiskOptions::vhd(&create_vhd(scratch.join("a.vhd"), 256))
        } else {
            DiskOptions::raw(&scratch.raw_image("a.raw", 256 * MIB))
        };
        let disk = options.vhost_user().start(scratch.path());
        Uml::new("fs", &disk.vhost).run(&scratch);
        let used = |name: &str| std::fs::metadata(scratch.join(name)).map_or(0, |data| data.blocks() * 512);
        let before = used("a.vhd") + used("a.raw");
        let trimmed = Uml::new("trim", &disk.vhost).run(&scratch);
        let after = used("a.vhd") + used("a.raw");
        assert!(after + 20 * MIB < before, "of {before} bytes {after} are left after the files were removed");
        let read = Uml::new("verify", &disk.vhost).run(&scratch);
        assert_eq!(read.text("tree"), trimmed.text("tree"));
        disk.stop();
    }
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn a_disk_grows_under_its_guests_load() {
    needs_uml!();
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = scratch.join("a.vhd");
    vhd_util(&["create", "-n", text(&image), "-s", "512", "-S", "4096"]).ok();
    let tap = host.create(&format!("vhd:{}", text(&image)));
    let socket = scratch.join("vhost.sock");
    tap.add_vhost_user(&socket);
    let mut guest = Uml::new("load", &socket).with("dir", text(scratch.path())).start(&scratch);
    guest.wait_for("round", 2);
    // In place, and then, with the guest held, beyond the table.
    for size in ["1GiB", "16GiB"] {
        run(&mut host.tapio(&["disk", "grow", &tap.minor.to_string(), size])).ok();
        let rounds = guest.report().number("round");
        guest.wait_for("round", rounds + 2);
    }
    std::fs::write(scratch.join("stop"), "").expect("the stop file");
    let report = guest.finish();
    // The next guest sees all of it.
    let probe = Uml::new("probe", &socket).run(&scratch);
    assert_eq!(probe.number("sectors"), 16 * 1024 * MIB / 512);
    let read = Uml::new("verify", &socket).run(&scratch);
    assert_eq!(read.text("tree"), report.text("tree"));
    tap.destroy();
    assert_vhd_valid(&image);
}
