//! The terminal of a guest in a browser.

use std::time::Duration;

use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::world::World;

use crate::browser;

#[test]
fn a_person_types_into_a_terminal() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], "chromium", "chromedriver");
    let world = World::with(|options| options.arg("--set").arg("log-level=debug"));
    let xe = |words: &[&str]| run_within(world.xe().args(words), Duration::from_secs(120)).ok();
    xe(&["vm-install", "template=Tapio UML guest", "new-name-label=guest"]);
    xe(&["vm-start", "vm=guest"]);
    browser::story(&world, "terminal");
    xe(&["vm-shutdown", "vm=guest", "--force"]);
    world.finish();
}
