//! One side shows what it has while the other goes to sleep, on two processors at the same moment: the barriers.
//!
//! `every_order` tries all orders of steps, but as if memory had one order for all; a processor may let a read pass an
//! earlier write of its own. Then the side that shows sees an old event, the other an old producer, and both wait.

use std::hint::spin_loop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Abi, BackRing, FrontRing, Request, op, status};
use crate::domain::PAGE_LEN;

/// Rounds, if there is time for so many; a host that is busy with other things makes fewer.
const ROUNDS: u32 = 200_000;
const ROUNDS_MIN: u32 = 256;
const TIME: Duration = Duration::from_millis(500);

/// Waits until the other side has come to this round too; spins, because both shall go on at the same moment.
fn meet(ours: &AtomicU32, theirs: &AtomicU32, round: u32) -> bool {
    ours.store(round, Ordering::Release);
    let mut spins = 0u32;
    loop {
        match theirs.load(Ordering::Acquire) {
            u32::MAX => return false,
            other if other >= round => return true,
            _ => {}
        }
        spins += 1;
        if spins > 2000 {
            thread::yield_now();
        } else {
            spin_loop();
        }
    }
}

/// What one side does in a round: the part that races, then the part that does not.
trait Side {
    /// Shows or arms; whether that makes sure that the other side's work is seen.
    fn race(&mut self) -> bool;
    /// Puts the ring back to where a round begins. Called by one side after the other.
    fn settle(&mut self);
}

struct Front(FrontRing);
struct Back(BackRing);
/// As `Front` and `Back` with the parts exchanged: the back end shows, the front end arms.
struct FrontArms(FrontRing);
struct BackShows(BackRing);

fn request() -> Request {
    Request { op: op::FLUSH_DISKCACHE, ..Request::default() }
}

impl Side for Front {
    fn race(&mut self) -> bool {
        assert!(self.0.put(&request().encode(0, Abi::X86_64)));
        self.0.publish()
    }

    fn settle(&mut self) {
        self.0.look().expect("the rules are kept");
        while self.0.take().is_some() {}
    }
}

impl Side for Back {
    fn race(&mut self) -> bool {
        self.0.arm().expect("the rules are kept")
    }

    fn settle(&mut self) {
        assert_eq!(self.0.look(), Ok(1));
        while self.0.take().is_some() {}
        self.0.push(&request().response(status::OKAY));
        let _ = self.0.publish();
    }
}

impl Side for FrontArms {
    fn race(&mut self) -> bool {
        self.0.arm(1).expect("the rules are kept")
    }

    fn settle(&mut self) {
        assert_eq!(self.0.look(), Ok(1));
        while self.0.take().is_some() {}
        assert!(self.0.put(&request().encode(0, Abi::X86_64)));
        let _ = self.0.publish();
    }
}

impl Side for BackShows {
    fn race(&mut self) -> bool {
        self.0.push(&request().response(status::OKAY));
        self.0.publish()
    }

    fn settle(&mut self) {
        assert_eq!(self.0.look(), Ok(1));
        while self.0.take().is_some() {}
    }
}

/// Ends the wait of the other side when it is dropped, even if a test failed.
struct Leave<'a>(&'a AtomicU32);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.store(u32::MAX, Ordering::Release);
    }
}

/// Rounds of both sides; how many there were. `first` settles first.
fn race(first: impl Side + Send, second: impl Side + Send) -> u32 {
    let counters = [AtomicU32::new(0), AtomicU32::new(0)];
    let sure = [AtomicU32::new(0), AtomicU32::new(0)];
    let end = Instant::now() + TIME;
    let (counters, sure) = (&counters, &sure);
    let side = move |index: usize, side: &mut dyn Side| {
        let (ours, theirs) = (&counters[index], &counters[1 - index]);
        let _leave = Leave(ours);
        let mut rounds = 0;
        for round in 0..ROUNDS {
            if index == 0 && round >= ROUNDS_MIN && round % 256 == 0 && Instant::now() > end {
                break;
            }
            let at = round * 4 + 1;
            if !meet(ours, theirs, at) {
                break;
            }
            // The moments differ a little from round to round.
            (0..(round * (index as u32 + 3)) % 17).for_each(|_| spin_loop());
            sure[index].store(side.race().into(), Ordering::Relaxed);
            meet(ours, theirs, at + 1);
            let either = sure.iter().any(|sure| sure.load(Ordering::Relaxed) == 1);
            assert!(either, "round {round}: neither a notification nor a second look, both would sleep");
            if index == 0 {
                side.settle();
            }
            meet(ours, theirs, at + 2);
            if index == 1 {
                side.settle();
            }
            rounds = round + 1;
        }
        rounds
    };
    thread::scope(|scope| {
        let (mut first, mut second) = (first, second);
        let other = scope.spawn(move || side(1, &mut second));
        let rounds = side(0, &mut first);
        other.join().expect("the other side");
        rounds
    })
}

fn rings(split: bool, memory: &mut [[u64; 512]]) -> (FrontRing, BackRing) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let base = NonNull::new(start.wrapping_add(start.align_offset(PAGE_LEN))).expect("memory");
    // SAFETY: three pages have two whole ones; the tests keep them longer than the rings.
    unsafe {
        let second = (base.byte_add(PAGE_LEN), PAGE_LEN);
        if split {
            let front = FrontRing::new_split((base, PAGE_LEN), second).expect("a ring");
            return (front, BackRing::split_from_raw((base, PAGE_LEN), second).expect("a ring"));
        }
        let front = FrontRing::new(base, PAGE_LEN, Abi::X86_64).expect("a ring");
        (front, BackRing::from_raw(base, PAGE_LEN, Abi::X86_64).expect("a ring"))
    }
}

#[test]
fn showing_requests_and_going_to_sleep() {
    for split in [false, true] {
        let mut memory = vec![[0; 512]; 3];
        let (front, back) = rings(split, &mut memory);
        // The back end answers before the front end looks.
        assert!(race(Back(back), Front(front)) >= ROUNDS_MIN);
    }
}

#[test]
fn showing_responses_and_going_to_sleep() {
    for split in [false, true] {
        let mut memory = vec![[0; 512]; 3];
        let (mut front, mut back) = rings(split, &mut memory);
        assert!(front.put(&request().encode(0, Abi::X86_64)));
        let _ = front.publish();
        assert!(back.look() == Ok(1) && back.take().is_some());
        assert!(race(FrontArms(front), BackShows(back)) >= ROUNDS_MIN);
    }
}
