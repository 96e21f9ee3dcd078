//! A connection: what came, what is to be sent, and what it has open.

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasher;

use tapio_xenstore::wire::{Decoder, HEADER_LEN, MessageKind, PAYLOAD_MAX, frame};

use crate::store::Transaction;
use crate::tree::Caller;

/// Bytes that wait to be sent, beyond which no request of the connection is answered.
pub const REPLIES_MAX: usize = 64 << 10;
/// Bytes that wait for the control domain or a socket, beyond which it is cut off.
const CONTROL_EVENTS_MAX: usize = 64 << 20;

/// What is to be sent.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    at: usize,
    /// Bytes that were sent since the beginning.
    sent: u64,
    /// Where each message ends, counted from the beginning; of an event its hash.
    ends: VecDeque<(u64, Option<u64>)>,
    /// Events that have not been sent: the same event twice would tell a client nothing more.
    waiting: HashSet<u64>,
}

impl Outbox {
    /// What was not sent.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    /// Messages that were not sent to their end.
    pub fn messages(&self) -> usize {
        self.ends.len()
    }

    /// Whether its next byte is in the middle of a message.
    pub fn torn(&self) -> bool {
        self.at != 0 && !self.unsent().is_empty()
    }

    /// The next `count` bytes were sent.
    pub fn sent(&mut self, count: usize) {
        self.at += count;
        self.sent += count as u64;
        if self.at == self.bytes.len() {
            self.at = 0;
            self.bytes.clear();
            if self.bytes.capacity() > 4 * REPLIES_MAX {
                self.bytes = Vec::new();
            }
        } else if self.at > REPLIES_MAX {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        while let Some((end, event)) = self.ends.front().copied() {
            if end > self.sent {
                return;
            }
            self.ends.pop_front();
            if let Some(event) = event {
                self.waiting.remove(&event);
            }
        }
    }

    fn ends_here(&mut self, event: Option<u64>) {
        self.ends.push_back((self.sent + self.unsent().len() as u64, event));
    }

    /// Adds an answer. One that is longer than a message may be is not added: false.
    pub fn reply(&mut self, kind: MessageKind, request: u32, transaction: u32, payload: &[u8]) -> bool {
        if frame(kind, request, transaction, payload, &mut self.bytes).is_err() {
            return false;
        }
        self.ends_here(None);
        true
    }

    /// Adds an event, unless the same waits already or it is longer than a message may be.
    pub fn event(&mut self, path: &str, token: &[u8], hasher: &impl BuildHasher) {
        let len = path.len() + token.len() + 2;
        if len > PAYLOAD_MAX {
            return;
        }
        let hash = hasher.hash_one((path, token));
        if !self.waiting.insert(hash) {
            return;
        }
        let from = self.bytes.len();
        // The header alone first: path and token follow it without a copy in between.
        let header = tapio_xenstore::wire::Header {
            kind: MessageKind::WatchEvent as u32,
            request: 0,
            transaction: 0,
            len: len as u32,
        };
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.bytes.extend_from_slice(token);
        self.bytes.push(0);
        debug_assert_eq!(self.bytes.len() - from, HEADER_LEN + len);
        self.ends_here(Some(hash));
    }

    /// What another process has not sent, to go on with.
    pub fn restore(&mut self, unsent: &[u8]) {
        self.bytes.extend_from_slice(unsent);
        self.ends_here(None);
    }
}

/// A connection.
#[derive(Debug)]
pub struct Conn {
    /// Whose requests these are.
    pub caller: Caller,
    /// What came and is not a whole request yet.
    pub decoder: Decoder,
    /// What is to be sent.
    pub out: Outbox,
    /// Open transactions, by number.
    pub transactions: Vec<(u32, Transaction)>,
    /// Number of the last transaction.
    pub last_transaction: u32,
    /// How many watches.
    pub watches: u64,
    /// It broke the protocol or does not read: to be closed.
    pub broken: bool,
    /// It was put into the list of those with something to send.
    pub dirty: bool,
}

impl Conn {
    /// One of this caller, with nothing open.
    pub fn new(caller: Caller) -> Self {
        Self {
            caller,
            decoder: Decoder::new(),
            out: Outbox::default(),
            transactions: Vec::new(),
            last_transaction: 0,
            watches: 0,
            broken: false,
            dirty: false,
        }
    }

    /// A number for another transaction: not 0, and of none that is open.
    pub fn fresh_transaction(&mut self) -> u32 {
        loop {
            self.last_transaction = self.last_transaction.wrapping_add(1);
            let id = self.last_transaction;
            if id != 0 && self.transactions.iter().all(|(known, _)| *known != id) {
                return id;
            }
        }
    }

    /// Bytes kept for it, apart from its nodes.
    pub fn memory(&self) -> usize {
        self.out.unsent().len()
            + self.decoder.pending().len()
            + self.transactions.iter().map(|(_, transaction)| transaction.bytes).sum::<usize>()
    }

    /// Whether so much waits to be sent that it is cut off. `memory` is the quota of its domain.
    pub fn drowned(&self, memory: u64) -> bool {
        let max = if self.caller.privileged { CONTROL_EVENTS_MAX as u64 } else { memory };
        max != 0 && self.out.unsent().len() as u64 > max
    }
}

#[cfg(test)]
mod tests {
    use std::collections::hash_map::RandomState;

    use super::*;

    #[test]
    fn the_same_event_waits_once_and_comes_again_when_it_was_sent() {
        let hasher = RandomState::new();
        let mut out = Outbox::default();
        for _ in 0..3 {
            out.event("/a", b"t", &hasher);
        }
        out.event("/b", b"t", &hasher);
        let one = HEADER_LEN + 5;
        assert_eq!((out.unsent().len(), out.messages()), (2 * one, 2));
        out.sent(one - 1);
        out.event("/a", b"t", &hasher);
        assert_eq!(out.messages(), 2);
        out.sent(1);
        out.event("/a", b"t", &hasher);
        assert_eq!((out.unsent().len(), out.messages()), (2 * one, 2));
        out.event(&"/x".repeat(3000), b"t", &hasher);
        assert_eq!(out.messages(), 2);
    }

    #[test]
    fn numbers_of_transactions_go_round() {
        let mut conn = Conn::new(Caller::CONTROL);
        conn.last_transaction = u32::MAX - 1;
        let id = conn.fresh_transaction();
        conn.transactions.push((1, Transaction::new(&crate::tree::Tree::default())));
        assert_eq!((id, conn.fresh_transaction()), (u32::MAX, 2));
    }
}
