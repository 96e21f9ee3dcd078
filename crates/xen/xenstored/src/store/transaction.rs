//! Transactions: a private version of the tree, what was looked at, and what was changed.

use std::collections::HashMap;

use crate::store::op::{Effects, Op};
use tapio_xenstore::wire::Errno;

use crate::tree::{Caller, Tree};

/// What of a node a transaction depends on, as bits.
pub type Aspect = u8;
/// That it is there or not, its value, its permissions.
pub const OWN: Aspect = 1;
/// The names of its children.
pub const LIST: Aspect = 2;
/// Everything below it.
pub const BELOW: Aspect = 4;

/// A transaction. Beginning one counts a reference; what it costs is what it changes.
#[derive(Debug)]
pub struct Transaction {
    /// The tree when it began.
    pub base: Tree,
    /// The tree as it sees it.
    pub tree: Tree,
    /// What it depends on.
    pub seen: HashMap<Box<str>, Aspect>,
    /// What it changed, by which caller, in order.
    pub log: Vec<(Caller, Op)>,
    /// What its changes brought about.
    pub effects: Effects,
    /// Bytes of `seen` and `log`.
    pub bytes: usize,
}

impl Transaction {
    /// Begins.
    pub fn new(live: &Tree) -> Self {
        Self {
            base: live.clone(),
            tree: live.clone(),
            seen: HashMap::new(),
            log: Vec::new(),
            effects: Effects::default(),
            bytes: 0,
        }
    }

    /// Remembers that it depends on something. `max` nodes at most (0: no limit).
    pub fn note(&mut self, path: &str, aspect: Aspect, max: u64) -> Result<(), Errno> {
        if let Some(known) = self.seen.get_mut(path) {
            *known |= aspect;
            return Ok(());
        }
        if max != 0 && self.seen.len() as u64 >= max {
            return Err(Errno::ENOSPC);
        }
        self.bytes += path.len() + 64;
        self.seen.insert(path.into(), aspect);
        Ok(())
    }

    /// Remembers a change. One that only repeats the last with another value takes its place.
    pub fn push(&mut self, caller: &Caller, op: Op) {
        let again = match (self.log.last(), &op) {
            (Some((_, Op::Write(last, _))), Op::Write(path, _)) => last == path,
            _ => false,
        };
        if again && let Some((_, last)) = self.log.pop() {
            self.bytes -= last.bytes();
        }
        self.bytes += op.bytes();
        self.log.push((*caller, op));
    }

    /// Whether something that it depends on is different in `live`.
    ///
    /// A transaction that changed nothing depends on nothing: it saw one moment, and took place then.
    pub fn conflicts(&self, live: &Tree) -> bool {
        if self.log.is_empty() || self.base.is(live) {
            return false;
        }
        self.seen.iter().any(|(path, aspect)| match (self.base.get(path), live.get(path)) {
            (None, None) => false,
            (Some(then), Some(now)) => {
                !std::rc::Rc::ptr_eq(then, now)
                    && (then.own != now.own
                        || (aspect & LIST != 0 && then.list != now.list)
                        || aspect & BELOW != 0)
            }
            _ => true,
        })
    }
}
