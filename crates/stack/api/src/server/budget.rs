//! What answers may hold, of the daemon and of each account and address.
//!
//! An answer holds memory from the moment it is made until its client has taken it, and the client decides when that
//! is. So what answers hold is counted, and an answer for which there is no room is not made: its client is told to
//! take those that it asked for before. A share of it is the most that one account, and one address, can hold: others
//! have the rest.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Answers up to this size are not counted: there can be one for each connection, which is bounded already.
pub(super) const FREE_LEN: usize = 16 << 10;

/// Whose bytes are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Payer {
    Address(String),
    Account(String),
}

/// There is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// For this account or address.
    Share,
    /// For any account or address.
    All,
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    each: HashMap<Payer, usize>,
}

/// Bytes that answers may hold.
#[derive(Debug)]
pub(super) struct Budget {
    all_max: usize,
    each_max: usize,
    held: Mutex<Held>,
    /// Something came back.
    freed: Notify,
}

/// Bytes that an answer holds; they come back when this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    payers: Arc<[Payer]>,
    len: usize,
}

impl Budget {
    pub(super) fn new(all_max: usize, each_max: usize) -> Self {
        Self { all_max, each_max, held: Mutex::default(), freed: Notify::new() }
    }

    /// Takes `len` bytes, for all of these payers.
    pub(super) fn take(self: &Arc<Self>, payers: &Arc<[Payer]>, len: usize) -> Result<Share, Full> {
        let mut held = self.held.lock();
        let has = |payer: &Payer| held.each.get(payer).copied().unwrap_or_default();
        if payers.iter().any(|payer| has(payer) + len > self.each_max) {
            return Err(Full::Share);
        }
        if held.all + len > self.all_max {
            return Err(Full::All);
        }
        held.all += len;
        for payer in payers.iter() {
            *held.each.entry(payer.clone()).or_default() += len;
        }
        Ok(Share { budget: Arc::clone(self), payers: Arc::clone(payers), len })
    }

    /// Takes `len` bytes as soon as they are there; more than a share has are as many as it has.
    async fn wait(self: &Arc<Self>, payers: &Arc<[Payer]>, len: usize) -> Share {
        let len = len.min(self.each_max / 2);
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Ok(share) = self.take(payers, len) {
                return share;
            }
            freed.await;
        }
    }

    /// Bytes that are held now.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.held.lock().all
    }
}

impl Share {
    /// More for the same answer, if it is there.
    pub(super) fn try_more(&self, len: usize) -> Result<Self, Full> {
        self.budget.take(&self.payers, len)
    }

    /// More for the same answer, as soon as it is there.
    pub(super) async fn more(&self, len: usize) -> Self {
        self.budget.wait(&self.payers, len).await
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.budget.held.lock();
        held.all -= self.len;
        for payer in self.payers.iter() {
            if let Some(of_payer) = held.each.get_mut(payer) {
                *of_payer -= self.len;
                if *of_payer == 0 {
                    held.each.remove(payer);
                }
            }
        }
        drop(held);
        self.budget.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payers(host: u32, account: &str) -> Arc<[Payer]> {
        Arc::new([Payer::Address(format!("192.0.2.{host}")), Payer::Account(account.to_owned())])
    }

    #[test]
    fn each_account_each_address_and_all_are_bounded() {
        let budget = Arc::new(Budget::new(100, 60));
        let mut held = vec![budget.take(&payers(1, "a"), 40).expect("room")];
        // The same address with another account, and the same account from elsewhere.
        assert_eq!(budget.take(&payers(1, "b"), 40).map(drop), Err(Full::Share));
        assert_eq!(budget.take(&payers(2, "a"), 40).map(drop), Err(Full::Share));
        held.push(budget.take(&payers(2, "b"), 50).expect("room for others"));
        assert_eq!(budget.take(&payers(3, "c"), 20).map(drop), Err(Full::All));
        held.push(budget.take(&payers(1, "a"), 10).expect("the rest"));
        assert_eq!(budget.held(), 100);
        drop(held);
        assert_eq!(budget.held(), 0);
        assert!(budget.held.lock().each.is_empty(), "no client is remembered");
    }

    #[tokio::test]
    async fn more_comes_when_something_came_back() {
        let budget = Arc::new(Budget::new(100, 100));
        let (one, other) = (budget.take(&payers(1, "a"), 40), budget.take(&payers(2, "b"), 30));
        let (one, other) = (one.expect("room"), other.expect("room"));
        let waiting = tokio::spawn(async move { one.more(1 << 30).await.len });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(other);
        // As much as half a share, however much is asked for.
        assert_eq!(waiting.await.expect("no panic"), 50);
        assert_eq!(budget.held(), 0);
    }
}
