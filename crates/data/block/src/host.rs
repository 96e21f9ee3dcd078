//! What a disk has of its data thread: the ring, its options, the log.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tapio_format::continuation::Move;
use tapio_format::{FormatError, Result};
use tapio_ring::{Io, Tasks};

use crate::options::CoreOptions;
use crate::transfers::{LiveSizes, Transfers};

/// At most so often is there a sentence about requests.
const REPORT_NS: u64 = 1_000_000_000;

/// See the module's documentation. The images are opened by it: `open.rs`.
pub(crate) struct Host<I: Io> {
    io: I,
    options: CoreOptions,
    /// How data goes to the storages, by what is set now.
    transfers: Rc<Transfers>,
    /// When a request was reported the last time.
    reported_ns: Cell<Option<u64>>,
}

impl<I: Io> fmt::Debug for Host<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<I: Io> Host<I> {
    pub fn new(io: I, options: CoreOptions) -> Self {
        let sizes = Arc::new(LiveSizes::new(options.transfers));
        let transfers = Transfers::new(sizes, io.tasks().clone());
        Self { io, options, transfers, reported_ns: Cell::new(None) }
    }

    /// The ring.
    pub const fn io(&self) -> &I {
        &self.io
    }

    /// The tasks of the data thread.
    pub fn tasks(&self) -> &Tasks {
        self.io.tasks()
    }

    /// How data goes to the storages on this thread.
    pub fn transfers(&self) -> Rc<Transfers> {
        Rc::clone(&self.transfers)
    }

    pub const fn options(&self) -> &CoreOptions {
        &self.options
    }

    /// A sentence for the log: of changes of state and failures.
    pub fn report(&self, line: &str) {
        (self.options.report)(line);
    }

    /// A sentence about a request, at most one a second.
    pub fn report_request(&self, what: &str, error: &FormatError) {
        let now = self.tasks().turn_ns();
        if self.reported_ns.get().is_some_and(|then| now - then < REPORT_NS) {
            return;
        }
        self.reported_ns.set(Some(now));
        self.report(&format!("{what}: {error}"));
    }

    /// Writes durably which image the disk goes on with.
    ///
    /// # Errors
    /// It cannot be made durable.
    pub async fn write_note(&self, change: Move) -> Result<()> {
        let notes = self.options.notes.clone();
        let noted = self.io.offload(move || notes.take(&change)).await;
        noted.map_err(|error| FormatError::io("cannot note which image the disk goes on with", error))?
    }
}
