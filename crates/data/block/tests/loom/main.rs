//! Where threads of a disk meet, in every interleaving that the model checker finds (loom; two pre-emptions).
//!
//! `gate` and `mailbox` are compiled here once more, on the checker's atomics. A waiter that nothing wakes is a
//! deadlock, which the checker reports.

#[path = "../../src/shared/gate.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod gate;
#[path = "../../src/shared/mailbox.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod mailbox;

/// What takes the place of `src/shared/atomic.rs`.
mod atomic {
    pub use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().expect("no panic")
        }
    }
}

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

use gate::{Gate, Open};
use mailbox::Mailbox;

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// An event counter that wakes a thread.
struct Event(loom::sync::Mutex<bool>, loom::sync::Condvar);

impl Event {
    fn new() -> Self {
        Self(loom::sync::Mutex::new(false), loom::sync::Condvar::new())
    }

    fn signal(&self) {
        *self.0.lock().expect("no panic") = true;
        self.1.notify_one();
    }

    fn wait(&self) {
        let mut signalled = self.0.lock().expect("no panic");
        while !*signalled {
            signalled = self.1.wait(signalled).expect("no panic");
        }
        *signalled = false;
    }
}

/// A disk of one block: where it is, and the two places that it can have.
struct Disk {
    gate: Gate<2>,
    word: AtomicU64,
    place: UnsafeCell<u32>,
    owner: Event,
}

impl Disk {
    fn new(open: Open) -> Arc<Self> {
        let disk = Self {
            gate: Gate::new(),
            word: AtomicU64::new(1),
            place: UnsafeCell::new(0),
            owner: Event::new(),
        };
        disk.gate.set(1, open);
        Arc::new(disk)
    }

    /// A thread that makes one request, as queue thread `index`.
    fn queue(disk: &Arc<Self>, index: usize) -> thread::JoinHandle<bool> {
        let disk = Arc::clone(disk);
        thread::spawn(move || disk.request(index))
    }

    /// A request of queue thread `index`; whether it was served there.
    fn request(&self, index: usize) -> bool {
        if let Err(wake) = self.gate.enter(index, 1, Open::Everything) {
            if wake {
                self.owner.signal();
            }
            return false;
        }
        let known = self.word.load(Ordering::Acquire) != 0;
        if known {
            // SAFETY: that this may be done is what is tested; the checker reports a conflict.
            self.place.with(|place| assert_eq!(unsafe { *place }, 0, "the place of another block"));
        }
        if self.gate.leave(index) {
            self.owner.signal();
        }
        known
    }

    /// Closes the gate and waits until nothing is inside.
    fn hold(&self) {
        self.gate.set(1, Open::Nothing);
        while !self.gate.is_empty() {
            self.owner.wait();
        }
    }
}

#[test]
fn a_place_that_was_given_back_has_no_user_when_another_block_gets_it() {
    explore(|| {
        let disk = Disk::new(Open::Everything);
        let queues = [0, 1].map(|index| Disk::queue(&disk, index));
        disk.hold();
        disk.word.store(0, Ordering::Release);
        disk.gate.set(1, Open::Everything);
        // SAFETY: as above.
        disk.place.with_mut(|place| unsafe { *place = 7 });
        for queue in queues {
            queue.join().expect("no panic");
        }
    });
}

#[test]
fn an_owner_that_looks_again_meanwhile_is_woken_all_the_same() {
    explore(|| {
        let disk = Disk::new(Open::Everything);
        let queue = Disk::queue(&disk, 0);
        disk.gate.set(1, Open::Nothing);
        let mut is_empty = disk.gate.is_empty();
        while !is_empty {
            // Another letter came, and the state of the disk was looked at.
            disk.gate.set(1, Open::Nothing);
            disk.owner.wait();
            is_empty = disk.gate.is_empty();
        }
        // SAFETY: as above.
        disk.place.with_mut(|place| unsafe { *place = 7 });
        disk.word.store(0, Ordering::Release);
        queue.join().expect("no panic");
    });
}

#[test]
fn a_request_with_images_of_before_does_not_enter() {
    explore(|| {
        let disk = Disk::new(Open::Everything);
        let queue = Disk::queue(&disk, 0);
        disk.hold();
        // SAFETY: as above. The images are others now.
        disk.place.with_mut(|place| unsafe { *place = 7 });
        disk.gate.set(2, Open::Everything);
        queue.join().expect("no panic");
    });
}

#[test]
fn after_an_early_answer_no_other_thread_serves_by_itself() {
    explore(|| {
        let disk = Disk::new(Open::Everything);
        let answered = Arc::new(AtomicBool::new(false));
        let first = {
            let (disk, answered) = (Arc::clone(&disk), Arc::clone(&answered));
            thread::spawn(move || {
                disk.gate.fence();
                answered.store(true, Ordering::Release);
            })
        };
        // The guest has the answer, and sends its next request by another queue.
        if answered.load(Ordering::Acquire) {
            assert!(!disk.request(1), "served beside a change that is still in flight");
        }
        first.join().expect("no panic");
        disk.gate.unfence();
        assert!(disk.request(1));
    });
}

#[test]
fn no_letter_stays_with_a_receiver_that_sleeps() {
    explore(|| {
        let mailbox = Arc::new((Mailbox::new(), Event::new()));
        let sender = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || {
                for letter in 1..=2 {
                    if mailbox.0.send(letter) {
                        mailbox.1.signal();
                    }
                }
            })
        };
        let mut letters = Vec::new();
        while letters.len() < 2 {
            mailbox.0.take(&mut letters);
            if letters.len() < 2 && mailbox.0.arm() {
                mailbox.1.wait();
            }
            mailbox.0.disarm();
        }
        assert_eq!(letters, [1, 2]);
        sender.join().expect("no panic");
    });
}
