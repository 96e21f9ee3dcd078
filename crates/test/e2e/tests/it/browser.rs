//! Consoles in a real browser: `tests/python/consoles.py`, with screenshots in `target/lanes/dashboard`.

use tapio_e2e::world::World;

/// Tells the story of consoles of that kind, `terminal` or `screen`; the VM is called `guest` and runs. What it was
/// given to know may not stand in the daemon's log.
pub fn story(world: &World, kind: &str) {
    world.daemon().add_user("carol", "read-only", "correct horse");
    let target = std::env::current_exe().expect("the test has a path");
    let target = target.ancestors().nth(3).expect("in the target directory").to_path_buf();
    let shots = target.join("lanes/dashboard");
    let said = world.story("consoles.py", &[&shots.display().to_string(), kind]);
    let secrets: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("secret ")).collect();
    assert!(secrets.len() >= 2 && secrets.iter().all(|secret| secret.len() > 30), "{said}");
    let log = world.daemon().process.log();
    assert!(log.contains("DEBUG") || log.contains("debug"), "the log is detailed: {log}");
    for secret in secrets {
        assert!(!log.contains(secret), "{secret} stands in the log: {log}");
    }
}
