//! Requests that are huge, malformed, slow or many (`tests/python/storms.py`): the daemon stays within its bound, says
//! so in its log, and answers others.

use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::toolstack::Daemon;
use tapio_e2e::world::World;

/// What one account of one address may add to the daemon (docs/design/api-limits.md), and 1,000 connections beyond the
/// 512 that are counted there.
const BOUND_KIB: u64 = (96 + 40) << 10;

fn peak_kib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.process.pid())).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

#[test]
fn the_daemon_stays_within_its_bound_and_others_are_answered() {
    needs!("python3");
    let world = World::with(|options| {
        let options = options.arg("--set=head-time=5").arg("--set=body-time=5");
        options.arg("--set=connections-per-peer=1500")
    });
    let daemon = world.daemon();
    let before = peak_kib(daemon);
    world.story("storms.py", &["json", text(world.scratch.path()), "idle", "malformed", "deaf", "sessions"]);
    let grown = peak_kib(daemon) - before;
    println!("the daemon grew by {grown} KiB");
    assert!(grown < BOUND_KIB, "by {grown} KiB");
    // The log says what happened, and is no further thing to fill.
    let log = daemon.process.log();
    let refusals = log.lines().filter(|line| line.contains("WARN tapio_api::server::notices")).count();
    assert!((1..10).contains(&refusals), "{refusals} lines in {log}");
    assert!(!log.contains("panicked"), "{log}");
    world.finish();
}
