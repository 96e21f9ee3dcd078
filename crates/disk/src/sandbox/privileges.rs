//! What the process may do as root, cut down to what it needs; or another user altogether.

use std::ffi::{CStr, CString};
use std::io;

use tapio_control::{ControlError, Errno, Result};

/// Numbers of capabilities, from `linux/capability.h`.
mod capability {
    /// Files whatever their permissions say: images belong to anybody.
    pub const DAC_OVERRIDE: u32 = 1;
    /// Low TCP ports.
    pub const NET_BIND_SERVICE: u32 = 10;
    /// Memory that the ring has registered does not count against a limit meant for users.
    pub const IPC_LOCK: u32 = 14;
    /// Mounts and block devices.
    pub const SYS_ADMIN: u32 = 21;
}

const KEPT: &[u32] = &[capability::DAC_OVERRIDE, capability::NET_BIND_SERVICE, capability::IPC_LOCK];
const KEPT_FOR_DEVICES: &[u32] = &[capability::SYS_ADMIN];
/// Of `linux/capability.h`: two words a set.
const VERSION_3: u32 = 0x2008_0522;
/// More than there will be for a while; the kernel says where its own end.
const CAPABILITIES_MAX: u32 = 64;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Word {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

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
    // SAFETY: the name ends with NUL; there is only this thread, so nobody else uses the library's own buffer.
    let entry = unsafe { libc::getpwnam(name.as_ptr()) };
    if entry.is_null() {
        return None;
    }
    // SAFETY: the library gave an entry, which stays until it is asked again.
    let entry = unsafe { &*entry };
    Some(User { uid: entry.pw_uid, gid: entry.pw_gid })
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn failed(what: &str) -> ControlError {
    ControlError::io(format_args!("giving up privileges: {what}"), &io::Error::last_os_error())
        .next("start it with '--sandbox off' where the host does not allow this")
}

fn check(result: libc::c_int, what: &str) -> Result<()> {
    if result == 0 { Ok(()) } else { Err(failed(what)) }
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
    let kept = kept & permitted()?;
    for number in 0..CAPABILITIES_MAX {
        // SAFETY: only numbers are passed.
        let exists = unsafe { libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) };
        if exists < 0 {
            break;
        }
        if exists == 1 && kept & (1 << number) == 0 {
            // SAFETY: only numbers are passed.
            let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) };
            // Without CAP_SETPCAP the bounding set stays; it matters only to programs that are started, which cannot.
            if dropped != 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EPERM) {
                return Err(failed("the bounding set"));
            }
        }
    }
    // SAFETY: only numbers are passed.
    let _ = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    // SAFETY: an empty list of groups.
    let groups = unsafe { libc::setgroups(0, std::ptr::null()) };
    if groups != 0 && become_user.is_some() {
        return Err(failed("the groups"));
    }
    match become_user {
        Some(user) => {
            // SAFETY: only numbers are passed.
            check(unsafe { libc::setresgid(user.gid, user.gid, user.gid) }, "the group")?;
            // SAFETY: only numbers are passed.
            check(unsafe { libc::setresuid(user.uid, user.uid, user.uid) }, "the user")?;
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
    set_capabilities(kept)?;
    no_new_privileges()
}

fn no_new_privileges() -> Result<()> {
    // SAFETY: only numbers are passed.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, "no new ones")
}

/// The capabilities that this thread may use.
fn permitted() -> Result<u64> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut words = [Word::default(); 2];
    // SAFETY: version 3 fills two words, which are there.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, words.as_mut_ptr()) };
    check(result as libc::c_int, "reading capabilities")?;
    Ok(u64::from(words[0].permitted) | u64::from(words[1].permitted) << 32)
}

fn set_capabilities(kept: u64) -> Result<()> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let word = |bits: u32| Word { effective: bits, permitted: bits, inheritable: 0 };
    let words = [word(kept as u32), word((kept >> 32) as u32)];
    // SAFETY: version 3 reads two words, which are there.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, words.as_ptr()) };
    check(result as libc::c_int, "capabilities")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(user("root"), Ok(User { uid: 0, gid: 0 }));
        assert_eq!(user("4711"), Ok(User { uid: 4711, gid: 4711 }));
        let error = user("no-such-user-here").expect_err("nobody");
        assert_eq!(error.errno, Errno::ENOENT);
        assert!(error.to_string().contains("no-such-user-here"), "{error}");
        assert!(user("nul\0byte").is_err());
    }
}
