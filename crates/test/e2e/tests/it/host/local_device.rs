//! A disk as a loop device over a file exported by FUSE.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tapio_e2e::client::sha256;
use tapio_e2e::disk::{Disk, DiskOptions, Host, assert_vhd_valid, create_vhd, text};
use tapio_e2e::local::{Mounted, device, device_of, exports_below, lacks_fuse, loops_below, pid};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;

/// Any single step here ends within this time, whatever state the disk is in: nothing hangs.
const BOUND: Duration = Duration::from_secs(60);

macro_rules! needs_fuse {
    ($host:expr) => {
        if let Some(why) = lacks_fuse($host) {
            return skip(&why);
        }
    };
}

fn fill(dir: &Path) -> Vec<String> {
    let mut digests = Vec::new();
    let mut state = 7u64;
    for number in 0..3 {
        let path = dir.join(format!("file{number}"));
        let bytes: Vec<u8> = (0..3 * MIB)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        fs::write(&path, bytes).expect("a file on the device");
        digests.push(sha256(&path));
    }
    digests
}

fn digests(dir: &Path) -> Vec<String> {
    (0..3).map(|number| sha256(&dir.join(format!("file{number}")))).collect()
}

fn start(scratch: &Scratch, image: &Path) -> Disk {
    DiskOptions::vhd(image).arg("--device").arg("fuse").start(scratch.path())
}

/// Make, fill, check, read back through another process, trim, check again.
fn file_system(make: &[&str], check: &[&str]) {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 320);
    let disk = start(&scratch, &image);
    let first = device_of(&host);
    run(Command::new(make[0]).args(&make[1..]).arg(&first)).ok();
    let mounted = Mounted::new(&first, scratch.join("mnt"));
    let wrote = fill(mounted.path());
    mounted.unmount();
    run(Command::new(check[0]).args(&check[1..]).arg(&first)).ok();
    disk.stop();
    assert_vhd_valid(&image);
    assert!(loops_below(scratch.path()).is_empty() && exports_below(scratch.path()).is_empty());
    let disk = start(&scratch, &image);
    let second = device_of(&host);
    let mounted = Mounted::new(&second, scratch.join("mnt"));
    assert_eq!(digests(mounted.path()), wrote);
    for number in 0..3 {
        fs::remove_file(mounted.path().join(format!("file{number}"))).expect("removed");
    }
    let before =
        fs::metadata(&image).map(|data| std::os::unix::fs::MetadataExt::blocks(&data)).expect("the image");
    run(Command::new("sync").arg("-f").arg(mounted.path())).ok();
    run(Command::new("fstrim").arg(mounted.path())).ok();
    mounted.unmount();
    run(Command::new(check[0]).args(&check[1..]).arg(&second)).ok();
    disk.stop();
    assert_vhd_valid(&image);
    let after =
        fs::metadata(&image).map(|data| std::os::unix::fs::MetadataExt::blocks(&data)).expect("the image");
    assert!(after <= before, "trimming made the image grow from {before} to {after} sectors");
}

#[test]
fn ext4_on_a_vhd_as_a_loop_device() {
    needs!("mkfs.ext4", "e2fsck", "losetup", "fstrim");
    file_system(&["mkfs.ext4", "-q", "-F"], &["e2fsck", "-f", "-n"]);
}

#[test]
fn xfs_on_a_vhd_as_a_loop_device() {
    needs!("mkfs.xfs", "xfs_repair", "losetup", "fstrim");
    file_system(&["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]);
}

#[test]
fn a_device_is_attached_listed_kept_while_in_use_and_detached() {
    needs!("mkfs.ext4", "losetup");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().arg("--devices").arg("--minor").arg("5").start(scratch.path());
    assert!(device(&host, &["attach", "6"]).fails().contains("no disk process of ours has disk 6"));
    assert!(device(&host, &["detach", "5"]).fails().contains("disk 5 is no device of this host"));
    assert!(device(&host, &["attach", "5", "--how", "magic"]).fails().contains("fuse-file"));
    let said = device(&host, &["attach", "5", "--how", "fuse"]).ok();
    let path = Path::new(said.trim());
    assert_eq!(path, device_of(&host));
    assert!(device(&host, &["attach", "5", "--how", "fuse"]).fails().contains("already"));
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(path)).ok();
    let mounted = Mounted::new(path, scratch.join("mnt"));
    let busy = device(&host, &["detach", "5"]).fails();
    assert!(busy.contains("in use") && busy.contains("unmount"), "{busy}");
    fs::write(mounted.path().join("still"), "here").expect("the device is still there");
    mounted.unmount();
    device(&host, &["detach", "5"]).ok();
    assert!(loops_below(scratch.path()).is_empty() && exports_below(scratch.path()).is_empty());
    // By force a mounted one goes too, and its users get errors instead of waiting.
    let json = device(&host, &["attach", "5", "--how", "fuse", "--json"]).ok();
    let made: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(made["connections"], 0, "{made}");
    let path = device_of(&host);
    let mounted = Mounted::new(&path, scratch.join("mnt"));
    assert_eq!(fs::read_to_string(mounted.path().join("still")).expect("read"), "here");
    let begin = Instant::now();
    device(&host, &["detach", "5", "--force"]).ok();
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    let dd = ["if=/dev/zero", "bs=64k", "count=4", "conv=fsync"];
    let file = format!("of={}", text(&mounted.path().join("more")));
    run_within(Command::new("dd").args(dd).arg(file), BOUND).fails();
    drop(mounted);
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn a_user_that_may_not_make_a_device_is_told_what_is_missing() {
    needs!("setpriv");
    let scratch = Scratch::on_disk();
    if !rustix::process::geteuid().is_root() {
        // The test itself runs as an ordinary user, so the refusal is seen without another one.
        let image = create_vhd(scratch.join("a.vhd"), 16);
        let said = DiskOptions::vhd(&image).arg("--device").arg("fuse").refused(scratch.path());
        assert!(said.contains("run as root"), "{said}");
        return;
    }
    let image = create_vhd(scratch.join("a.vhd"), 16);
    let open = |path: &Path| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("permissions");
    };
    // The program lies where an ordinary user may look.
    let program = scratch.join("tapio-disk");
    // By another process: while this one had it open for writing, a process that another test starts might have it open
    // too, and a program that is open for writing is not executed (ETXTBSY).
    run(Command::new("cp").arg(tapio_e2e::tools::our("tapio-disk")).arg(&program)).ok();
    fs::create_dir(scratch.join("run")).expect("a directory");
    for path in [scratch.path(), &image, &program, &scratch.join("run")] {
        open(path);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
    command.args(["--foreground", "--device", "fuse", "--image", &format!("vhd:{}", text(&image))]);
    command.env("TAPIO_RUN_DIR", scratch.join("run")).env("TAPIO_SHM_DIR", scratch.path());
    let said = run(&mut command).fails();
    assert!(said.contains("/dev/fuse") || said.contains("mount"), "{said}");
    assert!(said.contains("run as root") && said.contains("NBD"), "{said}");
    assert!(exports_below(scratch.path()).is_empty());
}

#[test]
fn a_killed_process_hangs_no_client_and_the_next_one_cleans_up() {
    needs!("mkfs.ext4", "losetup");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = start(&scratch, &image);
    let path = device_of(&host);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&path)).ok();
    let mounted = Mounted::new(&path, scratch.join("mnt"));
    let wrote = fill(mounted.path());
    run(Command::new("sync").arg("-f").arg(mounted.path())).ok();
    let log = scratch.join("dd.log");
    let file = format!("of={}", text(&mounted.path().join("more")));
    let mut dd =
        Running::start(Command::new("dd").args(["if=/dev/zero", "bs=64k", "oflag=sync"]).arg(file), &log);
    let more = mounted.path().join("more");
    let writes = || fs::metadata(&more).is_ok_and(|data| data.len() >= MIB).then_some(());
    dd.wait_for("a megabyte", BOUND, writes);
    disk.crash();
    // The writer gets an error, or the file system has gone read-only under it.
    assert!(!dd.wait(BOUND).success());
    drop(mounted);
    assert!(!exports_below(scratch.path()).is_empty(), "a mount of the dead is what this test is about");
    let disk = start(&scratch, &image);
    let again = device_of(&host);
    assert_eq!(exports_below(scratch.path()).len(), 1);
    assert_eq!(loops_below(scratch.path()).len(), 1);
    let mounted = Mounted::new(&again, scratch.join("mnt"));
    assert_eq!(digests(mounted.path()), wrote, "what was synced before the process died");
    mounted.unmount();
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn a_paused_disk_keeps_its_device_waiting_and_does_not_keep_it_from_going() {
    needs!("losetup");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = start(&scratch, &image);
    let path = device_of(&host);
    let pid = pid(&disk);
    let ctl = |command: &str| run(&mut host.tapio(&["disk", command, "-p", &pid, "-m", "0"])).ok();
    let read = |name: &str| {
        let file = format!("if={}", text(&path));
        let args = ["of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
        Running::start(Command::new("dd").arg(file).args(args), &scratch.join(name))
    };
    // Reads that the device has taken and not answered. A read that were answered by a paused disk would end, which
    // fails the wait.
    let inflight = Path::new("/sys/block").join(path.file_name().expect("a name")).join("inflight");
    let asked = || {
        let counts = fs::read_to_string(&inflight).expect("the kernel counts requests");
        (counts.split_whitespace().next() != Some("0")).then_some(())
    };
    ctl("pause");
    let mut waiting = read("first.log");
    waiting.wait_for("its read to reach the device", BOUND, asked);
    ctl("resume");
    assert!(waiting.wait(BOUND).success());
    ctl("pause");
    let mut stuck = Running::start(
        Command::new("dd").arg(format!("if={}", text(&path))).args([
            "of=/dev/null",
            "bs=1M",
            "skip=30",
            "count=8",
        ]),
        &scratch.join("second.log"),
    );
    stuck.wait_for("its read to reach the device", BOUND, asked);
    let begin = Instant::now();
    device(&host, &["detach", "0", "--force"]).ok();
    assert!(!stuck.wait(BOUND).success(), "a read of a device that went");
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    ctl("resume");
    device(&host, &["attach", "0", "--how", "fuse"]).ok();
    assert!(read("third.log").wait(BOUND).success());
    disk.stop();
}

#[test]
fn a_disk_that_grew_grows_as_a_device() {
    needs!("losetup", "blockdev");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    needs_fuse!(&host);
    let image = scratch.raw_image("a.raw", 32 * MIB);
    let disk = DiskOptions::raw(&image).arg("--device").arg("fuse").start(scratch.path());
    let path = device_of(&host);
    let size = || run(Command::new("blockdev").arg("--getsize64").arg(&path)).ok().trim().to_string();
    assert_eq!(size(), (32 * MIB).to_string());
    let pid = pid(&disk);
    run(&mut host.tapio(&["disk", "pause", "-p", &pid, "-m", "0"])).ok();
    fs::OpenOptions::new().write(true).open(&image).and_then(|file| file.set_len(48 * MIB)).expect("longer");
    run(&mut host.tapio(&["disk", "resume", "-p", &pid, "-m", "0"])).ok();
    assert_eq!(size(), (48 * MIB).to_string());
    // And by growing it while it is in use.
    run(&mut host.tapio(&["disk", "grow", "0", "64MiB"])).ok();
    assert_eq!(size(), (64 * MIB).to_string());
    let end = format!("of={}", text(&path));
    run(Command::new("dd").args(["if=/dev/urandom", "bs=1M", "seek=47", "count=1", "conv=fsync"]).arg(end))
        .ok();
    disk.stop();
}
