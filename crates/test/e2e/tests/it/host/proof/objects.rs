//! Rules of objects that products rely on, by both clients.

use tapio_e2e::disk::text;
use tapio_e2e::needs_python_xenapi;
use tapio_e2e::world::World;

fn parts(parts: &[&str]) {
    for client in ["xml", "json"] {
        let world = World::new();
        let args = [&[client, text(world.scratch.path())], parts].concat();
        println!("{}", world.story("objects.py", &args));
        world.finish();
    }
}

#[test]
fn vms_made_from_others() {
    needs_python_xenapi!(_wheel);
    parts(&["vms_of_templates", "disks_of_copies"]);
}

#[test]
fn interfaces_of_vms() {
    needs_python_xenapi!(_wheel);
    parts(&["interfaces"]);
}

#[test]
fn listings_of_what_there_is_not() {
    needs_python_xenapi!(_wheel);
    parts(&["listings"]);
}
