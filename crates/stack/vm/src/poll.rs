//! poll(2) with an end.

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

/// Milliseconds until then for poll(2), at least one before it.
pub(crate) fn poll_ms(until: Instant) -> libc::c_int {
    let left = until.saturating_duration_since(Instant::now());
    let ms = left.as_micros().div_ceil(1000);
    libc::c_int::try_from(ms).unwrap_or(libc::c_int::MAX)
}

/// Waits until one of the descriptors is ready, or `until`; a signal is no reason to return. Fills in `revents`.
pub(crate) fn poll(fds: &mut [libc::pollfd], until: Instant) -> bool {
    loop {
        let len = libc::nfds_t::try_from(fds.len()).unwrap_or(0);
        // SAFETY: the slice is valid for `len` records while the call lasts.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), len, poll_ms(until)) };
        if ready >= 0 {
            return ready > 0;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

/// A record for [`poll`].
pub(crate) fn polled(fd: RawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}
