//! System calls, by the kernel's own numbers. Errors are error numbers.

use core::arch::asm;

/// Numbers, from the kernel's `unistd.h`.
#[cfg(target_arch = "x86_64")]
mod number {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const IOCTL: usize = 16;
    pub const NANOSLEEP: usize = 35;
    pub const CLONE: usize = 56;
    pub const EXECVE: usize = 59;
    pub const EXIT: usize = 60;
    pub const GETDENTS64: usize = 217;
    pub const OPENAT: usize = 257;
    pub const FACCESSAT: usize = 269;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub const FACCESSAT: usize = 48;
    pub const OPENAT: usize = 56;
    pub const CLOSE: usize = 57;
    pub const GETDENTS64: usize = 61;
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const EXIT: usize = 93;
    pub const IOCTL: usize = 29;
    pub const NANOSLEEP: usize = 101;
    pub const CLONE: usize = 220;
    pub const EXECVE: usize = 221;
}

/// Names are relative to the working directory.
const AT_FDCWD: usize = -100_isize as usize;
/// The child's end is told by this.
const SIGCHLD: usize = 17;

/// How a file is opened.
pub const READ_ONLY: usize = 0;
pub const WRITE_ONLY: usize = 1;
pub const READ_WRITE: usize = 2;
pub const EXCLUSIVE: usize = 0o200;
pub const NO_TERMINAL: usize = 0o400;

/// The file is in use.
pub const EBUSY: usize = 16;

/// Reads partitions anew; refused while one is open (`linux/fs.h`).
pub const BLKRRPART: usize = 0x125f;
const TCGETS: usize = 0x5401;
const TCSETS: usize = 0x5402;

/// Makes a call.
///
/// # Safety
/// What the call does with its arguments must be sound.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> Result<usize, usize> {
    let result: isize;
    // SAFETY: the registers are those of the kernel's convention, which clobbers two more.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    usize::try_from(result).map_err(|_| result.unsigned_abs())
}

/// Makes a call.
///
/// # Safety
/// What the call does with its arguments must be sound.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> Result<usize, usize> {
    let result: isize;
    // SAFETY: the registers are those of the kernel's convention.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c, in("x3") d,
            in("x4") e, options(nostack));
    }
    usize::try_from(result).map_err(|_| result.unsigned_abs())
}

/// An open file; closed with this value.
#[derive(Debug)]
pub struct File(usize);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this file's own, and nothing uses it any more.
        let _ = unsafe { call(number::CLOSE, self.0, 0, 0, 0, 0) };
    }
}

impl File {
    /// Opens a file whose name ends with NUL.
    pub fn open(name: &[u8], how: usize) -> Result<Self, usize> {
        assert!(name.last() == Some(&0), "a name ends with NUL");
        // SAFETY: the name ends with NUL.
        unsafe { call(number::OPENAT, AT_FDCWD, name.as_ptr() as usize, how, 0, 0) }.map(Self)
    }

    /// Reads some bytes; 0 at the end.
    pub fn read(&self, into: &mut [u8]) -> Result<usize, usize> {
        // SAFETY: the buffer is as long as the kernel is told.
        unsafe { call(number::READ, self.0, into.as_mut_ptr() as usize, into.len(), 0, 0) }
    }

    /// Writes all of it.
    pub fn write(&self, mut bytes: &[u8]) -> Result<(), usize> {
        while !bytes.is_empty() {
            // SAFETY: the bytes are as many as the kernel is told.
            let written = unsafe { call(number::WRITE, self.0, bytes.as_ptr() as usize, bytes.len(), 0, 0) }?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// The next names of a directory, in the kernel's form; 0 bytes at the end.
    pub fn entries(&self, into: &mut [u8]) -> Result<usize, usize> {
        // SAFETY: the buffer is as long as the kernel is told.
        unsafe { call(number::GETDENTS64, self.0, into.as_mut_ptr() as usize, into.len(), 0, 0) }
    }

    /// A request of a device that takes nothing.
    pub fn request(&self, what: usize) -> Result<(), usize> {
        // SAFETY: the requests that are asked for here take no argument.
        unsafe { call(number::IOCTL, self.0, what, 0, 0, 0) }.map(drop)
    }

    /// A request of a file system that takes and fills three numbers.
    pub fn request_with(&self, what: usize, numbers: &mut [u64; 3]) -> Result<(), usize> {
        // SAFETY: the one request that is asked for here takes a structure of three such numbers.
        unsafe { call(number::IOCTL, self.0, what, numbers.as_mut_ptr() as usize, 0, 0) }.map(drop)
    }

    /// A serial line gives and takes bytes as they are: no echo, no lines, no keys.
    pub fn make_raw(&self) -> Result<(), usize> {
        let mut line = Line { modes: [0; 4], _discipline: 0, control: [0; 19] };
        // SAFETY: the kernel fills its own structure, which `Line` is.
        unsafe { call(number::IOCTL, self.0, TCGETS, (&raw mut line) as usize, 0, 0) }?;
        let [input, output, _, local] = &mut line.modes;
        (*input, *local) = (0, 0);
        // OPOST
        *output &= !1;
        // A read waits for one byte (VMIN), and not for a time (VTIME).
        (line.control[6], line.control[5]) = (1, 0);
        // SAFETY: as above; the kernel reads it.
        unsafe { call(number::IOCTL, self.0, TCSETS, (&raw const line) as usize, 0, 0) }.map(drop)
    }
}

/// `struct termios` of the kernel: modes of input, output, control and what is local.
#[repr(C)]
struct Line {
    modes: [u32; 4],
    _discipline: u8,
    control: [u8; 19],
}

/// Whether there is a file of this name, which ends with NUL.
pub fn exists(name: &[u8]) -> bool {
    assert!(name.last() == Some(&0), "a name ends with NUL");
    // SAFETY: the name ends with NUL.
    unsafe { call(number::FACCESSAT, AT_FDCWD, name.as_ptr() as usize, 0, 0, 0) }.is_ok()
}

/// Waits.
pub fn sleep(milliseconds: u32) {
    let time = [i64::from(milliseconds / 1000), i64::from(milliseconds % 1000) * 1_000_000];
    // SAFETY: a `struct timespec` is two such numbers; nothing is written.
    let _ = unsafe { call(number::NANOSLEEP, time.as_ptr() as usize, 0, 0, 0, 0) };
}

/// Starts a program without waiting for its end; each word ends with NUL, the first is the program.
pub fn start(words: [&[u8]; 4]) -> Result<(), usize> {
    assert!(words.iter().all(|word| word.last() == Some(&0)), "words end with NUL");
    let arguments = [
        words[0].as_ptr() as usize,
        words[1].as_ptr() as usize,
        words[2].as_ptr() as usize,
        words[3].as_ptr() as usize,
        0,
    ];
    let environment = [c"PATH=/bin".as_ptr() as usize, 0];
    // SAFETY: a copy of this process, which has one thread: it goes on with a stack of its own.
    if unsafe { call(number::CLONE, SIGCHLD, 0, 0, 0, 0) }? == 0 {
        // SAFETY: both lists end with 0 and their texts with NUL.
        let _ = unsafe {
            call(
                number::EXECVE,
                arguments[0],
                arguments.as_ptr() as usize,
                environment.as_ptr() as usize,
                0,
                0,
            )
        };
        exit(127);
    }
    Ok(())
}

/// Ends.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: nothing is passed but a number.
        let _ = unsafe { call(number::EXIT, status as usize, 0, 0, 0, 0) };
    }
}
