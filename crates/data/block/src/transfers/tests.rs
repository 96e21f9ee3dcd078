//! Transfers against a storage that notes its operations and has bad places.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tapio_ring::sim::{Random, Sim, SimHost};
use tapio_ring::{
    Executor, Inbox, Io, Memory, Notify, PageBuf, Polling, PollingConfig, StorageInfo, Zeroing,
};
use tapio_types::Span;

use super::*;

const LEN: usize = 64 << 10;
const SECTOR: u64 = 512;

/// Bytes in memory.
struct Store {
    tasks: Tasks,
    bytes: RefCell<Vec<u8>>,
    /// What was asked, in order.
    asked: RefCell<Vec<(Way, Span)>>,
    in_flight: Cell<usize>,
    most_in_flight: Cell<usize>,
    /// Operations so far: each ends a little after the one before it.
    count: Cell<u64>,
    /// What touches these places fails with this error.
    bad: RefCell<Vec<Span>>,
    errno: Cell<i32>,
}

impl Store {
    fn new(tasks: &Tasks) -> Rc<Self> {
        Rc::new(Self {
            tasks: tasks.clone(),
            bytes: RefCell::new((0..LEN).map(|at| (at / SECTOR as usize) as u8).collect()),
            asked: RefCell::default(),
            in_flight: Cell::new(0),
            most_in_flight: Cell::new(0),
            count: Cell::new(0),
            bad: RefCell::default(),
            errno: Cell::new(libc::EIO),
        })
    }

    fn spans(&self) -> Vec<(u64, u64)> {
        self.asked.take().into_iter().map(|(_, span)| (span.start / SECTOR, span.len / SECTOR)).collect()
    }

    async fn operation(&self, way: Way, at: u64, data: Segments) -> io::Result<()> {
        let span = Span::new(at, data.len());
        self.asked.borrow_mut().push((way, span));
        self.in_flight.set(self.in_flight.get() + 1);
        self.most_in_flight.set(self.most_in_flight.get().max(self.in_flight.get()));
        self.count.set(self.count.get() + 1);
        self.tasks.sleep_until(self.tasks.turn_ns() + 1000 + self.count.get()).await;
        self.in_flight.set(self.in_flight.get() - 1);
        if self.bad.borrow().iter().any(|bad| bad.overlaps(span)) {
            return Err(io::Error::from_raw_os_error(self.errno.get()));
        }
        let place = at as usize..(at + data.len()) as usize;
        let mut bytes = self.bytes.borrow_mut();
        match way {
            Way::Read => data.copy_from(&bytes[place]),
            Way::Write => data.copy_to(&mut bytes[place]),
        }
        Ok(())
    }
}

// SAFETY: the memory is used until the futures end, and not after.
unsafe impl Storage for Store {
    fn info(&self) -> StorageInfo {
        StorageInfo {
            align: 1,
            sector_len: 512,
            resizable: false,
            fresh_reads_zero: false,
            promises_space: false,
        }
    }

    fn len(&self) -> u64 {
        LEN as u64
    }

    async fn read(&self, at: u64, into: Segments) -> io::Result<()> {
        self.operation(Way::Read, at, into).await
    }

    async fn write(&self, at: u64, from: Segments) -> io::Result<()> {
        self.operation(Way::Write, at, from).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn zero(&self, _: Span, _: Zeroing) -> io::Result<()> {
        Ok(())
    }

    async fn allocate(&self, _: Span, _: bool) -> io::Result<()> {
        Ok(())
    }

    async fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A transfer of a test: its direction, its place in sectors, what is written.
#[derive(Clone, Copy, Debug)]
struct Asked(Way, u64, u64, u8);

fn run<T: 'static>(sim: &Sim, future: impl Future<Output = T> + 'static) -> T {
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let make = |(): ()| std::future::ready(());
    Executor::new(sim.tasks().clone(), Inbox::new(1), make, polling).block_on(sim, &mut (), future)
}

/// Has all of them come at the same time; gives what each ended with, and the memory of reads.
fn together(
    sim: &Sim,
    store: &Rc<Store>,
    sizes: TransferSizes,
    all: &[Asked],
) -> Vec<(Result<(), Option<i32>>, PageBuf)> {
    let tasks = sim.tasks().clone();
    let transfers = Transfers::new(Arc::new(LiveSizes::new(sizes)), tasks.clone());
    let ended: Rc<RefCell<Vec<_>>> = Rc::new(RefCell::new(all.iter().map(|_| None).collect()));
    let done = Rc::new(Notify::default());
    for (index, Asked(way, first, count, fill)) in all.iter().copied().enumerate() {
        let (store, transfers, tasks) = (Rc::clone(store), Rc::clone(&transfers), tasks.clone());
        let (ended, done) = (Rc::clone(&ended), Rc::clone(&done));
        sim.tasks().spawn(async move {
            let mut page = PageBuf::zeroed((count * SECTOR) as usize);
            page.fill(fill);
            // SAFETY: the page outlives the transfer, which is awaited here.
            let data = unsafe { page.segments(0..(count * SECTOR) as usize) };
            let result = transfers.go(&*store, way, first * SECTOR, data).await;
            let result = result.map_err(|error| error.raw_os_error());
            ended.borrow_mut()[index] = Some((result, page));
            done.notify_all(&tasks);
        });
    }
    let waited = Rc::clone(&ended);
    run(sim, async move {
        while waited.borrow().iter().any(Option::is_none) {
            done.wait(&tasks).await;
        }
    });
    ended.take().into_iter().flatten().collect()
}

const fn sizes(split: u32, merge: u32) -> TransferSizes {
    TransferSizes { split, merge }
}

fn world() -> (Sim, Rc<Store>) {
    let sim = SimHost::new(1).process();
    let store = Store::new(sim.tasks());
    (sim, store)
}

fn writes(places: &[(u64, u64)]) -> Vec<Asked> {
    let asked = places.iter().enumerate();
    asked.map(|(index, &(first, count))| Asked(Way::Write, first, count, 200 + index as u8)).collect()
}

#[test]
fn nothing_is_changed_where_nothing_is_set() {
    let (sim, store) = world();
    together(&sim, &store, sizes(0, 0), &writes(&[(0, 1), (1, 1), (2, 64)]));
    assert_eq!(store.spans(), [(0, 1), (1, 1), (2, 64)]);
}

#[test]
fn a_long_transfer_goes_in_pieces_that_end_at_multiples_of_their_size() {
    let (sim, store) = world();
    for way in [Way::Read, Way::Write] {
        let ended = together(&sim, &store, sizes(4096, 0), &[Asked(way, 3, 30, 7)]);
        assert_eq!(store.spans(), [(3, 5), (8, 8), (16, 8), (24, 8), (32, 1)]);
        assert_eq!(ended[0].0, Ok(()));
        let at = |sector: u64| (sector * SECTOR) as usize;
        if way == Way::Read {
            assert!((0..30).all(|sector| ended[0].1[at(sector)..at(sector + 1)] == [3 + sector as u8; 512]));
        } else {
            assert_eq!(store.bytes.borrow()[at(3)..at(33)], vec![7; at(30)]);
        }
    }
    assert_eq!(store.most_in_flight.get(), 5);
    // No more are in flight than there is room for, and one that fails is the last that begins.
    together(&sim, &store, sizes(512, 0), &[Asked(Way::Read, 0, 128, 0)]);
    assert_eq!((store.most_in_flight.get(), store.spans().len()), (PIECES_MAX, 128));
    store.bad.borrow_mut().push(Span::new(5 * SECTOR, 1));
    let ended = together(&sim, &store, sizes(512, 0), &[Asked(Way::Read, 0, 128, 0)]);
    assert_eq!(ended[0].0, Err(Some(libc::EIO)));
    assert!(store.spans().len() < 2 * PIECES_MAX);
}

#[test]
fn neighbours_go_as_one_up_to_the_size_that_is_set() {
    let (sim, store) = world();
    let places = [(0, 2), (2, 2), (4, 4), (8, 1), (20, 1), (21, 1), (21, 1), (22, 1)];
    together(&sim, &store, sizes(0, 4096), &writes(&places));
    // The first three fill a page; the second of those at 21 begins a new one.
    assert_eq!(store.spans(), [(0, 8), (8, 1), (20, 2), (21, 2)]);
    let bytes = store.bytes.take();
    for (sector, want) in [(0, 200), (3, 201), (7, 202), (8, 203), (20, 204), (21, 206), (22, 207)] {
        assert_eq!(bytes[sector * 512..(sector + 1) * 512], [want; 512], "sector {sector}");
    }
    // Other directions and other storages are no neighbours.
    *store.bytes.borrow_mut() = bytes;
    let mixed = [Asked(Way::Read, 0, 1, 0), Asked(Way::Write, 1, 1, 9), Asked(Way::Read, 2, 1, 0)];
    let ended = together(&sim, &store, sizes(0, 4096), &mixed);
    assert_eq!(store.spans(), [(0, 1), (1, 1), (2, 1)]);
    assert_eq!((ended[0].1[0], ended[2].1[0]), (200, 201));
}

#[test]
fn an_error_is_of_the_transfer_that_it_belongs_to() {
    let (sim, store) = world();
    store.bad.borrow_mut().extend([Span::new(2 * SECTOR, 1), Span::new(5 * SECTOR, 1)]);
    let places: Vec<_> = (0..8).map(|sector| (sector, 1)).collect();
    for way in [Way::Write, Way::Read] {
        let all: Vec<_> = places.iter().map(|&(first, count)| Asked(way, first, count, 77)).collect();
        let ended = together(&sim, &store, sizes(0, 4096), &all);
        let failed: Vec<_> = (0..8).filter(|index| ended[*index].0.is_err()).collect();
        assert_eq!(failed, [2, 5], "{way:?}");
        assert_eq!(store.spans()[0], (0, 8), "they went together first");
        assert!((0..8).all(|index| failed.contains(&index) || ended[index].1[0] == 77));
    }
    // One that was cancelled takes those with it that it led: they may come again.
    store.errno.set(libc::ECANCELED);
    let ended = together(&sim, &store, sizes(0, 4096), &writes(&places));
    assert_eq!(ended[0].0, Err(Some(libc::ECANCELED)));
    assert!(ended[1..].iter().all(|(result, _)| *result == Err(Some(libc::EAGAIN))));
    assert_eq!(store.spans(), [(0, 8)]);
}

#[test]
fn the_order_within_what_overlaps_is_the_order_in_which_they_came() {
    let (sim, store) = world();
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut next = 0;
        let all: Vec<_> = (0..2 + random.below(30))
            .map(|index| {
                // Half of them go on where the one before ended.
                let first = if random.chance(1, 2) && next < 100 { next } else { random.below(100) };
                let count = 1 + random.below(8);
                next = first + count;
                let way = if random.chance(2, 3) { Way::Write } else { Way::Read };
                Asked(way, first, count, index as u8)
            })
            .collect();
        let sizes = [sizes(0, 4096), sizes(4096, 4096), sizes(8192, 2048), sizes(512, 0)][seed as usize % 4];
        let mut model = store.bytes.borrow().clone();
        let mut wanted = Vec::new();
        for Asked(way, first, count, fill) in &all {
            let place = (first * SECTOR) as usize..((first + count) * SECTOR) as usize;
            if *way == Way::Write {
                model[place.clone()].fill(*fill);
            }
            wanted.push(model[place].to_vec());
        }
        // The storage takes the same time for each, so that its order is that in which they went there.
        let ended = together(&sim, &store, sizes, &all);
        for ((result, page), wanted) in ended.iter().zip(&wanted) {
            assert_eq!(*result, Ok(()), "seed {seed}");
            assert!(page[..wanted.len()] == wanted[..], "seed {seed}, {sizes}: {all:?}");
        }
        assert!(*store.bytes.borrow() == model, "seed {seed}, {sizes}: {all:?}");
        let asked = store.spans().len();
        assert!(sizes.merge == 0 || sizes.split > 0 || asked <= all.len());
    }
}

#[test]
fn what_passes_comes_behind_what_waits() {
    let (sim, store) = world();
    let transfers = Transfers::new(Arc::new(LiveSizes::new(sizes(0, 4096))), sim.tasks().clone());
    let page = Rc::new(PageBuf::zeroed(512));
    let (tasks, order) = (sim.tasks().clone(), Rc::new(RefCell::new(Vec::new())));
    for index in 0..3 {
        let (transfers, store, page) = (Rc::clone(&transfers), Rc::clone(&store), Rc::clone(&page));
        let order = Rc::clone(&order);
        tasks.spawn(async move {
            if index == 1 {
                transfers.pass().await;
                order.borrow_mut().push(store.asked.borrow().len());
            } else {
                // SAFETY: the page is kept until the end.
                let data = unsafe { page.segments(0..512) };
                transfers.go(&*store, Way::Write, index * SECTOR, data).await.expect("written");
            }
        });
    }
    let waiting = tasks.clone();
    run(&sim, async move { waiting.sleep_until(waiting.turn_ns() + 1_000_000).await });
    assert_eq!((order.take(), store.spans()), (vec![1], vec![(0, 1), (2, 1)]));
}
