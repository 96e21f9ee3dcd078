//! `tapio bench xen` runs, and what it prints has sense. Speeds are never tested.

use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{tapio, text};
use tapio_e2e::process::{run, run_within};
use tapio_e2e::scratch::Scratch;

/// Generous for a busy host; it takes a few seconds.
const LIMIT: Duration = Duration::from_secs(100);

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {row}"))
}

fn rows<'a>(report: &'a Value, name: &str) -> &'a Vec<Value> {
    report[name].as_array().unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn a_quick_run_measures_every_way() {
    let scratch = Scratch::in_memory();
    let pictures = Scratch::in_memory();
    let arguments = ["bench", "xen", "--quick", "--json", "-", "--dir", text(scratch.path())];
    let said = run_within(tapio(&arguments).args(["--svg", text(pictures.path())]), LIMIT).ok();
    let report: Value = serde_json::from_str(&said).expect("JSON on standard output");
    assert_eq!(rows(&report, "skipped"), &Vec::<Value>::new(), "{said}");
    let singles = rows(&report, "rows");
    for row in singles {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(number(row, "iops") > 0.0 && number(row, "p99_us") >= number(row, "p50_us"), "{row}");
        assert!(number(row, "disk_cpu_us_per_request") > 0.0 && number(row, "cpu_ratio") > 0.0, "{row}");
    }
    let first = |comparison: &str| singles.iter().find(|row| row["comparison"] == comparison);
    for comparison in ["movement", "large", "order", "segments", "polling", "split", "queues"] {
        let row = first(comparison).unwrap_or_else(|| panic!("no {comparison} in {said}"));
        assert_eq!(number(row, "speed_ratio"), 1.0, "the first is what others are compared to: {row}");
    }
    for variant in ["copy", "persistent", "map", "order-3", "256", "polling", "split-2", "3-rings"] {
        assert!(singles.iter().any(|row| row["variant"] == variant), "no {variant} in {said}");
    }
    for row in rows(&report, "machines") {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(number(row, "iops") > 0.0 && (0.0..=1.0).contains(&number(row, "fairness")), "{row}");
    }
    assert!(rows(&report, "machines").iter().any(|row| number(row, "guests") > 1.0), "{said}");
    let overhead = rows(&report, "overhead");
    for traced in overhead {
        for row in rows(traced, "rows") {
            assert_eq!(row["front"], true, "the front end's own points are missing: {row}");
            let sum: f64 = rows(row, "steps").iter().map(|step| number(step, "mean_us")).sum();
            assert!((number(&row["total"], "mean_us") - sum).abs() <= 0.012, "{row}");
            assert!(number(&row["host"], "mean_us") > 0.0, "{row}");
            let step = |name: &str| rows(row, "steps").iter().find(|step| step["step"] == name).cloned();
            let taken = step("to-back-end").expect("a step");
            assert!(number(&taken, "p99_us") > 0.0, "nothing is that fast: {row}");
        }
        assert_eq!(rows(traced, "rows").len(), rows(traced, "traced_ratio").len());
    }
    for way in ["blkif", "persistent", "map", "vhost-user"] {
        let all = |traced: &&Value| traced["way"] == way && rows(traced, "rows").len() == 3;
        assert_eq!(overhead.iter().filter(all).count(), 2, "{said}");
    }
    assert!(report["setting"]["meaning"].as_str().is_some_and(|text| text.contains("hypercalls")), "{said}");
    let left = std::fs::read_dir(scratch.path()).expect("listed").count();
    assert_eq!(left, 0, "images are left over");
    let drawn = |name: &str| std::fs::read_to_string(pictures.join(name)).expect("a picture");
    assert!(drawn("xen-machines-4k.svg").contains("persistent"));
    assert!(drawn("xen-overhead-blkif-reads-1.svg").contains("to-back-end"));
}

#[test]
fn what_cannot_be_run_is_refused_with_a_reason() {
    let scratch = Scratch::in_memory();
    let unknown = run(&mut tapio(&["bench", "xen", "--only", "florist"])).fails();
    assert!(unknown.contains("florist") && unknown.contains("movement"), "{unknown}");
    let nowhere = run(&mut tapio(&["bench", "xen", "--dir", text(&scratch.join("none"))])).fails();
    assert!(nowhere.contains("none") && nowhere.contains("--dir"), "{nowhere}");
    let pictures = run(&mut tapio(&["bench", "xen", "--svg", text(&scratch.join("none"))])).fails();
    assert!(pictures.contains("none") && pictures.contains("directory"), "{pictures}");
}
