//! Both sides of a small ring, step by step, in every order there is.
//!
//! A step is one look at shared memory or one change of it, so that what happens between the halves of showing and of
//! arming is tried too. From every state that can be reached every next step is made; nothing may be lost, come twice
//! or come in pieces, and never may both sides sleep while something is left to do. The back end may die between any
//! two steps; another one goes on with a record of what was taken, as it must be kept beside a ring.

use std::collections::HashSet;
use std::ptr::NonNull;

use super::{Abi, BackRing, FrontRing, Request, op};
use crate::domain::PAGE_LEN;

/// What a side does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Moves requests or responses.
    Work,
    /// Has shown what it moved, the number before; asks whether to notify.
    Shown(u32),
    /// Has nothing to do, and is about to set its event.
    Idle,
    /// Has set its event, looks once more.
    Armed,
    /// Waits for a notification.
    Asleep,
}

/// Memory for a ring of two areas, or one.
struct Areas(Vec<[u64; 512]>);

/// Slots of a small ring, at most.
const SLOTS_MAX: u32 = 2;
/// Bytes of an area that it uses, at most.
const USED: usize = 128 + SLOTS_MAX as usize * 112;

impl Areas {
    fn base(&mut self, area: usize) -> NonNull<u8> {
        let start = self.0.as_mut_ptr().cast::<u8>();
        NonNull::new(start.wrapping_add(start.align_offset(PAGE_LEN) + area * PAGE_LEN)).unwrap()
    }

    fn save(&mut self) -> Box<[u8; 2 * USED]> {
        let mut copy = Box::new([0; 2 * USED]);
        for area in 0..2 {
            let from = self.base(area).as_ptr();
            // SAFETY: inside the area.
            unsafe { from.copy_to_nonoverlapping(copy[area * USED..].as_mut_ptr(), USED) };
        }
        copy
    }

    fn restore(&mut self, copy: &[u8; 2 * USED]) {
        for area in 0..2 {
            let to = self.base(area).as_ptr();
            // SAFETY: inside the area.
            unsafe { to.copy_from_nonoverlapping(copy[area * USED..].as_ptr(), USED) };
        }
    }
}

struct State {
    front: FrontRing,
    back: BackRing,
    memory: Box<[u8; 2 * USED]>,
    phases: [Phase; 2],
    /// Whether a notification waits: for the front end, for the back end.
    notified: [bool; 2],
    /// Requests put, answers taken.
    asked: u64,
    answered: u64,
    /// Ids that the back end has taken and not answered. Answers come youngest first, so that they overlay requests.
    held: Vec<u64>,
    /// Ids that it has answered in the ring without showing that.
    pushed: Vec<u64>,
    /// How often it may still die.
    lives: u32,
    /// Ids that were answered, as bits.
    seen: u64,
}

type Key = ([u32; 5], [u32; 5], Box<[u8; 2 * USED]>, [Phase; 2], [bool; 2], [Vec<u64>; 2], u64, u32);

impl State {
    fn fork(&self) -> Self {
        Self {
            front: self.front.fork(),
            back: self.back.fork(),
            memory: self.memory.clone(),
            held: self.held.clone(),
            pushed: self.pushed.clone(),
            ..*self
        }
    }

    fn key(&self) -> Key {
        let numbers = (self.front.numbers(), self.back.numbers());
        let ids = [self.held.clone(), self.pushed.clone()];
        (numbers.0, numbers.1, self.memory.clone(), self.phases, self.notified, ids, self.seen, self.lives)
    }
}

struct World {
    areas: Areas,
    total: u64,
    visited: HashSet<Key>,
    /// States that have yet to go on.
    open: Vec<State>,
    ends: u64,
    /// Whether the ring is split, and its slots.
    shape: (bool, u32, u32),
}

impl World {
    /// Makes one step on a copy, and keeps what comes of it if it is new.
    fn step(&mut self, from: &State, step: impl FnOnce(&mut State, u64)) {
        let mut state = from.fork();
        self.areas.restore(&state.memory);
        step(&mut state, self.total);
        state.memory = self.areas.save();
        if self.visited.insert(state.key()) {
            self.open.push(state);
        }
    }

    fn front(&mut self, from: &State) {
        self.areas.restore(&from.memory);
        match from.phases[0] {
            Phase::Work => {
                if from.asked < self.total && from.front.room() > 0 {
                    self.step(from, |state, _| {
                        let request =
                            Request { id: state.asked, op: op::FLUSH_DISKCACHE, ..Request::default() };
                        assert!(state.front.put(&request.encode(0, Abi::X86_64)));
                        state.asked += 1;
                    });
                    self.areas.restore(&from.memory);
                }
                let mut probe = from.front.fork();
                let waiting = probe.look().expect("the back end keeps the rules");
                if waiting > 0 {
                    self.step(from, |state, _| {
                        state.front.look().unwrap();
                        let answer = state.front.take().expect("one is waiting");
                        assert!(answer.id < state.asked, "an answer to what was not asked");
                        assert_eq!(state.seen & 1 << answer.id, 0, "a second answer to {}", answer.id);
                        assert_eq!((answer.op, answer.status), (op::FLUSH_DISKCACHE, -1));
                        state.seen |= 1 << answer.id;
                        state.answered += 1;
                    });
                }
                self.step(from, |state, _| state.phases[0] = Phase::Shown(state.front.show()));
            }
            Phase::Shown(old) => self.step(from, |state, total| {
                state.notified[1] |= state.front.wants_notification(old);
                // It lies down when nothing more can be put, or all is put.
                let idle = state.asked == total || state.front.room() == 0;
                state.phases[0] = if idle { Phase::Idle } else { Phase::Work };
            }),
            Phase::Idle => self.step(from, |state, _| {
                state.front.set_event(1);
                state.phases[0] = Phase::Armed;
            }),
            Phase::Armed => self.step(from, |state, _| {
                let found = state.front.look().expect("the back end keeps the rules") > 0;
                state.phases[0] = if found { Phase::Work } else { Phase::Asleep };
            }),
            Phase::Asleep if from.notified[0] => self.step(from, |state, _| {
                state.notified[0] = false;
                state.phases[0] = Phase::Work;
            }),
            Phase::Asleep => {}
        }
    }

    fn back(&mut self, from: &State) {
        self.areas.restore(&from.memory);
        match from.phases[1] {
            Phase::Work => {
                let mut probe = from.back.fork();
                if probe.look().expect("the front end keeps the rules") > 0 {
                    self.step(from, |state, _| {
                        state.back.look().unwrap();
                        let slot = state.back.take().expect("one is waiting");
                        let request = Request::decode(&slot, Abi::X86_64).expect("a whole request");
                        let fresh = !state.held.contains(&request.id) && state.seen & 1 << request.id == 0;
                        assert!(fresh && request.id < state.asked, "request {} once more", request.id);
                        state.held.push(request.id);
                    });
                }
                if !from.held.is_empty() {
                    self.step(from, |state, _| {
                        let id = state.held.pop().expect("one is held");
                        let request = Request { id, op: op::FLUSH_DISKCACHE, ..Request::default() };
                        state.back.push(&request.response(-1));
                        state.pushed.push(id);
                    });
                }
                self.step(from, |state, _| {
                    state.phases[1] = Phase::Shown(state.back.show());
                    state.pushed.clear();
                });
            }
            Phase::Shown(old) => self.step(from, |state, _| {
                state.notified[0] |= state.back.wants_notification(old);
                // It lies down when it holds nothing.
                let idle = state.held.is_empty();
                state.phases[1] = if idle { Phase::Idle } else { Phase::Work };
            }),
            Phase::Idle => self.step(from, |state, _| {
                state.back.set_event();
                state.phases[1] = Phase::Armed;
            }),
            Phase::Armed => self.step(from, |state, _| {
                let found = state.back.look().expect("the front end keeps the rules") > 0;
                state.phases[1] = if found { Phase::Work } else { Phase::Asleep };
            }),
            Phase::Asleep if from.notified[1] => self.step(from, |state, _| {
                state.notified[1] = false;
                state.phases[1] = Phase::Work;
            }),
            Phase::Asleep => {}
        }
    }

    /// The back end dies and another one takes its place: it knows the memory and the record.
    fn rebirth(&mut self, from: &State) {
        let areas = [0, 1].map(|area| (self.areas.base(area), PAGE_LEN));
        let (split, requests, responses) = self.shape;
        self.step(from, |state, _| {
            // SAFETY: the areas outlive the rings.
            state.back = unsafe {
                if split {
                    BackRing::split_from_raw(areas[0], areas[1]).unwrap()
                } else {
                    BackRing::from_raw(areas[0].0, areas[0].1, Abi::X86_64).unwrap()
                }
            };
            state.back.shrink(requests, responses);
            state.held.append(&mut state.pushed);
            state.back.resume(state.held.len() as u32).expect("the record belongs to the ring");
            // What the former one was to say is said now, whether it had or not.
            state.notified[0] = true;
            state.phases[1] = Phase::Work;
            state.lives -= 1;
        });
    }

    fn explore(&mut self, first: State) {
        self.open.push(first);
        while let Some(state) = self.open.pop() {
            if state.phases == [Phase::Asleep; 2] && state.notified == [false; 2] {
                assert_eq!(state.answered, self.total, "both sides sleep, and {} were asked", state.asked);
                self.ends += 1;
                continue;
            }
            self.front(&state);
            self.back(&state);
            if state.lives > 0 {
                self.rebirth(&state);
            }
        }
    }
}

fn explore(split: Option<(u32, u32)>, slots: u32, total: u64, first: u32, lives: u32) -> (usize, u64) {
    let mut areas = Areas(vec![[0; 512]; 3]);
    let (one, two) = ((areas.base(0), PAGE_LEN), (areas.base(1), PAGE_LEN));
    // SAFETY: the areas outlive the rings.
    let (mut front, mut back) = unsafe {
        if split.is_some() {
            (FrontRing::new_split(one, two).unwrap(), BackRing::split_from_raw(one, two).unwrap())
        } else {
            (
                FrontRing::new_at(one.0, one.1, Abi::X86_64, first).unwrap(),
                BackRing::from_raw(one.0, one.1, Abi::X86_64).unwrap(),
            )
        }
    };
    let (requests, responses) = split.unwrap_or((slots, slots));
    assert!(requests.max(responses) <= SLOTS_MAX, "only so much is kept of a state");
    front.shrink(requests, responses);
    back.shrink(requests, responses);
    let memory = areas.save();
    let state = State {
        front,
        back,
        memory,
        phases: [Phase::Work; 2],
        notified: [false; 2],
        asked: 0,
        answered: 0,
        held: Vec::new(),
        pushed: Vec::new(),
        lives,
        seen: 0,
    };
    let shape = (split.is_some(), requests, responses);
    let mut world = World { areas, total, visited: HashSet::new(), open: Vec::new(), ends: 0, shape };
    world.explore(state);
    assert!(world.ends > 0, "no order comes to its end");
    (world.visited.len(), world.ends)
}

#[test]
fn a_ring_of_one_slot() {
    let (states, _) = explore(None, 1, 4, u32::MAX - 1, 0);
    assert!(states > 100, "{states}");
}

#[test]
fn a_ring_of_two_slots_across_the_end_of_numbers() {
    let (states, _) = explore(None, 2, 4, u32::MAX - 1, 0);
    assert!(states > 1000, "{states}");
}

#[test]
fn a_split_ring_with_fewer_slots_for_requests() {
    let (states, _) = explore(Some((1, 2)), 0, 3, 0, 0);
    assert!(states > 1000, "{states}");
}

#[test]
fn a_back_end_that_dies_at_any_moment() {
    let (states, _) = explore(None, 2, 3, u32::MAX - 1, 1);
    assert!(states > 1000, "{states}");
    let (states, _) = explore(Some((1, 2)), 0, 3, 0, 1);
    assert!(states > 1000, "{states}");
}
