//! Limits and pages by the simulator's clock, where a second is a second.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;

use tapio_block::{Completion, Data, DiskError, Op, Port, Request};
use tapio_ring::{Io, Memory, Notify, PageBuf, Tasks};
use tapio_types::{Access, Span};

use crate::pages::Pool;
use crate::rig::{Process, Rig, RigKind};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// A client that keeps requests in flight.
struct Load {
    port: Port,
    op: Op,
    len: u64,
    depth: usize,
    memory: PageBuf,
    flying: Cell<usize>,
    /// When each request was answered.
    answers: RefCell<Vec<u64>>,
    changed: Notify,
    begin_ns: Cell<u64>,
}

impl Completion for Load {
    fn complete(&self, _tag: u64, result: Result<(), DiskError>) {
        result.expect("the storage works");
        self.flying.set(self.flying.get() - 1);
        self.answers.borrow_mut().push(self.tasks().turn_ns());
        self.changed.notify_all(self.tasks());
    }
}

impl Load {
    fn new(port: &Port, op: Op, len: u64, depth: usize) -> Rc<Self> {
        Rc::new(Self {
            port: port.client(),
            op,
            len,
            depth,
            memory: PageBuf::zeroed(len as usize),
            flying: Cell::new(0),
            answers: RefCell::default(),
            changed: Notify::default(),
            begin_ns: Cell::new(0),
        })
    }

    fn tasks(&self) -> &Tasks {
        self.port.tasks()
    }

    fn submit(self: &Rc<Self>, op: Op) {
        let moves = matches!(op, Op::Read | Op::Write { .. });
        // SAFETY: the memory is the client's, which waits for all its answers.
        let data = unsafe { self.memory.segments(0..if moves { self.len as usize } else { 0 }) };
        let span = Span::new(0, if op == Op::Flush { 0 } else { self.len });
        let client = Rc::clone(self) as Rc<dyn Completion>;
        self.flying.set(self.flying.get() + 1);
        let request = Request::new(op, span, Data::Guest(data), self.tasks().turn_ns(), 0, client);
        assert!(self.port.submit(request).is_ok(), "there was room");
    }

    /// As [`Load::start`], with answers counted from `begin_ns` on.
    fn begin(self: &Rc<Self>, begin_ns: u64, until_ns: u64) {
        self.begin_ns.set(begin_ns);
        self.start(until_ns);
    }

    /// Goes on by itself until then.
    fn start(self: &Rc<Self>, until_ns: u64) {
        let me = Rc::clone(self);
        self.tasks().clone().spawn(async move {
            while me.tasks().turn_ns() < until_ns {
                if me.flying.get() >= me.depth {
                    me.changed.wait(me.tasks()).await;
                } else if me.port.room() == 0 {
                    me.port.wait_room().await;
                } else {
                    me.submit(me.op);
                }
            }
        });
    }

    /// Requests answered in that time.
    fn count(&self, from_ns: u64, to_ns: u64) -> u64 {
        let range = from_ns..to_ns;
        self.answers.borrow().iter().filter(|when| range.contains(&(**when - self.begin_ns.get()))).count()
            as u64
    }
}

/// A process with an open disk, and a port to it.
fn process() -> (Process, Port) {
    let process = Rig::new(RigKind::Raw, 5).process();
    let (core, spec) = (Rc::clone(&process.core), Rig::new(RigKind::Raw, 5).spec(Access::ReadWrite));
    process.run(async move { core.resume(&spec).await }).expect("power").expect("it opens");
    let port = process.core.port().expect("it is open");
    (process, port)
}

/// Runs loads beside each other for `seconds` from now, under these limits.
fn run(limits: &str, loads: &[(Op, u64, usize)], seconds: u64) -> Vec<Rc<Load>> {
    let (process, port) = process();
    process.core.admission().set_limits(&limits.parse().expect("limits"));
    let loads: Vec<_> = loads.iter().map(|(op, len, depth)| Load::new(&port, *op, *len, *depth)).collect();
    let tasks = process.sim.tasks().clone();
    // A rest before, in which nothing but the burst may gather.
    let begin = tasks.turn_ns() + 5 * SECOND;
    let core = Rc::clone(&process.core);
    let started = loads.clone();
    let closed = process.run(async move {
        tasks.sleep_until(begin).await;
        started.iter().for_each(|load| load.begin(begin, begin + seconds * SECOND));
        tasks.sleep_until(begin + seconds * SECOND).await;
        core.close().await
    });
    closed.expect("power").expect("it closes");
    process.sim.end();
    loads
}

const WRITE: Op = Op::Write { durable: false };

#[test]
fn every_second_has_what_it_may_have() {
    for (limits, op, len, each_second) in [
        ("iops=500", Op::Read, 4096, 500),
        ("iops=20000", Op::Read, 512, 20_000),
        ("bps=50MiB", Op::Read, 1 << 20, 50),
        ("bps=8MiB", WRITE, 4096, 2048),
        ("read-iops=300", Op::Read, 65536, 300),
        ("write-bps=10MiB", WRITE, 256 << 10, 40),
        ("iops=700,bps=1MiB", WRITE, 4096, 256),
        ("iops=100", Op::Discard, 1 << 20, 100),
        ("bps=1MiB,iops=250", Op::WriteZeroes { unmap: true, durable: false }, 1 << 20, 250),
    ] {
        let load = &run(limits, &[(op, len, 16)], 3)[0];
        for second in 0..3 {
            let count = load.count(second * SECOND, (second + 1) * SECOND);
            // Two percent of burst, and the one that goes into debt.
            let most = each_second + each_second / 50 + 1;
            assert!(count <= most, "{limits}: {count} requests in second {second}");
            assert!(count * 100 >= each_second * 97, "{limits}: only {count} requests in second {second}");
        }
    }
}

#[test]
fn the_end_of_a_request_wakes_no_client_that_cannot_go_on() {
    let (process, port) = process();
    process.core.admission().set_limits(&"iops=1".parse().expect("limits"));
    let (limited, other) = (Load::new(&port, Op::Read, 512, 2), Load::new(&port, Op::Flush, 0, 1));
    let looks = Rc::new(Cell::new(0));
    let (tasks, seen) = (process.sim.tasks().clone(), Rc::clone(&looks));
    let core = Rc::clone(&process.core);
    let (flushed, closed) = process
        .run(async move {
            // The first goes, and the next one waits for a second: there is no room for a third.
            limited.submit(Op::Read);
            limited.submit(Op::Read);
            assert_eq!((limited.port.room(), other.port.room() > 0), (0, true));
            let waiting = limited.port.clone();
            tasks.spawn(async move {
                let mut room = pin!(waiting.wait_room());
                let look = poll_fn(|context| {
                    seen.set(seen.get() + 1);
                    room.as_mut().poll(context)
                });
                look.await;
            });
            let mut flushed = 0;
            while limited.answers.borrow().len() < 2 {
                other.submit(Op::Flush);
                other.changed.wait(&tasks).await;
                flushed += 1;
            }
            (flushed, core.close().await)
        })
        .expect("power");
    closed.expect("it closes");
    process.sim.end();
    assert!(flushed > 20, "{flushed} requests ended meanwhile");
    assert!(looks.get() <= 3, "the client that waits looked {} times", looks.get());
}

#[test]
fn requests_larger_than_the_bucket_do_not_starve() {
    let load = &run("bps=1MiB", &[(Op::Read, 2 << 20, 4)], 10)[0];
    // The first at once, the others when the debt of the one before is paid, 20 ms of burst ahead.
    assert_eq!(load.count(0, 10 * SECOND), 6);
}

#[test]
fn a_burst_is_spent_once() {
    let load = &run("iops=100,burst=2s", &[(Op::Read, 512, 8)], 3)[0];
    let first = load.count(0, SECOND);
    assert!((290..=302).contains(&first), "{first}");
    assert!((99..=101).contains(&load.count(SECOND, 2 * SECOND)));
}

#[test]
fn clients_take_turns_whatever_their_depth_and_size() {
    let loads = run("iops=1000", &[(Op::Read, 4096, 16), (Op::Read, 4096, 2), (WRITE, 65536, 8)], 3);
    for load in &loads {
        let count = load.count(SECOND, 3 * SECOND);
        assert!((650..=684).contains(&count), "{count} of 2000 for one of three");
    }
    let loads = run("bps=20MiB", &[(Op::Read, 4096, 16), (Op::Read, 256 << 10, 4)], 3);
    let bytes: Vec<u64> = loads.iter().map(|load| load.count(SECOND, 3 * SECOND) * load.len).collect();
    assert!(bytes[0].abs_diff(bytes[1]) <= 512 << 10, "{bytes:?}");
}

#[test]
fn writes_that_wait_do_not_hold_up_reads() {
    let loads = run("write-iops=10", &[(WRITE, 4096, 8), (Op::Read, 4096, 8)], 2);
    assert!((20..=22).contains(&loads[0].count(0, 2 * SECOND)));
    assert!(loads[1].count(0, 2 * SECOND) > 20_000);
    // Also where both come by one queue, as long as few of them wait.
    let (process, port) = process();
    process.core.admission().set_limits(&"write-iops=1".parse().expect("limits"));
    let load = Load::new(&port, Op::Read, 4096, 8);
    let (tasks, inner) = (process.sim.tasks().clone(), Rc::clone(&load));
    process.run(async move {
        for _ in 0..4 {
            inner.submit(WRITE);
        }
        inner.submit(Op::Read);
        tasks.sleep_until(tasks.turn_ns() + 100 * MS).await;
    });
    assert_eq!(load.answers.borrow().len(), 2, "the first write, and the read");
    process.sim.end();
}

#[test]
fn a_flush_waits_for_no_limit() {
    let (process, port) = process();
    process.core.admission().set_limits(&"iops=1".parse().expect("limits"));
    let (busy, other) = (Load::new(&port, WRITE, 4096, 4), Load::new(&port, Op::Flush, 512, 1));
    busy.start(10 * SECOND);
    let (tasks, flusher) = (process.sim.tasks().clone(), Rc::clone(&other));
    process.run(async move {
        tasks.sleep_until(2 * SECOND).await;
        for _ in 0..50 {
            flusher.submit(Op::Flush);
            while flusher.flying.get() > 0 {
                flusher.changed.wait(&tasks).await;
            }
        }
    });
    let last = *other.answers.borrow().last().expect("answered");
    assert!(last < 3 * SECOND, "fifty flushes took until {last} ns");
    process.sim.end();
}

#[test]
fn a_pause_waits_for_no_limit_and_the_debt_stays() {
    let (process, port) = process();
    process.core.admission().set_limits(&"iops=1".parse().expect("limits"));
    let loads: Vec<_> = (0..3).map(|_| Load::new(&port, Op::Read, 4096, 4)).collect();
    loads.iter().for_each(|load| load.start(60 * SECOND));
    let tasks = process.sim.tasks().clone();
    let (core, spec) = (Rc::clone(&process.core), Rig::new(RigKind::Raw, 5).spec(Access::ReadWrite));
    let begin = tasks.turn_ns();
    let inner = loads.clone();
    process.run(async move {
        tasks.sleep_until(begin + 500 * MS).await;
        core.pause().await.expect("it pauses");
        assert!(tasks.turn_ns() < begin + 600 * MS, "the pause waited for a limit");
        // The first that went at once, and the one of each client that waited.
        assert_eq!(inner.iter().map(|load| load.answers.borrow().len()).sum::<usize>(), 4);
        core.resume(&spec).await.expect("it goes on");
        tasks.sleep_until(begin + 10_500 * MS).await;
    });
    let all: u64 = loads.iter().map(|load| load.count(0, u64::MAX)).sum();
    assert!((10..=12).contains(&all), "{all} requests in ten seconds at one a second");
    process.sim.end();
}

#[test]
fn limits_change_under_way_and_go() {
    let (process, port) = process();
    let core = Rc::clone(&process.core);
    core.admission().set_limits(&"iops=1".parse().expect("limits"));
    let load = Load::new(&port, Op::Read, 4096, 4);
    load.start(20 * SECOND);
    let (tasks, inner) = (process.sim.tasks().clone(), Rc::clone(&load));
    process.run(async move {
        let begin = tasks.turn_ns();
        let mut last = 0;
        let mut since = || {
            let count = inner.answers.borrow().len() as u64;
            count - std::mem::replace(&mut last, count)
        };
        tasks.sleep_until(begin + 2 * SECOND).await;
        assert!((2..=3).contains(&since()));
        core.admission().set_limits(&"iops=1000".parse().expect("limits"));
        tasks.sleep_until(begin + 4 * SECOND).await;
        let count = since();
        assert!((1900..=2040).contains(&count), "{count}");
        core.admission().set_limits(&Default::default());
        tasks.sleep_until(begin + 5 * SECOND).await;
        assert!(since() > 10_000, "no limit");
        assert!(!core.admission().is_on());
        core.admission().set_limits(&"bps=4MiB".parse().expect("limits"));
        tasks.sleep_until(begin + 7 * SECOND).await;
        let count = since();
        assert!((2000..=2100).contains(&count), "{count}");
        assert!(core.admission().delays().requests > 1000 && core.admission().delays().time_ns > 0);
    });
    process.sim.end();
}

#[test]
fn data_under_way_never_takes_more_pages_than_there_are() {
    let (process, port) = process();
    let pool = Pool::new(24);
    drop(process.core.admission().set_pages(Some(pool.member())));
    let loads: Vec<_> =
        [(Op::Read, 4096, 16), (WRITE, 65536, 8), (Op::Discard, 4096, 2), (Op::Read, 12288, 1)]
            .into_iter()
            .map(|(op, len, depth)| Load::new(&port, op, len, depth))
            .collect();
    let tasks = process.sim.tasks().clone();
    loads.iter().for_each(|load| load.start(SECOND));
    let core = Rc::clone(&process.core);
    let closed = process.run(async move {
        tasks.sleep_until(SECOND).await;
        core.close().await
    });
    closed.expect("power").expect("it closes");
    assert!(pool.least() < 8, "the pool was used: {} free at least", pool.least());
    for load in &loads {
        assert!(load.count(0, SECOND) > 500, "{:?}: {}", load.op, load.count(0, SECOND));
    }
    // In turn by pages: the small reader has about as many as the large writer.
    let pages = |load: &Load| load.count(SECOND / 4, SECOND) * load.len;
    assert!(pages(&loads[0]) * 5 > pages(&loads[1]), "{} and {}", pages(&loads[0]), pages(&loads[1]));
    assert_eq!(pool.free(), 24, "all pages came back");
    process.sim.end();
}
