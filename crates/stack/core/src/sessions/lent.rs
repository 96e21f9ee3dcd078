//! Names that stand for a client of another host of the pool, which sent it here for a transfer: no session, and good
//! for nothing else.
//!
//! A session is known to the host at which it was opened. That host has checked it, and the task's account; what
//! is lent carries the account, its role of that moment, and the task. It is used once, within a minute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::{ApiError, Role};
use uuid::Uuid;

use crate::caller::Caller;

/// How long a client may take to follow a redirection.
const GOOD_FOR: Duration = Duration::from_secs(60);

/// Names that were not used yet.
const LENT_MAX: usize = 1024;

struct Lent {
    user: String,
    role: Role,
    task: Option<String>,
    until: Instant,
}

/// What was lent and not used yet.
#[derive(Default)]
pub(crate) struct LentNames {
    all: Mutex<HashMap<String, Lent>>,
}

/// A client that another host has sent.
pub(crate) struct Sent {
    pub(crate) caller: Caller,
    /// A task of its own.
    pub(crate) task: Option<String>,
}

impl LentNames {
    /// A name for a client of another host, which has checked it.
    ///
    /// # Errors
    /// Too many were lent in the last minute.
    pub(crate) fn lend(&self, user: &str, role: Role, task: Option<&str>) -> Result<String, ApiError> {
        let now = Instant::now();
        let mut all = self.all.lock();
        all.retain(|_, lent| lent.until > now);
        if all.len() >= LENT_MAX {
            let why = format!("{LENT_MAX} clients were sent here in the last minute: repeat the request");
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        let name = format!("OpaqueRef:{}", Uuid::new_v4());
        let lent = Lent {
            user: user.to_owned(),
            role,
            task: task.filter(|task| !task.is_empty()).map(str::to_owned),
            until: now + GOOD_FOR,
        };
        all.insert(name.clone(), lent);
        Ok(name)
    }

    /// Whether a name was lent, and is good still.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.all.lock().get(name).is_some_and(|lent| lent.until > Instant::now())
    }

    /// The client that a name stands for, once.
    pub(crate) fn take(&self, name: &str) -> Option<Sent> {
        let lent = self.all.lock().remove(name).filter(|lent| lent.until > Instant::now())?;
        let caller = Caller { session: name.to_owned(), role: lent.role, user: lent.user, credential: None };
        Some(Sent { caller, task: lent.task })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_good_once_and_for_a_minute() {
        let names = LentNames::default();
        let name = names.lend("anna", Role::VmAdmin, Some("OpaqueRef:t")).expect("room");
        assert!(names.has(&name) && !names.has("OpaqueRef:other"));
        let sent = names.take(&name).expect("it is good");
        assert_eq!((sent.caller.role, &*sent.caller.user), (Role::VmAdmin, "anna"));
        assert_eq!(sent.task.as_deref(), Some("OpaqueRef:t"));
        assert!(names.take(&name).is_none() && !names.has(&name));
        let late = names.lend("anna", Role::VmAdmin, None).expect("room");
        names.all.lock().get_mut(&late).expect("it is there").until = Instant::now();
        assert!(names.take(&late).is_none());
    }

    #[test]
    fn names_are_bounded() {
        let names = LentNames::default();
        for _ in 0..LENT_MAX {
            names.lend("a", Role::ReadOnly, None).expect("room");
        }
        assert_eq!(names.lend("a", Role::ReadOnly, None).unwrap_err().code, "OPERATION_NOT_ALLOWED");
        names.all.lock().values_mut().for_each(|lent| lent.until = Instant::now());
        names.lend("a", Role::ReadOnly, None).expect("those of before are over");
    }
}
