//! VDIs that are read by NBD, with clients that work as backup products do and with common tools.

use tapio_e2e::disk::text;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;
use tapio_e2e::{needs, needs_python_xenapi};

fn part(world: &World, client: &str, part: &str) {
    let said = world.story("exports.py", &[client, text(world.scratch.path()), part]);
    if said.contains("lacks a network") {
        skip("needs a network interface with an address");
    }
}

#[test]
fn a_vdi_is_read_by_who_has_its_name_and_gives_way_to_who_needs_it() {
    needs!("curl");
    needs_python_xenapi!(_wheel);
    let world = World::new();
    part(&world, "xml", "info");
    part(&world, "json", "info");
    world.finish();
}

#[test]
fn a_name_is_valid_as_long_as_its_session() {
    needs!("curl");
    let world = World::new();
    part(&world, "json", "sessions");
    world.finish();
}

#[test]
fn nbdcopy_and_qemu_read_an_export_over_tls() {
    needs!("curl", "nbdcopy", "nbdinfo", "qemu-img");
    let world = World::new();
    part(&world, "json", "tools");
    world.finish();
}

#[test]
fn a_client_that_reads_nothing_is_disconnected_and_the_vdi_is_free() {
    needs!("curl");
    let world = World::with(|options| options.arg("--set").arg("nbd-client-time=1"));
    part(&world, "json", "silent");
    world.finish();
}
