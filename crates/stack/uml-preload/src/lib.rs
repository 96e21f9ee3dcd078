//! A `ptrace` for User-mode Linux, put before libc's by `LD_PRELOAD`.
//!
//! User-mode Linux keeps each guest process's vector registers in a buffer of 2696 bytes, which was the whole state
//! (x87 to AVX-512 and PKRU) when it was built. The host takes a new state only as a whole area: where the processor
//! also has AMX that is 11008 bytes, so the host answers `EFAULT` and the guest's first program dies with
//! "ptrace set fp regs failed, errno = 14". Reading is not affected: the host hands out as much as is asked for.
//!
//! Here, a state that is too short is copied into an area of the host's size before it goes to the host. The rest,
//! AMX tiles, stays zero and is marked as unused; guest programs cannot have any, because using them needs a
//! permission that the guest's kernel does not give. On other processors calls pass through unchanged.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `NT_X86_XSTATE` of elf.h.
const NT_X86_XSTATE: usize = 0x202;

/// More than any processor's state today (11008 bytes with AMX).
const AREA_LEN_MAX: usize = 32 << 10;

/// Offset of `XSTATE_BV` in the area: which parts are in use. Intel SDM volume 1, section 13.4.2.
const XSTATE_BV: usize = 512;

/// Length of the legacy part and the header, which every area has.
const HEADER_END: usize = 576;

/// Bits of XSTATE_BV for AMX: tile configuration and tile data.
const XSTATE_BV_AMX: u64 = 0b11 << 17;

/// PTRACE_PEEKTEXT to PTRACE_PEEKUSER: the kernel stores the word, libc returns it.
const PEEKS: std::ops::RangeInclusive<c_int> = 1..=3;

/// The host's area length, 0 until it is known.
static AREA_LEN: AtomicUsize = AtomicUsize::new(0);

/// Where an area is put together. Static because User-mode Linux calls this on stacks of 16 KiB.
struct Area(std::cell::UnsafeCell<[u8; AREA_LEN_MAX]>);

// SAFETY: User-mode Linux makes its ptrace calls from one thread, and its signal handlers make none.
unsafe impl Sync for Area {}

static AREA: Area = Area(std::cell::UnsafeCell::new([0; AREA_LEN_MAX]));

/// The system call. Sets `errno` and gives -1 on failure.
unsafe fn host(request: c_int, pid: libc::pid_t, addr: usize, data: *mut c_void) -> c_long {
    // SAFETY: the caller vouches for `data` as far as the request uses it.
    unsafe { libc::syscall(libc::SYS_ptrace, c_long::from(request), c_long::from(pid), addr, data) }
}

/// The length of the host's area for `pid`, asked once; it is the same for every process. 0 if there is none.
unsafe fn area_len(pid: libc::pid_t) -> usize {
    let known = AREA_LEN.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut whole = libc::iovec { iov_base: AREA.0.get().cast(), iov_len: AREA_LEN_MAX };
    // SAFETY: the vector describes AREA, which is that long and used by this thread only.
    let result =
        unsafe { host(libc::PTRACE_GETREGSET as c_int, pid, NT_X86_XSTATE, (&raw mut whole).cast()) };
    if result != 0 {
        return 0;
    }
    AREA_LEN.store(whole.iov_len, Ordering::Relaxed);
    whole.iov_len
}

/// ptrace(2) as libc declares it; its variable arguments are always these three.
///
/// # Safety
/// As for ptrace(2): `data` must suit the request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(
    request: c_int,
    pid: libc::pid_t,
    addr: *mut c_void,
    data: *mut c_void,
) -> c_long {
    let at = addr as usize;
    if PEEKS.contains(&request) {
        let mut word: c_long = 0;
        // SAFETY: the kernel writes one word through the pointer.
        let result = unsafe { host(request, pid, at, (&raw mut word).cast()) };
        if result < 0 {
            return result;
        }
        // SAFETY: errno is this thread's own. A caller tells a word of -1 from a failure by it.
        unsafe { *libc::__errno_location() = 0 };
        return word;
    }
    if request == libc::PTRACE_SETREGSET as c_int && at == NT_X86_XSTATE && !data.is_null() {
        // SAFETY: for this request `data` points to an iovec, by the caller's contract.
        let given = unsafe { &*data.cast::<libc::iovec>() };
        // SAFETY: no pointers of the caller are involved.
        let len = unsafe { area_len(pid) };
        if given.iov_len >= HEADER_END && given.iov_len < len {
            // SAFETY: the caller's contract covers the iovec's bytes; AREA is used by this thread only, and
            // `given.iov_len < len <= AREA_LEN_MAX` because the kernel filled no more than it was offered.
            return unsafe { set_padded(pid, given, len) };
        }
    }
    // SAFETY: handed on as it came.
    unsafe { host(request, pid, at, data) }
}

/// Sets the state from an area that ends early.
unsafe fn set_padded(pid: libc::pid_t, given: &libc::iovec, len: usize) -> c_long {
    // SAFETY: see the caller; the bytes cannot overlap since AREA is private to this library.
    let area = unsafe {
        let area = &mut *AREA.0.get();
        std::ptr::copy_nonoverlapping(given.iov_base.cast::<u8>(), area.as_mut_ptr(), given.iov_len);
        area
    };
    area[given.iov_len..len].fill(0);
    let mut in_use = [0; 8];
    in_use.copy_from_slice(&area[XSTATE_BV..XSTATE_BV + 8]);
    let in_use = u64::from_ne_bytes(in_use) & !XSTATE_BV_AMX;
    area[XSTATE_BV..XSTATE_BV + 8].copy_from_slice(&in_use.to_ne_bytes());
    let mut whole = libc::iovec { iov_base: area.as_mut_ptr().cast(), iov_len: len };
    // SAFETY: the vector describes `area`, which outlives the call.
    unsafe { host(libc::PTRACE_SETREGSET as c_int, pid, NT_X86_XSTATE, (&raw mut whole).cast()) }
}
