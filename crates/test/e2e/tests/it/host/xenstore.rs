//! Debian's xenstore tools, by libxenstore, and Python's pyxs against our xenstored, over live updates and kills.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::process::{Finished, Running, run, run_within, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{find, our, repository, skip};

const LIMIT: Duration = Duration::from_secs(60);

/// Where `scripts/setup` unpacks Xen's programs.
fn unpacked() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    target.join("lanes/xen/root/usr")
}

/// A tool of Xen's: unpacked or installed. `xenstore-control` lies with the programs of a version of Xen.
fn tool(name: &str) -> Option<PathBuf> {
    let places = ["bin", "lib/xen-4.17/bin"].map(|dir| unpacked().join(dir).join(name));
    // In /usr/bin it is a script that looks for a running Xen.
    let here = places
        .into_iter()
        .find(|place| place.is_file() && (name != "xenstore-control" || !place.is_symlink()));
    here.or_else(|| Some(PathBuf::from("/usr/lib/xen-4.17/bin").join(name)).filter(|place| place.is_file()))
        .or_else(|| find(name))
}

/// Our daemon in a scratch directory.
struct Xenstored {
    scratch: Scratch,
    running: Running,
    arguments: Vec<String>,
}

impl Xenstored {
    fn start(more: &[&str]) -> Self {
        let scratch = Scratch::in_memory();
        let arguments: Vec<String> =
            more.iter().map(|word| word.replace("DIR", text(scratch.path()))).collect();
        let running = Self::run(&scratch, &arguments);
        Self { scratch, running, arguments }
    }

    fn run(scratch: &Scratch, arguments: &[String]) -> Running {
        let socket = scratch.join("socket");
        let mut command = Command::new(our("tapio-xenstored"));
        command.args(["--domains", "none", "--socket", text(&socket)]).args(arguments);
        let mut running = Running::start(&mut command, &scratch.join("xenstored.log"));
        running.wait_for("the socket", LIMIT, || std::os::unix::net::UnixStream::connect(&socket).ok());
        running
    }

    fn socket(&self) -> PathBuf {
        self.scratch.join("socket")
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("XENSTORED_PATH", self.socket()).env("XENSTORED_RUNDIR", self.scratch.path());
        command.env("LD_LIBRARY_PATH", unpacked().join("lib/x86_64-linux-gnu"));
        command
    }

    fn xs(&self, name: &str, arguments: &[&str]) -> Finished {
        let program = tool(name).unwrap_or_else(|| panic!("{name} lies beside the others"));
        run_within(self.command(&program).args(arguments), LIMIT)
    }

    fn control(&self, words: &[&str]) -> String {
        self.xs("xenstore-control", words).ok().trim_end().to_owned()
    }
}

/// Returns from a test with a skip when Xen's tools are not there.
macro_rules! needs_tools {
    () => {
        if tool("xenstore-read").is_none() || tool("xenstore-control").is_none() {
            skip("needs xenstore-utils of Xen 4.17");
            return;
        }
    };
}

#[test]
fn debians_tools_read_write_and_list() {
    needs_tools!();
    let xenstored = Xenstored::start(&[]);
    let xs = |name: &str, arguments: &[&str]| xenstored.xs(name, arguments);
    xs("xenstore-write", &["/local/domain/1/name", "first", "/local/domain/1/memory/target", "65536"]).ok();
    assert_eq!(xs("xenstore-read", &["/local/domain/1/name"]).ok(), "first\n");
    assert_eq!(xs("xenstore-read", &["-p", "/local/domain/1/name"]).ok(), "/local/domain/1/name: first\n");
    assert_eq!(xs("xenstore-list", &["/local/domain/1"]).ok(), "memory\nname\n");
    let listing = xs("xenstore-ls", &["/local"]).ok();
    assert_eq!(
        listing,
        "domain = \"\"\n 1 = \"\"\n  memory = \"\"\n   target = \"65536\"\n  name = \"first\"\n"
    );
    assert!(xs("xenstore-exists", &["/local/domain/1"]).status.success());
    assert!(!xs("xenstore-exists", &["/local/domain/2"]).status.success());
    assert!(xs("xenstore-read", &["/local/domain/2"]).fails().contains("couldn't read path"));
    xs("xenstore-chmod", &["-r", "/local/domain/1", "n1", "r0"]).ok();
    let whole = xs("xenstore-ls", &["-fp", "/local/domain/1"]).ok();
    assert!(whole.contains("/local/domain/1/name = \"first\"   (n1,r0)"), "{whole}");
    xs("xenstore-rm", &["/local/domain/1"]).ok();
    assert_eq!(xs("xenstore-ls", &["-f", "/local"]).ok(), "/local/domain = \"\"\n");
    assert_eq!(xenstored.control(&["check"]), "OK");
    assert!(xenstored.control(&["help"]).contains("memreport"));
    assert!(xenstored.control(&["quota"]).contains("1000"), "{}", xenstored.control(&["quota"]));
}

#[test]
fn a_directory_longer_than_a_message_is_listed_whole() {
    needs_tools!();
    let xenstored = Xenstored::start(&[]);
    let nodes: Vec<String> =
        (0..1500).flat_map(|number| [format!("/many/child-{number:05}"), "x".into()]).collect();
    for some in nodes.chunks(500) {
        let words: Vec<&str> = some.iter().map(String::as_str).collect();
        xenstored.xs("xenstore-write", &words).ok();
    }
    let listed = xenstored.xs("xenstore-list", &["/many"]).ok();
    assert_eq!(listed.lines().count(), 1500);
    assert_eq!(xenstored.xs("xenstore-ls", &["-f", "/many"]).ok().lines().count(), 1500);
    let stats = xenstored.control(&["stats"]);
    assert!(stats.contains("DIRECTORY_PART"), "{stats}");
}

#[test]
fn no_client_notices_a_live_update() {
    needs_tools!();
    let xenstored = Xenstored::start(&["--state-dir", "DIR/state"]);
    let log = xenstored.scratch.join("watch.log");
    let program = tool("xenstore-watch").expect("beside the others");
    let mut watching = Running::start(xenstored.command(&program).args(["-n", "4", "/w"]), &log);
    watching.wait_for("the first event", LIMIT, || {
        std::fs::read_to_string(&log).ok().filter(|text| text.lines().any(|line| line == "/w"))
    });
    xenstored.xs("xenstore-write", &["/w/before", "1"]).ok();
    let pid = xenstored.running.pid();
    let ours = our("tapio-xenstored");
    xenstored.xs("xenstore-control", &["live-update", text(&ours)]).ok();
    assert_eq!(xenstored.xs("xenstore-read", &["/w/before"]).ok(), "1\n");
    xenstored.xs("xenstore-write", &["/w/after", "2"]).ok();
    // A program that is none changes nothing, and the caller is told why.
    let refused = xenstored.xs("xenstore-control", &["live-update", "/bin/false"]);
    let said = format!("{}{}", refused.stdout, refused.stderr);
    assert!(!refused.status.success() && said.contains("/bin/false"), "{said}");
    signal(pid as i32, libc::SIGUSR1).expect("it runs");
    xenstored.xs("xenstore-write", &["/w/again", "3"]).ok();
    assert!(watching.wait(LIMIT).success());
    let heard = std::fs::read_to_string(&log).expect("the log");
    let heard: Vec<&str> = heard.lines().filter(|line| line.starts_with("/w")).collect();
    assert_eq!(heard, ["/w", "/w/before", "/w/after", "/w/again"]);
    assert_eq!(xenstored.control(&["check"]), "OK");
}

/// What is opened after the sockets is a FIFO here: until a reader comes, the daemon is starting for certain.
#[test]
fn a_live_update_that_is_asked_for_during_the_start_comes_after_it() {
    needs_tools!();
    let scratch = Scratch::in_memory();
    let fifo = scratch.join("trace");
    run(Command::new("mkfifo").arg(&fifo)).ok();
    let arguments: Vec<String> = ["--trace-file", text(&fifo)].map(String::from).into();
    let running = Xenstored::run(&scratch, &arguments);
    let mut xenstored = Xenstored { scratch, running, arguments };
    let pid = xenstored.running.pid();
    signal(pid as i32, libc::SIGUSR1).expect("it runs");
    let reader = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).expect("opened");
    let command_line = || std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let updated = || command_line().contains("--restore=").then_some(());
    xenstored.running.wait_for("the update", LIMIT, updated);
    xenstored.xs("xenstore-write", &["/after", "1"]).ok();
    assert!(xenstored.running.is_running());
    drop(reader);
}

#[test]
fn what_is_in_a_state_directory_survives_a_kill() {
    needs_tools!();
    let mut xenstored = Xenstored::start(&["--state-dir", "DIR/state"]);
    for round in 0..3 {
        let path = format!("/kept/{round}");
        xenstored.xs("xenstore-write", &[path.as_str(), "value"]).ok();
        xenstored.control(&["quota", "set", "nodes", &format!("70{round}")]);
        xenstored.running.kill();
        xenstored.running = Xenstored::run(&xenstored.scratch, &xenstored.arguments);
        let quotas = xenstored.control(&["quota"]);
        assert!(quotas.contains(&format!("70{round}")), "{quotas}");
    }
    assert_eq!(xenstored.xs("xenstore-list", &["/kept"]).ok(), "0\n1\n2\n");
    // A second daemon is told about the first.
    let socket = xenstored.socket();
    let second =
        run(Command::new(our("tapio-xenstored")).args(["--domains", "none", "--socket", text(&socket)]));
    assert!(second.fails().contains("another xenstored serves"));
}

/// A client with an open transaction and a watch over a live update, in Python.
const PYXS: &str = r#"
import os, signal, sys, time
from pyxs import Client, PyXSError
path, pid = sys.argv[1], int(sys.argv[2])
with Client(unix_socket_path=path) as client:
    client[b"/py/one"] = b"1"
    assert client[b"/py/one"] == b"1"
    assert client.exists(b"/py/one") and not client.exists(b"/py/none")
    assert client.list(b"/py") == [b"one"]
    client.set_perms(b"/py/one", [b"b0", b"r5"])
    assert client.get_perms(b"/py/one") == [b"b0", b"r5"]
    assert client.get_domain_path(7) == b"/local/domain/7"
    monitor = client.monitor()
    monitor.watch(b"/py", b"token")
    assert next(monitor.wait()).path == b"/py"
    client.transaction()
    client[b"/py/two"] = b"2"
    os.kill(pid, signal.SIGUSR1)
    for look in range(6000):
        if "--restore=" in open(f"/proc/{pid}/cmdline").read(): break
        time.sleep(0.01)
    else:
        raise SystemExit("no live update")
    assert client[b"/py/two"] == b"2"
    with Client(unix_socket_path=path) as other:
        assert not other.exists(b"/py/two")
        other[b"/elsewhere"] = b"3"
    client.commit()
    events = monitor.wait()
    assert next(events).path == b"/py/two"
    with Client(unix_socket_path=path) as other:
        assert other[b"/py/two"] == b"2"
    # Two that read and write the same: the second has to begin again.
    client.transaction()
    value = client[b"/py/two"]
    with Client(unix_socket_path=path) as other:
        other[b"/py/two"] = b"theirs"
    client[b"/py/two"] = value + b"!"
    try:
        done = client.commit()
    except PyXSError:
        done = False
    assert not done, done
    client.delete(b"/py")
    assert not client.exists(b"/py")
print("RESULT ok")
"#;

#[test]
fn pythons_client_keeps_its_transaction_and_its_watch() {
    let python = ["/usr/bin/python3", "python3"]
        .into_iter()
        .find(|python| run(Command::new(python).args(["-c", "import pyxs"])).status.success());
    let Some(python) = python else {
        return skip("needs Python's pyxs");
    };
    let xenstored = Xenstored::start(&[]);
    let script = xenstored.scratch.join("story.py");
    std::fs::write(&script, PYXS).expect("room");
    let pid = xenstored.running.pid().to_string();
    let mut command = Command::new(python);
    command.args([text(&script), text(&xenstored.socket()), &pid]);
    assert_eq!(run_within(&mut command, LIMIT).ok(), "RESULT ok\n");
}

#[test]
fn a_quick_bench_measures_every_load() {
    let scratch = Scratch::in_memory();
    let picture = scratch.join("listings.svg");
    let mut command =
        tapio_e2e::disk::tapio(&["bench", "xenstore", "--quick", "--json", "-", "--plot", text(&picture)]);
    let said = run_within(&mut command, Duration::from_secs(90)).ok();
    let report: serde_json::Value = serde_json::from_str(&said).expect("JSON on standard output");
    let rows = report["loads"].as_array().expect("a list");
    let daemons = if report["skipped"].as_array().is_some_and(Vec::is_empty) { 2 } else { 1 };
    assert_eq!(rows.len(), 2 * 7 * daemons, "{said}");
    assert!(rows.iter().all(|row| row["per_second"].as_f64().is_some_and(|speed| speed > 0.0)), "{said}");
    // The ways of listing differ in what they were made to differ in.
    let listings = report["listings"].as_array().expect("a list");
    let of = |disks: u64, way: &str, what: &str| {
        let row = listings
            .iter()
            .find(|row| row["disks"] == disks && row["way"] == way && row["daemon"] == "Tapio");
        row.and_then(|row| row[what].as_u64()).unwrap_or_else(|| panic!("no {way} for {disks}: {said}"))
    };
    assert_eq!((of(1, "Singly", "transactions"), of(64, "Singly", "transactions")), (26, 656));
    assert_eq!((of(1, "Together", "transactions"), of(64, "Together", "transactions")), (1, 1));
    assert_eq!((of(1, "Pipelined", "transactions"), of(64, "Pipelined", "transactions")), (1, 1));
    assert!(of(64, "Pipelined", "round_trips") < 10, "{said}");
    assert!(std::fs::read_to_string(&picture).expect("a picture").starts_with("<svg"));
}
