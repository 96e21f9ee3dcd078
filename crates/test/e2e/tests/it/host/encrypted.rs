//! Encrypted images: with their key they are disks like others, without it they are refused.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_e2e::client::{copy_out, nbdsh, random_file, sha256};
use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, snapshot_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{run, run_with_input};
use tapio_e2e::scratch::Scratch;

use super::MIB;

const LIMIT: Duration = Duration::from_secs(60);

fn key_file(scratch: &Scratch, name: &str, len: usize) -> PathBuf {
    let path = scratch.join(&format!("{name},aes-xts-plain,{}.key", len * 8));
    random_file(&path, len as u64);
    path
}

/// An empty image that is encrypted with the key.
fn encrypted(scratch: &Scratch, name: &str, key: &Path) -> PathBuf {
    let image = create_vhd(scratch.join(&format!("{name}.vhd")), 32);
    vhd_util(&["key", "-s", "-n", text(&image), "-k", text(key)]).ok();
    image
}

fn contains(path: &Path, pattern: &[u8]) -> bool {
    let bytes = std::fs::read(path).expect("the image can be read");
    bytes.windows(pattern.len()).any(|window| window == pattern)
}

#[test]
fn what_is_written_is_read_back_and_not_in_the_file() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    for len in [32, 64] {
        let name = format!("a{len}");
        let key = key_file(&scratch, &name, len);
        let image = encrypted(&scratch, &name, &key);
        let options = DiskOptions::vhd(&image).arg("--key-file").arg(text(&key)).nbd();
        let disk = options.start(scratch.path());
        nbdsh(
            &disk.uri(),
            "h.pwrite(b'the guest wrote' + b'.' * (4096 - 15), 4096)\nh.pwrite(b'w' * (3 << 20), 8 << 20)\n\
             h.zero(4096, (8 << 20) + 4096)\nh.flush()",
        );
        disk.stop();
        assert_vhd_valid(&image);
        assert!(
            !contains(&image, b"the guest wrote") && !contains(&image, &[b'w'; 64]),
            "plain text in {name}"
        );
        let disk = options.start(scratch.path());
        nbdsh(
            &disk.uri(),
            "assert h.pread(512, 4096).startswith(b'the guest wrote')\nassert h.pread(4096, 0) == b'\\0' * 4096\n\
             assert h.pread(8192, 8 << 20) == b'w' * 4096 + b'\\0' * 4096\n\
             assert h.pread(1 << 20, 10 << 20) == b'w' * (1 << 20)\n\
             h.trim(4 << 20, 8 << 20)\nassert h.pread(4096, 8 << 20) == b'\\0' * 4096",
        );
        disk.stop();
        assert_vhd_valid(&image);
    }
}

#[test]
fn a_missing_or_another_key_is_refused() {
    let scratch = Scratch::on_disk();
    let (key, other) = (key_file(&scratch, "a", 64), key_file(&scratch, "b", 64));
    let image = encrypted(&scratch, "a", &key);
    let without = DiskOptions::vhd(&image).nbd().refused(scratch.path());
    assert!(without.contains("a.vhd") && without.contains("is encrypted") && without.contains("--key-file"));
    let wrong = DiskOptions::vhd(&image).arg("--key-file").arg(text(&other)).nbd();
    assert!(wrong.refused(scratch.path()).contains("another key"));
    let short = scratch.join("short.key");
    random_file(&short, 33);
    let odd = DiskOptions::vhd(&image).arg("--key-file").arg(text(&short)).nbd();
    assert!(odd.refused(scratch.path()).contains("32 or 64 bytes"));
    let plain = create_vhd(scratch.join("plain.vhd"), 8);
    let needless = DiskOptions::vhd(&plain).arg("--key-file").arg(text(&key)).nbd();
    assert!(needless.refused(scratch.path()).contains("no image of the chain is encrypted"));
}

#[test]
fn a_copy_that_vhd_util_encrypted_is_served_and_snapshots_of_it() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let plain = create_vhd(scratch.join("plain.vhd"), 16);
    let original = scratch.join("original.raw");
    random_file(&original, 16 * MIB);
    let disk = DiskOptions::vhd(&plain).nbd().start(scratch.path());
    tapio_e2e::client::tool("nbdcopy", &["--flush", text(&original), &disk.uri()]).ok();
    disk.stop();
    let key = key_file(&scratch, "e", 64);
    let image = scratch.join("e.vhd");
    vhd_util(&["copy", "-n", text(&plain), "-N", text(&image), "-k", text(&key)]).ok();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &image);
    let disk = DiskOptions::vhd(&leaf).arg("--key-file").arg(text(&key)).nbd().start(scratch.path());
    let copy = scratch.join("copy.raw");
    copy_out(&disk.uri(), &copy);
    assert_eq!(sha256(&copy), sha256(&original));
    nbdsh(
        &disk.uri(),
        "h.pwrite(b'new text' * 64, 1 << 20)\nh.flush()\nassert h.pread(512, 1 << 20) == b'new text' * 64",
    );
    disk.stop();
    assert!(!contains(&leaf, b"new text"), "a snapshot of an encrypted image is encrypted");
    assert_vhd_valid(&leaf);
}

#[test]
fn keys_come_by_tap_ctl_and_by_tapio_disk() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let key = key_file(&scratch, "a", 64);
    let image = format!("vhd:{}", text(&encrypted(&scratch, "a", &key)));
    let marker = host.tap_ctl(&["allocate"]).ok();
    let minor: String = marker.trim().chars().rev().take_while(char::is_ascii_digit).collect();
    let minor: String = minor.chars().rev().collect();
    let pid = host.tap_ctl(&["spawn"]).ok().trim().to_string();
    host.tap_ctl(&["attach", "-p", &pid, "-m", &minor]).ok();
    let open = |input: Option<&Path>| {
        let input = input.map(|path| File::open(path).expect("the key"));
        let arguments = ["tap-ctl", "open", "-p", &pid, "-m", &minor, "-a", &image, "-E"];
        run_with_input(&mut host.tapio(&arguments), input, LIMIT)
    };
    assert!(open(Some(Path::new("/dev/null"))).fails().contains("32 or 64"));
    open(Some(&key)).ok();
    let uri = format!("nbd+unix:///?socket={}", scratch.join(&format!("run/nbd{pid}.{minor}")).display());
    nbdsh(&uri, "h.pwrite(b'k' * 512, 0)\nassert h.pread(512, 0) == b'k' * 512");
    // The key stays with the disk.
    host.tap_ctl(&["pause", "-p", &pid, "-m", &minor]).ok();
    host.tap_ctl(&["unpause", "-p", &pid, "-m", &minor]).ok();
    nbdsh(&uri, "assert h.pread(512, 0) == b'k' * 512");
    host.tap_ctl(&["close", "-p", &pid, "-m", &minor]).ok();
    let disk_open = ["disk", "open", "-p", &pid, "-m", &minor, "-i", &image];
    let without = run(&mut host.tapio(&disk_open)).fails();
    assert!(without.contains("is encrypted"), "{without}");
    run(&mut host.tapio(&[&disk_open[..], &["--key-file", text(&key)]].concat())).ok();
    host.tap_ctl(&["destroy", "-p", &pid, "-m", &minor]).ok();
}
