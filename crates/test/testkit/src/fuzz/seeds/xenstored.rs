//! Sessions with a xenstored, and what it keeps.

use tapio_xenstore::wire::{MessageKind, Request};
use tapio_xenstored::state::codec::Writer;
use tapio_xenstored::{Caller, Server, state};

use super::Shelf;

/// An action that sends a request of two words of the target's list.
fn ask(out: &mut Vec<u8>, selector: u8, kind: MessageKind, transaction: u8, first: u8, second: u8) {
    out.extend_from_slice(&[5, selector, kind as u8, transaction, first, second]);
}

pub fn put_into(shelf: &mut Shelf) {
    let (one, two) = (0u8, 2 << 6);
    let mut plain = Vec::new();
    for (kind, first, second) in [
        (MessageKind::Write, 4, (1 << 6) | 13),
        (MessageKind::Read, 4, one),
        (MessageKind::Directory, 6, one),
        (MessageKind::SetPerms, 4, two | 14),
        (MessageKind::GetPerms, 4, one),
        (MessageKind::Mkdir, 5, one),
        (MessageKind::Rm, 4, one),
        (MessageKind::DirectoryPart, 4, two | 13),
    ] {
        ask(&mut plain, 0, kind, 0, first, second);
        plain.extend_from_slice(&[1, 0]);
    }
    shelf.put("xenstored_session", "plain", plain);
    let mut transactions = Vec::new();
    ask(&mut transactions, 0, MessageKind::TransactionStart, 0, 13, one);
    ask(&mut transactions, 3, MessageKind::Write, 0, 6, (1 << 6) | 13);
    ask(&mut transactions, 0, MessageKind::Read, 1, 4, one);
    ask(&mut transactions, 0, MessageKind::Write, 1, 5, (1 << 6) | 13);
    transactions.extend_from_slice(&[4, 0]);
    ask(&mut transactions, 0, MessageKind::TransactionEnd, 1, 11, one);
    transactions.extend_from_slice(&[1, 0, 3, 2]);
    shelf.put("xenstored_session", "transactions", transactions);
    let mut watches = Vec::new();
    for word in [4, 8, 0, 10] {
        ask(&mut watches, 3, MessageKind::Watch, 0, word, two | 13);
    }
    ask(&mut watches, 0, MessageKind::Write, 0, 5, (1 << 6) | 13);
    ask(&mut watches, 3, MessageKind::Rm, 0, 7, one);
    watches.extend_from_slice(&[1, 3, 3, 1, 3, 2, 2, 0, 1, 3]);
    ask(&mut watches, 3, MessageKind::ResetWatches, 0, 0, one);
    shelf.put("xenstored_session", "watches", watches);
    let mut raw = vec![0, 1, 16];
    raw.extend_from_slice(
        &tapio_xenstore::wire::Header { kind: 2, request: 0, transaction: 0, len: 9999 }.encode(),
    );
    shelf.put("xenstored_session", "too-long", raw);

    let mut server = Server::default();
    let id = server.connect(Caller::CONTROL);
    for request in [
        Request::Write { path: "/a/b", value: b"1" },
        Request::Watch { path: "/a", token: b"t", depth: Some(2) },
        Request::Introduce { domid: 1, gfn: 2, port: 3 },
        Request::TransactionStart,
    ] {
        let mut bytes = Vec::new();
        if request.frame(1, 0, &mut bytes).is_ok() {
            server.receive(id, &bytes);
        }
    }
    let mut bytes = Vec::new();
    if (Request::Rm { path: "/a" }).frame(1, 1, &mut bytes).is_ok() {
        server.receive(id, &bytes);
    }
    let mut out = Writer::default();
    state::save(&server, &mut out);
    shelf.put("xenstored_state", "server", out.0);
    shelf.put("xenstored_state", "tree", tapio_xenstored::journal::encode_tree(&server));
    shelf.put("xenstored_state", "empty", "TXSTATE1");
}
