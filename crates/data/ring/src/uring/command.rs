//! Commands to devices (`IORING_OP_URING_CMD`): on the ring of a data thread, and on a small ring of their own for
//! those that take more than 16 bytes.

use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::Uring;

impl Uring {
    /// Sends a device a command of 16 bytes; gives its answer (negative: an errno).
    ///
    /// # Safety
    /// `fd` stays open, and memory that the command names valid, until the future is ready.
    pub unsafe fn command(
        &self,
        fd: RawFd,
        operation: u32,
        payload: [u8; 16],
    ) -> impl Future<Output = i32> + use<> {
        let entry = opcode::UringCmd16::new(types::Fd(fd), operation).cmd(payload).build();
        // SAFETY: the caller vouches for what the command refers to.
        unsafe { self.start(|_| entry) }
    }

    /// Cancels every operation in flight on the open file behind `fd`: their futures end with ECANCELED, unless they
    /// have ended by themselves.
    pub fn cancel_fd(&self, fd: RawFd) {
        let entry = opcode::AsyncCancel2::new(CancelBuilder::fd(types::Fd(fd)).all()).build();
        // SAFETY: a cancellation refers to no memory.
        unsafe { self.start_forgotten(entry) };
    }
}

/// Bytes of a command on a [`CommandRing`].
pub const COMMAND_LEN: usize = 80;

/// A ring with entries of 128 bytes, for one command at a time, waited for on the calling thread. For control sides:
/// never on a data thread.
pub struct CommandRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl std::fmt::Debug for CommandRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandRing").finish_non_exhaustive()
    }
}

impl CommandRing {
    /// A ring.
    ///
    /// # Errors
    /// The kernel gives none, or none with large entries (before 5.19).
    pub fn new() -> io::Result<Self> {
        Ok(Self { ring: IoUring::builder().build(4)? })
    }

    /// Sends a command and waits for its answer, which is not negative. `make` is given the address of `data`, which
    /// the device may read and write.
    ///
    /// # Errors
    /// What the device answers, or `TimedOut`: then the command is still in flight, and this ring and the memory are
    /// left to it for good.
    pub fn run(
        mut self,
        fd: RawFd,
        operation: u32,
        mut data: Box<[u8]>,
        make: impl FnOnce(u64) -> [u8; COMMAND_LEN],
        within: Duration,
    ) -> io::Result<(Self, i32, Box<[u8]>)> {
        let payload = make(data.as_mut_ptr() as u64);
        let entry = opcode::UringCmd80::new(types::Fd(fd), operation).cmd(payload).build();
        // SAFETY: the memory behind the entry is kept until the command has ended, or for ever.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return Err(io::Error::other("the command ring is full"));
        }
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timespec = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            let args = SubmitArgs::new().timespec(&timespec);
            let waited = self.ring.submitter().submit_with_args(1, &args);
            let answer = self.ring.completion().next().map(|entry| entry.result());
            match (answer, waited) {
                (Some(result), _) if result >= 0 => return Ok((self, result, data)),
                (Some(error), _) => return Err(io::Error::from_raw_os_error(-error)),
                (None, Err(error)) if !super::transient(&error) => {
                    std::mem::forget((self, data));
                    return Err(error);
                }
                (None, _) if left.is_zero() => {
                    std::mem::forget((self, data));
                    return Err(io::ErrorKind::TimedOut.into());
                }
                (None, _) => {}
            }
        }
    }
}
