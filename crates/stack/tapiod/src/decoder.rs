//! This program as a decoder of compressed archives: what clients send goes through decoders that are not ours, in a
//! process that holds nothing but the stream.
//!
//! Standard input is the client's stream, standard output a socket to the daemon ([`tapio_xva::decode`]). A decoder has
//! bounded memory, no privileges, and a list of system calls with which it can read, write, take memory and end; any
//! other call ends it. It opens no file and starts no process. Its daemon takes its end for an error of the archive.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, setrlimit};
use tapio_core::vms::Program;
use tapio_sandbox::bpf::{self, ALLOW, IF_EQUAL, RETURN, statement, unless};
use tapio_sandbox::capability;

/// The first argument of a decoder. It is no command for people, so no help has it.
const COMMAND: &str = "archive-decoder";

/// Bytes of address space, of which a window of zstd takes 8 MiB and the program itself most of the rest.
const MEMORY_MAX: u64 = 512 << 20;

/// What a decoder may do, each with its reason.
const CALLS: &[(libc::c_long, &str)] = &[
    (libc::SYS_read, "the stream"),
    (libc::SYS_write, "what was decompressed; the text of a panic"),
    (libc::SYS_writev, "the text of a panic"),
    (libc::SYS_mmap, "memory"),
    (libc::SYS_munmap, "memory"),
    (libc::SYS_mremap, "memory"),
    (libc::SYS_brk, "memory"),
    (libc::SYS_madvise, "memory"),
    (libc::SYS_mprotect, "memory of the allocator"),
    (libc::SYS_futex, "locks"),
    (libc::SYS_getrandom, "seeds of tables and of the allocator"),
    (libc::SYS_sigaltstack, "the stack of a handler"),
    (libc::SYS_rt_sigaction, "an abort"),
    (libc::SYS_rt_sigprocmask, "an abort"),
    (libc::SYS_rt_sigreturn, "the end of a handler"),
    (libc::SYS_gettid, "an abort"),
    (libc::SYS_getpid, "an abort"),
    (libc::SYS_tgkill, "an abort"),
    (libc::SYS_restart_syscall, "a call that was interrupted"),
    (libc::SYS_exit, "the end"),
    (libc::SYS_exit_group, "the end"),
];

/// The program that decompresses: the very file that runs, so both sides speak one language.
pub fn program() -> Program {
    Program { path: PathBuf::from("/proc/self/exe"), arguments: vec![COMMAND.into()] }
}

/// Runs as a decoder until the stream ends; returns where the arguments are not those of one.
pub fn run_if_asked() {
    if std::env::args_os().nth(1).is_none_or(|first| first != COMMAND) {
        return;
    }
    let done = run();
    if let Err(why) = &done {
        let _ = writeln!(io::stderr(), "tapiod {COMMAND}: {why}");
    }
    // SAFETY: it never returns; nothing of this process is left to be done.
    unsafe { libc::_exit(i32::from(done.is_err())) }
}

fn run() -> io::Result<()> {
    // Never closed but by the end of the process: nothing is called here that is not needed.
    let client: &Patient = Box::leak(Box::new(Patient(io::stdin().as_fd().try_clone_to_owned()?.into())));
    let daemon: &Patient = Box::leak(Box::new(Patient(io::stdout().as_fd().try_clone_to_owned()?.into())));
    confine()?;
    tapio_xva::decode(client, daemon)
}

/// Gives up all but what [`CALLS`] names.
fn confine() -> io::Result<()> {
    for (what, most) in [(Resource::As, MEMORY_MAX), (Resource::Core, 0), (Resource::Fsize, 0)] {
        setrlimit(what, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    capability::set(0)?;
    capability::no_new_privileges()?;
    bpf::install(&filter())
}

fn filter() -> bpf::Program {
    let mut program = bpf::beginning();
    for (call, _) in CALLS {
        program.extend([unless(IF_EQUAL, *call as u32, 1), ALLOW]);
    }
    program.push(statement(RETURN, libc::SECCOMP_RET_KILL_PROCESS));
    program
}

/// A socket whose owner limits how long a call on it waits: the daemon ends this process when it has waited enough.
struct Patient(File);

impl Patient {
    fn wait(&self, mut attempt: impl FnMut(&File) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match attempt(&self.0) {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                done => return done,
            }
        }
    }
}

impl Read for &Patient {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.wait(|mut file| file.read(into)) {
            // The server has let go of a client that was lost.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(0),
            read => read,
        }
    }
}

impl Write for &Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tapio_sandbox::bpf::judge;

    use super::*;

    #[test]
    fn a_decoder_opens_nothing_and_starts_nothing() {
        let filter = filter();
        let verdict = |call: libc::c_long| judge(&filter, call as u32, [0; 6]);
        for (call, why) in CALLS {
            assert_eq!(verdict(*call), libc::SECCOMP_RET_ALLOW, "{why}");
        }
        for call in [
            libc::SYS_openat,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_execve,
            libc::SYS_clone,
            libc::SYS_kill,
            libc::SYS_ptrace,
            libc::SYS_recvmsg,
            libc::SYS_io_uring_setup,
        ] {
            assert_eq!(verdict(call), libc::SECCOMP_RET_KILL_PROCESS, "{call}");
        }
    }
}
