//! The list of `rules` as a seccomp filter: the program that the kernel runs before each system call.
//!
//! A call that no rule knows raises SIGSYS. The handler names the call in the log and then ends the process by that
//! signal, so that the developer learns what to add to the list; the call itself never happens. The kernel
//! remembers which calls are allowed whatever their arguments are, so that those on the path of a request cost nothing
//! more.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::sync::atomic::{AtomicI32, Ordering};

use tapio_sandbox::bpf::{self, AND, IF_EQUAL, LOAD, Program, RETURN, argument, errno, statement, unless};

use super::rules::{
    ArgumentRule, RULES, RULES_OF_DEVICES, RULES_OF_MACHINE, RULES_OF_RBD, Rule, Scope, name_of,
};

/// Where the handler writes: standard error, or a socket to the system's log.
static LOG: AtomicI32 = AtomicI32::new(libc::STDERR_FILENO);

/// What is allowed beyond the list of every process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct More {
    /// Local block devices may be attached.
    pub devices: bool,
    /// Images of Ceph may be opened.
    pub rbd: bool,
}

/// The filter for which threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    /// All of the process.
    Process(More),
    /// A data thread, on top of the process' own.
    Data(More),
}

/// What follows when the call is the rule's: always ends in a return.
fn verdict(rule: &Rule, own: u32) -> Program {
    let allow = statement(RETURN, libc::SECCOMP_RET_ALLOW);
    let one_of = |index: u8, values: &[u32], refused: i32| {
        let mut program = vec![statement(LOAD, argument(index))];
        for &value in values {
            program.extend([unless(IF_EQUAL, value, 1), allow]);
        }
        program.push(statement(RETURN, errno(refused)));
        program
    };
    match rule.arguments {
        ArgumentRule::Any => vec![allow],
        ArgumentRule::Never { errno: refused } => vec![statement(RETURN, errno(refused))],
        ArgumentRule::OneOf { index, values, errno } => one_of(index, values, errno),
        ArgumentRule::Own { index, errno } => one_of(index, &[own], errno),
        ArgumentRule::Without { index, bits, errno: refused } => vec![
            statement(LOAD, argument(index)),
            statement(AND, bits),
            unless(IF_EQUAL, 0, 1),
            allow,
            statement(RETURN, errno(refused)),
        ],
        ArgumentRule::With { index, bits, errno: refused } => vec![
            statement(LOAD, argument(index)),
            statement(AND, bits),
            unless(IF_EQUAL, bits, 1),
            allow,
            statement(RETURN, errno(refused)),
        ],
    }
}

/// The program. `own` is the number of the process.
fn program(what: For, own: u32) -> Program {
    let mut program = bpf::beginning();
    let (For::Process(more) | For::Data(more)) = what;
    let devices = if more.devices { RULES_OF_DEVICES } else { &[] };
    let rbd = if more.rbd { RULES_OF_RBD } else { &[] };
    let freer = [devices, rbd].concat();
    for (index, rule) in freer.iter().chain(RULES).chain(RULES_OF_MACHINE).enumerate() {
        let verdict = match (what, rule.scope) {
            (For::Process(_), _) => verdict(rule, own),
            // Everything else was judged by the filter of the process, which holds here too.
            (For::Data(_), Scope::Process) if index >= freer.len() => continue,
            (For::Data(_), Scope::Process) => vec![statement(RETURN, libc::SECCOMP_RET_ALLOW)],
            (For::Data(_), Scope::Control) => vec![statement(RETURN, errno(libc::EPERM))],
        };
        // The longest verdict has a few dozen statements.
        program.push(unless(IF_EQUAL, rule.call as u32, verdict.len() as u8));
        program.extend(verdict);
    }
    program.push(statement(
        RETURN,
        match what {
            For::Process(_) => libc::SECCOMP_RET_TRAP,
            For::Data(_) => libc::SECCOMP_RET_ALLOW,
        },
    ));
    program
}

/// Lets the calling thread, and those it starts from now on, make no other calls. Cannot be undone.
///
/// # Errors
/// The kernel has no filters, or privileges could still be gained (`PR_SET_NO_NEW_PRIVS` is missing).
pub fn install(what: For) -> io::Result<()> {
    bpf::install(&program(what, std::process::id()))
}

/// From now on a refused call is named on this descriptor, which stays open.
pub fn log_to(descriptor: i32) {
    LOG.store(descriptor, Ordering::Relaxed);
}

/// Names refused calls and ends the process.
///
/// # Errors
/// The kernel does not take the handler.
pub fn name_refused_calls() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = refused;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and makes only calls that are safe in a handler.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// What the kernel says about a refused call, from the beginning of siginfo_t.
#[repr(C)]
struct Refused {
    signal: i32,
    errno: i32,
    code: i32,
    _pad: i32,
    address: usize,
    call: i32,
    arch: u32,
}

const _: () = assert!(size_of::<Refused>() <= size_of::<libc::siginfo_t>());

extern "C" fn refused(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel gives a whole siginfo_t, which for this signal begins as `Refused` does.
    let call = unsafe { (*info.cast::<Refused>()).call };
    let mut line = Line::default();
    line.push(b"<11>tapio-disk: the sandbox refused system call ");
    line.push_number(call);
    line.push(b" (");
    line.push(name_of(call).as_bytes());
    line.push(b"), which this process has no reason to make: it ends. '--sandbox off' runs without\n");
    let log = LOG.load(Ordering::Relaxed);
    // The priority is for the system's log alone.
    let text = if log == libc::STDERR_FILENO { &line.bytes[4..line.len] } else { &line.bytes[..line.len] };
    // SAFETY: readable bytes of this stack; write, signal and raise may be called in a handler.
    unsafe {
        libc::write(log, text.as_ptr().cast(), text.len());
        libc::signal(libc::SIGSYS, libc::SIG_DFL);
        libc::raise(libc::SIGSYS);
    }
}

/// A line made without allocating.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 256], len: 0 }
    }
}

impl Line {
    fn push(&mut self, text: &[u8]) {
        let count = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + count].copy_from_slice(&text[..count]);
        self.len += count;
    }

    fn push_number(&mut self, number: i32) {
        let mut digits = [0u8; 10];
        let mut at = digits.len();
        let mut left = number.unsigned_abs();
        loop {
            at -= 1;
            digits[at] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if number < 0 {
            self.push(b"-");
        }
        self.push(&digits[at..]);
    }
}

#[cfg(test)]
mod tests {
    use tapio_sandbox::bpf::{X32_BIT, judge};

    use super::*;

    fn call(number: libc::c_long) -> u32 {
        number as u32
    }

    const DEVICES: More = More { devices: true, rbd: false };

    #[test]
    fn the_filter_of_the_process_allows_what_the_list_says() {
        let program = program(For::Process(More::default()), 77);
        let judged = |number, arguments| judge(&program, call(number), arguments);
        assert_eq!(judged(libc::SYS_io_uring_enter, [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_execve, [0; 6]), libc::SECCOMP_RET_TRAP);
        assert_eq!(judged(libc::SYS_mount, [0; 6]), libc::SECCOMP_RET_TRAP);
        let first = |value: i32| [value as u64, 0, 0, 0, 0, 0];
        assert_eq!(judged(libc::SYS_socket, first(libc::AF_INET6)), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_socket, first(libc::AF_PACKET)), errno(libc::EAFNOSUPPORT));
        assert_eq!(judged(libc::SYS_socket, first(libc::AF_NETLINK)), errno(libc::EAFNOSUPPORT));
        let protection = |bits: i32| [0, 0, bits as u64, 0, 0, 0];
        assert_eq!(judged(libc::SYS_mmap, protection(libc::PROT_READ)), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_mprotect, protection(libc::PROT_EXEC)), errno(libc::EACCES));
        assert_eq!(judged(libc::SYS_tgkill, first(77)), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_tgkill, first(1)), errno(libc::EPERM));
        assert_eq!(judged(libc::SYS_kill, [1, 0, 0, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_kill, [1, 9, 0, 0, 0, 0]), errno(libc::EPERM));
        assert_eq!(judged(libc::SYS_clone, first(libc::SIGCHLD)), errno(libc::EPERM));
        let thread = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND;
        assert_eq!(judged(libc::SYS_clone, first(thread)), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judged(libc::SYS_clone3, [0; 6]), errno(libc::ENOSYS));
        assert_eq!(judge(&program, X32_BIT | 1, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn a_data_thread_makes_no_rings_or_listeners() {
        let program = program(For::Data(More::default()), 77);
        for number in [libc::SYS_io_uring_setup, libc::SYS_accept4, libc::SYS_bind, libc::SYS_umask] {
            assert_eq!(judge(&program, call(number), [0; 6]), errno(libc::EPERM));
        }
        assert_eq!(judge(&program, call(libc::SYS_openat), [0; 6]), libc::SECCOMP_RET_ALLOW);
    }

    #[test]
    fn devices_are_a_switch() {
        let data = program(For::Data(DEVICES), 77);
        assert_eq!(judge(&data, call(libc::SYS_io_uring_setup), [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judge(&data, call(libc::SYS_bind), [0; 6]), errno(libc::EPERM));
        let program = program(For::Process(DEVICES), 77);
        assert_eq!(judge(&program, call(libc::SYS_mount), [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judge(&program, call(libc::SYS_ioctl), [0, 0x4c82, 0, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
    }

    #[test]
    fn images_of_ceph_are_a_switch() {
        let rbd = More { devices: false, rbd: true };
        let data = program(For::Data(rbd), 77);
        assert_eq!(judge(&data, call(libc::SYS_pipe2), [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(judge(&data, call(libc::SYS_bind), [0; 6]), errno(libc::EPERM));
        let process = program(For::Process(rbd), 77);
        let executable = [0, 0, libc::PROT_EXEC as u64, 0, 0, 0];
        assert_eq!(judge(&process, call(libc::SYS_mmap), executable), errno(libc::EACCES));
        assert_eq!(judge(&process, call(libc::SYS_execve), [0; 6]), libc::SECCOMP_RET_TRAP);
    }

    #[test]
    fn lines_are_made_without_allocating() {
        let mut line = Line::default();
        for number in [0, -1, 59, i32::MAX, i32::MIN] {
            line.push_number(number);
            line.push(b" ");
        }
        assert_eq!(&line.bytes[..line.len], b"0 -1 59 2147483647 -2147483648 ");
        line.push(&[b'x'; 400]);
        assert_eq!(line.len, line.bytes.len());
    }
}
