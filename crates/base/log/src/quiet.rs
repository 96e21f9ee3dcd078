//! Threads that take no signal: a signal is for the thread that waits for it.

use std::io;
use std::mem::MaybeUninit;
use std::thread;

/// Stack of a thread that passes lines on.
const STACK_LEN: usize = 256 << 10;

/// Starts a thread that has all signals blocked from its first instruction on.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written by the calls before they are read, and outlive them.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = thread::Builder::new().name(name.into()).stack_size(STACK_LEN).spawn(body);
    // SAFETY: the set was filled by the first call.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
    started.map(drop)
}
