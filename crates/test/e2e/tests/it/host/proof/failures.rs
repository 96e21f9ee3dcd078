//! What goes wrong below the toolstack, or in what it is asked, seen as a client: each failure is the documented one.

use std::process::Command;

use tapio_e2e::disk::text;
use tapio_e2e::needs_python_xenapi;
use tapio_e2e::process::run;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;

fn parts(client: &str, parts: &[&str]) {
    let world = World::new();
    let args = [&[client, text(world.scratch.path())], parts].concat();
    println!("{}", world.story("failures.py", &args));
    world.finish();
}

#[test]
fn what_makes_no_sense_is_refused_by_both_doors() {
    needs_python_xenapi!(_wheel);
    parts("xml", &["asked_wrongly"]);
    parts("json", &["asked_wrongly"]);
}

#[test]
fn a_full_file_system() {
    needs_python_xenapi!(_wheel);
    let world = World::new();
    // Unmounted with all that is mounted below the world.
    let small = world.scratch.join("small");
    std::fs::create_dir(&small).expect("made");
    let mounted =
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "tapio-small"]).arg(&small));
    if !mounted.status.success() {
        return skip(&format!("needs root to mount: {}", mounted.stderr.trim()));
    }
    world.story("failures.py", &["xml", text(world.scratch.path()), "full"]);
    world.finish();
}

#[test]
fn storage_that_goes_and_images_that_are_none() {
    needs_python_xenapi!(_wheel);
    parts("xml", &["vanished", "damaged"]);
}

#[test]
fn a_session_that_ends_during_a_call() {
    needs_python_xenapi!(_wheel);
    parts("xml", &["session_ends_during_a_call"]);
}
