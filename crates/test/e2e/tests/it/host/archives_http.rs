//! VMs as XVA archives over HTTP: `tests/python/archive.py`.

use tapio_e2e::disk::text;
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::world::World;

fn parts(client: &str, parts: &[&str]) {
    let world = World::new();
    world.daemon().add_user("reader", "read-only", "correct horse");
    let args = [&[client, text(world.scratch.path())], parts].concat();
    println!("{}", world.story("archive.py", &args));
    world.finish();
}

#[test]
fn a_vm_comes_back_field_by_field_and_byte_by_byte() {
    needs!("zstd");
    let client = if tapio_e2e::toolstack::python_xenapi().is_some() { "xml" } else { "json" };
    parts(client, &["round_trip"]);
}

#[test]
fn archives_of_other_writers() {
    parts("json", &["foreign_archives", "templates"]);
}

#[test]
fn damaged_and_hostile_archives_leave_nothing() {
    needs!("zstd");
    parts("json", &["damaged", "errors"]);
}

#[test]
fn xe_writes_vms_to_files_and_makes_them_again() {
    let world = World::new();
    let xe = |args: &[&str]| run(world.xe().args(args));
    let made = |args: &[&str]| xe(args).ok().trim().to_owned();
    let sr = made(&["sr-list", "type=file", "--minimal"]);
    let template = made(&["template-list", "--minimal"]);
    let template = template.split(',').next().expect("a template");
    let vm = made(&["vm-install", &format!("template={template}"), "new-name-label=first"]);
    let path = |name: &str| world.scratch.join(name);
    let named = |name: &str| format!("filename={}", text(&path(name)));

    for (name, compress) in [("plain.xva", "false"), ("gzip.xva", "true"), ("zstd.xva", "zstd")] {
        let export = xe(&[
            "vm-export",
            &format!("uuid={vm}"),
            &named(name),
            &format!("compress={compress}"),
            "--progress",
        ]);
        assert!(export.ok().is_empty() && path(name).exists());
        let uuid = made(&["vm-import", &named(name), &format!("sr-uuid={sr}")]);
        assert_eq!(made(&["vm-list", &format!("uuid={uuid}"), "params=name-label", "--minimal"]), "first");
        let disks =
            |vm: &str| made(&["vbd-list", &format!("vm-uuid={vm}"), "params=userdevice", "--minimal"]);
        assert_eq!(disks(&uuid), disks(&vm));
    }
    let gone = made(&["vm-uninstall", &format!("uuid={vm}"), "force=true"]);
    drop(gone);
    assert_eq!(made(&["vm-import", &named("gzip.xva"), "preserve=true"]), vm, "it keeps its UUID");
    let again = xe(&["vm-import", &named("gzip.xva"), "preserve=true", "--progress"]).fails();
    assert!(again.contains("not newer"), "{again}");

    let snapshot = made(&["vm-snapshot", "vm=first", &format!("uuid={vm}"), "new-name-label=kept"]);
    xe(&["snapshot-export-to-template", &format!("snapshot-uuid={snapshot}"), &named("snapshot.xva")]).ok();
    let template = made(&["vm-import", &named("snapshot.xva")]);
    assert_eq!(made(&["template-list", &format!("uuid={template}"), "--minimal"]), template);
    xe(&["template-export", &format!("template-uuid={template}"), &named("template.xva")]).ok();

    // Nothing is overwritten, and nothing is left of what fails.
    let there = xe(&["vm-export", &format!("uuid={vm}"), &named("plain.xva")]).fails();
    assert!(there.contains("is there already"), "{there}");
    let unknown = xe(&["vm-export", &format!("uuid={vm}"), &named("lz4.xva"), "compress=lz4"]).fails();
    assert!(unknown.contains("gzip and zstd are known"), "{unknown}");
    std::fs::write(path("broken.xva"), [b'x'; 4096]).expect("room");
    let broken = xe(&["vm-import", &named("broken.xva")]).fails();
    assert!(broken.contains("no XVA archive"), "{broken}");
    let parts = std::fs::read_dir(world.scratch.path()).expect("it is there").flatten();
    assert!(parts.map(|entry| entry.path()).all(|path| path.extension().is_none_or(|kind| kind != "part")));
    world.finish();
}
