//! Moves that are broken off: by a cancel, by a storage that fails, by the end of the daemon and of the disk process.
//! The disk is at one place, whole, and nothing is at the other.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::faulty::Faulty;
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;
use tapio_fixtures::unmounting::unmount;

use super::load::{Load, Model};
use super::{Care, LEN, Plugged, has_devices};

const LIMIT: Duration = Duration::from_secs(60);

impl Care {
    /// Begins a move, and does not wait for it.
    fn begins(&self, vdi: &str, sr: &str) -> Running {
        let mut command = self.world.xe();
        command.args(["vdi-pool-migrate", &format!("uuid={vdi}"), &format!("sr-uuid={sr}")]);
        let log = (0..).map(|number| self.world.scratch.join(&format!("move.{number}.log")));
        Running::start(&mut command, &log.into_iter().find(|log| !log.exists()).expect("a free name"))
    }

    /// Waits until an image is made where a disk goes.
    fn arrives(&self, dir: &PathBuf) {
        let made = || {
            let entries = std::fs::read_dir(dir).ok()?.flatten();
            let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.any(|name| name.ends_with(".vhd") && !name.starts_with('.')).then_some(())
        };
        assert!(poll_until(LIMIT, made).is_some(), "no image comes");
    }

    /// The disk is at this place alone, with its snapshot.
    #[track_caller]
    fn is_at(&self, plugged: &Plugged, (sr, dir): (&str, &str), other: &str) -> String {
        let vdi = self.disk_of(plugged);
        assert_eq!(self.param("vdi", &vdi, "sr-uuid"), sr);
        assert!(self.images(dir).contains(&vdi));
        // What could not be put in order at once is tried again some seconds later.
        let is_empty = poll_until(LIMIT, || self.images_now(other).is_empty().then_some(()));
        assert!(is_empty.is_some(), "{:?} are left", self.images_now(other));
        assert_eq!(self.images(other), Vec::<String>::new(), "nothing is there");
        let snapshots = self.value(&["vdi-list", &format!("snapshot-of={vdi}"), "--minimal"]);
        assert_eq!(snapshots.split(',').filter(|uuid| !uuid.is_empty()).count(), 1, "{snapshots}");
        vdi
    }

    /// The process that has the disk open.
    fn process(&self) -> i32 {
        let pids = left_behind(self.world.scratch.path(), self.world.daemon().process.pid());
        let is_disk = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|line| line.starts_with(b"TAPIO_VBD="))
        };
        pids.into_iter().find(is_disk).expect("a disk process")
    }
}

fn loaded(care: &Care, sr: &str) -> (String, Plugged, Load, String, Model) {
    let vdi = care.disk(sr, &[]);
    let plugged = care.plug(&vdi);
    let load = Load::on(&plugged.device, Model::empty(LEN));
    load.writes(150);
    let (snapshot, held) =
        load.still(|model| (care.value(&["vdi-snapshot", &format!("uuid={vdi}")]), model.clone()));
    load.writes(50);
    (vdi, plugged, load, snapshot, held)
}

#[test]
fn a_move_that_is_killed_leaves_the_disk_whole_at_one_place() {
    if !has_devices() {
        return;
    }
    let dies_at = |place: &str| format!("{place}:1");
    let world = World::with(|options| options.env("TAPIO_DIE_AT", &dies_at("disk:in-sync")));
    let mut care = Care::new(world);
    let (near, far) = (care.default_sr(), care.sr("far"));
    let (vdi, plugged, load, snapshot, held) = loaded(&care, &near);

    // Before the switch: the disk goes on where it is, under its name, and its guest notices nothing.
    care.xe(&["vdi-pool-migrate", &format!("uuid={vdi}"), &format!("sr-uuid={far}")]).fails();
    care.world.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at("disk:pivoted")));
    assert_eq!(care.is_at(&plugged, (&near, "sr"), "far"), vdi);
    load.writes(50);
    care.holds(&snapshot, &held);

    // After it, with the old images there still: the move is finished, and then they go.
    care.xe(&["vdi-pool-migrate", &format!("uuid={vdi}"), &format!("sr-uuid={far}")]).fails();
    assert!(care.images_now("sr").contains(&vdi) && !care.images_now("far").is_empty());
    care.world.restart_with(|options| options.env("TAPIO_DIE_AT", &dies_at("vdi-move:switched")));
    let there = care.is_at(&plugged, (&far, "far"), "sr");
    load.writes(50);

    // The records are written, and nothing is removed yet.
    care.xe(&["vdi-pool-migrate", &format!("uuid={there}"), &format!("sr-uuid={near}")]).fails();
    assert!(care.images_now("far").contains(&there) && !care.images_now("sr").is_empty());
    care.world.restart_with(|options| options.env("TAPIO_DIE_AT", ""));
    let vdi = care.is_at(&plugged, (&near, "sr"), "far");
    load.writes(50);

    // The disk process is killed in the middle: every write that was answered is where the VBD leads to.
    let mut load = load;
    let process = care.process();
    let mut moving = care.begins(&vdi, &far);
    care.arrives(&care.world.scratch.join("far"));
    signal(process, libc::SIGKILL).expect("it runs");
    let ended = moving.wait(LIMIT);
    println!("the move ended with {ended}: {}", moving.log());
    let (_, model) = load.stop();
    care.value(&["vbd-unplug", &format!("uuid={}", plugged.vbd), "force=true"]);
    let now = care.disk_of(&plugged);
    let is_moved = care.param("vdi", &now, "sr-uuid") == far;
    assert_eq!(is_moved, ended.success(), "{}", moving.log());
    let places = if is_moved { ((&*far, "far"), "sr") } else { ((&*near, "sr"), "far") };
    let vdi = care.is_at(&plugged, places.0, places.1);
    care.value(&["vbd-destroy", &format!("uuid={}", plugged.vbd)]);
    care.holds(&vdi, &model);
    let again = care.plug(&vdi);
    model.compare("the device", File::open(&again.device).expect("it is plugged"));
    care.unplug(&again);
    let snapshot = care.value(&["vdi-list", &format!("snapshot-of={vdi}"), "--minimal"]);
    care.holds(&snapshot, &held);
    care.is_valid(places.0.1);
    care.is_healthy(&[&near, &far]);
    care.world.finish();
}

#[test]
fn a_move_that_is_cancelled_or_whose_storage_fails_leaves_all_as_it_was() {
    needs!("mkfs.ext4");
    if !has_devices() {
        return;
    }
    let scratch = Scratch::on_disk();
    let mut faulty = match Faulty::start(&scratch, 96 << 20, &[]) {
        Ok(faulty) => faulty,
        Err(why) => return skip(&why),
    };
    let device = match faulty.device() {
        Ok(device) => device,
        Err(why) => return skip(&why),
    };
    run(Command::new("mkfs.ext4").args(["-q", "-m", "0", text(&device)])).ok();
    let world = World::new();
    let slow = world.scratch.join("slow");
    std::fs::create_dir(&slow).expect("a directory");
    let mounted = run(Command::new("mount").arg(&device).arg(&slow));
    if !mounted.status.success() {
        return skip(&format!("needs root to mount: {}", mounted.stderr.trim()));
    }
    let care = Care::new(world);
    let (near, far) = (care.default_sr(), care.sr("slow"));
    let (vdi, plugged, load, snapshot, held) = loaded(&care, &near);
    let before = care.images("sr");

    // Nothing is written there while it is cancelled.
    let mut moving = care.begins(&vdi, &far);
    care.arrives(&slow);
    faulty.hang(true);
    let task = poll_until(LIMIT, || {
        let tasks = care.value(&["task-list", "status=pending", "--minimal"]);
        let named = |uuid: &&str| care.param("task", uuid, "name-label").contains("pool_migrate");
        tasks.split(',').filter(|uuid| !uuid.is_empty()).find(named).map(str::to_owned)
    });
    care.value(&["task-cancel", &format!("uuid={}", task.expect("the move has a task"))]);
    faulty.hang(false);
    assert!(!moving.wait(LIMIT).success(), "it was cancelled: {}", moving.log());
    assert!(moving.log().contains("cancel"), "{}", moving.log());
    assert_eq!(care.is_at(&plugged, (&near, "sr"), "slow"), vdi);
    let sorted = |mut images: Vec<String>| {
        images.sort();
        images
    };
    assert_eq!(sorted(care.images("sr")), sorted(before));
    load.writes(50);
    care.holds(&snapshot, &held);

    // It moves when it may, and what it holds is right.
    let there = care.migrate(&vdi, &far, &[]);
    care.is_at(&plugged, (&far, "slow"), "sr");
    load.writes(20);
    let model = load.end();
    model.compare("the device", File::open(&plugged.device).expect("it is plugged"));
    care.unplug(&plugged);
    care.holds(&there, &model);
    care.is_valid("slow");
    care.is_healthy(&[&near, &far]);
    let destination = format!("destination-sr-uuid={near}");
    care.value(&["sr-evacuate", &format!("uuid={far}"), &destination]);
    let pbd = care.value(&["pbd-list", &format!("sr-uuid={far}"), "--minimal"]);
    care.value(&["pbd-unplug", &format!("uuid={pbd}")]);
    unmount(&slow);
    care.world.finish();
}
