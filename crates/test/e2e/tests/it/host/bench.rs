//! `tapio bench` runs, and what it prints has sense. Speeds are never tested.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{tapio, text};
use tapio_e2e::process::{Running, poll_until, run, run_within};
use tapio_e2e::scratch::Scratch;

/// Generous for a busy host; it takes a few seconds.
const LIMIT: Duration = Duration::from_secs(60);

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {row}"))
}

fn leftovers(scratch: &Scratch) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(scratch.path()).expect("the directory can be listed");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

#[test]
fn a_quick_run_measures_ours_and_the_peers() {
    let scratch = Scratch::in_memory();
    let mut command = tapio(&["bench", "--quick", "--json", "-", "--dir", text(scratch.path())]);
    let said = run_within(&mut command, LIMIT).ok();
    let report: Value = serde_json::from_str(&said).expect("JSON on standard output");
    let place = &report["places"][0];
    assert!(place["in_memory"].is_boolean() && !place["file_system"].as_str().unwrap_or_default().is_empty());
    for name in ["kernel", "processor", "governor", "idle"] {
        assert!(report["setting"][name].is_string(), "{name}: {}", report["setting"]);
    }
    assert!((0.0..=100.0).contains(&number(&report["setting"], "steal_percent")), "{}", report["setting"]);
    assert_eq!(report["setting"]["kept_awake"], false);
    let program = report["disk_program"].as_str().expect("which tapio-disk was measured");
    assert!(program.ends_with("/tapio-disk"), "{program}");
    let results = place["results"].as_array().expect("results");
    let of = |server: &str, workload: &str| {
        results.iter().find(|row| row["server"] == server && row["workload"] == workload)
    };
    for row in results {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(number(row, "iops") > 0.0 && number(row, "bytes_per_second") > 0.0, "{row}");
        assert!(number(row, "requests") > 0.0, "{row}");
        let order = ["p50_us", "p99_us", "p999_us", "longest_us"].map(|name| number(row, name));
        assert!(order[0] > 0.0 && order.is_sorted(), "{row}");
        let is_file = row["server"] == "file";
        assert_eq!(row["load_cpu_us_per_request"].is_null(), is_file, "{row}");
        assert!(is_file || number(row, "load_processors") > 0.0, "{row}");
    }
    // Ours need no tool, so they are there whatever is installed.
    for workload in ["read-4k-q1", "read-4k-q32", "write-4k-q32", "read-1m-q8", "write-1m-q8"] {
        for server in ["file", "tapio-nbd-raw", "tapio-nbd-vhd", "tapio-vhost-raw", "tapio-vhost-vhd"] {
            let row = of(server, workload).unwrap_or_else(|| panic!("no {server} {workload} in {said}"));
            assert!(server == "file" || number(row, "server_cpu_us_per_request") > 0.0, "{row}");
        }
    }
    for workload in ["read-4k-q8x4", "write-4k-q8x4", "read-4k-q32x2", "read-4k-q32x4"] {
        for server in ["tapio-nbd-raw", "tapio-nbd-vhd", "tapio-vhost-raw", "tapio-vhost-vhd"] {
            assert!(of(server, workload).is_some(), "no {server} {workload} in {said}");
        }
    }
    assert!(
        of("tapio-nbd-raw", "read-4k-q8x4-single").is_some()
            && of("tapio-nbd-vhd", "write-4k-q8x4-single").is_some()
    );
    for workload in ["allocate-4k-q1", "allocate-4k-q32", "allocate-1m-q8"] {
        for image in ["vhd", "diff", "crypt"] {
            for server in [format!("tapio-nbd-{image}"), format!("tapio-vhost-{image}")] {
                assert!(of(&server, workload).is_some(), "no {server} {workload} in {said}");
            }
        }
    }
    // A peer was measured, or it is named with the reason.
    let skipped = report["skipped"].as_array().expect("skipped");
    for peer in
        ["qemu-nbd-raw", "qsd-nbd-raw", "qsd-vhost-raw", "nbdkit-file", "qsd-nbd-qcow2", "qsd-vhost-qcow2"]
    {
        let named = skipped.iter().any(|skip| skip["server"] == peer && skip["reason"].is_string());
        let workload = if peer.ends_with("qcow2") { "allocate-4k-q1" } else { "read-4k-q1" };
        assert!(of(peer, workload).is_some() || named, "{peer} is neither measured nor skipped: {said}");
    }
    let goals = [&place["goals"], &report["goals"]].map(|goals| goals.as_array().expect("goals"));
    assert!(goals.iter().all(|goals| !goals.is_empty()), "{said}");
    for goal in goals.into_iter().flatten() {
        assert!(number(goal, "value") > 0.0, "{goal}");
        assert!(!goal["wanted"].is_null() || goal["reached"].is_null(), "{goal}");
        assert!(goal["wanted"].is_null() || !goal["reached"].is_null() || goal["note"].is_string(), "{goal}");
    }
    for start in report["starts"].as_array().expect("starts") {
        assert!(number(start, "first_answer_ms") > 0.0 && number(start, "close_ms") > 0.0, "{start}");
    }
    let memory = report["memory"].as_array().expect("memory");
    assert!(memory.iter().any(|memory| memory["server"] == "tapio-nbd-raw"), "{said}");
    for memory in memory {
        assert!(number(memory, "pss_kib") >= number(memory, "anonymous_kib"), "{memory}");
        assert!(number(memory, "pss_kib") > 0.0, "{memory}");
    }
    assert_eq!(leftovers(&scratch), Vec::<std::path::PathBuf>::new(), "images are left over");
}

/// The processes whose parent is `parent`, and of each the number of threads of the class SCHED_IDLE.
fn children(parent: u32) -> Vec<(u32, usize)> {
    let field = |path: &Path, index: usize| {
        let stat = std::fs::read_to_string(path.join("stat")).ok()?;
        // Fields are counted from the state, the third: the name before it may have spaces.
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_whitespace().nth(index - 3)?.parse::<u32>().ok()
    };
    let numbered =
        |dir: &str| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let idle = |process: &Path| {
        numbered(text(&process.join("task")))
            .filter(|task| field(task, 41) == Some(libc::SCHED_IDLE as u32))
            .count()
    };
    let found = numbered("/proc").filter(|process| field(process, 4) == Some(parent));
    found.filter_map(|process| Some((process.file_name()?.to_str()?.parse().ok()?, idle(&process)))).collect()
}

#[test]
fn processors_are_kept_awake_until_the_run_ends_even_when_it_is_killed() {
    let scratch = Scratch::in_memory();
    let mut command = tapio(&["bench", "--keep-awake", "--only", "tapio-nbd-raw", "--only", "read-4k-q1"]);
    command.args(["--seconds", "60", "--dir", text(scratch.path())]);
    let mut bench = Running::start(&mut command, &scratch.join("log"));
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let parent = bench.pid();
    let spinner = bench.wait_for("a thread that spins on each processor", LIMIT, || {
        children(parent).into_iter().find(|(_, idle)| *idle == processors).map(|(pid, _)| pid)
    });
    bench.kill();
    // In a container nothing may take the exit status of an orphan.
    let ended = || {
        std::fs::read_to_string(format!("/proc/{spinner}/stat")).map_or(true, |stat| stat.contains(") Z "))
    };
    let gone = poll_until(LIMIT, || ended().then_some(()));
    // The directory for sockets that a killed run leaves.
    let _ = std::fs::remove_dir_all(format!("/dev/shm/tapio-bench-{parent}.run"));
    assert!(gone.is_some(), "process {spinner} still spins");
}

#[test]
fn what_cannot_be_run_is_refused_with_a_reason() {
    let scratch = Scratch::in_memory();
    let unknown = run(&mut tapio(&["bench", "--only", "florist"])).fails();
    assert!(unknown.contains("florist") && unknown.contains("qemu-nbd-raw"), "{unknown}");
    let rounds = run(&mut tapio(&["bench", "--rounds", "0"])).fails();
    assert!(rounds.contains("--rounds"), "{rounds}");
    let nowhere = run(&mut tapio(&["bench", "--quick", "--dir", text(&scratch.join("none"))])).fails();
    assert!(nowhere.contains("none") && nowhere.contains("--dir"), "{nowhere}");
}
