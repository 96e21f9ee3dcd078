//! The tree on disk, for a daemon that is killed or a host that loses power.
//!
//! ```text
//!   tree.7   the whole tree when generation 7 began       written beside, synced, renamed, directory synced
//!   log.7    what changed since: one record a step         appended and synced before the answers are sent
//! ```
//!
//! A step is a change or a whole transaction: after a crash it is there or it is not. A record that is torn ends the
//! log, and what comes behind it was never acknowledged. A daemon that starts reads both, begins another generation and
//! only then removes the old one, so a crash at any moment leaves one generation that is whole.
//!
//! What is kept is the tree. Connections, with their watches and transactions, end with the daemon as they do with any
//! xenstored; a live update keeps those.

mod files;
#[cfg(test)]
mod tests;

use std::io;

pub use files::{Dir, Files};

use crate::state::codec::{Damaged, Reader, Writer};
use crate::state::nodes::{NodesOut, get_nodes, get_op, get_tree, put_op};
use crate::store::{Effects, Op, Store, apply};
use crate::tree::Caller;

/// The first bytes of a tree; the digits are the version.
const MAGIC: &[u8; 8] = b"TXTREE01";
/// Bytes of the log after which the tree is written anew, unless the tree itself is longer.
const LOG_LEN_MAX: u64 = 4 << 20;
/// Bytes of a record before its content.
const RECORD_HEAD: usize = 8;

/// When changes are on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Before they are acknowledged: they survive a power cut.
    Always,
    /// When the kernel writes them: they survive the daemon, not the kernel.
    Never,
}

/// The log of a generation, open for appending.
#[derive(Debug)]
pub struct Journal<F> {
    files: F,
    sync: Sync,
    generation: u64,
    log_len: u64,
    tree_len: u64,
    buffer: Writer,
}

fn crc32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| {
                if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 }
            },
        )
    }) ^ !0
}

fn damaged(name: &str, what: Damaged) -> io::Error {
    io::Error::other(format!(
        "{name} is damaged: {}; move it away to begin with an empty tree, or bring back a copy of it",
        what.0
    ))
}

fn encode_tree(store: &Store) -> Vec<u8> {
    let mut nodes = NodesOut::default();
    let root = nodes.number(store.live.root());
    let mut body = Writer::default();
    body.u64(store.clock);
    nodes.finish(&mut body);
    body.u32(root);
    let mut out = Writer(MAGIC.to_vec());
    out.u32(crc32(&body.0));
    out.0.extend_from_slice(&body.0);
    out.0
}

/// The store in the bytes of a `tree.N`.
///
/// # Errors
/// They are not what was written.
pub fn decode_tree(bytes: &[u8]) -> Result<Store, Damaged> {
    let body = bytes.strip_prefix(MAGIC).ok_or(Damaged("it is of another version"))?;
    let mut reader = Reader(body);
    let crc = reader.u32()?;
    if crc32(reader.0) != crc {
        return Err(Damaged("its checksum is wrong"));
    }
    let clock = reader.u64()?;
    let nodes = get_nodes(&mut reader)?;
    Ok(Store::of(get_tree(&mut reader, &nodes)?, clock))
}

/// Carries out the whole records of a log; how many there were.
pub fn replay(store: &mut Store, log: &[u8]) -> usize {
    let mut rest = log;
    let mut count = 0;
    while let Some((head, body)) = rest.split_at_checked(RECORD_HEAD) {
        let mut head = Reader(head);
        let (Ok(len), Ok(crc)) = (head.u32(), head.u32()) else { break };
        let Some((body, behind)) = body.split_at_checked(len as usize) else { break };
        if len == 0 || crc32(body) != crc {
            break;
        }
        let Ok(step) = decode_step(body) else { break };
        let mut effects = Effects::default();
        for (caller, op) in &step {
            apply(&mut store.live, op, caller, &mut store.clock, &mut effects);
        }
        store.count(&effects);
        rest = behind;
        count += 1;
    }
    count
}

fn decode_step(body: &[u8]) -> Result<Vec<(Caller, Op)>, Damaged> {
    let mut reader = Reader(body);
    let count = reader.count()?;
    (0..count).map(|_| get_op(&mut reader)).collect()
}

fn number(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

impl<F: Files> Journal<F> {
    /// The tree of a directory, and the journal that goes on with it. A directory that is empty begins with `fresh`.
    ///
    /// # Errors
    /// The directory cannot be read or written, or what is in it is damaged.
    pub fn open(mut files: F, sync: Sync, fresh: Store) -> io::Result<(Self, Store)> {
        let names = files.names()?;
        let last = names.iter().filter_map(|name| number(name, "tree.")).max();
        let mut store = fresh;
        if let Some(last) = last {
            let name = format!("tree.{last}");
            store = decode_tree(&files.read(&name)?).map_err(|what| damaged(&name, what))?;
            let log = format!("log.{last}");
            if names.contains(&log) {
                replay(&mut store, &files.read(&log)?);
            }
        }
        Self::begin(files, sync, last.map_or(1, |last| last + 1), store)
    }

    /// A journal of this store, whatever tree lay in the directory before.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn replace(mut files: F, sync: Sync, store: Store) -> io::Result<(Self, Store)> {
        let last = files.names()?.iter().filter_map(|name| number(name, "tree.")).max();
        Self::begin(files, sync, last.map_or(1, |last| last + 1), store)
    }

    fn begin(files: F, sync: Sync, generation: u64, mut store: Store) -> io::Result<(Self, Store)> {
        store.journal = Some(Vec::new());
        let mut journal =
            Self { files, sync, generation, log_len: 0, tree_len: 0, buffer: Writer::default() };
        journal.turn_over(&store, generation)?;
        Ok((journal, store))
    }

    fn turn_over(&mut self, store: &Store, generation: u64) -> io::Result<()> {
        let tree = encode_tree(store);
        self.files.write_new(&format!("tree.{generation}.new"), &tree)?;
        self.files.sync(&format!("tree.{generation}.new"))?;
        self.files.rename(&format!("tree.{generation}.new"), &format!("tree.{generation}"))?;
        self.files.write_new(&format!("log.{generation}"), &[])?;
        self.files.sync_names()?;
        self.generation = generation;
        self.log_len = 0;
        self.tree_len = tree.len() as u64;
        for name in self.files.names()? {
            let old = number(&name, "tree.").or_else(|| number(&name, "log."));
            if old.is_some_and(|old| old < generation) || name.ends_with(".new") {
                self.files.remove(&name)?;
            }
        }
        Ok(())
    }

    /// Writes down what changed since the last call. Answers may go out when it returns.
    ///
    /// # Errors
    /// The disk refuses; nothing that was acknowledged before is lost.
    pub fn commit(&mut self, store: &mut Store) -> io::Result<()> {
        let Some(steps) = store.journal.as_mut().filter(|steps| !steps.is_empty()) else { return Ok(()) };
        let mut body = Writer::default();
        for step in steps.drain(..) {
            body.0.clear();
            body.count(step.len());
            for (caller, op) in &step {
                put_op(&mut body, caller, op);
            }
            self.buffer.count(body.0.len());
            self.buffer.u32(crc32(&body.0));
            self.buffer.0.extend_from_slice(&body.0);
        }
        let log = format!("log.{}", self.generation);
        self.files.append(&log, &self.buffer.0)?;
        if self.sync == Sync::Always {
            self.files.sync(&log)?;
        }
        self.log_len += self.buffer.0.len() as u64;
        self.buffer.0.clear();
        if self.log_len > LOG_LEN_MAX.max(2 * self.tree_len) {
            self.turn_over(store, self.generation + 1)?;
        }
        Ok(())
    }
}
