//! Which calls run in parallel with which.
//!
//! A call holds a thread while it runs. If all shared one pool, 128 VMs that start would keep a client from
//! reading a name; so calls that may also be made asynchronously (those of the object table that work on disks and
//! VMs) have threads of their own, and so have passwords, because a client without one can ask for it to be
//! checked. Those wait in turns of their addresses ([`super::fair`]); root on the UNIX socket has no password and does
//! not wait for those of others.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::fair::{Busy, Fair, Turn};
use super::limits::{LaneLimits, ServerLimits};
use crate::backend::Peer;

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Quick,
    Slow,
    Login,
}

impl Lane {
    pub(super) fn of(peer: &Peer, method: &str) -> Self {
        let Some((class, message)) = method.split_once('.') else { return Self::Quick };
        if class == "session" && (message.contains("login") || message == "change_password") {
            let checks = !peer.superuser || message == "change_password";
            return if checks { Self::Login } else { Self::Quick };
        }
        // `Async.VM.start` is answered as soon as its task is made: its class is `Async`, which no table has.
        let Some(class) = tapio_model::class(class) else { return Self::Quick };
        let made = matches!(message, "create" | "destroy") && class.constructor.is_some();
        let long = class.message(message).is_some_and(|message| message.is_async);
        if made || long { Self::Slow } else { Self::Quick }
    }
}

#[derive(Debug)]
struct Gate {
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

impl Gate {
    fn new(limits: LaneLimits) -> Self {
        Self {
            running: Arc::new(Semaphore::new(limits.running_max)),
            waiting: Arc::new(Semaphore::new(limits.waiting_max)),
        }
    }
}

/// The threads of all kinds.
#[derive(Debug)]
pub(super) struct Lanes {
    quick: Gate,
    slow: Gate,
    login: Arc<Fair>,
}

/// A place of one call; it comes back when this is dropped.
#[derive(Debug)]
pub(super) enum Place {
    Any { _permit: OwnedSemaphorePermit },
    Login { _turn: Turn },
}

impl Lanes {
    pub(super) fn new(limits: &ServerLimits) -> Self {
        Self { quick: Gate::new(limits.quick), slow: Gate::new(limits.slow), login: Fair::new(limits.login) }
    }

    /// How many more quick calls may wait.
    #[cfg(test)]
    pub(super) fn free_to_wait(&self) -> usize {
        self.quick.waiting.available_permits()
    }

    /// Waits for a place; the holder of a place may block a thread.
    pub(super) async fn enter(&self, lane: Lane, peer: &Peer) -> Result<Place, Busy> {
        let gate = match lane {
            Lane::Quick => &self.quick,
            Lane::Slow => &self.slow,
            Lane::Login => return Ok(Place::Login { _turn: self.login.enter(&peer.address).await? }),
        };
        if let Ok(permit) = Arc::clone(&gate.running).try_acquire_owned() {
            return Ok(Place::Any { _permit: permit });
        }
        let _waiting = gate.waiting.try_acquire().map_err(|_| Busy)?;
        let permit = Arc::clone(&gate.running).acquire_owned().await.map_err(|_| Busy)?;
        Ok(Place::Any { _permit: permit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        Peer { superuser: false, address: "192.0.2.1".to_owned(), certificate: None }
    }

    #[test]
    fn passwords_do_not_stand_in_the_way() {
        assert_eq!(Lane::of(&peer(), "session.login_with_password"), Lane::Login);
        assert_eq!(Lane::of(&peer(), "session.slave_local_login_with_password"), Lane::Login);
        assert_eq!(Lane::of(&peer(), "session.change_password"), Lane::Login);
        let root = Peer { superuser: true, address: "unix:uid=0".to_owned(), certificate: None };
        assert_eq!(Lane::of(&root, "session.login_with_password"), Lane::Quick, "it has no password");
        assert_eq!(Lane::of(&root, "session.change_password"), Lane::Login);
        assert_eq!(Lane::of(&peer(), "session.get_uuid"), Lane::Quick);
        assert_eq!(Lane::of(&peer(), "system.listMethods"), Lane::Quick);
        assert_eq!(Lane::of(&peer(), "Async.VM.start"), Lane::Quick);
        assert_eq!(Lane::of(&peer(), "VDI.get_all_records"), Lane::Quick);
        assert_eq!(Lane::of(&peer(), "nonsense"), Lane::Quick);
        // Every message that the table calls asynchronous is one that may take long.
        for class in tapio_model::CLASSES {
            for message in class.messages {
                let lane = Lane::of(&peer(), &format!("{}.{}", class.name, message.name));
                assert_eq!(lane == Lane::Slow, message.is_async && lane != Lane::Login, "{}", message.name);
            }
        }
    }

    #[tokio::test]
    async fn a_full_lane_refuses_and_the_others_go_on() {
        let one = LaneLimits { running_max: 1, waiting_max: 1 };
        let lanes = Arc::new(Lanes::new(&ServerLimits { slow: one, ..ServerLimits::default() }));
        let first = lanes.enter(Lane::Slow, &peer()).await.expect("room for one");
        let second = tokio::spawn({
            let lanes = Arc::clone(&lanes);
            async move { lanes.enter(Lane::Slow, &peer()).await.map(drop) }
        });
        while lanes.slow.waiting.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(lanes.enter(Lane::Slow, &peer()).await.map(drop), Err(Busy));
        assert!(lanes.enter(Lane::Quick, &peer()).await.is_ok());
        drop(first);
        assert_eq!(second.await.expect("no panic"), Ok(()));
        assert!(lanes.enter(Lane::Slow, &peer()).await.is_ok());
    }
}
