//! `tapio bench toolstack` runs against a daemon of its own, and what it prints has sense. Speeds are never tested.

use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{tapio, text};
use tapio_e2e::process::{run, run_within};
use tapio_e2e::scratch::Scratch;

/// Generous for a busy host; it takes some seconds.
const LIMIT: Duration = Duration::from_secs(300);

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {row}"))
}

fn rows<'a>(report: &'a Value, name: &str) -> &'a Vec<Value> {
    report[name].as_array().unwrap_or_else(|| panic!("{name} is no list in {report}"))
}

#[test]
fn a_quick_run_measures_every_part_and_leaves_nothing() {
    let scratch = Scratch::in_memory();
    let mut command = tapio(&["bench", "toolstack", "--quick", "--json", "-", "--dir", text(scratch.path())]);
    let said = run_within(&mut command, LIMIT).ok();
    let report: Value = serde_json::from_str(&said).expect("JSON on standard output");

    assert!(number(&report, "first_answer_ms") > 0.0);
    let skipped = rows(&report, "skipped");
    for what in ["VBD.plug until the front end answers", "qemu-storage-daemon", "User-mode Linux"] {
        let found =
            rows(&report, "plugs").iter().find(|row| row["what"].as_str().is_some_and(|w| w.contains(what)));
        let named = skipped.iter().any(|skip| skip.as_str().is_some_and(|why| why.contains(what)));
        assert!(found.is_some() || named, "{what} is neither measured nor skipped: {said}");
        if let Some(row) = found {
            assert_eq!(row["times"], 10, "{row}");
            let (least, most) = (number(row, "least_ms"), number(row, "most_ms"));
            assert!(least > 0.0 && (least..=most).contains(&number(row, "median_ms")), "{row}");
        }
    }
    // Ours without a guest needs no tool.
    assert_eq!(report["plugs"][0]["what"], "VBD.plug until the front end answers");

    let starts: Vec<_> =
        rows(&report, "starts").iter().map(|row| (row["kind"].as_str(), &row["vbds"])).collect();
    let expected = [("latency", 1), ("latency", 4), ("real", 1), ("real", 4)];
    assert_eq!(starts.len(), expected.len(), "{said}");
    for (found, (kind, vbds)) in starts.iter().zip(expected) {
        assert!(found.0 == Some(kind) && *found.1 == vbds, "{found:?}");
    }
    // A simulated storage is as late as it was told, however fast the host.
    for row in rows(&report, "starts").iter().filter(|row| row["kind"] == "latency") {
        let latency = number(&report["setting"], "latency_ms");
        assert!(number(row, "serial_ms") >= latency * number(row, "vbds"), "{row}");
        assert!(number(row, "parallel_ms") >= latency, "{row}");
        let ratio = number(row, "speed_up") / number(row, "ideal");
        assert!((ratio - number(row, "of_ideal")).abs() < 1e-6, "{row}");
    }
    let storm = &report["storm"];
    assert!(storm["machines"] == 3 && storm["disks"] == 8 && number(storm, "up_ms") > 0.0, "{storm}");

    let calls = rows(&report, "calls");
    assert_eq!(calls.len(), 16, "two messages, two encodings, two doors, one and eight connections");
    for row in calls {
        assert!(
            number(row, "calls_per_second") > 0.0 && number(row, "calls") >= number(row, "connections"),
            "{row}"
        );
        assert!(number(row, "p50_us") > 0.0 && number(row, "p99_us") >= number(row, "p50_us"), "{row}");
    }
    let events = &report["events"];
    assert_eq!(events["listeners"], 4);
    assert!(number(events, "last_listener_ms") >= number(events, "first_listener_ms"), "{events}");
    assert!(number(events, "changes_per_second") > 0.0, "{events}");
    assert_eq!(report["many"]["vdis"], 50);
    for row in rows(&report["many"], "get_all_records") {
        assert!(number(row, "ms") > 0.0 && number(row, "bytes") > 50.0 * 500.0, "{row}");
    }
    let idle = &report["idle"];
    assert!(idle["disks"] == 4 && idle["processes"] == 4 && number(idle, "disk_pss_kib") > 100.0, "{idle}");
    let of_plugs = rows(&report["plug_memory"], "rows");
    assert_eq!(of_plugs.iter().map(|row| row["plugs"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(4)]);
    assert!(of_plugs.iter().all(|row| number(row, "pss_kib") > 1000.0), "{of_plugs:?}");
    assert!(
        skipped.iter().any(|why| why.as_str().is_some_and(|why| why.contains("--kernel"))),
        "{skipped:?}"
    );
    devices_that_are_polled_cost_a_running_guest(&report, skipped);
    for row in rows(&report, "memory") {
        assert!(number(row, "pss_kib") >= number(row, "anonymous_kib"), "{row}");
        assert!(number(row, "anonymous_kib") > 0.0, "{row}");
    }
    for goal in rows(&report, "goals") {
        let (value, wanted) = (number(goal, "value"), number(goal, "wanted"));
        let reached = if goal["at_least"] == true { value >= wanted } else { value <= wanted };
        assert_eq!(goal["reached"], reached, "{goal}");
    }
    let left = std::fs::read_dir(scratch.path()).expect("the directory can be listed").count();
    assert_eq!(left, 0, "something is left over");
}

/// Keys of the platform take the wake-ups of a guest that runs and does nothing away.
fn devices_that_are_polled_cost_a_running_guest(report: &Value, skipped: &[Value]) {
    let tables = rows(report, "density");
    let has_no_emulator =
        skipped.iter().any(|why| why.as_str().is_some_and(|why| why.starts_with("idle guests of QEMU")));
    if has_no_emulator {
        return assert!(tables.is_empty(), "{tables:?}");
    }
    assert_eq!(tables.len(), 2, "{tables:?}");
    let [with, without] = [0, 1].map(|at| {
        let intervals = rows(&tables[at], "intervals");
        intervals.iter().map(|row| number(row, "timers")).sum::<f64>()
    });
    assert!(with > 5.0 * (without + 1.0), "timers with the devices and without them: {with}, {without}");
    assert!(number(&tables[0]["stopped"], "timers") < with, "{tables:?}");
}

#[test]
fn only_the_parts_that_were_asked_for_are_run() {
    let scratch = Scratch::in_memory();
    let mut command =
        tapio(&["bench", "toolstack", "--quick", "--only", "storm", "--dir", text(scratch.path())]);
    let said = run_within(&mut command, LIMIT).ok();
    assert!(said.contains("3 VMs with 8 disks at once"), "{said}");
    assert!(!said.contains("one plug of a VHD") && !said.contains("VDI.get_record"), "{said}");
}

#[test]
fn what_cannot_be_run_is_refused_with_a_reason() {
    let scratch = Scratch::in_memory();
    let unknown = run(&mut tapio(&["bench", "toolstack", "--only", "florist"])).fails();
    assert!(unknown.contains("florist") && unknown.contains("storm"), "{unknown}");
    let many = run(&mut tapio(&["bench", "toolstack", "--vbds", "256"])).fails();
    assert!(many.contains("--vbds") && many.contains("255"), "{many}");
    let nowhere =
        run(&mut tapio(&["bench", "toolstack", "--quick", "--dir", text(&scratch.join("none"))])).fails();
    assert!(nowhere.contains("none") && nowhere.contains("--dir"), "{nowhere}");
    let no_daemon = run(tapio(&["bench", "toolstack", "--quick", "--dir", text(scratch.path())])
        .env("TAPIOD", "/nonexistent/tapiod"))
    .fails();
    assert!(no_daemon.contains("tapiod does not start"), "{no_daemon}");
}
