//! The dashboard in a real browser: what a person does, at two sizes of the window, in light and dark.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::{Running, run};
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::Session;
use tapio_e2e::world::World;

use super::storage_hangs::{default_sr, halted_vm_on, make_vdi};

/// Reads and writes 64 KiB at a time, with time for others in between.
const LOAD: &str = "
import time
while True:
    for at in range(0, 4 << 20, 65536):
        h.pwrite(b'x' * 65536, at)
        h.pread(65536, at)
        time.sleep(0.001)
";

/// A VM `busy` that runs, whose disk is under load.
fn busy(world: &World, session: &Session) -> (String, Running) {
    let (vm, _) = halted_vm_on(session, &make_vdi(session, &default_sr(session)));
    session.call("VM.set_name_label", &[json!(vm), json!("busy")]);
    session.call("VM.add_to_platform", &[json!(vm), json!("sim-front"), json!("vhost-user")]);
    session.call("VM.start", &[json!(vm), json!(false), json!(false)]);
    let disk = |args: &[&str]| {
        let mut command = Command::new(our("tapio"));
        command.arg("disk").args(args).env("TAPIO_RUN_DIR", world.scratch.join("run/disk"));
        run(&mut command).ok()
    };
    let listed: Value = serde_json::from_str(&disk(&["list", "--json"])).expect("JSON");
    let number = |name: &str| listed[0][name].as_i64().unwrap_or_else(|| panic!("{listed}")).to_string();
    let socket = world.scratch.join("run/disk/load");
    disk(&["front", "add", "-p", &number("pid"), "-m", &number("minor"), "--nbd-unix", text(&socket)]);
    let mut nbdsh = Command::new("nbdsh");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    nbdsh.env("PATH", "/usr/bin:/bin").args(["-u", &uri, "-c", LOAD]);
    let mut load = Running::start(&mut nbdsh, &world.scratch.join("load.log"));
    load.wait_for("requests", Duration::from_secs(60), || {
        let metrics = session.text("host.export_metrics", &[]);
        let of_writes = |line: &&str| line.starts_with("tapio_vbd_requests_total{") && line.contains("write");
        metrics.lines().filter(of_writes).any(|line| !line.ends_with(" 0")).then_some(())
    });
    (vm, load)
}

#[test]
fn a_person_works_with_disks_in_a_browser() {
    needs!("chromium", "chromedriver", "nbdsh");
    let world = World::new();
    let daemon = world.daemon();
    daemon.add_user("carol", "read-only", "correct horse");
    let session = daemon.login();
    let templates = session.call("VM.get_by_name_label", &[json!("Tapio UML guest")]);
    let template = templates.get(0).cloned().expect("the template of User-mode Linux");
    let guest = session.call("VM.clone", &[template, json!("guest")]);
    session.call("VM.set_is_a_template", &[guest, json!(false)]);
    session.call("task.create", &[json!("a task to cancel"), json!("")]);
    let target = std::env::current_exe().expect("the test has a path");
    let target = target.ancestors().nth(3).expect("in the target directory").to_path_buf();
    let shots = target.join("lanes/dashboard");
    let (vm, mut load) = busy(&world, &session);
    let said = world.story("dashboard.py", &[&shots.display().to_string(), text(&world.scratch.join("sr"))]);
    assert!(said.contains("reader\n"), "{said}");
    assert!(load.is_running(), "the load ended: {}", load.log());
    drop(load);
    session.call("VM.hard_shutdown", &[json!(vm)]);
    world.finish();
}
