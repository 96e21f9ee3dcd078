//! The rate limit of wrong passwords.
//!
//! Three wrong passwords for one account from one address, and twenty from one address in all, are free. After that
//! each doubles the time in which nothing from there is tried, up to a minute. No address can lock out another: what
//! is counted is bound to an address.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Wrong passwords that cost nothing.
const FREE_OF_ACCOUNT: u32 = 3;
const FREE_OF_ADDRESS: u32 = 20;
/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// After so long everything is forgiven.
const MEMORY: Duration = Duration::from_secs(15 * 60);
/// Accounts and addresses that are remembered.
const ROWS_MAX: usize = 10_000;

/// An account from an address, or (without an account) an address.
type Key = (Option<String>, String);

#[derive(Clone, Copy, Debug)]
struct Row {
    failures: u32,
    last: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Throttle {
    rows: Mutex<HashMap<Key, Row>>,
}

fn keys(user: &str, address: &str) -> [(Key, u32); 2] {
    // Only the beginning of a name counts, which may be as long as a message.
    let user = user.chars().take(64).collect();
    [((Some(user), address.to_owned()), FREE_OF_ACCOUNT), ((None, address.to_owned()), FREE_OF_ADDRESS)]
}

impl Throttle {
    /// How long nothing is to be tried; none: at once.
    pub(super) fn wait(&self, user: &str, address: &str, now: Instant) -> Option<Duration> {
        let rows = self.rows.lock();
        let waits = keys(user, address).into_iter().filter_map(|(key, free)| {
            let row = rows.get(&key).filter(|row| row.failures >= free)?;
            let doublings = (row.failures - free).min(6);
            let until = row.last + WAIT_MAX.min(Duration::from_secs(1 << doublings));
            until.checked_duration_since(now).filter(|left| !left.is_zero())
        });
        waits.max()
    }

    pub(super) fn failed(&self, user: &str, address: &str, now: Instant) {
        let mut rows = self.rows.lock();
        for (key, _) in keys(user, address) {
            if rows.len() >= ROWS_MAX && !rows.contains_key(&key) {
                rows.retain(|_, row| now.duration_since(row.last) < MEMORY);
                let oldest = rows.iter().min_by_key(|(_, row)| row.last).map(|(key, _)| key.clone());
                if let Some(oldest) = oldest.filter(|_| rows.len() >= ROWS_MAX) {
                    rows.remove(&oldest);
                }
            }
            let row = rows.entry(key).or_insert(Row { failures: 0, last: now });
            if now.duration_since(row.last) >= MEMORY {
                row.failures = 0;
            }
            *row = Row { failures: row.failures.saturating_add(1), last: now };
        }
    }

    /// The account's failures from there are forgotten; those of the address are not, because the client may
    /// be guessing at others.
    pub(super) fn succeeded(&self, user: &str, address: &str) {
        let [(key, _), _] = keys(user, address);
        self.rows.lock().remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn waits_double_and_belong_to_an_address() {
        let throttle = Throttle::default();
        let now = Instant::now();
        for _ in 0..FREE_OF_ACCOUNT {
            assert_eq!(throttle.wait("a", "here", now), None);
            throttle.failed("a", "here", now);
        }
        for expected in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(throttle.wait("a", "here", now), Some(expected * SECOND));
            assert_eq!(throttle.wait("a", "here", now + expected * SECOND), None);
            assert_eq!(throttle.wait("a", "there", now), None);
            assert_eq!(throttle.wait("b", "here", now), None);
            throttle.failed("a", "here", now);
        }
        throttle.succeeded("a", "here");
        assert_eq!(throttle.wait("a", "here", now), None);
    }

    #[test]
    fn an_address_that_tries_many_names_waits_too() {
        let throttle = Throttle::default();
        let now = Instant::now();
        for number in 0..FREE_OF_ADDRESS {
            assert_eq!(throttle.wait(&number.to_string(), "here", now), None);
            throttle.failed(&number.to_string(), "here", now);
        }
        assert_eq!(throttle.wait("new", "here", now), Some(SECOND));
        throttle.succeeded("new", "here");
        assert_eq!(throttle.wait("new", "here", now), Some(SECOND));
        assert_eq!(throttle.wait("new", "there", now), None);
        // Forgiven, and counted anew.
        throttle.failed("new", "here", now + MEMORY);
        assert_eq!(throttle.wait("new", "here", now + MEMORY), None);
    }

    #[test]
    fn memory_is_bounded() {
        let throttle = Throttle::default();
        let now = Instant::now();
        let victim = now + SECOND;
        for number in 0..6_000 {
            throttle.failed("a", &number.to_string(), now);
        }
        for _ in 0..4 {
            throttle.failed("a", "last", victim);
        }
        assert!(throttle.rows.lock().len() <= ROWS_MAX);
        assert!(throttle.wait("a", "last", victim).is_some(), "the newest are kept");
    }
}
