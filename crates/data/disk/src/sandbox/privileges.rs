//! What the process may do as root, cut down to what it needs; or another user altogether.

use std::ffi::{CStr, CString};
use std::io;

use tapio_control::{ControlError, Errno, Result};
use tapio_sandbox::capability;
use tapio_sys::process::is_root;

/// Numbers of capabilities, from `linux/capability.h`.
mod number {
    /// Files whatever their permissions say: images belong to any user.
    pub const DAC_OVERRIDE: u32 = 1;
    /// Low TCP ports.
    pub const NET_BIND_SERVICE: u32 = 10;
    /// Memory that the ring has registered does not count against a limit meant for users.
    pub const IPC_LOCK: u32 = 14;
    /// Mounts and block devices.
    pub const SYS_ADMIN: u32 = 21;
}

const KEPT: &[u32] = &[number::DAC_OVERRIDE, number::NET_BIND_SERVICE, number::IPC_LOCK];
const KEPT_FOR_DEVICES: &[u32] = &[number::SYS_ADMIN];
/// A user to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Number of the primary group.
    pub gid: u32,
}

/// The user of this name or number.
///
/// # Errors
/// `ENOENT` when there is none.
pub fn user(name: &str) -> Result<User> {
    let unknown = || {
        ControlError::new(Errno::ENOENT, format!("there is no user '{name}'"))
            .next("make one with 'useradd --system', or give a number")
    };
    if let Ok(uid) = name.parse() {
        return Ok(User { uid, gid: uid });
    }
    let c_name = CString::new(name).map_err(|_| unknown())?;
    lookup(&c_name).ok_or_else(unknown)
}

fn lookup(name: &CStr) -> Option<User> {
    // SAFETY: the name ends with NUL; there is only this thread, so no other thread uses the library's own buffer.
    let entry = unsafe { libc::getpwnam(name.as_ptr()) };
    if entry.is_null() {
        return None;
    }
    // SAFETY: the library gave an entry, which stays until it is asked again.
    let entry = unsafe { &*entry };
    Some(User { uid: entry.pw_uid, gid: entry.pw_gid })
}

fn failed<'a>(what: &'a str) -> impl FnOnce(io::Error) -> ControlError + use<'a> {
    move |error| {
        ControlError::io(format_args!("giving up privileges: {what}"), &error)
            .next("start it with '--sandbox off' where the host does not allow this")
    }
}

/// Gives up what is not needed, for good: this thread and all it starts can never have it again. To be called before
/// there is a second thread.
///
/// # Errors
/// The kernel refuses a step.
pub fn give_up(become_user: Option<User>, devices: bool) -> Result<()> {
    if !is_root() {
        if let Some(user) = become_user {
            return Err(ControlError::new(Errno::EPERM, format!("only root can become user {}", user.uid))
                .next("start it as that user, without --user"));
        }
        return no_new_privileges();
    }
    let kept: u64 = match become_user {
        // A user's rights are the user's.
        Some(_) => 0,
        None => {
            let extra = if devices { KEPT_FOR_DEVICES } else { &[] };
            KEPT.iter().chain(extra).map(|number| 1 << number).sum()
        }
    };
    // What may not be had is no loss: in a container the set is small from the start.
    let kept = kept & capability::permitted().map_err(failed("reading capabilities"))?;
    capability::bound(kept).map_err(failed("the bounding set"))?;
    let groups = capability::set_groups(&[]);
    match become_user {
        Some(user) => {
            groups.map_err(failed("the groups"))?;
            capability::become_user(user.uid, user.gid).map_err(failed("the user"))?;
        }
        None => {
            // Being root means nothing any more: what counts is the set below.
            let bits = libc::SECBIT_NOROOT
                | libc::SECBIT_NOROOT_LOCKED
                | libc::SECBIT_NO_SETUID_FIXUP
                | libc::SECBIT_NO_SETUID_FIXUP_LOCKED
                | libc::SECBIT_KEEP_CAPS_LOCKED;
            // SAFETY: only numbers are passed. As with the bounding set: it matters to programs that are started.
            let _ = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits as libc::c_ulong, 0, 0, 0) };
        }
    }
    capability::set(kept).map_err(failed("capabilities"))?;
    no_new_privileges()
}

fn no_new_privileges() -> Result<()> {
    capability::no_new_privileges().map_err(failed("no new ones"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(user("root"), Ok(User { uid: 0, gid: 0 }));
        assert_eq!(user("4711"), Ok(User { uid: 4711, gid: 4711 }));
        let error = user("no-such-user-here").expect_err("no such user");
        assert_eq!(error.errno, Errno::ENOENT);
        assert!(error.to_string().contains("no-such-user-here"), "{error}");
        assert!(user("nul\0byte").is_err());
    }
}
