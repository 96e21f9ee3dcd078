//! `tapio doctor` against a daemon with storage workers of its own.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use tapio_e2e::process::{Finished, run};
use tapio_e2e::tools::our;
use tapio_e2e::world::World;

fn doctor(world: &World) -> Finished {
    let mut doctor = Command::new(our("tapio"));
    doctor.args(["doctor", "--", "--socket"]).arg(&world.daemon().socket);
    run(doctor.env("HOME", world.scratch.path()))
}

/// Ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_lock_that_was_inherited_from_a_process_that_is_gone_is_named_and_keeps_nothing_from_being_told() {
    let world = World::new();
    let xe = |words: &[&str]| run(world.xe().args(words)).ok();
    let sr = xe(&["sr-list", "type=file", "--minimal"]);
    xe(&["vdi-create", &format!("sr-uuid={}", sr.trim()), "name-label=a", "virtual-size=8MiB"]);
    let healthy = doctor(&world);
    assert!(!healthy.stdout.contains("lock-kept"), "{healthy}");

    // The shell that takes the lock ends at once, and what it has started keeps the descriptor.
    let directory = File::open(world.scratch.join("sr")).expect("the SR's directory");
    directory.try_lock().expect("no operation holds it");
    let keeper = Ends(Command::new("sleep").arg("600").stdin(Stdio::from(directory)).spawn().expect("sleep"));
    let found = doctor(&world);
    assert_eq!(found.status.code(), Some(1), "{found}");
    let line = found.stdout.lines().find(|line| line.contains("lock-kept"));
    assert!(line.is_some_and(|line| line.starts_with("error") && line.contains(sr.trim())), "{found}");
    assert!(found.stdout.contains(&format!("kept open by {} (sleep)", keeper.0.id())), "{found}");
    assert!(!found.stdout.contains("sr-not-attached"), "{found}");

    drop(keeper);
    let again = doctor(&world);
    assert!(!again.stdout.contains("lock-kept"), "{again}");
    world.finish();
}
