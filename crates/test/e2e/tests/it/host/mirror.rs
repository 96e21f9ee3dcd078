//! A disk on two storages: copied and moved under verified load, lost and taken up again, as tap-ctl has it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tapio_e2e::client::{nbdsh, nbdsh_unconnected, random_file, sha256};
use tapio_e2e::disk::{
    DiskOptions, Host, Tap, assert_vhd_valid, create_vhd, snapshot_vhd, tapio, text, vhd_util,
};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, poll_until, run, run_within};
use tapio_e2e::scratch::{Scratch, SmallFileSystem};
use tapio_e2e::tools::skip;

use super::MIB;

/// `tapio disk mirror COMMAND -p PID -m MINOR ARGS`.
#[track_caller]
fn mirror(host: &Host, tap: &Tap, command: &str, args: &[&str]) -> Finished {
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    run(&mut host.tapio(&[&["disk", "mirror", command, "-p", &pid, "-m", &minor], args].concat()))
}

#[track_caller]
fn status(host: &Host, tap: &Tap) -> serde_json::Value {
    let said = mirror(host, tap, "status", &["--json"]).ok();
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Whether the disk's page of counters says that its mirror is lost.
#[track_caller]
fn is_told_in_shared_memory(host: &Host, tap: &Tap) -> bool {
    let pid = tap.pid.to_string();
    let said = run(&mut host.tapio(&["disk", "stats", "-p", &pid, "--json"])).ok();
    let disks: serde_json::Value =
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
    disks[0]["mirror_lost"].as_bool().unwrap_or_else(|| panic!("{said}"))
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_disk_moves_to_another_image_under_verified_load() {
    needs!("fio");
    let engines = run_within(Command::new("fio").arg("--enghelp"), Duration::from_secs(60)).ok();
    if !engines.lines().any(|line| line.trim() == "nbd") {
        return skip("needs fio with the nbd engine");
    }
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 96);
    let tap = host.create(&format!("vhd:{}", text(&base)));
    nbdsh(
        &tap.uri(),
        "for mib in range(0, 96, 3): h.pwrite(bytes([mib + 1]) * (1 << 20), mib << 20)\nh.flush()",
    );
    tap.destroy();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let target = create_vhd(scratch.join("target.vhd"), 96);
    let tap = host.create(&format!("vhd:{}", text(&leaf)));
    let uri = format!("--uri={}", tap.uri());
    let fio = || {
        let mut fio = Command::new("fio");
        fio.args(["--name=verify", "--ioengine=nbd", &uri, "--rw=randwrite", "--fallocate=none"]);
        fio.args(["--bsrange=4k-64k", "--blockalign=4k", "--iodepth=16", "--size=64m", "--io_size=256m"]);
        fio.args(["--rate=48m", "--randseed=7", "--fsync=128", "--verify=crc32c", "--do_verify=1"]);
        fio.args(["--verify_fatal=1", "--output-format=terse"]).current_dir(scratch.path());
        run_within(&mut fio, Duration::from_secs(120)).ok()
    };
    let has_moved = AtomicBool::new(false);
    let moved = std::thread::scope(|scope| {
        // However long the move takes on a busy host, it is under load.
        let load = scope.spawn(|| {
            while !has_moved.load(Ordering::Relaxed) {
                fio();
            }
        });
        let written = || {
            let stats: serde_json::Value = serde_json::from_str(&tap.ctl("stats", &[]).ok()).expect("JSON");
            stats["secs"][1].as_u64().filter(|sectors| *sectors > 2048).map(drop)
        };
        poll_until(Duration::from_secs(60), written).expect("fio writes");
        let goal = format!("vhd:{}", text(&target));
        // A busy host may keep the second side longer than the guest would wait for it.
        mirror(&host, &tap, "start", &["--target", &goal, "--wait", "--patience", "60000"]).ok();
        assert_eq!(status(&host, &tap)["target"], goal.as_str());
        // Discards and failed writes aside, what is in sync stays so; a pivot that came between is asked again.
        let moved = poll_until(Duration::from_secs(60), || {
            let done = mirror(&host, &tap, "pivot", &["--json"]);
            done.status.success().then_some(done.stdout)
        });
        has_moved.store(true, Ordering::Relaxed);
        load.join().expect("fio is content");
        moved
    });
    let moved: serde_json::Value = serde_json::from_str(&moved.expect("it moves")).expect("JSON");
    println!("the guest waited {} us for the switch-over under load", moved["stalled_us"]);
    assert!(moved["stalled_us"].as_u64().is_some_and(|us| us < 20_000_000), "{moved}");
    assert_eq!(tap.row().expect("listed").args, Some(format!("vhd:{}", text(&target))));
    assert_eq!(status(&host, &tap), serde_json::Value::Null);
    // What fio did not touch came over too.
    let check = "for mib in range(66, 96, 3): assert h.pread(1 << 20, mib << 20) == bytes([mib + 1]) * (1 << 20), mib";
    nbdsh(&tap.uri(), check);
    // The first side is free: no process has it open.
    assert_vhd_valid(&leaf);
    tap.destroy();
    assert_vhd_valid(&target);
}

#[test]
fn a_second_side_that_fills_up_is_lost_quietly_and_taken_up_again() {
    needs!("nbdsh");
    let small = match SmallFileSystem::mount(24 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let source = scratch.join("a.raw");
    random_file(&source, 16 * MIB);
    let ballast = small.path().join("ballast");
    std::fs::write(&ballast, vec![1; 16 << 20]).expect("the ballast fits");
    let target = small.path().join("b.raw");
    std::fs::File::create(&target).and_then(|file| file.set_len(16 * MIB)).expect("a sparse file");
    let tap = host.create(&format!("aio:{}", text(&source)));
    let refused = mirror(&host, &tap, "start", &["--target", &format!("aio:{}", text(&source))]).fails();
    assert!(refused.contains("open for writing"), "{refused}");
    let goal = format!("aio:{}", text(&target));
    let said = mirror(&host, &tap, "start", &["--target", &goal, "--wait"]).fails();
    assert!(said.contains("lost"), "{said}");
    assert_eq!(status(&host, &tap)["state"], "degraded");
    assert!(tap.ctl("stats", &[]).ok().contains("\"nbd_mirror_failed\": 1"));
    assert!(is_told_in_shared_memory(&host, &tap));
    // The guest gets no error.
    nbdsh(&tap.uri(), "for mib in range(16): h.pwrite(b'g' * 5120, (mib << 20) + 512)\nh.flush()");
    let refused = mirror(&host, &tap, "pivot", &[]).fails();
    assert!(refused.contains("resume the mirror first"), "{refused}");
    std::fs::remove_file(&ballast).expect("removed");
    let copied = status(&host, &tap)["copied_bytes"].as_u64().expect("a number");
    mirror(&host, &tap, "resume", &[]).ok();
    mirror(&host, &tap, "status", &["--wait"]).ok();
    let again = status(&host, &tap);
    assert_eq!((&again["state"], &again["dirty_bytes"]), (&"in-sync".into(), &0.into()));
    assert!(again["copied_bytes"].as_u64().is_some_and(|now| now - copied <= 17 * MIB), "{copied} {again}");
    assert!(tap.ctl("stats", &[]).ok().contains("\"nbd_mirror_failed\": 0"));
    assert!(!is_told_in_shared_memory(&host, &tap));
    nbdsh(&tap.uri(), "h.pwrite(b'n' * 4096, 3 << 20)\nh.zero(1 << 20, 5 << 20)\nh.flush()");
    mirror(&host, &tap, "cancel", &[]).ok();
    tap.destroy();
    assert_eq!(sha256(&source), sha256(&target));
}

#[test]
fn a_second_image_of_tap_ctl_has_every_change_and_the_log_says_where() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let (image, log) = (create_vhd(scratch.join("a.vhd"), 32), scratch.join("a.cbtlog"));
    let (second, third) = (scratch.raw_image("b.raw", 32 * MIB), scratch.raw_image("c.raw", 32 * MIB));
    let cbt = |args: &[&str]| run(tapio(&["cbt-util"]).args(args)).ok();
    cbt(&["create", "-n", text(&log), "-s", &(32 * MIB).to_string()]);
    cbt(&["set", "-n", text(&log), "-f", "1"]);
    let name = format!("vhd:{}", text(&image));
    let goal = format!("aio:{}", text(&second));
    host.tap_ctl(&["create", "-a", &name, "-2", &goal, "-C", text(&log)]).ok();
    let tap = host.find(&name);
    assert_eq!(cbt(&["get", "-n", text(&log), "-f"]), "0\n", "in use");
    nbdsh(&tap.uri(), "h.pwrite(b'x' * 65536, 3 << 16)\nh.pwrite(b'y' * 512, (10 << 16) - 512)\nh.flush()");
    assert!(tap.ctl("stats", &[]).ok().contains("\"nbd_mirror_failed\": 0"));
    assert_eq!(status(&host, &tap)["state"], "in-sync");
    tap.ctl("pause", &[]).ok();
    assert_eq!(cbt(&["get", "-n", text(&log), "-f"]), "1\n", "closed");
    let bits = read(&log)[48..].to_vec();
    assert_eq!((bits.len(), &bits[..3]), (64, &[0b1000, 0b10, 0][..]));
    let bytes = read(&second);
    assert!(bytes[3 << 16..4 << 16].iter().all(|byte| *byte == b'x') && bytes[(10 << 16) - 1] == b'y');
    // As storage migration does: the next life of the disk writes to another.
    let goal = format!("aio:{}", text(&third));
    tap.ctl("unpause", &["-2", &goal, "-c", text(&log)]).ok();
    nbdsh(&tap.uri(), "h.pwrite(b'z' * 4096, 20 << 20)\nh.zero(65536, 3 << 16)\nh.flush()");
    tap.ctl("pause", &[]).ok();
    tap.ctl("unpause", &[]).ok();
    nbdsh(&tap.uri(), "h.pwrite(b'-' * 4096, 30 << 20)\nh.flush()");
    let bytes = read(&third);
    assert!(bytes[20 << 20..][..4096].iter().all(|byte| *byte == b'z') && bytes[30 << 20] == 0);
    assert!(read(&second)[20 << 20] == 0);
    assert_eq!(read(&log)[48 + 40], 1, "block 320 changed, block 480 after the log was let go");
    assert_eq!(read(&log)[48 + 60], 0);
    tap.destroy();
    // A process that dies leaves a log that says so.
    host.tap_ctl(&["create", "-a", &name, "-C", text(&log)]).ok();
    let tap = host.find(&name);
    nbdsh(&tap.uri(), "h.pwrite(b'k' * 4096, 0)\nh.flush()");
    tap.kill();
    assert_eq!(cbt(&["get", "-n", text(&log), "-f"]), "0\n", "the process died");
    let refused = host.tap_ctl(&["create", "-R", "-a", &name, "-C", text(&log)]).fails();
    assert!(refused.contains("not written"), "{refused}");
}

#[test]
fn a_standby_takes_over_when_the_first_image_is_full() {
    needs!("nbdsh");
    let small = match SmallFileSystem::mount(16 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 64);
    let cache = create_vhd(small.path().join("cache.vhd"), 64);
    let shared = snapshot_vhd(scratch.join("shared.vhd"), &base);
    let name = format!("vhd:{}", text(&cache));
    let second = format!("vhd:{}", text(&shared));
    host.tap_ctl(&["create", "-a", &name, "-2", &second, "-s"]).ok();
    let tap = host.find(&name);
    let marker = scratch.join("run").join(format!("tapdisk-enospc{}", tap.minor));
    assert!(!marker.exists());
    let script = "
for mib in range(40): h.pwrite(bytes([mib + 1]) * (1 << 20), mib << 20)
h.flush()
for mib in range(40): assert h.pread(1 << 20, mib << 20) == bytes([mib + 1]) * (1 << 20), mib
h.pwrite(b'!' * 4096, 0)
h.flush()
assert h.pread(8192, 0) == b'!' * 4096 + bytes([1]) * 4096
";
    nbdsh(&tap.uri(), script);
    assert!(marker.exists(), "no word of the full storage at {}", marker.display());
    let stats: serde_json::Value = serde_json::from_str(&tap.ctl("stats", &[]).ok()).expect("JSON");
    let redirected = stats["FIXME_enospc_redirect_count"].as_u64().expect("a number");
    assert!((24 * 2048..=40 * 2048).contains(&redirected), "{redirected} sectors");
    tap.destroy();
    for image in [&cache, &shared] {
        assert_vhd_valid(image);
    }
    let name = format!("vhd:{}", text(&create_vhd(scratch.join("new.vhd"), 64)));
    let refused = host.tap_ctl(&["create", "-a", &name, "-2", &second, "-s"]).fails();
    assert!(refused.contains("give an empty one"), "{refused}");
    let refused = host.tap_ctl(&["create", "-a", &name, "-s"]).fails();
    assert!(refused.contains("no second image"), "{refused}");
    let refused = host.tap_ctl(&["create", "-a", &name, "-s", "-2", &format!("vhd:{}", text(&base))]).fails();
    assert!(refused.contains("differencing"), "{refused}");
}

/// As tapdisk has it: a pause keeps what waits, until a command ends that.
#[test]
fn a_standby_that_waits_is_there_after_a_pause() {
    needs!("nbdsh");
    let disk = match Overflowed::new(false) {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let tap = disk.start();
    for _ in 0..2 {
        tap.ctl("pause", &[]).ok();
        tap.ctl("unpause", &[]).ok();
    }
    nbdsh(&tap.uri(), OVERFLOWING);
    check_overflowed(&tap.uri(), "!");
    let marker = disk.scratch.join("run").join(format!("tapdisk-enospc{}", tap.minor));
    assert!(marker.exists(), "no word of the full storage at {}", marker.display());
    tap.destroy();
    assert_vhd_valid(&disk.shared);
}

#[test]
fn a_standby_that_a_resume_ends_stays_as_it_is() {
    needs!("nbdsh");
    let disk = match Overflowed::new(false) {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let tap = disk.start();
    tap.ctl("pause", &[]).ok();
    tap.ctl("unpause", &["-2", "null"]).ok();
    let full = "
try:
    for mib in range(40): h.pwrite(bytes([mib + 1]) * (1 << 20), mib << 20)
except nbd.Error as error:
    assert error.errno == 'ENOSPC', error
else: assert False, 'there was space'";
    nbdsh(&tap.uri(), full);
    tap.destroy();
    let held = vhd_util(&["query", "-n", text(&disk.shared), "-a"]).ok();
    assert_eq!(held.trim(), "0");
}

/// What `first` was written over with, 40 MiB of a disk of which the first image has room for 16.
const OVERFLOWING: &str = "
for mib in range(40): h.pwrite(bytes([mib + 1]) * (1 << 20), mib << 20)
h.pwrite(b'!' * 4096, 0)
h.flush()
";
const OVERFLOWED: &str = "
assert h.pread(8192, 0) == FIRST * 4096 + bytes([1]) * 4096
for mib in range(1, 40): assert h.pread(1 << 20, mib << 20) == bytes([mib + 1]) * (1 << 20), mib
";

fn check_overflowed(uri: &str, first: &str) {
    nbdsh(uri, &OVERFLOWED.replace("FIRST", &format!("b'{first}'")));
}

/// A disk whose first image is full and whose standby took over.
struct Overflowed {
    small: SmallFileSystem,
    host: Host,
    cache: PathBuf,
    shared: PathBuf,
    scratch: Scratch,
}

impl Overflowed {
    /// `Err` says why there is none.
    fn new(is_child: bool) -> Result<Self, String> {
        let small =
            SmallFileSystem::mount(16 * MIB).map_err(|reason| format!("needs root to mount: {reason}"))?;
        let scratch = Scratch::on_disk();
        let host = Host::new(&scratch);
        let base = create_vhd(scratch.join("base.vhd"), 64);
        let cache = create_vhd(small.path().join("cache.vhd"), 64);
        let shared = snapshot_vhd(scratch.join("shared.vhd"), if is_child { &cache } else { &base });
        Ok(Self { small, host, cache, shared, scratch })
    }

    /// The one command of the disk.
    fn start(&self) -> Tap {
        let (name, second) = (self.name(), format!("vhd:{}", text(&self.shared)));
        self.host.tap_ctl(&["create", "-a", &name, "-2", &second, "-s"]).ok();
        self.host.find(&name)
    }

    fn name(&self) -> String {
        format!("vhd:{}", text(&self.cache))
    }

    fn note(&self, name: &str) -> bool {
        self.small.path().join(name).exists()
    }
}

#[test]
fn a_standby_that_took_over_stays_on_top_through_pauses_kills_and_the_same_command() {
    needs!("nbdsh");
    for is_child in [false, true] {
        let disk = match Overflowed::new(is_child) {
            Ok(disk) => disk,
            Err(why) => return skip(&why),
        };
        let tap = disk.start();
        assert!(disk.note(".cache.vhd.continued.ready") && !disk.note(".cache.vhd.continued"));
        nbdsh(&tap.uri(), OVERFLOWING);
        assert!(disk.note(".cache.vhd.continued") && !disk.note(".cache.vhd.continued.ready"));
        check_overflowed(&tap.uri(), "!");
        for _ in 0..2 {
            tap.ctl("pause", &[]).ok();
            tap.ctl("unpause", &[]).ok();
            check_overflowed(&tap.uri(), "!");
        }
        nbdsh(&tap.uri(), "h.pwrite(b'2' * 4096, 0)\nh.flush()");
        tap.kill();
        let tap = disk.start();
        check_overflowed(&tap.uri(), "2");
        assert!(disk.scratch.join("run").join(format!("tapdisk-enospc{}", tap.minor)).exists());
        nbdsh(&tap.uri(), "h.pwrite(b'3' * 4096, 0)\nh.flush()");
        tap.destroy();
        let tap = disk.start();
        check_overflowed(&tap.uri(), "3");
        tap.destroy();
        // The first image alone is not the disk.
        let refused = disk.host.tap_ctl(&["create", "-a", &disk.name()]);
        assert_eq!(refused.status.code(), Some(libc::EINVAL), "{refused}");
        assert!(
            refused.stderr.contains(text(&disk.shared)) && refused.stderr.contains(".continued"),
            "{refused}"
        );
        for image in [&disk.cache, &disk.shared] {
            assert_vhd_valid(image);
        }
    }
}

#[test]
fn below_a_standby_that_is_no_child_nothing_is_changed_and_it_can_be_committed() {
    needs!("nbdsh");
    let disk = match Overflowed::new(false) {
        Ok(disk) => disk,
        Err(why) => return skip(&why),
    };
    let tap = disk.start();
    nbdsh(&tap.uri(), OVERFLOWING);
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    let work = |command: &str, image: &Path| {
        run(&mut disk.host.tapio(&["disk", command, "-p", &pid, "-m", &minor, text(image)]))
    };
    let refused = work("snapshot", &disk.scratch.join("leaf.vhd")).fails();
    assert!(refused.contains("no child") && refused.contains("tapio disk commit"), "{refused}");
    assert!(!disk.scratch.join("leaf.vhd").exists());
    check_overflowed(&tap.uri(), "!");
    tap.destroy();
    let refused = DiskOptions::vhd(&disk.cache).nbd().refused(disk.scratch.path());
    assert!(refused.contains("open both"), "{refused}");
    let (cache, other) = (text(&disk.cache), disk.scratch.join("other.vhd"));
    for command in [
        &["set", "-n", cache, "-f", "hidden", "-v", "1"][..],
        &["fill", "-n", cache],
        &["resize", "-n", cache, "-s", "96", "-j", text(&disk.scratch.join("journal"))],
        &["snapshot", "-n", text(&other), "-p", cache],
        &["snapshot", "-n", text(&other), "-p", cache, "-m"],
    ] {
        let refused = vhd_util(command);
        assert_eq!(refused.status.code(), Some(libc::EINVAL), "{command:?}: {refused}");
        let said = format!("{}{}", refused.stdout, refused.stderr);
        assert!(said.contains("open both") && said.contains(text(&disk.shared)), "{command:?}: {refused}");
        assert!(!other.exists());
    }
    // There is space again.
    let mut mount = Command::new("mount");
    run(mount.args(["-o", &format!("remount,size={}", 64 * MIB), text(disk.small.path())])).ok();
    let tap = disk.start();
    check_overflowed(&tap.uri(), "!");
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    let shared = text(&disk.shared);
    run(&mut disk.host.tapio(&["disk", "commit", "-p", &pid, "-m", &minor, shared])).ok();
    check_overflowed(&tap.uri(), "!");
    nbdsh(&tap.uri(), "h.pwrite(b'c' * 4096, 0)\nh.flush()");
    tap.kill();
    // The disk is where its command says, and the standby is empty and may stand by again.
    for _ in 0..2 {
        let tap = disk.start();
        check_overflowed(&tap.uri(), "c");
        tap.destroy();
    }
    let tap = disk.host.create(&disk.name());
    check_overflowed(&tap.uri(), "c");
    tap.destroy();
}

#[test]
fn on_a_standby_that_is_a_child_snapshots_go_on() {
    needs!("nbdsh");
    let disk = match Overflowed::new(true) {
        Ok(disk) => disk,
        Err(why) => return skip(&why),
    };
    let tap = disk.start();
    nbdsh(&tap.uri(), OVERFLOWING);
    let leaf = disk.scratch.join("leaf.vhd");
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    run(&mut disk.host.tapio(&["disk", "snapshot", "-p", &pid, "-m", &minor, text(&leaf)])).ok();
    nbdsh(&tap.uri(), "h.pwrite(b's' * 4096, 0)\nh.flush()");
    tap.ctl("pause", &[]).ok();
    tap.ctl("unpause", &[]).ok();
    check_overflowed(&tap.uri(), "s");
    tap.kill();
    let (name, second) = (disk.name(), format!("vhd:{}", text(&disk.shared)));
    let refused = disk.host.tap_ctl(&["create", "-a", &name, "-2", &second, "-s"]).fails();
    assert!(refused.contains(text(&leaf)), "{refused}");
    // The note of each leads to the newest.
    let again = DiskOptions::vhd(&disk.cache).nbd().start_on(&disk.host, disk.scratch.path());
    check_overflowed(&again.uri(), "s");
    again.stop();
}

/// Killed while it copies, the first side has everything.
#[test]
fn a_process_that_dies_in_the_middle_leaves_the_first_side_whole() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let source = create_vhd(scratch.join("a.vhd"), 64);
    let target = scratch.raw_image("b.raw", 64 * MIB);
    let tap = host.create(&format!("vhd:{}", text(&source)));
    nbdsh(&tap.uri(), "for mib in range(64): h.pwrite(bytes([mib + 1]) * (1 << 20), mib << 20)");
    let goal = format!("aio:{}", text(&target));
    mirror(&host, &tap, "start", &["--target", &goal, "--rate", "256K"]).ok();
    let refused = mirror(&host, &tap, "pivot", &[]).fails();
    assert!(refused.contains("lacks"), "{refused}");
    let uri = tap.uri();
    nbdsh_unconnected(
        &uri,
        "h.connect_uri(uri)\nfor mib in range(0, 64, 2): h.pwrite(b'w' * 4096, mib << 20)",
    );
    assert_eq!(status(&host, &tap)["state"], "copying");
    tap.kill();
    let tap = host.create(&format!("vhd:{}", text(&source)));
    let check = "
for mib in range(64):
    first = b'w' if mib % 2 == 0 else bytes([mib + 1])
    assert h.pread(1 << 20, mib << 20) == first * 4096 + bytes([mib + 1]) * ((1 << 20) - 4096), mib
";
    nbdsh(&tap.uri(), check);
    tap.destroy();
    assert_vhd_valid(&source);
}
