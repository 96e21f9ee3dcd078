//! Rings of Xen guests: our back end on a real disk, our front end in a double of the hypervisor on the other side.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tapio_block::{Disk, DiskOptions};
use tapio_fixtures::counting::allocations;
use tapio_front::blkif::{BlkifOptions, BlkifRing, BlkifServer, QueueCounts, QueueReport, Start};
use tapio_load::{Load, Mix};
use tapio_ring::PollingConfig;
use tapio_types::Movement;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use tapio_xen::blkfront::{Blkfront, Command, Completion, FrontOptions, FrontQueue, Invitation};
use tapio_xen::blkif::{Abi, status};
use tapio_xen::double::Guest;
use tapio_xen::{Channel, Domain};

pub const DISK_LEN: u64 = 16 << 20;
pub const LIMIT: Duration = Duration::from_secs(60);
const DOMID: u32 = 5;

/// How a test wants its device.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub movement: Movement,
    pub max_indirect: u16,
    pub sector_size: u32,
    pub read_only: bool,
    pub start: Start,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            movement: Movement::Copy,
            max_indirect: 256,
            sector_size: 512,
            read_only: false,
            start: Start::Auto,
        }
    }
}

/// A disk on a raw file in memory, and its device.
pub struct Rig {
    pub directory: tempfile::TempDir,
    pub disk: Option<Disk>,
    pub server: Option<BlkifServer>,
    pub lines: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    pub fn new(options: DiskOptions) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::File::create(directory.path().join("image")).unwrap().set_len(DISK_LEN).unwrap();
        let mut rig = Self { directory, disk: None, server: None, lines: Arc::default() };
        rig.open(options);
        rig
    }

    pub fn open(&mut self, options: DiskOptions) {
        let layer = LayerSpec { kind: ImageKind::Raw, path: self.directory.path().join("image") };
        let chain = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
        self.disk = Some(Disk::start(chain, options).unwrap());
    }

    pub fn record(&self) -> PathBuf {
        self.directory.path().join("record")
    }

    pub fn image(&self) -> std::fs::File {
        std::fs::File::options().read(true).write(true).open(self.directory.path().join("image")).unwrap()
    }

    pub fn options(&self, invitation: Invitation, wanted: &Wanted) -> BlkifOptions {
        let domain = Domain::Double(Guest::from_fd(invitation.memory, DOMID).unwrap());
        let rings = invitation.rings.into_iter().enumerate().map(|(index, ring)| BlkifRing {
            pages: ring.ring,
            responses: ring.responses,
            port: index as u32,
            channel: Channel::Double(ring.wire),
        });
        let lines = Arc::clone(&self.lines);
        BlkifOptions {
            domain,
            abi: invitation.abi,
            rings: rings.collect(),
            movement: wanted.movement,
            max_indirect: wanted.max_indirect,
            sector_size: wanted.sector_size,
            read_only: wanted.read_only,
            record: Some(self.record()),
            start: wanted.start,
            log: Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned())),
            on_ring: None,
        }
    }

    pub fn connect(&mut self, invitation: Invitation, wanted: &Wanted) {
        let options = self.options(invitation, wanted);
        let remote = self.disk.as_ref().unwrap().remote().clone();
        self.server = Some(BlkifServer::connect(options, remote).unwrap());
    }

    pub fn rings(&self) -> Vec<QueueReport> {
        self.server.as_ref().unwrap().state().unwrap().rings
    }

    pub fn counts(&self) -> QueueCounts {
        self.rings()[0].counts
    }

    /// Waits until something is so.
    pub fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what} did not come true");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn close(&mut self) -> bool {
        self.server.take().unwrap().close()
    }
}

/// A rig with one front end on it, and its first queue.
pub fn rig(front: FrontOptions, wanted: &Wanted) -> (Rig, Blkfront, Vec<FrontQueue>) {
    let mut rig = Rig::new(DiskOptions::default());
    let mut blkfront = Blkfront::new(front).unwrap();
    rig.connect(blkfront.invitation().unwrap(), wanted);
    let queues = blkfront.take_queues();
    (rig, blkfront, queues)
}

pub fn fill(queue: &mut FrontQueue, mark: u8) {
    let slot = queue.next_slot().unwrap();
    queue.buffer(slot).fill(mark);
}

pub fn ok(queue: &mut FrontQueue, command: &Command) -> Completion {
    let done = queue.ask(command).unwrap();
    assert_eq!(done.status, status::OKAY, "{command:?}");
    done
}

/// What a block at that place must hold after `round`.
fn pattern(at: u64, round: u64) -> Vec<u8> {
    let word = (at ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    word.iter().copied().cycle().take(4096).collect()
}

/// Writes and reads back requests of many sizes at once, and compares the image.
fn write_and_verify(rig: &Rig, queue: &mut FrontQueue, sector: u64, round: u64) {
    let most = u64::from(queue.request_len_max());
    let mut at = 0;
    let mut wanted = Vec::new();
    let mut done = Vec::new();
    let lens = [sector, 4096, 8192, 3 * sector.max(4096), most];
    while wanted.len() < 40 {
        let len = lens[wanted.len() % lens.len()].min(most);
        let bytes: Vec<u8> =
            (0..len / 512).flat_map(|block| pattern(at + block * 512, round)[..512].to_vec()).collect();
        while queue.room() == 0 {
            queue.kick().unwrap();
            assert!(queue.wait(LIMIT).unwrap());
            queue.reap(&mut done).unwrap();
        }
        loop {
            let slot = queue.next_slot().unwrap();
            queue.buffer(slot)[..len as usize].copy_from_slice(&bytes);
            if queue.submit(&Command::Write { at, len: len as u32 }).unwrap().is_some() {
                break;
            }
            // A split ring has fewer slots than there may be requests.
            queue.kick().unwrap();
            assert!(queue.wait(LIMIT).unwrap());
            queue.reap(&mut done).unwrap();
        }
        wanted.push((at, bytes));
        at += len;
    }
    queue.kick().unwrap();
    while done.len() < wanted.len() {
        assert!(queue.wait(LIMIT).unwrap());
        queue.reap(&mut done).unwrap();
    }
    assert!(done.iter().all(|done| done.status == status::OKAY), "{done:?}");
    let image = rig.image();
    for (at, bytes) in &wanted {
        let mut there = vec![0; bytes.len()];
        image.read_exact_at(&mut there, *at).unwrap();
        assert!(there == *bytes, "{} bytes at {at}", bytes.len());
        let done = ok(queue, &Command::Read { at: *at, len: bytes.len() as u32 });
        assert!(
            queue.buffer(done.slot.unwrap())[..bytes.len()] == bytes[..],
            "{} bytes at {at}",
            bytes.len()
        );
    }
}

#[test]
fn every_layout_order_and_way_of_moving_data_moves_it() {
    for movement in [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce] {
        for abi in [Abi::X86_32, Abi::X86_64] {
            for order in 0..4 {
                let front = FrontOptions {
                    abi,
                    order,
                    persistent: movement == Movement::Persistent,
                    ..FrontOptions::default()
                };
                let (mut rig, front, mut queues) = rig(front, &Wanted { movement, ..Wanted::default() });
                write_and_verify(&rig, &mut queues[0], 512, u64::from(order));
                let counts = rig.counts();
                assert_eq!((counts.requests, counts.responses), (80, 80));
                match movement {
                    Movement::Copy => assert!(counts.moves.copy_calls > 0 && counts.moves.maps == 0),
                    Movement::Persistent => {
                        assert!(counts.persistent.hits > 0 && counts.moves.copy_calls == 0);
                    }
                    Movement::Map | Movement::Bounce => {
                        assert!(counts.moves.maps >= 80 && counts.moves.copy_calls == 0);
                    }
                }
                assert!(rig.close());
                assert_eq!(
                    queues[0].stuck_grants(),
                    0,
                    "{movement:?}: nothing stays mapped behind an answer"
                );
                drop(front);
            }
        }
    }
}

#[test]
fn indirect_requests_and_large_sectors() {
    for (indirect, segment_len, sector_size) in
        [(256, 4096, 512), (4096, 4096, 4096), (512, 512, 512), (512, 512, 4096), (12, 4096, 512)]
    {
        for movement in [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce] {
            let front = FrontOptions {
                indirect,
                segment_len,
                sector_size,
                depth: 4,
                buffer_len: (u32::from(indirect) * segment_len).min(512 << 10),
                persistent: movement == Movement::Persistent,
                ..FrontOptions::default()
            };
            let wanted = Wanted { movement, max_indirect: indirect, sector_size, ..Wanted::default() };
            let (mut rig, _front, mut queues) = rig(front, &wanted);
            write_and_verify(&rig, &mut queues[0], sector_size.into(), 7);
            assert!(rig.close());
        }
    }
}

#[test]
fn split_rings_carry_the_same() {
    for (order, responses) in [(0, 0), (0, 2), (3, 3)] {
        let front = FrontOptions { order, split: Some(responses), depth: 64, ..FrontOptions::default() };
        let (mut rig, _front, mut queues) = rig(front, &Wanted::default());
        write_and_verify(&rig, &mut queues[0], 512, 3);
        assert!(rig.close());
    }
}

#[test]
fn many_rings_are_served_side_by_side() {
    let front = FrontOptions { queues: 4, depth: 16, ..FrontOptions::default() };
    let (mut rig, _front, mut queues) = rig(front, &Wanted::default());
    let span = DISK_LEN / 4;
    std::thread::scope(|scope| {
        for (index, queue) in queues.iter_mut().enumerate() {
            scope.spawn(move || {
                for round in 0..20 {
                    let at = index as u64 * span + round * 40960;
                    let slot = queue.next_slot().unwrap();
                    queue.buffer(slot).fill(index as u8 * 32 + round as u8);
                    ok(queue, &Command::Write { at, len: 40960 });
                    let done = ok(queue, &Command::Read { at, len: 40960 });
                    let mark = index as u8 * 32 + round as u8;
                    assert!(queue.buffer(done.slot.unwrap())[..40960].iter().all(|byte| *byte == mark));
                }
            });
        }
    });
    for ring in rig.rings() {
        assert_eq!((ring.counts.requests, ring.counts.responses, ring.in_flight), (40, 40, 0));
    }
    assert!(rig.close());
    assert!(!rig.record().exists(), "nothing is in flight");
}

#[test]
fn one_wake_up_copies_by_one_call_each_way() {
    let front = FrontOptions { indirect: 64, buffer_len: 64 * 4096, ..FrontOptions::default() };
    let (mut rig, _front, mut queues) = rig(front, &Wanted::default());
    let queue = &mut queues[0];
    let mut done = Vec::new();
    for index in 0..32 {
        let command = Command::Write { at: index * 64 * 4096, len: 64 * 4096 };
        queue.submit(&command).unwrap().unwrap();
    }
    queue.kick().unwrap();
    while done.len() < 32 {
        assert!(queue.wait(LIMIT).unwrap());
        queue.reap(&mut done).unwrap();
    }
    let moves = rig.counts().moves;
    // The thread may have woken before all were there; but the ring was shown at once.
    assert_eq!(moves.copied_segments, 32 + 32 * 64);
    assert!(moves.copy_calls <= 4, "{moves:?}: one for the segments, one for the data");
    assert!(rig.close());
}

#[test]
fn flush_barrier_and_discard_do_what_they_say() {
    for movement in [Movement::Copy, Movement::Map] {
        let (mut rig, _front, mut queues) =
            rig(FrontOptions::default(), &Wanted { movement, ..Wanted::default() });
        let queue = &mut queues[0];
        fill(queue, 0x11);
        ok(queue, &Command::Write { at: 0, len: 8192 });
        ok(queue, &Command::Flush);
        fill(queue, 0x22);
        ok(queue, &Command::Barrier { at: 4096, len: 4096 });
        ok(queue, &Command::Barrier { at: 0, len: 0 });
        let done = ok(queue, &Command::Read { at: 0, len: 8192 });
        let seen = queue.buffer(done.slot.unwrap()).to_vec();
        assert!(
            seen[..4096].iter().all(|byte| *byte == 0x11)
                && seen[4096..8192].iter().all(|byte| *byte == 0x22)
        );
        ok(queue, &Command::Discard { at: 0, len: 8192, secure: false });
        let done = ok(queue, &Command::Read { at: 0, len: 8192 });
        assert!(queue.buffer(done.slot.unwrap())[..8192].iter().all(|byte| *byte == 0));
        let refused = queue.ask(&Command::Discard { at: 0, len: 8192, secure: true }).unwrap();
        assert_eq!(refused.status, status::EOPNOTSUPP);
        assert!(rig.close());
    }
}

/// Writes before a barrier are there when the barrier is, and those after it come later: to one place, in one batch.
#[test]
fn a_barrier_has_its_place_among_writes() {
    let (mut rig, _front, mut queues) = rig(FrontOptions::default(), &Wanted::default());
    let queue = &mut queues[0];
    for round in 0..50u8 {
        let mut done = Vec::new();
        for (mark, barrier) in [(1, false), (2, true), (3, false), (4, true), (5, false)] {
            fill(queue, round.wrapping_add(mark));
            let command = match barrier {
                true => Command::Barrier { at: 0, len: 40960 },
                false => Command::Write { at: 0, len: 40960 },
            };
            queue.submit(&command).unwrap().unwrap();
        }
        queue.kick().unwrap();
        while done.len() < 5 {
            assert!(queue.wait(LIMIT).unwrap());
            queue.reap(&mut done).unwrap();
        }
        let order: Vec<u32> = done.iter().map(|done| FrontQueue::slot_of(done.id)).collect();
        assert!(done.iter().all(|done| done.status == status::OKAY), "{done:?}");
        let read = ok(queue, &Command::Read { at: 0, len: 40960 });
        let mark = round.wrapping_add(5);
        let seen = &queue.buffer(read.slot.unwrap())[..40960];
        assert!(
            seen.iter().all(|byte| *byte == mark),
            "round {round}, answers of {order:?}: {:?}",
            &seen[..4]
        );
    }
    assert!(rig.close());
}

#[test]
fn a_device_that_may_only_be_read_is() {
    let (mut rig, _front, mut queues) =
        rig(FrontOptions::default(), &Wanted { read_only: true, ..Wanted::default() });
    let queue = &mut queues[0];
    rig.image().write_all_at(&[9; 4096], 4096).unwrap();
    for command in [
        Command::Write { at: 0, len: 4096 },
        Command::Barrier { at: 0, len: 4096 },
        Command::Discard { at: 0, len: 4096, secure: false },
    ] {
        assert_eq!(queue.ask(&command).unwrap().status, status::ERROR, "{command:?}");
    }
    let done = ok(queue, &Command::Read { at: 4096, len: 4096 });
    assert!(queue.buffer(done.slot.unwrap())[..4096].iter().all(|byte| *byte == 9));
    assert_eq!(rig.counts().errors, [3, 0, 0]);
    assert!(rig.close());
}

/// The counting allocator counts the data thread, once everything has found its size.
#[test]
fn a_request_allocates_nothing() {
    for (movement, indirect) in [(Movement::Copy, 0), (Movement::Copy, 64), (Movement::Persistent, 0)] {
        let front = FrontOptions {
            indirect,
            buffer_len: if indirect > 0 { 64 * 4096 } else { 8192 },
            persistent: movement == Movement::Persistent,
            ..FrontOptions::default()
        };
        let (mut rig, _front, mut queues) = rig(front, &Wanted { movement, ..Wanted::default() });
        let load = |mix, seed, queue: &mut FrontQueue| {
            let load = Load {
                mix,
                block_len: if indirect > 0 { 64 * 4096 } else { 8192 },
                depth: 16,
                span_len: DISK_LEN,
                time: LIMIT,
                requests_max: 2_000,
                spin: false,
                seed,
            };
            let report = load.run(queue).unwrap();
            assert_eq!((report.count, report.errors), (2_000, 0));
        };
        for mix in [Mix::RandomWrite, Mix::RandomRead] {
            load(mix, 1, &mut queues[0]);
        }
        let remote = rig.disk.as_ref().unwrap().remote().clone();
        let before = remote.call(LIMIT, |_| allocations()).unwrap();
        for mix in [Mix::RandomWrite, Mix::RandomRead] {
            load(mix, 2, &mut queues[0]);
        }
        let count = remote.call(LIMIT, |_| allocations()).unwrap() - before;
        // The two questions themselves.
        assert!(count < 10, "{count} allocations for 4000 requests: {movement:?}, {indirect} segments");
        assert!(rig.close());
    }
}

#[test]
fn while_the_thread_is_awake_the_guest_is_not_asked_to_notify() {
    let polling = PollingConfig { max_ns: 50_000_000, idle_min_percent: 0 };
    let mut rig = Rig::new(DiskOptions { polling, ..DiskOptions::default() });
    let mut front = Blkfront::new(FrontOptions::default()).unwrap();
    rig.connect(front.invitation().unwrap(), &Wanted::default());
    let queue = &mut front.take_queues()[0];
    let load = Load {
        mix: Mix::RandomRead,
        block_len: 4096,
        depth: 4,
        span_len: DISK_LEN,
        time: LIMIT,
        requests_max: 3_000,
        spin: true,
        seed: 1,
    };
    let report = load.run(queue).unwrap();
    assert_eq!((report.count, report.errors), (3_000, 0));
    // How long the thread really spins depends on the host, so it is kept awake in another way: it asked for one
    // notification before it slept, and asks for no other while it is awake.
    let remote = rig.disk.as_ref().unwrap().remote().clone();
    let (awake, is_awake) = std::sync::mpsc::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let busy = move || {
                awake.send(()).unwrap();
                let _ = goes_on.recv_timeout(LIMIT);
            };
            remote.call(2 * LIMIT, move |_| busy()).unwrap();
        });
        is_awake.recv_timeout(LIMIT).unwrap();
        let before = queue.kicks;
        for block in 0..32 {
            queue.submit(&Command::Read { at: block * 4096, len: 4096 }).unwrap().unwrap();
            queue.kick().unwrap();
        }
        assert!(queue.kicks - before <= 1, "{} notifications for 32 requests", queue.kicks - before);
        go_on.send(()).unwrap();
    });
    let mut done = Vec::new();
    while done.len() < 32 {
        assert!(queue.wait(LIMIT).unwrap());
        queue.reap(&mut done).unwrap();
    }
    assert!(done.iter().all(|done| done.status == status::OKAY));
    assert!(rig.close());
}

#[test]
fn a_guest_that_was_suspended_connects_anew() {
    let front = FrontOptions { indirect: 32, buffer_len: 32 * 4096, ..FrontOptions::default() };
    let (mut rig, front, mut queues) = rig(front, &Wanted::default());
    for round in 0..5u8 {
        fill(&mut queues[0], round);
        ok(&mut queues[0], &Command::Write { at: u64::from(round) * 131_072, len: 131_072 });
        assert!(rig.close());
        queues[0].reconnect().unwrap();
        let invitation = front.invitation_of(&queues).unwrap();
        rig.connect(invitation, &Wanted { start: Start::Fresh, ..Wanted::default() });
    }
    for round in 0..5u8 {
        let done = ok(&mut queues[0], &Command::Read { at: u64::from(round) * 131_072, len: 131_072 });
        assert!(queues[0].buffer(done.slot.unwrap())[..131_072].iter().all(|byte| *byte == round));
    }
}

/// A former process may have shown answers and died before it notified: a guest that is connected looks at its ring.
#[test]
fn a_guest_is_woken_when_it_is_connected() {
    let (mut rig, _front, mut queues) = rig(FrontOptions::default(), &Wanted::default());
    assert!(!queues[0].wait(Duration::from_millis(20)).unwrap(), "there are no answers");
    assert_eq!((queues[0].wakes, rig.counts().kicks_out), (1, 1));
    assert!(rig.close());
}

/// A disk that shares the page pool of its SR: what finds no pages waits, nothing is lost, and all pages come back.
#[test]
fn requests_wait_for_pages_of_their_storage_repositorys_pool() {
    use tapio_stat::{ShmRoot, pool};
    for (pages, order) in [(704, 0), (704, 3), (1408, 3), (64, 2)] {
        let front = FrontOptions {
            order,
            depth: 32 << order,
            indirect: 32,
            buffer_len: 32 * 4096,
            ..FrontOptions::default()
        };
        let mut rig = Rig::new(DiskOptions::default());
        let root = ShmRoot::new(rig.directory.path());
        let member = pool::join(&root, &"sr".parse().unwrap(), Some(pages), 0).unwrap();
        rig.disk.as_ref().unwrap().share_pages(member, LIMIT).unwrap();
        let mut front = Blkfront::new(front).unwrap();
        rig.connect(front.invitation().unwrap(), &Wanted::default());
        let queue = &mut front.take_queues()[0];
        // Another disk has all pages: what was not taken for the next copy waits in the ring.
        let mut other = pool::join(&root, &"sr".parse().unwrap(), Some(pages), 1).unwrap();
        assert_eq!(other.take(pages, 0), Some(pages));
        let mut done = Vec::new();
        let mut submitted = 0usize;
        // Far more than the pool has, all at once, and again.
        for round in 0..3u64 {
            while queue.room() > 0 {
                let slot = queue.next_slot().unwrap();
                queue.buffer(slot).fill(round as u8 + 1);
                let at = submitted as u64 % 128 * 32 * 4096;
                queue.submit(&Command::Write { at, len: 32 * 4096 }).unwrap().unwrap();
                submitted += 1;
            }
            queue.kick().unwrap();
            if round == 0 {
                rig.until("requests that wait for pages", |rig| {
                    let remote = rig.disk.as_ref().unwrap().remote();
                    let waiting = |data_thread: &tapio_block::Owner| data_thread.admission().delays().waiting;
                    remote.call(LIMIT, waiting).unwrap() > 0
                });
                let ring = &rig.rings()[0];
                assert!(ring.in_flight <= 32 && ring.counters.rsp_prod == 0, "{ring:?}");
                let waiting = ring.counters.req_prod.wrapping_sub(ring.counters.req_cons);
                assert_eq!(waiting as usize + ring.in_flight, submitted);
                other.give(pages);
            }
            while done.len() < submitted {
                assert!(queue.wait(LIMIT).unwrap());
                queue.reap(&mut done).unwrap();
                let remote = rig.disk.as_ref().unwrap().remote();
                let pool = remote.call(LIMIT, |data_thread| data_thread.status().pool).unwrap();
                assert!(pool.is_none_or(|pool| pool.held <= pages), "a disk never holds more than there are");
            }
        }
        assert!(done.iter().all(|done| done.status == status::OKAY));
        let remote = rig.disk.as_ref().unwrap().remote();
        let (pool, delays) = remote
            .call(LIMIT, |data_thread| (data_thread.status().pool, data_thread.admission().delays()))
            .unwrap();
        assert_eq!(pool.map(|pool| (pool.pages, pool.held)), Some((pages, 0)), "all pages are back");
        assert!(delays.requests > 0);
        assert!(rig.close());
    }
}
