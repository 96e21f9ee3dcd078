//! A medium with settings, read by cloud-init's own reader in a guest: `tests/guest/uml-cloud-init.sh`.

use std::time::Duration;

use tapio_e2e::disk::{DiskOptions, text};
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::process::run_within;
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::lane;
use tapio_e2e::world::World;

const NETWORK: &str =
    "version: 2\nethernets:\n  eth0:\n    addresses: [192.0.2.7/24]\n    gateway4: 192.0.2.1\n";

#[test]
fn cloud_init_reads_the_settings_as_they_were_given() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], "blkid");
    let (Some(package), true) = (lane("cloud-init/cloudinit"), has_libraries()) else {
        skip("needs cloud-init (scripts/setup clients unpacks it)");
        return;
    };
    let world = World::new();
    let xe = |words: &[&str]| {
        run_within(world.xe().args(words), Duration::from_secs(60)).ok().trim_end().to_owned()
    };
    let vm = xe(&["vm-install", "template=Other install media", "new-name-label=Büro 7"]);
    let file = |name: &str, content: &str| {
        let path = world.scratch.join(name);
        std::fs::write(&path, content).expect("written");
        format!("{name}={}", text(&path))
    };
    // Longer than a sector, with letters of several bytes, and not ended by a new line.
    let packages: String = (0..200).map(|number| format!("  - package-{number}\n")).collect();
    let user = format!("#cloud-config\npackages:\n{packages}hostname: Brücke");
    let (user, network) = (file("user-data", &user), file("network-config", NETWORK));
    xe(&["vm-cloud-init-add", &format!("uuid={vm}"), &user, &network]);
    let vdi = xe(&["vbd-list", &format!("vm-uuid={vm}"), "type=CD", "params=vdi-uuid", "--minimal"]);
    let image = world.scratch.join("sr").join(format!("{vdi}.vhd"));
    let disk = DiskOptions::vhd(&image).vhost_user().arg("--read-only").start(world.scratch.path());
    let guest =
        Uml::new("cloud_init", &disk.vhost).with("cloud", text(package.parent().expect("a directory")));
    let report = guest.run(&world.scratch);
    disk.stop();
    assert_eq!(report.text("subplatform"), "config-disk (/dev/vda)");
    assert_eq!(report.text("instance"), vm);
    assert_eq!(report.text("hostname"), "b-ro-7");
    assert_eq!((report.number("lines"), report.text("last")), (203, "hostname: Brücke"));
    assert!(report.text("parts").contains("text/cloud-config"), "{report:?}");
    assert_eq!(report.text("eth0"), "192.0.2.7/24 by 192.0.2.1");
    xe(&["vm-uninstall", &format!("uuid={vm}"), "--force"]);
    world.finish();
}

/// The libraries that the reader imports.
fn has_libraries() -> bool {
    let mut python = std::process::Command::new("/usr/bin/python3");
    python.args(["-c", "import configobj, requests, yaml"]);
    run_within(&mut python, Duration::from_secs(60)).status.success()
}
