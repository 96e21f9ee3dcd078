//! `tapio bench pool` runs against daemons and an etcd of its own. Speeds are never tested.

use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{tapio, text};
use tapio_e2e::needs;
use tapio_e2e::process::{run, run_within};
use tapio_e2e::scratch::Scratch;

/// Generous for a busy host; it takes some seconds.
const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn a_quick_run_measures_both_databases_and_leaves_nothing() {
    needs!("etcd");
    let scratch = Scratch::on_disk();
    let mut command = tapio(&["bench", "pool", "--quick", "--json", "-", "--dir", text(scratch.path())]);
    let said = run_within(&mut command, LIMIT).ok();
    let report: Value = serde_json::from_str(&said).expect("JSON on standard output");
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().filter_map(|row| row["what"].as_str()).collect();
    assert_eq!(names, ["read", "write", "create", "event", "event elsewhere"]);
    for row in rows {
        assert!(row["etcd_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
        // There is no other host without a pool.
        assert_eq!(row["sqlite_ms"].is_null(), row["what"] == "event elsewhere", "{row}");
    }
    let storms = report["storms"].as_array().expect("storms");
    let seen: Vec<_> =
        storms.iter().map(|storm| (&storm["database"], &storm["hosts"], &storm["vms"])).collect();
    let expected = [(&"SQLite".into(), &1.into(), &2.into()), (&"etcd".into(), &2.into(), &4.into())];
    assert_eq!(seen, expected);
    let left: Vec<_> = std::fs::read_dir(scratch.path()).expect("the directory").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_pool_of_one_is_none() {
    let refused = run(&mut tapio(&["bench", "pool", "--hosts", "1"])).fails();
    assert!(refused.contains("--hosts") && refused.contains("2..=32"), "{refused}");
}
