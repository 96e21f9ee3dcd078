//! All of a server in bytes, for another program to go on with (live update).
//!
//! Versions of the tree that open transactions look at share in the bytes what they shared in memory, so that after it
//! a transaction conflicts with exactly what it would have conflicted with before.

pub mod codec;
pub mod domains;
pub mod nodes;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use codec::{Damaged, Reader, Writer};
use domains::{get_domain, get_general, get_watches, put_domain, put_general, put_watches};
use nodes::{
    NodesOut, get_caller, get_node, get_nodes, get_op, get_perms, get_tree, get_usage, put_caller, put_op,
    put_perms, put_usage,
};

use crate::domains::Platform;
use crate::server::Server;
use crate::session::Conn;
use crate::store::{Change, Store, Transaction};

/// The first bytes; the digit is the version.
const MAGIC: &[u8; 8] = b"TXSTATE1";

/// All that a server knows, but for what carries its bytes.
pub fn save(server: &Server, out: &mut Writer) {
    let mut nodes = NodesOut::default();
    let mut rest = Writer::default();
    rest.u32(nodes.number(server.store.live.root()));
    rest.u64(server.store.clock);
    put_general(&mut rest, &server.domains.general);
    rest.count(server.domains.known().len());
    for (domid, domain) in server.domains.known() {
        put_domain(&mut rest, *domid, domain);
    }
    rest.count(server.conns.len());
    for (id, conn) in server.conns.iter().enumerate() {
        rest.u8(conn.is_some().into());
        let Some(conn) = conn else { continue };
        put_caller(&mut rest, &conn.caller);
        rest.u8(conn.broken.into());
        rest.bytes(conn.decoder.pending());
        rest.bytes(conn.out.unsent());
        rest.u32(conn.last_transaction);
        rest.count(conn.transactions.len());
        for (number, transaction) in &conn.transactions {
            rest.u32(*number);
            save_transaction(transaction, &mut nodes, &mut rest);
        }
        put_watches(&mut rest, server.watches.of(id));
    }
    let (traced, trace_path) = server.tracing();
    rest.u8(traced.into());
    rest.bytes(trace_path.as_bytes());
    for count in server.counts.iter().chain([&server.events, &server.conflicts]) {
        rest.u64(*count);
    }
    out.0.extend_from_slice(MAGIC);
    nodes.finish(out);
    out.0.extend_from_slice(&rest.0);
}

fn save_transaction(transaction: &Transaction, nodes: &mut NodesOut, out: &mut Writer) {
    out.u32(nodes.number(transaction.base.root()));
    out.u32(nodes.number(transaction.tree.root()));
    out.count(transaction.seen.len());
    for (path, aspect) in &transaction.seen {
        out.bytes(path.as_bytes());
        out.u8(*aspect);
    }
    out.count(transaction.log.len());
    for (caller, op) in &transaction.log {
        put_op(out, caller, op);
    }
    put_usage(out, &transaction.effects);
    out.count(transaction.effects.changes.len());
    for change in &transaction.effects.changes {
        match change {
            Change::Changed { path, before } => {
                out.u8(before.is_some().into());
                out.bytes(path.as_bytes());
                if let Some(before) = before {
                    put_perms(out, before);
                }
            }
            Change::Gone { path, node } => {
                out.u8(2);
                out.bytes(path.as_bytes());
                out.u32(nodes.number(node));
            }
        }
    }
    out.u64(transaction.bytes as u64);
}

/// The server of these bytes.
///
/// # Errors
/// They are of another version, or damaged.
pub fn load(bytes: &mut Reader<'_>, platform: Box<dyn Platform>) -> Result<Server, Damaged> {
    let magic: Vec<u8> = (0..MAGIC.len()).map(|_| bytes.u8()).collect::<Result<_, _>>()?;
    if magic != MAGIC {
        return Err(Damaged("it is of another version"));
    }
    let nodes = get_nodes(bytes)?;
    let live = get_tree(bytes, &nodes)?;
    let clock = bytes.u64()?;
    let mut server = Server::new(Store::of(live, clock), platform);
    *server.domains.general_mut() = get_general(bytes)?;
    for _ in 0..bytes.count()? {
        let (domid, domain) = get_domain(bytes)?;
        *server.domains.entry(domid) = domain;
    }
    for id in 0..bytes.count()? {
        server.conns.push(None);
        if bytes.u8()? == 0 {
            continue;
        }
        let mut conn = Conn::new(get_caller(bytes)?);
        conn.broken = bytes.u8()? != 0;
        conn.decoder.push(bytes.bytes()?);
        conn.out.restore(bytes.bytes()?);
        conn.last_transaction = bytes.u32()?;
        for _ in 0..bytes.count()? {
            let number = bytes.u32()?;
            conn.transactions.push((number, load_transaction(bytes, &nodes)?));
        }
        for (path, watch) in get_watches(bytes, id)? {
            if server.watches.add(&path, watch) {
                conn.watches += 1;
            }
        }
        server.conns[id] = Some(conn);
    }
    let traced = bytes.u8()? != 0;
    server.set_trace_path(bytes.text()?);
    // A log that cannot be written any more is none of the clients' business.
    let _ = server.set_trace(traced);
    for count in &mut server.counts {
        *count = bytes.u64()?;
    }
    server.events = bytes.u64()?;
    server.conflicts = bytes.u64()?;
    Ok(server)
}

fn load_transaction(bytes: &mut Reader<'_>, nodes: &[Rc<crate::tree::Node>]) -> Result<Transaction, Damaged> {
    let base = get_tree(bytes, nodes)?;
    let mut transaction = Transaction::new(&base);
    transaction.tree = get_tree(bytes, nodes)?;
    for _ in 0..bytes.count()? {
        let path = bytes.text()?.into();
        transaction.seen.insert(path, bytes.u8()?);
    }
    for _ in 0..bytes.count()? {
        transaction.log.push(get_op(bytes)?);
    }
    get_usage(bytes, &mut transaction.effects)?;
    for _ in 0..bytes.count()? {
        let what = bytes.u8()?;
        let path: Rc<str> = bytes.text()?.into();
        transaction.effects.changes.push(match what {
            0 => Change::Changed { path, before: None },
            1 => Change::Changed { path, before: Some(get_perms(bytes)?) },
            2 => Change::Gone { path, node: get_node(bytes, nodes)? },
            _ => return Err(Damaged("a change is none")),
        });
    }
    transaction.bytes = bytes.u64()? as usize;
    Ok(transaction)
}
