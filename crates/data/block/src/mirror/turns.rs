//! Copies are asked of the second side in the order in which they were claimed, which is that of the disk. They are
//! read side by side, and whichever is read first would get the first block of an image that has none yet.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use tapio_ring::{Notify, Tasks};

/// The line of copies.
#[derive(Debug)]
pub(super) struct Turns {
    tasks: Tasks,
    next: Cell<u64>,
    /// Copies that have not asked yet, by their numbers.
    waiting: RefCell<BTreeSet<u64>>,
    moved: Notify,
}

/// A place in the line, which is left when this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    line: &'a Turns,
    number: u64,
}

impl Turns {
    pub(super) fn new(tasks: Tasks) -> Self {
        Self { tasks, next: Cell::new(0), waiting: RefCell::default(), moved: Notify::default() }
    }

    /// The last place in the line.
    pub(super) fn take(&self) -> Turn<'_> {
        let number = self.next.replace(self.next.get() + 1);
        self.waiting.borrow_mut().insert(number);
        Turn { line: self, number }
    }
}

impl Turn<'_> {
    /// Waits until every copy that was claimed before has asked, or ended.
    pub(super) async fn comes(&self) {
        while self.line.waiting.borrow().first().is_some_and(|first| *first < self.number) {
            self.line.moved.wait(&self.line.tasks).await;
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.line.waiting.borrow_mut().remove(&self.number);
        self.line.moved.notify_all(&self.line.tasks);
    }
}
