//! What a request may cost, and what an idle disk may: counted, not timed.
//!
//! One binary of its own, because it counts every allocation of its process by thread.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tapio_block::{
    Completion, CopyWhat, CoreOptions, Data, Disk, DiskError, DiskOptions, MirrorOptions, MirrorPhase, Op,
    Owner, Request,
};
use tapio_fixtures::counting::{Counting, allocations};
use tapio_format::vhd::offline::{ParentFacts, Shape, create};
use tapio_ring::{Memory, Notify, PageBuf, PollingConfig, Tasks};
use tapio_stat::trace::TraceRing;
use tapio_stat::{ShmRoot, pool};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, Span};

const TIMEOUT: Duration = Duration::from_secs(60);
const DISK_LEN: u64 = 16 << 20;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests of a round, each 4 KiB: as many as the disk has pages. An allocation for each shows in far fewer.
const ROUND: u64 = 4_096;

/// Requests of a round that shows whether anything is still being made ready.
const STILL_COUNT: u64 = 2_000;

/// How often the data thread of the idle disk has given its memory back.
static RESTED: AtomicU32 = AtomicU32::new(0);

fn note_rest() {
    RESTED.fetch_add(1, Ordering::SeqCst);
}

/// A client that keeps `depth` requests in flight without allocating, as a virtqueue does.
struct Load {
    data_thread: Owner,
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
        // Where neighbours may go as one, they are neighbours.
        let is_random = self.data_thread.core().transfers().is_off();
        let number = if is_random { state >> 33 } else { 1_000_000 - self.left.get() };
        let at = number % (DISK_LEN / REQUEST_LEN) * REQUEST_LEN;
        let memory = self.memory.borrow();
        // SAFETY: the memory is the load's, which waits for all its answers.
        let data = unsafe { memory.segments(0..memory.len()) }.slice(slot * REQUEST_LEN, REQUEST_LEN);
        let op = if self.write { Op::Write { durable: false } } else { Op::Read };
        let client = self.me.borrow().clone().expect("set before the first request") as Rc<dyn Completion>;
        let span = Span::new(at, REQUEST_LEN);
        let request = Request::new(op, span, Data::Guest(data), 0, slot, client);
        assert!(self.data_thread.port.submit(request).is_ok());
    }
}

impl Completion for Load {
    fn complete(&self, tag: u64, result: Result<(), DiskError>) {
        result.expect("the storage works");
        self.flying.set(self.flying.get() - 1);
        if self.left.get() > 0 {
            self.submit(tag);
        } else if self.flying.get() == 0 {
            self.done.notify_all(self.data_thread.port.tasks());
        }
    }
}

/// Runs `count` requests at depth 32 on the data thread; gives the allocations it made meanwhile.
fn allocations_of(disk: &Disk, write: bool, count: u64) -> u64 {
    disk.remote()
        .call_async(TIMEOUT, move |data_thread| async move {
            let tasks: Tasks = data_thread.port.tasks().clone();
            let load = Rc::new(Load {
                data_thread,
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
    disk_with(layers, DiskOptions::default())
}

fn disk_with(layers: &[(ImageKind, &Path)], options: DiskOptions) -> Disk {
    let layers = layers.iter().map(|&(kind, path)| LayerSpec { kind, path: path.to_path_buf() }).collect();
    Disk::start(ChainSpec { layers, access: Access::ReadWrite }, options).expect("the disk opens")
}

/// A flush of the guest, after which there is nothing to write back.
fn flush(disk: &Disk) {
    let flushed = disk.remote().call_async(TIMEOUT, move |data_thread| async move {
        let tasks: Tasks = data_thread.port.tasks().clone();
        let asked =
            Rc::new(Flushed { result: Cell::new(None), done: Notify::default(), tasks: tasks.clone() });
        let client = Rc::clone(&asked) as Rc<dyn Completion>;
        let request = Request::new(Op::Flush, Span::default(), Data::None, 0, 0, client);
        assert!(data_thread.port.submit(request).is_ok());
        loop {
            if let Some(result) = asked.result.take() {
                return result;
            }
            asked.done.wait(&tasks).await;
        }
    });
    flushed.expect("the thread answers").expect("the storage works");
}

/// A client of one flush.
struct Flushed {
    result: Cell<Option<Result<(), DiskError>>>,
    done: Notify,
    tasks: Tasks,
}

impl Completion for Flushed {
    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        self.result.set(Some(result));
        self.done.notify_all(&self.tasks);
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory can be made")
}

/// Writes back what is left to be written back, and waits until requests allocate no more than `is_still` allows.
fn settle(disk: &Disk, is_still: impl Fn(u64) -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        flush(disk);
        let count = allocations_of(disk, true, STILL_COUNT);
        if is_still(count) {
            return flush(disk);
        }
        assert!(Instant::now() < deadline, "still {count} allocations in {STILL_COUNT} requests");
    }
}

fn no_allocation_after_warm_up(disk: &Disk) {
    // Warm: every block has its place, every table its size. The first round shows that allocations are seen at all.
    assert!(
        allocations_of(disk, true, ROUND) > 0,
        "a cold disk allocated nothing: the counter does not count"
    );
    for _ in 0..3 {
        allocations_of(disk, true, ROUND);
        allocations_of(disk, false, 2_000);
    }
    settle(disk, |count| count <= 1);
    for write in [false, true] {
        // A list may still grow once, later on a busy host. What requests allocate is there in every round.
        let count = (0..3).map(|_| allocations_of(disk, write, ROUND)).min();
        // The one waiter on the list of the load's own notification is not the disk's.
        assert!(count <= Some(1), "{count:?} allocations in {ROUND} requests (writing: {write})");
    }
}

fn closes_after(disk: Disk) {
    no_allocation_after_warm_up(&disk);
    disk.close(TIMEOUT).expect("the disk closes");
}

#[test]
fn a_request_to_a_raw_file_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    closes_after(disk(&[(ImageKind::Raw, &path)]));
}

#[test]
fn a_request_that_may_go_with_its_neighbours_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    let core = CoreOptions { transfers: "merge=64KiB".parse().expect("sizes"), ..CoreOptions::default() };
    closes_after(disk_with(&[(ImageKind::Raw, &path)], DiskOptions { core, ..DiskOptions::default() }));
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
    disk.share_pages(member, TIMEOUT).expect("the thread answers");
}

fn limit(disk: &Disk, limits: &str) {
    let limits = limits.parse().expect("limits");
    disk.remote()
        .call(TIMEOUT, move |data_thread| data_thread.admission().set_limits(&limits))
        .expect("the thread answers");
}

#[test]
fn a_request_that_waits_for_limits_and_pages_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    let disk = disk(&[(ImageKind::Raw, &path)]);
    // Both so tight that every request waits for one of them.
    limit(&disk, "iops=200000,write-bps=2GiB");
    share_a_pool(&disk, directory.path(), 9);
    let delays = |disk: &Disk| disk.status(TIMEOUT).expect("the thread answers").delays.requests;
    let before = delays(&disk);
    no_allocation_after_warm_up(&disk);
    assert!(delays(&disk) > before + 1000, "hardly a request waited: {}", delays(&disk));
    disk.close(TIMEOUT).expect("the disk closes");
}

/// A trace that is on costs time, but no memory and no system call.
#[test]
fn a_request_that_is_traced_allocates_nothing() {
    let directory = directory();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![1; DISK_LEN as usize]).expect("the file can be written");
    let disk = disk(&[(ImageKind::Raw, &path)]);
    let ring = TraceRing::private(1 << 12).expect("memory");
    disk.remote()
        .call(TIMEOUT, move |data_thread| drop(data_thread.trace().start(ring)))
        .expect("the thread answers");
    no_allocation_after_warm_up(&disk);
    let stopped = |disk: &Disk| {
        let stop = disk.remote().call(TIMEOUT, |data_thread| data_thread.trace().stop());
        stop.expect("the thread answers").expect("there is a trace")
    };
    // A request has four points in the disk itself; batches have theirs beside.
    let written = stopped(&disk);
    assert!(written > 4 * 5 * ROUND, "{written} events");
    allocations_of(&disk, false, 2_000);
    assert_eq!(stopped(&disk), written, "events were written after the end");
    disk.close(TIMEOUT).expect("the disk closes");
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
    // A busy host may keep the second side longer than the guest would wait for it.
    let options = MirrorOptions { copy: CopyWhat::Everything, timeout: TIMEOUT, ..MirrorOptions::default() };
    let start =
        |data_thread: Owner| async move { data_thread.core().mirror_start(&target, options).await.map(drop) };
    disk.remote().call_async(TIMEOUT, start).expect("the thread answers").expect("the mirror begins");
    let in_sync = || {
        let asked = disk.remote().call(TIMEOUT, |data_thread| data_thread.core().mirror_status());
        let status = asked.expect("the thread answers").expect("there is a mirror");
        assert!(status.phase != MirrorPhase::Degraded, "{status:?}");
        status.phase == MirrorPhase::InSync
    };
    let deadline = Instant::now() + TIMEOUT;
    while !in_sync() {
        assert!(Instant::now() < deadline, "it never came in sync");
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..3 {
        allocations_of(&disk, true, ROUND);
    }
    settle(&disk, |count| count <= STILL_COUNT + 1);
    // As above: a list may still grow once.
    let count = (0..3).map(|_| allocations_of(&disk, true, ROUND)).min();
    assert!(count <= Some(ROUND + 1), "{count:?} allocations in {ROUND} writes to both sides");
    assert!(in_sync());
    let pivot = |data_thread: Owner| async move { data_thread.core().mirror_pivot().await.map(drop) };
    disk.remote().call_async(TIMEOUT, pivot).expect("the thread answers").expect("the disk moves");
    disk.close(TIMEOUT).expect("the disk closes");
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
    let at_rest = Some(note_rest as fn());
    let disk = disk_with(&[(ImageKind::Vhd, &path)], DiskOptions { at_rest, ..DiskOptions::default() });
    let polling = PollingConfig { max_ns: 8_000_000, idle_min_percent: 0 };
    disk.remote()
        .call(TIMEOUT, move |data_thread| data_thread.set_polling(polling))
        .expect("polling can be set");
    // Limits and a pool have a timer only while a request waits for them.
    limit(&disk, "iops=5000,bps=1GiB");
    share_a_pool(&disk, directory.path(), 5);
    let rested = RESTED.load(Ordering::SeqCst);
    // Work with everything that starts timers: new blocks, metadata to write back, polling, a warm pool.
    allocations_of(&disk, true, 500);
    let tid = disk
        .remote()
        .call(TIMEOUT, |data_thread| {
            drop(data_thread.uring.pool().take(64 << 10));
            // SAFETY: gettid takes no arguments.
            unsafe { libc::gettid() }
        })
        .expect("the thread answers");
    // It rests when nothing is left to be written back, and on a busy host later than on an idle one. Then no four
    // seconds may differ from the four before; a timer that is left behind never lets that come true.
    let deadline = Instant::now() + TIMEOUT;
    while RESTED.load(Ordering::SeqCst) == rested {
        assert!(Instant::now() < deadline, "it never rested");
        std::thread::sleep(Duration::from_millis(50));
    }
    loop {
        let before = switches(tid);
        std::thread::sleep(Duration::from_secs(4));
        let after = switches(tid);
        if before == after {
            break;
        }
        let what = "(voluntary, involuntary, ticks) of an idle data thread change";
        assert!(Instant::now() < deadline, "{what}: {before:?}, 4 s later {after:?}");
    }
    disk.close(TIMEOUT).expect("the disk closes");
}
