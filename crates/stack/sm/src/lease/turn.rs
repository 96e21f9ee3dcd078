//! The SR's lock among hosts: Lamport's bakery. Each host writes a sector of its own and reads those of the others, so
//! that nothing is asked of the storage but that what was written is read.

use super::layout::{HOSTS, Turn};

/// What a host does next on its way to the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Write its turn.
    Write(Turn),
    /// Read all turns.
    Look,
    /// It has the lock.
    Enter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Stage {
    Announce,
    Count,
    Take(u64),
    Wait(u64),
    In(u64),
}

/// A host on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Locking {
    me: usize,
    stage: Stage,
}

impl Locking {
    pub(crate) const fn new(me: usize) -> Self {
        Self { me, stage: Stage::Announce }
    }

    /// What it does next.
    pub(crate) fn next(&self) -> Next {
        match self.stage {
            Stage::Announce => Next::Write(Turn { is_choosing: true, ..Turn::default() }),
            Stage::Take(ticket) => Next::Write(Turn { ticket, ..Turn::default() }),
            Stage::Count | Stage::Wait(_) => Next::Look,
            Stage::In(_) => Next::Enter,
        }
    }

    /// Its ticket, if it has one.
    pub(crate) const fn ticket(&self) -> u64 {
        match self.stage {
            Stage::Announce | Stage::Count => 0,
            Stage::Take(ticket) | Stage::Wait(ticket) | Stage::In(ticket) => ticket,
        }
    }

    /// What [`Self::next`] asked to write is on the storage.
    pub(crate) fn wrote(&mut self) {
        self.stage = match self.stage {
            Stage::Announce => Stage::Count,
            Stage::Take(ticket) => Stage::Wait(ticket),
            other => other,
        };
    }

    /// Takes in a look; answers the host that is before it. `is_out` tells hosts that do not count: away, or dead.
    pub(crate) fn saw(&mut self, turns: &[Turn], is_out: impl Fn(usize) -> bool) -> Option<usize> {
        let others = || turns.iter().enumerate().take(HOSTS).filter(|(slot, _)| *slot != self.me);
        match self.stage {
            Stage::Count => {
                // Of those that do not count, too: they may come back.
                let last = others().map(|(_, turn)| turn.ticket).max().unwrap_or(0);
                self.stage = Stage::Take(last.saturating_add(1));
                None
            }
            Stage::Wait(ticket) => {
                let is_before = |slot: usize, turn: &Turn| {
                    turn.is_choosing || turn.ticket != 0 && (turn.ticket, slot) < (ticket, self.me)
                };
                let first = others().find(|(slot, turn)| is_before(*slot, turn) && !is_out(*slot));
                if first.is_none() {
                    self.stage = Stage::In(ticket);
                }
                first.map(|(slot, _)| slot)
            }
            _ => None,
        }
    }
}

/// The turn in a sector. One that is torn may be about to say anything: its host is choosing.
pub(crate) fn turn_in(sector: &[u8]) -> Turn {
    if sector.iter().all(|byte| *byte == 0) {
        return Turn::default();
    }
    Turn::decode(sector).unwrap_or(Turn { is_choosing: true, ..Turn::default() })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A host that takes the lock some times; a look reads one turn after the other.
    #[derive(Clone, PartialEq, Eq, Hash)]
    struct Host {
        locking: Locking,
        looked: Vec<(bool, u64)>,
        left: u8,
    }

    #[derive(Clone, PartialEq, Eq, Hash)]
    struct World {
        hosts: Vec<Host>,
        /// What lies on the storage: whether a host chooses, and its ticket.
        turns: Vec<(bool, u64)>,
    }

    impl World {
        fn is_in(&self, at: usize) -> bool {
            self.hosts[at].left > 0 && self.hosts[at].locking.next() == Next::Enter
        }

        /// One read or write of one host.
        fn step(&mut self, at: usize) {
            let count = self.turns.len();
            let host = &mut self.hosts[at];
            match host.locking.next() {
                Next::Write(turn) => {
                    self.turns[at] = (turn.is_choosing, turn.ticket);
                    host.locking.wrote();
                }
                Next::Look => {
                    host.looked.push(self.turns[host.looked.len()]);
                    if host.looked.len() == count {
                        let turn = |(is_choosing, ticket)| Turn { is_choosing, ticket, ..Turn::default() };
                        let turns: Vec<Turn> =
                            std::mem::take(&mut host.looked).into_iter().map(turn).collect();
                        host.locking.saw(&turns, |_| false);
                    }
                }
                Next::Enter => {
                    self.turns[at] = (false, 0);
                    host.left -= 1;
                    host.locking = Locking::new(at);
                }
            }
        }
    }

    /// Every order of reads and writes.
    fn try_all(hosts: usize, times: u8) -> usize {
        let host = |at| Host { locking: Locking::new(at), looked: Vec::new(), left: times };
        let first = World { hosts: (0..hosts).map(host).collect(), turns: vec![(false, 0); hosts] };
        let mut known = HashSet::from([first.clone()]);
        let mut open = vec![first];
        let mut is_over = false;
        while let Some(world) = open.pop() {
            let inside = (0..hosts).filter(|at| world.is_in(*at)).count();
            assert!(inside <= 1, "two hosts have the lock");
            let going: Vec<usize> = (0..hosts).filter(|at| world.hosts[*at].left > 0).collect();
            is_over |= going.is_empty();
            for at in going {
                let mut next = world.clone();
                next.step(at);
                if known.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        assert!(is_over, "some order comes to its end");
        known.len()
    }

    #[test]
    fn no_order_of_reads_and_writes_lets_two_hosts_in() {
        assert!(try_all(2, 3) > 300);
        assert!(try_all(3, 1) > 1000);
    }

    #[test]
    fn a_host_that_does_not_count_is_not_waited_for_and_one_that_may_be_writing_is() {
        let mut locking = Locking::new(1);
        locking.wrote();
        let mut turns = vec![Turn::default(); HOSTS];
        turns[0].ticket = 5;
        assert_eq!((locking.saw(&turns, |_| true), locking.ticket()), (None, 6));
        locking.wrote();
        assert_eq!(locking.saw(&turns, |_| false), Some(0));
        turns[0] = turn_in(&[1; 4096]);
        assert_eq!(locking.saw(&turns, |_| false), Some(0), "it is torn");
        assert_eq!(locking.saw(&turns, |slot| slot == 0), None);
        assert_eq!(locking.next(), Next::Enter);
        assert_eq!(turn_in(&[0; 4096]), Turn::default());
    }
}
