//! Clients and guests of a small xenstored: any bytes in any order.

use tapio_xenstore::wire::{Decoder, HEADER_LEN, Header, MessageKind, Permission, Request};
use tapio_xenstored::domains::{Life, NoHypervisor};
use tapio_xenstored::state::codec::{Reader, Writer};
use tapio_xenstored::{Caller, Server, journal, state};

use super::take;

/// Nodes that each guest may own.
const NODES: u64 = 20;
/// Bytes kept for a guest, apart from its nodes.
const MEMORY: u64 = 16 << 10;
/// Words that requests are made of: what is short enough to meet itself again.
const WORDS: [&str; 16] = [
    "/",
    "/a",
    "/a/b",
    "/a/b/c",
    "a",
    "a/b",
    "/local/domain/1/a",
    "/local/domain/2",
    "@releaseDomain",
    "@introduceDomain",
    "@releaseDomain/1",
    "T",
    "F",
    "1",
    "n1",
    "b2",
];

struct World {
    server: Server,
    root: usize,
    guests: [Option<usize>; 2],
}

fn send(server: &mut Server, id: usize, request: &Request<'_>) {
    let mut bytes = Vec::new();
    if request.frame(1, 0, &mut bytes).is_ok() {
        server.receive(id, &bytes);
    }
}

/// Takes what a connection is sent: whole messages of known kinds, however it was asked.
fn drain(server: &mut Server, id: usize, decoder: &mut Decoder) {
    let unsent = server.unsent(id).to_vec();
    decoder.push(&unsent);
    server.sent(id, unsent.len());
    while let Some(message) = decoder.next().expect("no answer is too long") {
        let kind = message.kind().expect("an answer has a known kind");
        let text = message.payload;
        if matches!(kind, MessageKind::WatchEvent | MessageKind::Error) {
            assert_eq!(text.last(), Some(&0), "{kind:?} without an end");
        }
        if kind == MessageKind::WatchEvent {
            assert_eq!(text.iter().filter(|byte| **byte == 0).count(), 2, "an event has a path and a token");
        }
    }
    assert!(decoder.pending().is_empty(), "half an answer");
    server.go_on(id);
}

impl World {
    fn new() -> Self {
        let mut server = Server::default();
        for (quota, value) in [("nodes", NODES), ("memory", MEMORY), ("watches", 4), ("transactions", 3)] {
            assert!(server.domains.general_mut().limits.set(quota, value), "{quota}");
        }
        let root = server.connect(Caller::CONTROL);
        let mut world = Self { server, root, guests: [None; 2] };
        world.introduce();
        world
    }

    /// Brings guests that are not there.
    fn introduce(&mut self) {
        for domid in [1, 2] {
            let home = format!("/local/domain/{domid}");
            send(&mut self.server, self.root, &Request::Introduce { domid, gfn: 1, port: 1 });
            send(&mut self.server, self.root, &Request::Write { path: &home, value: b"" });
            let owner = Permission::new(tapio_xenstore::wire::Access::None, domid);
            let request = Request::SetPerms { path: &home, permissions: vec![owner] };
            send(&mut self.server, self.root, &request);
        }
        for (domid, place) in (1..).zip(&mut self.guests) {
            *place = self.server.domain(domid).and_then(|domain| domain.conn);
        }
    }

    /// The connection of a selector: the root is a guest's dream and the fuzzer's too.
    fn conn(&self, selector: u8) -> usize {
        let guest = self.guests[usize::from(selector & 1)];
        if selector % 4 == 3 { self.root } else { guest.unwrap_or(self.root) }
    }

    fn check(&self) {
        for domid in [1, 2] {
            let usage = self.server.store.usage(domid);
            assert!(usage.nodes >= 0 && usage.nodes as u64 <= NODES, "domain {domid} has {usage:?}");
        }
        for conn in self.server.conns.iter().flatten().filter(|conn| !conn.caller.privileged) {
            // A last answer and the request that brought it may be beyond the bound.
            assert!((conn.memory() as u64) < MEMORY + (64 << 10) + 3 * 4112, "{} bytes", conn.memory());
        }
    }
}

/// The inputs: an action, a selector, what belongs to it; again and again.
pub(super) fn xenstored_session(mut bytes: &[u8]) {
    let mut world = World::new();
    let mut decoders: Vec<Decoder> = Vec::new();
    let mut actions = 0;
    while !bytes.is_empty() && actions < 2000 {
        actions += 1;
        let [action, selector] = take::<2>(&mut bytes);
        let id = world.conn(selector);
        if decoders.len() < world.server.conns.len() {
            decoders.resize_with(world.server.conns.len(), Decoder::new);
        }
        match action % 16 {
            // Bytes as they are.
            0 => {
                let [len] = take::<1>(&mut bytes);
                let (raw, rest) = bytes.split_at(bytes.len().min(len.into()));
                world.server.receive(id, raw);
                bytes = rest;
            }
            1 => drain(&mut world.server, id, &mut decoders[id]),
            2 => world.server.reset(id),
            3 => {
                let life = [Life::Running, Life::Shutdown, Life::Gone][usize::from(selector) % 3];
                world.server.domains_changed(|_| life);
                decoders.clear();
                world.introduce();
            }
            4 => {
                // To another program and back; a mark of what was sent to the middle is part of a message.
                let mut out = Writer::default();
                state::save(&world.server, &mut out);
                world.server =
                    state::load(&mut Reader(&out.0), Box::new(NoHypervisor)).expect("what was saved");
            }
            // A request of words that others use too.
            _ => {
                let [kind, transaction, first, second] = take::<4>(&mut bytes);
                let word = |number: u8| WORDS[usize::from(number) % WORDS.len()];
                let kind = u32::from(kind) % 28;
                let payload = match second >> 6 {
                    0 => format!("{}\0", word(first)),
                    1 => format!("{}\0{}", word(first), word(second)),
                    2 => format!("{}\0{}\0", word(first), word(second)),
                    _ => format!("{}\0{}\0{}\0", word(first), word(second), word(first >> 4)),
                };
                let len = payload.len() as u32;
                let header =
                    Header { kind, request: 9, transaction: u32::from(transaction) % 5, len }.encode();
                world.server.receive(id, &[&header[..], payload.as_bytes()].concat());
                debug_assert_eq!(header.len(), HEADER_LEN);
                // The target carries no requests out that the server leaves open.
                world.server.actions.clear();
            }
        }
        world.check();
    }
    let counted = tapio_xenstored::store::usage_of(&world.server.store.live);
    assert_eq!(counted, world.server.store.usage, "what is counted along the way is what is there");
}

/// A state that another program hands over, a tree and a log on disk: read or refused.
pub(super) fn xenstored_state(bytes: &[u8]) {
    if let Ok(server) = state::load(&mut Reader(bytes), Box::new(NoHypervisor)) {
        let mut out = Writer::default();
        state::save(&server, &mut out);
        state::load(&mut Reader(&out.0), Box::new(NoHypervisor)).expect("what was saved can be loaded");
    }
    if let Ok(kept) = journal::decode_tree(bytes) {
        Server::default().take_up(kept, |_| Life::Running);
    }
    let mut kept = tapio_xenstored::Kept::default();
    let count = journal::replay(&mut kept, bytes);
    Server::default().take_up(kept, |_| Life::Running);
    assert!(count * 9 <= bytes.len(), "{count} records");
}
