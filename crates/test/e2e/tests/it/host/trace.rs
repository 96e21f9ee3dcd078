//! `tapio trace` follows the requests of clients that do no tracing.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::disk::{DiskOptions, Host, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run};
use tapio_e2e::scratch::Scratch;
use tapio_front::vhost_user::driver::{Driver, DriverOptions};
use tapio_load::{Load, Mix};

const DISK_LEN: usize = 16 << 20;

fn raw(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.join("a.raw");
    std::fs::write(&path, vec![3; DISK_LEN]).expect("the image can be written");
    path
}

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {value}"))
}

/// What is true of every row: its steps are all of it.
fn assert_adds_up(row: &Value) {
    let steps = row["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 11, "{row}");
    let sum: f64 = steps.iter().map(|step| number(step, "mean_us")).sum();
    let total = number(&row["total"], "mean_us");
    // Each step loses less than a nanosecond.
    assert!(total > 0.0 && (total - sum).abs() <= 0.012, "{sum} of {total} us are in the steps: {row}");
    assert!(number(&row["total"], "p99_us") >= number(&row["total"], "p50_us"), "{row}");
}

fn step(row: &Value, name: &str) -> f64 {
    let steps = row["steps"].as_array().expect("steps");
    number(steps.iter().find(|step| step["step"] == name).expect("a step"), "mean_us")
}

#[test]
fn requests_of_a_virtqueue_are_followed_and_their_steps_add_up() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let image = raw(&scratch);
    let mut disk = DiskOptions::raw(&image).vhost_user().start_on(&host, scratch.path());
    let pid = disk.process.pid().to_string();
    let which = ["-p", pid.as_str(), "-m", "0"];
    let tapio = |words: &[&str], rest: &[&str]| run(&mut host.tapio(&[words, &which, rest].concat()));

    let none = tapio(&["trace", "report"], &[]).fails();
    assert!(none.contains("has no trace") && none.contains("trace start"), "{none}");
    assert!(tapio(&["trace", "stop"], &[]).fails().contains("has no trace"));
    let odd = tapio(&["trace", "start"], &["--events", "300"]).fails();
    assert!(odd.contains("300") && odd.contains("power of two"), "{odd}");

    tapio(&["trace", "start"], &["--events", "65536"]).ok();
    let driver = Driver::connect(&disk.vhost, DriverOptions::default()).expect("the device");
    let mut queue = driver.start(0).expect("a queue");
    let mut asked = 0;
    for (mix, block_len) in [(Mix::RandomRead, 4096), (Mix::RandomWrite, 512), (Mix::SequentialRead, 65_536)]
    {
        let load = Load {
            mix,
            block_len,
            depth: 4,
            span_len: DISK_LEN as u64,
            time: Duration::from_secs(60),
            requests_max: 300,
            spin: false,
            seed: 1,
        };
        asked += load.run(&mut queue).expect("the load runs").count;
    }
    driver.stop(0).expect("it stops");
    assert_eq!(asked, 900);
    // While it runs, and as often as one likes.
    let live: Value = serde_json::from_str(&tapio(&["trace", "report"], &["--json"]).ok()).expect("JSON");
    assert_eq!((live["running"].as_bool(), live["requests"].as_u64()), (Some(true), Some(900)), "{live}");
    let said = tapio(&["trace", "stop"], &[]).ok();
    assert!(said.ends_with("events\n"), "{said}");
    let picture = scratch.join("where.svg");
    let report =
        tapio(&["trace", "report"], &["--json", "--svg", text(&picture), "--beside", text(&image)]).ok();
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((report["running"].as_bool(), report["lost"].as_u64()), (Some(false), Some(0)), "{report}");
    let rows = report["rows"].as_array().expect("rows");
    let found: Vec<_> = rows
        .iter()
        .map(|row| (row["kind"].as_str(), row["bytes"].as_u64(), row["requests"].as_u64()))
        .collect();
    let want = [("read", 4096), ("read", 65_536), ("write", 512)]
        .map(|(kind, bytes)| (Some(kind), Some(bytes), Some(300)));
    assert_eq!(found, want, "{report}");
    for row in rows {
        assert_adds_up(row);
        assert!(step(row, "kernel") > 0.0 && step(row, "publish") > 0.0, "{row}");
        assert!(
            step(row, "copy-in") == 0.0 && step(row, "to-back-end") == 0.0,
            "no program notes these here: {row}"
        );
        assert!(number(row, "depth") > 0.0 && number(row, "depth") <= 4.5, "{row}");
        assert_eq!(
            row["host"].is_object(),
            row["kind"] == "read",
            "the image is read, and never written: {row}"
        );
    }
    let svg = std::fs::read_to_string(&picture).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.contains("kernel") && svg.contains("host alone"), "{svg}");

    let (csv, one_by_one) = (scratch.join("all.csv"), scratch.join("all.svg"));
    let words = ["--json", "--trim", "0", "--series", text(&csv), "--series-svg", text(&one_by_one)];
    tapio(&["trace", "report"], &words).ok();
    let series = std::fs::read_to_string(&csv).expect("a series");
    assert_eq!(series.lines().count(), 901, "every request is there, the first ones too");
    assert_eq!(series.lines().filter(|line| line.split(',').nth(2) == Some("4096")).count(), 300);
    assert!(std::fs::read_to_string(&one_by_one).expect("a picture").starts_with("<svg"));

    tapio(&["trace", "stop"], &["--forget"]).ok();
    tapio(&["trace", "report"], &[]).fails();
    // A disk that ends takes its trace along.
    tapio(&["trace", "start"], &[]).ok();
    assert!(disk.process.is_running());
    disk.stop();
    let left: Vec<_> = std::fs::read_dir(scratch.path())
        .expect("listed")
        .filter_map(|entry| entry.ok()?.path().join("tapio").read_dir().ok())
        .flatten()
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    assert_eq!(left, Vec::<std::ffi::OsString>::new(), "a trace is left behind");
}

#[test]
fn requests_of_an_nbd_client_are_followed() {
    needs!("nbdsh");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let disk = DiskOptions::raw(&raw(&scratch)).nbd().start_on(&host, scratch.path());
    let script = "
while True:
    h.pwrite(b'x' * 8192, 8192)
    h.pread(1 << 20, 0)
    h.flush()
";
    let mut nbdsh = Command::new("nbdsh");
    nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", &disk.uri(), "-c", script]);
    let mut load = Running::start(&mut nbdsh, &scratch.join("load.log"));
    let pid = disk.process.pid().to_string();
    let mut report = Value::Null;
    // The client takes its time to start on a busy host.
    for _ in 0..200 {
        let arguments = ["trace", "run", "-p", &pid, "-m", "0", "--time", "0.3", "--json"];
        report = serde_json::from_str(&run(&mut host.tapio(&arguments)).ok()).expect("JSON");
        if report["requests"].as_u64() > Some(20) {
            break;
        }
    }
    assert!(load.is_running(), "the load ended: {}", load.log());
    drop(load);
    let rows = report["rows"].as_array().expect("rows");
    let kinds: Vec<_> = rows.iter().map(|row| row["kind"].as_str().unwrap_or_default()).collect();
    // A read of a megabyte is several requests for the disk.
    assert_eq!(kinds, ["read", "write", "flush"], "{report}");
    assert_eq!(rows[1]["bytes"], 8192, "{report}");
    rows.iter().for_each(assert_adds_up);
    disk.stop();
}
