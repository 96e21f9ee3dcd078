//! Making, finding, opening and removing VDIs.

use std::sync::Arc;
use std::time::Instant;

use tapio_sm::{ForkKind, STEPS, Sr};
use tapio_types::{Access, ImageKind};
use uuid::Uuid;

use crate::support::{Disk, Place, Watch, fork, make, new_vdi, read, whole, write};

const MIB: u64 = 1 << 20;

#[test]
fn sizes_are_rounded_up_and_told_truthfully() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    for size in 4..=8 {
        let asked = size * MIB + 1;
        let info = sr.create(&ctx, &new_vdi(asked, "vhd")).unwrap();
        assert!(info.virtual_size >= asked && info.virtual_size % (2 * MIB) == 0);
        assert!(info.managed && !info.read_only && info.parent.is_none());
        assert_eq!(
            (info.sm_config["vdi_type"].as_str(), info.sm_config["image-format"].as_str()),
            ("vhd", "vhd")
        );
        assert_eq!(info, {
            let mut found = sr.vdi(&ctx, info.uuid).unwrap();
            found.sm_config.extend(info.sm_config.clone());
            found
        });
    }
    let raw = sr.create(&ctx, &new_vdi(5 * MIB + 1, "raw")).unwrap();
    assert_eq!(raw.virtual_size, 5 * MIB + 512);
    assert_eq!((raw.sm_config["type"].as_str(), raw.sm_config["vdi_type"].as_str()), ("raw", "aio"));
    assert!(raw.physical_utilisation < 64 << 10, "{}", raw.physical_utilisation);
    write(sr.as_ref(), raw.uuid, MIB, 7);
    let grown = sr.vdi(&ctx, raw.uuid).unwrap().physical_utilisation;
    assert!(grown > 0 && grown < MIB, "{grown}");
    assert_eq!(sr.scan(&ctx).unwrap().len(), 6);
    assert_eq!(sr.stat(&ctx).unwrap().virtual_allocation, (6 + 6 + 8 + 8 + 10) * MIB + raw.virtual_size);
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let code = |size, format| sr.create(&ctx, &new_vdi(size, format)).unwrap_err().code;
    assert_eq!(code((2040 << 30) + 1, "vhd"), "SR_BACKEND_FAILURE_79");
    assert_eq!(code(0, "vhd"), "SR_BACKEND_FAILURE_79");
    assert_eq!(code(u64::MAX, "raw"), "SR_BACKEND_FAILURE_79");
    assert_eq!(code(1 << 62, "raw"), "SR_BACKEND_FAILURE_79");
    assert_eq!(code(MIB, "qcow2"), "SR_BACKEND_FAILURE_66");
    assert_eq!(place.files(), [""; 0]);
    let twice = new_vdi(MIB, "vhd");
    sr.create(&ctx, &twice).unwrap();
    assert_eq!(sr.create(&ctx, &twice).unwrap_err().code, "SR_BACKEND_FAILURE_43");
    let largest = sr.create(&ctx, &new_vdi(2040 << 30, "vhd")).unwrap();
    assert_eq!(largest.virtual_size, 2040 << 30);
    assert!(largest.physical_utilisation < 8 * MIB);
}

#[test]
fn a_chain_is_opened_leaf_first_and_kept_from_being_removed() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), 8 * MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let made = fork(sr.as_ref(), vdi, ForkKind::Snapshot);
    let chain = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain;
    assert_eq!(chain.layers.len(), 2);
    assert!(chain.layers[0].path.ends_with(format!("{vdi}.vhd")));
    assert!(chain.layers.iter().all(|layer| layer.kind == ImageKind::Vhd));
    assert_eq!(sr.destroy(&ctx, vdi).unwrap_err().code, "VDI_IN_USE");
    let base = made.base.unwrap().uuid;
    assert_eq!(sr.activate(&ctx, base, Access::ReadWrite).unwrap_err().code, "SR_BACKEND_FAILURE_46");
    assert_eq!(sr.destroy(&ctx, base).unwrap_err().code, "SR_BACKEND_FAILURE_80");
    let (sr, error) = sr.detach(&ctx).map(|()| panic!("detached")).unwrap_err();
    assert_eq!(error.code, "VDI_IN_USE");
    sr.deactivate(&ctx, vdi).unwrap();
    assert_eq!(sr.destroy(&ctx, Uuid::nil()).unwrap_err().code, "VDI_MISSING");
    assert_eq!(sr.activate(&ctx, Uuid::nil(), Access::ReadOnly).unwrap_err().code, "VDI_MISSING");
    sr.destroy(&ctx, vdi).unwrap();
    assert_eq!(read(sr.as_ref(), made.made.uuid, 0), 1);
    // The base copy goes with the last that needs it.
    sr.destroy(&ctx, made.made.uuid).unwrap();
    assert_eq!(place.files(), [""; 0]);
    sr.erase(&ctx).map_err(|(_, error)| error).unwrap();
    assert!(!place.dir.path().join("mount").join(place.sr.to_string()).exists());
}

#[test]
fn damage_is_told_with_its_cause_and_is_no_end() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let (good, bad) = (make(sr.as_ref(), MIB, "vhd"), make(sr.as_ref(), MIB, "vhd"));
    let path = place.images().join(format!("{bad}.vhd"));
    std::fs::write(&path, [7; 4096]).unwrap();
    let found = sr.scan(&ctx).unwrap();
    let info = |uuid| found.iter().find(|info| info.uuid == uuid).unwrap();
    assert!(!info(good).sm_config.contains_key("damaged"));
    assert!(info(bad).sm_config["damaged"].contains("conectix"), "{:?}", info(bad).sm_config);
    let error = sr.activate(&ctx, bad, Access::ReadWrite).unwrap_err();
    assert_eq!(error.code, "SR_BACKEND_FAILURE_65");
    assert!(error.params[1].contains("vhd-util check"), "{error}");
    // A block table that points nowhere is found before a guest finds it.
    write(sr.as_ref(), good, 0, 1);
    let path = place.images().join(format!("{good}.vhd"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(2048);
    std::fs::write(&path, bytes).unwrap();
    let error = sr.activate(&ctx, good, Access::ReadWrite).unwrap_err();
    assert!(error.params[1].contains("behind the end"), "{error}");
    std::fs::remove_dir_all(place.images()).unwrap();
    assert_eq!(sr.scan(&ctx).unwrap_err().code, "SR_BACKEND_FAILURE_47");
    assert_eq!(sr.create(&ctx, &new_vdi(MIB, "vhd")).unwrap_err().code, "SR_BACKEND_FAILURE_47");
    assert_eq!(sr.stat(&ctx).unwrap_err().code, "SR_BACKEND_FAILURE_47");
    assert_eq!(sr.vdi(&ctx, good).unwrap_err().code, "SR_BACKEND_FAILURE_47");
}

#[test]
fn an_image_with_a_missing_parent_says_so() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), MIB, "vhd");
    write(sr.as_ref(), vdi, 0, 1);
    let made = fork(sr.as_ref(), vdi, ForkKind::Clone);
    let base = made.base.unwrap().uuid;
    std::fs::rename(place.images().join(format!("{base}.vhd")), place.dir.path().join("away")).unwrap();
    let found = sr.scan(&ctx).unwrap();
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|info| info.sm_config["damaged"].contains(&base.to_string())), "{found:?}");
    let error = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap_err();
    assert_eq!(error.code, "SR_BACKEND_FAILURE_65");
    std::fs::rename(place.dir.path().join("away"), place.images().join(format!("{base}.vhd"))).unwrap();
    assert_eq!(read(sr.as_ref(), vdi, 0), 1);
}

#[test]
fn a_foreign_image_is_introduced_under_its_new_name() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let old = make(sr.as_ref(), MIB, "vhd");
    write(sr.as_ref(), old, 0, 9);
    std::fs::rename(place.images().join(format!("{old}.vhd")), place.images().join("disk 1.vhd")).unwrap();
    assert!(sr.scan(&ctx).unwrap().is_empty());
    let vdi = Uuid::new_v4();
    for bad in ["", "../x.vhd", "none.vhd", ".vhd", "disk 1"] {
        assert_eq!(sr.introduce(&ctx, vdi, bad).unwrap_err().code, "SR_BACKEND_FAILURE_46", "{bad}");
    }
    assert_eq!(sr.introduce(&ctx, vdi, "disk 1.vhd").unwrap().uuid, vdi);
    assert_eq!(read(sr.as_ref(), vdi, 0), 9);
    assert_eq!(sr.introduce(&ctx, vdi, &vdi.to_string()).unwrap().uuid, vdi, "it is there already");
    let other = make(sr.as_ref(), MIB, "raw");
    assert_eq!(sr.introduce(&ctx, other, &vdi.to_string()).unwrap_err().code, "SR_BACKEND_FAILURE_43");
    let again = Uuid::new_v4();
    assert_eq!(sr.introduce(&ctx, again, &vdi.to_string()).unwrap().uuid, again);
    assert_eq!(sr.vdi(&ctx, vdi).unwrap_err().code, "VDI_MISSING");
}

#[test]
fn a_directory_belongs_to_one_sr() {
    let place = Place::new();
    drop(place.create());
    let ctx = Watch::default();
    let driver = place.driver("file");
    assert_eq!(
        driver.create(&ctx, Uuid::new_v4(), &place.config, 0).unwrap_err().code,
        "SR_BACKEND_FAILURE_42"
    );
    // The same call again, after a kill, is no mistake.
    driver.create(&ctx, place.sr, &place.config, 0).unwrap();
    let error = driver.attach(&ctx, Uuid::new_v4(), &place.config).map(|_| ()).unwrap_err();
    assert!(error.params[1].contains(&place.sr.to_string()), "{error}");
    let probed = driver.probe(&ctx, &place.config).unwrap();
    assert!(probed.xml.contains(&place.sr.to_string()), "{}", probed.xml);
    assert_eq!(probed.results[0].sr.unwrap().0, place.sr);
    assert!(probed.results[0].complete);
    let none = driver.probe(&ctx, &tapio_sm::Config::new()).unwrap_err();
    assert_eq!(none.code, "SR_BACKEND_FAILURE_94");
    let odd = tapio_sm::Config::from([("location".to_string(), "relative".to_string())]);
    assert_eq!(driver.create(&ctx, place.sr, &odd, 0).unwrap_err().code, "SR_BACKEND_FAILURE_1");
}

#[test]
fn a_live_disk_is_not_removed() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let vdi = make(sr.as_ref(), MIB, "vhd");
    let chain = sr.activate(&ctx, vdi, Access::ReadWrite).unwrap().chain;
    sr.deactivate(&ctx, vdi).unwrap();
    ctx.live.lock().unwrap().insert(vdi, Arc::new(Disk::start(&whole(&chain))));
    assert_eq!(sr.destroy(&ctx, vdi).unwrap_err().code, "VDI_IN_USE");
    assert_eq!(place.files().len(), 1);
}

#[test]
fn steps_have_names_of_their_own() {
    let mut names: Vec<_> = STEPS.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), STEPS.len());
}

#[test]
fn a_scan_of_ten_times_as_many_images_takes_about_ten_times_as_long() {
    let place = Place::new();
    let sr = place.create();
    let ctx = Watch::default();
    let first = make(sr.as_ref(), 2 * MIB, "vhd");
    let bytes = std::fs::read(place.images().join(format!("{first}.vhd"))).unwrap();
    let mut count = 1;
    // The best of three: what other processes do meanwhile makes it longer, never shorter.
    let mut best = |wanted: usize| {
        for _ in count..wanted {
            std::fs::write(place.images().join(format!("{}.vhd", Uuid::new_v4())), &bytes).unwrap();
        }
        count = wanted;
        let timed = |_| {
            // Nothing is known from the last one.
            let sr = place.attach();
            let started = Instant::now();
            let found = sr.scan(&ctx).unwrap();
            let took = started.elapsed();
            assert!(found.iter().all(|info| info.virtual_size == 2 * MIB) && found.len() == wanted);
            sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
            took
        };
        (0..3).map(timed).min().unwrap()
    };
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
    let (few, many) = (best(1_000), best(10_000));
    println!("1,000 images in {few:?}, 10,000 in {many:?}");
    // What looks at all others for each image takes a hundred times as long.
    assert!(many < few * 40, "1,000 images in {few:?}, 10,000 in {many:?}");
}

#[test]
fn no_other_user_can_read_or_lock_what_an_sr_makes() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let sr = place.create();
    let disk = make(sr.as_ref(), 8 * MIB, "vhd");
    make(sr.as_ref(), 8 * MIB, "raw");
    fork(sr.as_ref(), disk, ForkKind::Snapshot);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&place.images()), 0o700);
    let mut files: Vec<_> = place.files().iter().map(|name| place.images().join(name)).collect();
    assert!(files.len() >= 4, "{files:?}");
    let locks = std::fs::read_dir(place.dir.path().join("run")).unwrap();
    files.extend(locks.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()));
    for file in files {
        assert_eq!(mode(&file) & 0o077, 0, "{} is open to others", file.display());
    }
}

#[test]
fn what_is_open_to_others_is_closed_when_its_sr_is_attached() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let sr = place.create();
    let disk = make(sr.as_ref(), 8 * MIB, "vhd");
    let detach = |sr: Box<dyn Sr>| assert!(sr.detach(&Watch::default()).is_ok());
    detach(sr);
    let image = place.images().join(format!("{disk}.vhd"));
    let set = |path: &std::path::Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let log = place.images().join(format!("{disk}.cbtlog"));
    let note = place.images().join("notes.txt");
    std::fs::write(&log, "").unwrap();
    std::fs::write(&note, "").unwrap();
    let elsewhere = place.dir.path().join("elsewhere");
    std::fs::write(&elsewhere, "").unwrap();
    let link = place.images().join(format!("{}.vhd", Uuid::new_v4()));
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    for path in [&image, &log, &note, &elsewhere, &place.images().join(".sr-uuid")] {
        set(path, 0o644);
    }
    set(&place.images(), 0o755);
    let open = |what: &str| -> Vec<(u32, bool)> {
        let found = tapio_sm::closed::open_in(&place.images()).expect(what);
        found.iter().map(|open| (open.mode, open.is_ours)).collect()
    };
    // A directory that holds something else too is for a person to close.
    assert_eq!(open("before"), [(0o755, false), (0o644, true), (0o644, true), (0o644, true)]);
    detach(place.attach());
    assert_eq!([mode(&image), mode(&log), mode(&place.images().join(".sr-uuid"))], [0o600; 3]);
    assert_eq!([mode(&note), mode(&elsewhere)], [0o644; 2], "not the SR's");
    assert_eq!(open("after"), [(0o755, false)]);
    std::fs::remove_file(&note).unwrap();
    assert_eq!(open("alone"), [(0o755, true)]);
    detach(place.attach());
    assert_eq!(mode(&place.images()), 0o700);
    assert_eq!(open("closed"), []);
}
