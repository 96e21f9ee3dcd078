//! Every moment at which a daemon can be killed or the power can fail, and what the next one makes of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tapio_xenstore::wire::{self, MessageKind, Permission, Request};

use super::*;
use crate::domains::Life;
use crate::quota::Limits;
use crate::tree::Caller;

/// A file: what is in it, and how much of that survives a power cut.
#[derive(Clone, Debug, Default)]
struct Content {
    bytes: Vec<u8>,
    synced: usize,
}

/// A directory in memory that dies at one operation and remembers what a disk would have.
#[derive(Clone, Debug, Default)]
struct Disk {
    files: BTreeMap<String, Content>,
    /// The names that survive a power cut, with the file each was of.
    durable: BTreeMap<String, String>,
    /// Operations until it dies.
    left: Option<usize>,
    done: usize,
}

#[derive(Clone, Debug, Default)]
struct Shared(Rc<RefCell<Disk>>);

impl Shared {
    /// One operation more; false when it is the one that is cut off.
    fn step(&self) -> bool {
        let mut disk = self.0.borrow_mut();
        disk.done += 1;
        match &mut disk.left {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }

    fn dead() -> io::Error {
        io::Error::other("the power is gone")
    }
}

impl Files for Shared {
    fn names(&mut self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().files.keys().cloned().collect())
    }

    fn read(&mut self, name: &str) -> io::Result<Vec<u8>> {
        Ok(self.0.borrow().files.get(name).ok_or_else(Self::dead)?.bytes.clone())
    }

    fn write_new(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let whole = self.step();
        let len = if whole { bytes.len() } else { bytes.len() / 2 };
        let content = Content { bytes: bytes[..len].to_vec(), synced: 0 };
        self.0.borrow_mut().files.insert(name.into(), content);
        if whole { Ok(()) } else { Err(Self::dead()) }
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let whole = self.step();
        let len = if whole { bytes.len() } else { bytes.len() / 2 };
        let mut disk = self.0.borrow_mut();
        disk.files.get_mut(name).ok_or_else(Self::dead)?.bytes.extend_from_slice(&bytes[..len]);
        if whole { Ok(()) } else { Err(Self::dead()) }
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        let content = disk.files.get_mut(name).ok_or_else(Self::dead)?;
        content.synced = content.bytes.len();
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        let content = disk.files.remove(from).ok_or_else(Self::dead)?;
        disk.files.insert(to.into(), content);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        self.0.borrow_mut().files.remove(name).map(drop).ok_or_else(Self::dead)
    }

    fn sync_names(&mut self) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        disk.durable = disk.files.keys().map(|name| (name.clone(), name.clone())).collect();
        Ok(())
    }
}

impl Disk {
    /// What is there after the power came back: names that were synced, or all of them (a directory may reach the disk
    /// by itself), and of each file what was synced and perhaps some of the rest.
    fn after_power_cut(&self, all_names: bool, more: usize) -> Shared {
        let mut disk = Self::default();
        for (name, content) in &self.files {
            if all_names || self.durable.contains_key(name) {
                let len = (content.synced + more).min(content.bytes.len());
                let content = Content { bytes: content.bytes[..len].to_vec(), synced: len };
                disk.files.insert(name.clone(), content);
            }
        }
        Shared(Rc::new(RefCell::new(disk)))
    }
}

/// All that is kept of a server.
fn text(server: &Server) -> String {
    let mut text = String::new();
    crate::tree::walk("/", server.store.live.root(), |path, node| {
        text += &format!("{path}={:?}{:?} ", node.value, node.perms.owner());
    });
    for (domid, domain) in server.domains.known() {
        let watches: Vec<_> = domain.conn.into_iter().flat_map(|conn| server.watches.of(conn)).collect();
        let paths: Vec<_> = watches.iter().map(|(path, watch)| (path, &watch.token)).collect();
        text += &format!("\n{domid}: {:?} {paths:?}", Domain { conn: None, ..domain.clone() });
    }
    text + &format!("\n{:?}", server.domains.general)
}

fn ask(server: &mut Server, conn: usize, request: &Request<'_>) {
    let mut bytes = Vec::new();
    request.frame(1, 0, &mut bytes).expect("a request");
    server.receive(conn, &bytes);
    let answer = server.unsent(conn);
    assert_ne!(answer[0], MessageKind::Error as u8, "{request:?}: {}", String::from_utf8_lossy(answer));
    server.sent(conn, answer.len());
}

/// Steps of the story; after each the journal commits.
fn step(server: &mut Server, number: usize) {
    let limits = Limits::NONE;
    let guest = |server: &Server| server.domain(5).and_then(|domain| domain.conn).expect("domain 5");
    match number {
        3 => drop(server.store.view(&Caller::CONTROL, &limits).remove("/a/1")),
        5 => {
            let mut transaction = crate::store::Transaction::new(&server.store.live);
            for path in ["/t/one", "/t/two", "/t/three"] {
                let mut view = server.store.view_in(&mut transaction, &Caller::CONTROL, &limits);
                view.write(path, b"together").expect("a write");
            }
            server.store.commit(transaction, &Caller::CONTROL, &limits).expect("alone");
        }
        8 => ask(server, 0, &Request::Introduce { domid: 5, gfn: 77, port: 8 }),
        9 => ask(server, 0, &Request::SetQuota { domid: None, quota: "nodes", value: 7 }),
        10 => ask(server, 0, &Request::SetQuota { domid: Some(5), quota: "watches", value: 9 }),
        11 => ask(server, guest(server), &Request::Watch { path: "/a", token: b"token", depth: Some(3) }),
        12 => {
            let permissions = vec![Permission::new(wire::Access::Read, 5)];
            ask(server, 0, &Request::SetPerms { path: "@releaseDomain", permissions });
        }
        13 => {
            ask(server, 0, &Request::Introduce { domid: 6, gfn: 1, port: 2 });
            ask(server, 0, &Request::SetTarget { domid: 6, target: 5 });
        }
        14 => ask(server, guest(server), &Request::Unwatch { path: "/a", token: b"token" }),
        15 => ask(server, 0, &Request::Release { domid: 5 }),
        16 => ask(server, 0, &Request::SetFeature { domid: 9, value: 1 }),
        _ => drop(
            server.store.view(&Caller::CONTROL, &limits).write(&format!("/a/{number}"), &[number as u8; 40]),
        ),
    }
}

const STEPS: usize = 18;

fn fresh() -> Server {
    let mut server = Server::default();
    server.connect(Caller::CONTROL);
    server
}

/// What another program makes of a directory.
fn server_of<F: Files>(files: &mut F) -> io::Result<Server> {
    let mut server = fresh();
    server.take_up(read(files)?, |_| Life::Running);
    Ok(server)
}

/// Runs the story on a disk; what was acknowledged last, and what was tried after it.
fn story(shared: &Shared, turn_at: usize) -> (String, Option<String>) {
    let mut server = fresh();
    let mut acknowledged = text(&server);
    let Ok(mut journal) = Journal::begin(shared.clone(), Sync::Always, &mut server) else {
        return (acknowledged, None);
    };
    for number in 0..STEPS {
        step(&mut server, number);
        let tried = text(&server);
        if number == turn_at {
            // As when the log has become long.
            journal.log_len = u64::MAX / 2;
        }
        if journal.commit(&mut server).is_err() {
            return (acknowledged, Some(tried));
        }
        acknowledged = tried;
    }
    (acknowledged, None)
}

#[test]
fn what_was_acknowledged_is_there_whenever_the_power_fails() {
    for turn_at in [4, 13] {
        let whole = Shared::default();
        let (last, _) = story(&whole, turn_at);
        let operations = whole.0.borrow().done;
        assert!(
            operations > 40 && last.contains("/t/three") && last.contains("\n6: "),
            "{operations}: {last}"
        );
        let mut both = [false; 2];
        for left in 0..operations {
            let shared = Shared::default();
            shared.0.borrow_mut().left = Some(left);
            let (acknowledged, tried) = story(&shared, turn_at);
            let disk = shared.0.borrow().clone();
            for (all_names, more) in [(false, 0), (true, 0), (true, 10), (true, 1 << 20)] {
                let mut again = disk.after_power_cut(all_names, more);
                let server =
                    server_of(&mut again).unwrap_or_else(|error| panic!("after operation {left}: {error}"));
                let found = text(&server);
                let new = Some(&found) == tried.as_ref();
                assert!(
                    found == acknowledged || new,
                    "after operation {left}: {found}\nnot {acknowledged}\nnor {tried:?}"
                );
                both[usize::from(new)] = true;
            }
        }
        assert_eq!(both, [true; 2], "a step that was not acknowledged is there as a whole or not at all");
    }
}

#[test]
fn domains_that_went_meanwhile_are_forgotten() {
    let shared = Shared::default();
    let mut server = fresh();
    let mut journal = Journal::begin(shared.clone(), Sync::Always, &mut server).expect("room");
    for number in 8..12 {
        step(&mut server, number);
    }
    let owner = Permission::new(wire::Access::None, 5);
    ask(&mut server, 0, &Request::Write { path: "/local/domain/5", value: b"" });
    ask(&mut server, 0, &Request::SetPerms { path: "/local/domain/5", permissions: vec![owner] });
    journal.commit(&mut server).expect("room");
    let mut again = fresh();
    again.take_up(read(&mut shared.clone()).expect("whole"), |_| Life::Gone);
    assert!(again.domains.known().is_empty() && again.watches.is_empty());
    assert!(again.store.live.get("/local/domain/5").is_none());
    assert_eq!(again.domains.general, server.domains.general);
}

#[test]
fn of_the_command_line_and_the_administrator_the_last_word_counts() {
    let shared = Shared::default();
    let limits = |nodes, watches| {
        let mut limits = Limits::default();
        assert!(limits.set("nodes", nodes) && limits.set("watches", watches));
        limits
    };
    let now = |server: &Server| {
        let limits = &server.domains.general.limits;
        (limits.by_name("nodes"), limits.by_name("watches"))
    };
    let mut server = fresh();
    server.domains.begin_with(limits(10, 20));
    assert_eq!(now(&server), (Some(10), Some(20)));
    let mut journal = Journal::begin(shared.clone(), Sync::Always, &mut server).expect("room");
    for quota in ["nodes", "watches"] {
        ask(&mut server, 0, &Request::SetQuota { domid: None, quota, value: 30 });
    }
    journal.commit(&mut server).expect("room");
    let mut again = server_of(&mut shared.clone()).expect("whole");
    again.domains.begin_with(limits(10, 21));
    assert_eq!(now(&again), (Some(30), Some(21)));
}

#[test]
fn a_tree_of_the_first_programs_is_read() {
    let mut server = fresh();
    step(&mut server, 8);
    let whole = encode_tree(&server);
    let kept = decode_tree(&whole).expect("whole");
    assert!(kept.domains.get(5).is_some());
    let (mut nodes, mut old) = (NodesOut::default(), Writer::default());
    let root = nodes.number(server.store.live.root());
    old.u64(server.store.clock);
    nodes.finish(&mut old);
    old.u32(root);
    let mut bytes = Writer(MAGIC.to_vec());
    bytes.u32(crc32(&old.0));
    bytes.0.append(&mut old.0);
    assert!(whole.len() > bytes.0.len());
    let kept = decode_tree(&bytes.0).expect("whole");
    assert!(kept.domains.known().is_empty() && kept.store.live.get("/tool").is_some());
}

#[test]
fn a_daemon_that_was_killed_goes_on_with_what_it_wrote() {
    let scratch = tempfile::tempdir().expect("a directory");
    let mut texts = Vec::new();
    for round in 0..3 {
        let mut dir = Dir::open(scratch.path()).expect("the directory");
        assert!(Dir::open(scratch.path()).is_err(), "one daemon at a time");
        let mut server = server_of(&mut dir).expect("whole");
        texts.push(text(&server));
        let mut journal = Journal::begin(dir, Sync::Never, &mut server).expect("room");
        for number in 0..8 {
            step(&mut server, number + 100 * round);
            journal.commit(&mut server).expect("room");
        }
        texts.push(text(&server));
    }
    assert_eq!((texts[2] == texts[1], texts[4] == texts[3]), (true, true));
    let files: Vec<_> = std::fs::read_dir(scratch.path()).expect("the directory").flatten().collect();
    assert_eq!(files.len(), 3, "the lock, a tree and a log: {files:?}");
}

#[test]
fn a_tree_that_is_damaged_is_named_and_left_alone() {
    let scratch = tempfile::tempdir().expect("a directory");
    let begin = |dir| Journal::begin(dir, Sync::Never, &mut fresh());
    drop(Dir::open(scratch.path()).and_then(begin).expect("a tree"));
    let path = scratch.path().join("tree.1");
    let mut bytes = std::fs::read(&path).expect("the tree");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).expect("room");
    let error =
        Dir::open(scratch.path()).and_then(|mut dir| read(&mut dir)).expect_err("it is damaged").to_string();
    assert!(error.contains("tree.1") && error.contains("checksum"), "{error}");
    assert_eq!(std::fs::read(&path).expect("still there"), bytes);
}

#[test]
fn checksums_are_those_that_everybody_has() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}
