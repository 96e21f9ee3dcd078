//! The table of requests: everything that is known of one from its start to its answer. A fixed number, so that nothing
//! is allocated for one; the server's name for a request (its cookie) is its place here and how often that was used.

use tapio_ring::{Segments, TaskId};

/// Requests in flight at once, over all connections; more wait for a place.
pub const SLOTS: usize = 128;

/// Where a request is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// The place is free.
    Free,
    /// Waiting to be sent.
    Queued,
    /// Sent, or being sent, on the connection of this number.
    Flying(u64),
    /// Answered; its task has not looked yet.
    Done,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Well.
    Done,
    /// The server answered with this errno.
    Refused(i32),
    /// The server was gone for too long.
    Unreachable,
    /// The server was silent for too long.
    Silent,
}

/// What to ask of the server.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// [`crate::wire::command`].
    pub command: u16,
    /// [`crate::wire::command_flag`]s.
    pub flags: u16,
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What to send, or where to put what comes.
    pub data: Segments,
}

/// A request.
#[derive(Debug)]
pub struct Slot {
    generation: u32,
    /// See there.
    pub state: SlotState,
    /// The waiter.
    pub task: TaskId,
    /// What was asked.
    pub ask: Ask,
    /// Bytes of a read that have come.
    pub got: u64,
    /// When it was sent, on the clock of the thread.
    pub sent_ns: u64,
    /// Its data is on its way out: the memory must stay, whatever the server says meanwhile.
    pub sending: bool,
    /// The server answered before all of it was sent.
    pub answered: bool,
    /// Connections that were lost under it.
    pub losses: u8,
    /// Times the server was silent for too long.
    pub silences: u8,
    /// How it ended, or what has been said so far.
    pub outcome: Outcome,
}

/// All requests.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Slots {
    /// A table with every place free.
    pub fn new() -> Self {
        let slot = || Slot {
            generation: 0,
            state: SlotState::Free,
            task: TaskId::NONE,
            ask: Ask { command: 0, flags: 0, offset: 0, len: 0, data: Segments::EMPTY },
            got: 0,
            sent_ns: 0,
            sending: false,
            answered: false,
            losses: 0,
            silences: 0,
            outcome: Outcome::Done,
        };
        Self { slots: (0..SLOTS).map(|_| slot()).collect(), free: (0..SLOTS as u32).rev().collect() }
    }

    /// Takes a place for a request of `task`.
    pub fn take(&mut self, ask: Ask, task: TaskId) -> Option<u32> {
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        let generation = slot.generation.wrapping_add(1);
        *slot = Slot {
            generation,
            state: SlotState::Queued,
            task,
            ask,
            got: 0,
            sent_ns: 0,
            sending: false,
            answered: false,
            losses: 0,
            silences: 0,
            outcome: Outcome::Done,
        };
        Some(index)
    }

    /// Gives a place back.
    pub fn free(&mut self, index: u32) {
        self.slots[index as usize].state = SlotState::Free;
        self.free.push(index);
    }

    /// The request at a place.
    pub fn at(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// The server's name for a request.
    pub fn cookie(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// The request that a cookie names, if it is in flight on that connection and has no answer yet.
    pub fn find(&mut self, cookie: u64, connection: u64) -> Option<u32> {
        let index = (cookie & u64::from(u32::MAX)) as u32;
        let slot = self.slots.get(index as usize)?;
        let known = u64::from(slot.generation) == cookie >> 32
            && slot.state == SlotState::Flying(connection)
            && !slot.answered;
        known.then_some(index)
    }

    /// Every place with its number.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Slot)> {
        self.slots.iter_mut().enumerate().map(|(index, slot)| (index as u32, slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_names_one_use_of_one_place_on_one_connection() {
        let mut slots = Slots::new();
        let ask = Ask { command: 0, flags: 0, offset: 0, len: 0, data: Segments::EMPTY };
        let index = slots.take(ask, TaskId::NONE).unwrap();
        let cookie = slots.cookie(index);
        assert_eq!(slots.find(cookie, 1), None, "not sent yet");
        slots.at(index).state = SlotState::Flying(1);
        assert_eq!((slots.find(cookie, 1), slots.find(cookie, 2)), (Some(index), None));
        slots.at(index).answered = true;
        assert_eq!(slots.find(cookie, 1), None, "answered twice");
        slots.free(index);
        let again = slots.take(ask, TaskId::NONE).unwrap();
        slots.at(again).state = SlotState::Flying(1);
        assert_eq!((again, slots.find(cookie, 1)), (index, None), "an old name");
        assert_eq!(slots.find(u64::MAX, 1), None);
    }
}
