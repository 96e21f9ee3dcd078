//! How much is gained by plugging disks beside each other, and how long a storm of machines takes.
//!
//! `cargo bench -p tapio-core --bench toolstack -- [--quick] [--json] [--latency MS]`: guests are simulated, and so are
//! disk processes: opening an image takes a time that is known, which is what the ideal is made of. Only ratios of one
//! run mean anything.

#[path = "../tests/machines/pretend.rs"]
mod pretend;
#[path = "../tests/machines/rig.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod rig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tapio_model::Value;

use pretend::Pretend;
use rig::{MIB, Rig};

/// Steps at a time for one machine.
const PER_VM: usize = 10;

fn machine(rig: &Rig, vdi: &str, disks: usize) -> String {
    let vm = rig.make_vm(&[]);
    for place in 0..disks {
        let more = [("mode", Value::string("RO")), ("userdevice", Value::string(place.to_string()))];
        rig.call("VBD.create", vec![Rig::vbd_record(&vm, vdi, &more)]);
    }
    vm
}

fn set_limits(rig: &Rig, host: usize, per_vm: usize) {
    let reference = rig.stack.db.all("host")[0].reference.clone();
    for (key, value) in [("worker-pool-size", host), ("max-parallel-per-vm", per_vm)] {
        rig.call("host.remove_from_other_config", vec![reference.as_str().into(), key.into()]);
        let value = Value::string(value.to_string());
        rig.call("host.add_to_other_config", vec![reference.as_str().into(), key.into(), value]);
    }
}

/// Starts and ends the machine; answers how long the start took.
fn start(rig: &Rig, vm: &str) -> Duration {
    let begun = Instant::now();
    rig.call("VM.start", vec![vm.into(), false.into(), false.into()]);
    let took = begun.elapsed();
    rig.call("VM.hard_shutdown", vec![vm.into()]);
    took
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let (quick, as_json) = (has("--quick"), has("--json"));
    let latency = arguments.iter().skip_while(|argument| *argument != "--latency").nth(1);
    let latency = latency.map_or(100, |text| text.parse().expect("--latency takes milliseconds"));
    let open = Duration::from_millis(if quick { latency.min(10) } else { latency });
    let counts: &[usize] = if quick { &[1, 10, 20] } else { &[1, 2, 4, 8, 10, 20, 64, 128, 255] };

    let rig = Rig::with(Arc::new(Pretend::opening_in(open)));
    let sr = rig.make_sr();
    let vdi = rig.make_vdi(&sr, MIB);
    let mut rows = Vec::new();
    for disks in counts {
        let vm = machine(&rig, &vdi, *disks);
        set_limits(&rig, 64, 1);
        let serial = start(&rig, &vm);
        set_limits(&rig, 64, PER_VM);
        let mut times: Vec<Duration> = (0..3).map(|_| start(&rig, &vm)).collect();
        times.sort();
        let parallel = times[1];
        let ideal = *disks as f64 / disks.div_ceil(PER_VM) as f64;
        let speed_up = serial.as_secs_f64() / parallel.as_secs_f64();
        rows.push(json!({
            "vbds": disks, "serial_ms": ms(serial), "parallel_ms": ms(parallel),
            "speed_up": speed_up, "ideal": ideal, "of_ideal": speed_up / ideal,
        }));
        rig.call("VM.destroy", vec![vm.into()]);
    }

    let (machines, disks) = if quick { (10, 8) } else { (125, 8) };
    set_limits(&rig, 64, PER_VM);
    let vms: Vec<String> = (0..machines).map(|_| machine(&rig, &vdi, disks)).collect();
    let storm = |method: &str, more: &[Value]| {
        let begun = Instant::now();
        let call = |vm: &String| {
            rig.text(method, std::iter::once(Value::string(vm)).chain(more.iter().cloned()).collect())
        };
        let tasks: Vec<String> = vms.iter().map(call).collect();
        for task in tasks {
            assert_eq!(rig.finished(&task).text("status"), "success");
        }
        begun.elapsed()
    };
    let up = storm("Async.VM.start", &[false.into(), false.into()]);
    let down = storm("Async.VM.hard_shutdown", &[]);
    let ideal = open * u32::try_from((machines * disks).div_ceil(64)).expect("few");
    let report = json!({
        "latency_ms": ms(open), "per_vm": PER_VM, "start": rows,
        "storm": { "machines": machines, "disks": disks, "pool": 64, "up_ms": ms(up), "down_ms": ms(down), "ideal_ms": ms(ideal) },
    });
    if as_json {
        println!("{report:#}");
        return;
    }
    println!("VM.start, opening an image takes {open:?}; one disk at a time, and {PER_VM}\n");
    println!(
        "{:>5} {:>12} {:>12} {:>9} {:>7} {:>9}",
        "VBDs", "1 at a time", "10", "speed-up", "ideal", "of ideal"
    );
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        println!(
            "{:>5} {:>9.1} ms {:>9.1} ms {:>9.2} {:>7.2} {:>8.0}%",
            row["vbds"].as_u64().unwrap_or(0),
            number("serial_ms"),
            number("parallel_ms"),
            number("speed_up"),
            number("ideal"),
            100.0 * number("of_ideal"),
        );
    }
    println!(
        "\n{machines} machines with {disks} disks, 64 steps at a time: up in {up:.1?} (ideal {ideal:.1?}), down in {down:.1?}"
    );
}
