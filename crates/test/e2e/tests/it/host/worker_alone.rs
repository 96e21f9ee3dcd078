//! The worker of a storage repository whose daemon dies between what a running disk has done and the worker's knowledge
//! of it. What the guest was told is written has to be there afterwards.

use serde_json::{Value, json};
use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::DaemonOptions;

use super::storage_hangs::{ask_without_answer, default_sr, make_vdi, stop, vm_on};

/// The daemon dies there in a snapshot; with `is_served` the disk goes on beforehand.
fn died_in_a_snapshot(step: &str, is_served: bool) {
    let scratch = Scratch::on_disk();
    let options = DaemonOptions::new(&scratch).default_sr();
    let mut daemon = options.clone().env("TAPIO_DIE_AT", step).start();
    let session = daemon.login();
    let vdi = make_vdi(&session, &default_sr(&session));
    let (vm, _) = vm_on(&session, &vdi);
    let tapio = |words: &[&str]| {
        let mut command = std::process::Command::new(our("tapio"));
        command.env("TAPIO_RUN_DIR", scratch.join("run/disk")).env("TAPIO_SHM_DIR", scratch.join("shm"));
        run(command.args(words)).ok()
    };
    let listed: Value = serde_json::from_str(&tapio(&["disk", "list", "--json"])).expect("JSON");
    let number = |name: &str| listed[0][name].as_u64().expect("a number").to_string();
    let socket = scratch.join("nbd");
    let (pid, minor) = (number("pid"), number("minor"));
    tapio(&["disk", "front", "add", "-p", &pid, "-m", &minor, "--nbd-unix", text(&socket)]);
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    nbdsh(&uri, "h.pwrite(b'a' * 8192, 0); h.flush()");
    ask_without_answer(&mut daemon, &session, "VM.snapshot", &[json!(vm), json!("cut off")]);
    if is_served {
        nbdsh(&uri, "h.pwrite(b'b' * 4096, 4096); h.flush()");
    }
    let daemon = options.start();
    let session = daemon.login();
    // Answered when what was cut off is finished or undone.
    session.call("VM.set_name_description", &[json!(vm), json!("the daemon died")]);
    nbdsh(&uri, "h.pwrite(b'c' * 4096, 8192); h.flush()");
    let second = if is_served { 'b' } else { 'a' };
    let holds = format!("assert h.pread(12288, 0) == b'a' * 4096 + b'{second}' * 4096 + b'c' * 4096, 'lost'");
    nbdsh(&uri, &holds);
    // Another one works, and what it leaves is whole.
    session.call("VM.snapshot", &[json!(vm), json!("kept")]);
    nbdsh(&uri, &holds);
    session.call("VM.hard_shutdown", &[json!(vm)]);
    let sr: Vec<_> = std::fs::read_dir(scratch.join("sr")).expect("the SR").flatten().collect();
    for entry in sr {
        let (path, name) = (entry.path(), entry.file_name());
        assert!(!name.to_string_lossy().starts_with("clone_"), "{name:?} is left");
        if path.extension().is_some_and(|kind| kind == "vhd") {
            let said = vhd_util(&["check", "-n", text(&path)]).ok();
            assert!(said.contains("is valid"), "{said}");
        }
    }
    stop(daemon);
}

#[test]
fn a_disk_that_went_on_keeps_what_its_guest_wrote() {
    needs!("nbdsh");
    died_in_a_snapshot("disk:leaf-swapped", true);
}

#[test]
fn a_disk_that_was_closed_goes_on() {
    needs!("nbdsh");
    died_in_a_snapshot("disk:held", false);
}
