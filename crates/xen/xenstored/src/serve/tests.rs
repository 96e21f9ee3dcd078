//! Rings over the double of the hypervisor: honest guests, hostile guests, and what others notice of them.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tapio_load::Random;
use tapio_xen::double::{DoubleVm, Guest, Wire};
use tapio_xen::{Channel, Domain, GrantRef, Rights};
use tapio_xenstore::wire::{Decoder, Header, MessageKind, Request};
use tapio_xenstore::{Client, Nodes};

use super::ring::{GuestRing, Page};
use super::rings::{RingPlatform, Source};
use super::*;
use crate::domains::FEATURES;
use crate::store::Store;

const LIMIT: Duration = Duration::from_secs(60);

/// Domains of the double with the daemon's ends of their channels.
#[derive(Debug)]
struct Doubles(BTreeMap<u32, (DoubleVm, GrantRef, Vec<Wire>)>);

impl Source for Doubles {
    fn page(&mut self, domid: u32, _gfn: u64) -> io::Result<Page> {
        let (vm, grant, _) = self.0.get(&domid).ok_or_else(|| io::Error::other("no such domain"))?;
        let domain = Domain::Double(Guest::of(vm, domid)?);
        domain.map(&[*grant], Rights::Write).map(Page::Granted)
    }

    fn channel(&mut self, domid: u32, _port: u32) -> io::Result<Channel> {
        let wire = self.0.get_mut(&domid).and_then(|(_, _, wires)| wires.pop());
        wire.map(Channel::Double).ok_or_else(|| io::Error::other("no such channel"))
    }
}

/// A daemon with domains 1 and 2, both introduced, the control domain's own ring (the third), a domain 3 that is not
/// introduced, and a client on its socket.
struct World {
    scratch: tempfile::TempDir,
    /// What a hypervisor keeps when the daemon is gone.
    doubles: Vec<(u32, DoubleVm, GrantRef, Wire)>,
    waker: OwnedFd,
    thread: Option<std::thread::JoinHandle<()>>,
    root: Client,
    guests: Vec<TestGuest>,
}

struct TestGuest {
    ring: GuestRing,
    decoder: Decoder,
}

impl World {
    fn new() -> Self {
        let scratch = tempfile::tempdir().expect("a directory");
        let mut doubles = Vec::new();
        let mut guests = Vec::new();
        for domid in [1, 2, 0, 3] {
            let vm = DoubleVm::new(4).expect("memory");
            let page = vm.take_pages(1).expect("a page");
            let grant = vm.grant(page, Rights::Write, 0).expect("a grant");
            let (ours, theirs) = Wire::pair().expect("a channel");
            let domain = Domain::Double(Guest::of(&vm, domid).expect("memory"));
            let mapped = Page::Granted(domain.map(&[grant], Rights::Write).expect("a page"));
            let ring = GuestRing::new(mapped, Channel::Double(theirs)).expect("a ring");
            guests.push(TestGuest { ring, decoder: Decoder::new() });
            doubles.push((domid, vm, grant, ours));
        }
        let (waker, thread, mut root) = Self::start(scratch.path(), &doubles);
        for domid in [1, 2] {
            root.introduce(domid, 7, 8).expect("a domain");
            let home = tapio_xenstore::Path::parse(&format!("/local/domain/{domid}")).expect("a path");
            root.write(home.as_str(), b"").expect("a write");
            let owner = tapio_xenstore::wire::Permission::new(tapio_xenstore::wire::Access::None, domid);
            root.set_permissions(home.as_str(), &[owner]).expect("the owner");
        }
        Self { scratch, doubles, waker, thread: Some(thread), root, guests }
    }

    /// The daemon begins with what is in the directory.
    fn start(
        scratch: &Path,
        doubles: &[(u32, DoubleVm, GrantRef, Wire)],
    ) -> (OwnedFd, std::thread::JoinHandle<()>, Client) {
        let (path, state) = (scratch.join("socket"), scratch.join("state"));
        let mut ends = BTreeMap::new();
        for (domid, vm, grant, wire) in doubles {
            ends.insert(*domid, (vm.clone(), *grant, vec![wire.try_clone().expect("a descriptor")]));
        }
        let waker = poll::waker().expect("a descriptor");
        let stop = waker.try_clone().expect("a descriptor");
        let (ready, is_ready) = mpsc::channel();
        let place = path.clone();
        let thread = std::thread::spawn(move || {
            let mut dir = Dir::open(&state).expect("a directory");
            let kept = crate::journal::read(&mut dir).expect("what was kept");
            let rings = SharedRings::default();
            let platform = RingPlatform::new(rings.clone(), Box::new(Doubles(ends)));
            let server = Server::new(Store::default(), Box::new(platform));
            let mut daemon = Daemon::new(server, rings).expect("a daemon");
            daemon.listen(&place, socket::listen(&place).expect("a socket")).expect("a socket");
            daemon.stop_by(&stop).expect("a descriptor");
            daemon.serve_local(1).expect("a ring");
            daemon.take_up(kept);
            let journal = Journal::begin(dir, crate::journal::Sync::Never, &mut daemon.server);
            daemon.set_journal(journal.expect("room"));
            ready.send(()).expect("the test waits");
            daemon.run().expect("no error of the system");
        });
        is_ready.recv_timeout(LIMIT).expect("the daemon begins");
        let root = Client::connect(&path).expect("a connection");
        (waker, thread, root)
    }

    /// The daemon ends, and another begins.
    fn restart(&mut self) {
        self.stop();
        let (waker, thread, root) = Self::start(self.scratch.path(), &self.doubles);
        (self.waker, self.thread, self.root) = (waker, Some(thread), root);
    }

    fn stop(&mut self) {
        poll::wake(&self.waker);
        let ended = self.thread.take().is_none_or(|thread| thread.join().is_ok());
        assert!(ended || std::thread::panicking(), "the daemon panicked");
    }

    /// The daemon answers others.
    fn serves(&mut self) {
        assert!(self.root.is_introduced(1).expect("an answer"));
        let path = "/local/domain/2/proof";
        assert_eq!(self.guests[1].ask(&Request::Write { path, value: b"1" }), b"OK\0");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop();
    }
}

impl TestGuest {
    fn put(&mut self, bytes: &[u8]) {
        let until = Instant::now() + LIMIT;
        let mut rest = bytes;
        while !rest.is_empty() {
            assert!(Instant::now() < until, "the daemon does not read its ring");
            let count = self.ring.write(rest);
            rest = &rest[count..];
            if count == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    fn next(&mut self) -> (u32, Vec<u8>) {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(message) = self.decoder.next().expect("messages") {
                return (message.header.kind, message.payload.to_vec());
            }
            assert!(Instant::now() < until, "no answer in the ring; error {}", self.ring.peek(2072));
            let bytes = self.ring.read();
            if bytes.is_empty() {
                std::thread::sleep(Duration::from_micros(100));
            }
            self.decoder.push(&bytes);
        }
    }

    fn ask(&mut self, request: &Request<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        request.frame(1, 0, &mut bytes).expect("a request");
        self.put(&bytes);
        loop {
            let (kind, payload) = self.next();
            if kind != MessageKind::WatchEvent as u32 {
                return payload;
            }
        }
    }

    fn failed_with(&self, error: u32) {
        let until = Instant::now() + LIMIT;
        while self.ring.peek(2072) != error {
            assert!(Instant::now() < until, "error {} and not {error}", self.ring.peek(2072));
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn begin_anew(&mut self) {
        self.decoder = Decoder::new();
        self.ring.poke(2068, 1);
        let _ = self.ring.channel().notify();
        let until = Instant::now() + LIMIT;
        while self.ring.peek(2068) != 0 {
            assert!(Instant::now() < until, "the ring does not begin anew");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

#[test]
fn messages_longer_than_the_ring_go_round_it() {
    let mut world = World::new();
    let guest = &mut world.guests[0];
    assert_eq!(guest.ring.peek(2064), FEATURES);
    for round in 0..50usize {
        let value = vec![round as u8; 37 * round % 2000];
        assert_eq!(guest.ask(&Request::Write { path: "data", value: &value }), b"OK\0", "{round}");
        assert_eq!(guest.ask(&Request::Read { path: "data" }), value, "{round}");
    }
    let request = Request::Watch { path: "data", token: b"t", depth: None };
    assert_eq!(guest.ask(&request), b"OK\0");
    assert_eq!(guest.next(), (MessageKind::WatchEvent as u32, b"data\0t\0".to_vec()));
    world.root.write("/local/domain/1/data/x", b"1").expect("a write");
    assert_eq!(world.guests[0].next(), (MessageKind::WatchEvent as u32, b"data/x\0t\0".to_vec()));
}

#[test]
fn requests_come_in_pieces_of_any_size() {
    let mut world = World::new();
    let mut bytes = Vec::new();
    for number in 0..20u32 {
        let path = format!("n{number}");
        Request::Write { path: &path, value: b"12345" }.frame(number, 0, &mut bytes).expect("a request");
    }
    let guest = &mut world.guests[0];
    for (index, piece) in bytes.chunks(3).enumerate() {
        guest.put(piece);
        if index % 7 == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    for _ in 0..20 {
        assert_eq!(guest.next(), (MessageKind::Write as u32, b"OK\0".to_vec()));
    }
}

#[test]
fn indices_that_jump_stop_this_guest_alone() {
    let mut world = World::new();
    for (offset, value) in [(2052, 5000u32), (2056, 77), (2060, 0x8000_0000), (2048, 0x7fff_0000)] {
        world.guests[0].ring.poke(offset, value);
        let _ = world.guests[0].ring.channel().notify();
        // An answer has to be written before a wrong consumer is seen.
        world.guests[0].ring.write(&[0; 16]);
        world.guests[0].failed_with(2);
        world.serves();
        world.guests[0].begin_anew();
        assert_eq!(world.guests[0].ask(&Request::Write { path: "again", value: b"1" }), b"OK\0");
    }
}

#[test]
fn a_message_that_is_too_long_is_a_violation_and_a_new_beginning_heals_it() {
    let mut world = World::new();
    let header = Header { kind: MessageKind::Read as u32, request: 1, transaction: 0, len: 4097 };
    let guest = &mut world.guests[0];
    assert_eq!(guest.ask(&Request::Watch { path: "w", token: b"t", depth: None }), b"OK\0");
    guest.put(&header.encode());
    guest.failed_with(3);
    world.serves();
    let guest = &mut world.guests[0];
    guest.begin_anew();
    // Nothing of before is left: the same watch can be set.
    assert_eq!(guest.ask(&Request::Watch { path: "w", token: b"t", depth: None }), b"OK\0");
    assert_eq!(guest.ring.peek(2072), 0);
}

#[test]
fn a_guest_that_reads_nothing_fills_nothing_but_its_ring() {
    let mut world = World::new();
    let mut bytes = Vec::new();
    Request::Read { path: "x" }.frame(1, 0, &mut bytes).expect("a request");
    // The daemon stops reading when a few answers wait: then the ring is full, and that is all.
    let mut stuck = 0;
    for _ in 0..5000 {
        if world.guests[0].ring.write(&bytes) < bytes.len() {
            stuck += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
        if stuck > 50 {
            break;
        }
    }
    assert!(stuck > 50, "the daemon goes on reading");
    world.serves();
}

#[test]
fn noise_in_the_page_harms_no_other_guest() {
    let mut world = World::new();
    let mut numbers = Random::new(1);
    let mut random = move || numbers.next();
    for _ in 0..400 {
        let guest = &mut world.guests[0];
        match random() % 6 {
            0 => guest.ring.poke(2048 + (random() % 8) as usize * 4, random() as u32),
            1 => guest.ring.poke((random() % 2048) as usize, random() as u32),
            2 => guest.ring.poke(2068, 1),
            3 => drop(guest.ring.read()),
            _ => {
                let kind = (random() % 30) as u32;
                let len = (random() % 40) as u32;
                let transaction = (random() % 3) as u32;
                let mut bytes = Header { kind, request: 1, transaction, len }.encode().to_vec();
                bytes.extend((0..len).map(|_| b"/a@0T\0x9"[(random() % 8) as usize]));
                guest.ring.write(&bytes);
            }
        }
        let _ = guest.ring.channel().notify();
    }
    world.serves();
    world.guests[0].begin_anew();
    assert_eq!(world.guests[0].ask(&Request::GetDomainPath { domid: 1 }), b"/local/domain/1\0");
    assert_eq!(world.root.control(&["check"]).expect("an answer"), "OK");
}

#[test]
fn a_domain_that_goes_leaves_its_ring_alone() {
    let mut world = World::new();
    assert_eq!(world.guests[0].ask(&Request::Write { path: "x", value: b"1" }), b"OK\0");
    world.root.release(1).expect("an answer");
    assert!(!world.root.is_introduced(1).expect("an answer"));
    let mut bytes = Vec::new();
    Request::Read { path: "x" }.frame(1, 0, &mut bytes).expect("a request");
    world.guests[0].ring.write(&bytes);
    assert!(world.root.read("/local/domain/1").expect("an answer").is_none());
    assert!(world.guests[0].ring.read().is_empty());
}

#[test]
fn a_daemon_that_comes_back_serves_its_domains_on() {
    let mut world = World::new();
    let watch = |path: &'static str, token: &'static [u8]| Request::Watch { path, token, depth: None };
    let event = |guest: &mut TestGuest| loop {
        let (kind, payload) = guest.next();
        if kind == MessageKind::WatchEvent as u32 {
            return String::from_utf8(payload).expect("a path and a token");
        }
    };
    assert_eq!(world.guests[0].ask(&watch("data", b"kept")), b"OK\0");
    assert_eq!(event(&mut world.guests[0]), "data\0kept\0");
    assert_eq!(world.guests[0].ask(&watch("device", b"dropped")), b"OK\0");
    assert_eq!(event(&mut world.guests[0]), "device\0dropped\0");
    assert_eq!(world.guests[0].ask(&Request::Unwatch { path: "device", token: b"dropped" }), b"OK\0");
    assert_eq!(world.guests[2].ask(&watch("/local/domain/1/device", b"control")), b"OK\0");
    assert_eq!(event(&mut world.guests[2]), "/local/domain/1/device\0control\0");
    world.root.release(2).expect("an answer");
    for _ in 0..2 {
        world.restart();
        assert_eq!(event(&mut world.guests[0]), "data\0kept\0", "told once, whatever it missed");
        assert_eq!(event(&mut world.guests[2]), "/local/domain/1/device\0control\0");
        assert!(world.root.is_introduced(1).expect("an answer"));
        assert!(!world.root.is_introduced(2).expect("an answer"));
        world.root.write("/local/domain/1/data/x", b"1").expect("a write");
        assert_eq!(event(&mut world.guests[0]), "data/x\0kept\0");
        assert_eq!(world.guests[0].ask(&Request::Read { path: "data/x" }), b"1");
        let path = "device/vbd";
        assert_eq!(world.guests[0].ask(&Request::Write { path, value: b"" }), b"OK\0");
        assert_eq!(event(&mut world.guests[2]), "/local/domain/1/device/vbd\0control\0");
        assert_eq!(world.guests[0].ask(&Request::Rm { path: "device" }), b"OK\0");
        assert_eq!(event(&mut world.guests[2]), "/local/domain/1/device\0control\0");
    }
}

#[test]
fn the_control_domain_does_by_its_ring_what_it_does_by_sockets() {
    let mut world = World::new();
    // More at once than answers have room for, and among them requests that are about rings.
    let mut bytes = Vec::new();
    for round in 0..40u32 {
        Request::Write { path: "/tool/long", value: &[b'x'; 200] }
            .frame(round, 0, &mut bytes)
            .expect("a request");
        Request::Read { path: "/tool/long" }.frame(round, 0, &mut bytes).expect("a request");
        Request::Introduce { domid: 3, gfn: 1, port: 1 }.frame(round, 0, &mut bytes).expect("a request");
        Request::Release { domid: 3 }.frame(round, 0, &mut bytes).expect("a request");
    }
    let (mut rest, mut answers) = (&bytes[..], 0);
    let until = Instant::now() + LIMIT;
    let guest = &mut world.guests[2];
    while answers < 160 {
        assert!(Instant::now() < until, "{answers} answers");
        rest = &rest[guest.ring.write(rest)..];
        // Slower than the daemon, so that it has to wait.
        if answers < 100 {
            std::thread::sleep(Duration::from_micros(300));
        }
        let got = guest.ring.read();
        guest.decoder.push(&got);
        while guest.decoder.next().expect("messages").is_some() {
            answers += 1;
        }
    }
    world.serves();
    assert!(!world.root.is_introduced(3).expect("an answer"));
}
