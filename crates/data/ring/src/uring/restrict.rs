//! What the ring of a data thread will do, and nothing else.
//!
//! What a ring is asked for is no system call, so no filter of system calls sees it: opening files, making sockets,
//! sending signals would all be possible. The ring is therefore told, before it is enabled, which operations it takes;
//! any other fails with EACCES. A new operation gets a line here.

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};

/// The operations, each with its reason.
const OPERATIONS: &[(u8, &str)] = &[
    (opcode::Nop::CODE, "measuring"),
    (opcode::Read::CODE, "images, event counters"),
    (opcode::Write::CODE, "images, event counters"),
    (opcode::ReadFixed::CODE, "images, into the pool"),
    (opcode::WriteFixed::CODE, "images, from the pool"),
    (opcode::Readv::CODE, "images, scattered"),
    (opcode::Writev::CODE, "images, scattered"),
    (opcode::Fsync::CODE, "making images durable"),
    (opcode::Fallocate::CODE, "space and holes of images"),
    (opcode::PollAdd::CODE, "kicks of a guest, sockets"),
    (opcode::PollRemove::CODE, "the same, at their end"),
    (opcode::Recv::CODE, "requests"),
    (opcode::Send::CODE, "replies"),
    (opcode::RecvMsg::CODE, "requests, scattered"),
    (opcode::SendMsg::CODE, "replies, scattered"),
    (opcode::AsyncCancel::CODE, "requests that take too long, the end"),
    (opcode::UringCmd16::CODE, "block devices of this host"),
    (opcode::Timeout::CODE, "waiting"),
    (opcode::LinkTimeout::CODE, "waiting"),
];

/// Calls on the ring itself, from `enum io_uring_register_op`.
const REGISTRATIONS: &[u8] = &[
    4,  // IORING_REGISTER_EVENTFD: sleeping, on old kernels
    5,  // IORING_UNREGISTER_EVENTFD
    12, // IORING_REGISTER_ENABLE_RINGS
    15, // IORING_REGISTER_BUFFERS2
    16, // IORING_REGISTER_BUFFERS_UPDATE
];

/// Flags of an entry that are used: the marks of a chain, and a thread for reads of files in memory.
const FLAGS: u8 = 1 << 1 /* IOSQE_IO_DRAIN */ | 1 << 2 /* IOSQE_IO_LINK */ | 1 << 4 /* IOSQE_ASYNC */;

/// Narrows a ring that was set up disabled, and enables it.
///
/// # Errors
/// The kernel does not enable it. One that knows no restrictions (older than 5.10) is used without.
pub(super) fn enable(ring: &IoUring) -> std::io::Result<()> {
    let operations = OPERATIONS.iter().map(|(code, _)| Restriction::sqe_op(*code));
    let registrations = REGISTRATIONS.iter().map(|code| Restriction::register_op(*code));
    let mut all: Vec<Restriction> =
        operations.chain(registrations).chain([Restriction::sqe_flags_allowed(FLAGS)]).collect();
    match ring.submitter().register_restrictions(&mut all) {
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
        _ => {}
    }
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_does_what_is_listed_and_nothing_else() {
        let mut ring = IoUring::builder().setup_r_disabled().build(4).expect("a ring");
        enable(&ring).expect("enabled");
        let path = c"/dev/null";
        let open = opcode::OpenAt::new(io_uring::types::Fd(libc::AT_FDCWD), path.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        let nop = opcode::Nop::new().build();
        for (entry, allowed) in [(open, false), (socket, false), (nop, true)] {
            // SAFETY: the path is static, and the other entries refer to no memory.
            unsafe { ring.submission().push(&entry) }.expect("there is room");
            ring.submit_and_wait(1).expect("submitted");
            let result = ring.completion().next().expect("an answer").result();
            assert_eq!(result, if allowed { 0 } else { -libc::EACCES });
        }
    }
}
