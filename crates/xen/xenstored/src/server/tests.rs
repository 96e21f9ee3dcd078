//! Requests and answers byte for byte, and what clients do to each other.

use tapio_xenstore::wire::{Decoder, HEADER_LEN, Header};

use super::*;
use crate::domains::FEATURES;

struct Client(ConnId);

/// The kind's number and the payload with `|` for NUL.
type Got = (Kind, String);

impl Client {
    fn send(&self, server: &mut Server, kind: Kind, transaction: u32, payload: &str) {
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
    fn ask_in(&self, server: &mut Server, kind: Kind, transaction: u32, payload: &str) -> String {
        self.take(server);
        self.send(server, kind, transaction, payload);
        let got = self.take(server);
        let answers: Vec<_> = got.iter().filter(|(kind, _)| *kind != Kind::WatchEvent).collect();
        let [(kind_back, text)] = answers.as_slice() else { panic!("{kind:?} {payload}: {got:?}") };
        assert!(*kind_back == kind || *kind_back == Kind::Error, "{kind:?} was answered by {kind_back:?}");
        text.clone()
    }

    fn ask(&self, server: &mut Server, kind: Kind, payload: &str) -> String {
        self.ask_in(server, kind, 0, payload)
    }

    fn events(&self, server: &mut Server) -> Vec<String> {
        self.take(server)
            .into_iter()
            .filter(|(kind, _)| *kind == Kind::WatchEvent)
            .map(|(_, text)| text)
            .collect()
    }
}

fn control(server: &mut Server) -> Client {
    Client(server.connect(Caller::CONTROL))
}

/// Domain 5 with a home of its own, and its connection.
fn guest(server: &mut Server, root: &Client, domid: u32) -> Client {
    assert_eq!(root.ask(server, Kind::Introduce, &format!("{domid}|1|2|")), "OK|");
    root.ask(server, Kind::Write, &format!("/local/domain/{domid}|"));
    root.ask(server, Kind::SetPerms, &format!("/local/domain/{domid}|n{domid}|"));
    Client(server.domain(domid).and_then(|domain| domain.conn).expect("a connection"))
}

#[test]
fn requests_and_answers() {
    let mut server = Server::default();
    let root = control(&mut server);
    let table = [
        (Kind::Read, "/tool|", "|".trim_matches('|')),
        (Kind::Write, "/a/b/c|v|w", "OK|"),
        (Kind::Read, "/a/b/c|", "v|w"),
        (Kind::Read, "/a/b|", ""),
        (Kind::Read, "/a/x|", "ENOENT|"),
        (Kind::Read, "/a/b/|", "EINVAL|"),
        (Kind::Read, "/a//b|", "EINVAL|"),
        (Kind::Read, "|", "EINVAL|"),
        (Kind::Read, "/a b|", "EINVAL|"),
        (Kind::Read, "/a", "EINVAL|"),
        (Kind::Directory, "/|", "a|tool|"),
        (Kind::Directory, "/a/b/c|", ""),
        (Kind::Directory, "/q|", "ENOENT|"),
        (Kind::Mkdir, "/a/b/d|", "OK|"),
        (Kind::Mkdir, "/a/b/c|", "OK|"),
        (Kind::Read, "/a/b/c|", "v|w"),
        (Kind::GetPerms, "/a/b|", "n0|"),
        (Kind::SetPerms, "/a/b|b0|r5|", "OK|"),
        (Kind::GetPerms, "/a/b|", "b0|r5|"),
        (Kind::SetPerms, "/a/b|", "EINVAL|"),
        (Kind::SetPerms, "/a/b|x0|", "EINVAL|"),
        (Kind::SetPerms, "/q|n0|", "ENOENT|"),
        (Kind::GetPerms, "@releaseDomain|", "n0|"),
        (Kind::SetPerms, "@releaseDomain|n0|r5|", "OK|"),
        (Kind::GetPerms, "@releaseDomain/9|", "n0|r5|"),
        (Kind::SetPerms, "@other|n0|", "EINVAL|"),
        (Kind::Rm, "/a/b/q|", "OK|"),
        (Kind::Rm, "/a/q/q|", "ENOENT|"),
        (Kind::Rm, "/|", "EINVAL|"),
        (Kind::Rm, "/a|", "OK|"),
        (Kind::Directory, "/|", "tool|"),
        (Kind::Write, "x|1", "OK|"),
        (Kind::Read, "/local/domain/0/x|", "1"),
        (Kind::TransactionEnd, "T|", "ENOENT|"),
        (Kind::TransactionEnd, "X|", "EINVAL|"),
        (Kind::GetDomainPath, "12|", "/local/domain/12|"),
        (Kind::IsDomainIntroduced, "0|", "T|"),
        (Kind::IsDomainIntroduced, "12|", "F|"),
        (Kind::Release, "12|", "ENOENT|"),
        (Kind::Release, "0|", "EINVAL|"),
        (Kind::Resume, "12|", "ENOENT|"),
        (Kind::Introduce, "0|1|1|", "EINVAL|"),
        (Kind::Introduce, "12|1|1|", "OK|"),
        (Kind::Introduce, "12|2|1|", "EINVAL|"),
        (Kind::Introduce, "12|1|3|", "OK|"),
        (Kind::IsDomainIntroduced, "12|", "T|"),
        (Kind::SetTarget, "12|13|", "ENOENT|"),
        (Kind::GetFeature, "", "7|"),
        (Kind::GetFeature, "12|", "7|"),
        (Kind::GetFeature, "99|", "ENOENT|"),
        (Kind::SetFeature, "12|1|", "EBUSY|"),
        (Kind::SetFeature, "13|8|", "EINVAL|"),
        (Kind::SetFeature, "13|1|", "OK|"),
        (Kind::GetFeature, "13|", "1|"),
        (Kind::GetQuota, "nodes|", "1000|"),
        (Kind::SetQuota, "12|nodes|5|", "OK|"),
        (Kind::GetQuota, "12|nodes|", "5|"),
        (Kind::SetQuota, "noodles|5|", "EINVAL|"),
        (Kind::Release, "12|", "OK|"),
        (Kind::Control, "check|", "OK|"),
        (Kind::Control, "bogus|", "EINVAL|"),
        (Kind::Error, "x|", "ENOSYS|"),
    ];
    for (kind, payload, wanted) in table {
        assert_eq!(root.ask(&mut server, kind, payload), wanted, "{kind:?} {payload}");
    }
    assert_eq!(FEATURES, 7);
    assert!(root.ask(&mut server, Kind::Control, "help|").contains("live-update"));
    assert!(root.ask(&mut server, Kind::Control, "memreport|").contains("nodes: "));
    assert!(root.ask(&mut server, Kind::Control, "quota|").contains("watches"));
}

#[test]
fn transactions_are_invisible_until_they_end() {
    let mut server = Server::default();
    let (one, other) = (control(&mut server), control(&mut server));
    let number =
        one.ask(&mut server, Kind::TransactionStart, "|").trim_end_matches('|').parse().expect("a number");
    assert_eq!(one.ask_in(&mut server, Kind::TransactionStart, number, "|"), "EBUSY|");
    assert_eq!(one.ask_in(&mut server, Kind::Write, number, "/a|1"), "OK|");
    assert_eq!(other.ask(&mut server, Kind::Read, "/a|"), "ENOENT|");
    assert_eq!(other.ask_in(&mut server, Kind::Read, number, "/a|"), "ENOENT|");
    assert_eq!(one.ask_in(&mut server, Kind::Read, number, "/a|"), "1");
    other.ask(&mut server, Kind::Watch, "/|t|");
    other.take(&mut server);
    assert_eq!(one.ask_in(&mut server, Kind::TransactionEnd, number, "T|"), "OK|");
    assert_eq!(other.events(&mut server), ["/a|t|"]);
    assert_eq!(other.ask(&mut server, Kind::Read, "/a|"), "1");
    assert_eq!(one.ask_in(&mut server, Kind::Read, number, "/a|"), "ENOENT|");
}

#[test]
fn watches_hear_what_they_asked_for() {
    let mut server = Server::default();
    let (root, watcher) = (control(&mut server), control(&mut server));
    watcher.send(&mut server, Kind::Watch, 0, "/a|t|");
    let got = watcher.take(&mut server);
    assert_eq!(got, [(Kind::Watch, "OK|".to_owned()), (Kind::WatchEvent, "/a|t|".to_owned())]);
    assert_eq!(watcher.ask(&mut server, Kind::Watch, "/a|t|"), "EEXIST|");
    assert_eq!(watcher.ask(&mut server, Kind::Watch, "/b|near|1|"), "OK|");
    assert_eq!(watcher.ask(&mut server, Kind::Watch, "/a/b/c|deep|"), "OK|");
    assert_eq!(watcher.ask(&mut server, Kind::Watch, "x/y|rel|"), "OK|");
    watcher.take(&mut server);
    for payload in ["/a/b/c/d|1", "/ab|1", "/b/c|1", "/b/c/d|1", "x/y/z|1"] {
        root.ask(&mut server, Kind::Write, payload);
    }
    let heard = ["/a/b/c/d|deep|", "/a/b/c/d|t|", "/b/c|near|", "x/y/z|rel|"];
    assert_eq!(watcher.events(&mut server), heard);
    // A removal fires the watches of nodes that go with it, under the names that their clients use.
    root.ask(&mut server, Kind::Rm, "/a|");
    assert_eq!(watcher.events(&mut server), ["/a|t|", "/a/b/c|deep|"]);
    root.ask(&mut server, Kind::Rm, "/a|");
    assert!(watcher.events(&mut server).is_empty());
    assert_eq!(watcher.ask(&mut server, Kind::Unwatch, "/a|t|"), "OK|");
    assert_eq!(watcher.ask(&mut server, Kind::Unwatch, "/a|t|"), "ENOENT|");
    assert_eq!(watcher.ask(&mut server, Kind::ResetWatches, "|"), "OK|");
    assert!(server.watches.is_empty());
}

#[test]
fn domains_come_and_go() {
    let mut server = Server::default();
    let (root, watcher) = (control(&mut server), control(&mut server));
    for payload in
        ["@introduceDomain|i|", "@releaseDomain|r|", "@releaseDomain|d|1|", "@releaseDomain/5|five|"]
    {
        assert_eq!(watcher.ask(&mut server, Kind::Watch, payload), "OK|", "{payload}");
    }
    assert_eq!(watcher.ask(&mut server, Kind::Watch, "@nothing|t|"), "EINVAL|");
    watcher.take(&mut server);
    let guest = guest(&mut server, &root, 5);
    assert_eq!(watcher.events(&mut server), ["@introduceDomain|i|"]);
    assert_eq!(guest.ask(&mut server, Kind::Write, "data/x|1"), "OK|");
    assert_eq!(guest.ask(&mut server, Kind::GetPerms, "/local/domain/5/data/x|"), "n5|");
    assert_eq!(guest.ask(&mut server, Kind::Watch, "@releaseDomain|t|"), "OK|");
    for (kind, payload) in [
        (Kind::Control, "check|"),
        (Kind::Introduce, "6|1|1|"),
        (Kind::Release, "5|"),
        (Kind::SetTarget, "5|0|"),
        (Kind::Write, "/x|1"),
        (Kind::Read, "/local/domain|"),
        (Kind::GetQuota, "0|nodes|"),
        (Kind::SetQuota, "nodes|1|"),
    ] {
        assert_eq!(guest.ask(&mut server, kind, payload), "EACCES|", "{kind:?} {payload}");
    }
    assert_eq!(guest.ask(&mut server, Kind::SetPerms, "data|n0|"), "EPERM|");
    server.domains_changed(|_| Life::Shutdown);
    server.domains_changed(|_| Life::Shutdown);
    let released = ["@releaseDomain/5|five|", "@releaseDomain|r|", "@releaseDomain/5|d|"];
    assert_eq!(watcher.events(&mut server), released);
    assert!(guest.events(&mut server).is_empty(), "only an allowed connection hears of domains");
    assert_eq!(root.ask(&mut server, Kind::Resume, "5|"), "OK|");
    server.domains_changed(|_| Life::Gone);
    assert_eq!(watcher.events(&mut server), released);
    assert_eq!(root.ask(&mut server, Kind::Read, "/local/domain/5|"), "ENOENT|");
    assert!(server.conn(guest.0).is_none() && server.store.usage(5).nodes == 0);
    assert_eq!(root.ask(&mut server, Kind::Control, "check|"), "OK|");
}

#[test]
fn a_domain_may_act_for_another() {
    let mut server = Server::default();
    let root = control(&mut server);
    let (stub, _guest) = (guest(&mut server, &root, 9), guest(&mut server, &root, 5));
    assert_eq!(stub.ask(&mut server, Kind::Write, "/local/domain/5/x|1"), "EACCES|");
    assert_eq!(root.ask(&mut server, Kind::SetTarget, "9|5|"), "OK|");
    assert_eq!(stub.ask(&mut server, Kind::Write, "/local/domain/5/x|1"), "OK|");
    server.release(5);
    guest(&mut server, &root, 5);
    assert_eq!(stub.ask(&mut server, Kind::Write, "/local/domain/5/x|1"), "EACCES|");
}

#[test]
fn long_directories_come_in_parts() {
    let mut server = Server::default();
    let root = control(&mut server);
    for number in 0..2000 {
        root.ask(&mut server, Kind::Mkdir, &format!("/d/child{number:05}|"));
    }
    assert_eq!(root.ask(&mut server, Kind::Directory, "/d|"), "E2BIG|");
    let (mut all, mut parts) = (String::new(), 0);
    loop {
        let part = root.ask(&mut server, Kind::DirectoryPart, &format!("/d|{}|", all.len()));
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
        root.ask(&mut server, Kind::DirectoryPart, "/tool|0").split_once('|').expect("parts").1,
        "xenstored||"
    );
    assert_eq!(
        root.ask(&mut server, Kind::DirectoryPart, "/tool/xenstored|0|").split_once('|').expect("two").1,
        "|"
    );
}

#[test]
fn guests_have_bounds() {
    let mut server = Server::default();
    let root = control(&mut server);
    let guest = guest(&mut server, &root, 5);
    for number in 0..128 {
        assert_eq!(guest.ask(&mut server, Kind::Watch, &format!("w|{number}|")), "OK|");
    }
    assert_eq!(guest.ask(&mut server, Kind::Watch, "w|128|"), "E2BIG|");
    guest.ask(&mut server, Kind::ResetWatches, "|");
    for _ in 0..10 {
        assert!(guest.ask(&mut server, Kind::TransactionStart, "|") != "ENOSPC|");
    }
    assert_eq!(guest.ask(&mut server, Kind::TransactionStart, "|"), "ENOSPC|");
    assert_eq!(guest.ask(&mut server, Kind::Write, &format!("x|{}", "y".repeat(2050))), "ENOSPC|");
    assert_eq!(guest.ask(&mut server, Kind::SetPerms, "|n5|r1|r2|r3|r4|r6|"), "EINVAL|");
    guest.ask(&mut server, Kind::Write, "x|1");
    assert_eq!(guest.ask(&mut server, Kind::SetPerms, "x|n5|r1|r2|r3|r4|r6|"), "ENOSPC|");
    // It does not read its answers: its requests wait until it does.
    for _ in 0..100 {
        guest.send(&mut server, Kind::Read, 0, "x|");
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
    deaf.ask(&mut server, Kind::Watch, "/local/domain/5|t|");
    deaf.take(&mut server);
    server.domains.general_mut().limits.set("memory", 2000);
    for number in 0..100 {
        root.ask(&mut server, Kind::Write, &format!("/local/domain/5/n{number}|"));
    }
    assert!(server.conn(deaf.0).is_some_and(|conn| conn.broken));
    assert!(server.unsent(deaf.0).len() < 2200);
}
