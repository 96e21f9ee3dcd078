//! A storage that fails, is late, or hangs, below a real disk.

use std::process::Command;
use std::time::{Duration, Instant};

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, Host, Tap, assert_vhd_valid, is_alive, text, vhd_util};
use tapio_e2e::faulty::Faulty;
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;

/// What anything here may take on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

macro_rules! faulty {
    ($scratch:expr, $len:expr, $filters:expr) => {
        match Faulty::start($scratch, $len, $filters) {
            Ok(faulty) => faulty,
            Err(why) => return skip(&why),
        }
    };
}

/// Python that tells whether a call fails with EIO.
const FAILS: &str = "
import errno, os, time
def fails(call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == errno.EIO, error
        return True
    return False
";

#[test]
fn the_guest_hears_of_eio_and_goes_on_when_it_is_over() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let faulty = faulty!(&scratch, 16 * MIB, &[]);
    let mut disk = DiskOptions::raw(faulty.file()).nbd().start(scratch.path());
    let script = format!(
        "{FAILS}
h.pwrite(b'a' * 65536, 0)
h.flush()
open({fail:?}, 'w').close()
assert fails(lambda: h.pread(4096, 0)) and fails(lambda: h.pwrite(b'b' * 4096, 0))
os.unlink({fail:?})
assert h.pread(65536, 0) == b'a' * 65536
h.pwrite(b'c' * 4096, 8192)
h.flush()
assert h.pread(4096, 8192) == b'c' * 4096
",
        fail = text(&faulty.fail_file())
    );
    nbdsh(&disk.uri(), &script);
    assert!(disk.process.log().contains("a request failed"), "{}", disk.process.log());
    assert!(disk.process.is_running());
    disk.stop();
}

/// Bitmaps and table entries are written after the answer: their failure is the next flush's.
#[test]
fn eio_in_metadata_fails_the_flush_and_a_later_one_makes_all_of_it_durable() {
    needs!("nbdsh", "losetup");
    let scratch = Scratch::on_disk();
    let mut faulty = faulty!(&scratch, 48 * MIB, &[]);
    let device = match faulty.device() {
        Ok(device) => device,
        Err(why) => return skip(&why),
    };
    vhd_util(&["create", "-n", text(&device), "-s", "32"]).ok();
    let disk = DiskOptions::vhd(&device).nbd().start(scratch.path());
    let script = format!(
        "{FAILS}
h.pwrite(b'a' * 4096, 0)
h.flush()
h.pwrite(b'b' * 4096, 4096)
h.pwrite(b'c' * 4096, 2 << 20)
open({fail:?}, 'w').close()
assert fails(h.flush), 'a flush that cannot write its metadata succeeded'
fails(lambda: h.pwrite(b'd' * 4096, 6 << 20))
os.unlink({fail:?})
for again in range(1200):
    if not fails(h.flush): break
    time.sleep(0.05)
else:
    raise SystemExit('no flush works any more')
h.pwrite(b'e' * 4096, 4 << 20)
h.flush()
",
        fail = text(&faulty.fail_file())
    );
    nbdsh(&disk.uri(), &script);
    disk.crash();
    let disk = DiskOptions::vhd(&device).nbd().start(scratch.path());
    nbdsh(
        &disk.uri(),
        "for at, byte in (0, b'a'), (4096, b'b'), (2 << 20, b'c'), (4 << 20, b'e'):
    assert h.pread(4096, at) == byte * 4096, at",
    );
    disk.stop();
    assert_vhd_valid(&device);
}

/// A page cache that could not write says so once and forgets: what it forgot must not become durable by decree.
#[test]
fn a_flush_of_the_page_cache_that_failed_is_not_followed_by_one_that_works() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    // A length that O_DIRECT cannot serve.
    let faulty = faulty!(&scratch, 16 * MIB + 1, &[]);
    let tap = host.create(&format!("aio:{}", text(faulty.file())));
    nbdsh(&tap.uri(), "h.pwrite(b'a' * 4096, 0)\nh.flush()");
    faulty.fail_flushes(true);
    nbdsh(&tap.uri(), &format!("{FAILS}\nh.pwrite(b'b' * 4096, 0)\nassert fails(h.flush)"));
    faulty.fail_flushes(false);
    nbdsh(&tap.uri(), &format!("{FAILS}\nassert fails(h.flush), 'it claims to be durable'"));
    // The images are opened anew: what is there is there.
    tap.ctl("pause", &[]);
    tap.ctl("unpause", &[]).ok();
    nbdsh(&tap.uri(), "h.pwrite(b'c' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'c' * 4096");
    tap.destroy();
}

#[test]
fn a_storage_that_is_late_makes_nothing_fail() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let filters = ["--filter=delay", "delay-read=300ms", "delay-write=400ms"];
    let faulty = faulty!(&scratch, 16 * MIB, &filters);
    let disk = DiskOptions::raw(faulty.file()).nbd().start(scratch.path());
    let script = "
import time
# Side by side, not one after the other; on a busy host not at the first attempt.
for attempt in range(10):
    begin = time.monotonic()
    for n in range(8):
        h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([n + 1]) * 4096), n * 4096)
    while h.aio_in_flight() > 0:
        h.poll(-1)
    spent = time.monotonic() - begin
    assert 0.4 <= spent, spent
    if spent < 3.0: break
assert spent < 3.0, spent
for n in range(8):
    assert h.pread(4096, n * 4096) == bytes([n + 1]) * 4096, n
";
    nbdsh(&disk.uri(), script);
    disk.stop();
}

fn client(tap_uri: &str, script: &str, log: &std::path::Path) -> Running {
    let mut nbdsh = Command::new("nbdsh");
    nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", tap_uri, "-c", script]);
    Running::start(&mut nbdsh, log)
}

/// A request that takes longer than it may is answered; the process stays, says what is stuck, and all of it works
/// again when the storage does.
#[test]
fn a_storage_that_hangs_costs_its_requests_and_nothing_else() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let faulty = faulty!(&scratch, 16 * MIB, &[]);
    let image = format!("aio:{}", text(faulty.file()));
    host.tap_ctl(&["create", "-a", &image, "-t", "2"]).ok();
    let tap = Tap::found(&host, &image);
    nbdsh(&tap.uri(), "h.pwrite(b'a' * 8192, 0)\nh.flush()");
    faulty.hang(true);
    let script = format!(
        "{FAILS}
begin = time.monotonic()
assert fails(lambda: h.pwrite(b'b' * 4096, 0))
spent = time.monotonic() - begin
assert 2.5 <= spent < 60, spent
print('told', flush=True)
"
    );
    let mut writer = client(&tap.uri(), &script, &scratch.join("writer.log"));
    // Questions are answered meanwhile.
    let outstanding = || {
        let stats: serde_json::Value = serde_json::from_str(&tap.ctl("stats", &[]).ok()).expect("JSON");
        stats["reqs_outstanding"].as_u64().expect("a number")
    };
    let seen = poll_until(LIMIT, || (outstanding() == 1).then_some(()));
    assert!(seen.is_some(), "the request is not seen");
    assert_eq!(tap.row().and_then(|row| row.state), Some(0));
    assert!(writer.wait(LIMIT).success(), "{}", writer.log());
    // It was answered, and the kernel still has it.
    assert_eq!(outstanding(), 1);
    faulty.hang(false);
    let ended = poll_until(LIMIT, || (outstanding() == 0).then_some(()));
    assert!(ended.is_some(), "the kernel keeps the request");
    nbdsh(
        &tap.uri(),
        "h.pwrite(b'c' * 4096, 0)\nh.flush()\nassert h.pread(8192, 0) == b'c' * 4096 + b'a' * 4096",
    );
    tap.destroy();
}

/// The kernel holds the lock of a file on FUSE while it waits for the flush of that file, and whatever is asked of the
/// file then waits for the lock: a thread of the kernel's, not the data thread, which has deadlines to keep.
#[test]
fn requests_behind_a_flush_that_hangs_are_answered_in_time() {
    needs!("nbdsh", "nbdinfo");
    // Past the page cache, and with a length that only the page cache can serve.
    for len in [16 * MIB, 16 * MIB + 333] {
        let scratch = Scratch::on_disk();
        let host = Host::new(&scratch);
        let faulty = faulty!(&scratch, len, &[]);
        let image = format!("aio:{}", text(faulty.file()));
        host.tap_ctl(&["create", "-a", &image, "-t", "2"]).ok();
        let tap = Tap::found(&host, &image);
        nbdsh(&tap.uri(), "h.pwrite(b'a' * 8192, 0)\nh.flush()");
        faulty.hang(true);
        let outstanding = || {
            let stats: serde_json::Value = serde_json::from_str(&tap.ctl("stats", &[]).ok()).expect("JSON");
            stats["reqs_outstanding"].as_u64().expect("a number")
        };
        let log = |name: &str| scratch.join(name);
        let mut flush = client(&tap.uri(), &format!("{FAILS}\nassert fails(h.flush)"), &log("flush.log"));
        let seen = poll_until(LIMIT, || (outstanding() == 1).then_some(()));
        assert!(seen.is_some(), "the flush is not seen");
        // As long as the flush hangs, each of these waits for its lock or for the storage.
        for (name, call) in [
            ("write.log", "lambda: h.pwrite(b'b' * 4096, 0)"),
            ("zero.log", "lambda: h.zero(65536, 1 << 20)"),
            ("trim.log", "lambda: h.trim(1 << 20, 2 << 20)"),
            ("read.log", "lambda: h.pread(4096, 8 << 20)"),
        ] {
            let mut asked = client(&tap.uri(), &format!("{FAILS}\nassert fails({call})"), &log(name));
            assert!(asked.wait(LIMIT).success(), "{name} of {len}: {}", asked.log());
        }
        // This server of FUSE does not know holes.
        let map = run_within(Command::new("nbdinfo").args(["--map", &tap.uri()]), LIMIT);
        assert!(map.stdout.contains("data"), "{map}");
        assert!(flush.wait(LIMIT).success(), "{}", flush.log());
        faulty.hang(false);
        let ended = poll_until(LIMIT, || (outstanding() == 0).then_some(()));
        assert!(ended.is_some(), "the kernel keeps requests");
        if len % 512 == 0 {
            // Past the page cache a flush that failed is followed by one that works.
            nbdsh(&tap.uri(), "h.pwrite(b'c' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'c' * 4096");
        }
        tap.destroy();
    }
}

/// An orderly end waits for what is stuck, for as long as its caller does; a forced one does not.
#[test]
fn a_disk_whose_storage_hangs_is_closed_by_force() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let faulty = faulty!(&scratch, 16 * MIB, &[]);
    let tap = host.create(&format!("aio:{}", text(faulty.file())));
    nbdsh(&tap.uri(), "h.pwrite(b'a' * 8192, 0)\nh.flush()");
    faulty.hang(true);
    let mut writer = client(&tap.uri(), "h.pwrite(b'b' * 4096, 0)", &scratch.join("writer.log"));
    let outstanding =
        poll_until(LIMIT, || tap.ctl("stats", &[]).ok().contains("\"reqs_outstanding\": 1").then_some(()));
    assert!(outstanding.is_some(), "the request is not seen");
    let clean = tap.ctl("close", &["-t", "1"]);
    assert!(!clean.status.success(), "{clean}");
    assert!(is_alive(tap.pid));
    let begun = Instant::now();
    tap.ctl("close", &["-f"]).ok();
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    // Its client is cut off rather than left to wait.
    assert!(!writer.wait(LIMIT).success());
    faulty.hang(false);
    tap.ctl("detach", &[]).ok();
    let gone = poll_until(LIMIT, || (!is_alive(tap.pid)).then_some(()));
    assert!(gone.is_some(), "the process is still there");
    tap.forget();
}

/// The same below a disk whose image is an export of another server, without the kernel between.
#[test]
fn a_remote_export_that_fails_and_hangs_costs_its_requests_and_nothing_else() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let faulty = faulty!(&scratch, 16 * MIB, &["--filter=delay", "delay-read=50ms"]);
    let image = format!("nbd:{}", text(&faulty.export()));
    host.tap_ctl(&["create", "-a", &image, "-t", "2"]).ok();
    let tap = Tap::found(&host, &image);
    let script = format!(
        "{FAILS}
h.pwrite(b'a' * 8192, 0)
h.flush()
open({fail:?}, 'w').close()
assert fails(lambda: h.pread(4096, 0)) and fails(lambda: h.pwrite(b'b' * 4096, 0))
os.unlink({fail:?})
assert h.pread(8192, 0) == b'a' * 8192
",
        fail = text(&faulty.fail_file())
    );
    nbdsh(&tap.uri(), &script);
    faulty.hang(true);
    nbdsh(&tap.uri(), &format!("{FAILS}\nassert fails(lambda: h.pwrite(b'b' * 4096, 0))"));
    faulty.hang(false);
    let works = "
for again in range(600):
    if not fails(lambda: h.pwrite(b'c' * 4096, 0)): break
    time.sleep(0.1)
else:
    raise SystemExit('it does not work any more')
h.flush()
assert h.pread(8192, 0) == b'c' * 4096 + b'a' * 4096
";
    nbdsh(&tap.uri(), &format!("{FAILS}{works}"));
    tap.destroy();
}
