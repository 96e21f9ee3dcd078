//! Sockets, event counters and polls on the ring of a data thread.

use std::future::Future;
use std::io;
use std::os::fd::RawFd;

use io_uring::{opcode, types};

use super::Uring;
use crate::segments::{Flat, Segments};

fn result(code: i32) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

/// The value that wakes whoever reads an eventfd.
static ONE: u64 = 1;

impl Uring {
    /// Receives up to `into.len()` bytes; 0 is the end of the stream. With `all` it waits until the memory is full.
    ///
    /// The descriptor must stay open, and the memory valid, until the future is ready. `into` is contiguous.
    pub fn recv(
        &self,
        fd: RawFd,
        into: Segments,
        all: bool,
    ) -> impl Future<Output = io::Result<usize>> + use<> {
        let Flat::Contiguous { base, len, .. } = into.flat() else {
            unreachable!("receiving into scattered memory")
        };
        let flags = if all { libc::MSG_WAITALL } else { 0 };
        let entry = opcode::Recv::new(types::Fd(fd), base, len).flags(flags).build();
        // SAFETY: the maker of `into` promised that its memory stays valid until the operation has completed.
        let op = unsafe { self.start(|_| entry) };
        async move { result(op.await) }
    }

    /// Receives into the memory that `message` describes, as much as there is; 0 is the end of the stream.
    ///
    /// # Safety
    /// `message`, its iovec table and the memory that names stay valid, and nobody else uses that memory, until the
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

    /// Sends contiguous memory; may send less. The memory must stay valid until the future is ready.
    pub fn send(
        &self,
        fd: RawFd,
        from: Segments,
        flags: i32,
    ) -> impl Future<Output = io::Result<usize>> + use<> {
        let Flat::Contiguous { base, len, .. } = from.flat() else {
            unreachable!("sending from scattered memory")
        };
        let entry = opcode::Send::new(types::Fd(fd), base, len).flags(flags | libc::MSG_NOSIGNAL).build();
        // SAFETY: the maker of `from` promised that its memory stays valid until the operation has completed.
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

    /// Waits until the eventfd `fd` has been written to, and resets it. `value` must stay valid until then.
    pub fn read_event(
        &self,
        fd: RawFd,
        value: &mut Box<u64>,
    ) -> impl Future<Output = io::Result<usize>> + use<> {
        let entry = opcode::Read::new(types::Fd(fd), (&raw mut **value).cast(), 8).build();
        // SAFETY: the box is owned by the caller, who awaits the operation before dropping it.
        let op = unsafe { self.start(|_| entry) };
        async move { result(op.await) }
    }

    /// Writes 1 to the eventfd `fd`, together with the turn's batch: no system call of its own.
    pub fn signal_event(&self, fd: RawFd) {
        let entry = opcode::Write::new(types::Fd(fd), (&raw const ONE).cast(), 8).build();
        // SAFETY: the value is static; the descriptor is resolved when the batch goes to the kernel, and one that
        // was closed by then is an error nobody needs to hear of.
        unsafe { self.start_forgotten(entry) };
    }
}
