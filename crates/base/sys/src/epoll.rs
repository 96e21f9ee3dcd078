//! Waiting for many descriptors: what a wait costs does not depend on their number.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// The key of the descriptor by which a wait is ended.
const WAKE: u64 = u64::MAX;

/// Descriptors that are waited for, by keys (epoll(7)).
#[derive(Debug)]
pub struct Epoll {
    epoll: OwnedFd,
    wake: OwnedFd,
}

/// Why a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The descriptor of this key can be read, or has ended.
    Key(u64),
    /// [`Epoll::wake`] was called.
    Woken,
    /// The time is over.
    TimedOut,
}

impl Epoll {
    /// With none yet.
    ///
    /// # Errors
    /// This process, or the host, has too many descriptors.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self { epoll, wake })
    }

    /// Waits for this one too, also in a wait that has begun. `key` is any number but the highest.
    ///
    /// # Errors
    /// The kernel's: the descriptor is of a kind that is always ready, or is there already.
    pub fn add(&self, fd: &impl AsFd, key: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), EventFlags::IN)?)
    }

    /// No longer waits for it.
    ///
    /// # Errors
    /// It was not added.
    pub fn remove(&self, fd: &impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Ends a wait, or the next one.
    pub fn wake(&self) {
        // It fails where the counter is full, which wakes too.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Waits for one of them, for as long as `limit`, or without end where there is none. One that stays ready is
    /// answered again.
    ///
    /// # Errors
    /// `Interrupted` by a signal; the kernel's.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<Ready> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut found = Vec::with_capacity(1);
        epoll::wait(&self.epoll, spare_capacity(&mut found), limit.as_ref())?;
        Ok(match found.first().map(|event| event.data.u64()) {
            None => Ready::TimedOut,
            Some(WAKE) => {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                Ready::Woken
            }
            Some(key) => Ready::Key(key),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_wait_ends_by_a_descriptor_by_a_call_and_by_its_time() {
        let epoll = Epoll::new().expect("made");
        let (reader, mut writer) = io::pipe().expect("a pipe");
        epoll.add(&reader, 7).expect("added");
        assert!(epoll.add(&reader, 8).is_err(), "it is there");
        let wait = |limit| epoll.wait(Some(limit)).expect("waited");
        assert_eq!(wait(Duration::ZERO), Ready::TimedOut);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| epoll.wait(None).expect("waited"));
            epoll.wake();
            assert_eq!(waits.join().expect("no panic"), Ready::Woken);
        });
        assert_eq!(wait(Duration::from_millis(1)), Ready::TimedOut, "a call counts once");
        writer.write_all(b"x").expect("written");
        assert_eq!((wait(Duration::MAX), wait(Duration::MAX)), (Ready::Key(7), Ready::Key(7)));
        epoll.remove(&reader).expect("removed");
        assert_eq!(wait(Duration::ZERO), Ready::TimedOut);
        assert!(epoll.remove(&reader).is_err(), "it is gone");
    }
}
