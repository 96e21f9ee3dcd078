//! `tapio top` beside a disk under load.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{DiskOptions, Host, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::repository;

use super::instruments::load;

/// Runs the words after it in a terminal, waits for the row of a disk, sorts, makes the terminal smaller, ends it by
/// the first word (a key, or a signal), and compares the settings.
const TERMINAL: &str = r"
import fcntl, os, pty, select, signal, struct, subprocess, sys, termios
main, side = pty.openpty()
fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 200, 0, 0))
before = termios.tcgetattr(side)
top = subprocess.Popen(sys.argv[2:], stdin=side, stdout=side, stderr=side)
seen = b''
def until(word):
    global seen
    while word not in seen:
        if not select.select([main], [], [], 60)[0]:
            sys.exit(f'no {word} in {seen}')
        seen += os.read(main, 65536)
until(b'vhd:')
assert not termios.tcgetattr(side)[3] & termios.ICANON
os.write(main, b'l')
until(b'by latency')
os.write(main, b'p')
until(b'paused')
fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack('HHHH', 3, 200, 0, 0))
top.send_signal(signal.SIGWINCH)
until(b'2 more')
if sys.argv[1] == 'q':
    os.write(main, b'q')
else:
    top.send_signal(signal.SIGINT)
until(b'\x1b[?1049l')
assert top.wait(60) == 0
assert termios.tcgetattr(side) == before
";

#[test]
fn top_shows_a_disk_under_load_and_leaves_the_terminal_as_it_was() {
    needs!("nbdsh", "python3");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&create_vhd(scratch.join("a.vhd"), 32))));
    let mut load = load(&tap, &scratch);
    // The load has begun when there are writes.
    let (said, sample) = loop {
        let said = run(&mut host.tapio(&["top", "--once", "--json", "--interval", "0.5"])).ok();
        let sample: Value = serde_json::from_str(&said).expect("JSON");
        assert!(load.is_running(), "the load ended: {}", load.log());
        if sample["disks"][0]["write_per_s"].as_f64().is_some_and(|rate| rate > 0.0) {
            break (said, sample);
        }
    };
    assert_eq!(sample["disks"].as_array().map(Vec::len), Some(1), "{said}");
    let (disk, total) = (&sample["disks"][0], &sample["total"]);
    let figure = |of: &Value, name: &str| of[name].as_f64().expect("a number");
    for way in ["read", "write"] {
        let (rate, bytes) =
            (figure(disk, &format!("{way}_per_s")), figure(disk, &format!("{way}_bytes_per_s")));
        // Each request has 64 KiB; counts and bytes of one are not read at the same instant.
        let between = 4.0 / figure(&sample, "interval_s");
        assert!((bytes / 65536.0 - rate).abs() <= between, "{said}");
        assert_eq!(figure(total, &format!("{way}_per_s")), rate, "{said}");
    }
    let (mean, p99) = (figure(disk, "latency_mean_ns"), figure(disk, "latency_p99_ns"));
    assert!(mean > 0.0 && p99 > 0.0, "{said}");
    // One request at a time.
    let queues = disk["queues"].as_object().expect("queues");
    let held: f64 = queues.values().filter_map(Value::as_f64).sum();
    assert!(held > 0.0, "{said}");

    let plain = run(&mut host.tapio(&["top", "--interval", "0.2"])).ok();
    assert!(plain.contains("RD MiB/s") && plain.contains("a.vhd"), "{plain}");
    for end in ["q", "signal"] {
        let top = host.tapio(&["top", "--interval", "0.2"]);
        let mut python = Command::new("python3");
        python.args(["-c", TERMINAL, end]).arg(top.get_program()).args(top.get_args());
        python.envs(top.get_envs().filter_map(|(name, value)| Some((name, value?))));
        run(&mut python).ok();
    }
    drop(load);
    tap.destroy();
}

/// `tests/python/top.py`: a disk whose requests are known, on a storage that can be stopped, beside an idle one.
#[test]
fn a_terminal_shows_the_figures_of_a_known_load_and_obeys_every_key() {
    needs!("nbdkit", "nbdsh", "python3");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let socket = scratch.join("storage.sock");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["-f", "-U", text(&socket), "memory", "32M"]);
    let mut storage = Running::start(&mut nbdkit, &scratch.join("storage.log"));
    storage.wait_for("its answer", Duration::from_secs(60), || UnixStream::connect(&socket).ok());
    let idle =
        DiskOptions::raw(&scratch.raw_image("idle.raw", 1 << 20)).nbd().start_on(&host, scratch.path());
    let image = format!("nbd:{}", socket.display());
    let busy =
        DiskOptions::image(image.clone()).arg("--minor").arg("1").nbd().start_on(&host, scratch.path());
    let top = host.tapio(&["top", "--interval", "1"]);
    // The module that `nbdsh` has is that of the system's Python.
    let mut python = Command::new("python3");
    python.env("PATH", "/usr/bin:/bin").env("PYTHONDONTWRITEBYTECODE", "1").env("NO_COLOR", "1");
    python.arg(repository().join("crates/test/e2e/tests/python/top.py"));
    python.args([&busy.uri(), &storage.pid().to_string(), &image]);
    python.arg(top.get_program()).args(top.get_args());
    python.envs(top.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = run_within(&mut python, Duration::from_secs(150)).ok();
    assert_eq!(said.lines().last(), Some("done"), "{said}");
    busy.stop();
    idle.stop();
}
