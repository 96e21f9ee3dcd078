//! Privileges of this thread: capabilities(7), users and groups. Nothing here allocates.

use std::io;

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

fn check(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes all capabilities but these (a bit each) out of the bounding set. Without `CAP_SETPCAP` the set stays: it
/// matters to programs that are started alone, and those are held by [`no_new_privileges`].
///
/// # Errors
/// The kernel's.
pub fn bound(kept: u64) -> io::Result<()> {
    for number in 0..CAPABILITIES_MAX {
        // SAFETY: only numbers are passed.
        let exists = unsafe { libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) };
        if exists < 0 {
            break;
        }
        if exists == 1 && kept & (1 << number) == 0 {
            // SAFETY: only numbers are passed.
            let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) };
            if let Err(error) = check(libc::c_long::from(dropped))
                && error.raw_os_error() != Some(libc::EPERM)
            {
                return Err(error);
            }
        }
    }
    // Kernels without the ambient set have none.
    let _ = rustix::thread::clear_ambient_capability_set();
    Ok(())
}

/// The capabilities that this thread may use, a bit each.
///
/// # Errors
/// The kernel's.
pub fn permitted() -> io::Result<u64> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut words = [Word::default(); 2];
    // SAFETY: version 3 fills two words, which are there.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, words.as_mut_ptr()) })?;
    Ok(u64::from(words[0].permitted) | u64::from(words[1].permitted) << 32)
}

/// Leaves the thread these capabilities, and those it starts none.
///
/// # Errors
/// The kernel's.
pub fn set(kept: u64) -> io::Result<()> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let word = |bits: u32| Word { effective: bits, permitted: bits, inheritable: 0 };
    let words = [word(kept as u32), word((kept >> 32) as u32)];
    // SAFETY: version 3 reads two words, which are there.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, words.as_ptr()) })
}

/// Leaves the thread these groups in addition to its own.
///
/// # Errors
/// The kernel's.
pub fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the list lives across the call and has that many numbers.
    check(libc::c_long::from(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) }))
}

/// Becomes a user and a group, with no way back. In a child between fork and exec it concerns that thread alone, which
/// is all there is.
///
/// # Errors
/// The kernel's.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: only numbers are passed.
    check(libc::c_long::from(unsafe { libc::setresgid(gid, gid, gid) }))?;
    // SAFETY: only numbers are passed.
    check(libc::c_long::from(unsafe { libc::setresuid(uid, uid, uid) }))
}

/// No program that is started can have more privileges than its starter.
///
/// # Errors
/// The kernel's.
pub fn no_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}
