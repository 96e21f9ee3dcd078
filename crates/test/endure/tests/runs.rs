//! Short runs with fixed seeds, and the proof that a run finds what is wrong.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tapio_e2e::needs;
use tapio_e2e::process::{Finished, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Seeds of the runs that every test run makes.
const SEEDS: [u64; 2] = [1, 2];

/// Each of them lasts so long, and what comes after it as long as a busy host needs.
const MINUTES: f64 = 2.0 / 3.0;

const LIMIT: Duration = Duration::from_secs(400);

fn endure(scratch: &Scratch, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tapio-endure"));
    command.arg("--dir").arg(scratch.path()).args(args);
    command
}

fn json(finished: &Finished) -> serde_json::Value {
    serde_json::from_str(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {finished}"))
}

fn short_run(seed: u64) {
    let scratch = Scratch::on_disk();
    let args = ["--seed", &seed.to_string(), "--minutes", &MINUTES.to_string(), "--json"];
    let finished = run_within(&mut endure(&scratch, &args), LIMIT);
    let report = json(&finished);
    // Lines that the log of a test run shows, whatever else it leaves out.
    for finding in report["findings"].as_array().expect("a list") {
        let what = finding["what"].as_str().unwrap_or_default();
        println!("error: seed {seed} found in {} at step {}:", finding["leg"], finding["step"]);
        what.lines().take(20).for_each(|line| println!("error: {line}"));
    }
    if report["findings"] != serde_json::json!([]) {
        let last = report["last_actions"].as_array().expect("a list");
        last.iter().rev().take(8).rev().for_each(|action| println!("error: before it: {action}"));
    }
    assert!(finished.status.success(), "{finished}");
    assert_eq!(report["seed"], seed);
    // A container may lack FUSE or loop devices. Programs that scripts/setup installs are there.
    for (leg, why) in report["left_out"].as_object().expect("a map") {
        let why = why.as_str().unwrap_or_default();
        let is_known = ["needs FUSE", "needs root to mount", "needs a loop device"];
        assert!(is_known.iter().any(|known| why.starts_with(known)), "{leg} {why}");
    }
    let done = |action: &str| report["actions"][action]["done"].as_u64().unwrap_or_default();
    let all = [
        "kill",
        "live snapshot",
        "final verification",
        "kill of xenstored",
        "kill of the daemon",
        "VM.snapshot",
        "one image at the end",
    ];
    for action in all {
        assert!(done(action) > 0, "no {action}: {report:#}");
    }
    assert!(report["load"]["verified_bytes"].as_u64() > Some(1 << 20), "{report:#}");
    println!("{report:#}");
}

#[test]
fn every_leg_is_clean_with_the_first_seed() {
    short_run(SEEDS[0]);
}

#[test]
fn every_leg_is_clean_with_the_second_seed() {
    short_run(SEEDS[1]);
}

/// A directory of programs in which the disk program runs `before` on its image, and then as it is.
fn programs(scratch: &Scratch, before: &str) -> PathBuf {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = scratch.join("bin");
    std::fs::create_dir(&dir).expect("a directory");
    symlink(our("tapio"), dir.join("tapio")).expect("a link");
    let disk = dir.join("tapio-disk");
    let script = format!(
        "#!/bin/sh\nfor word; do case $word in aio:*) image=${{word#aio:}} ;; esac; done\n{before}\nexec {} \"$@\"\n",
        our("tapio-disk").display()
    );
    std::fs::write(&disk, script).expect("a script");
    std::fs::set_permissions(&disk, PermissionsExt::from_mode(0o755)).expect("a mode");
    dir
}

fn found(programs: &Path, scratch: &Scratch) -> String {
    let args = ["--seed", "5", "--minutes", "1", "--only", "raw"];
    let mut command = endure(scratch, &args);
    let finished = run_within(command.env("TAPIO_BIN_DIR", programs), LIMIT);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    for part in ["FINDING in raw at step", "last actions:", "replay: tapio-endure --seed 5"] {
        assert!(finished.stdout.contains(part), "no {part:?}: {finished}");
    }
    assert!(finished.stderr.contains("images and logs stay in"), "{finished}");
    finished.stdout
}

#[test]
fn a_byte_that_changed_between_two_processes_is_found() {
    needs!("dd", "sh");
    let scratch = Scratch::on_disk();
    // A sector that is written often.
    let dir = programs(&scratch, "printf X | dd of=\"$image\" bs=512 seek=100 conv=notrunc status=none");
    let said = found(&dir, &scratch);
    assert!(said.contains("sector 100 of disk 2 (byte 51200) holds"), "{said}");
}

#[test]
fn an_image_that_is_older_than_what_was_answered_is_found() {
    needs!("cp", "sh");
    let scratch = Scratch::on_disk();
    let old = "[ -e \"$image.old\" ] && cp \"$image.old\" \"$image\"; cp \"$image\" \"$image.old\"";
    let said = found(&programs(&scratch, old), &scratch);
    assert!(said.contains("of disk 2 (byte ") && said.contains("it should hold "), "{said}");
}

#[test]
fn what_does_not_exist_is_named() {
    let scratch = Scratch::on_disk();
    let finished = run_within(&mut endure(&scratch, &["--only", "chain,nonsense"]), LIMIT);
    assert_eq!(finished.status.code(), Some(2), "{finished}");
    assert!(finished.stderr.contains("'nonsense'") && finished.stderr.contains("--list"), "{finished}");
    let listed = run_within(&mut endure(&scratch, &["--list"]), LIMIT).ok();
    for leg in ["chain", "faulty-vhd", "odd", "xenstored", "toolstack"] {
        assert!(listed.lines().any(|line| line.split(' ').next() == Some(leg)), "no {leg}: {listed}");
    }
}
