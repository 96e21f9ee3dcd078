//! `tapio queue` beside a disk under load, and the sweep over requests in flight.

use serde_json::Value;
use tapio_e2e::disk::{Host, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

use super::instruments::load;

fn figure(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {of}"))
}

fn layer<'a>(disk: &'a Value, name: &str) -> &'a Value {
    let layers = disk["layers"].as_array().expect("layers");
    layers.iter().find(|layer| layer["layer"] == name).unwrap_or_else(|| panic!("no {name} in {disk}"))
}

#[test]
fn layers_of_a_disk_under_load_stand_side_by_side() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let tap = host.create(&format!("vhd:{}", text(&create_vhd(scratch.join("a.vhd"), 32))));
    let mut load = load(&tap, &scratch);
    let (said, disk) = loop {
        let said = run(&mut host.tapio(&["queue", "-i", "0.5", "-c", "1", "--json"])).ok();
        let sample: Value = serde_json::from_str(said.trim()).expect("JSON");
        assert!(load.is_running(), "the load ended: {}", load.log());
        let disk = sample["disks"][0].clone();
        if layer(&disk, "process")["write_per_s"].as_f64().is_some_and(|rate| rate > 2.0) {
            break (said, disk);
        }
    };
    assert_eq!(disk["name"], format!("{}.{}", tap.pid, tap.minor), "{said}");
    let (process, ring) = (layer(&disk, "process"), layer(&disk, "ring"));
    assert!(process["name"].as_str().is_some_and(|name| name.ends_with("a.vhd")), "{said}");
    // One request at a time, of 64 KiB each, and all of them by the same queue.
    for of in [process, ring] {
        let queue = figure(of, "queue");
        assert!(queue > 0.0 && queue < 1.5, "{said}");
        assert!((figure(of, "request_kib") - 64.0).abs() < 1e-6, "{said}");
        assert!(figure(of, "read_await_ms") > 0.0 && figure(of, "write_await_ms") > 0.0, "{said}");
    }
    // Little's law: what is in a layer is what comes a second by how long each stays.
    let by_time = figure(process, "read_per_s") * figure(process, "read_await_ms") / 1e3
        + figure(process, "write_per_s") * figure(process, "write_await_ms") / 1e3;
    assert!((by_time - figure(process, "queue")).abs() < 1e-6, "{said}");
    let plain = run(&mut host.tapio(&["queue", "-i", "0.1", "-c", "1"])).ok();
    assert!(plain.starts_with("DISK ") && plain.contains("process") && plain.contains("a.vhd"), "{plain}");
    drop(load);
    tap.destroy();
    let none = run(&mut host.tapio(&["queue", "-i", "0.1", "-c", "1"])).ok();
    assert_eq!(none, "no disk is plugged\n");
}

#[test]
fn a_sweep_raises_the_queues_and_draws_them() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let picture = scratch.join("queues.svg");
    let words =
        ["queue", "--sweep", "--quick", "--json", "--dir", text(scratch.path()), "--svg", text(&picture)];
    let said = run(&mut host.tapio(&words)).ok();
    let report: Value = serde_json::from_str(&said).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(
        rows.iter().filter_map(|row| row["depth"].as_u64()).collect::<Vec<_>>(),
        [1, 2, 4, 8, 16, 32, 64]
    );
    for row in rows {
        // A request is counted when it ends, with all its time: one that a busy host delayed began before the interval.
        let most = figure(row, "depth") * 1.5;
        assert!(figure(row, "iops") > 0.0, "{row}");
        for layer in ["guest", "ring", "process"] {
            let queue = figure(row, layer);
            assert!(queue > 0.0 && queue <= most, "{layer}: {row}");
        }
    }
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    assert!(
        drawn.starts_with("<svg") && drawn.contains("disk process") && drawn.contains("guest"),
        "{drawn}"
    );
}
