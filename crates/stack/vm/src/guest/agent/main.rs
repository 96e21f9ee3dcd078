//! The agent in a guest: a program of some kilobytes without any library, because in a guest of User-mode Linux each
//! system call costs what a hundred cost elsewhere. `build.rs` makes it and puts it into the daemon.
//!
//! `agent TTY` answers on a serial line, as `serve` says, for ever.

#![no_std]
#![no_main]

mod facts;
mod files;
mod serve;
mod sys;
mod text;

use core::arch::global_asm;
use core::panic::PanicInfo;

// The kernel starts a program with the stack pointer at the number of its arguments, which are pointers behind it.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "ud2",
    begin = sym begin,
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".globl _start",
    "_start:",
    "mov x29, xzr",
    "mov x30, xzr",
    "mov x0, sp",
    "and sp, x0, #-16",
    "bl {begin}",
    "brk #1",
    begin = sym begin,
);

extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the kernel put the number of arguments there, and so many pointers to texts that end with NUL after it.
    let line = unsafe { if stack.read() == 2 { Some(stack.add(2).read() as *const u8) } else { None } };
    let is_answered = line.is_some_and(|line| {
        // SAFETY: as above.
        let line = unsafe { core::ffi::CStr::from_ptr(line.cast()) };
        serve::serve(line.to_bytes_with_nul())
    });
    sys::exit(i32::from(!is_answered))
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    sys::exit(101)
}

/// What the compiler calls for copies, and libraries usually have.
///
/// # Safety
/// `len` bytes can be read at `from` and written at `to`, and they do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    for at in 0..len {
        // SAFETY: within what the caller guarantees. Volatile, or this loop would become a call of itself.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

/// The same where they may overlap.
///
/// # Safety
/// `len` bytes can be read at `from` and written at `to`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if to.addr() <= from.addr() {
        // SAFETY: forwards, each byte is read before its place is written.
        return unsafe { memcpy(to, from, len) };
    }
    for at in (0..len).rev() {
        // SAFETY: within what the caller guarantees; backwards, each byte is read before its place is written.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

/// Fills.
///
/// # Safety
/// `len` bytes can be written at `to`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8 {
    for at in 0..len {
        // SAFETY: within what the caller guarantees.
        unsafe { to.add(at).write_volatile(value as u8) };
    }
    to
}

/// Compares.
///
/// # Safety
/// `len` bytes can be read at both.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, len: usize) -> i32 {
    for at in 0..len {
        // SAFETY: within what the caller guarantees.
        let (a, b) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// Counts the bytes before the first that is 0.
///
/// # Safety
/// There is one.
#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut len = 0;
    // SAFETY: no byte after the first that is 0 is read.
    while unsafe { text.add(len).read_volatile() } != 0 {
        len += 1;
    }
    len
}

/// Compares.
///
/// # Safety
/// `len` bytes can be read at both.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, len: usize) -> i32 {
    // SAFETY: as the caller guarantees.
    unsafe { memcmp(one, other, len) }
}
