//! What a disk process asks of the system for itself: the background, signals, and not to be killed or blocked first
//! when memory is short.

use std::fs::{self, OpenOptions};
use std::io::{self, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use tapio_control::{ControlError, Errno, Result};

/// The exit status for an error: its number, as tap-ctl expects.
pub fn exit_code(errno: Errno) -> ExitCode {
    ExitCode::from(exit_status(errno))
}

/// The same as a number.
pub fn exit_status(errno: Errno) -> u8 {
    u8::try_from(errno.raw()).unwrap_or(1)
}

/// The child's word to the parent that waits in the foreground.
#[derive(Debug)]
pub struct Parent(PipeWriter);

/// Which side of the fork this is.
pub enum Fork {
    /// The process that was started: ends with this status.
    Foreground(i32),
    /// The process that stays.
    Background(Parent),
}

/// Goes to the background. The started process waits until the new one says how its start went, and ends with that.
/// To be called before there is a second thread.
pub fn go_to_background() -> Result<Fork> {
    let failed = |error: &io::Error| ControlError::io("going to the background", error);
    let (mut reader, writer) = io::pipe().map_err(|error| failed(&error))?;
    // SAFETY: there is only this thread, so the child may do anything.
    match unsafe { libc::fork() } {
        -1 => Err(failed(&io::Error::last_os_error())),
        0 => {
            drop(reader);
            leave_session()?;
            Ok(Fork::Background(Parent(writer)))
        }
        _ => {
            drop(writer);
            let mut status = [0];
            // The end of the pipe without a word: the child died.
            let code = match reader.read_exact(&mut status) {
                Ok(()) => i32::from(status[0]),
                Err(_) => Errno::EIO.raw(),
            };
            Ok(Fork::Foreground(code))
        }
    }
}

/// Enters a session of its own, and a working directory that no mount needs.
pub fn leave_session() -> Result<()> {
    // It fails only for the leader of a group, which has no terminal to lose.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/").map_err(|error| ControlError::io("going to the background", &error))
}

/// Nothing more will be printed.
pub fn leave_terminal() -> Result<()> {
    let failed = |error: &io::Error| ControlError::io("leaving the terminal", error);
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(|error| failed(&error))?;
    dup2_stdin(&null)
        .and_then(|()| dup2_stdout(&null))
        .and_then(|()| dup2_stderr(&null))
        .map_err(|error| failed(&error.into()))
}

impl Parent {
    /// The start went well or badly; nothing more will be printed.
    pub fn tell(mut self, status: u8) -> Result<()> {
        leave_terminal()?;
        // The parent may have been killed meanwhile, which is its own affair.
        let _ = self.0.write_all(&[status]);
        Ok(())
    }
}

/// Settings that make a difference and are no reason to fail: not every host lets a process have them. Answers what
/// was not granted.
pub fn settle_in() -> Vec<String> {
    let mut refused = Vec::new();
    // Writing back dirty pages of a guest must not wait for memory that only this process can free.
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        refused.push(format!("PR_SET_IO_FLUSHER: {}", io::Error::from(error)));
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-900") {
        refused.push(format!("oom_score_adj: {error}"));
    }
    #[cfg(target_env = "gnu")]
    // Each thread that ever allocated would keep an arena of its own; conversations are short and few.
    // SAFETY: no memory is passed.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
    for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGPIPE] {
        // SAFETY: ignoring a signal installs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    refused
}

/// A descriptor that becomes readable when the process is asked to end. To be called before there is a second thread,
/// so that all threads leave these signals to it.
pub fn termination() -> Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set that sigaddset, pthread_sigmask and signalfd then read.
    let fd = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
            -1
        } else {
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        }
    };
    if fd < 0 {
        return Err(ControlError::io("preparing for signals", &io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
