//! What the process may not do, even when an attacker has taken it over.
//!
//! A disk process reads what guests, clients and images say. If one of them finds an error in it, the host shall lose
//! that disk and nothing else. Before anything of theirs is read, the process gives up, in this order and for good:
//!
//! 1. privileges (`privileges`): capabilities but three, groups, the way back to more of them; with `--user` all;
//! 2. files (`files`): executing anything, writing to the system's own directories; with `--allow` all but some;
//! 3. system calls (`filter`, by the list in `rules`): all that the process has no reason to make.
//!
//! Data threads, which meet guests and clients, give up more: sockets that listen, new rings. Their
//! ring itself takes only the operations of the data path (`tapio_ring::uring`), because what a ring does is no system
//! call.

mod files;
mod filter;
mod privileges;
mod rules;

use std::fmt::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use tapio_control::{ControlError, Errno, Result};

use crate::log;

pub use files::Own;
use filter::More;
use privileges::user;
use rules::{ArgumentRule, RULES, RULES_OF_DEVICES, RULES_OF_MACHINE, RULES_OF_RBD, Scope};

/// How narrow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sandbox {
    /// Not at all: for debugging.
    pub is_off: bool,
    /// The user that it becomes.
    pub user: Option<String>,
    /// Directories of images; none: all but the system's.
    pub allowed: Vec<PathBuf>,
    /// Local block devices may be attached.
    pub devices: bool,
    /// Images of Ceph may be opened.
    pub rbd: bool,
}

/// Whether data threads restrict themselves.
static ON: AtomicBool = AtomicBool::new(false);
/// Whether these may serve local block devices.
static DEVICES: AtomicBool = AtomicBool::new(false);

/// Whether librbd was opened before, and its threads may do what it needs.
static RBD: AtomicBool = AtomicBool::new(false);

/// Gives up what [`Sandbox`] says. To be called before there is a second thread, and before anything of a guest's is
/// read.
///
/// # Errors
/// The host does not allow a step: the process must end, and not go on with half of it.
pub fn enter(sandbox: &Sandbox, own: &Own) -> Result<()> {
    if sandbox.rbd {
        // Its code cannot be brought into memory afterwards. Nothing of it runs yet.
        tapio_rbd::library::library()
            .map_err(|error| ControlError::new(Errno::new(error.errno()), error.to_string()))?;
    }
    if sandbox.is_off {
        if sandbox.user.is_some() || !sandbox.allowed.is_empty() {
            log::line("--user and --allow mean nothing with '--sandbox off'");
        }
        return Ok(());
    }
    if sandbox.devices && (sandbox.user.is_some() || !sandbox.allowed.is_empty()) {
        return Err(ControlError::new(
            Errno::EINVAL,
            "--devices does not go with --user and --allow: the kernel lets neither mount anything",
        )
        .next("serve the device from another process"));
    }
    let user = sandbox.user.as_deref().map(user).transpose()?;
    privileges::give_up(user, sandbox.devices)?;
    // A process that Landlock restricts in any way cannot mount.
    if !sandbox.devices && !files::restrict(own, &sandbox.allowed)? {
        log::line("this kernel has no Landlock: permissions alone say which files the process may touch");
    }
    let failed = |error| {
        ControlError::io("installing the filter of system calls", &error)
            .next("start it with '--sandbox off' where the kernel has no seccomp")
    };
    filter::name_refused_calls().map_err(failed)?;
    let more = More { devices: sandbox.devices, rbd: sandbox.rbd };
    filter::install(filter::For::Process(more)).map_err(failed)?;
    if !sandbox.rbd {
        tapio_rbd::library::forbid(
            "this process has given up what opening an image of Ceph takes: start it with --rbd, or 'tap-ctl create' with \
             TAPIO_RBD=1 in its environment; 'tapio disk restart' with that replaces a process that runs",
        );
    }
    DEVICES.store(sandbox.devices, Ordering::Relaxed);
    RBD.store(sandbox.rbd, Ordering::Relaxed);
    ON.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether this process may attach local block devices.
///
/// # Errors
/// `EPERM` where it has given up what that takes.
pub fn check_devices() -> Result<()> {
    if !ON.load(Ordering::Relaxed) || DEVICES.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(ControlError::new(Errno::EPERM, "this process has given up what attaching a block device takes").next(
        "start it with --devices, or 'tap-ctl create' with TAPIO_DEVICES=1 in its environment; 'tapio disk restart' \
         with that replaces a process that runs",
    ))
}

/// What the filter allows beyond the list of every process.
fn more() -> More {
    More { devices: DEVICES.load(Ordering::Relaxed), rbd: RBD.load(Ordering::Relaxed) }
}

/// Narrows a data thread further; called on it, once its ring is there.
pub fn enter_data_thread() {
    if ON.load(Ordering::Relaxed)
        && let Err(error) = filter::install(filter::For::Data(more()))
    {
        // The filter of the process holds all the same.
        log::line(&format!("a data thread has no filter of its own: {error}"));
    }
}

/// The system calls that are allowed, one a line, each with its reason.
pub fn describe() -> String {
    let mut text = String::from("System calls of the process; any other ends it.\n\n");
    let lists = [
        (RULES, ""),
        (RULES_OF_MACHINE, ""),
        (RULES_OF_DEVICES, "; with --devices"),
        (RULES_OF_RBD, "; with --rbd"),
    ];
    for (rules, note) in lists {
        for rule in rules {
            let scope = match rule.scope {
                Scope::Process => "",
                Scope::Control => "; not on data threads",
            };
            let arguments = match rule.arguments {
                ArgumentRule::Any => "",
                ArgumentRule::Never { .. } => "; fails",
                _ => "; some arguments only",
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:<20} {}{arguments}{scope}{note}", rule.name, rule.why);
        }
    }
    text
}

/// Messages go to the system's log from now on, also those about refused calls.
pub fn use_syslog() {
    let connected = UnixDatagram::unbound().and_then(|socket| {
        socket.connect("/dev/log")?;
        Ok(socket)
    });
    if let Ok(socket) = connected {
        filter::log_to(socket.as_raw_fd());
        // Open as long as the process lives.
        std::mem::forget(socket);
    }
}

#[cfg(test)]
mod tests;
