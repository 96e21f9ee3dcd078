//! Queue threads on the simulator: executors of their own on the one clock, run in turns that are drawn from a seed.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tapio_block::{Exchange, FrontEnd, Op, QueueCore, QueueOptions, Taken};
use tapio_ring::sim::{Random, Sim};
use tapio_ring::{Executor, Hooks, Inbox, Io, PageBuf, Polling, PollingConfig};
use tapio_types::{Access, Span};

use crate::rig::{Process, Rig, RigKind};

/// A simulated queue thread.
pub struct QueueThread {
    pub sim: Sim,
    pub exchange: Arc<Exchange>,
    inbox: Rc<Inbox<Taken>>,
    /// Runs what can run now; whether anything did.
    step: Box<dyn FnMut() -> bool>,
}

/// The front ends of a thread as its hooks.
struct Front(Box<dyn FrontEnd>);

impl Hooks for Front {
    fn turn(&mut self) -> bool {
        self.0.pull()
    }

    fn publish(&mut self) {
        self.0.publish();
    }
}

impl QueueThread {
    /// Queue thread `index` of the disk of `process`.
    pub fn new(process: &Process, index: usize) -> Self {
        let sim = process.sim.thread();
        let exchange = Exchange::new(index, Arc::new(|| ()), Arc::new(|| ()));
        let inbox = Inbox::new(32);
        let options = QueueOptions { request_timeout: None, report: |_| () };
        let shared = process.core.share();
        let core = QueueCore::new(sim.clone(), Rc::clone(&inbox), shared, Arc::clone(&exchange), options);
        let serving = Rc::clone(&core);
        let make = move |taken| Rc::clone(&serving).serve(taken);
        let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
        let mut executor = Executor::new(sim.tasks().clone(), Rc::clone(&inbox), make, polling);
        let (driver, mut front) = (sim.clone(), Front(core.front()));
        let step = Box::new(move || executor.step(&driver, &mut front));
        Self { sim, exchange, inbox, step }
    }
}

/// The threads of a process beside the first.
#[derive(Default)]
pub struct Threads {
    /// Where they meet the first one.
    pub fronts: Vec<Box<dyn FrontEnd>>,
    pub queues: Vec<QueueThread>,
    pub random: Option<Random>,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.queues.len()).finish_non_exhaustive()
    }
}

impl Threads {
    /// The inbox of the thread that takes the next request: the first one's, `owner`, or another's.
    pub fn draw(&mut self, owner: &Rc<Inbox<Taken>>) -> Rc<Inbox<Taken>> {
        let count = self.queues.len() as u64;
        let drawn = self.random.as_mut().map_or(0, |random| random.below(count + 1));
        match drawn.checked_sub(1) {
            Some(index) => Rc::clone(&self.queues[index as usize].inbox),
            None => Rc::clone(owner),
        }
    }

    /// Runs each of the others, or not, as chance has it, or all of them.
    fn step(&mut self, all: bool) -> bool {
        let Some(random) = &mut self.random else { return false };
        let mut worked = false;
        for queue in &mut self.queues {
            if all || random.chance(1, 2) {
                worked |= (queue.step)();
            }
        }
        worked
    }
}

/// The hooks of the first thread.
pub struct Turns(pub Rc<RefCell<Threads>>);

impl Hooks for Turns {
    fn turn(&mut self) -> bool {
        let mut threads = self.0.borrow_mut();
        let stepped = threads.step(false);
        threads.fronts.iter_mut().fold(stepped, |any, front| front.pull() || any)
    }

    fn publish(&mut self) {
        self.0.borrow_mut().fronts.iter_mut().for_each(|front| front.publish());
    }

    /// Time goes on only when no thread has anything to do.
    fn arm(&mut self) -> bool {
        let mut threads = self.0.borrow_mut();
        let stepped = threads.step(true);
        threads.fronts.iter_mut().fold(stepped, |any, front| front.arm() || any)
    }

    fn disarm(&mut self) {
        self.0.borrow_mut().fronts.iter_mut().for_each(|front| front.disarm());
    }
}

/// The first queue thread begins while the owner looks what the storage keeps of a block.
#[test]
fn a_block_that_a_thread_writes_during_a_trim_of_its_beginning_is_kept() {
    for seed in 1..=300 {
        let rig = Rig::new(RigKind::Dynamic, seed);
        let (process, spec) = (rig.process(), rig.spec(Access::ReadWrite));
        let running = process.clone();
        let done = process.run(async move {
            running.core.resume(&spec).await.expect("it opens");
            let tasks = running.sim.tasks().clone();
            let span = |index: u64| Span::new(index << 16, 4096);
            running
                .ask(Op::Write { durable: true }, span(0), &PageBuf::zeroed(4096))
                .await
                .expect("it works");
            let trimming = running.clone();
            let trim = Rc::new(RefCell::new(None));
            let told = Rc::clone(&trim);
            tasks.spawn(async move {
                *told.borrow_mut() =
                    Some(trimming.ask(Op::Discard, Span::new(0, 4096), &PageBuf::zeroed(4096)).await);
            });
            tasks.sleep_until(tasks.turn_ns() + seed * 1_000).await;
            running.add_queue_threads(1, seed);
            let mut page = PageBuf::zeroed(4096);
            page[..4096].fill(7);
            for index in 1..=12 {
                running.ask(Op::Write { durable: false }, span(index), &page).await.expect("it works");
            }
            while trim.borrow().is_none() {
                tasks.sleep_until(tasks.turn_ns() + 1_000).await;
            }
            for index in 1..=12 {
                let page = PageBuf::zeroed(4096);
                running.ask(Op::Read, span(index), &page).await.expect("it works");
                assert!(page[..4096] == [7; 4096], "seed {seed}: write {index} is lost");
            }
        });
        assert!(done.is_some(), "power");
        process.end();
    }
}
