//! What a request may cost, and what an idle disk may: counted, not timed.
//!
//! One binary of its own, because it counts every allocation of its process by thread.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tapio_block::{
    Client, CopyWhat, Disk, DiskError, DiskOptions, MirrorOptions, MirrorPhase, Op, Request, World,
};
use tapio_fixtures::counting::{Counting, allocations};
use tapio_format::vhd::offline::{ParentFacts, Shape, create};
use tapio_ring::{Notify, PageBuf, PollingConfig, Tasks};
use tapio_stat::trace::TraceRing;
use tapio_stat::{ShmRoot, pool};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, Span};

const SOON: Duration = Duration::from_secs(30);
const DISK_LEN: u64 = 16 << 20;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A client that keeps `depth` requests under way without allocating, as a virtqueue does.
struct Load {
    world: World,
    left: Cell<u64>,
    flying: Cell<u64>,
    memory: RefCell<PageBuf>,
    state: Cell<u64>,
    write: bool,
    done: Notify,
    me: RefCell<Option<Rc<Load>>>,
}

const REQUEST_LEN: u64 = 4096;

impl Load {
    fn submit(&self, slot: u64) {
        self.left.set(self.left.get() - 1);
        self.flying.set(self.flying.get() + 1);
        let state = self.state.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.state.set(state);
        let at = (state >> 33) % (DISK_LEN / REQUEST_LEN) * REQUEST_LEN;
        let memory = self.memory.borrow();
        // SAFETY: the memory is the load's, which waits for all its answers.
        let data = unsafe { memory.segments(memory.len()).slice(slot * REQUEST_LEN, REQUEST_LEN) };
        let op = if self.write { Op::Write { durable: false } } else { Op::Read };
        let client = self.me.borrow().clone().expect("set before the first request") as Rc<dyn Client>;
        let span = Span::new(at, REQUEST_LEN);
        let request = Request { op, span, data, born_ns: 0, tag: slot, client };
        assert!(self.world.port.submit(request).is_ok());
    }
}

impl Client for Load {
    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        result.expect("the storage works");
        self.flying.set(self.flying.get() - 1);
        if self.left.get() > 0 {
            self.submit(tag);
        } else if self.flying.get() == 0 {
            self.done.notify_all(self.world.port.tasks());
        }
    }
}

/// Runs `count` requests at depth 32 on the data thread; gives the allocations it made meanwhile.
fn allocations_of(disk: &Disk, write: bool, count: u64) -> u64 {
    disk.remote()
        .call_async(SOON, move |world| async move {
            let tasks: Tasks = world.port.tasks().clone();
            let load = Rc::new(Load {
                world,
                left: Cell::new(count),
                flying: Cell::new(0),
                memory: RefCell::new(PageBuf::zeroed(32 * REQUEST_LEN as usize)),
                state: Cell::new(7),
                write,
                done: Notify::default(),
                me: RefCell::new(None),
            });
            *load.me.borrow_mut() = Some(Rc::clone(&load));
            let before = allocations();
            for slot in 0..32 {
                load.submit(slot);
            }
            load.done.wait(&tasks).await;
            load.me.borrow_mut().take();
            allocations() - before
        })
        .expect("the load ends in time")
}

fn disk(layers: &[(ImageKind, &Path)]) -> Disk {
    let layers = layers.iter().map(|&(kind, path)| LayerSpec { kind, path: path.to_path_buf() }).collect();
    Disk::start(ChainSpec { layers, access: Access::ReadWrite }, DiskOptions::default())
        .expect("the disk opens")
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory can be made")
}

fn no_allocation_after_warm_up(disk: &Disk) {
    // Warm: every block has its place, every table its size. The first round shows that allocations are seen at all.
    assert!(
        allocations_of(disk, true, 20_000) > 0,
        "a cold disk allocated nothing: the counter does not count"
    );
    for _ in 0..3 {
        allocations_of(disk, true, 20_000);
        allocations_of(disk, false, 2_000);
    }
    // What a second of writing back may still need has been needed by now.
    std::thread::sleep(Duration::from_millis(1500));
    for write in [false, true] {
        let count = allocations_of(disk, write, 20_000);
        // The one waiter on the list of the load's own notification is not the disk's.
        assert!(count <= 1, "{count} allocations in 20,000 requests (writing: {write})");
    }
}

fn closes_after(disk: Disk) {
    no_allocation_after_warm_up(&disk);
    disk.close(SOON).expect("the disk closes");
}

#[test]
fn a_request_to_a_raw_file_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    closes_after(disk(&[(ImageKind::Raw, &path)]));
}

#[test]
fn a_request_to_a_vhd_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.vhd");
    create(&path, &Shape::Dynamic, DISK_LEN, 0).expect("the image can be made");
    closes_after(disk(&[(ImageKind::Vhd, &path)]));
}

/// A place at a pool in a directory of the test's own.
fn share_a_pool(disk: &Disk, directory: &Path, pages: u32) {
    let name = "cost".parse().expect("a name");
    let member = pool::join(&ShmRoot::new(directory), &name, Some(pages), 0).expect("a pool can be made");
    disk.share_pages(member, SOON).expect("the thread answers");
}

#[test]
fn a_request_that_waits_for_limits_and_pages_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    let disk = disk(&[(ImageKind::Raw, &path)]);
    // Both so tight that every request waits for one of them.
    disk.set_limits("iops=200000,write-bps=2GiB".parse().expect("limits"), SOON).expect("they can be set");
    share_a_pool(&disk, directory.path(), 9);
    let delays = |disk: &Disk| disk.status(SOON).expect("the thread answers").delays.requests;
    let before = delays(&disk);
    no_allocation_after_warm_up(&disk);
    assert!(delays(&disk) > before + 1000, "hardly a request waited: {}", delays(&disk));
    disk.close(SOON).expect("the disk closes");
}

/// What is asked for by somebody costs time, but no memory and no system call either.
#[test]
fn a_request_that_is_traced_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    let disk = disk(&[(ImageKind::Raw, &path)]);
    let ring = TraceRing::private(1 << 12).expect("memory");
    disk.remote().call(SOON, move |world| drop(world.trace().start(ring))).expect("the thread answers");
    no_allocation_after_warm_up(&disk);
    let stopped = |disk: &Disk| {
        let stop = disk.remote().call(SOON, |world| world.trace().stop());
        stop.expect("the thread answers").expect("there is a trace")
    };
    // A request has four points in the disk itself; batches have theirs beside.
    let written = stopped(&disk);
    assert!(written > 4 * 100_000, "{written} events");
    allocations_of(&disk, false, 2_000);
    assert_eq!(stopped(&disk), written, "events were written after the end");
    disk.close(SOON).expect("the disk closes");
}

#[test]
fn a_request_to_a_chain_allocates_nothing() {
    let directory = directory();
    let (base, leaf) = (directory.path().join("base.vhd"), directory.path().join("leaf.vhd"));
    create(&base, &Shape::Dynamic, DISK_LEN, 0).expect("the image can be made");
    let (facts, _) = ParentFacts::gather(&leaf, &base, false).expect("the parent can be read");
    create(&leaf, &Shape::Differencing(facts), DISK_LEN, 0).expect("the image can be made");
    closes_after(disk(&[(ImageKind::Vhd, &leaf), (ImageKind::Vhd, &base)]));
}

/// What is written to both sides of a mirror goes through memory and tasks that are there already; the task of the
/// request itself has no room for it, and borrows some.
#[test]
fn a_write_to_both_sides_of_a_mirror_allocates_once() {
    let directory = directory();
    let (path, second) = (directory.path().join("disk.raw"), directory.path().join("second.raw"));
    for path in [&path, &second] {
        std::fs::write(path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    }
    let disk = disk(&[(ImageKind::Raw, &path)]);
    let layers = vec![LayerSpec { kind: ImageKind::Raw, path: second.clone() }];
    let target = ChainSpec { layers, access: Access::ReadWrite };
    let options = MirrorOptions { copy: CopyWhat::Everything, ..MirrorOptions::default() };
    disk.mirror_start(target, options, SOON).expect("the mirror begins");
    let in_sync = || {
        let status = disk.mirror_status(SOON).expect("the thread answers").expect("there is a mirror");
        assert!(status.phase != MirrorPhase::Degraded, "{status:?}");
        status.phase == MirrorPhase::InSync
    };
    let deadline = std::time::Instant::now() + SOON;
    while !in_sync() {
        assert!(std::time::Instant::now() < deadline, "it never came in sync");
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..3 {
        allocations_of(&disk, true, 20_000);
    }
    std::thread::sleep(Duration::from_millis(1500));
    let count = allocations_of(&disk, true, 20_000);
    assert!(count <= 20_001, "{count} allocations in 20,000 writes to both sides");
    assert!(in_sync());
    disk.mirror_pivot(SOON).expect("the disk moves");
    disk.close(SOON).expect("the disk closes");
    let (one, two) = (std::fs::read(&path).expect("readable"), std::fs::read(&second).expect("readable"));
    assert!(one == two, "the two sides differ");
}

/// `(voluntary, involuntary)` context switches of the thread `tid` of this process, and its CPU time in clock ticks.
fn switches(tid: i32) -> (u64, u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).expect("the thread lives");
    let count = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("the kernel counts switches");
        line.split_ascii_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
    };
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).expect("the thread lives");
    let after_name: Vec<&str> =
        stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().collect();
    let ticks = |index: usize| after_name[index].parse::<u64>().expect("a number");
    (count("voluntary_ctxt_switches"), count("nonvoluntary_ctxt_switches"), ticks(11) + ticks(12))
}

#[test]
fn an_idle_disk_never_wakes_up() {
    let directory = directory();
    let path = directory.path().join("disk.vhd");
    create(&path, &Shape::Dynamic, DISK_LEN, 0).expect("the image can be made");
    let disk = disk(&[(ImageKind::Vhd, &path)]);
    let polling = PollingConfig { max_ns: 8_000_000, idle_min_percent: 0 };
    disk.set_polling(polling, SOON).expect("polling can be set");
    // Limits and a pool have a timer only while a request waits for them.
    disk.set_limits("iops=5000,bps=1GiB".parse().expect("limits"), SOON).expect("they can be set");
    share_a_pool(&disk, directory.path(), 5);
    // Work with everything that starts timers: new blocks, metadata to write back, polling, a warm pool.
    allocations_of(&disk, true, 500);
    let tid = disk
        .remote()
        .call(SOON, |world| {
            drop(world.uring.pool().take(64 << 10));
            // SAFETY: gettid takes no arguments.
            unsafe { libc::gettid() }
        })
        .expect("the thread answers");
    // Writing back takes a second, resting another.
    std::thread::sleep(Duration::from_millis(3500));
    let before = switches(tid);
    std::thread::sleep(Duration::from_secs(4));
    let after = switches(tid);
    assert_eq!(before, after, "(voluntary, involuntary, ticks) of an idle data thread changed in 4 s");
    disk.close(SOON).expect("the disk closes");
}
