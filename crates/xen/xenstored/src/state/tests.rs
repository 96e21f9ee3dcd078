//! What a server says after it was saved and loaded is what it would have said.

use super::*;
use crate::domains::NoHypervisor;
use crate::tree::Caller;

use tapio_xenstore::wire::{Decoder, Request};

fn send(server: &mut Server, id: usize, transaction: u32, request: &Request<'_>) {
    let mut bytes = Vec::new();
    request.frame(1, transaction, &mut bytes).expect("a request");
    server.receive(id, &bytes);
}

fn answers(server: &mut Server, id: usize) -> Vec<String> {
    let mut decoder = Decoder::new();
    decoder.push(server.unsent(id));
    let count = server.unsent(id).len();
    server.sent(id, count);
    let mut all = Vec::new();
    while let Some(message) = decoder.next().expect("messages") {
        all.push(String::from_utf8_lossy(message.payload).into_owned());
    }
    all
}

fn moved(server: &Server) -> Server {
    let mut out = Writer::default();
    save(server, &mut out);
    let again = load(&mut Reader(&out.0), Box::new(NoHypervisor)).expect("what was saved");
    // Every shorter piece is refused, and none of them does harm.
    for len in 0..out.0.len() {
        assert!(
            load(&mut Reader(&out.0[..len]), Box::new(NoHypervisor)).is_err(),
            "{len} of {}",
            out.0.len()
        );
    }
    again
}

#[test]
fn transactions_watches_and_half_messages_go_along() {
    let mut server = Server::default();
    let (one, other) = (server.connect(Caller::CONTROL), server.connect(Caller::CONTROL));
    send(&mut server, one, 0, &Request::Write { path: "/a/b", value: b"1" });
    send(&mut server, one, 0, &Request::Introduce { domid: 3, gfn: 9, port: 4 });
    send(&mut server, one, 0, &Request::SetQuota { domid: Some(3), quota: "nodes", value: 77 });
    send(&mut server, one, 0, &Request::TransactionStart);
    send(&mut server, one, 0, &Request::TransactionStart);
    send(&mut server, one, 1, &Request::Read { path: "/a/b" });
    send(&mut server, one, 1, &Request::Write { path: "/a/mine", value: b"2" });
    send(&mut server, one, 2, &Request::Rm { path: "/a" });
    send(&mut server, other, 0, &Request::Watch { path: "/a", token: b"t", depth: Some(1) });
    answers(&mut server, one);
    answers(&mut server, other);
    // Half a request has come, and half an answer has gone.
    let mut half = Vec::new();
    Request::Read { path: "/a/b" }.frame(1, 0, &mut half).expect("a request");
    server.receive(one, &half[..9]);
    send(&mut server, other, 0, &Request::Directory { path: "/a" });
    server.sent(other, 5);
    let rest = server.unsent(other).to_vec();

    let mut server = moved(&server);
    assert_eq!(server.unsent(other), rest);
    let count = rest.len();
    server.sent(other, count);
    server.receive(one, &half[9..]);
    assert_eq!(answers(&mut server, one), ["1"]);
    send(&mut server, one, 0, &Request::IsDomainIntroduced { domid: 3 });
    send(&mut server, one, 0, &Request::GetQuota { domid: Some(3), quota: Some("nodes") });
    assert_eq!(answers(&mut server, one), ["T\0", "77\0"]);
    // Another client adds a child: the first transaction merges, the second wanted to remove all of it.
    send(&mut server, other, 0, &Request::Mkdir { path: "/a/theirs" });
    assert_eq!(answers(&mut server, other), ["OK\0", "/a/theirs\0t\0"]);
    send(&mut server, one, 1, &Request::TransactionEnd { commit: true });
    send(&mut server, one, 2, &Request::TransactionEnd { commit: true });
    send(&mut server, one, 0, &Request::Directory { path: "/a" });
    send(&mut server, one, 0, &Request::Control { arguments: b"check\0" });
    assert_eq!(answers(&mut server, one), ["OK\0", "EAGAIN\0", "b\0mine\0theirs\0", "OK\0"]);
    assert_eq!(answers(&mut server, other), ["/a/mine\0t\0"]);
}

#[test]
fn versions_share_in_the_bytes_what_they_share_in_memory() {
    let mut server = Server::default();
    let one = server.connect(Caller::CONTROL);
    for number in 0..1000 {
        let path = format!("/a/n{number}");
        send(&mut server, one, 0, &Request::Write { path: &path, value: b"0123456789" });
    }
    let len = |server: &Server| {
        let mut out = Writer::default();
        save(server, &mut out);
        out.0.len()
    };
    answers(&mut server, one);
    let before = len(&server);
    for number in 1..9 {
        send(&mut server, one, 0, &Request::TransactionStart);
        send(&mut server, one, number, &Request::Write { path: "/a/n5", value: b"x" });
    }
    answers(&mut server, one);
    // Each transaction has a directory of its own, and no child but one.
    assert!(len(&server) < before + 8 * 16_000, "{} after {before}", len(&server));
    let again = moved_quickly(&server);
    let live = again.store.live.get("/a/n6").expect("a node");
    let (_, transaction) = &again.conns[one].as_ref().expect("a connection").transactions[3];
    assert!(Rc::ptr_eq(live, transaction.tree.get("/a/n6").expect("a node")));
}

fn moved_quickly(server: &Server) -> Server {
    let mut out = Writer::default();
    save(server, &mut out);
    load(&mut Reader(&out.0), Box::new(NoHypervisor)).expect("what was saved")
}
