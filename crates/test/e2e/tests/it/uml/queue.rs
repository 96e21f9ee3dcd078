//! `tapio queue` of a VM: what its guest, its disk process and the device of the host hold, side by side.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::tools::our;

use crate::machines::Guest;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn every_layer_of_a_guests_disk_is_seen() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    let guest = Guest::install("Tapio UML guest", Duration::from_secs(120), &[]);
    guest.start();
    // One request after the other, past the guest's page cache.
    guest.shell(
        "(while [ ! -e /tmp/stop ]; do dd if=/dev/vdb of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null; done; \
         touch /tmp/done) &",
    );
    let daemon = guest.world.daemon();
    let queue = || -> Value {
        let mut command = Command::new(our("tapio"));
        command.args(["queue", "guest", "-i", "0.4", "-c", "1", "--json", "--", "--socket"]);
        command.arg(&daemon.socket).env("HOME", guest.world.scratch.path());
        command.env("TAPIO_SHM_DIR", guest.world.scratch.join("shm"));
        serde_json::from_str(run(&mut command).ok().trim()).expect("JSON")
    };
    let of = |sample: &Value, disk: &str, layer: &str| -> Value {
        let disks = sample["disks"].as_array().expect("disks");
        let disk =
            disks.iter().find(|one| one["name"] == disk).unwrap_or_else(|| panic!("no {disk}: {sample}"));
        let layers = disk["layers"].as_array().expect("layers");
        layers
            .iter()
            .find(|one| one["layer"] == layer)
            .unwrap_or_else(|| panic!("no {layer}: {sample}"))
            .clone()
    };
    let figure = |layer: &Value, name: &str| layer[name].as_f64().unwrap_or(0.0);
    let busy = poll_until(LIMIT, || {
        let sample = queue();
        let is_seen = |layer: &str| figure(&of(&sample, "xvdb", layer), "read_per_s") > 5.0;
        (is_seen("guest") && is_seen("process")).then_some(sample)
    });
    let sample = busy.expect("a sample of the load");
    let (inside, process) = (of(&sample, "xvdb", "guest"), of(&sample, "xvdb", "process"));
    for layer in [&inside, &process] {
        assert!(figure(layer, "queue") <= 1.6 && figure(layer, "read_await_ms") > 0.0, "{sample}");
        assert!((figure(layer, "request_kib") - 4.0).abs() < 0.5, "{sample}");
    }
    assert!(figure(&inside, "queue") > 0.0, "{sample}");
    assert_eq!(figure(&of(&sample, "xvdc", "guest"), "read_per_s"), 0.0, "{sample}");
    guest.shell("touch /tmp/stop; while [ ! -e /tmp/done ]; do usleep 10000; done");
    guest.ok(&["vm-shutdown", "vm=guest"]);
    let halted = queue();
    assert_eq!(halted["disks"], serde_json::json!([]), "{halted}");
    guest.ok(&["vm-uninstall", "vm=guest", "--force"]);
    guest.world.finish();
}
