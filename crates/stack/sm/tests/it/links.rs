//! Links and locators in an SR's directory that lead to a file of the host.

use std::os::unix::fs::symlink;

use tapio_format::vhd::offline::{self, SnapshotOptions};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Place, Watch, make};

const MIB: u64 = 1 << 20;

/// A file that no client may read.
fn secret(place: &Place) -> std::path::PathBuf {
    let path = place.dir.path().join("secret");
    std::fs::write(&path, vec![0x5e; 4 << 20]).unwrap();
    path
}

#[test]
fn a_link_to_a_secret_file_is_no_iso() {
    let place = Place::new();
    let ctx = Watch::default();
    let secret = secret(&place);
    std::fs::create_dir(place.images()).unwrap();
    let image = |name: &str| place.images().join(name);
    std::fs::write(image("a.iso"), vec![1; 5000]).unwrap();
    symlink("a.iso", image("b.iso")).unwrap();
    symlink(&secret, image("c.iso")).unwrap();
    symlink("../secret", image("d.img")).unwrap();
    let mut config = place.config.clone();
    config.insert("legacy_mode".into(), "true".into());
    let sr = place.driver("iso").attach(&ctx, place.sr, &config).unwrap();
    let found = sr.scan(&ctx).unwrap();
    let names: Vec<_> = found.iter().map(|info| info.location.as_str()).collect();
    assert_eq!(names, ["a.iso", "b.iso"]);
    for (name, bytes) in [("c.iso", "secret"), ("d.img", "secret")] {
        assert!(sr.introduce(&ctx, Uuid::new_v4(), name).is_err(), "{name} is introduced: {bytes}");
    }
    // One that becomes a link after it was scanned, as it is inserted into a guest.
    let near = sr.activate(&ctx, found[1].uuid, Access::ReadOnly).unwrap().chain;
    assert!(near.layers[0].path.ends_with("a.iso"), "{near:?}");
    std::fs::remove_file(image("a.iso")).unwrap();
    symlink(&secret, image("a.iso")).unwrap();
    for vdi in &found {
        assert!(sr.activate(&ctx, vdi.uuid, Access::ReadOnly).is_err(), "{} leads out", vdi.location);
        assert!(sr.vdi(&ctx, vdi.uuid).is_err());
    }
}

#[test]
fn a_link_to_a_secret_file_is_no_image() {
    let place = Place::new();
    let ctx = Watch::default();
    let secret = secret(&place);
    let sr = place.create();
    let (raw, vhd, planted) =
        (make(sr.as_ref(), 4 * MIB, "raw"), make(sr.as_ref(), 4 * MIB, "vhd"), Uuid::new_v4());
    for (vdi, kind) in [(raw, "raw"), (planted, "raw"), (vhd, "vhd")] {
        let path = place.images().join(format!("{vdi}.{kind}"));
        let _ = std::fs::remove_file(&path);
        symlink(&secret, path).unwrap();
    }
    let found = sr.scan(&ctx).unwrap();
    assert!(found.iter().all(|info| info.sm_config.contains_key("damaged")), "{found:?}");
    for vdi in [raw, vhd, planted] {
        let error = sr.activate(&ctx, vdi, Access::ReadOnly).unwrap_err();
        assert!(error.params[1].contains("not followed"), "{error}");
        let _ = sr.destroy(&ctx, vdi);
    }
    assert_eq!(std::fs::read(&secret).unwrap(), vec![0x5e; 4 << 20], "the file itself was changed");
}

#[test]
fn a_parent_outside_of_the_sr_is_not_read() {
    let place = Place::new();
    let ctx = Watch::default();
    let secret = secret(&place);
    let sr = place.create();
    let vdi = Uuid::new_v4();
    let child = place.images().join(format!("{vdi}.vhd"));
    let options = SnapshotOptions { raw_parent: true, ..SnapshotOptions::default() };
    offline::snapshot(&child, &secret, &options).unwrap();
    assert_eq!(
        offline::resolve_chain(&child, Access::ReadOnly).unwrap().layers.len(),
        2,
        "it would be found"
    );
    let error = sr.activate(&ctx, vdi, Access::ReadOnly).unwrap_err();
    assert!(error.params[1].contains("outside of the SR's directory"), "{error}");
}
