//! Ceph's exclusive lock as the fence between writers.
//!
//! One client holds it and keeps it: another that opens the image for writing is refused. The lock of a dead client is
//! broken, which shuts that client out of the cluster first, so that none of its writes can arrive later. A client is
//! known dead when its process was one of this host and has ended, or when it no longer watches the image, which the
//! cluster finds about half a minute after its end.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::time::{Duration, Instant};

use crate::Result;
use crate::cluster::text_of;
use crate::error::{RbdError, c_text};
use crate::image::Image;
use crate::library::{LOCK_EXCLUSIVE, Watcher};
use crate::owner::{MANAGER, Owner, WRITER};

/// How long a lock that a living client holds is waited for: one that is about to close the image, as for a restart.
const WAIT: Duration = Duration::from_secs(3);
/// How often it is looked at.
const TURN: Duration = Duration::from_millis(100);
/// Watchers and owners that are looked at.
const CLIENTS_MAX: usize = 64;

impl Image {
    /// Takes the lock and keeps it until the image is closed.
    ///
    /// # Errors
    /// `EBUSY`: a living client has it; the cluster does not answer.
    pub fn take_lock(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            // First: asking a dead client for the lock takes as long as the cluster takes to find out.
            let owner = self.lock_owner()?;
            if let Some(owner) = &owner
                && self.is_dead(owner)?
            {
                self.break_lock(owner)?;
            }
            // SAFETY: the image is open.
            let code = unsafe { (self.library().rbd_lock_acquire)(self.handle, LOCK_EXCLUSIVE) };
            if code >= 0 {
                return self.note(WRITER);
            }
            if !matches!(-code, libc::EROFS | libc::EBUSY | libc::EAGAIN | libc::ETIMEDOUT) {
                return self.check(code, "its lock cannot be taken").map(drop);
            }
            match owner {
                _ if begin.elapsed() < WAIT => std::thread::sleep(TURN),
                Some(owner) => return Err(self.held(&owner)),
                None => return self.check(code, "its lock cannot be taken").map(drop),
            }
        }
    }

    /// Makes the image ready for a snapshot, or for another size: breaks the lock of a client that is known dead, so
    /// that nothing waits until the cluster finds that out.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn prepare_change(&self) -> Result<()> {
        if let Some(owner) = self.lock_owner()?
            && self.is_dead(&owner)?
        {
            self.break_lock(&owner)?;
        }
        self.note(MANAGER)
    }

    /// Gives the lock back.
    ///
    /// # Errors
    /// It was not held; the cluster does not answer.
    pub fn release_lock(&self) -> Result<()> {
        // SAFETY: the image is open.
        let code = unsafe { (self.library().rbd_lock_release)(self.handle) };
        self.check(code, "its lock cannot be given back").map(drop)
    }

    fn held(&self, owner: &str) -> RbdError {
        let client = self.client_at(owner).ok().flatten();
        let client = client.map_or_else(|| "a client".to_owned(), |client| format!("client.{client}"));
        let text = format!(
            "the RBD image '{}' is open for writing by {client} at {}: close it there first",
            self.name,
            owner.escape_debug()
        );
        RbdError::new(libc::EBUSY, text)
    }

    /// The number of the client with this address, if it still has the image open.
    fn client_at(&self, address: &str) -> Result<Option<u64>> {
        let watchers = self.watchers()?;
        Ok(watchers.into_iter().find(|(_, known)| known == address).map(|(client, _)| client))
    }

    fn note(&self, key: &str) -> Result<()> {
        match Owner::this(self.pool.cluster.instance()) {
            Some(owner) => self.set_metadata(key, &owner.text()),
            None => Ok(()),
        }
    }

    /// The address of the client that holds the lock, as `10.0.0.7:0/4711`.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn lock_owner(&self) -> Result<Option<String>> {
        let mut owners: [*mut c_char; CLIENTS_MAX] = [ptr::null_mut(); CLIENTS_MAX];
        let (mut mode, mut count): (c_int, usize) = (LOCK_EXCLUSIVE, CLIENTS_MAX);
        // SAFETY: the image is open, and there are as many places as are told.
        let code = unsafe {
            (self.library().rbd_lock_get_owners)(
                self.handle,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            )
        };
        if code == -libc::ENOENT {
            return Ok(None);
        }
        self.check(code, "its lock cannot be looked at")?;
        let count = count.min(CLIENTS_MAX);
        let owner = owners[..count].iter().find_map(|owner| text_of(*owner));
        // SAFETY: the library has filled so many.
        unsafe { (self.library().rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(owner)
    }

    /// The clients that have the image open for changes: their numbers and addresses.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn watchers(&self) -> Result<Vec<(u64, String)>> {
        let empty = Watcher { addr: ptr::null_mut(), id: 0, cookie: 0 };
        let (mut watchers, mut count) = ([empty; CLIENTS_MAX], CLIENTS_MAX);
        // SAFETY: the image is open, and there are as many places as are told.
        let code =
            unsafe { (self.library().rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), &raw mut count) };
        self.check(code, "its users cannot be listed")?;
        let count = count.min(CLIENTS_MAX);
        let found = watchers[..count].iter();
        let found =
            found.map(|one| (one.id.cast_unsigned(), text_of(one.addr).unwrap_or_default())).collect();
        // SAFETY: the library has filled so many.
        unsafe { (self.library().rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        Ok(found)
    }

    /// Whether the client that holds the lock has ended.
    fn is_dead(&self, owner: &str) -> Result<bool> {
        // The cluster has found it out.
        let Some(client) = self.client_at(owner)? else { return Ok(true) };
        for key in [WRITER, MANAGER] {
            let note = self.metadata(key)?.as_deref().and_then(Owner::parse);
            if note.is_some_and(|note| note.client == client && note.is_dead()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Breaks the lock of a client, and shuts that client out of the cluster.
    ///
    /// # Errors
    /// The user may not; the cluster does not answer.
    pub fn break_lock(&self, owner: &str) -> Result<()> {
        let text = c_text(owner)?;
        // SAFETY: the image is open, the name is terminated.
        match unsafe { (self.library().rbd_lock_break)(self.handle, LOCK_EXCLUSIVE, text.as_ptr()) } {
            // It has gone meanwhile.
            code if code == -libc::ENOENT => Ok(()),
            code => self.check(code, "the lock of a dead client cannot be broken").map(drop),
        }
    }
}
