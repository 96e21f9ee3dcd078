//! Thin disks on logical volumes: `tapiod` in a guest that has device-mapper, on two disks of ours. The stories are in
//! `tests/guest/uml-thin.sh`. `TAPIO_THIN_DISKS=32` makes so many disks grow at once.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::{Report, Uml};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Half of a minute to a minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(600);
/// Bytes that the disks of a story hold in the end, each.
const HELD: u64 = 128 << 20;

macro_rules! needs_lvm {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm");
    };
}

fn run(case: &str, disks: u64, more: &[(&str, &str)], limit: Duration) -> Report {
    let scratch = Scratch::on_disk();
    // The first has no room for all that is written, both have.
    let sizes = [("a.raw", disks * HELD / 4 * 3), ("b.raw", disks * HELD / 2 + (64 << 20))];
    let [first, second] = sizes.map(|(name, len)| {
        DiskOptions::raw(&scratch.raw_image(name, len)).vhost_user().start(scratch.path())
    });
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    // Each disk process takes some, most of it for its program.
    let memory = 384 + disks.saturating_sub(8) * 16;
    let mut guest = Uml::new(case, &first.vhost).disk(&second.vhost).with("bin", &programs).within(limit);
    guest = guest.memory_mib(memory);
    for (name, value) in more {
        guest = guest.with(name, value);
    }
    let report = guest.run(&scratch);
    first.stop();
    second.stop();
    report
}

#[test]
#[ignore = "minutes of LVM's programs on a busy host: for changes of how volumes grow"]
fn a_thin_disk_grows_and_shrinks_while_it_is_used_and_workers_die() {
    needs_lvm!();
    let report = run("thin_short", 1, &[], LIMIT);
    for part in ["grown", "shorter", "shrunk"] {
        report.text(part);
    }
}

#[test]
#[ignore = "a minute of LVM's programs, three on a busy host: for changes of how volumes grow"]
fn thin_disks_grow_at_once_and_wait_while_their_sr_is_full() {
    needs_lvm!();
    let disks = std::env::var("TAPIO_THIN_DISKS").ok().and_then(|text| text.parse().ok());
    let (disks, limit) = disks.map_or((3, LIMIT), |disks: u64| (disks, LIMIT * 2));
    let report = run("thin", disks, &[("disks", &disks.to_string())], limit);
    for part in ["slow", "full", "restarted", "extended", "shrunk", "holds"] {
        report.text(part);
    }
}

#[test]
#[ignore = "a minute of LVM's programs, three on a busy host: for changes of how volumes grow"]
fn what_a_kill_leaves_of_a_growth_is_put_in_order_below_a_disk_in_use() {
    needs_lvm!();
    run("thin_kills", 4, &[], LIMIT).text("room-longer");
}

#[test]
#[ignore = "minutes of LVM's programs: for a developer who changes the steps of a growth"]
fn what_a_kill_leaves_of_every_step_of_a_growth_is_put_in_order() {
    needs_lvm!();
    let steps = ["room-begins", "room-longer", "room-footer", "room-done"];
    let report = run("thin_kills", 8, &[("steps", &steps.join(","))], LIMIT * 2);
    for step in steps {
        report.text(step);
    }
}

#[test]
#[ignore = "minutes, and figures that a busy host changes: for docs/performance.md"]
fn a_benchmark_of_thin_disks_runs_in_a_guest() {
    needs_lvm!();
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (disks, mib) = (number("TAPIO_THIN_DISKS", 4), number("TAPIO_THIN_MIB", 1024));
    // MiB of the SR for each disk, most of which have no space on this host.
    let free = number("TAPIO_THIN_FREE", 8192);
    let scratch = Scratch::on_disk();
    let device = scratch.raw_image("a.raw", (disks * free.max(mib * 4) + 256) << 20);
    let [first, second] = [device, scratch.raw_image("b.raw", 8 << 20)]
        .map(|image| DiskOptions::raw(&image).vhost_user().start(scratch.path()));
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new("thin_bench", &first.vhost).disk(&second.vhost).with("bin", &programs);
    let guest = guest.with("disks", &disks.to_string()).with("mib", &mib.to_string()).within(LIMIT * 2);
    let report = guest.run(&scratch);
    first.stop();
    second.stop();
    let lines: Vec<&str> =
        (1..=report.number("lines")).map(|line| report.text(&format!("line{line}"))).collect();
    println!("{}", lines.join("\n"));
    assert!(lines.iter().any(|line| line.starts_with("thin over thick")), "{lines:?}");
}
