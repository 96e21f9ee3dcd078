//! `tapio bench` runs, and what it prints has sense. Speeds are never tested.

use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{tapio, text};
use tapio_e2e::process::{run, run_within};
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
    let results = report["results"].as_array().expect("results");
    let of = |server: &str, workload: &str| {
        results.iter().find(|row| row["server"] == server && row["workload"] == workload)
    };
    for row in results {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(number(row, "iops") > 0.0 && number(row, "bytes_per_second") > 0.0, "{row}");
        assert!(number(row, "p50_us") > 0.0 && number(row, "p99_us") >= number(row, "p50_us"), "{row}");
    }
    // Ours need no tool, so they are there whatever is installed.
    for workload in ["read-4k-q1", "read-4k-q32", "write-4k-q32", "read-1m-q8"] {
        for server in ["file", "tapio-nbd-raw", "tapio-nbd-vhd", "tapio-vhost-raw", "tapio-vhost-vhd"] {
            let row = of(server, workload).unwrap_or_else(|| panic!("no {server} {workload} in {said}"));
            assert!(server == "file" || number(row, "server_cpu_us_per_request") > 0.0, "{row}");
        }
    }
    assert!(
        of("tapio-nbd-raw", "read-4k-q32x4").is_some() && of("tapio-vhost-vhd", "allocate-4k-q32").is_some()
    );
    // A peer was measured, or it is named with the reason.
    let skipped = report["skipped"].as_array().expect("skipped");
    for peer in ["qemu-nbd-raw", "qsd-nbd-raw", "qsd-vhost-raw", "nbdkit-file"] {
        let named = skipped.iter().any(|skip| skip["server"] == peer && skip["reason"].is_string());
        assert!(of(peer, "read-4k-q1").is_some() || named, "{peer} is neither measured nor skipped: {said}");
    }
    for ratio in report["ratios"].as_array().expect("ratios") {
        assert!(number(ratio, "ratio") > 0.0, "{ratio}");
        assert_eq!(ratio["wanted"].is_null(), ratio["reached"].is_null(), "{ratio}");
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
