//! The tree and the domains on disk, for a daemon that is killed or a host that loses power.
//!
//! ```text
//!   tree.7   all of it when generation 7 began            written apart, synced, renamed, directory synced
//!   log.7    what changed since: one record a step         appended and synced before the answers are sent
//! ```
//!
//! A step is a change or a whole transaction, or how a domain is now: after a crash it is there or it is not. A record
//! that is torn ends the log, and what comes behind it was never acknowledged. A daemon that starts reads both, begins
//! another generation and only then removes the old one, so a crash at any moment leaves one generation that is whole.
//!
//! What is kept is the tree, the quotas and permissions of special names that were set, and of each domain how it was
//! introduced, what was set for it and its watches. Connections by socket end with the daemon, and open transactions of
//! all, as they do with any xenstored; a live update keeps those too.

mod files;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;

pub use files::{Dir, Files};

use crate::Server;
use crate::domains::{Domain, Part};
use crate::kept::Kept;
use crate::state::codec::{Damaged, Reader, Writer};
use crate::state::domains::{
    get_domain, get_general_kept, get_watches, put_domain, put_general_kept, put_watches,
};
use crate::state::nodes::{NodesOut, get_nodes, get_op, get_tree, put_op};
use crate::store::{Effects, Op, Store, apply};

/// The first bytes of a tree; the digits are the version.
const MAGIC: &[u8; 8] = b"TXTREE01";
/// Bytes of the log after which the tree is written anew, unless the tree itself is longer.
const LOG_LEN_MAX: u64 = 4 << 20;
/// Bytes of a record before its content.
const RECORD_HEAD: usize = 8;
/// What follows a count of no changes.
const GENERAL: u8 = 1;
const DOMAIN: u8 = 2;
const WATCH: u8 = 3;

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

/// False when it is about a domain that went, which is written down elsewhere.
fn put_part(out: &mut Writer, part: &Part, server: &Server) -> bool {
    match part {
        Part::General => {
            out.u8(GENERAL);
            put_general_kept(out, &server.domains.general);
        }
        Part::Domain(domid) => {
            let Some(domain) = server.domain(*domid) else { return false };
            out.u8(DOMAIN);
            // Numbers of connections mean nothing to another process.
            put_domain(out, *domid, &Domain { conn: None, ..domain.clone() });
            put_watches(out, domain.conn.into_iter().flat_map(|conn| server.watches.of(conn)));
        }
        Part::Watch(domid, path, token) => {
            let Some(conn) = server.domain(*domid).and_then(|domain| domain.conn) else { return false };
            out.u8(WATCH);
            out.u32(*domid);
            out.bytes(path.as_bytes());
            out.bytes(token);
            put_watches(out, server.watches.get(conn, path, token).into_iter().map(|watch| (path, watch)));
        }
    }
    true
}

impl Kept {
    fn get_part(&mut self, bytes: &mut Reader<'_>) -> Result<(), Damaged> {
        match bytes.u8()? {
            GENERAL => self.domains.general = get_general_kept(bytes)?,
            DOMAIN => {
                let (domid, domain) = get_domain(bytes)?;
                *self.domains.entry(domid) = Domain { conn: None, ..domain };
                self.watches.insert(domid, get_watches(bytes, 0)?);
            }
            WATCH => {
                let (domid, path, token) = (bytes.u32()?, bytes.text()?, bytes.bytes()?);
                let known = self.watches.entry(domid).or_default();
                known.retain(|(other, watch)| (&**other, &*watch.token) != (path, token));
                known.extend(get_watches(bytes, 0)?);
            }
            _ => return Err(Damaged("a record is none")),
        }
        Ok(())
    }

    /// Carries out a record of the log: all of it, or nothing.
    fn step(&mut self, body: &[u8]) -> Result<(), Damaged> {
        let mut reader = Reader(body);
        let count = reader.count()?;
        if count == 0 {
            return self.get_part(&mut reader);
        }
        let ops: Vec<_> = (0..count).map(|_| get_op(&mut reader)).collect::<Result<_, _>>()?;
        let mut effects = Effects::default();
        for (caller, op) in &ops {
            if let Op::Forget(domid) = op {
                self.domains.forget(*domid);
                self.watches.remove(domid);
            }
            apply(&mut self.store.live, op, caller, &mut self.store.clock, &mut effects);
        }
        self.store.count(&effects);
        Ok(())
    }
}

/// The bytes of a `tree.N`: the tree and the domains of a server.
pub fn encode_tree(server: &Server) -> Vec<u8> {
    let store = &server.store;
    let mut nodes = NodesOut::default();
    let root = nodes.number(store.live.root());
    let mut body = Writer::default();
    body.u64(store.clock);
    nodes.finish(&mut body);
    body.u32(root);
    body.count(1 + server.domains.known().len());
    put_part(&mut body, &Part::General, server);
    for domid in server.domains.known().keys() {
        put_part(&mut body, &Part::Domain(*domid), server);
    }
    let mut out = Writer(MAGIC.to_vec());
    out.u32(crc32(&body.0));
    out.0.extend_from_slice(&body.0);
    out.0
}

/// What is in the bytes of a `tree.N`. Those of the first programs end with the tree.
///
/// # Errors
/// They are not what was written.
pub fn decode_tree(bytes: &[u8]) -> Result<Kept, Damaged> {
    let body = bytes.strip_prefix(MAGIC).ok_or(Damaged("it is of another version"))?;
    let mut reader = Reader(body);
    let crc = reader.u32()?;
    if crc32(reader.0) != crc {
        return Err(Damaged("its checksum is wrong"));
    }
    let clock = reader.u64()?;
    let nodes = get_nodes(&mut reader)?;
    let mut kept = Kept { store: Store::of(get_tree(&mut reader, &nodes)?, clock), ..Kept::default() };
    let parts = if reader.0.is_empty() { 0 } else { reader.count()? };
    (0..parts).try_for_each(|_| kept.get_part(&mut reader))?;
    Ok(kept)
}

/// Carries out the whole records of a log; how many there were.
pub fn replay(kept: &mut Kept, log: &[u8]) -> usize {
    let mut rest = log;
    let mut count = 0;
    while let Some((head, body)) = rest.split_at_checked(RECORD_HEAD) {
        let mut head = Reader(head);
        let (Ok(len), Ok(crc)) = (head.u32(), head.u32()) else { break };
        let Some((body, behind)) = body.split_at_checked(len as usize) else { break };
        if len == 0 || crc32(body) != crc {
            break;
        }
        if kept.step(body).is_err() {
            break;
        }
        rest = behind;
        count += 1;
    }
    count
}

fn number(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

fn last_tree(names: &[String]) -> Option<u64> {
    names.iter().filter_map(|name| number(name, "tree.")).max()
}

/// What is in a directory; nothing in one that is empty.
///
/// # Errors
/// It cannot be read, or what is in it is damaged.
pub fn read(files: &mut impl Files) -> io::Result<Kept> {
    let names = files.names()?;
    let Some(last) = last_tree(&names) else { return Ok(Kept::default()) };
    let name = format!("tree.{last}");
    let mut kept = decode_tree(&files.read(&name)?).map_err(|what| damaged(&name, what))?;
    let log = format!("log.{last}");
    if names.contains(&log) {
        replay(&mut kept, &files.read(&log)?);
    }
    Ok(kept)
}

impl<F: Files> Journal<F> {
    /// A journal of this server from now on, whatever lay in the directory before.
    ///
    /// # Errors
    /// The directory cannot be read or written.
    pub fn begin(mut files: F, sync: Sync, server: &mut Server) -> io::Result<Self> {
        let generation = last_tree(&files.names()?).map_or(1, |last| last + 1);
        server.store.journal = Some(Vec::new());
        server.domains.changed = Some(BTreeSet::new());
        let mut journal =
            Self { files, sync, generation, log_len: 0, tree_len: 0, buffer: Writer::default() };
        journal.turn_over(server, generation)?;
        Ok(journal)
    }

    fn turn_over(&mut self, server: &Server, generation: u64) -> io::Result<()> {
        let tree = encode_tree(server);
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
    pub fn commit(&mut self, server: &mut Server) -> io::Result<()> {
        let mut body = Writer::default();
        for step in server.store.journal.iter_mut().flat_map(|steps| steps.drain(..)) {
            body.count(step.len());
            for (caller, op) in &step {
                put_op(&mut body, caller, op);
            }
            self.record(&mut body);
        }
        // Behind the changes: one of them may be that a domain of this number went before this one came.
        while let Some(part) = server.domains.changed.as_mut().and_then(BTreeSet::pop_first) {
            body.count(0);
            if put_part(&mut body, &part, server) {
                self.record(&mut body);
            }
            body.0.clear();
        }
        if self.buffer.0.is_empty() {
            return Ok(());
        }
        let log = format!("log.{}", self.generation);
        self.files.append(&log, &self.buffer.0)?;
        if self.sync == Sync::Always {
            self.files.sync(&log)?;
        }
        self.log_len += self.buffer.0.len() as u64;
        self.buffer.0.clear();
        if self.log_len > LOG_LEN_MAX.max(2 * self.tree_len) {
            self.turn_over(server, self.generation + 1)?;
        }
        Ok(())
    }

    fn record(&mut self, body: &mut Writer) {
        self.buffer.count(body.0.len());
        self.buffer.u32(crc32(&body.0));
        self.buffer.0.append(&mut body.0);
    }
}
