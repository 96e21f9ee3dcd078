//! A queue in which addresses take turns.
//!
//! A client without a password can ask for many to be checked. So passwords wait in a queue of each address, and
//! addresses take turns: one that asks for a hundred delays another one by one password. When all places are taken, the
//! newest of the address that has most of them is sent away for an address that has fewer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::limits::LaneLimits;

/// Too many calls of this kind wait already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

#[derive(Debug, Default)]
struct State {
    running: usize,
    waiting: usize,
    /// Counts those that ever waited: a waiter is known by its number.
    number: u64,
    queues: HashMap<String, VecDeque<(u64, oneshot::Sender<Turn>)>>,
    /// Addresses that wait, the next one first.
    order: VecDeque<String>,
}

/// The queue.
#[derive(Debug)]
pub(super) struct Fair {
    limits: LaneLimits,
    state: Mutex<State>,
}

/// A place at work; it comes back when this is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Fair>);

/// A place in the queue, of a client that may leave.
struct Waiting {
    fair: Arc<Fair>,
    address: String,
    number: u64,
}

impl State {
    /// The waiter whose turn it is: the oldest of the next address.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let address = self.order.pop_front()?;
        let queue = self.queues.get_mut(&address)?;
        let (_, next) = queue.pop_front()?;
        self.waiting -= 1;
        if queue.is_empty() {
            self.queues.remove(&address);
        } else {
            self.order.push_back(address);
        }
        Some(next)
    }

    /// Sends away the newest waiter of the address that has most, if that has more than `address` will have.
    fn make_room(&mut self, address: &str) -> Option<oneshot::Sender<Turn>> {
        let own = self.queues.get(address).map_or(0, VecDeque::len);
        let longest = self.queues.values_mut().max_by_key(|queue| queue.len())?;
        if longest.len() <= own + 1 {
            return None;
        }
        self.waiting -= 1;
        longest.pop_back().map(|(_, newest)| newest)
    }

    fn wait(&mut self, address: &str) -> (u64, oneshot::Receiver<Turn>) {
        let (sender, turn) = oneshot::channel();
        self.number += 1;
        self.waiting += 1;
        let queue = self.queues.entry(address.to_owned()).or_default();
        if queue.is_empty() {
            self.order.push_back(address.to_owned());
        }
        queue.push_back((self.number, sender));
        (self.number, turn)
    }

    fn leave(&mut self, address: &str, number: u64) {
        let Some(queue) = self.queues.get_mut(address) else { return };
        let Some(at) = queue.iter().position(|(waiter, _)| *waiter == number) else { return };
        queue.remove(at);
        self.waiting -= 1;
        if queue.is_empty() {
            self.queues.remove(address);
            self.order.retain(|waiting| waiting != address);
        }
    }
}

impl Fair {
    pub(super) fn new(limits: LaneLimits) -> Arc<Self> {
        Arc::new(Self { limits, state: Mutex::default() })
    }

    /// Waits for the turn of this address.
    pub(super) async fn enter(self: &Arc<Self>, address: &str) -> Result<Turn, Busy> {
        let (number, turn) = {
            let mut state = self.state.lock();
            if state.running < self.limits.running_max && state.waiting == 0 {
                state.running += 1;
                return Ok(Turn(Arc::clone(self)));
            }
            if state.waiting >= self.limits.waiting_max && state.make_room(address).is_none() {
                return Err(Busy);
            }
            state.wait(address)
        };
        let _waiting = Waiting { fair: Arc::clone(self), address: address.to_owned(), number };
        turn.await.map_err(|_| Busy)
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.state.lock().waiting
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut state = self.0.state.lock();
            let next = state.next();
            if next.is_none() {
                state.running -= 1;
            }
            next
        };
        if let Some(next) = next {
            // One that left in this moment drops its turn, which goes to the next one.
            drop(next.send(Self(Arc::clone(&self.0))));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.fair.state.lock().leave(&self.address, self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    /// Begins to wait, and is in the queue when this returns, or refused.
    async fn waiter(fair: &Arc<Fair>, address: &str) -> JoinHandle<Result<Turn, Busy>> {
        let (queue, address) = (Arc::clone(fair), address.to_owned());
        let before = fair.state.lock().number;
        let waiter = tokio::spawn(async move { queue.enter(&address).await });
        while fair.state.lock().number == before && !waiter.is_finished() {
            tokio::task::yield_now().await;
        }
        waiter
    }

    async fn got(waiter: JoinHandle<Result<Turn, Busy>>) -> Result<Turn, Busy> {
        waiter.await.expect("no panic")
    }

    #[tokio::test]
    async fn addresses_take_turns() {
        let fair = Fair::new(LaneLimits { running_max: 1, waiting_max: 8 });
        let mut turn = fair.enter("a").await.expect("room");
        let mut waiters = Vec::new();
        for address in ["a", "a", "a", "b", "c", "b"] {
            waiters.push((address, waiter(&fair, address).await));
        }
        let mut order = Vec::new();
        while !waiters.is_empty() {
            drop(turn);
            let at = loop {
                if let Some(at) = waiters.iter().position(|(_, waiter)| waiter.is_finished()) {
                    break at;
                }
                tokio::task::yield_now().await;
            };
            let (address, next) = waiters.remove(at);
            turn = got(next).await.expect("its turn");
            order.push(address);
        }
        assert_eq!(order, ["a", "b", "c", "a", "b", "a"]);
        drop(turn);
        let state = fair.state.lock();
        assert_eq!((state.running, state.waiting), (0, 0));
        assert!(state.queues.is_empty() && state.order.is_empty(), "addresses are forgotten");
    }

    #[tokio::test]
    async fn an_address_that_fills_the_queue_keeps_no_other_out() {
        let fair = Fair::new(LaneLimits { running_max: 1, waiting_max: 3 });
        let turn = fair.enter("greedy").await.expect("room");
        let mut greedy = Vec::new();
        for _ in 0..3 {
            greedy.push(waiter(&fair, "greedy").await);
        }
        assert!(fair.enter("greedy").await.is_err(), "beyond the bound");
        let modest = waiter(&fair, "modest").await;
        assert!(got(greedy.pop().expect("three")).await.is_err(), "the newest is sent away");
        assert_eq!(fair.waiting(), 3);
        // Two and one: no address has more than a newcomer of the modest address would have.
        assert!(fair.enter("modest").await.is_err());
        drop(turn);
        let first = got(greedy.remove(0)).await.expect("the first of all");
        drop(first);
        drop(got(modest).await.expect("before the second of the greedy one"));
        drop(got(greedy.remove(0)).await.expect("the last"));
        assert_eq!(fair.state.lock().running, 0);
    }

    #[tokio::test]
    async fn a_caller_that_leaves_frees_its_place() {
        let fair = Fair::new(LaneLimits { running_max: 1, waiting_max: 2 });
        let turn = fair.enter("a").await.expect("room");
        let leaving = [waiter(&fair, "a").await, waiter(&fair, "b").await];
        assert_eq!(fair.waiting(), 2);
        for waiter in leaving {
            waiter.abort();
            assert!(waiter.await.expect_err("aborted").is_cancelled());
        }
        assert_eq!(fair.waiting(), 0);
        let next = waiter(&fair, "b").await;
        drop(turn);
        drop(got(next).await.expect("its turn"));
        assert_eq!(fair.state.lock().running, 0);
    }
}
