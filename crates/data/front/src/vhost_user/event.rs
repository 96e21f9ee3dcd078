//! The event descriptors that a front end gives: kicks to wait for, calls and errors to signal.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstat};

/// Something to write 8 bytes to: an eventfd, a pipe, or a stream socket (User-mode Linux makes a pair of those for
/// interrupts).
#[derive(Debug)]
pub struct Notifier {
    file: File,
    blocking: bool,
}

impl Notifier {
    /// Takes a descriptor over, if it is one that can be signalled without waiting for long.
    pub fn new(fd: OwnedFd) -> Result<Self, &'static str> {
        let kind = kind(&fd)?;
        // One whose flags cannot be read counts as one that does not block, as ever.
        let flags = fcntl_getfl(&fd).unwrap_or(OFlags::all());
        let mut blocking = !flags.contains(OFlags::NONBLOCK);
        if blocking && kind != Kind::Event {
            // The writing end of a pipe is ours alone. A full pipe has woken its reader already.
            blocking = fcntl_setfl(&fd, flags | OFlags::NONBLOCK).is_err();
        }
        Ok(Self { file: File::from(fd), blocking })
    }

    /// Signals. A counter or a pipe that is full has signalled already.
    ///
    /// A blocking eventfd is shared with the front end, so its flags stay as they are: it is asked first whether it
    /// would take the signal.
    pub fn signal(&self) {
        if self.blocking && !self.writable() {
            return;
        }
        // Nothing can be done about a front end whose counter does not take signals: it hurts only itself.
        let _ = (&self.file).write(&1u64.to_ne_bytes());
    }

    fn writable(&self) -> bool {
        let mut polled = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one valid entry, no waiting.
        unsafe { libc::poll(&raw mut polled, 1, 0) == 1 && polled.revents & libc::POLLOUT != 0 }
    }
}

/// Something that becomes readable when the guest has work.
#[derive(Debug)]
pub struct Kick {
    file: File,
}

impl Kick {
    /// Takes a descriptor over, if it is an event counter, which wakes at every signal even if it is never read.
    pub fn new(fd: OwnedFd) -> Result<Self, &'static str> {
        let file = File::from(fd.try_clone().map_err(|_| "the descriptor cannot be duplicated")?);
        // A pipe without a reader would run full, and other anonymous files are always ready or never. Adding nothing
        // to a counter always works, and to nothing else.
        let counter =
            kind(&fd)? == Kind::Event && (&file).write(&0u64.to_ne_bytes()).is_ok_and(|len| len == 8);
        if counter { Ok(Self { file }) } else { Err("the kick descriptor is not an eventfd") }
    }

    /// The descriptor, for the ring.
    pub fn raw(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Event,
    Pipe,
    Socket,
}

/// Event counters are anonymous inodes, which have no type. Files and devices are refused: reading a file
/// never waits, so that it would kick without end.
fn kind(fd: &OwnedFd) -> Result<Kind, &'static str> {
    let Ok(stat) = fstat(fd) else { return Err("the descriptor cannot be examined") };
    match stat.st_mode & libc::S_IFMT {
        0 => Ok(Kind::Event),
        libc::S_IFIFO => Ok(Kind::Pipe),
        libc::S_IFSOCK => Ok(Kind::Socket),
        _ => Err("the descriptor is neither an eventfd nor a pipe nor a socket"),
    }
}

/// A new eventfd that does not block.
pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    use std::io::Read;

    #[test]
    fn events_and_pipes_are_taken_and_nothing_else() {
        assert!(Notifier::new(eventfd().unwrap()).is_ok());
        let (_reader, writer) = io::pipe().unwrap();
        assert!(Notifier::new(writer.into()).is_ok());
        assert!(Kick::new(tempfile::tempfile().unwrap().into()).is_err());
        assert!(Notifier::new(File::open("/dev/null").unwrap().into()).is_err());
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Kick::new(socket.try_clone().unwrap().into()).is_err());
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty()).unwrap();
        assert!(Kick::new(timer).is_err(), "another anonymous file");
        assert!(Kick::new(eventfd().unwrap()).is_ok());
        assert!(Notifier::new(socket.into()).is_ok());
    }

    #[test]
    fn a_counter_or_pipe_that_is_full_does_not_hold_us_up() {
        for flags in [EventfdFlags::CLOEXEC, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK] {
            let fd = rustix::event::eventfd(0, flags).unwrap();
            let mut other = File::from(fd.try_clone().unwrap());
            other.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
            let notifier = Notifier::new(fd).unwrap();
            notifier.signal();
            notifier.signal();
            let mut value = [0; 8];
            other.read_exact(&mut value).unwrap();
            assert_eq!(u64::from_ne_bytes(value), u64::MAX - 1);
        }
        let (_reader, writer) = io::pipe().unwrap();
        let notifier = Notifier::new(writer.into()).unwrap();
        for _ in 0..20_000 {
            notifier.signal();
        }
    }
}
