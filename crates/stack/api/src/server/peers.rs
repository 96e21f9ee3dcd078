//! How many connections there are, in all and of each peer.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Whose connections are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PeerKey {
    Address(IpAddr),
    User(u32),
}

#[derive(Debug, Default)]
pub(super) struct Peers {
    counts: Mutex<HashMap<PeerKey, usize>>,
}

/// A place for one connection.
#[derive(Debug)]
pub(super) struct Place {
    peers: Arc<Peers>,
    owner: PeerKey,
}

impl Peers {
    /// Room for one more, where there is some.
    pub(super) fn enter(self: &Arc<Self>, owner: PeerKey, each_max: usize, all_max: usize) -> Option<Place> {
        let mut counts = self.counts.lock();
        if counts.values().sum::<usize>() >= all_max {
            return None;
        }
        let count = counts.get(&owner).copied().unwrap_or_default();
        if count >= each_max {
            return None;
        }
        counts.insert(owner, count + 1);
        Some(Place { peers: Arc::clone(self), owner })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock();
        if let Some(count) = counts.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_and_all_are_bounded_and_places_come_back() {
        let peers = Arc::new(Peers::default());
        let mut held: Vec<Place> =
            (0..2).map(|_| peers.enter(PeerKey::User(1), 2, 3).expect("room")).collect();
        assert!(peers.enter(PeerKey::User(1), 2, 3).is_none());
        held.push(peers.enter(PeerKey::User(2), 2, 3).expect("room"));
        assert!(peers.enter(PeerKey::User(3), 2, 3).is_none());
        assert_eq!(peers.counts.lock().len(), 2, "a refused peer leaves nothing behind");
        drop(held);
        assert!(peers.counts.lock().is_empty());
    }
}
