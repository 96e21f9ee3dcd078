//! `tapio doctor` against a daemon with storage workers of its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tapio_control::RingStart;
use tapio_e2e::disk::{create_vhd, text};
use tapio_e2e::hanging::{Call, HangingFs};
use tapio_e2e::process::{Finished, poll_until, run};
use tapio_e2e::tools::{our, skip};
use tapio_e2e::toolstack::Session;
use tapio_e2e::world::World;
use tapio_types::Movement;
use tapio_xen::blkfront::{Blkfront, Command as Ask, FrontOptions, FrontQueue};

use super::blkif::connect_at;
use super::storage_hangs::{default_sr, halted_vm_on};

/// What is waited for may take as long on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

fn doctor_with(world: &World, args: &[&str]) -> Finished {
    let mut doctor = Command::new(our("tapio"));
    doctor.arg("doctor").args(args).args(["--", "--socket"]).arg(&world.daemon().socket);
    run(doctor.env("HOME", world.scratch.path()))
}

fn doctor(world: &World) -> Finished {
    doctor_with(world, &[])
}

/// Ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_lock_that_was_inherited_from_a_process_that_is_gone_is_named_and_keeps_nothing_from_being_told() {
    let world = World::new();
    let xe = |words: &[&str]| run(world.xe().args(words)).ok();
    let sr = xe(&["sr-list", "type=file", "--minimal"]);
    xe(&["vdi-create", &format!("sr-uuid={}", sr.trim()), "name-label=a", "virtual-size=8MiB"]);
    let healthy = doctor(&world);
    assert!(!healthy.stdout.contains("lock-kept"), "{healthy}");

    // The shell that takes the lock ends at once, and what it has started keeps the descriptor.
    let directory = File::open(world.scratch.join("sr")).expect("the SR's directory");
    directory.try_lock().expect("no operation holds it");
    let keeper = Ends(Command::new("sleep").arg("600").stdin(Stdio::from(directory)).spawn().expect("sleep"));
    let found = doctor(&world);
    assert_eq!(found.status.code(), Some(1), "{found}");
    let line = found.stdout.lines().find(|line| line.contains("lock-kept"));
    assert!(line.is_some_and(|line| line.starts_with("error") && line.contains(sr.trim())), "{found}");
    assert!(found.stdout.contains(&format!("kept open by {} (sleep)", keeper.0.id())), "{found}");
    assert!(!found.stdout.contains("sr-not-attached"), "{found}");

    drop(keeper);
    let again = doctor(&world);
    assert!(!again.stdout.contains("lock-kept"), "{again}");
    world.finish();
}

/// Names and contents of the files of the default SR, and all records of VDIs.
fn picture(world: &World) -> (BTreeMap<PathBuf, Vec<u8>>, Value) {
    let entries = fs::read_dir(world.scratch.join("sr")).expect("the SR's directory").flatten();
    let files =
        entries.map(|entry| entry.path()).filter(|path| path.is_file() && !path.ends_with(".tapio-hosts"));
    let files = files.map(|path| (path.clone(), fs::read(path).expect("a file"))).collect();
    (files, world.daemon().login().call("VDI.get_all_records", &[]))
}

#[test]
fn a_dry_run_says_what_would_be_repaired_and_changes_nothing() {
    let world = World::new();
    let sr = run(world.xe().args(["sr-list", "type=file", "--minimal"])).ok().trim().to_owned();
    let place = |name: &str| world.scratch.join("sr").join(name);
    let image = "8c9b0a52-54f0-4ac6-b7a9-0e4f0c7a3f11";
    create_vhd(place(&format!("{image}.vhd")), 8);
    // No process has a number as high as this.
    fs::write(place(".vhd-4194999-1.partial"), "half").expect("room");
    fs::write(place("clone_1d1b5c0e-6a3f-4f57-9a55-0a64d6ef2a01"), "cut").expect("room");
    let before = picture(&world);
    assert_eq!(before.1, json!({}), "nothing has a record yet");

    // Each SR is repaired once, whatever was found in it.
    let dry = doctor_with(&world, &["--repair"]);
    assert_eq!(dry.status.code(), Some(1), "{dry}");
    let would: Vec<&str> = dry.stdout.lines().filter(|line| line.starts_with("would repair: ")).collect();
    assert_eq!(would, [format!("would repair: SR.scan {sr}")], "{dry}");
    for kind in ["journal-left", "file-unfinished"] {
        assert!(dry.stdout.contains(&format!("warning: {kind} ")), "{dry}");
    }
    assert!(dry.stdout.contains("1 repairs are safe: 'tapio doctor --repair' shows them"), "{dry}");
    assert_eq!(picture(&world), before, "the dry run changed something");
    let refused = doctor_with(&world, &["--yes"]);
    assert!(refused.stderr.contains("--repair"), "{refused}");

    let done = doctor_with(&world, &["--repair", "--yes"]);
    assert!(done.stdout.contains(&format!("repairs: SR.scan {sr}")), "{done}");
    assert!(!done.stdout.contains("repairs are safe"), "nothing is left to be repaired: {done}");
    let (files, records) = picture(&world);
    let names: Vec<&str> = files.keys().filter_map(|path| path.file_name()?.to_str()).collect();
    let left: Vec<&&str> =
        names.iter().filter(|name| name.contains("clone_") || name.contains("partial")).collect();
    assert!(left.is_empty() && names.contains(&format!("{image}.vhd").as_str()), "{names:?}");
    let uuids: Vec<&Value> = records.as_object().expect("records").values().map(|vdi| &vdi["uuid"]).collect();
    assert_eq!(uuids, [&json!(image)], "the image has its record");

    // An SR, a VM by the SRs of its disks, and what there is not.
    let vm = run(world.xe().args(["vm-install", "template=Simulated guest", "new-name-label=asked"])).ok();
    let (vm, vdi) = (format!("vm-uuid={}", vm.trim()), format!("vdi-uuid={image}"));
    run(world.xe().args(["vbd-create", &vm, &vdi, "device=autodetect"])).ok();
    fs::write(place(".vhd-4194999-1.partial"), "half").expect("room");
    for object in ["asked", sr.as_str()] {
        let found = doctor_with(&world, &[object]);
        assert!(found.stdout.contains("warning: file-unfinished "), "{object}: {found}");
        assert!(!found.stdout.contains("cpu-"), "settings of the host are not asked for: {found}");
    }
    let none = doctor_with(&world, &["nothing"]);
    assert_eq!(none.status.code(), Some(2), "{none}");
    assert!(none.stderr.contains("'nothing' is no SR, VM or host"), "{none}");
    world.finish();
}

/// What one request of a ring can hold: 11 pages.
const REQUEST: u32 = 11 * 4096;
/// Requests of a ring of one page.
const SLOTS: u64 = 32;

/// The 6.1 guide's five VMs, each with a VDI of an SR whose writes hang when they are told to.
struct Guide {
    // The first to go: it answers what hangs.
    hanging: HangingFs,
    world: World,
    session: Session,
    vms: Vec<String>,
}

impl Guide {
    fn new() -> Result<Self, String> {
        let world = World::new();
        let hanging = HangingFs::start(&world.scratch)?;
        let session = world.daemon().login();
        let sr = default_sr(&session);
        let mut vms = Vec::new();
        for number in 0..5 {
            let record = json!({"SR": sr, "virtual_size": 8 << 20, "name_label": "disk", "type": "user",
                "sm_config": {"type": "raw"}});
            let vdi = session.text("VDI.create", &[record]);
            let image = format!("{}.raw", session.text("VDI.get_uuid", &[json!(vdi)]));
            // The image lies on the file system that hangs.
            let (behind, place) = (hanging.behind(&image), world.scratch.join("sr").join(&image));
            fs::copy(&place, behind).expect("room");
            let mounted = run(Command::new("mount").arg("--bind").arg(hanging.file(&image)).arg(&place));
            if !mounted.status.success() {
                return Err(format!("needs mounts: {}", mounted.stderr.trim()));
            }
            let (vm, _) = halted_vm_on(&session, &vdi);
            for (key, value) in [("sim-front", "xen"), ("sim-domid", &(20 + number).to_string())] {
                session.call("VM.add_to_platform", &[json!(vm), json!(key), json!(value)]);
            }
            vms.push(vm);
        }
        Ok(Self { hanging, world, session, vms })
    }

    /// Starts the VMs; each writes as much as its ring holds, 1408 KiB, and none of that is answered.
    fn write(&self) -> Vec<(Blkfront, FrontQueue)> {
        let run_dir = self.world.scratch.join("run/disk");
        let start = |vm: &String| {
            self.session.call("VM.start", &[json!(vm), json!(false), json!(false)]);
        };
        self.vms.iter().for_each(start);
        let mut list = Command::new(our("tapio"));
        list.args(["disk", "list", "--json"]).env("TAPIO_RUN_DIR", &run_dir);
        let listed: Value = serde_json::from_str(&run(&mut list).ok()).expect("JSON");
        let disks = listed.as_array().expect("a list");
        assert_eq!(disks.len(), 5, "{listed}");
        self.hanging.hang(Call::Write);
        let mut fronts = Vec::new();
        for (number, disk) in disks.iter().enumerate() {
            let at = |name: &str| disk[name].as_i64().unwrap_or_else(|| panic!("no {name} in {disk}"));
            let options = FrontOptions { buffer_len: REQUEST, ..FrontOptions::default() };
            let mut front = Blkfront::new(options).expect("a double");
            let invitation = front.invitation().expect("descriptors");
            let (pid, minor) = (at("pid") as i32, at("minor") as u16);
            let domid = 20 + number as u32;
            connect_at(&run_dir, (pid, minor), domid, invitation, Movement::Copy, RingStart::Fresh);
            let mut queue = front.take_queues().pop().expect("a queue");
            for slot in 0..SLOTS {
                let write = Ask::Write { at: slot * u64::from(REQUEST), len: REQUEST };
                queue.submit(&write).expect("grants are left").expect("a slot is free");
            }
            queue.kick().expect("woken");
            fronts.push((front, queue));
        }
        fronts
    }

    /// All writes are answered, and the VMs are off.
    fn end(&self, fronts: Vec<(Blkfront, FrontQueue)>) {
        self.hanging.go_on();
        for (_front, mut queue) in fronts {
            let mut done = Vec::new();
            while queue.under_way() > 0 {
                assert!(queue.wait(LIMIT).expect("the ring is whole"), "{} are left", queue.under_way());
                queue.reap(&mut done).expect("answers");
            }
            assert_eq!(done.len() as u64, SLOTS);
        }
        for vm in &self.vms {
            self.session.call("VM.hard_shutdown", &[json!(vm)]);
        }
    }

    /// What the doctor says of the pool, once all disks wait for pages.
    fn told(&self) -> String {
        let said = poll_until(LIMIT, || {
            let said = doctor(&self.world).stdout;
            let detail = said.lines().find(|line| line.contains("pages are in use"))?.trim().to_owned();
            detail.contains("5 of 5 rings are full (160 of 160 requests)").then_some(detail)
        });
        said.unwrap_or_else(|| panic!("no full rings: {}", doctor(&self.world)))
    }
}

/// The number before these words.
fn before(words: &str, text: &str) -> u64 {
    let (front, _) = text.split_once(words).unwrap_or_else(|| panic!("no '{words}' in {text}"));
    let number = front.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number before '{words}' in {text}"))
}

#[test]
fn five_vms_with_full_rings_need_a_larger_pool_and_what_is_said_makes_it() {
    let guide = match Guide::new() {
        Ok(guide) => guide,
        Err(why) => return skip(&why),
    };
    let fronts = guide.write();
    let told = guide.told();
    assert!(told.starts_with("( 704, 704 ): 704 of 704 pages are in use, "), "{told}");
    // A disk that gets no page for a second serves one request without.
    let served = before(" requests are in flight", &told);
    assert!((64..160).contains(&served), "{told}");
    assert!(told.contains("which take up to 5.50 MiB in place of 2.75 MiB"), "{told}");
    let (large, small) = (before(" SRs of that size", &told), told.rsplit(' ').next().expect("a number"));
    let small: u64 = small.parse().expect("a number");
    assert!(large > 0 && (small == 2 * large || small == 2 * large + 1), "{told}");

    // The command as it was printed.
    let command = told.split('\'').nth(1).expect("a command");
    let words: Vec<&str> = command.split(' ').collect();
    assert_eq!(words[..2], ["xe", "sr-param-set"], "{told}");
    run(guide.world.xe().args(&words[1..])).ok();
    guide.end(fronts);
    let fronts = guide.write();
    let told = guide.told();
    assert!(told.starts_with("( 1408, 1408 ): 1408 of 1408 pages are in use"), "{told}");
    let now = before(" requests are in flight", &told);
    assert!((128..=160).contains(&now) && now > served, "{told}");
    guide.end(fronts);
    let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
    let below = text(guide.world.scratch.path()).to_owned();
    for place in mounts.lines().filter_map(|line| line.split(' ').nth(1)) {
        if place.starts_with(&below) && place.ends_with(".raw") {
            run(Command::new("umount").arg("-l").arg(place)).ok();
        }
    }
    let Guide { hanging, world, .. } = guide;
    drop(hanging);
    world.finish();
}
