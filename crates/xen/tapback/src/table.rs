//! What is to be done about a device, from where both sides stand. A pure function, tried in every situation.
//!
//! ```text
//!   front end                back end         the ring in the disk process
//!   1 Initialising           1 ─publish─▶ 2
//!   3 Initialised            2 ─────────────▶ connect ─announce─▶ 4
//!   4 Connected              4                lost: connect again
//!   5 Closing                5                stays: requests are still in flight
//!   6 Closed                 ◀─────────────── disconnect, then 6
//!   1 again, `online`        6 ─publish─▶ 2
//!   gone                     ◀─────────────── disconnect, then 6
//! ```
//!
//! It looks at levels, never at what changed: so it does not matter in which order the toolstack and the guest did
//! their part, or whether this program was there to see it.

use tapio_xenstore::XenbusState as State;

/// The ring, as far as this program knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// No disk process has it.
    None,
    /// A disk process serves it.
    Up,
    /// The disk process that served it is gone; the guest waits for its answers.
    Lost,
}

/// Where everything stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The front end's state; `Unknown` where its directory is not there.
    pub front: State,
    /// Ours, as it is in xenstore.
    pub back: State,
    /// The toolstack wants the device: when the guest lets go of it, it may come again.
    pub online: bool,
    /// The ring.
    pub ring: Ring,
    /// The disk can be reached as far as is known: its keys are there, and no attempt has failed just now.
    pub disk: bool,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// None.
    Wait,
    /// Write what is offered, and state 2.
    Publish,
    /// Have the disk process connect the ring.
    Connect,
    /// Write what the disk is, and state 4.
    Announce,
    /// Write state 5.
    Closing,
    /// Have the disk process let go of the ring.
    Disconnect,
    /// Write state 6.
    Close,
}

impl Situation {
    /// The next step from here.
    pub fn next(self) -> Action {
        match self.ring {
            Ring::Up => self.with_ring(),
            Ring::None | Ring::Lost => self.without_ring(),
        }
    }

    fn with_ring(self) -> Action {
        match self.front {
            // The guest has begun anew or is gone: no front end waits for this ring.
            State::Unknown | State::Initialising | State::InitWait | State::Closed => Action::Disconnect,
            State::Initialised | State::Connected => match self.back {
                State::Connected | State::Closing => Action::Wait,
                // One that begins again did not wait for our offer; one that worked is being unplugged.
                State::Closed if !self.online || self.front == State::Connected => Action::Disconnect,
                _ => Action::Announce,
            },
            State::Closing => match self.back {
                State::Closing => Action::Wait,
                _ => Action::Closing,
            },
            State::Reconfiguring | State::Reconfigured => Action::Wait,
        }
    }

    fn without_ring(self) -> Action {
        let when = |condition: bool, then: Action| if condition { then } else { Action::Wait };
        match (self.front, self.back) {
            // No front end is there, or a guest that has no driver yet.
            (State::Unknown | State::InitWait, State::Unknown | State::Initialising) => Action::Publish,
            (State::Unknown | State::InitWait, State::InitWait | State::Closed) => Action::Wait,
            (State::Unknown | State::InitWait, _) => Action::Close,

            (State::Initialising, State::InitWait) => Action::Wait,
            (State::Initialising, State::Closing) if !self.online => Action::Close,
            (State::Initialising, State::Closed) => when(self.online, Action::Publish),
            (State::Initialising, _) => Action::Publish,

            (State::Initialised, State::Closing) | (State::Connected, State::Closing | State::Closed) => {
                Action::Wait
            }
            (State::Initialised, State::Closed) => when(self.online && self.disk, Action::Connect),
            // A front end that is ahead of us has not read what we offer; it may wait for it all the same.
            (State::Initialised | State::Connected, State::Unknown | State::Initialising) if !self.disk => {
                Action::Publish
            }
            (State::Initialised | State::Connected, _) => when(self.disk, Action::Connect),

            (State::Closing, State::Closing | State::Closed) => Action::Wait,
            (State::Closing, _) => Action::Closing,

            (State::Closed, State::Closed) => Action::Wait,
            (State::Closed, _) => Action::Close,

            (State::Reconfiguring | State::Reconfigured, _) => Action::Wait,
        }
    }

    /// How it stands after a step that succeeded.
    pub fn after(self, action: Action) -> Self {
        match action {
            Action::Wait => self,
            Action::Publish => Self { back: State::InitWait, ..self },
            Action::Connect => Self { ring: Ring::Up, ..self },
            Action::Announce => Self { back: State::Connected, ..self },
            Action::Closing => Self { back: State::Closing, ..self },
            Action::Disconnect => Self { ring: Ring::None, ..self },
            // What was lost is not missed by a front end that has let go of it.
            Action::Close => Self { back: State::Closed, ring: Ring::None, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Situation> {
        let mut all = Vec::new();
        for front in State::ALL {
            for back in State::ALL {
                for online in [false, true] {
                    for ring in [Ring::None, Ring::Up, Ring::Lost] {
                        for disk in [false, true] {
                            all.push(Situation { front, back, online, ring, disk });
                        }
                    }
                }
            }
        }
        assert_eq!(all.len(), 9 * 9 * 2 * 3 * 2);
        all
    }

    /// Where it comes to rest when every step succeeds, and the steps.
    fn settle(mut situation: Situation) -> (Situation, Vec<Action>) {
        let mut steps = Vec::new();
        while situation.next() != Action::Wait {
            let step = situation.next();
            let after = situation.after(step);
            assert_ne!(after, situation, "a step that changes nothing would be taken for ever");
            situation = after;
            steps.push(step);
            assert!(steps.len() <= 4, "{steps:?}");
        }
        (situation, steps)
    }

    #[test]
    fn it_comes_to_rest_from_everywhere() {
        for situation in all() {
            settle(situation);
        }
    }

    #[test]
    fn each_step_is_taken_only_where_it_may_be() {
        for situation in all() {
            let connected = matches!(situation.front, State::Initialised | State::Connected);
            match situation.next() {
                Action::Wait => {}
                Action::Connect => {
                    assert!(connected && situation.disk && situation.ring != Ring::Up, "{situation:?}");
                    assert_ne!(situation.back, State::Closing, "{situation:?}");
                }
                Action::Announce => assert!(connected && situation.ring == Ring::Up, "{situation:?}"),
                Action::Disconnect => assert_eq!(situation.ring, Ring::Up, "{situation:?}"),
                // A guest that is told 6 may take its pages back: no process may have them any more.
                Action::Close => assert_ne!(situation.ring, Ring::Up, "{situation:?}"),
                Action::Publish => {
                    assert_ne!(situation.ring, Ring::Up, "{situation:?}");
                    assert!(!matches!(situation.front, State::Closing | State::Closed), "{situation:?}");
                }
                Action::Closing => assert_eq!(situation.front, State::Closing, "{situation:?}"),
            }
        }
    }

    #[test]
    fn a_guest_that_wants_its_disk_gets_it() {
        for situation in all().into_iter().filter(|situation| situation.disk && situation.online) {
            let waits = matches!(
                (situation.front, situation.back),
                (State::Initialised, State::Closing) | (State::Connected, State::Closing | State::Closed)
            );
            if matches!(situation.front, State::Initialised | State::Connected) && !waits {
                let (rest, _) = settle(situation);
                let closed = situation.ring == Ring::Up
                    && (situation.front, situation.back) == (State::Connected, State::Closed);
                assert!(
                    (rest.back, rest.ring) == (State::Connected, Ring::Up) || closed,
                    "{situation:?} {rest:?}"
                );
            }
        }
    }

    #[test]
    fn a_guest_that_let_go_is_let_go_of() {
        for situation in all().into_iter().filter(|situation| situation.front == State::Closed) {
            let (rest, steps) = settle(situation);
            assert_eq!(rest.back, State::Closed, "{situation:?}");
            assert_ne!(rest.ring, Ring::Up);
            let disconnects = steps.iter().filter(|step| **step == Action::Disconnect).count();
            assert_eq!(disconnects, usize::from(situation.ring == Ring::Up));
        }
        for situation in all().into_iter().filter(|situation| situation.front == State::Unknown) {
            assert_ne!(settle(situation).0.ring, Ring::Up, "{situation:?}");
        }
    }

    #[test]
    fn what_is_taken_away_does_not_come_back() {
        for situation in all().into_iter().filter(|situation| !situation.online) {
            if matches!(situation.back, State::Closed) && situation.ring != Ring::Up {
                let step = situation.next();
                assert!(matches!(step, Action::Wait | Action::Closing), "{situation:?} {step:?}");
            }
        }
    }

    /// The life of a disk, step by step, with the names of the specification.
    #[test]
    fn the_usual_life() {
        let mut device = Situation {
            front: State::Initialising,
            back: State::Initialising,
            online: true,
            ring: Ring::None,
            disk: true,
        };
        let mut then = |front: State, steps: &[Action], back: State| {
            device.front = front;
            let (rest, taken) = settle(device);
            assert_eq!((taken.as_slice(), rest.back), (steps, back), "front {front:?}");
            device = rest;
        };
        use Action::{Announce, Close, Closing, Connect, Disconnect, Publish};
        then(State::Initialising, &[Publish], State::InitWait);
        then(State::Initialised, &[Connect, Announce], State::Connected);
        then(State::Connected, &[], State::Connected);
        then(State::Closing, &[Closing], State::Closing);
        then(State::Closed, &[Disconnect, Close], State::Closed);
        then(State::Initialising, &[Publish], State::InitWait);
        then(State::Initialised, &[Connect, Announce], State::Connected);
        // The guest crashed and begins anew without a word.
        then(State::Initialising, &[Disconnect, Publish], State::InitWait);
        then(State::Initialised, &[Connect, Announce], State::Connected);
        // It is gone.
        then(State::Unknown, &[Disconnect, Close], State::Closed);
        // A disk process that died is followed by another.
        let lost = Situation {
            front: State::Connected,
            back: State::Connected,
            online: true,
            ring: Ring::Lost,
            disk: false,
        };
        assert_eq!(lost.next(), Action::Wait);
        assert_eq!(settle(Situation { disk: true, ..lost }).1, [Connect]);
    }
}
