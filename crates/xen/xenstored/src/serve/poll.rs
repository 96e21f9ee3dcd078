//! epoll, signals and wake-ups by descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// Events that one wait brings.
const BATCH: usize = 64;

/// Descriptors that are waited for, each with a number of the caller's.
#[derive(Debug)]
pub struct Poll {
    fd: OwnedFd,
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// There is something to read, or the other side is gone.
    pub read: bool,
    /// There is room to write.
    pub write: bool,
}

impl Interest {
    /// Something to read.
    pub const READ: Self = Self { read: true, write: false };

    fn events(self) -> u32 {
        let mut events = 0;
        if self.read {
            events |= libc::EPOLLIN as u32;
        }
        if self.write {
            events |= libc::EPOLLOUT as u32;
        }
        events
    }
}

/// What happened to one of them.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The caller's number.
    pub token: u64,
    /// There is something to read, or the other side is gone.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
    /// The other side is gone.
    pub gone: bool,
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made by the caller just now and without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Poll {
    /// Waits for nothing yet.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        Ok(Self { fd })
    }

    fn control(&self, what: i32, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.events(), u64: token };
        // SAFETY: the event lives through the call.
        let done = unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), what, fd, &raw mut event) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits for a descriptor from now on, until it is closed.
    ///
    /// # Errors
    /// It is waited for already, or cannot be.
    pub fn add(&self, fd: &impl AsRawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), token, interest)
    }

    /// Waits for something else of a descriptor.
    ///
    /// # Errors
    /// It is not waited for.
    pub fn change(&self, fd: &impl AsRawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_raw_fd(), token, interest)
    }

    /// Waits, or only looks, and puts what happened into `events`.
    ///
    /// # Errors
    /// Of the system call; an interruption is none.
    pub fn wait(&self, events: &mut Vec<Event>, long: bool) -> io::Result<()> {
        let mut found = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let time = if long { -1 } else { 0 };
        // SAFETY: as many events as the array has room for.
        let count = unsafe { libc::epoll_wait(self.fd.as_raw_fd(), found.as_mut_ptr(), BATCH as i32, time) };
        events.clear();
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        };
        for event in &found[..count] {
            let has = |bits: i32| event.events & bits as u32 != 0;
            events.push(Event {
                token: event.u64,
                readable: has(libc::EPOLLIN | libc::EPOLLHUP | libc::EPOLLERR),
                writable: has(libc::EPOLLOUT),
                gone: has(libc::EPOLLHUP | libc::EPOLLERR),
            });
        }
        Ok(())
    }
}

/// Wakes a loop from another thread.
///
/// # Errors
/// The system has no descriptors left.
pub fn waker() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the thread that waits for this waker.
pub fn wake(waker: &impl AsFd) {
    // It can only fail because it is awake already.
    let _ = rustix::io::write(waker, &1u64.to_ne_bytes());
}

/// A set of signals.
fn set_of(which: &[i32]) -> libc::sigset_t {
    // SAFETY: a set of signals is plain memory, filled by the calls before it is used.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in which {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Lets these signals wait until they are taken by [`signals`], where they would otherwise end the process.
///
/// # Errors
/// Of the system call.
pub fn hold_signals(which: &[i32]) -> io::Result<()> {
    let set = set_of(which);
    // SAFETY: the set is valid for the call.
    match unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor by which signals come that would otherwise end or interrupt the process.
///
/// # Errors
/// Of the system calls.
pub fn signals(which: &[i32]) -> io::Result<OwnedFd> {
    hold_signals(which)?;
    let set = set_of(which);
    // SAFETY: the set is valid for the call.
    owned(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })
}

/// The next signal that came.
pub fn next_signal(fd: &OwnedFd) -> Option<i32> {
    // SAFETY: the structure is plain memory of which no more is read than was written.
    unsafe {
        let mut info: libc::signalfd_siginfo = std::mem::zeroed();
        let len = size_of_val(&info);
        let got = libc::read(fd.as_raw_fd(), (&raw mut info).cast(), len);
        (got == len as isize).then_some(info.ssi_signo as i32)
    }
}
