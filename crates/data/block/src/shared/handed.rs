//! Requests and questions that a queue thread has handed to the owner, until they come back.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use tapio_ring::{TaskId, Tasks};

use crate::request::Completion;

struct Slot<T> {
    task: TaskId,
    answer: Option<T>,
    /// Hears when the request is given up.
    client: Option<(Rc<dyn Completion>, u64)>,
    used: bool,
}

/// A table of what is at the owner. Keeps its memory: handing a request over allocates only while the table grows.
pub(super) struct AtOwner<T> {
    slots: RefCell<Vec<Slot<T>>>,
    free: RefCell<Vec<u32>>,
}

impl<T> Default for AtOwner<T> {
    fn default() -> Self {
        Self { slots: RefCell::default(), free: RefCell::default() }
    }
}

impl<T> AtOwner<T> {
    /// A place for what the current task hands over.
    pub fn begin(&self, tasks: &Tasks, client: Option<(Rc<dyn Completion>, u64)>) -> u32 {
        let slot = Slot { task: tasks.current(), answer: None, client, used: true };
        let mut slots = self.slots.borrow_mut();
        match self.free.borrow_mut().pop() {
            Some(index) => {
                slots[index as usize] = slot;
                index
            }
            None => {
                slots.push(slot);
                slots.len() as u32 - 1
            }
        }
    }

    /// Waits for the answer, as the task that began.
    pub async fn answer(&self, index: u32) -> T {
        let answer = poll_fn(|_| match self.slots.borrow_mut()[index as usize].answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => Poll::Pending,
        })
        .await;
        let slot = &mut self.slots.borrow_mut()[index as usize];
        (slot.used, slot.client) = (false, None);
        self.free.borrow_mut().push(index);
        answer
    }

    /// The answer has come.
    pub fn done(&self, index: u32, answer: T, tasks: &Tasks) {
        let mut slots = self.slots.borrow_mut();
        if let Some(slot) = slots.get_mut(index as usize).filter(|slot| slot.used) {
            slot.answer = Some(answer);
            tasks.wake(slot.task);
        }
    }

    /// The client that hears when a request is given up.
    pub fn client(&self, index: u32) -> Option<(Rc<dyn Completion>, u64)> {
        self.slots.borrow().get(index as usize).filter(|slot| slot.used)?.client.clone()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.slots.borrow().len() - self.free.borrow().len()
    }
}
