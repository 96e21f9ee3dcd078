//! An export that clients know by secret names, and that does not keep clients which have stopped using it.

use std::collections::BTreeSet;
use std::time::Duration;

use parking_lot::Mutex;

/// SHA-256 of a secret name. The names themselves are not kept, and a comparison of digests tells nothing of them.
pub(super) type Key = [u8; 32];

pub(super) fn key_of(name: &str) -> Key {
    let digest = ring::digest::digest(&ring::digest::SHA256, name.as_bytes());
    let mut key = Key::default();
    key.copy_from_slice(digest.as_ref());
    key
}

/// Which names are valid, and how long a client may do nothing.
#[derive(Debug)]
pub struct Guard {
    keys: Mutex<BTreeSet<Key>>,
    /// A client that neither sends a request nor takes a byte of a reply for so long is disconnected.
    pub(super) client_time: Duration,
    /// Called with why a client was disconnected.
    pub(super) report: fn(&str),
}

impl Guard {
    /// No name is valid yet.
    pub const fn new(client_time: Duration, report: fn(&str)) -> Self {
        Self { keys: Mutex::new(BTreeSet::new()), client_time, report }
    }

    /// These names are valid from now on, and no others.
    pub(super) fn set(&self, names: &[&str]) {
        *self.keys.lock() = names.iter().copied().map(key_of).collect();
    }

    pub(super) fn admits(&self, key: &Key) -> bool {
        self.keys.lock().contains(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_until_others_are() {
        let guard = Guard::new(Duration::from_secs(1), |_| ());
        assert!(!guard.admits(&key_of("")) && !guard.admits(&key_of("/a?session_id=1")));
        guard.set(&["/a?session_id=1", "/a?session_id=2"]);
        assert!(guard.admits(&key_of("/a?session_id=1")) && guard.admits(&key_of("/a?session_id=2")));
        assert!(!guard.admits(&key_of("/a?session_id=")));
        guard.set(&["/a?session_id=2"]);
        assert!(!guard.admits(&key_of("/a?session_id=1")));
    }
}
