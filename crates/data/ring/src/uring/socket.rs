//! Sockets, event counters and polls on the ring of a data thread.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use io_uring::{opcode, types};

use super::Uring;
use crate::lent::{MemoryMut, lend};
use crate::segments::{Flat, PageBuf, Segments};

fn result(code: i32) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

/// Names a stream of wake-ups; see [`Uring::poll_stream`].
#[derive(Clone, Debug)]
pub struct PollStream {
    uring: Uring,
    name: u64,
}

impl PollStream {
    /// Ends the stream. One that has ended already does not mind.
    pub fn cancel(&self) {
        let entry = opcode::AsyncCancel::new(self.name).build();
        // SAFETY: a cancellation refers to no memory.
        unsafe { self.uring.start_forgotten(entry) };
    }
}

impl Uring {
    /// Receives into `place` of `memory`, which comes back with how many bytes there are; 0 is the end of the stream.
    /// With `all` it waits until the place is full. The descriptor must stay open until the future is ready.
    pub fn recv<B: MemoryMut>(
        &self,
        fd: RawFd,
        memory: B,
        place: Range<usize>,
        all: bool,
    ) -> impl Future<Output = (B, io::Result<usize>)> {
        let flags = if all { libc::MSG_WAITALL } else { 0 };
        let receive = move |into: Segments| async move {
            let Flat::Contiguous { base, len, .. } = into.flat() else {
                unreachable!("memory of this process is one piece")
            };
            let entry = opcode::Recv::new(types::Fd(fd), base, len).flags(flags).build();
            // SAFETY: the memory is lent until the operation, awaited here, has completed.
            let op = unsafe { self.start(|_| entry) };
            result(op.await)
        };
        // SAFETY: the future begins the operation when it is polled, and ends with it.
        unsafe { lend(memory, place, receive) }
    }

    /// Receives into the memory that `message` describes, as much as there is; 0 is the end of the stream.
    ///
    /// # Safety
    /// `message`, its iovec table and the memory that names stay valid, and nothing else uses that memory, until the
    /// future is ready.
    pub unsafe fn recvmsg(
        &self,
        fd: RawFd,
        message: *mut libc::msghdr,
    ) -> impl Future<Output = io::Result<usize>> + use<> {
        let entry = opcode::RecvMsg::new(types::Fd(fd), message).build();
        // SAFETY: the caller vouches for the memory.
        let op = unsafe { self.start(|_| entry) };
        async move { result(op.await) }
    }

    /// Sends what `message` describes; may send less.
    ///
    /// # Safety
    /// `message`, its iovec table and the memory that names stay valid until the future is ready.
    pub unsafe fn sendmsg(
        &self,
        fd: RawFd,
        message: *const libc::msghdr,
        flags: i32,
    ) -> impl Future<Output = io::Result<usize>> + use<> {
        let flags = (flags | libc::MSG_NOSIGNAL) as u32;
        let entry = opcode::SendMsg::new(types::Fd(fd), message).flags(flags).build();
        // SAFETY: the caller vouches for the memory.
        let op = unsafe { self.start(|_| entry) };
        async move { result(op.await) }
    }

    /// Waits until `fd` is ready for `events` (`POLLIN` ...); gives the events that are.
    pub fn poll(&self, fd: RawFd, events: i16) -> impl Future<Output = io::Result<u32>> + use<> {
        let entry = opcode::PollAdd::new(types::Fd(fd), events as u32).build();
        // SAFETY: the entry refers to no memory.
        let op = unsafe { self.start(|_| entry) };
        async move { result(op.await).map(|events| events as u32) }
    }

    /// Lets the thread wake up whenever `fd` becomes readable again, from now on: one multishot operation, which
    /// need not be renewed. The stream ends, with an error, when the kernel gives up or [`PollStream::cancel`] is
    /// called; an eventfd need not be read, because every signal wakes anew.
    pub fn poll_stream(&self, fd: RawFd) -> (PollStream, impl Future<Output = io::Error> + use<>) {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        let mut name = 0;
        // SAFETY: the entry refers to no memory.
        let op = unsafe {
            self.start(|id| {
                name = id.to_u64();
                entry
            })
        };
        let ended = async move {
            match op.await {
                code if code < 0 => io::Error::from_raw_os_error(-code),
                // The last word of a stream that the kernel ended without a complaint.
                _ => io::Error::from_raw_os_error(libc::EAGAIN),
            }
        };
        (PollStream { uring: self.clone(), name }, ended)
    }

    /// Waits until the eventfd `fd` has been written to, and resets it. `value`, of 8 bytes at least, gets its count
    /// and comes back with the result.
    pub fn read_event(
        &self,
        fd: RawFd,
        value: PageBuf,
    ) -> impl Future<Output = (PageBuf, io::Result<usize>)> {
        let read = move |into: Segments| async move {
            let Flat::Contiguous { base, len, .. } = into.flat() else {
                unreachable!("memory of this process is one piece")
            };
            let entry = opcode::Read::new(types::Fd(fd), base, len).build();
            // SAFETY: the memory is lent until the operation, awaited here, has completed.
            let op = unsafe { self.start(|_| entry) };
            result(op.await)
        };
        // SAFETY: the future begins the operation when it is polled, and ends with it.
        unsafe { lend(value, 0..8, read) }
    }
}
