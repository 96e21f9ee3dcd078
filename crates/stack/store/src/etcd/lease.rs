//! What a host holds as long as it lives: keys of a lease, which etcd removes when the lease is not renewed.

use std::time::{Duration, Instant};

use serde_json::json;

use super::http::Failure;
use super::wire::{self, Compare, Op};
use super::{Applied, Etcd, LIMIT, failed, malformed};
use crate::{Revision, StoreError};

/// A lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease(i64);

/// What an attempt to hold something came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is held from this revision on, which is the number of this holding: no other has it.
    Held(Revision),
    /// Another holds it: what it left there.
    By(String),
}

impl Etcd {
    /// A lease that ends when it is not renewed for `ttl`; etcd takes 2 s and more.
    ///
    /// # Errors
    /// The cluster's.
    pub fn grant(&self, ttl: Duration) -> Result<Lease, StoreError> {
        let body = json!({ "TTL": ttl.as_secs().max(2).to_string() });
        // One that was granted and not heard of ends by itself.
        let answer = self.client.repeat("lease/grant", &body, Instant::now() + LIMIT);
        let answer = answer.map_err(|failure| failed("a lease", &failure))?;
        wire::lease(&answer).map(Lease).ok_or_else(|| malformed("a lease has no ID".into()))
    }

    /// Renews a lease. Answers whether it is still there.
    ///
    /// # Errors
    /// No member answered until `until`: it may be there or not.
    pub fn beat(&self, lease: Lease, until: Instant) -> Result<bool, StoreError> {
        let body = json!({ "ID": lease.0.to_string() });
        let answer = self.client.repeat("lease/keepalive", &body, until);
        Ok(wire::is_alive(&answer.map_err(|failure| failed("a lease", &failure))?))
    }

    /// Ends a lease, and all that is held by it.
    ///
    /// # Errors
    /// The cluster's.
    pub fn revoke(&self, lease: Lease) -> Result<(), StoreError> {
        let body = json!({ "ID": lease.0.to_string() });
        match self.client.repeat("lease/revoke", &body, Instant::now() + LIMIT) {
            // It has ended by itself.
            Ok(_) | Err(Failure::Refused(5, _)) => Ok(()),
            Err(failure) => Err(failed("a lease", &failure)),
        }
    }

    /// Holds `name` as long as a lease, if no other holds it. `note` is what others read there.
    ///
    /// # Errors
    /// The cluster's, or the lease has ended.
    pub fn hold(&self, name: &str, note: &str, lease: Lease) -> Result<Taken, StoreError> {
        let key = self.names.held(name);
        let put = [Op::Lend(key.clone(), note.to_owned(), lease.0)];
        let free = [Compare::Created(key.clone(), 0)];
        let mut writer = self.committing.lock();
        loop {
            match self.apply_by(&[], &mut writer, &free, &put, std::slice::from_ref(&key))? {
                Applied::At(revision) => return Ok(Taken::Held(revision)),
                Applied::Not(found) => {
                    if let Some(kv) = found.into_iter().next().flatten() {
                        return Ok(Taken::By(kv.value));
                    }
                }
            }
        }
    }

    /// Puts another note under `name`, where the holding of this number still is; answers whether it is.
    ///
    /// # Errors
    /// The cluster's.
    pub fn note(&self, name: &str, note: &str, lease: Lease, number: Revision) -> Result<bool, StoreError> {
        let key = self.names.held(name);
        let put = [Op::Lend(key.clone(), note.to_owned(), lease.0)];
        let is_that = [Compare::Created(key, number)];
        let applied = self.apply_by(&[], &mut self.committing.lock(), &is_that, &put, &[])?;
        Ok(matches!(applied, Applied::At(_)))
    }

    /// Gives up what is held under `name`: by the holding of this number, or by any.
    ///
    /// # Errors
    /// The cluster's.
    pub fn release(&self, name: &str, number: Option<Revision>) -> Result<(), StoreError> {
        let key = self.names.held(name);
        let is_that: Vec<Compare> =
            number.map(|made| Compare::Created(key.clone(), made)).into_iter().collect();
        self.apply_by(&[], &mut self.committing.lock(), &is_that, &[Op::Delete(key)], &[]).map(drop)
    }

    /// Who holds `name`: its note, and the number of its holding.
    ///
    /// # Errors
    /// The cluster's.
    pub fn holder(&self, name: &str) -> Result<Option<(String, Revision)>, StoreError> {
        let range = wire::range(&self.names.held(name));
        Ok(self.held(&range)?.into_iter().next().map(|(_, note, made)| (note, made)))
    }

    /// All that is held below `name`, with notes and numbers.
    ///
    /// # Errors
    /// The cluster's.
    pub fn holders(&self, name: &str) -> Result<Vec<(String, String, Revision)>, StoreError> {
        let prefix = self.names.held(name);
        let range = wire::range_of(&prefix, &prefix, 0, 0);
        let held = self.held(&range)?.into_iter();
        Ok(held.map(|(key, note, made)| (key[prefix.len()..].to_owned(), note, made)).collect())
    }

    fn held(&self, range: &serde_json::Value) -> Result<Vec<(String, String, Revision)>, StoreError> {
        let answer = self.client.repeat("kv/range", range, Instant::now() + LIMIT);
        let answer = answer.map_err(|failure| failed("reading", &failure))?;
        let found = wire::kvs(&answer).map_err(malformed)?;
        Ok(found.into_iter().map(|kv| (kv.key, kv.value, kv.created)).collect())
    }

    /// From now on this store commits only while each of these is held by the holding of this number.
    pub fn fence_by(&self, held: &[(&str, Revision)]) {
        let keys = held.iter().map(|(name, made)| (self.names.held(name), *made));
        *self.fences.lock() = keys.collect();
    }

    /// Whether all that [`Self::fence_by`] named is still held.
    ///
    /// # Errors
    /// The cluster's.
    pub fn is_in(&self) -> Result<bool, StoreError> {
        let fences = self.fences.lock().clone();
        for (key, made) in fences {
            if self.held(&wire::range(&key))?.first().is_none_or(|(_, _, at)| *at != made) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
