//! The published clients of XenServer in other languages than Python, as their users have them: programs of
//! `tests/clients`, with the libraries that `scripts/lane-clients.sh` fetches.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::tools::{repository, skip};
use tapio_e2e::toolstack::{lane, python_xenapi};
use tapio_e2e::world::World;

/// What one program may take on a busy host.
const LIMIT: Duration = Duration::from_secs(240);

fn program(name: &str) -> PathBuf {
    repository().join("crates/test/e2e/tests/clients").join(name)
}

/// The server, with the account in it.
fn url(world: &World) -> String {
    world.daemon().https.as_deref().expect("HTTPS is served").replace("//", "//alice:correct%20horse@")
}

#[test]
fn javascript_by_npms_xen_api() {
    needs!("node");
    let Some(modules) = lane("javascript/package-lock.json") else {
        return skip("needs npm's xen-api");
    };
    let modules = modules.parent().expect("a directory");
    let world = World::new();
    for transport in ["auto", "xml-rpc"] {
        let mut command = Command::new("node");
        command.arg(program("javascript/client.mjs")).arg(modules).args([&url(&world), transport]);
        let said = run_within(&mut command, LIMIT).ok();
        assert_eq!(said, "done\n");
    }
    world.finish();
}

#[test]
fn ansible_by_its_modules_for_xenserver() {
    needs!("ansible-playbook");
    let (Some(version), Some(wheel)) = (lane("ansible/version"), python_xenapi()) else {
        return skip("needs Ansible's modules for XenServer");
    };
    let collections = version.parent().expect("a directory");
    let world = World::new();
    let https = world.daemon().https.clone().expect("HTTPS is served");
    let dir = world.scratch.join("ansible");
    std::fs::create_dir(&dir).expect("made");
    let mut command = Command::new("ansible-playbook");
    command.args(["-i", "localhost,", "-c", "local", text(&program("ansible/playbook.yml"))]);
    let variables = [
        format!("url={https}"),
        "user=alice".to_owned(),
        "password='correct horse'".to_owned(),
        format!("dir={}", dir.display()),
    ];
    for variable in &variables {
        command.args(["-e", variable]);
    }
    // Its own files, and none of the user that runs the test.
    command.env("HOME", &dir).env("ANSIBLE_LOCAL_TEMP", &dir).env("ANSIBLE_CONFIG", dir.join("none.cfg"));
    command.env("ANSIBLE_COLLECTIONS_PATH", collections).env("PYTHONPATH", wheel);
    command.env("LC_ALL", "C.UTF-8").env("PYTHONDONTWRITEBYTECODE", "1");
    let said = run_within(&mut command, LIMIT).ok();
    assert!(said.contains("failed=0") && said.contains("unreachable=0"), "{said}");
    world.finish();
}

#[test]
fn go_by_its_client_library() {
    let Some(client) = lane("go/client") else {
        return skip("needs Go's client library of XenAPI");
    };
    let world = World::new();
    let https = world.daemon().https.clone().expect("HTTPS is served");
    let mut command = Command::new(client);
    command.args([&https, "alice"]).env("TAPIO_PASSWORD", "correct horse");
    let said = run_within(&mut command, LIMIT).ok();
    assert_eq!(said, "done\n");
    world.finish();
}
