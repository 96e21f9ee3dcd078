//! The disk process dies again and again under a guest that goes on: the guest notices a pause and nothing else.
//!
//! The guest is our vhost-user driver: like QEMU it keeps its memory and the in-flight region, connects again, and is
//! never told of an error. It writes and reads at random with many requests in flight and compares every answer.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant, SystemTime};

use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, snapshot_vhd, text};
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_front::vhost_user::driver::{Command, Driver, DriverOptions, DriverQueue};
use tapio_front::vhost_user::feature;
use tapio_load::Random;

const DISK_LEN: u64 = 64 << 20;
const BLOCK_LEN: u64 = 4096;
const KILLS: u64 = 25;
/// Everything that happens here takes milliseconds; other things on the host may take seconds.
const LIMIT: Duration = Duration::from_secs(60);

fn seed() -> u64 {
    let chosen = std::env::var("TAPIO_SEED").ok().and_then(|text| text.parse().ok());
    let clock =
        || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |d| d.as_micros() as u64);
    let seed = chosen.unwrap_or_else(clock);
    println!("TAPIO_SEED={seed}");
    seed
}

fn fill(label: u64, into: &mut [u8]) {
    for (index, word) in into.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (label.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64).to_le_bytes();
    }
}

fn holds(label: u64, bytes: &[u8]) -> bool {
    let mut want = vec![0; bytes.len()];
    if label != 0 {
        fill(label, &mut want);
    }
    bytes == want
}

/// What the guest did and saw.
struct Guest {
    driver: Driver,
    queue: DriverQueue,
    /// By block: what was written last.
    content: Vec<u64>,
    answers: u64,
    reconnects: u64,
    longest_pause: Duration,
    last_answer: Instant,
}

impl Guest {
    fn new(socket: &Path, options: DriverOptions) -> Self {
        let driver = Driver::connect(socket, options).expect("the device");
        let queue = driver.start(0).expect("a queue");
        let content = vec![0; (DISK_LEN / BLOCK_LEN) as usize];
        let now = Instant::now();
        let longest_pause = Duration::ZERO;
        Self { driver, queue, content, answers: 0, reconnects: 0, longest_pause, last_answer: now }
    }

    /// Finds the successor of a process that died.
    fn reconnect(&mut self, socket: &Path) {
        let found = poll_until(LIMIT, || {
            self.driver.reconnect(socket).ok()?;
            // It may have died again meanwhile.
            self.driver.resume(0, &self.queue, self.queue.base()).ok()?;
            Some(())
        });
        found.expect("a new process serves the socket");
        self.queue.kick_always().expect("a kick");
        self.reconnects += 1;
    }

    /// Works until `stop`, then until everything is answered. Every answer is counted in `progress`.
    fn work(&mut self, socket: &Path, random: &mut Random, stop: &AtomicBool, progress: &AtomicU64) {
        let blocks = DISK_LEN / BLOCK_LEN;
        let mut busy = vec![None; self.queue.room()];
        let mut taken = vec![false; blocks as usize];
        let (mut done, mut label) = (Vec::new(), 1);
        self.last_answer = Instant::now();
        loop {
            let ending = stop.load(Ordering::Relaxed);
            if ending && busy.iter().all(Option::is_none) {
                return;
            }
            while !ending && let Some(slot) = self.queue.next_slot() {
                let block = random.next() % blocks;
                if std::mem::replace(&mut taken[block as usize], true) {
                    break;
                }
                let (at, len) = (block * BLOCK_LEN, BLOCK_LEN as u32);
                let write = !random.next().is_multiple_of(3);
                let command = if write { Command::Write { at, len } } else { Command::Read { at, len } };
                if write {
                    label += 1;
                    self.content[block as usize] = label;
                    fill(label, &mut self.queue.buffer(slot)[..BLOCK_LEN as usize]);
                }
                busy[usize::from(slot)] = Some((block, write));
                assert_eq!(self.queue.submit(&command), Some(slot));
            }
            self.queue.kick().expect("a kick");
            done.clear();
            if self.queue.reap(&mut done) == 0 {
                assert!(self.last_answer.elapsed() < LIMIT, "requests were lost: {busy:?}");
                if !self.queue.wait(Duration::from_millis(2)).expect("a wait") && self.driver.is_lost() {
                    self.reconnect(socket);
                }
                continue;
            }
            self.longest_pause = self.longest_pause.max(self.last_answer.elapsed());
            self.last_answer = Instant::now();
            for completion in &done {
                let (block, write) =
                    busy[usize::from(completion.slot)].take().expect("an answer to something asked");
                assert_eq!(completion.status, 0, "the guest saw an error at block {block}");
                taken[block as usize] = false;
                if !write {
                    let bytes = &self.queue.buffer(completion.slot)[..BLOCK_LEN as usize];
                    assert!(holds(self.content[block as usize], bytes), "block {block} holds something else");
                }
            }
            self.answers += done.len() as u64;
            progress.store(self.answers, Ordering::Relaxed);
        }
    }
}

/// More answers than a process that has just ended can have left in the ring: a guest that has them found the next one.
const MORE: u64 = 300;

/// Waits until the guest has so many more answers, or has ended.
fn gets_on(progress: &AtomicU64, worker: &ScopedJoinHandle<'_, Guest>, answers: u64) {
    let target = progress.load(Ordering::Relaxed) + answers;
    let reached = || (progress.load(Ordering::Relaxed) >= target || worker.is_finished()).then_some(());
    poll_until(LIMIT, reached).expect("the guest gets on");
}

fn killed_under_load(packed: bool) {
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), DISK_LEN >> 20);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let options = DiskOptions::vhd(&leaf).vhost_user();
    let mut disk = options.start(scratch.path());
    let socket = disk.vhost.clone();
    let features = DriverOptions::default().features | if packed { feature::RING_PACKED } else { 0 };
    let driver = DriverOptions { features, inflight: true, buffer_len: 4096, ..DriverOptions::default() };
    let mut guest = Guest::new(&socket, driver);
    let mut random = Random::new(seed());
    let mut moments = Random::new(random.next());
    let (stop, progress) = (AtomicBool::new(false), AtomicU64::new(0));
    let guest = std::thread::scope(|scope| {
        let (stop, progress) = (&stop, &progress);
        let worker = scope.spawn(move || {
            guest.work(&socket, &mut random, stop, progress);
            guest
        });
        for _ in 0..KILLS {
            // Some processes die before they have served a request, most in the middle of work.
            gets_on(progress, &worker, moments.next() % 200 * (moments.next() % 4));
            std::thread::sleep(Duration::from_micros(moments.next() % 5000));
            disk.process.kill();
            options.restart(scratch.path(), &mut disk);
        }
        // The guest has found the last process.
        gets_on(progress, &worker, MORE);
        stop.store(true, Ordering::Relaxed);
        worker.join().expect("the guest saw nothing but pauses")
    });
    println!(
        "{} answers through {KILLS} kills and {} reconnects; longest pause {:?}",
        guest.answers, guest.reconnects, guest.longest_pause
    );
    assert!(guest.reconnects > 0 && guest.answers > 100);
    verify(guest, disk, &options, scratch, &[&base, &leaf]);
}

/// What was answered is in the image, as another process reads it; and the image is sound.
fn verify(
    mut guest: Guest,
    disk: tapio_e2e::disk::Disk,
    options: &DiskOptions,
    scratch: Scratch,
    images: &[&Path],
) {
    guest.driver.stop(0).expect("the queue stops");
    drop(guest.driver);
    disk.stop();
    let disk = options.start(scratch.path());
    let driver = Driver::connect(&disk.vhost, DriverOptions { buffer_len: 4096, ..DriverOptions::default() });
    let driver = driver.expect("the device");
    guest.queue = driver.start(0).expect("a queue");
    let mut done = Vec::new();
    for (block, label) in guest.content.iter().enumerate() {
        let slot = guest.queue.next_slot().expect("a slot");
        let at = block as u64 * BLOCK_LEN;
        guest.queue.submit(&Command::Read { at, len: BLOCK_LEN as u32 });
        guest.queue.kick().expect("a kick");
        done.clear();
        while guest.queue.reap(&mut done) == 0 {
            assert!(guest.queue.wait(LIMIT).expect("a wait"), "no answer");
        }
        assert_eq!(done[0].status, 0);
        let bytes = &guest.queue.buffer(slot)[..BLOCK_LEN as usize];
        assert!(holds(*label, bytes), "block {block} is not as it was answered");
    }
    drop(driver);
    disk.stop();
    images.iter().for_each(|image| assert_vhd_valid(image));
}

#[test]
fn a_guest_goes_on_while_its_disk_process_is_killed_again_and_again() {
    killed_under_load(false);
}

#[test]
fn a_guest_with_packed_rings_goes_on_while_its_disk_process_is_killed_again_and_again() {
    killed_under_load(true);
}

#[test]
fn a_process_is_replaced_by_a_command_while_its_guest_works() {
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), DISK_LEN >> 20);
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let host = Host::new(&scratch);
    let mut tap = host.create(&format!("vhd:{}", text(&leaf)));
    let socket = scratch.join("vhost.sock");
    tap.add_vhost_user(&socket);
    let options = DriverOptions { inflight: true, buffer_len: 4096, ..DriverOptions::default() };
    let mut guest = Guest::new(&socket, options);
    let mut random = Random::new(seed());
    let (stop, progress) = (AtomicBool::new(false), AtomicU64::new(0));
    let guest = std::thread::scope(|scope| {
        let (stop, progress) = (&stop, &progress);
        let worker = scope.spawn(move || {
            guest.work(&socket, &mut random, stop, progress);
            guest
        });
        for _ in 0..3 {
            gets_on(progress, &worker, MORE);
            let old = tap.pid;
            let said = run(&mut host.tapio(&["disk", "restart", "-p", &old.to_string()])).ok();
            tap.pid = said.trim().parse().expect("the new process");
            assert_ne!(tap.pid, old);
            assert!(tap.row().is_some(), "the new process has the disk under the same number");
        }
        // The guest has found the last process.
        gets_on(progress, &worker, MORE);
        stop.store(true, Ordering::Relaxed);
        worker.join().expect("the guest saw nothing but pauses")
    });
    println!("{} answers, longest pause {:?}", guest.answers, guest.longest_pause);
    assert_eq!(guest.reconnects, 3);
    // The NBD server that every disk made by tap-ctl has is there again.
    assert!(UnixStream::connect(nbd_socket(&tap)).is_ok(), "{}", tap.uri());
    guest.driver.stop(0).expect("the queue stops");
    drop(guest.driver);
    tap.destroy();
    let refused = run(&mut host.tapio(&["disk", "restart", "-p", "1"])).fails();
    assert!(!refused.is_empty());
    assert_vhd_valid(&leaf);
}

fn nbd_socket(tap: &tapio_e2e::disk::Tap) -> String {
    tap.uri().split_once("socket=").expect("a socket").1.to_owned()
}
