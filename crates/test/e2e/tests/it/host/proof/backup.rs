//! Backups by changed blocks, of a disk that is written meanwhile, and with what dies in the middle.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tapio_e2e::disk::{Host, text};
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::local::lacks_fuse;
use tapio_e2e::needs_python_xenapi;
use tapio_e2e::process::{poll_until, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::world::World;

/// As in `backup.py`: the load leaves the last quarter of the disk alone.
const WRITTEN: u64 = 96 << 20;
const WRITE_LEN: usize = 4096;
/// Writes between two nights.
const NIGHT: u64 = 50;
const LIMIT: Duration = Duration::from_secs(60);

/// Writes to a device without end, anywhere in its first three quarters.
struct Load {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Load {
    fn on(device: &Path) -> Self {
        let file = File::options().write(true).custom_flags(libc::O_DSYNC).open(device).expect("a device");
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (is_over, count) = (Arc::clone(&stop), Arc::clone(&written));
        let work = move || {
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            while !is_over.load(Ordering::Acquire) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = state % (WRITTEN / WRITE_LEN as u64) * WRITE_LEN as u64;
                file.write_all_at(&state.to_le_bytes().repeat(WRITE_LEN / 8), at)?;
                count.fetch_add(1, Ordering::AcqRel);
            }
            Ok(())
        };
        Self { stop, written, thread: Some(std::thread::spawn(work)) }
    }

    /// Waits until so much more was written.
    fn waits_for(&self, more: u64) {
        let until = self.written.load(Ordering::Acquire) + more;
        let seen = poll_until(LIMIT, || (self.written.load(Ordering::Acquire) >= until).then_some(()));
        assert!(seen.is_some(), "the disk is not written any more");
    }

    fn end(mut self) -> io::Result<()> {
        self.stop.store(true, Ordering::Release);
        self.thread.take().expect("it ends once").join().expect("no panic")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

fn part(world: &World, client: &str, part: &str) -> String {
    world.story("backup.py", &[client, text(world.scratch.path()), part])
}

/// The device that a part has plugged.
fn device(said: &str) -> PathBuf {
    PathBuf::from(said.lines().find(|line| line.starts_with("/dev/")).expect("a device"))
}

/// How many blocks a night has copied, and how many of those in the quarter that is not written.
fn changed(said: &str) -> (u64, u64) {
    let words: Vec<u64> = said
        .lines()
        .find(|line| line.starts_with("changed "))
        .expect("a number of blocks")
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    (words[0], words[1])
}

fn has_devices() -> bool {
    let scratch = Scratch::on_disk();
    let lacks = lacks_fuse(&Host::new(&scratch));
    lacks.as_deref().map(skip).is_none()
}

fn nights(client: &str) {
    let world = World::new();
    let load = Load::on(&device(&part(&world, client, "prepare")));
    part(&world, client, "full");
    for _ in 0..3 {
        load.waits_for(NIGHT);
        let (blocks, elsewhere) = changed(&part(&world, client, "incremental"));
        assert!(
            blocks > 0 && elsewhere == 0,
            "{blocks} blocks changed, {elsewhere} where nothing is written"
        );
    }
    part(&world, client, "restore");
    load.end().expect("it was written to the end");
    part(&world, client, "end");
    world.finish();
}

#[test]
fn a_disk_is_restored_from_a_full_backup_and_three_incremental_ones() {
    needs_python_xenapi!(_wheel);
    if has_devices() {
        nights("xml");
        nights("json");
    }
}

#[test]
fn backups_by_nbd_with_kills_of_each_process_restore_the_disk() {
    needs_python_xenapi!(_wheel);
    if !has_devices() {
        return;
    }
    let mut world = World::new();
    let said = part(&world, "json+nbd", "prepare");
    let load = Load::on(&device(&said));
    if said.contains("lacks a network") {
        return skip("needs a network interface with an address");
    }
    let night = |world: &World, client: &str| {
        load.waits_for(NIGHT);
        changed(&part(world, client, "incremental")).1
    };
    part(&world, "json+nbd", "full");
    assert_eq!(night(&world, "json+nbd"), 0);
    // The process that serves the snapshot is killed while it is read; then the daemon between two nights.
    assert_eq!(night(&world, "xml+nbd+kill"), 0);
    world.kill_and_restart();
    assert_eq!(night(&world, "json+nbd"), 0);
    // The process of the disk itself is killed: it may be told that everything has changed.
    signal(disk_process(&world), libc::SIGKILL).expect("it runs");
    let _ = load.end();
    let load = Load::on(&device(&part(&world, "xml+nbd", "plug_again")));
    load.waits_for(NIGHT);
    assert_eq!(changed(&part(&world, "xml+nbd", "incremental")), (2048, 512), "everything");
    part(&world, "json+nbd", "restore");
    load.end().expect("it was written to the end");
    part(&world, "json+nbd", "end");
    world.finish();
}

/// As of a product that has neither NBD nor lists of changed blocks.
#[test]
fn backups_by_streams_with_kills_of_each_process_restore_the_disk() {
    needs_python_xenapi!(_wheel);
    if !has_devices() {
        return;
    }
    let mut world = World::new();
    let tell =
        |world: &World, part: &str| world.story("streams.py", &["json", text(world.scratch.path()), part]);
    let load = Load::on(&device(&tell(&world, "prepare")));
    load.waits_for(NIGHT);
    tell(&world, "full");
    let night = |world: &World, part: &str| {
        load.waits_for(NIGHT);
        let (blocks, elsewhere) = changed(&tell(world, part));
        assert!(blocks > 0 && elsewhere == 0, "{blocks} blocks, {elsewhere} where nothing is written");
    };
    night(&world, "incremental");
    // The process that reads the images is killed in the middle of a stream; the daemon in the middle of another.
    night(&world, "incremental_killed");
    load.waits_for(NIGHT);
    tell(&world, "cut");
    world.kill_and_restart();
    tell(&world, "settled");
    night(&world, "incremental");
    tell(&world, "restore");
    load.end().expect("it was written to the end");
    tell(&world, "end");
    world.finish();
}

/// The process that has the disk open.
fn disk_process(world: &World) -> i32 {
    let pids = left_behind(world.scratch.path(), world.daemon().process.pid());
    let is_disk = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|line| line.starts_with(b"TAPIO_VBD="))
    };
    pids.into_iter().find(is_disk).expect("a disk process")
}

#[test]
fn after_the_disk_process_was_killed_everything_has_changed() {
    needs_python_xenapi!(_wheel);
    if !has_devices() {
        return;
    }
    let world = World::new();
    let load = Load::on(&device(&part(&world, "xml", "prepare")));
    part(&world, "xml", "full");
    load.waits_for(NIGHT);
    assert_eq!(changed(&part(&world, "xml", "incremental")).1, 0);
    load.waits_for(NIGHT);
    signal(disk_process(&world), libc::SIGKILL).expect("it runs");
    // What the load is told depends on the kind of device.
    let _ = load.end();
    let load = Load::on(&device(&part(&world, "xml", "plug_again")));
    load.waits_for(NIGHT);
    assert_eq!(changed(&part(&world, "xml", "incremental")), (2048, 512), "everything");
    load.waits_for(NIGHT);
    assert_eq!(changed(&part(&world, "xml", "incremental")).1, 0, "it is known again what changes");
    part(&world, "xml", "restore");
    load.end().expect("it was written to the end");
    part(&world, "xml", "end");
    world.finish();
}

/// The fourth snapshot is broken off there, by the end of the storage's process or of the daemon.
fn broken_off(place: &str, ends_daemon: bool) {
    let mut world = World::with(|options| options.env("TAPIO_DIE_AT", &format!("{place}:4")));
    let load = Load::on(&device(&part(&world, "xml", "prepare")));
    part(&world, "xml", "full");
    for _ in 0..2 {
        load.waits_for(NIGHT);
        part(&world, "xml", "incremental");
    }
    load.waits_for(NIGHT);
    part(&world, "xml", "cut");
    if ends_daemon {
        world.kill_and_restart();
    }
    load.waits_for(NIGHT);
    part(&world, "xml", "incremental");
    part(&world, "xml", "settled");
    part(&world, "xml", "restore");
    load.end().expect("it was written to the end");
    part(&world, "xml", "end");
    world.finish();
}

#[test]
fn a_backup_goes_on_after_the_daemon_or_the_storages_process_ended_in_a_snapshot() {
    needs_python_xenapi!(_wheel);
    if has_devices() {
        for place in ["fork:leaf-swapped", "fork:log-named", "fork:log-switched"] {
            broken_off(place, false);
        }
        broken_off("vdi-fork:image-made", true);
    }
}
