//! What repositories, disks and events must do whatever lies below, seen as a client.

use tapio_e2e::disk::{Host, text};
use tapio_e2e::local::lacks_fuse;
use tapio_e2e::needs_python_xenapi;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;

fn parts(client: &str, parts: &[&str]) {
    of_program("acceptance.py", client, parts);
}

fn of_program(program: &str, client: &str, parts: &[&str]) {
    let world = World::new();
    let args = [&[client, text(world.scratch.path())], parts].concat();
    println!("{}", world.story(program, &args));
    world.finish();
}

/// Whether disks can be plugged into this host; says so where not.
fn has_devices() -> bool {
    let scratch = Scratch::on_disk();
    let lacks = lacks_fuse(&Host::new(&scratch));
    lacks.as_deref().map(skip).is_none()
}

#[test]
fn repositories_and_disks() {
    needs_python_xenapi!(_wheel);
    parts("xml", &["sr", "vdi"]);
}

#[test]
fn events_by_both_clients() {
    needs_python_xenapi!(_wheel);
    parts("xml", &["events"]);
    parts("json", &["events"]);
}

#[test]
fn disks_of_this_host_have_their_sizes_and_many_readers() {
    needs_python_xenapi!(_wheel);
    if has_devices() {
        parts("xml", &["device_sizes", "device_readers"]);
    }
}

#[test]
fn the_end_of_the_largest_disk_and_copies_of_changes() {
    needs_python_xenapi!(_wheel);
    if has_devices() {
        parts("xml", &["device_deltas", "device_end_of_the_largest"]);
    }
}

#[test]
fn contents_come_back_by_every_way_and_changes_are_tracked() {
    needs_python_xenapi!(_wheel);
    of_program("integrity.py", "xml", &["cbt", "deltas"]);
    of_program("integrity.py", "json", &["contents", "around_two_gib", "largest"]);
}
