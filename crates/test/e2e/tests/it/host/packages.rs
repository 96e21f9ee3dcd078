//! Debian packages: built from the programs under test, installed in a root tree of their own, upgraded under a disk
//! that works, and purged.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::{run, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::{our, repository, skip};

/// Building takes seconds and so does each run of dpkg; the rest is for a busy host.
const LIMIT: Duration = Duration::from_secs(240);

/// Namespaces of mounts and processes, which end with the program that made them, then the arguments.
const NAMESPACES: [&str; 5] = ["--mount", "--pid", "--fork", "--kill-child", "--propagation=private"];

/// Builds the packages into a directory.
fn build(into: &Path, version: &str) {
    let programs = our("tapio-disk").parent().expect("a directory").to_path_buf();
    let mut command = Command::new(repository().join("scripts/deb"));
    command.args(["--compression", "none", "--version", version, "--out", text(into)]);
    let made = run_within(command.arg("--programs").arg(programs), LIMIT).ok();
    let count = made.lines().filter(|file| file.ends_with(".deb") && Path::new(file).is_file()).count();
    assert_eq!(count, 5, "{made}");
}

#[test]
fn they_are_installed_upgraded_under_a_working_disk_and_purged() {
    needs!("dpkg-deb", "unshare", "objdump");
    needs!("nbdsh", "curl");
    let scratch = Scratch::on_disk();
    let (old, new, work) = (scratch.join("old"), scratch.join("new"), scratch.join("work"));
    std::fs::create_dir(&work).expect("made");
    build(&old, "0.1.0-1");
    build(&new, "0.1.0-2");
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).args(["sh", "-c", "mount -t proc proc /proc && exec \"$@\"", "sh"]);
    let client = repository().join("crates/test/e2e/tests/it/host/thin_cli.py");
    command.arg(repository().join("tests/packages.sh")).args([&work, &old, &new, &client]);
    let finished = run_within(&mut command, LIMIT);
    if finished.status.code() == Some(77) || finished.stderr.contains("unshare failed") {
        return skip(&format!("needs root to mount: {}", finished.stderr.trim()));
    }
    let said = finished.ok();
    for shown in ["installed:", "upgraded:", "refused:", "purged:"] {
        assert!(said.lines().any(|line| line.starts_with(shown)), "no {shown} in {said}");
    }
}

#[test]
fn the_script_explains_itself_and_refuses_what_it_does_not_know() {
    let script = || Command::new(repository().join("scripts/deb"));
    assert!(run(script().arg("--help")).ok().contains("--programs DIR"));
    assert!(run(script().arg("--colour")).fails().contains("'--colour' is not an option"));
    assert!(run(script().arg("--out")).fails().contains("--out needs a value"));
    let scratch = Scratch::on_disk();
    let nowhere = scratch.join("none");
    let said = run(script().args(["--out", text(scratch.path()), "--programs", text(&nowhere)])).fails();
    assert!(said.contains("none/tapio is not there"), "{said}");
    assert!(std::fs::read_dir(scratch.path()).expect("readable").next().is_none(), "what was begun is left");
}
