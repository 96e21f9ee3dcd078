//! A file system that answers reads and writes, and lets one kind of its other calls hang: opening, closing, locking,
//! cutting, looking for holes. The data thread makes none of them itself.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{Host, Tap, create_vhd, is_alive, text};
use tapio_e2e::hanging::{Call, HangingFs};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run, run_within, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;

use super::MIB;
use super::queue_threads::has_queue_threads;

/// What anything here may take on a busy host. It ends a hang, and judges nothing.
const LIMIT: Duration = Duration::from_secs(120);

/// What makes the disk process call the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A client asks what is allocated.
    BlockStatus,
    /// A client gives back a part of the disk.
    Trim,
    /// The disk is made larger.
    Grow,
    /// The images of a paused disk are opened again.
    Reopening,
    /// The images are closed.
    Pausing,
}

/// Which kind of image, what hangs, and what calls it.
const CASES: &[(&str, Call, By)] = &[
    ("aio", Call::Seek, By::BlockStatus),
    ("vhd", Call::Seek, By::BlockStatus),
    ("vhd", Call::Seek, By::Trim),
    ("aio", Call::Fallocate, By::Trim),
    ("aio", Call::SetAttr, By::Grow),
    ("aio", Call::Lookup, By::Reopening),
    ("aio", Call::Open, By::Reopening),
    ("vhd", Call::Open, By::Reopening),
    ("aio", Call::GetAttr, By::Reopening),
    ("aio", Call::SetLock, By::Reopening),
    ("aio", Call::SetLock, By::Pausing),
    ("vhd", Call::Flush, By::Pausing),
];

impl By {
    fn start(self, host: &Host, tap: &Tap, log: &Path) -> Running {
        let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
        let client = |script: &str| {
            let mut nbdsh = Command::new("nbdsh");
            nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", &tap.uri(), "-c", script]);
            nbdsh
        };
        let tap_ctl = |command: &str| host.tapio(&["tap-ctl", command, "-p", &pid, "-m", &minor]);
        let mut command = match self {
            Self::BlockStatus => {
                let mut nbdinfo = Command::new("nbdinfo");
                nbdinfo.env("PATH", "/usr/bin:/bin").args(["--map", &tap.uri()]);
                nbdinfo
            }
            Self::Trim => client("h.trim(65536, 0)"),
            Self::Grow => host.tapio(&["disk", "grow", &minor, "64MiB"]),
            Self::Reopening => tap_ctl("unpause"),
            Self::Pausing => tap_ctl("pause"),
        };
        Running::start(&mut command, log)
    }
}

/// How the disk comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By `tap-ctl close -f`, and its process later.
    Force,
    /// With its process, by SIGTERM.
    Signal,
}

/// Connections that are idle while a call hangs; with two threads, each of them has some, and the next one is served by
/// the queue thread.
fn idle_connections(tap: &Tap, log: &Path) -> Running {
    let script = format!(
        "import time\nmine = [nbd.NBD() for i in range(3)]\nfor i, one in enumerate(mine):\n    \
         one.connect_uri('{}')\n    one.pwrite(b'd' * 4096, (16 << 20) + i * 4096)\n\
         print('connected', flush=True)\ntime.sleep(1000)",
        tap.uri()
    );
    let mut nbdsh = Command::new("nbdsh");
    let mut idle = Running::start(nbdsh.env("PATH", "/usr/bin:/bin").args(["-c", &script]), log);
    idle.wait_for("the connections", LIMIT, || {
        fs::read_to_string(log).is_ok_and(|log| log.contains("connected")).then_some(())
    });
    idle
}

/// Two disks of one process: one on the file system that hangs.
fn case((kind, call, by): (&str, Call, By), end: End, threads: usize) -> Result<(), String> {
    let what = format!("{kind} {call:?} {by:?} {end:?}, {threads} threads");
    let scratch = Scratch::on_disk();
    let hanging = HangingFs::start(&scratch)?;
    let image = match kind {
        "vhd" => create_vhd(hanging.behind("image"), 32)
            .file_name()
            .map(|_| hanging.file("image"))
            .expect("a name"),
        _ => hanging.raw_image("image", 32 * MIB),
    };
    let host = Host::new(&scratch);
    let image = format!("{kind}:{}", text(&image));
    run(host.tapio(&["tap-ctl", "create", "-a", &image]).env("TAPIO_THREADS", threads.to_string())).ok();
    let tap = host.find(&image);
    let other = format!("aio:{}", text(&scratch.raw_image("other", 32 * MIB)));
    let pid = tap.pid.to_string();
    let marker = host.tap_ctl(&["allocate"]).ok();
    let minor = marker.trim().rsplit(|one: char| !one.is_ascii_digit()).next().expect("a number").to_string();
    host.tap_ctl(&["attach", "-p", &pid, "-m", &minor]).ok();
    host.tap_ctl(&["open", "-p", &pid, "-m", &minor, "-a", &other]).ok();
    let other = Tap::found(&host, &other);
    let writes = "h.pwrite(b'a' * 65536, 0)\nh.pwrite(b'b' * 4096, 4 << 20)\nh.flush()";
    nbdsh(&tap.uri(), writes);
    let idle = idle_connections(&tap, &scratch.join("idle.log"));
    assert!(has_queue_threads(tap.pid, threads - 1), "{what}");
    if by == By::Reopening {
        tap.ctl("pause", &[]).ok();
    }

    hanging.hang(call);
    let mut asked = by.start(&host, &tap, &scratch.join("asked.log"));
    asked.wait_for("the call", LIMIT, || (hanging.held() > 0).then_some(()));
    // Questions are answered, other disks go on, and so does this one where it is open.
    let within = |args: &[&str]| {
        let out = run_within(host.tapio(&["tap-ctl"]).args(args), LIMIT);
        assert!(out.status.success(), "{what}: {out}");
        out.stdout
    };
    for minor in [tap.minor, other.minor] {
        let stats = within(&["stats", "-p", &pid, "-m", &minor.to_string()]);
        assert!(stats.contains("\"secs\""), "{what}: {stats}");
    }
    assert_eq!(within(&["list"]).lines().count(), 2, "{what}");
    let works = "h.pwrite(b'c' * 4096, 8 << 20)\nh.flush()\nassert h.pread(4096, 8 << 20) == b'c' * 4096";
    nbdsh(&other.uri(), works);
    if !matches!(by, By::Reopening | By::Pausing) {
        nbdsh(&tap.uri(), "assert h.pread(4096, 4 << 20) == b'b' * 4096");
    }
    assert!(asked.is_running() && hanging.held() > 0, "{what}: it did not hang: {}", asked.log());

    if end == End::Force {
        within(&["close", "-f", "-p", &pid, "-m", &tap.minor.to_string()]);
        nbdsh(&other.uri(), works);
        within(&["detach", "-p", &pid, "-m", &tap.minor.to_string()]);
    }
    signal(pid.parse().expect("a number"), libc::SIGTERM).expect("sent");
    // What waits in the kernel for an answer that it was promised ends with it, whatever is done to its process; until
    // then there is nothing but the name of that.
    let ended = poll_until(LIMIT, || (!is_alive(tap.pid)).then_some(()));
    assert!(ended.is_some(), "{what}: the process goes on");
    hanging.go_on();
    drop(idle);
    tap.forget();
    other.forget();
    Ok(())
}

fn cases(end: End) {
    needs!("nbdsh", "nbdinfo");
    // Beside each other, because an end by a signal waits half a minute first.
    let skipped = std::thread::scope(|scope| {
        let all = CASES.iter().flat_map(|one| [(one, 1), (one, 2)]);
        let running: Vec<_> =
            all.map(|(one, threads)| scope.spawn(move || case(*one, end, threads))).collect();
        running.into_iter().find_map(|case| case.join().expect("no case panics").err())
    });
    if let Some(why) = skipped {
        skip(&why);
    }
}

#[test]
fn a_disk_whose_file_system_hangs_is_closed_by_force_and_its_process_goes_on() {
    cases(End::Force);
}

#[test]
fn a_process_whose_file_system_hangs_ends_when_it_is_told_to() {
    cases(End::Signal);
}
