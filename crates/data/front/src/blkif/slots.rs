//! The requests of a ring that have no answer yet, and the parts in which the disk has them.

use tapio_block::Op;
use tapio_types::Span;
use tapio_xen::blkif::Request;

use super::check::{Operation, Piece};
use super::mover::Hold;

/// What of a request is handed to the disk next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waits until all requests before it have ended, then as `Flush`.
    Drain,
    /// A flush, then its data if it has some.
    Flush,
    /// The flush has to end first.
    Flushing,
    /// Its data, from piece `next` on.
    Data,
    /// A discard.
    Discard,
    /// Nothing: what the disk has is all.
    Over,
    /// As `Over`; requests behind it wait for its end.
    Alone,
}

/// Why a request failed, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It makes no sense.
    Message,
    /// The guest's pages could not be reached.
    Map,
    /// The disk refused or failed.
    Disk,
}

/// A request without an answer. Keeps its tables from one request to the next.
#[derive(Debug)]
pub struct Slot {
    /// In use.
    pub live: bool,
    /// What the guest wrote.
    pub request: Request,
    /// Its entry in the record.
    pub entry: u32,
    /// When it was taken.
    pub taken_ns: u64,
    /// The same as traces have it; zero while there is none.
    pub stamp: u64,
    /// Its pieces.
    pub pieces: Vec<Piece>,
    /// The first that was not handed over.
    pub next: usize,
    /// Where that lies on the disk.
    pub at: u64,
    /// Its bytes on the disk.
    pub span: Span,
    /// What comes next.
    pub stage: Stage,
    /// How its data is moved.
    pub op: Op,
    /// Parts that the disk has, or that are made for it.
    pub parts: u32,
    /// Why it failed, and the status for the guest.
    pub failed: Option<(Why, i16)>,
    /// The guest has its answer, but the storage still has a part of it.
    pub answered: bool,
    /// It is not to be answered: the next process that serves the ring does that.
    pub dropped: bool,
    /// Of an indirect request: where its segments are among those that were copied.
    pub table: usize,
}

impl Slot {
    fn empty() -> Self {
        Self {
            live: false,
            request: Request::default(),
            entry: 0,
            taken_ns: 0,
            stamp: 0,
            pieces: Vec::new(),
            next: 0,
            at: 0,
            span: Span::new(0, 0),
            stage: Stage::Over,
            op: Op::Read,
            parts: 0,
            failed: None,
            answered: false,
            dropped: false,
            table: 0,
        }
    }

    /// Sets out to do what the request wants.
    pub fn plan(&mut self, operation: Operation) {
        (self.next, self.op) = (0, Op::Read);
        (self.stage, self.span) = match operation {
            Operation::Read(span) => (Stage::Data, span),
            Operation::Write(span) => {
                self.op = Op::Write { durable: false };
                (Stage::Data, span)
            }
            Operation::Flush { data, alone } => {
                self.op = Op::Write { durable: true };
                (if alone { Stage::Drain } else { Stage::Flush }, data)
            }
            Operation::Discard(span) => (Stage::Discard, span),
        };
        self.at = self.span.start;
    }

    /// Whether everything was handed over.
    pub fn is_handed_over(&self) -> bool {
        matches!(self.stage, Stage::Over | Stage::Alone)
    }
}

/// A part of a request that the disk has.
#[derive(Debug)]
pub struct Part {
    /// Of which request.
    pub slot: u32,
    /// What it does.
    pub op: Op,
    /// Where.
    pub span: Span,
    /// Its pieces: the first, how many.
    pub pieces: (usize, usize),
    /// Its memory.
    pub hold: Hold,
    /// The guest's pages could not be reached.
    pub broken: bool,
}

/// Places for values that are used again.
#[derive(Debug)]
pub struct Places<T> {
    all: Vec<T>,
    free: Vec<u32>,
}

impl<T> Places<T> {
    /// None yet.
    pub const fn new() -> Self {
        Self { all: Vec::new(), free: Vec::new() }
    }

    /// A place, made by `make` where none is free.
    pub fn take(&mut self, make: impl FnOnce() -> T) -> u32 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        self.all.push(make());
        self.all.len() as u32 - 1
    }

    /// Gives a place back.
    pub fn give(&mut self, index: u32) {
        self.free.push(index);
    }

    /// Places in use.
    pub fn used(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// All places, in use or not.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.all.iter()
    }
}

impl<T> std::ops::Index<u32> for Places<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.all[index as usize]
    }
}

impl<T> std::ops::IndexMut<u32> for Places<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.all[index as usize]
    }
}

/// A place for a request.
pub fn take_slot(slots: &mut Places<Slot>) -> u32 {
    slots.take(Slot::empty)
}

/// A place for a part.
pub fn take_part(parts: &mut Places<Part>) -> u32 {
    parts.take(|| Part {
        slot: 0,
        op: Op::Flush,
        span: Span::new(0, 0),
        pieces: (0, 0),
        hold: Hold::default(),
        broken: false,
    })
}
