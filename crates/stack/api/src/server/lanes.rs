//! Which calls run beside which.
//!
//! A call holds a thread while it runs. If all shared one pool, 128 machines that start would keep a client from
//! reading a name; so calls that may also be made asynchronously (those of the object table that work on disks and
//! machines) have threads of their own, and so have passwords, because whoever does not know one can ask for it to be
//! checked.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::{LaneLimits, ServerLimits};

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Quick,
    Slow,
    Login,
}

impl Lane {
    pub(super) fn of(method: &str) -> Self {
        let Some((class, message)) = method.split_once('.') else { return Self::Quick };
        if class == "session" && (message.contains("login") || message == "change_password") {
            return Self::Login;
        }
        // `Async.VM.start` is answered as soon as its task is made: its class is `Async`, which no table has.
        let Some(class) = tapio_model::class(class) else { return Self::Quick };
        let made = matches!(message, "create" | "destroy") && class.constructor.is_some();
        let long = class.message(message).is_some_and(|message| message.is_async);
        if made || long { Self::Slow } else { Self::Quick }
    }
}

/// Too many calls of this kind wait already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

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
    login: Gate,
}

impl Lanes {
    pub(super) fn new(limits: &ServerLimits) -> Self {
        Self { quick: Gate::new(limits.quick), slow: Gate::new(limits.slow), login: Gate::new(limits.login) }
    }

    /// Waits for a place; whoever holds it may block a thread.
    pub(super) async fn enter(&self, lane: Lane) -> Result<OwnedSemaphorePermit, Busy> {
        let gate = match lane {
            Lane::Quick => &self.quick,
            Lane::Slow => &self.slow,
            Lane::Login => &self.login,
        };
        if let Ok(permit) = Arc::clone(&gate.running).try_acquire_owned() {
            return Ok(permit);
        }
        let _waiting = gate.waiting.try_acquire().map_err(|_| Busy)?;
        Arc::clone(&gate.running).acquire_owned().await.map_err(|_| Busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_do_not_stand_in_the_way() {
        assert_eq!(Lane::of("session.login_with_password"), Lane::Login);
        assert_eq!(Lane::of("session.slave_local_login_with_password"), Lane::Login);
        assert_eq!(Lane::of("session.change_password"), Lane::Login);
        assert_eq!(Lane::of("session.get_uuid"), Lane::Quick);
        assert_eq!(Lane::of("system.listMethods"), Lane::Quick);
        assert_eq!(Lane::of("Async.VM.start"), Lane::Quick);
        assert_eq!(Lane::of("VDI.get_all_records"), Lane::Quick);
        assert_eq!(Lane::of("nonsense"), Lane::Quick);
        // Every message that the table calls asynchronous is one that may take long.
        for class in tapio_model::CLASSES {
            for message in class.messages {
                let lane = Lane::of(&format!("{}.{}", class.name, message.name));
                assert_eq!(lane == Lane::Slow, message.is_async && lane != Lane::Login, "{}", message.name);
            }
        }
    }

    #[tokio::test]
    async fn a_full_lane_refuses_and_the_others_go_on() {
        let one = LaneLimits { running_max: 1, waiting_max: 1 };
        let lanes = Arc::new(Lanes::new(&ServerLimits { slow: one, ..ServerLimits::default() }));
        let first = lanes.enter(Lane::Slow).await.expect("room for one");
        let second = tokio::spawn({
            let lanes = Arc::clone(&lanes);
            async move { lanes.enter(Lane::Slow).await.map(drop) }
        });
        while lanes.slow.waiting.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(lanes.enter(Lane::Slow).await.map(drop), Err(Busy));
        assert!(lanes.enter(Lane::Quick).await.is_ok());
        drop(first);
        assert_eq!(second.await.expect("no panic"), Ok(()));
        assert!(lanes.enter(Lane::Slow).await.is_ok());
    }
}
