//! Requests and answers byte for byte, and what clients do to each other.

use tapio_xenstore::wire::{Decoder, HEADER_LEN, Header};

use super::*;
use crate::domains::FEATURES;

struct Client(ConnId);

/// The kind's number and the payload with `|` for NUL.
type Got = (MessageKind, String);

impl Client {
    fn send(&self, server: &mut Server, kind: MessageKind, transaction: u32, payload: &str) {
        let payload = payload.replace('|', "\0");
        let len = payload.len() as u32;
        let header = Header { kind: kind as u32, request: 7, transaction, len };
        server.receive(self.0, &[&header.encode()[..], payload.as_bytes()].concat());
    }

    /// Everything that was sent to it.
    fn take(&self, server: &mut Server) -> Vec<Got> {
        let mut decoder = Decoder::new();
        decoder.push(server.unsent(self.0));
        let count = server.unsent(self.0).len();
        server.sent(self.0, count);
        let mut got = Vec::new();
        while let Some(message) = decoder.next().expect("whole messages") {
            let payload = String::from_utf8_lossy(message.payload).replace('\0', "|");
            got.push((message.kind().expect("a kind"), payload));
        }
        server.go_on(self.0);
        got
    }

    /// The one answer to a request; events that came before it are thrown away.
    fn ask_in(&self, server: &mut Server, kind: MessageKind, transaction: u32, payload: &str) -> String {
        self.take(server);
        self.send(server, kind, transaction, payload);
        let got = self.take(server);
        let answers: Vec<_> = got.iter().filter(|(kind, _)| *kind != MessageKind::WatchEvent).collect();
        let [(kind_back, text)] = answers.as_slice() else { panic!("{kind:?} {payload}: {got:?}") };
        assert!(
            *kind_back == kind || *kind_back == MessageKind::Error,
            "{kind:?} was answered by {kind_back:?}"
        );
        text.clone()
    }

    fn ask(&self, server: &mut Server, kind: MessageKind, payload: &str) -> String {
        self.ask_in(server, kind, 0, payload)
    }

    fn events(&self, server: &mut Server) -> Vec<String> {
        self.take(server)
            .into_iter()
            .filter(|(kind, _)| *kind == MessageKind::WatchEvent)
            .map(|(_, text)| text)
            .collect()
    }
}

fn control(server: &mut Server) -> Client {
    Client(server.connect(Caller::CONTROL))
}

/// Domain 5 with a home of its own, and its connection.
fn guest(server: &mut Server, root: &Client, domid: u32) -> Client {
    assert_eq!(root.ask(server, MessageKind::Introduce, &format!("{domid}|1|2|")), "OK|");
    root.ask(server, MessageKind::Write, &format!("/local/domain/{domid}|"));
    root.ask(server, MessageKind::SetPerms, &format!("/local/domain/{domid}|n{domid}|"));
    Client(server.domain(domid).and_then(|domain| domain.conn).expect("a connection"))
}

#[test]
fn requests_and_answers() {
    let mut server = Server::default();
    let root = control(&mut server);
    let table = [
        (MessageKind::Read, "/tool|", "|".trim_matches('|')),
        (MessageKind::Write, "/a/b/c|v|w", "OK|"),
        (MessageKind::Read, "/a/b/c|", "v|w"),
        (MessageKind::Read, "/a/b|", ""),
        (MessageKind::Read, "/a/x|", "ENOENT|"),
        (MessageKind::Read, "/a/b/|", "EINVAL|"),
        (MessageKind::Read, "/a//b|", "EINVAL|"),
        (MessageKind::Read, "|", "EINVAL|"),
        (MessageKind::Read, "/a b|", "EINVAL|"),
        (MessageKind::Read, "/a", "EINVAL|"),
        (MessageKind::Directory, "/|", "a|tool|"),
        (MessageKind::Directory, "/a/b/c|", ""),
        (MessageKind::Directory, "/q|", "ENOENT|"),
        (MessageKind::Mkdir, "/a/b/d|", "OK|"),
        (MessageKind::Mkdir, "/a/b/c|", "OK|"),
        (MessageKind::Read, "/a/b/c|", "v|w"),
        (MessageKind::GetPerms, "/a/b|", "n0|"),
        (MessageKind::SetPerms, "/a/b|b0|r5|", "OK|"),
        (MessageKind::GetPerms, "/a/b|", "b0|r5|"),
        (MessageKind::SetPerms, "/a/b|", "EINVAL|"),
        (MessageKind::SetPerms, "/a/b|x0|", "EINVAL|"),
        (MessageKind::SetPerms, "/q|n0|", "ENOENT|"),
        (MessageKind::GetPerms, "@releaseDomain|", "n0|"),
        (MessageKind::SetPerms, "@releaseDomain|n0|r5|", "OK|"),
        (MessageKind::GetPerms, "@releaseDomain/9|", "n0|r5|"),
        (MessageKind::SetPerms, "@other|n0|", "EINVAL|"),
        (MessageKind::Rm, "/a/b/q|", "OK|"),
        (MessageKind::Rm, "/a/q/q|", "ENOENT|"),
        (MessageKind::Rm, "/|", "EINVAL|"),
        (MessageKind::Rm, "/a|", "OK|"),
        (MessageKind::Directory, "/|", "tool|"),
        (MessageKind::Write, "x|1", "OK|"),
        (MessageKind::Read, "/local/domain/0/x|", "1"),
        (MessageKind::TransactionEnd, "T|", "ENOENT|"),
        (MessageKind::TransactionEnd, "X|", "EINVAL|"),
        (MessageKind::GetDomainPath, "12|", "/local/domain/12|"),
        (MessageKind::IsDomainIntroduced, "0|", "T|"),
        (MessageKind::IsDomainIntroduced, "12|", "F|"),
        (MessageKind::Release, "12|", "ENOENT|"),
        (MessageKind::Release, "0|", "EINVAL|"),
        (MessageKind::Resume, "12|", "ENOENT|"),
        (MessageKind::Introduce, "0|1|1|", "EINVAL|"),
        (MessageKind::Introduce, "12|1|1|", "OK|"),
        (MessageKind::Introduce, "12|2|1|", "EINVAL|"),
        (MessageKind::Introduce, "12|1|3|", "OK|"),
        (MessageKind::IsDomainIntroduced, "12|", "T|"),
        (MessageKind::SetTarget, "12|13|", "ENOENT|"),
        (MessageKind::GetFeature, "", "7|"),
        (MessageKind::GetFeature, "12|", "7|"),
        (MessageKind::GetFeature, "99|", "ENOENT|"),
        (MessageKind::SetFeature, "12|1|", "EBUSY|"),
        (MessageKind::SetFeature, "13|8|", "EINVAL|"),
        (MessageKind::SetFeature, "13|1|", "OK|"),
        (MessageKind::GetFeature, "13|", "1|"),
        (MessageKind::GetQuota, "nodes|", "1000|"),
        (MessageKind::SetQuota, "12|nodes|5|", "OK|"),
        (MessageKind::GetQuota, "12|nodes|", "5|"),
        (MessageKind::SetQuota, "noodles|5|", "EINVAL|"),
        (MessageKind::Release, "12|", "OK|"),
        (MessageKind::Control, "check|", "OK|"),
        (MessageKind::Control, "bogus|", "EINVAL|"),
        (MessageKind::Error, "x|", "ENOSYS|"),
    ];
    for (kind, payload, wanted) in table {
        assert_eq!(root.ask(&mut server, kind, payload), wanted, "{kind:?} {payload}");
    }
    assert_eq!(FEATURES, 7);
    assert!(root.ask(&mut server, MessageKind::Control, "help|").contains("live-update"));
    assert!(root.ask(&mut server, MessageKind::Control, "memreport|").contains("nodes: "));
    assert!(root.ask(&mut server, MessageKind::Control, "quota|").contains("watches"));
}

#[test]
fn transactions_are_invisible_until_they_end() {
    let mut server = Server::default();
    let (one, other) = (control(&mut server), control(&mut server));
    let number = one
        .ask(&mut server, MessageKind::TransactionStart, "|")
        .trim_end_matches('|')
        .parse()
        .expect("a number");
    assert_eq!(one.ask_in(&mut server, MessageKind::TransactionStart, number, "|"), "EBUSY|");
    assert_eq!(one.ask_in(&mut server, MessageKind::Write, number, "/a|1"), "OK|");
    assert_eq!(other.ask(&mut server, MessageKind::Read, "/a|"), "ENOENT|");
    assert_eq!(other.ask_in(&mut server, MessageKind::Read, number, "/a|"), "ENOENT|");
    assert_eq!(one.ask_in(&mut server, MessageKind::Read, number, "/a|"), "1");
    other.ask(&mut server, MessageKind::Watch, "/|t|");
    other.take(&mut server);
    assert_eq!(one.ask_in(&mut server, MessageKind::TransactionEnd, number, "T|"), "OK|");
    assert_eq!(other.events(&mut server), ["/a|t|"]);
    assert_eq!(other.ask(&mut server, MessageKind::Read, "/a|"), "1");
    assert_eq!(one.ask_in(&mut server, MessageKind::Read, number, "/a|"), "ENOENT|");
}

#[test]
fn watches_hear_what_they_asked_for() {
    let mut server = Server::default();
    let (root, watcher) = (control(&mut server), control(&mut server));
    watcher.send(&mut server, MessageKind::Watch, 0, "/a|t|");
    let got = watcher.take(&mut server);
    assert_eq!(got, [(MessageKind::Watch, "OK|".to_owned()), (MessageKind::WatchEvent, "/a|t|".to_owned())]);
    assert_eq!(watcher.ask(&mut server, MessageKind::Watch, "/a|t|"), "EEXIST|");
    assert_eq!(watcher.ask(&mut server, MessageKind::Watch, "/b|near|1|"), "OK|");
    assert_eq!(watcher.ask(&mut server, MessageKind::Watch, "/a/b/c|deep|"), "OK|");
    assert_eq!(watcher.ask(&mut server, MessageKind::Watch, "x/y|rel|"), "OK|");
    watcher.take(&mut server);
    for payload in ["/a/b/c/d|1", "/ab|1", "/b/c|1", "/b/c/d|1", "x/y/z|1"] {
        root.ask(&mut server, MessageKind::Write, payload);
    }
    let heard = ["/a/b/c/d|deep|", "/a/b/c/d|t|", "/b/c|near|", "x/y/z|rel|"];
    assert_eq!(watcher.events(&mut server), heard);
    // A removal fires the watches of nodes that go with it, under the names that their clients use.
    root.ask(&mut server, MessageKind::Rm, "/a|");
    assert_eq!(watcher.events(&mut server), ["/a|t|", "/a/b/c|deep|"]);
    root.ask(&mut server, MessageKind::Rm, "/a|");
    assert!(watcher.events(&mut server).is_empty());
    assert_eq!(watcher.ask(&mut server, MessageKind::Unwatch, "/a|t|"), "OK|");
    assert_eq!(watcher.ask(&mut server, MessageKind::Unwatch, "/a|t|"), "ENOENT|");
    assert_eq!(watcher.ask(&mut server, MessageKind::ResetWatches, "|"), "OK|");
    assert!(server.watches.is_empty());
}

#[test]
fn domains_come_and_go() {
    let mut server = Server::default();
    let (root, watcher) = (control(&mut server), control(&mut server));
    for payload in
        ["@introduceDomain|i|", "@releaseDomain|r|", "@releaseDomain|d|1|", "@releaseDomain/5|five|"]
    {
        assert_eq!(watcher.ask(&mut server, MessageKind::Watch, payload), "OK|", "{payload}");
    }
    assert_eq!(watcher.ask(&mut server, MessageKind::Watch, "@nothing|t|"), "EINVAL|");
    watcher.take(&mut server);
    let guest = guest(&mut server, &root, 5);
    assert_eq!(watcher.events(&mut server), ["@introduceDomain|i|"]);
    assert_eq!(guest.ask(&mut server, MessageKind::Write, "data/x|1"), "OK|");
    assert_eq!(guest.ask(&mut server, MessageKind::GetPerms, "/local/domain/5/data/x|"), "n5|");
    assert_eq!(guest.ask(&mut server, MessageKind::Watch, "@releaseDomain|t|"), "OK|");
    for (kind, payload) in [
        (MessageKind::Control, "check|"),
        (MessageKind::Introduce, "6|1|1|"),
        (MessageKind::Release, "5|"),
        (MessageKind::SetTarget, "5|0|"),
        (MessageKind::Write, "/x|1"),
        (MessageKind::Read, "/local/domain|"),
        (MessageKind::GetQuota, "0|nodes|"),
        (MessageKind::SetQuota, "nodes|1|"),
    ] {
        assert_eq!(guest.ask(&mut server, kind, payload), "EACCES|", "{kind:?} {payload}");
    }
    assert_eq!(guest.ask(&mut server, MessageKind::SetPerms, "data|n0|"), "EPERM|");
    server.domains_changed(|_| Life::Shutdown);
    server.domains_changed(|_| Life::Shutdown);
    let released = ["@releaseDomain/5|five|", "@releaseDomain|r|", "@releaseDomain/5|d|"];
    assert_eq!(watcher.events(&mut server), released);
    assert!(guest.events(&mut server).is_empty(), "only an allowed connection hears of domains");
    assert_eq!(root.ask(&mut server, MessageKind::Resume, "5|"), "OK|");
    server.domains_changed(|_| Life::Gone);
    assert_eq!(watcher.events(&mut server), released);
    assert_eq!(root.ask(&mut server, MessageKind::Read, "/local/domain/5|"), "ENOENT|");
    assert!(server.conn(guest.0).is_none() && server.store.usage(5).nodes == 0);
    assert_eq!(root.ask(&mut server, MessageKind::Control, "check|"), "OK|");
}

#[test]
fn a_domain_may_act_for_another() {
    let mut server = Server::default();
    let root = control(&mut server);
    let (stub, _guest) = (guest(&mut server, &root, 9), guest(&mut server, &root, 5));
    assert_eq!(stub.ask(&mut server, MessageKind::Write, "/local/domain/5/x|1"), "EACCES|");
    assert_eq!(root.ask(&mut server, MessageKind::SetTarget, "9|5|"), "OK|");
    assert_eq!(stub.ask(&mut server, MessageKind::Write, "/local/domain/5/x|1"), "OK|");
    server.release(5);
    guest(&mut server, &root, 5);
    assert_eq!(stub.ask(&mut server, MessageKind::Write, "/local/domain/5/x|1"), "EACCES|");
}

#[test]
fn long_directories_come_in_parts() {
    let mut server = Server::default();
    let root = control(&mut server);
    for number in 0..2000 {
        root.ask(&mut server, MessageKind::Mkdir, &format!("/d/child{number:05}|"));
    }
    assert_eq!(root.ask(&mut server, MessageKind::Directory, "/d|"), "E2BIG|");
    let (mut all, mut parts) = (String::new(), 0);
    loop {
        let part = root.ask(&mut server, MessageKind::DirectoryPart, &format!("/d|{}|", all.len()));
        let (_generation, names) = part.split_once('|').expect("a generation");
        parts += 1;
        if let Some(rest) = names.strip_suffix("||") {
            all += rest;
            break;
        }
        all += names;
    }
    assert_eq!((all.split('|').count(), parts), (2000, 6));
    assert_eq!(
        root.ask(&mut server, MessageKind::DirectoryPart, "/tool|0").split_once('|').expect("parts").1,
        "xenstored||"
    );
    assert_eq!(
        root.ask(&mut server, MessageKind::DirectoryPart, "/tool/xenstored|0|")
            .split_once('|')
            .expect("two")
            .1,
        "|"
    );
}

#[test]
fn guests_have_bounds() {
    let mut server = Server::default();
    let root = control(&mut server);
    let guest = guest(&mut server, &root, 5);
    for number in 0..128 {
        assert_eq!(guest.ask(&mut server, MessageKind::Watch, &format!("w|{number}|")), "OK|");
    }
    assert_eq!(guest.ask(&mut server, MessageKind::Watch, "w|128|"), "E2BIG|");
    guest.ask(&mut server, MessageKind::ResetWatches, "|");
    for _ in 0..10 {
        assert!(guest.ask(&mut server, MessageKind::TransactionStart, "|") != "ENOSPC|");
    }
    assert_eq!(guest.ask(&mut server, MessageKind::TransactionStart, "|"), "ENOSPC|");
    assert_eq!(guest.ask(&mut server, MessageKind::Write, &format!("x|{}", "y".repeat(2050))), "ENOSPC|");
    assert_eq!(guest.ask(&mut server, MessageKind::SetPerms, "|n5|r1|r2|r3|r4|r6|"), "EINVAL|");
    guest.ask(&mut server, MessageKind::Write, "x|1");
    assert_eq!(guest.ask(&mut server, MessageKind::SetPerms, "x|n5|r1|r2|r3|r4|r6|"), "ENOSPC|");
    // It does not read its answers: its requests wait until it does.
    for _ in 0..100 {
        guest.send(&mut server, MessageKind::Read, 0, "x|");
    }
    assert!(!server.wants_more(guest.0));
    let first = guest.take(&mut server).len();
    let second = guest.take(&mut server).len();
    assert_eq!((first, second), (21, 21));
    // What no message holds ends the connection.
    let header = Header { kind: 2, request: 0, transaction: 0, len: 4097 };
    server.receive(root.0, &header.encode());
    assert!(server.conn(root.0).is_some_and(|conn| conn.broken) && !server.wants_more(root.0));
    assert_eq!(HEADER_LEN, 16);
}

#[test]
fn a_connection_that_never_reads_events_is_cut_off() {
    let mut server = Server::default();
    let root = control(&mut server);
    let deaf = guest(&mut server, &root, 5);
    deaf.ask(&mut server, MessageKind::Watch, "/local/domain/5|t|");
    deaf.take(&mut server);
    server.domains.general_mut().limits.set("memory", 2000);
    for number in 0..100 {
        root.ask(&mut server, MessageKind::Write, &format!("/local/domain/5/n{number}|"));
    }
    assert!(server.conn(deaf.0).is_some_and(|conn| conn.broken));
    assert!(server.unsent(deaf.0).len() < 2200);
}
