//! Changes of an open chain: one at a time, with requests held back for a moment where that is needed.

use std::fmt;
use std::rc::Rc;

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::Io;

use crate::core::{Core, DiskState};

/// The right to change the chain; ends when it is dropped.
pub(crate) struct Change<I: Io>(Rc<Core<I>>);

impl<I: Io> fmt::Debug for Change<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").finish_non_exhaustive()
    }
}

impl<I: Io> Drop for Change<I> {
    fn drop(&mut self) {
        self.0.changing.set(None);
        self.0.look_at_sharing();
        self.0.ended.notify_all(self.0.io.tasks());
    }
}

/// Requests are held back; opens again when it is dropped.
pub(crate) struct Gate<I: Io> {
    core: Rc<Core<I>>,
    since_ns: u64,
}

impl<I: Io> Gate<I> {
    /// Lets requests through again; answers for how long they were held back, in nanoseconds: until the thread has
    /// looked after them again, so that whatever keeps the thread counts.
    pub(crate) async fn open(self) -> u64 {
        let (core, since_ns) = (Rc::clone(&self.core), self.since_ns);
        drop(self);
        core.io.tasks().yield_now().await;
        core.io.now_ns().saturating_sub(since_ns)
    }
}

impl<I: Io> Drop for Gate<I> {
    fn drop(&mut self) {
        // A pause that came meanwhile keeps it closed.
        if self.core.state() == DiskState::Running {
            self.core.inbox.set_open(true);
            self.core.admission.opened();
            self.core.look_at_sharing();
            self.core.admission.look();
            self.core.ended.notify_all(self.core.io.tasks());
        }
    }
}

impl<I: Io> Core<I> {
    /// Takes the right to change the chain, for `what`.
    ///
    /// # Errors
    /// Another change is at work.
    pub(crate) fn begin_change(self: &Rc<Self>, what: &'static str) -> Result<Change<I>> {
        if let Some(other) = self.changing.get() {
            let busy = std::io::Error::from_raw_os_error(libc::EBUSY);
            return Err(FormatError::io(format!("{what} must wait until {other} has ended"), busy));
        }
        self.changing.set(Some(what));
        self.look_at_sharing();
        Ok(Change(Rc::clone(self)))
    }

    /// Takes no new requests and waits until those in flight have ended.
    ///
    /// # Errors
    /// They did not within `within_ns`, or the disk is being paused: requests go on.
    pub(crate) async fn close_gate(self: &Rc<Self>, within_ns: u64) -> Result<Gate<I>> {
        let tasks = self.io.tasks();
        let gate = Gate { core: Rc::clone(self), since_ns: self.io.now_ns() };
        self.inbox.set_open(false);
        self.look_at_sharing();
        let until = tasks.turn_ns().saturating_add(within_ns);
        while self.inbox.in_flight() > self.waiting_for_space() || !self.queue_threads_are_out() {
            if self.state() != DiskState::Running {
                return Err(FormatError::new(FormatErrorKind::Cancelled, "the disk is being paused"));
            }
            if tasks.turn_ns() >= until {
                return Err(self.late(within_ns));
            }
            self.ended.wait_until(tasks, until).await;
        }
        Ok(gate)
    }

    /// What is said of requests that did not end in time.
    fn late(&self, within_ns: u64) -> FormatError {
        let here = self.inbox.in_flight().saturating_sub(self.waiting_for_space());
        let count = here + self.in_flight_elsewhere();
        let longest = self.longest_request().map_or_else(String::new, |longest| format!(" ({longest})"));
        let detail = format!(
            "{count} {} did not end within {} ms{longest}; try again later",
            if count == 1 { "request" } else { "requests" },
            within_ns / 1_000_000,
        );
        FormatError::io(detail, std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
    }
}
