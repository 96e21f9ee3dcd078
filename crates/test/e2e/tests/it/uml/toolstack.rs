//! User-mode Linux under the daemon.

use std::process::Command;
use std::time::Duration;

use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::process::{run, run_within};
use tapio_e2e::tools::{our, repository};
use tapio_e2e::world::World;

use crate::machines::{Guest, verified_disks_and_a_moment};

#[test]
fn a_guest_verifies_its_disks() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], "nbdcopy");
    let guest = Guest::install("Tapio UML guest", Duration::from_secs(120), &[]);
    verified_disks_and_a_moment(&guest);
    guest.world.finish();
}

#[test]
fn the_first_ten_commands_work_as_the_readme_shows_them() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], "bash");
    let readme = std::fs::read_to_string(repository().join("README.md")).expect("the README");
    let (_, part) = readme.split_once("\n## The first ten commands\n").expect("its part");
    let block = part.split("```").nth(1).expect("a block of commands");
    let commands: Vec<&str> = block.lines().filter(|line| !line.is_empty()).skip(1).collect();
    assert_eq!(commands.len(), 10, "{commands:?}");
    let world = World::new();
    // A shell takes each line as it stands there, comments and all.
    let shell = |line: &str| {
        let tapio = our("tapio");
        let script =
            format!("tapio() {{ '{0}' \"$@\"; }}\nxe() {{ tapio xe \"$@\"; }}\n{line}", tapio.display());
        let mut command = Command::new("bash");
        command.args(["--norc", "-c", &script]).env("TAPIO_SOCKET", &world.daemon().socket);
        run_within(command.env("HOME", world.scratch.path()), Duration::from_secs(60)).ok()
    };
    let said: Vec<(&str, String)> = commands.iter().map(|line| (*line, shell(line))).collect();
    let of = |name: &str| {
        let found = said.iter().find(|(line, _)| line.split_whitespace().nth(1) == Some(name));
        found.unwrap_or_else(|| panic!("the README shows no '{name}'")).1.as_str()
    };
    assert!(of("sr-list").starts_with("uuid ( RO)                : "), "{}", of("sr-list"));
    assert!(of("template-list").contains("Tapio UML guest"));
    assert_eq!(of("vm-install").trim().len(), 36);
    assert_eq!(of("vm-start"), "");
    assert!(of("vm-disk-list").contains("Disk 1 VDI:\n"), "{}", of("vm-disk-list"));
    assert!(of("timeline").contains(" steps, "), "{}", of("timeline"));
    let states =
        run(world.xe().args(["vm-list", "name-label=first", "params=power-state", "--minimal"])).ok();
    assert_eq!(states, "halted\n");
    run(world.xe().args(["vm-uninstall", "vm=first", "--force"])).ok();
    world.finish();
}
