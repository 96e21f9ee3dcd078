//! `xsiostat` while disks work, come and go.

use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::{Host, Tap, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run};
use tapio_e2e::scratch::Scratch;

/// The 6.5 header.
const HEADER: &str = "  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs";

/// Reads and writes 64 KiB at a time until it is dropped.
pub(super) fn load(tap: &Tap, scratch: &Scratch) -> Running {
    let script = "
while True:
    for at in range(0, 4 << 20, 65536):
        h.pwrite(b'x' * 65536, at)
        h.pread(65536, at)
";
    let mut nbdsh = Command::new("nbdsh");
    nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", &tap.uri(), "-c", script]);
    Running::start(&mut nbdsh, &scratch.join("load.log"))
}

/// The numbers of a row `  DOM,  VBD:  r/s  w/s  rMB/s  wMB/s  rAvgQs  wAvgQs`.
fn numbers(row: &str) -> Option<Vec<f64>> {
    let (name, rest) = row.split_once(": ")?;
    let (domain, device) = name.split_once(',')?;
    domain.trim().parse::<u32>().ok()?;
    device.trim().parse::<u32>().ok()?;
    rest.split_whitespace().map(|field| field.parse().ok()).collect()
}

#[test]
fn a_busy_disk_shows_its_rates() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&create_vhd(scratch.join("a.vhd"), 32))));
    let mut load = load(&tap, &scratch);
    let record = scratch.join("record");
    let said = run(&mut host.tapio(&["xsiostat", "-s", "-i", "300", "-c", "6", "-o", text(&record)])).ok();
    assert!(load.is_running(), "the load ended: {}", load.log());
    drop(load);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.contains(&HEADER), "{said}");
    let dashes = lines.iter().position(|line| *line == HEADER).expect("a header") - 1;
    assert_eq!(lines[dashes], "-".repeat(68), "{said}");
    let rows: Vec<Vec<f64>> = lines.iter().filter_map(|line| numbers(line)).collect();
    assert!(rows.len() >= 3, "{said}");
    assert!(rows.iter().all(|row| row.len() == 6), "{said}");
    let busy = rows.iter().filter(|row| row[0] > 1.0 && row[1] > 1.0).count();
    assert!(busy >= 2, "a disk under load looks idle: {said}");
    for row in rows.iter().filter(|row| row[1] > 1.0) {
        // Every write has 64 KiB, so requests and megabytes must agree (two decimals are printed), but for those
        // that were
        // submitted in one interval of 0.3 s and answered in the next.
        let expected = row[1] * 65536.0 / 1e6;
        let between = 8.0 * 65536.0 / 1e6 / 0.3;
        assert!(
            (row[3] - expected).abs() < 0.02 + expected * 0.01 + between,
            "{} MB/s for {} w/s",
            row[3],
            row[1]
        );
    }
    // What was kept prints again, to the letter.
    let replayed = run(&mut host.tapio(&["xsiostat", "--replay", text(&record)])).ok();
    let kept: Vec<Vec<f64>> = replayed.lines().filter_map(numbers).collect();
    assert_eq!(kept, rows, "--- live\n{said}\n--- replayed\n{replayed}");
    tap.destroy();
}

#[test]
fn disks_may_come_and_go_while_it_runs() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let mut watching = host.tapio(&["xsiostat", "-s", "-i", "200"]);
    let mut watching = Running::start(&mut watching, &scratch.join("xsiostat.log"));
    let log = watching.log_path().to_path_buf();
    let read = || std::fs::read_to_string(&log).unwrap_or_default();
    let limit = Duration::from_secs(60);
    watching.wait_for("word that it waits", limit, || {
        read().contains("Waiting for VBDs to be plugged.").then_some(())
    });
    for visit in 1..=2 {
        let before = read().lines().filter_map(numbers).count();
        let tap = host.create(&format!("vhd:{}", text(&image)));
        watching.wait_for(&format!("rows of visit {visit}"), limit, || {
            (read().lines().filter_map(numbers).count() > before + 2).then_some(())
        });
        tap.destroy();
        // It has taken notice; then there must be silence, for the time of three samples.
        watching.wait_for(&format!("word that it waits after visit {visit}"), limit, || {
            (read().matches("Waiting for VBDs").count() > visit).then_some(())
        });
        let after = read().lines().filter_map(numbers).count();
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(read().lines().filter_map(numbers).count(), after, "a disk that is gone is still shown");
        assert!(watching.is_running(), "{}", read());
    }
    // Once before each disk, and once after the last.
    assert!(read().matches("Waiting for VBDs").count() <= 3, "{}", read());
}

#[test]
fn without_disks_and_without_scanning_there_is_nothing_to_do() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let finished = run(&mut host.tapio(&["xsiostat"]));
    assert_eq!(finished.stdout, "");
    assert_eq!(finished.stderr.trim_end(), "No VBDs to report and 'scan' flag not set.");
}

#[test]
fn a_closed_disk_leaves_nothing_in_shared_memory() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&create_vhd(scratch.join("a.vhd"), 8))));
    let files = || {
        let found = run(Command::new("find").arg(scratch.join("shm")).args(["-type", "f"])).ok();
        found.lines().map(String::from).collect::<Vec<_>>()
    };
    assert!(!files().is_empty(), "a running disk has statistics");
    tap.destroy();
    assert_eq!(files(), Vec::<String>::new());
}
