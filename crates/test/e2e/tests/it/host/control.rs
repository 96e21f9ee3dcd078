//! `tap-ctl` as tapdisk's controllers use it: processes are found again, paused, moved onto a new leaf and closed.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use tapio_e2e::client::{nbdsh, sha256};
use tapio_e2e::disk::{Host, Row, Tap, assert_vhd_valid, create_vhd, is_alive, snapshot_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::{self, Running, poll_until, run};
use tapio_e2e::scratch::Scratch;

/// State bits of a paused disk: PAUSED, QUIESCED, CLOSED.
const PAUSED: u32 = 0x2a;

#[test]
fn create_list_and_destroy() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let tap = host.create(&format!("vhd:{}", image.display()));
    assert!(is_alive(tap.pid));
    let args = Some(format!("vhd:{}", image.display()));
    assert_eq!(tap.row(), Some(Row { pid: Some(tap.pid), minor: Some(tap.minor), state: Some(0), args }));
    nbdsh(&tap.uri(), "h.pwrite(b'c' * 65536, 1 << 20)\nh.flush()");
    tap.destroy();
    assert_vhd_valid(&image);
}

#[test]
fn several_disks_are_told_apart() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let images: Vec<PathBuf> = (0..4).map(|n| create_vhd(scratch.join(&format!("{n}.vhd")), 8)).collect();
    let taps: Vec<Tap> = images.iter().map(|image| host.create(&format!("vhd:{}", text(image)))).collect();
    for (tap, image) in taps.iter().zip(&images) {
        let row = tap.row().expect("it is listed");
        assert_eq!(row.args, Some(format!("vhd:{}", text(image))));
        // The filters of `list` find exactly this one.
        let by_pid = host.tap_ctl(&["list", "-p", &tap.pid.to_string()]).ok();
        assert_eq!(by_pid.lines().count(), 1, "{by_pid}");
        let by_file = host.tap_ctl(&["list", "-f", text(image)]).ok();
        assert_eq!(by_file.lines().count(), 1, "{by_file}");
    }
    let minors: std::collections::BTreeSet<u32> = taps.iter().map(|tap| tap.minor).collect();
    assert_eq!(minors.len(), 4, "minors are unique");
    for tap in taps {
        tap.destroy();
    }
}

#[test]
fn stats_are_one_line_of_json_that_counts() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    nbdsh(&tap.uri(), "h.pwrite(b'c' * 65536, 0)\nh.flush()\nh.pread(131072, 0)");
    let said = tap.ctl("stats", &[]).ok();
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert!(said.starts_with("{ \"name\": "), "keys in the documented order and spacing: {said}");
    let stats: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
    assert_eq!(stats["name"], format!("vhd:{}", text(&image)).as_str());
    let sectors = |index: usize| stats["secs"][index].as_u64().expect("a number");
    assert!(sectors(0) >= 256, "{said}");
    assert!(sectors(1) >= 128, "{said}");
    assert_eq!(stats["images"][0]["driver"]["name"], "vhd");
    tap.destroy();
}

/// Says that a write was sent, and that it was answered.
const PAUSED_CLIENT: &str = "
cookie = h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b'p' * 4096)), 0)
while h.aio_get_direction() & nbd.AIO_DIRECTION_WRITE: h.poll(-1)
print('sent', flush=True)
while not h.aio_command_completed(cookie): h.poll(-1)
assert h.pread(4096, 0) == b'p' * 4096
print('done')
";

#[test]
fn a_pause_holds_requests_and_loses_none() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    tap.ctl("pause", &[]).ok();
    assert_eq!(tap.row().and_then(|row| row.state), Some(PAUSED));
    let log = scratch.join("client.log");
    let mut client = Command::new("nbdsh");
    client.env("PATH", "/usr/bin:/bin");
    client.args(["-u", &tap.uri(), "-c", PAUSED_CLIENT]);
    let mut client = Running::start(&mut client, &log);
    let client_log = || std::fs::read_to_string(&log).unwrap_or_default();
    client.wait_for("its write to be sent", Duration::from_secs(60), || {
        client_log().contains("sent").then_some(())
    });
    // A write waits outside the disk while that is paused, where no state shows it: a command is answered meanwhile.
    assert_eq!(tap.row().and_then(|row| row.state), Some(PAUSED));
    assert!(client.is_running() && !client.log().contains("done"), "served while paused: {}", client.log());
    tap.ctl("unpause", &[]).ok();
    assert!(client.wait(Duration::from_secs(60)).success(), "{}", client.log());
    assert_eq!(tap.row().and_then(|row| row.state), Some(0));
    tap.destroy();
    assert_vhd_valid(&image);
}

/// Writes numbered records until told to stop by a file, then checks all of them.
const RECORDER: &str = "
import os, time
count = 0
longest = 0
while not os.path.exists(STOP):
    start = time.monotonic()
    h.pwrite(b'%07d\\n' % count * 512, count % 6000 * 4096)
    longest = max(longest, time.monotonic() - start)
    count += 1
    if count % 100 == 0:
        print(count, flush=True)
h.flush()
for slot in range(min(count, 6000)):
    last = (count - 1 - slot) // 6000 * 6000 + slot
    assert h.pread(4096, slot * 4096) == b'%07d\\n' % last * 512, slot
print('verified', count, int(longest * 1000))
";

/// Starts it on `tap`; it ends when the file is made whose name comes back.
pub fn start_recorder(tap: &Tap, scratch: &Scratch) -> (Running, PathBuf) {
    let (log, stop) = (scratch.join("recorder.log"), scratch.join("stop"));
    let mut recorder = Command::new("nbdsh");
    recorder.env("PATH", "/usr/bin:/bin");
    recorder.args(["-u", &tap.uri(), "-c", &format!("STOP = {:?}\n{RECORDER}", text(&stop))]);
    (Running::start(&mut recorder, &log), stop)
}

#[test]
fn a_snapshot_under_load_keeps_every_write() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let tap = host.create(&format!("vhd:{}", text(&base)));
    let (mut recorder, stop) = start_recorder(&tap, &scratch);
    let count =
        |text: &str| text.lines().filter_map(|line| line.trim().parse::<u64>().ok()).next_back().unwrap_or(0);
    let mut parent = base.clone();
    let mut leaves = vec![base];
    for number in 0..3 {
        let before = count(&recorder.log());
        let reached =
            poll_until(Duration::from_secs(60), || (count(&recorder.log()) >= before + 200).then_some(()));
        assert!(reached.is_some(), "the load does not get on: {}", recorder.log());
        let started = Instant::now();
        tap.ctl("pause", &[]).ok();
        let leaf = snapshot_vhd(scratch.join(&format!("leaf{number}.vhd")), &parent);
        tap.ctl("unpause", &["-a", &format!("vhd:{}", text(&leaf))]).ok();
        let stall = started.elapsed();
        assert!(stall < Duration::from_secs(60), "{stall:?}");
        let row = tap.row().expect("it is listed");
        assert_eq!(row.args, Some(format!("vhd:{}", text(&leaf))));
        leaves.push(leaf.clone());
        parent = leaf;
    }
    // A parent is not written to any more.
    let frozen: Vec<String> = leaves[..3].iter().map(|image| sha256(image)).collect();
    let before = count(&recorder.log());
    let more = poll_until(Duration::from_secs(60), || (count(&recorder.log()) >= before + 200).then_some(()));
    assert!(more.is_some(), "the load does not get on: {}", recorder.log());
    std::fs::write(&stop, "").expect("the stop file");
    assert!(recorder.wait(Duration::from_secs(60)).success(), "{}", recorder.log());
    assert!(recorder.log().contains("verified"), "{}", recorder.log());
    tap.destroy();
    let after: Vec<String> = leaves[..3].iter().map(|image| sha256(image)).collect();
    assert_eq!(frozen, after, "a parent changed under its child");
    for image in &leaves {
        assert_vhd_valid(image);
    }
}

#[test]
fn a_process_that_was_killed_is_listed_no_longer() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 8);
    let name = format!("vhd:{}", text(&image));
    let tap = host.create(&name);
    let (pid, minor) = (tap.pid, tap.minor.to_string());
    tap.kill();
    let rows: Vec<Row> = host.list().into_iter().filter(|row| row.pid == Some(pid)).collect();
    assert_eq!(rows, []);
    // Its minor may still be taken until it is freed; then the image can be opened anew.
    host.tap_ctl(&["free", "-m", &minor]);
    let again = host.create(&name);
    again.destroy();
    assert_vhd_valid(&image);
}

#[test]
fn a_process_that_does_not_answer_hides_no_other() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let images: Vec<PathBuf> = (0..3).map(|n| create_vhd(scratch.join(&format!("{n}.vhd")), 8)).collect();
    let taps: Vec<Tap> = images.iter().map(|image| host.create(&format!("vhd:{}", text(image)))).collect();
    let signal = |signal: i32| {
        process::signal(taps[1].pid.cast_signed(), signal).expect("it runs");
    };
    signal(libc::SIGSTOP);
    let said = run(&mut host.tapio(&["disk", "list"]));
    signal(libc::SIGCONT);
    assert!(
        said.stdout.contains(text(&images[0])) && said.stdout.contains(text(&images[2])),
        "{}",
        said.stdout
    );
    let error = said.fails();
    assert!(error.contains(&format!("disk process {}", taps[1].pid)), "{error}");
    taps.into_iter().for_each(Tap::destroy);
}

#[test]
fn an_image_that_is_open_elsewhere_is_refused_by_the_name_of_the_process() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 8);
    let name = format!("vhd:{}", text(&image));
    let tap = host.create(&name);
    let offline = host.tapio(&["vhd-util", "set", "-n", text(&image), "-f", "hidden", "-v", "1"]).output();
    let offline = String::from_utf8_lossy(&offline.expect("it runs").stdout).into_owned();
    let second = host.tap_ctl(&["create", "-a", &name]);
    assert_eq!(second.status.code(), Some(libc::EBUSY), "{second}");
    for said in [offline, second.stderr] {
        assert!(said.contains("is open for writing in another process"), "{said}");
        // Where the file system numbers its files for locks as it does elsewhere.
        let named = said.contains(&format!("({})", tap.pid)) || said.contains("cannot be seen");
        assert!(named, "{said}");
    }
    tap.destroy();
    // One that is let go of late, as that of a killed process, is waited for.
    let holder = std::fs::File::open(&image).expect("the image is there");
    holder.lock().expect("no process has it open");
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| host.create(&name));
        // No state shows that the process has tried in vain: it opens the image in a root of its own, and the kernel
        // lists no one that asks for a lock without waiting. If it is later than this, the test proves less.
        std::thread::sleep(Duration::from_millis(300));
        holder.unlock().expect("it was locked");
        opened.join().expect("it opens").destroy();
    });
}

#[test]
fn errors_are_numbers_and_words() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let missing = format!("vhd:{}", text(&scratch.join("none.vhd")));
    let failed = host.tap_ctl(&["create", "-a", &missing]);
    assert_eq!(failed.status.code(), Some(libc::ENOENT), "{failed}");
    assert!(!failed.stderr.trim().is_empty());
    assert!(
        !host.list().iter().any(|row| row.args.as_deref() == Some(missing.as_str())),
        "a failed create left its disk"
    );
    let failed = host.tap_ctl(&["stats", "-p", "1", "-m", "0"]);
    assert!(failed.status.code().is_some_and(|code| code != 0), "{failed}");
    let failed = host.tap_ctl(&["no-such-command"]);
    assert!(failed.status.code().is_some_and(|code| code != 0), "{failed}");
}

/// Scripts branch on these numbers of the original.
#[test]
fn a_disk_that_is_not_there_or_there_already_is_an_invalid_argument() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("aio:{}", text(&scratch.raw_image("a.raw", 1 << 20))));
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    for command in ["pause", "unpause", "detach", "stats"] {
        let refused = host.tap_ctl(&[command, "-p", &pid, "-m", "99"]);
        assert_eq!(refused.status.code(), Some(libc::EINVAL), "{refused}");
        assert!(refused.stderr.ends_with("Invalid argument\n"), "{refused}");
    }
    for command in ["attach", "detach"] {
        let refused = host.tap_ctl(&[command, "-p", &pid, "-m", &minor]);
        assert_eq!(refused.status.code(), Some(libc::EINVAL), "{refused}");
    }
    tap.destroy();
}
