//! A process that dies while it makes or erases a whole SR: in a directory, and on a loop device. The tests run
//! themselves as that process. Over LVM and on shares the same is tried in a guest: `tests/guest/uml-lvm.sh` and
//! `tests/guest/uml-shares.sh`.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use tapio_sm::{Config, STEPS};
use uuid::Uuid;

use crate::devices::{Loop, Mounted, has_device_mapper, holds};
use crate::support::{Place, Watch, died, driver, make, read, write};

const MIB: u64 = 1 << 20;
const CHILD: &str = "TAPIO_SM_TEST_SR_CHILD";

/// The child: not a test by itself.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD) else { return };
    let [dir, sr, sr_type, key, value, step]: [&str; 6] =
        job.split('|').collect::<Vec<_>>().try_into().expect("six words");
    let sr = Uuid::try_parse(sr).expect("a UUID");
    let config = Config::from([(key.to_string(), value.to_string())]);
    let ctx = Watch { die_at: Some(step.to_string()), ..Watch::default() };
    let driver = driver(Path::new(dir), sr_type);
    if step.starts_with("sr-create") {
        driver.create(&ctx, sr, &config, 0).unwrap();
    } else {
        driver.attach(&ctx, sr, &config).unwrap().erase(&ctx).map_err(|(_, error)| error).unwrap();
    }
    // It came to the end: this step is not one of this driver.
    std::process::exit(0);
}

/// Runs the child; whether it died at the step.
fn dies(place: &Place, sr_type: &str, config: &Config, step: &str) -> bool {
    let (key, value) = config.first_key_value().unwrap();
    let job = format!("{}|{}|{sr_type}|{key}|{value}|{step}", place.dir.path().display(), place.sr);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["kills_of_srs::child", "--exact", "--nocapture"])
        .env(CHILD, job)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    died(child, &format!("{sr_type} at {step}"))
}

/// Kills at every step of making and erasing; which of them there were.
fn kills(sr_type: &str, device_len: u64) -> Option<BTreeSet<&'static str>> {
    let mut reached = BTreeSet::new();
    let steps = STEPS.iter().map(|(step, _)| *step);
    for step in steps.filter(|step| step.starts_with("sr-create") || step.starts_with("sr-erase")) {
        let place = Place::new();
        let disk = if device_len > 0 { Some(Loop::new(device_len)?) } else { None };
        let config = disk.as_ref().map_or_else(|| place.config.clone(), Loop::config);
        let _mounted = Mounted(place.dir.path().join("mount").join(place.sr.to_string()));
        let (ctx, driver, what) = (Watch::default(), place.driver(sr_type), format!("{sr_type} at {step}"));
        let is_create = step.starts_with("sr-create");
        if !is_create {
            driver.create(&ctx, place.sr, &config, 0).unwrap();
        }
        if !dies(&place, sr_type, &config, step) {
            continue;
        }
        reached.insert(step);
        let is_there = matches!(step, "sr-create:formatted" | "sr-erase:begin" | "sr-erase:unmounted");
        let found = driver.attach(&ctx, place.sr, &config);
        // A directory that never was an SR becomes one when it is attached.
        if device_len > 0 {
            assert_eq!(found.is_ok(), is_there, "{what}: {:?}", found.as_ref().err());
        }
        let sr = match found {
            Ok(sr) => sr,
            // What is left of it does not hinder a new SR.
            Err(_) => {
                driver.create(&ctx, place.sr, &config, 0).unwrap_or_else(|error| panic!("{what}: {error}"));
                driver.attach(&ctx, place.sr, &config).unwrap()
            }
        };
        let vdi = make(sr.as_ref(), 4 * MIB, "vhd");
        write(sr.as_ref(), vdi, MIB, 8);
        assert_eq!(read(sr.as_ref(), vdi, MIB), 8, "{what}");
        sr.destroy(&ctx, vdi).unwrap();
        sr.erase(&ctx).map_err(|(_, error)| error).unwrap_or_else(|error| panic!("{what}: {error}"));
        if let Some(disk) = &disk {
            assert_eq!(holds(&disk.path), "", "{what}");
        } else {
            assert_eq!(std::fs::read_dir(place.images()).unwrap().count(), 0, "{what}");
        }
    }
    Some(reached)
}

/// Every step that there is on devices: those of LVM only where it is. Shares are tried in a guest.
fn on_devices() -> BTreeSet<&'static str> {
    let lvm = ["sr-create:marked", "sr-create:grouped", "sr-create:volume-made", "sr-erase:group-gone"];
    let all = STEPS.iter().map(|(step, _)| *step);
    all.filter(|step| step.starts_with("sr-create") || step.starts_with("sr-erase"))
        .filter(|step| *step != "sr-create:directory-made")
        .filter(|step| has_device_mapper() || !lvm.contains(step))
        .collect()
}

#[test]
fn of_an_ext4_sr_leave_nothing_in_the_way() {
    if let Some(reached) = kills("ext", 64 * MIB) {
        assert_eq!(reached, on_devices());
    }
}

#[test]
fn of_an_xfs_sr_leave_nothing_in_the_way() {
    if let Some(reached) = kills("xfs", 512 * MIB) {
        assert_eq!(reached, on_devices());
    }
}

#[test]
fn of_a_btrfs_sr_leave_nothing_in_the_way() {
    if let Some(reached) = kills("btrfs", 256 * MIB) {
        assert_eq!(reached, on_devices());
    }
}

#[test]
fn of_an_sr_in_a_directory_leave_nothing_in_the_way() {
    let reached = kills("file", 0).expect("directories are everywhere");
    assert_eq!(reached, BTreeSet::from(["sr-create:begin", "sr-erase:begin"]));
}
