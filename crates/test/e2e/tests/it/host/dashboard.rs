//! The dashboard in a real browser: what a person does, at two sizes of the window, in light and dark.

use serde_json::json;
use tapio_e2e::needs;
use tapio_e2e::world::World;

#[test]
fn a_person_works_with_disks_in_a_browser() {
    needs!("chromium", "chromedriver");
    let world = World::new();
    let daemon = world.daemon();
    daemon.add_user("carol", "read-only", "correct horse");
    let session = daemon.login();
    let templates = session.call("VM.get_by_name_label", &[json!("Tapio UML guest")]);
    let template = templates.get(0).cloned().expect("the template of User-mode Linux");
    let guest = session.call("VM.clone", &[template, json!("guest")]);
    session.call("VM.set_is_a_template", &[guest, json!(false)]);
    session.call("task.create", &[json!("a task to cancel"), json!("")]);
    let target = std::env::current_exe().expect("the test has a path");
    let target = target.ancestors().nth(3).expect("in the target directory").to_path_buf();
    let shots = target.join("lanes/dashboard");
    let said = world.story("dashboard.py", &[&shots.display().to_string()]);
    assert!(said.contains("reader\n"), "{said}");
    world.finish();
}
