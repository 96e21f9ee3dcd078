//! vhost-user-blk: our back end on a real disk, our driver on the other side.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tapio_block::{CoreOptions, Disk, DiskOptions};
use tapio_front::vhost_user::driver::{Command, Completion, Descriptor, Driver, DriverOptions, DriverQueue};
use tapio_front::vhost_user::{Listen, VhostUserOptions, VhostUserServer, VhostUserState, feature};
use tapio_ring::PollingConfig;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

pub const DISK_LEN: u64 = 16 << 20;
pub const LIMIT: Duration = Duration::from_secs(60);

/// A disk on a raw file in memory, and its server.
pub struct Rig {
    pub directory: tempfile::TempDir,
    pub disk: Disk,
    pub server: Option<VhostUserServer>,
    pub lines: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    pub fn new(disk_len: u64, options: VhostUserOptions, disk_options: DiskOptions) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(disk_len).unwrap();
        let disk = Disk::start(spec(&image, Access::ReadWrite), disk_options).unwrap();
        let mut rig = Self { directory, disk, server: None, lines: Arc::default() };
        rig.listen(options);
        rig
    }

    pub fn small() -> Self {
        Self::new(
            DISK_LEN,
            VhostUserOptions { queues: 4, ..VhostUserOptions::default() },
            DiskOptions::default(),
        )
    }

    pub fn listen(&mut self, options: VhostUserOptions) {
        let lines = Arc::clone(&self.lines);
        let log = Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()));
        let options = VhostUserOptions { log, ..options };
        let socket = self.socket();
        let remote = self.disk.remote().clone();
        self.server = Some(VhostUserServer::listen(Listen::Path(&socket), options, remote).unwrap());
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub fn image(&self) -> std::fs::File {
        std::fs::File::options().read(true).write(true).open(self.directory.path().join("image")).unwrap()
    }

    pub fn state(&self) -> VhostUserState {
        self.server.as_ref().unwrap().state()
    }

    pub fn driver(&self, options: DriverOptions) -> Driver {
        Driver::connect(&self.socket(), options).unwrap()
    }

    /// The back end may still be busy with the end of the last connection.
    pub fn reconnect(&self, driver: &mut Driver) {
        let begun = Instant::now();
        while let Err(error) = driver.reconnect(&self.socket()) {
            assert!(begun.elapsed() < LIMIT, "{error}");
        }
    }

    pub fn until(&self, what: &str, met: impl Fn(&VhostUserState) -> bool) {
        let begin = Instant::now();
        while !met(&self.state()) {
            assert!(begin.elapsed() < LIMIT, "{what}: {:?}", self.state());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub fn spec(image: &std::path::Path, access: Access) -> ChainSpec {
    ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Raw, path: image.to_owned() }], access }
}

/// Submits one request and waits for its answer.
pub fn run(queue: &mut DriverQueue, command: &Command<'_>) -> Completion {
    queue.submit(command).expect("a free slot");
    queue.kick().unwrap();
    next(queue)
}

pub fn next(queue: &mut DriverQueue) -> Completion {
    let mut done = Vec::new();
    let begin = Instant::now();
    while queue.reap(&mut done) == 0 {
        assert!(begin.elapsed() < LIMIT, "no answer in time");
        queue.wait(Duration::from_millis(100)).unwrap();
    }
    assert_eq!(done.len(), 1);
    done[0]
}

pub fn pattern(seed: u64, into: &mut [u8]) {
    let mut state = seed | 1;
    for chunk in into.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

pub fn write_pattern(queue: &mut DriverQueue, at: u64, len: u32, seed: u64) -> u8 {
    let slot = queue.next_slot().unwrap();
    pattern(seed, &mut queue.buffer(slot)[..len as usize]);
    run(queue, &Command::Write { at, len }).status
}

pub fn read(queue: &mut DriverQueue, at: u64, len: u32) -> Vec<u8> {
    let slot = queue.next_slot().unwrap();
    queue.buffer(slot).fill(0xee);
    let done = run(queue, &Command::Read { at, len });
    assert_eq!((done.status, done.written), (0, len + 1));
    queue.buffer(slot)[..len as usize].to_vec()
}

/// Every way of using a ring.
fn ways() -> Vec<DriverOptions> {
    let mut ways = Vec::new();
    for number in 0..8 {
        let (event_index, indirect, packed) = (number & 1 == 0, number & 2 == 0, number & 4 != 0);
        for piece_len in [0, 4096] {
            let mut features = DriverOptions::default().features;
            features &= if event_index { u64::MAX } else { !feature::EVENT_IDX };
            features &= if indirect { u64::MAX } else { !feature::INDIRECT_DESC };
            features |= if packed { feature::RING_PACKED } else { 0 };
            let base =
                DriverOptions { features, piece_len, buffer_len: 64 << 10, ..DriverOptions::default() };
            ways.push(DriverOptions { memory_slots: piece_len > 0, inflight: indirect, ..base });
        }
    }
    ways
}

#[test]
fn data_goes_in_and_comes_back_in_every_way_of_using_a_ring() {
    let rig = Rig::small();
    for (index, options) in ways().into_iter().enumerate() {
        let driver = rig.driver(options.clone());
        assert_eq!(driver.capacity(), DISK_LEN);
        let mut queue = driver.start(0).unwrap();
        for (at, len) in [(0, 512), (4096, 4096), (DISK_LEN - 65536, 65536), (512, 8192 + 512)] {
            let seed = index as u64 * 1000 + at;
            assert_eq!(write_pattern(&mut queue, at, len, seed), 0, "{options:?}");
            let mut want = vec![0; len as usize];
            pattern(seed, &mut want);
            assert!(read(&mut queue, at, len) == want, "{options:?}");
            let mut found = vec![0; len as usize];
            rig.image().read_exact_at(&mut found, at).unwrap();
            assert!(found == want, "the image holds what the guest wrote");
        }
        assert_eq!(run(&mut queue, &Command::Flush).status, 0);
        drop(driver);
        rig.until("the connection ends", |state| !state.connected);
    }
    assert_eq!(rig.lines.lock().unwrap().clone(), Vec::<String>::new());
}

#[test]
fn several_queues_work_at_once_and_mix_nothing_up() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions { queues: 4, ..DriverOptions::default() });
    let queues: Vec<_> = (0..4).map(|index| driver.start(index).unwrap()).collect();
    std::thread::scope(|scope| {
        for (index, mut queue) in queues.into_iter().enumerate() {
            scope.spawn(move || {
                verified_load(&mut queue, index as u64 * (4 << 20), 4 << 20, 3000, index as u64);
            });
        }
    });
    assert_eq!(rig.state().queues_running, 4);
}

/// Random writes and reads of 4 KiB blocks at full depth, every read compared with what was written last.
pub fn verified_load(queue: &mut DriverQueue, start: u64, len: u64, count: usize, seed: u64) {
    let blocks = len / 4096;
    let mut content = vec![0u64; blocks as usize];
    let mut busy = vec![false; blocks as usize];
    let mut under_way = std::collections::BTreeMap::new();
    let (mut state, mut issued, mut done) = (seed * 2 + 1, 0, Vec::new());
    let begin = Instant::now();
    while issued < count || !under_way.is_empty() {
        assert!(
            begin.elapsed() < LIMIT * 3,
            "the load does not end: {issued} issued, {} in flight",
            under_way.len()
        );
        while issued < count && queue.room() > 0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = (state >> 33) % blocks;
            if busy[block as usize] {
                break;
            }
            busy[block as usize] = true;
            let slot = queue.next_slot().unwrap();
            let at = start + block * 4096;
            let write = state >> 60 & 1 == 0;
            let command = if write {
                content[block as usize] = state;
                pattern(state, &mut queue.buffer(slot)[..4096]);
                Command::Write { at, len: 4096 }
            } else {
                Command::Read { at, len: 4096 }
            };
            assert_eq!(queue.submit(&command), Some(slot));
            under_way.insert(slot, (block, write));
            issued += 1;
        }
        queue.kick().unwrap();
        done.clear();
        if queue.reap(&mut done) == 0 {
            queue.wait(Duration::from_millis(200)).unwrap();
            continue;
        }
        for completion in &done {
            let (block, write) = under_way.remove(&completion.slot).expect("an answer to something asked");
            assert_eq!(completion.status, 0);
            busy[block as usize] = false;
            if !write {
                let mut want = vec![0; 4096];
                if content[block as usize] != 0 {
                    pattern(content[block as usize], &mut want);
                }
                assert!(queue.buffer(completion.slot)[..4096] == want, "block {block} holds something else");
            }
        }
    }
}

#[test]
fn a_polling_disk_serves_the_same() {
    let polling = PollingConfig { max_ns: 100_000, idle_min_percent: 0 };
    let options = DiskOptions { polling, ..DiskOptions::default() };
    let rig = Rig::new(DISK_LEN, VhostUserOptions::default(), options);
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    verified_load(&mut queue, 0, DISK_LEN, 3000, 7);
}

#[test]
fn discards_and_zeroes_reach_the_image() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    for at in (0..1 << 20).step_by(65536) {
        assert_eq!(write_pattern(&mut queue, at, 65536, at + 1), 0);
    }
    let discard = Command::Discard(&[(0, 65536), (131_072, 65536), (262_144, 4096)]);
    assert_eq!(run(&mut queue, &discard).status, 0);
    let zero = Command::WriteZeroes { ranges: &[(65536, 8192), (524_288, 512)], unmap: true };
    assert_eq!(run(&mut queue, &zero).status, 0);
    assert_eq!(read(&mut queue, 65536, 8192), vec![0; 8192]);
    assert_eq!(read(&mut queue, 524_288, 512), vec![0; 512]);
    let mut want = vec![0; 65536];
    pattern(65537, &mut want);
    assert_eq!(read(&mut queue, 65536 + 8192, 4096), want[8192..12288], "the neighbours stay");
    // Outside the disk, and one range good while the other is not.
    assert_eq!(run(&mut queue, &Command::Discard(&[(0, 512), (DISK_LEN, 512)])).status, 1);
    assert_eq!(run(&mut queue, &Command::Raw { kind: 11, sector: 0 }).status, 1);
}

#[test]
fn a_disk_with_sectors_of_4096_bytes_says_so_in_its_configuration_space() {
    let core = CoreOptions { sector_len: Some(4096), ..CoreOptions::default() };
    let disk_options = DiskOptions { core, ..DiskOptions::default() };
    let rig = Rig::new(DISK_LEN, VhostUserOptions::default(), disk_options);
    let driver = rig.driver(DriverOptions { features: u64::MAX, ..DriverOptions::default() });
    assert_ne!(driver.features() & feature::BLK_SIZE, 0);
    assert_eq!(driver.config()[20..24], 4096_u32.to_le_bytes(), "blk_size");
    assert_eq!(
        driver.config()[44..48],
        8_u32.to_le_bytes(),
        "discards of whole sectors, in units of 512 bytes"
    );
    assert_eq!(driver.capacity(), DISK_LEN, "in units of 512 bytes");
    let mut queue = driver.start(0).unwrap();
    verified_load(&mut queue, 0, DISK_LEN, 200, 3);
    assert_eq!(write_pattern(&mut queue, DISK_LEN - 4096, 4096, 5), 0, "the last one");
    let zero = Command::WriteZeroes { ranges: &[(0, 4096)], unmap: true };
    assert_eq!(run(&mut queue, &zero).status, 0);
    assert_eq!(read(&mut queue, 0, 4096), vec![0; 4096]);
}

#[test]
fn the_identity_is_the_serial_and_odd_requests_are_answered() {
    let options =
        VhostUserOptions { serial: "7d0c9c1a-tapio-disk-with-a-long-name".into(), ..Default::default() };
    let rig = Rig::new(DISK_LEN, options, DiskOptions::default());
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    let slot = queue.next_slot().unwrap();
    let done = run(&mut queue, &Command::Identity);
    assert_eq!((done.status, done.written), (0, 21));
    assert_eq!(queue.buffer(slot)[..20], *b"7d0c9c1a-tapio-disk-");
    for kind in [2, 9, 10, 14, 16, 26, u32::MAX] {
        assert_eq!(run(&mut queue, &Command::Raw { kind, sector: 0 }).status, 2, "type {kind}");
    }
    assert_eq!(run(&mut queue, &Command::Raw { kind: 0, sector: 0 }).status, 1, "a read of nothing");
    assert_eq!(run(&mut queue, &Command::Read { at: DISK_LEN, len: 512 }).status, 1);
    assert_eq!(run(&mut queue, &Command::Read { at: DISK_LEN - 512, len: 1024 }).status, 1);
    assert_eq!(run(&mut queue, &Command::Read { at: 0, len: 100 }).status, 1, "not whole sectors");
    assert_eq!(run(&mut queue, &Command::Read { at: u64::MAX / 512 * 512, len: 512 }).status, 1);
    assert_eq!(run(&mut queue, &Command::Flush).status, 0, "and it still works");
}

#[test]
fn a_read_only_disk_refuses_to_change() {
    let options = VhostUserOptions { read_only: true, ..Default::default() };
    let rig = Rig::new(DISK_LEN, options, DiskOptions::default());
    let driver = rig.driver(DriverOptions::default());
    assert_ne!(driver.features() & feature::RO, 0);
    assert_eq!(driver.features() & (feature::DISCARD | feature::WRITE_ZEROES), 0);
    let mut queue = driver.start(0).unwrap();
    assert_eq!(write_pattern(&mut queue, 0, 4096, 1), 1);
    assert_eq!(run(&mut queue, &Command::Discard(&[(0, 512)])).status, 2);
    assert_eq!(read(&mut queue, 0, 4096), vec![0; 4096]);
}

#[test]
fn the_write_cache_can_be_switched() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions { features: u64::MAX, ..DriverOptions::default() });
    let mut queue = driver.start(0).unwrap();
    assert_eq!(driver.read_config().unwrap()[32], 1);
    driver.write_config(32, &[0]).unwrap();
    assert_eq!(driver.read_config().unwrap()[32], 0);
    assert_eq!(write_pattern(&mut queue, 0, 4096, 5), 0);
    assert!(driver.write_config(0, &[0]).is_err(), "the capacity is not the driver's to change");
    assert_eq!(write_pattern(&mut queue, 4096, 4096, 5), 0, "a refused message harms nothing");
}

#[test]
fn a_queue_stops_under_load_with_nothing_lost_and_goes_on_where_it_stood() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    let mut done = Vec::new();
    let mut issued = 0u16;
    for round in 0..200 {
        while queue.room() > 0 {
            queue.submit(&Command::Read { at: u64::from(issued % 1024) * 4096, len: 4096 });
            issued = issued.wrapping_add(1);
        }
        queue.kick().unwrap();
        if round % 20 == 7 {
            let base = driver.stop(0).unwrap();
            queue.reap(&mut done);
            assert_eq!(base, queue.base(), "everything taken was answered, nothing else");
            assert!(!queue.wait(Duration::from_millis(5)).unwrap(), "a stopped queue stands still");
            driver.resume(0, &queue, base).unwrap();
            queue.kick_always().unwrap();
            queue.reap(&mut done);
        }
        if queue.room() < 32 {
            queue.wait(Duration::from_secs(5)).unwrap();
        }
        queue.reap(&mut done);
    }
    let begin = Instant::now();
    while queue.room() < 32 {
        assert!(begin.elapsed() < LIMIT, "requests were lost");
        queue.wait(Duration::from_millis(100)).unwrap();
        queue.reap(&mut done);
    }
    assert!(done.iter().all(|completion| completion.status == 0));
    assert_eq!(queue.seen_used(), issued);
}

#[test]
fn memory_is_shared_anew_under_load() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    std::thread::scope(|scope| {
        let load = scope.spawn(move || verified_load(&mut queue, 0, DISK_LEN, 5000, 3));
        while !load.is_finished() {
            driver.share_memory().unwrap();
        }
        load.join().unwrap();
    });
}

#[test]
fn a_disabled_queue_waits() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    driver.enable(0, false).unwrap();
    queue.submit(&Command::Flush).unwrap();
    queue.kick_always().unwrap();
    assert!(!queue.wait(Duration::from_millis(50)).unwrap());
    driver.enable(0, true).unwrap();
    assert_eq!(next(&mut queue).status, 0, "enabling looks into the ring, without another kick");
}

#[test]
fn a_paused_disk_leaves_requests_in_the_ring_and_a_resumed_one_finds_them() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    assert_eq!(write_pattern(&mut queue, 0, 4096, 9), 0);
    rig.disk.pause(LIMIT).unwrap();
    queue.submit(&Command::Read { at: 0, len: 4096 }).unwrap();
    queue.kick_always().unwrap();
    assert!(!queue.wait(Duration::from_millis(100)).unwrap());
    // A queue can be stopped meanwhile: the request was not taken.
    assert_eq!(driver.stop(0).unwrap(), 1);
    driver.resume(0, &queue, 1).unwrap();
    rig.disk.resume(spec(&rig.directory.path().join("image"), Access::ReadWrite), LIMIT).unwrap();
    assert_eq!(next(&mut queue).status, 0);
}

#[test]
fn one_front_end_after_the_other() {
    let rig = Rig::small();
    for round in 0..20 {
        let driver = rig.driver(DriverOptions { inflight: round % 2 == 0, ..DriverOptions::default() });
        let mut queue = driver.start(0).unwrap();
        // Leave with requests in flight.
        for block in 0..32 {
            queue.submit(&Command::Read { at: block * 4096, len: 4096 }).unwrap();
        }
        queue.kick().unwrap();
        drop(driver);
    }
    rig.until("the last connection ends", |state| state.connections == 20 && !state.connected);
    assert_eq!(rig.lines.lock().unwrap().clone(), Vec::<String>::new());
}

#[test]
fn a_restarted_back_end_answers_what_the_first_took() {
    let mut rig = Rig::small();
    let mut driver = rig.driver(DriverOptions { inflight: true, ..DriverOptions::default() });
    let mut queue = driver.start(0).unwrap();
    let mut issued = 0u16;
    let mut done = Vec::new();
    for _ in 0..20 {
        while queue.room() > 0 {
            queue.submit(&Command::Read { at: u64::from(issued % 1024) * 4096, len: 4096 });
            issued = issued.wrapping_add(1);
        }
        queue.kick().unwrap();
        // The server goes with requests in flight; another takes its place.
        rig.server.take().unwrap().close();
        rig.listen(VhostUserOptions::default());
        rig.reconnect(&mut driver);
        // The front end does not know how far the ring was read: the region does.
        driver.resume(0, &queue, queue.base()).unwrap();
        queue.kick_always().unwrap();
        queue.reap(&mut done);
    }
    let begin = Instant::now();
    while queue.room() < 32 {
        assert!(begin.elapsed() < LIMIT, "requests were lost");
        queue.wait(Duration::from_millis(100)).unwrap();
        queue.reap(&mut done);
    }
    assert_eq!(done.len(), usize::from(issued), "every request was answered once");
    assert!(done.iter().all(|completion| completion.status == 0));
}

#[test]
fn requests_in_the_region_are_repeated_in_order() {
    let rig = Rig::small();
    let mut driver = rig.driver(DriverOptions { inflight: true, depth: 4, ..DriverOptions::default() });
    let mut queue = driver.start(0).unwrap();
    assert_eq!(write_pattern(&mut queue, 0, 512, 1), 0);
    driver.stop(0).unwrap();
    // Play a back end that took three requests, answered none and died: mark them in the region.
    for _ in 0..3 {
        queue.submit(&Command::Read { at: 0, len: 512 }).unwrap();
    }
    driver.mark_in_flight(0, &[0, 1, 2]).unwrap();
    rig.reconnect(&mut driver);
    driver.resume(0, &queue, 0).unwrap();
    let mut done = Vec::new();
    let begin = Instant::now();
    while done.len() < 3 {
        assert!(begin.elapsed() < LIMIT, "{done:?}");
        queue.wait(Duration::from_millis(100)).unwrap();
        queue.reap(&mut done);
    }
    assert!(done.iter().all(|completion| completion.status == 0), "{done:?}");
    assert_eq!(write_pattern(&mut queue, 0, 512, 1), 0, "and it goes on from there");
}

#[test]
fn a_request_larger_than_the_disk_takes_at_once_goes_in_parts() {
    let large = 64 << 20 | 4096;
    let rig = Rig::new(80 << 20, VhostUserOptions::default(), DiskOptions::default());
    assert!(rig.disk.geometry().transfer_max < large);
    let options = DriverOptions { depth: 1, buffer_len: large, ..DriverOptions::default() };
    let driver = rig.driver(options);
    let mut queue = driver.start(0).unwrap();
    assert_eq!(write_pattern(&mut queue, 512, large, 77), 0);
    let mut want = vec![0; large as usize];
    pattern(77, &mut want);
    assert!(read(&mut queue, 512, large) == want);
}

/// A hostile guest gets an error or breaks its own queue; its neighbour works on.
#[test]
fn hostile_rings_hurt_only_themselves() {
    type Attack = fn(&mut DriverQueue);
    let attacks: [(&str, Attack); 8] = [
        ("a jump of the index", |queue| queue.jump_avail(5000)),
        ("a head outside the table", |queue| queue.put_avail(128)),
        ("a circle", |queue| {
            queue.put_descriptor(0, Descriptor { at: 0x4000_0000, len: 16, flags: 1, next: 0 });
            queue.put_avail(0);
        }),
        ("a successor outside", |queue| {
            queue.put_descriptor(0, Descriptor { at: 0x4000_0000, len: 16, flags: 1, next: 999 });
            queue.put_avail(0);
        }),
        ("no status byte", |queue| {
            queue.put_descriptor(0, Descriptor { at: 0x4000_0000, len: 16, flags: 0, next: 0 });
            queue.put_avail(0);
        }),
        ("a status byte outside memory", |queue| {
            queue.put_descriptor(0, Descriptor { at: 0xdead_0000_0000, len: 1, flags: 2, next: 0 });
            queue.put_avail(0);
        }),
        ("an indirect table outside memory", |queue| {
            queue.put_descriptor(0, Descriptor { at: u64::MAX - 8, len: 32, flags: 4, next: 0 });
            queue.put_avail(0);
        }),
        ("an indirect table of odd length", |queue| {
            queue.put_descriptor(0, Descriptor { at: 0x4000_0000, len: 33, flags: 4, next: 0 });
            queue.put_avail(0);
        }),
    ];
    for (name, attack) in attacks {
        let rig = Rig::small();
        let driver = rig.driver(DriverOptions { queues: 2, ..DriverOptions::default() });
        let (mut bad, mut good) = (driver.start(0).unwrap(), driver.start(1).unwrap());
        assert_eq!(run(&mut good, &Command::Flush).status, 0);
        attack(&mut bad);
        bad.kick_always().unwrap();
        assert!(bad.wait_broken(LIMIT).unwrap(), "{name}: the front end is told");
        assert_eq!(write_pattern(&mut good, 0, 4096, 3), 0, "{name}: the other queue works on");
        // The thread of the queue answers this only when it has reported.
        driver.stop(0).unwrap();
        let lines = rig.lines.lock().unwrap().clone();
        assert_eq!(lines.len(), 1, "{name}: {lines:?}");
    }
}

#[test]
fn a_head_given_twice_breaks_the_queue_and_answers_once() {
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let mut queue = driver.start(0).unwrap();
    rig.disk.pause(LIMIT).unwrap();
    queue.submit(&Command::Read { at: 0, len: 65536 }).unwrap();
    queue.put_avail(0);
    queue.kick_always().unwrap();
    rig.disk.resume(spec(&rig.directory.path().join("image"), Access::ReadWrite), LIMIT).unwrap();
    assert!(queue.wait_broken(LIMIT).unwrap());
    assert_eq!(next(&mut queue).status, 0);
}

#[test]
fn malformed_messages_end_the_connection_with_one_line() {
    let rig = Rig::small();
    let cases: [(u32, Vec<u8>); 6] = [
        (99, vec![]),
        (5, vec![9, 0, 0, 0, 0, 0, 0, 0]),
        (8, vec![0; 7]),
        (8, [0u32.to_ne_bytes(), 3u32.to_ne_bytes()].concat()),
        (11, [77u32.to_ne_bytes(), 0u32.to_ne_bytes()].concat()),
        (2, u64::MAX.to_ne_bytes().to_vec()),
    ];
    for (index, (request, payload)) in cases.into_iter().enumerate() {
        let driver = rig.driver(DriverOptions::default());
        let queue = driver.start(0).unwrap();
        driver.send_raw(request, &payload, &[]).unwrap();
        rig.until("the connection ends", |state| !state.connected && state.connections == index as u64 + 1);
        drop(queue);
        assert_eq!(rig.lines.lock().unwrap().len(), index + 1, "{:?}", rig.lines.lock().unwrap());
        assert!(rig.state().last_error.is_some());
    }
    let driver = rig.driver(DriverOptions::default());
    assert_eq!(run(&mut driver.start(0).unwrap(), &Command::Flush).status, 0);
}

#[test]
fn a_path_in_use_is_not_taken_and_one_left_behind_is() {
    let mut rig = Rig::small();
    let listen = |rig: &Rig| {
        let remote = rig.disk.remote().clone();
        VhostUserServer::listen(Listen::Path(&rig.socket()), VhostUserOptions::default(), remote)
    };
    let error = listen(&rig).unwrap_err();
    assert!(error.to_string().contains("another process serves this socket"), "{error}");
    let begin = Instant::now();
    rig.server.take().unwrap().close();
    assert!(begin.elapsed() < LIMIT);
    assert!(!rig.socket().exists(), "the path goes with the server");
    drop(std::os::unix::net::UnixListener::bind(rig.socket()).unwrap());
    assert!(rig.socket().exists());
    drop(listen(&rig).unwrap());
    std::fs::write(rig.socket(), b"not a socket").unwrap();
    let error = listen(&rig).unwrap_err();
    assert!(error.to_string().contains("not a socket"), "{error}");
}

#[test]
fn a_socket_that_listens_already_is_taken_over() {
    let rig = Rig::small();
    let path = rig.directory.path().join("other");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let remote = rig.disk.remote().clone();
    let server =
        VhostUserServer::listen(Listen::Socket(listener.into()), VhostUserOptions::default(), remote)
            .unwrap();
    let driver = Driver::connect(&path, DriverOptions::default()).unwrap();
    assert_eq!(run(&mut driver.start(0).unwrap(), &Command::Flush).status, 0);
    drop(driver);
    server.close();
    assert!(path.exists(), "what we did not bind we do not remove");
}

#[test]
fn the_front_end_hears_of_a_resize() {
    use std::io::Read;
    use std::os::fd::AsFd;
    let rig = Rig::small();
    let driver = rig.driver(DriverOptions::default());
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    let resize = |len| {
        let set = move |data_thread: &tapio_block::Owner| {
            let geometry = data_thread.port.geometry();
            data_thread.port.set_geometry(tapio_block::Geometry { len, ..geometry });
        };
        rig.disk.remote().call(LIMIT, set).unwrap();
    };
    resize(DISK_LEN * 2);
    assert_eq!(driver.read_config().unwrap()[..8], (DISK_LEN * 2 / 512).to_le_bytes());
    driver.send_raw(21, &[], &[theirs.as_fd()]).unwrap();
    drop(theirs);
    // Messages are obeyed in order: once this one is answered, the socket has been taken.
    driver.read_config().unwrap();
    for len in [DISK_LEN * 3, DISK_LEN * 4] {
        resize(len);
        let mut message = [0; 12];
        ours.read_exact(&mut message).unwrap();
        assert_eq!(message, [[2, 0, 0, 0], [1, 0, 0, 0], [0; 4]].concat()[..]);
        assert_eq!(driver.read_config().unwrap()[..8], (len / 512).to_le_bytes());
    }
    // A front end that is gone is no longer told, the next one is.
    drop(driver);
    assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0, "the socket goes with the connection");
    resize(DISK_LEN);
    assert_eq!(rig.driver(DriverOptions::default()).capacity(), DISK_LEN);
}

/// A limit that lets one request through an hour; a stop of a queue lets in what was taken, on every thread.
#[test]
fn a_queue_that_stops_does_not_wait_for_a_limit_whichever_thread_serves_it() {
    let disk_options = DiskOptions { threads: 2, ..DiskOptions::default() };
    let rig = Rig::new(DISK_LEN, VhostUserOptions { queues: 2, ..VhostUserOptions::default() }, disk_options);
    let driver = rig.driver(DriverOptions { queues: 2, ..DriverOptions::default() });
    for index in 0..2 {
        let mut queue = driver.start(index).unwrap();
        assert_eq!(run(&mut queue, &Command::Flush).status, 0);
        let limits = tapio_types::IoLimits { bps: 1, burst_bytes: 4096, ..Default::default() };
        let set = move |owner: &tapio_block::Owner| owner.admission().set_limits(&limits);
        rig.disk.remote().call(LIMIT, set).unwrap();
        for at in 0..8u64 {
            queue.submit(&Command::Read { at: at * 4096, len: 4096 }).unwrap();
        }
        queue.kick().unwrap();
        // Some pass; from then on the disk owes.
        let mut done = Vec::new();
        while queue.reap(&mut done) == 0 {
            assert!(queue.wait(LIMIT).unwrap(), "no answer in time");
        }
        assert!(done.len() < 8, "the limit holds the others back");
        driver.stop(index).unwrap();
        let off =
            |owner: &tapio_block::Owner| owner.admission().set_limits(&tapio_types::IoLimits::default());
        rig.disk.remote().call(LIMIT, off).unwrap();
    }
}
