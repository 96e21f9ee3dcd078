//! Tickets to consoles, for browsers: a WebSocket of theirs has no headers of its own, and the session must not stand
//! in an address, which proxies and histories keep.
//!
//! ```text
//!   POST /console/ticket  session_id=SESSION&uuid=CONSOLE     ->  {"result": "TICKET"}
//!   GET /console  with an upgrade, Sec-WebSocket-Protocol: binary, ticket.TICKET
//! ```
//!
//! A ticket opens one console once, within [`LIFE`], as the session that it was given to: a session that has ended, or
//! whose account has lost the role, opens nothing by it. Only digests are kept.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use tapio_model::ApiError;

/// How long a ticket is valid: a browser uses it at once.
const LIFE: Duration = Duration::from_secs(30);

/// Tickets of one session; another one takes the place of the oldest.
const PER_SESSION_MAX: usize = 16;

/// Tickets in all.
const TICKETS_MAX: usize = 4096;

/// Random bytes of a ticket.
const TICKET_LEN: usize = 32;

/// What a ticket is for.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) session: String,
    /// The console's reference.
    pub(super) console: String,
    /// The name by which it was asked for.
    pub(super) name: String,
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant").field("console", &self.console).finish_non_exhaustive()
    }
}

type Digest = [u8; 32];

/// Tickets that were not used yet.
#[derive(Debug, Default)]
pub(in crate::server) struct Tickets(Mutex<HashMap<Digest, (Instant, Grant)>>);

fn digest_of(ticket: &str) -> Digest {
    let mut bytes = Digest::default();
    bytes.copy_from_slice(digest(&SHA256, ticket.as_bytes()).as_ref());
    bytes
}

impl Tickets {
    /// A new ticket, as hexadecimal digits.
    ///
    /// # Errors
    /// There are [`TICKETS_MAX`] that were not used yet, or no random numbers.
    pub(super) fn issue(&self, grant: Grant, now: Instant) -> Result<String, ApiError> {
        let mut bytes = [0; TICKET_LEN];
        let no_numbers = |_| ApiError::internal("the system has no random numbers for a ticket");
        SystemRandom::new().fill(&mut bytes).map_err(no_numbers)?;
        let ticket: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut all = self.0.lock();
        all.retain(|_, (until, _)| *until > now);
        let mut own: Vec<(Instant, Digest)> = all
            .iter()
            .filter(|(_, (_, other))| other.session == grant.session)
            .map(|(digest, (until, _))| (*until, *digest))
            .collect();
        if own.len() >= PER_SESSION_MAX {
            own.sort_unstable();
            all.remove(&own[0].1);
        }
        if all.len() >= TICKETS_MAX {
            let why = format!("{TICKETS_MAX} tickets to consoles were not used yet; come back in a minute");
            return Err(ApiError::new("TOO_MANY_PENDING_TASKS", [why]));
        }
        all.insert(digest_of(&ticket), (now + LIFE, grant));
        Ok(ticket)
    }

    /// What a ticket is for. It is used up by this, whatever comes of it.
    pub(super) fn redeem(&self, ticket: &str, now: Instant) -> Option<Grant> {
        let (until, grant) = self.0.lock().remove(&digest_of(ticket))?;
        (until > now).then_some(grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(session: &str) -> Grant {
        Grant { session: session.into(), console: "OpaqueRef:c".into(), name: "c".into() }
    }

    #[test]
    fn a_ticket_is_good_once_and_for_a_while() {
        let (tickets, now) = (Tickets::default(), Instant::now());
        let ticket = tickets.issue(grant("s"), now).unwrap();
        assert_eq!(ticket.len(), 2 * TICKET_LEN);
        assert_eq!(tickets.redeem("another", now), None);
        assert_eq!(tickets.redeem(&ticket, now), Some(grant("s")));
        assert_eq!(tickets.redeem(&ticket, now), None, "used up");
        let late = tickets.issue(grant("s"), now).unwrap();
        assert_eq!(tickets.redeem(&late, now + LIFE), None, "too old");
        assert_eq!(tickets.redeem(&late, now), None, "and gone");
        assert!(!format!("{:?}", grant("secret")).contains("secret"));
    }

    #[test]
    fn tickets_that_nobody_uses_are_bounded() {
        let (tickets, now) = (Tickets::default(), Instant::now());
        let first = tickets.issue(grant("s"), now).unwrap();
        let soon = now + Duration::from_millis(1);
        for _ in 0..PER_SESSION_MAX {
            tickets.issue(grant("s"), soon).unwrap();
        }
        assert_eq!(tickets.0.lock().len(), PER_SESSION_MAX);
        assert_eq!(tickets.redeem(&first, now), None, "the oldest went");
        let count = tickets.0.lock().len();
        for number in count..TICKETS_MAX {
            tickets.issue(grant(&number.to_string()), soon).unwrap();
        }
        let error = tickets.issue(grant("one more"), soon).unwrap_err();
        assert_eq!(error.code, "TOO_MANY_PENDING_TASKS");
        // What is too old makes room.
        tickets.issue(grant("one more"), soon + LIFE).unwrap();
        assert_eq!(tickets.0.lock().len(), 1);
    }
}
