use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::layout::{Owner, SEGMENT_LEN, at};
use super::ledger::{GRACE_NS, Ledger, Memory, STARVED_NS};
use super::member::Observed;
use super::*;
use crate::shm::ShmRoot;

/// Words that can do something before each access.
#[derive(Clone)]
struct Words {
    words: Rc<Vec<Cell<u64>>>,
    accesses: Rc<Cell<usize>>,
    /// At this access: what happens instead of nothing.
    at: Rc<RefCell<Option<(usize, Happening)>>>,
}

type Happening = Box<dyn FnOnce()>;

impl Words {
    fn new() -> Self {
        let words = Rc::new((0..SEGMENT_LEN / 8).map(|_| Cell::new(0)).collect());
        Self { words, accesses: Rc::default(), at: Rc::default() }
    }

    fn access(&self) {
        let count = self.accesses.get();
        self.accesses.set(count + 1);
        let due = self.at.borrow().as_ref().is_some_and(|(at, _)| *at == count);
        let happens = if due { self.at.borrow_mut().take() } else { None };
        if let Some((_, happens)) = happens {
            happens();
        }
    }
}

impl Memory for Words {
    fn load(&self, at: usize) -> u64 {
        self.access();
        self.words[at].get()
    }
    fn store(&self, at: usize, value: u64) {
        self.access();
        self.words[at].set(value);
    }
    fn swap(&self, at: usize, old: u64, new: u64) -> bool {
        self.access();
        let same = self.words[at].get() == old;
        if same {
            self.words[at].set(new);
        }
        same
    }
}

fn owner(number: u32) -> Owner {
    Owner::new(number + 1, 1)
}

fn free<M: Memory>(ledger: &Ledger<M>) -> u32 {
    ledger.settle().free()
}

fn sum<M: Memory>(ledger: &Ledger<M>) -> u32 {
    let free = free(ledger);
    free + (0..POOL_DISKS_MAX).map(|slot| ledger.share(slot).held()).sum::<u32>()
}

/// What a disk can do to the accounts.
#[derive(Clone, Copy, Debug)]
enum Act {
    Take(u32),
    Give(u32),
    Contend(u32),
    Bury,
    Recount,
    Leave,
}

fn act<M: Memory>(ledger: &Ledger<M>, slot: usize, act: Act, dead: &dyn Fn(Owner) -> bool) {
    match act {
        Act::Take(pages) => drop(ledger.take(slot, pages)),
        Act::Give(pages) => ledger.give(slot, pages),
        Act::Contend(pages) => {
            let mut observed = Observed::default();
            observed.contend(ledger, slot, pages, 0, &|_: &Ledger<M>, _| false);
        }
        Act::Bury => drop(ledger.reclaim(owner(slot as u32), dead)),
        Act::Recount => ledger.recount(slot),
        Act::Leave => ledger.leave(slot),
    }
}

const ACTS: [Act; 6] = [Act::Take(3), Act::Give(2), Act::Contend(4), Act::Bury, Act::Recount, Act::Leave];

#[test]
fn whatever_happens_at_any_step_of_another_and_whichever_process_dies_pages_are_neither_lost_nor_made() {
    struct Killed;
    let mut cases = 0;
    for first in ACTS {
        for second in ACTS {
            // The second acts whole, or dies after some of its steps, at each step of the first.
            for step in 0.. {
                let mut reached = false;
                for life in 0.. {
                    let words = Words::new();
                    let ledger = Rc::new(Ledger::format(words.clone(), 10));
                    for number in 0..3 {
                        assert_eq!(ledger.join(owner(number), number), Some(number as usize));
                    }
                    // The third died with pages.
                    assert!(ledger.take(0, 3) && ledger.take(1, 2) && ledger.take(2, 4));
                    words.accesses.set(0);
                    let died = Rc::new(Cell::new(false));
                    let hit = Rc::new(Cell::new(false));
                    let inside = Rc::new(Cell::new(0));
                    let (inner, other, gone, was) =
                        (words.clone(), Rc::clone(&ledger), Rc::clone(&died), Rc::clone(&hit));
                    let steps = Rc::clone(&inside);
                    let happens = move || {
                        was.set(true);
                        let from = inner.accesses.get();
                        let kill = Box::new(|| std::panic::resume_unwind(Box::new(Killed)));
                        *inner.at.borrow_mut() = Some((from + life, kill));
                        let run = std::panic::AssertUnwindSafe(|| {
                            act(&*other, 1, second, &|owner| owner.pid() == 3);
                        });
                        gone.set(std::panic::catch_unwind(run).is_err());
                        *inner.at.borrow_mut() = None;
                        steps.set(inner.accesses.get() - from);
                    };
                    *words.at.borrow_mut() = Some((step, Box::new(happens)));
                    act(&*ledger, 0, first, &|owner| owner.pid() == 3);
                    *words.at.borrow_mut() = None;
                    cases += 1;
                    let context = format!("{first:?} with {second:?} at step {step}, dying: {life}");
                    assert_eq!(sum(&ledger), 10, "{context}");
                    // Another process finds all that the dead processes had.
                    let dead = |owner: Owner| owner.pid() == 3 || died.get() && owner.pid() == 2;
                    ledger.reclaim(Owner::new(99, 1), &dead);
                    let held: u32 = (0..3)
                        .filter(|slot| ledger.owner(*slot) != Owner::NONE)
                        .map(|slot| ledger.share(slot).held())
                        .sum();
                    assert_eq!(free(&ledger) + held, 10, "{context}: after the burial");
                    assert_eq!(ledger.share(2).held(), 0, "{context}");
                    reached |= hit.get();
                    if !died.get() {
                        break;
                    }
                }
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(cases > 3000, "only {cases} cases");
}

/// Words that threads use one access at a time, in an order that a seed decides.
struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

struct TurnState {
    words: Vec<u64>,
    random: u64,
    alive: Vec<bool>,
    turn: usize,
    /// Now and then one is killed.
    kills: bool,
}

struct Seat {
    turns: Arc<Turns>,
    number: usize,
}

struct Killed;

impl Seat {
    fn access<T>(&self, run: impl FnOnce(&mut Vec<u64>) -> T) -> T {
        let mut state = self.turns.state.lock().unwrap();
        while state.turn != self.number {
            state = self.turns.changed.wait(state).unwrap();
        }
        let out = run(&mut state.words);
        let chance = state.next_random();
        let alive = state.alive.iter().filter(|alive| **alive).count();
        let dies = state.kills && chance.is_multiple_of(61) && alive > 1;
        if dies {
            state.alive[self.number] = false;
        }
        state.pass_on();
        drop(state);
        self.turns.changed.notify_all();
        if dies {
            std::panic::resume_unwind(Box::new(Killed));
        }
        out
    }

    /// The thread is done and takes no more turns.
    fn rise(&self) {
        let mut state = self.turns.state.lock().unwrap();
        while state.turn != self.number {
            state = self.turns.changed.wait(state).unwrap();
        }
        state.alive[self.number] = false;
        state.pass_on();
        drop(state);
        self.turns.changed.notify_all();
    }
}

impl TurnState {
    fn next_random(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }

    fn pass_on(&mut self) {
        let alive: Vec<usize> = (0..self.alive.len()).filter(|number| self.alive[*number]).collect();
        let chance = self.next_random() as usize;
        self.turn = alive.get(chance % alive.len().max(1)).copied().unwrap_or(usize::MAX);
    }
}

impl Memory for Seat {
    fn load(&self, at: usize) -> u64 {
        self.access(|words| words[at])
    }
    fn store(&self, at: usize, value: u64) {
        self.access(|words| words[at] = value);
    }
    fn swap(&self, at: usize, old: u64, new: u64) -> bool {
        self.access(|words| {
            let same = words[at] == old;
            if same {
                words[at] = new;
            }
            same
        })
    }
}

#[test]
fn three_at_once_in_any_order_keep_the_books_straight() {
    three_at_once([0, 1, 2], true);
}

#[test]
fn threads_of_one_disk_in_any_order_keep_the_books_straight() {
    three_at_once([0, 1, 1], false);
}

/// Threads at these slots.
fn three_at_once(slots: [usize; 3], kills: bool) {
    let seeds = std::env::var("TAPIO_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .map_or(1..400, |seed| seed..seed + 1);
    for seed in seeds {
        let plain = Words::new();
        let ledger = Ledger::format(plain.clone(), 6);
        for number in 0..3 {
            ledger.join(owner(number), number).expect("room");
        }
        let words = plain.words.iter().map(Cell::get).collect();
        let state = TurnState { words, random: seed, alive: vec![true; 3], turn: 0, kills };
        let turns = Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() });
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let turns = Arc::clone(&turns);
                std::thread::spawn(move || {
                    let run = || {
                        let ledger = Ledger { memory: Seat { turns, number }, total: 6 };
                        let mut held = 0;
                        for round in 0..4 {
                            let pages = 1 + (number as u32 + round) % 4;
                            if ledger.take(slots[number], pages) {
                                held += pages;
                            }
                            if round % 2 == 1 && held > 0 {
                                ledger.give(slots[number], held.min(2));
                                held -= held.min(2);
                            }
                        }
                        ledger.memory.rise();
                        held
                    };
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).ok()
                })
            })
            .collect();
        let ends: Vec<Option<u32>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (word, value) in plain.words.iter().zip(&turns.state.lock().unwrap().words) {
            word.set(*value);
        }
        assert_eq!(sum(&ledger), 6, "TAPIO_SEED={seed}");
        for slot in 0..3 {
            let at = ends.iter().enumerate().filter(|(number, _)| slots[*number] == slot);
            if let Some(held) = at.map(|(_, end)| *end).sum::<Option<u32>>() {
                assert_eq!(ledger.share(slot).held(), held, "TAPIO_SEED={seed}, disk {slot}");
            }
        }
        let dead = |owner: Owner| ends[owner.pid() as usize - 1].is_none();
        ledger.reclaim(Owner::new(99, 1), &dead);
        let living: u32 = ends.iter().flatten().sum();
        assert_eq!(free(&ledger), 6 - living, "TAPIO_SEED={seed}");
    }
}

/// A disk of the simulation that follows: always another request to make.
struct Busy {
    pages: u32,
    depth: usize,
    observed: Observed,
    flying: usize,
    served: u64,
    stuck: bool,
    looks_again: bool,
}

/// Runs disks with requests of these pages and depths over a pool until `until_ns`; gives the pages each was served
/// after the first quarter of that time, which is for finding together.
/// A request takes 1 ms and 20 us for each page, more or less.
fn contest(total: u32, disks: &[(u32, usize)], stuck: Option<usize>, until_ns: u64) -> Vec<u64> {
    contest_on(20_000, total, disks, stuck, until_ns)
}

/// The same on a storage that takes so long for each page.
fn contest_on(
    page_ns: u64,
    total: u32,
    disks: &[(u32, usize)],
    stuck: Option<usize>,
    until_ns: u64,
) -> Vec<u64> {
    let ledger = Ledger::format(Words::new(), total);
    let mut busy: Vec<Busy> = disks
        .iter()
        .map(|(pages, depth)| Busy {
            pages: *pages,
            depth: *depth,
            observed: Observed::default(),
            flying: 0,
            served: 0,
            stuck: false,
            looks_again: false,
        })
        .collect();
    for number in 0..disks.len() as u32 {
        ledger.join(owner(number), number).expect("room");
    }
    let mut random = 11u64;
    let mut chance = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    // By time: what ends (disk and pages), which disk was woken (none), which looks again without that (0).
    let mut events: BTreeMap<(u64, u64), (usize, Option<u32>)> = BTreeMap::new();
    let mut serial = 0;
    let mut put = |events: &mut BTreeMap<_, _>, when: u64, what| {
        serial += 1;
        events.insert((when, serial), what);
    };
    for slot in 0..busy.len() {
        put(&mut events, slot as u64, (slot, None));
    }
    let mut now = 0;
    while now < until_ns {
        let Some(((when, _), (slot, ended))) = events.pop_first() else { break };
        now = when;
        if ended == Some(0) {
            busy[slot].looks_again = false;
        } else if let Some(pages) = ended {
            busy[slot].flying -= 1;
            busy[slot].served += if now > until_ns / 4 { u64::from(pages) } else { 0 };
            ledger.give(slot, pages);
        }
        if stuck == Some(slot) && now > until_ns / 4 {
            busy[slot].stuck = true;
        }
        let mut changed = ended.is_some_and(|pages| pages > 0);
        while busy[slot].flying < busy[slot].depth {
            let disk = &mut busy[slot];
            let Some(pages) =
                disk.observed.contend(&ledger, slot, disk.pages, now, &|_: &Ledger<Words>, _| false)
            else {
                if !std::mem::replace(&mut disk.looks_again, true) {
                    put(&mut events, now + GRACE_NS, (slot, Some(0)));
                }
                break;
            };
            changed = true;
            disk.flying += 1;
            let ns = 1_000_000 + u64::from(pages) * page_ns;
            assert!(pages > 0 || stuck.is_some(), "a request went without pages");
            let ns = ns + chance(ns);
            if !disk.stuck {
                put(&mut events, now + ns, (slot, Some(pages)));
            }
        }
        let observed = &busy[slot].observed;
        if changed && let Some(other) = ledger.next_to_wake(slot, &|other| observed.passes_by(&ledger, other))
        {
            put(&mut events, now + 5_000 + chance(20_000), (other, None));
        }
        assert!(ledger.settle().free() <= total);
    }
    busy.iter().map(|disk| disk.served).collect()
}

fn spread(served: &[u64]) -> f64 {
    let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
    *most as f64 / *least as f64
}

#[test]
fn busy_disks_get_the_same_number_of_pages_whatever_their_requests_are() {
    for (total, disks) in [
        (704, vec![(1, 400), (256, 8)]),
        (704, vec![(1, 1000), (1, 1000)]),
        (704, vec![(256, 8), (256, 8)]),
        (704, vec![(1, 300), (256, 8), (16, 64), (256, 2)]),
        (704, vec![(1, 256), (256, 8), (1, 256), (256, 8), (1, 256), (256, 8), (11, 64), (64, 16)]),
        (32, vec![(1, 64), (256, 8), (4, 64)]),
    ] {
        let served = contest(total, &disks, None, 1_500_000_000);
        assert!(spread(&served) < 1.02, "{total} pages, {disks:?}: {served:?}");
        assert!(served[0] > 500, "{total} pages, {disks:?}: {served:?}");
    }
}

#[test]
fn a_hundred_busy_disks_get_the_same() {
    let disks: Vec<_> = (0..100).map(|number| if number % 2 == 0 { (1, 32) } else { (11, 32) }).collect();
    let served = contest(704, &disks, None, 1_000_000_000);
    assert!(spread(&served) < 1.02, "{served:?}");
}

/// As many turns as there is time for, on a storage of 47 MB/s: a turn takes longer than a stopped process may hold up
/// others, and a round of all disks much longer than anything waits for a pool that does not change.
#[test]
fn a_hundred_disks_with_requests_larger_than_the_pool_take_turns_on_a_slow_storage() {
    const PAGE_NS: u64 = 87_000;
    let until_ns = 400_000_000_000;
    let turns = |disks: usize| -> Vec<u64> {
        let served = contest_on(PAGE_NS, 704, &vec![(1024, 1); disks], None, until_ns);
        served.iter().map(|pages| pages / 704).collect()
    };
    let alone = turns(1)[0];
    for disks in [2, 5, 20, 50, 100] {
        let turns = turns(disks);
        let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        assert!(most - least <= 1, "{disks} disks: {turns:?}");
        let all: u64 = turns.iter().sum();
        assert!(all * 100 > alone * 98, "{disks} disks: {all} turns, {alone} of one alone");
    }
}

#[test]
fn a_request_as_large_as_the_pool_is_not_starved_by_small_ones() {
    for (page_ns, until_ns) in [(20_000, 4_000_000_000), (300_000, 40_000_000_000)] {
        for large in [704, 1024, 400] {
            let mut disks = vec![(1, 8); 4];
            disks.push((large, 1));
            disks.extend(vec![(16, 4); 4]);
            let served = contest_on(page_ns, 704, &disks, None, until_ns);
            // One at a time, it may want less than they do.
            let alone = contest_on(page_ns, 704, &[(large, 1)], None, until_ns)[0];
            let most = (*served.iter().max().unwrap()).min(alone);
            assert!(served[4] * 5 > most * 4, "{page_ns} ns a page, {large} pages: {served:?}");
        }
    }
}

#[test]
fn a_request_as_large_as_the_pool_goes_on_beside_a_storage_that_is_stuck() {
    let served = contest(704, &[(704, 1), (8, 1), (704, 1)], Some(1), 8_000_000_000);
    // Once, until it is known that some pages do not come back, it waits for a second.
    assert!(served[0] > 50 * 600 && served[2] > 50 * 600, "{served:?}");
}

/// Its process is stopped when it is its turn: the others wait for a moment, once, and it is the first again when it
/// goes on.
#[test]
fn a_disk_that_was_woken_and_does_not_look_is_passed_until_it_does() {
    let ledger = Ledger::format(Words::new(), 100);
    for number in 0..3 {
        ledger.join(owner(number), number).expect("room");
    }
    let none = |_: &Ledger<Words>, _: Option<usize>| false;
    let mut observed: Vec<Observed> = (0..3).map(|_| Observed::default()).collect();
    let mut ask = |slot: usize, pages, now| observed[slot].contend(&ledger, slot, pages, now, &none);
    assert_eq!(ask(2, 100, 0), Some(100));
    assert_eq!((ask(0, 100, 0), ask(1, 10, 0)), (None, None));
    // However long the pages are out, nobody passes the first, which could not have them.
    assert_eq!(ask(1, 10, 10 * GRACE_NS - 1), None);
    ledger.give(2, 100);
    assert_eq!(ledger.next_to_wake(2, &|_| false), Some(0));
    let now = 20 * GRACE_NS;
    assert_eq!(ask(1, 10, now), None, "the first was woken just now");
    assert_eq!(ask(1, 10, now + GRACE_NS), Some(10), "it does not look");
    assert_eq!(ask(1, 10, now + GRACE_NS), Some(10), "and still does not");
    assert_eq!(ask(0, 100, now + GRACE_NS), None, "now it has looked");
    assert_eq!(ask(1, 10, now + 2 * GRACE_NS), None, "so it is the first again");
    ledger.give(1, 20);
    assert_eq!(ask(0, 100, now + 2 * GRACE_NS), Some(100));
}

#[test]
fn a_disk_alone_gets_all_and_one_with_little_to_do_costs_the_others_little() {
    // Alone: as many as there are pages for.
    let alone = contest(704, &[(256, 8)], None, 1_000_000_000);
    let narrow = contest(256, &[(256, 8)], None, 1_000_000_000);
    assert!(alone[0] > narrow[0] * 19 / 10, "{alone:?} {narrow:?}");
    let beside_modest = contest(704, &[(256, 8), (1, 1)], None, 1_000_000_000);
    assert!(beside_modest[0] * 10 > alone[0] * 9, "{beside_modest:?} {alone:?}");
}

#[test]
fn a_disk_whose_storage_is_stuck_keeps_its_part_and_no_more() {
    let with = contest(704, &[(1, 2000), (64, 32)], Some(1), 3_000_000_000);
    let alone = contest(704, &[(1, 2000)], None, 3_000_000_000);
    // Half of the pool is what is left, for three quarters of the time.
    assert!(with[0] * 10 > alone[0] * 3, "{with:?} beside {alone:?}");
}

#[test]
fn nonsense_in_the_segment_neither_hangs_nor_panics() {
    let mut random = 3u64;
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random ^ random << 31
    };
    for round in 0..200 {
        let words = Words::new();
        let ledger = Ledger::format(words.clone(), 704);
        let slot = ledger.join(owner(0), 0).expect("room");
        for _ in 0..1 + round % 40 {
            let at = at::STATE + next() as usize % 600;
            words.words[at].set(next());
        }
        let bytes: Vec<u8> = words.words.iter().flat_map(|word| word.get().to_ne_bytes()).collect();
        let _ = parse_pool("x", &bytes);
        let mut observed = Observed::default();
        let mut now = 0;
        for _ in 0..5 {
            let begin = now;
            let pages = loop {
                // Owners that are nonsense are no processes.
                let is_dead = |other: Owner| other != owner(0);
                let reclaim = |ledger: &Ledger<Words>, one| match one {
                    Some(slot) => ledger.reclaim_at(slot, owner(0), &is_dead),
                    None => ledger.reclaim(owner(0), &is_dead),
                };
                let taken = observed.contend(&ledger, slot, 20, now, &reclaim);
                if let Some(pages) = taken {
                    break pages;
                }
                // As the disk does: its own requests end, if it has any.
                let held = ledger.share(slot).held();
                if held > 0 {
                    ledger.give(slot, held);
                }
                now += GRACE_NS;
                assert!(now < begin + 2 * STARVED_NS, "round {round}: no page in two seconds");
            };
            ledger.give(slot, pages);
            while ledger.next_to_wake(slot, &|_| false).is_some() {}
        }
    }
}

#[test]
fn the_dead_are_found_in_lots() {
    let ledger = Ledger::format(Words::new(), 100);
    for slot in 0..40 {
        assert_eq!(ledger.join(owner(slot), slot), Some(slot as usize));
        assert!(ledger.take(slot as usize, 2));
    }
    let me = owner(7);
    let dead = |owner: Owner| owner == self::owner(3) || owner == self::owner(30);
    assert_eq!(ledger.reclaim_some(0, 16, me, &dead), 16);
    assert_eq!((ledger.owner(3), ledger.owner(30)), (Owner::NONE, owner(30)));
    assert_eq!(ledger.reclaim_some(16, 16, me, &dead), 32);
    assert_eq!(ledger.owner(30), Owner::NONE);
    assert_eq!(ledger.reclaim_some(32, 16, me, &dead), 8, "from the first again");
    assert_eq!(ledger.settle().free(), 100 - 2 * 38);
    assert_eq!(ledger.reclaim_some(300, 1000, me, &|_| true), 1300 % 40);
    assert_eq!((0..40).filter(|slot| ledger.owner(*slot) != Owner::NONE).count(), 1, "but never oneself");
}

#[test]
fn the_first_makes_a_pool_and_the_last_removes_it() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    let name: PoolName = "sr-1".parse().expect("a name");
    assert_eq!(pools(&root).expect("none"), []);
    let mut first = join(&root, &name, None, 7).expect("made");
    assert_eq!((first.total(), first.name()), (PAGES_DEFAULT, "sr-1"));
    let error = join(&root, &name, Some(100), 8).expect_err("another size");
    assert!(error.to_string().contains("has 704 pages, not 100"), "{error}");
    let mut second = join(&root, &name, Some(704), 8).expect("joined");
    assert_eq!(first.take(700, 0), Some(700));
    assert_eq!(second.take(5, 0), None);
    assert!(second.is_waiting());
    let shown = &pools(&root).expect("one")[0];
    assert_eq!((shown.pages, shown.used), (704, 700));
    assert_eq!(shown.disks[0], PoolDisk { pid: std::process::id(), minor: 7, held: 700, waits_for: 0 });
    assert_eq!(shown.disks[1].waits_for, 5);
    // A giver rings the bell of the disk that waits.
    first.give(600);
    let mut polled = libc::pollfd { fd: second.wake_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    assert_eq!(unsafe { libc::poll(&raw mut polled, 1, 1000) }, 1, "the bell did not ring");
    second.quiet();
    assert_eq!(second.take(5, 0), Some(5));
    assert_eq!((first.held(), second.held()), (100, 5));
    // Another thread of the second disk takes what is free, and nothing while a disk waits.
    let seat = second.seat();
    assert_eq!(seat.take_free(9), Some(9));
    assert!(!seat.give(4));
    assert_eq!(first.take(700, 0), None);
    assert_eq!(seat.take_free(1), None);
    assert!(seat.give(3));
    assert_eq!((first.held(), second.held()), (100, 7));
    drop(first);
    assert_eq!(second.take(690, 0), Some(690));
    drop(second);
    assert_eq!(pools(&root).expect("one")[0].used, 697, "the slot lives as long as a thread has it");
    assert!(!seat.give(7));
    drop(seat);
    assert!(!root.pools().exists(), "the last one leaves nothing");
    for bad in ["", ".x", "a/b", "a b", &"x".repeat(65)] {
        assert!(bad.parse::<PoolName>().is_err(), "{bad}");
    }
    assert!(join(&root, &name, Some(70_000), 1).is_err());
}

#[test]
fn a_file_that_is_no_pool_is_replaced_and_one_of_another_layout_is_left() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    let name: PoolName = "sr".parse().expect("a name");
    drop(join(&root, &name, None, 1).expect("made"));
    std::fs::create_dir(root.pools()).expect("made");
    std::fs::set_permissions(root.pools(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("set");
    let path = root.pools().join("sr");
    for damage in [vec![], vec![0xff; SEGMENT_LEN], vec![0; 100]] {
        std::fs::write(&path, damage).expect("written");
        assert_eq!(join(&root, &name, Some(9), 1).expect("made anew").take(20, 0), Some(9));
        std::fs::create_dir(root.pools()).expect("it was the last");
        std::fs::set_permissions(root.pools(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .expect("set");
    }
    let mut newer = vec![0; SEGMENT_LEN];
    for (at, word) in [(at::MAGIC, layout::MAGIC), (at::VERSION, 2), (at::TOTAL, 5)] {
        newer[at * 8..at * 8 + 8].copy_from_slice(&word.to_ne_bytes());
    }
    std::fs::write(&path, newer).expect("written");
    let error = join(&root, &name, None, 1).expect_err("another layout");
    assert!(error.to_string().contains("layout 2"), "{error}");
}

const CHILD: &str = "TAPIO_TEST_POOL_CHILD";

/// Not a test by itself: the process that the next one starts and kills.
#[test]
fn child_that_takes_and_gives() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let name: PoolName = "sr".parse().expect("a name");
    let mut member = join(&ShmRoot::new(dir), &name, None, std::process::id()).expect("joined");
    let begin = Instant::now();
    let mut held = Vec::new();
    let mut random = u64::from(std::process::id());
    while begin.elapsed() < Duration::from_secs(100) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let pages = if random >> 63 == 0 { 1 } else { 64 };
        match member.take(pages, begin.elapsed().as_nanos() as u64) {
            Some(pages) => held.push(pages),
            None => {
                let mut polled = libc::pollfd { fd: member.wake_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one valid entry.
                unsafe { libc::poll(&raw mut polled, 1, 5) };
                member.quiet();
            }
        }
        if held.len() > 16 || member.is_waiting() {
            held.drain(..).for_each(|pages| member.give(pages));
        }
    }
}

#[test]
fn pages_of_dead_processes_come_back_where_no_disk_waits_long() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    let name: PoolName = "sr".parse().expect("a name");
    let (mut one, mut other) =
        (join(&root, &name, Some(100), 1).expect("made"), join(&root, &name, None, 2).expect("joined"));
    // It takes its pages and never waits, so that no disk ever stands behind it.
    let mut dead = join(&root, &name, None, 3).expect("joined");
    assert_eq!(dead.take(50, 0), Some(50));
    std::mem::forget(dead);
    let file = std::fs::OpenOptions::new().write(true).open(root.pools().join("sr")).expect("the segment");
    let nobody_alive = Owner::new(u32::MAX, 1).0.to_ne_bytes();
    file.write_all_at(&nobody_alive, at::owner(2) as u64 * 8).expect("written");
    let disks = || pools(&root).expect("one")[0].disks.len();
    let mut now_ms = 0;
    while disks() == 3 {
        now_ms += 1;
        assert!(now_ms < 1100, "not found within a second of contention");
        let now_ns = now_ms * 1_000_000;
        assert_eq!(one.take(50, now_ns), Some(50));
        let taken = other.take(50, now_ns);
        one.give(50);
        assert_eq!(taken.or_else(|| other.take(50, now_ns)), Some(50));
        other.give(50);
    }
    assert_eq!(one.take(100, now_ms * 1_000_000), Some(100));
}

#[test]
fn pages_of_killed_processes_come_back() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    let name: PoolName = "sr".parse().expect("a name");
    let mut member = join(&root, &name, Some(200), 1).expect("made");
    let start = || {
        Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "pool::tests::child_that_takes_and_gives"])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("a child")
    };
    let begin = Instant::now();
    let mut served = 0u64;
    for round in 0..12 {
        let mut children: Vec<_> = (0..3).map(|_| start()).collect();
        // All of them have come, and are killed at another moment each time.
        let joined = Instant::now() + Duration::from_secs(60);
        while pools(&root).expect("one")[0].disks.len() < 4 {
            assert!(Instant::now() < joined, "the children do not join: {:?}", pools(&root));
            std::thread::sleep(Duration::from_millis(1));
        }
        let until = Instant::now() + Duration::from_millis(20 + round * 7);
        while Instant::now() < until || served < (round + 1) * 100 {
            assert!(Instant::now() < joined, "{served} pages until round {round}");
            if let Some(pages) = member.take(16, begin.elapsed().as_nanos() as u64) {
                served += u64::from(pages);
                member.give(pages);
            } else {
                std::thread::sleep(Duration::from_micros(200));
                member.quiet();
            }
        }
        for child in &mut children {
            child.kill().expect("killed");
            child.wait().expect("waited for");
        }
    }
    member.stop_waiting();
    // A disk that finds the pool empty takes it all in the end.
    let until = Instant::now() + Duration::from_secs(60);
    let taken = loop {
        match member.take(200, begin.elapsed().as_nanos() as u64) {
            Some(pages) if pages > 0 => break pages,
            _ => assert!(Instant::now() < until, "pages were lost: {:?}", pools(&root)),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert_eq!(taken, 200);
    // Dead disks are looked for while one waits for pages, and on a busy host the last was killed a moment ago.
    let until = Instant::now() + Duration::from_secs(60);
    while pools(&root).expect("one")[0].disks.len() > 1 {
        assert!(Instant::now() < until, "the dead processes have not left: {:?}", pools(&root));
        assert_eq!(member.take(1, begin.elapsed().as_nanos() as u64), None, "all pages are taken");
        std::thread::sleep(Duration::from_millis(2));
    }
    member.stop_waiting();
    drop(member);
    assert!(!root.pools().exists());
}

#[test]
fn a_pool_of_dead_disks_is_cleaned_away() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = ShmRoot::new(dir.path());
    clean_pools(&root).expect("nothing to do");
    let name: PoolName = "sr".parse().expect("a name");
    let member = join(&root, &name, None, 1).expect("made");
    clean_pools(&root).expect("looked at");
    assert_eq!(pools(&root).expect("listed").len(), 1, "a living disk keeps its pool");
    // As if killed.
    let file = std::fs::OpenOptions::new().write(true).open(root.pools().join("sr")).expect("opens");
    std::os::unix::fs::FileExt::write_all_at(&file, &(u64::MAX - 5).to_ne_bytes(), at::owner(0) as u64 * 8)
        .expect("written");
    clean_pools(&root).expect("cleaned");
    assert_eq!(pools(&root).expect("listed"), []);
    drop(member);
}
