//! Programs that the kernel runs before each system call (seccomp(2)), and the words they are made of.

use std::io;
use std::mem::offset_of;

/// A program: statements in order; jumps go forward only.
pub type Program = Vec<libc::sock_filter>;

/// The architecture whose calls are meant, by `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
pub const MACHINE: u32 = 0xc000_003e;
/// The architecture whose calls are meant, by `linux/audit.h`.
#[cfg(target_arch = "aarch64")]
pub const MACHINE: u32 = 0xc000_00b7;

/// Calls of the x32 ABI have this bit in their number.
pub const X32_BIT: u32 = 0x4000_0000;

/// Loads a word of `seccomp_data`.
pub const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
/// Ends with a verdict.
pub const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
/// Condition.
pub const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
/// Condition.
pub const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
/// Keeps some bits of what was loaded.
pub const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;

/// Lets the call happen.
pub const ALLOW: libc::sock_filter = statement(RETURN, libc::SECCOMP_RET_ALLOW);

/// One statement.
pub const fn statement(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

/// Goes on with the next statement if the condition holds, else skips `skip` statements.
pub const fn unless(code: u16, k: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: skip, k }
}

/// The verdict that the call fails.
pub const fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | (number as u32 & libc::SECCOMP_RET_DATA)
}

/// Where the low half of an argument is.
pub const fn argument(index: u8) -> u32 {
    let high_first = cfg!(target_endian = "big") as u32 * 4;
    offset_of!(libc::seccomp_data, args) as u32 + index as u32 * 8 + high_first
}

/// How a program begins: calls of another architecture end the process, and the number of the call is loaded.
pub fn beginning() -> Program {
    let mut program = vec![
        statement(LOAD, offset_of!(libc::seccomp_data, arch) as u32),
        libc::sock_filter { code: IF_EQUAL, jt: 1, jf: 0, k: MACHINE },
        statement(RETURN, libc::SECCOMP_RET_KILL_PROCESS),
        statement(LOAD, offset_of!(libc::seccomp_data, nr) as u32),
    ];
    if cfg!(target_arch = "x86_64") {
        program.extend([unless(IF_AT_LEAST, X32_BIT, 1), statement(RETURN, libc::SECCOMP_RET_KILL_PROCESS)]);
    }
    program
}

/// Puts a program before the calls of this thread and those it starts from now on, for good. Allocates nothing.
///
/// # Errors
/// The kernel has no filters, or privileges could still be gained (`PR_SET_NO_NEW_PRIVS` is missing).
pub fn install(program: &[libc::sock_filter]) -> io::Result<()> {
    let Ok(len) = u16::try_from(program.len()) else {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    };
    // The kernel only reads it, whatever the type says.
    let whole = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives across the call and has `len` statements.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const whole) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs a program as the kernel would, for tests of programs: its verdict on a call.
///
/// # Panics
/// The program has a statement that this crate does not make.
pub fn judge(program: &[libc::sock_filter], call: u32, arguments: [u64; 6]) -> u32 {
    let mut data = Vec::new();
    data.extend(call.to_ne_bytes());
    data.extend(MACHINE.to_ne_bytes());
    data.extend(0u64.to_ne_bytes());
    arguments.iter().for_each(|argument| data.extend(argument.to_ne_bytes()));
    let (mut at, mut register) = (0, 0u32);
    loop {
        let step = program[at];
        at += 1;
        let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
        match step.code {
            LOAD => {
                let place = step.k as usize;
                let mut word = [0; 4];
                word.copy_from_slice(&data[place..place + 4]);
                register = u32::from_ne_bytes(word);
            }
            RETURN => return step.k,
            IF_EQUAL => at += jump(register == step.k),
            IF_AT_LEAST => at += jump(register >= step.k),
            AND => register &= step.k,
            other => panic!("statement {other:#x}"),
        }
    }
}
