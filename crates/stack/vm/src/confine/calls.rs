//! System calls that a guest's process has no reason to make, as data: one line each, with its reason.
//!
//! This is a list of what is refused, because the emulators and the C libraries under them belong to others and change;
//! a call that newer kernels bring is refused as well, as one that does not exist. QEMU narrows itself further
//! (`-sandbox`). Calls of the guest's own programs do not pass here: User-mode Linux replaces each before the host
//! looks at it, and QEMU's guests make none on the host.

use libc::c_long;
use tapio_sandbox::bpf::{
    self, ALLOW, AND, IF_AT_LEAST, IF_EQUAL, LOAD, Program, RETURN, argument, errno, statement, unless,
};

/// The last call that was looked at for this list (`mseal`).
const KNOWN_MAX: u32 = 462;

/// Namespaces that a new process could begin, by `linux/sched.h`.
const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// Which emulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emulator {
    /// User-mode Linux: its processes are traced by it.
    Uml,
    /// QEMU.
    Qemu,
}

/// Refused with `EPERM`: the call, and what it would do.
const REFUSED: &[(c_long, &str)] = &[
    (libc::SYS_acct, "a file of the host that the kernel writes"),
    (libc::SYS_add_key, "keys"),
    (libc::SYS_adjtimex, "the host's clock"),
    (libc::SYS_bpf, "programs in the kernel"),
    (libc::SYS_capset, "privileges"),
    (libc::SYS_chroot, "another root"),
    (libc::SYS_clock_adjtime, "the host's clock"),
    (libc::SYS_clock_settime, "the host's clock"),
    (libc::SYS_delete_module, "modules of the kernel"),
    (libc::SYS_fanotify_init, "files of others"),
    (libc::SYS_finit_module, "modules of the kernel"),
    (libc::SYS_fsconfig, "mounts"),
    (libc::SYS_fsmount, "mounts"),
    (libc::SYS_fsopen, "mounts"),
    (libc::SYS_fspick, "mounts"),
    (libc::SYS_init_module, "modules of the kernel"),
    (libc::SYS_io_uring_enter, "calls that no filter sees"),
    (libc::SYS_io_uring_register, "calls that no filter sees"),
    (libc::SYS_io_uring_setup, "calls that no filter sees"),
    (libc::SYS_kcmp, "other processes"),
    (libc::SYS_kexec_load, "another kernel"),
    (libc::SYS_keyctl, "keys"),
    (libc::SYS_linkat, "names that lead elsewhere, for others to follow"),
    (libc::SYS_migrate_pages, "other processes"),
    (libc::SYS_mknodat, "nodes of devices"),
    (libc::SYS_mount, "mounts"),
    (libc::SYS_mount_setattr, "mounts"),
    (libc::SYS_move_mount, "mounts"),
    (libc::SYS_move_pages, "other processes"),
    (libc::SYS_name_to_handle_at, "files around their directories"),
    (libc::SYS_open_by_handle_at, "files around their directories"),
    (libc::SYS_open_tree, "mounts"),
    (libc::SYS_perf_event_open, "the host's counters"),
    (libc::SYS_pidfd_getfd, "descriptors of other processes"),
    (libc::SYS_pivot_root, "another root"),
    (libc::SYS_process_madvise, "other processes"),
    (libc::SYS_process_vm_readv, "memory of other processes"),
    (libc::SYS_process_vm_writev, "memory of other processes"),
    (libc::SYS_quotactl, "the host's file systems"),
    (libc::SYS_reboot, "the host"),
    (libc::SYS_request_key, "keys"),
    (libc::SYS_setdomainname, "the host's name"),
    (libc::SYS_setfsgid, "another user"),
    (libc::SYS_setfsuid, "another user"),
    (libc::SYS_setgid, "another user"),
    (libc::SYS_setgroups, "another user"),
    (libc::SYS_sethostname, "the host's name"),
    (libc::SYS_setns, "namespaces"),
    (libc::SYS_setregid, "another user"),
    (libc::SYS_setresgid, "another user"),
    (libc::SYS_setresuid, "another user"),
    (libc::SYS_setreuid, "another user"),
    (libc::SYS_settimeofday, "the host's clock"),
    (libc::SYS_setuid, "another user"),
    (libc::SYS_swapoff, "the host's memory"),
    (libc::SYS_swapon, "the host's memory"),
    (libc::SYS_symlinkat, "names that lead elsewhere, for others to follow"),
    (libc::SYS_syslog, "the host's log"),
    (libc::SYS_umount2, "mounts"),
    (libc::SYS_unshare, "namespaces"),
    (libc::SYS_userfaultfd, "a kernel that waits for this process"),
    (libc::SYS_vhangup, "terminals"),
];

/// The same, of calls that newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const REFUSED_OF_MACHINE: &[(c_long, &str)] = &[
    (libc::SYS_ioperm, "the host's ports"),
    (libc::SYS_iopl, "the host's ports"),
    (libc::SYS_kexec_file_load, "another kernel"),
    (libc::SYS_link, "names that lead elsewhere, for others to follow"),
    (libc::SYS_mknod, "nodes of devices"),
    (libc::SYS_symlink, "names that lead elsewhere, for others to follow"),
];

/// The same, of calls that newer architectures do not have.
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_OF_MACHINE: &[(c_long, &str)] = &[];

/// The filter of an emulator's processes.
pub(crate) fn filter(emulator: Emulator) -> Program {
    let mut program = bpf::beginning();
    let mut when = |call: c_long, verdict: &[libc::sock_filter]| {
        // The longest verdict has a handful of statements.
        program.push(unless(IF_EQUAL, call as u32, verdict.len() as u8));
        program.extend(verdict);
    };
    let refused = statement(RETURN, errno(libc::EPERM));
    for (call, _) in REFUSED.iter().chain(REFUSED_OF_MACHINE) {
        when(*call, &[refused]);
    }
    if emulator == Emulator::Qemu {
        when(libc::SYS_ptrace, &[refused]);
    }
    // Processes and threads, in the namespaces that there are.
    let no_namespaces = [
        statement(LOAD, argument(0)),
        statement(AND, NEW_NAMESPACES),
        unless(IF_EQUAL, 0, 1),
        ALLOW,
        refused,
    ];
    when(libc::SYS_clone, &no_namespaces);
    // Its flags are in memory, where a filter cannot see them. Libraries fall back to clone.
    let unknown = statement(RETURN, errno(libc::ENOSYS));
    when(libc::SYS_clone3, &[unknown]);
    let local = [
        statement(LOAD, argument(0)),
        unless(IF_EQUAL, libc::AF_UNIX as u32, 1),
        ALLOW,
        statement(RETURN, errno(libc::EAFNOSUPPORT)),
    ];
    when(libc::SYS_socket, &local);
    when(libc::SYS_socketpair, &local);
    program.extend([unless(IF_AT_LEAST, KNOWN_MAX + 1, 1), unknown, ALLOW]);
    program
}

#[cfg(test)]
mod tests {
    use tapio_sandbox::bpf::judge;

    use super::*;

    #[test]
    fn a_guests_process_gains_nothing_by_a_call() {
        for emulator in [Emulator::Uml, Emulator::Qemu] {
            let program = filter(emulator);
            let judged =
                |call: c_long, first: i32| judge(&program, call as u32, [first as u64, 0, 0, 0, 0, 0]);
            for (call, why) in REFUSED.iter().chain(REFUSED_OF_MACHINE) {
                assert_eq!(judged(*call, 0), errno(libc::EPERM), "{why}");
            }
            for call in [libc::SYS_read, libc::SYS_execve, libc::SYS_mmap, libc::SYS_wait4, libc::SYS_sendmsg]
            {
                assert_eq!(judged(call, 0), libc::SECCOMP_RET_ALLOW, "{call}");
            }
            assert_eq!(judged(libc::SYS_clone, libc::SIGCHLD | libc::CLONE_FILES), libc::SECCOMP_RET_ALLOW);
            for flag in (0..32).map(|bit| 1_u32 << bit).filter(|bit| bit & NEW_NAMESPACES != 0) {
                let flags = (flag | libc::SIGCHLD as u32) as i32;
                assert_eq!(judged(libc::SYS_clone, flags), errno(libc::EPERM), "{flag:#x}");
            }
            assert_eq!(judged(libc::SYS_clone3, 0), errno(libc::ENOSYS));
            assert_eq!(judged(libc::SYS_socket, libc::AF_UNIX), libc::SECCOMP_RET_ALLOW);
            for family in [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK] {
                assert_eq!(judged(libc::SYS_socket, family), errno(libc::EAFNOSUPPORT), "{family}");
            }
            for call in [KNOWN_MAX + 1, 500, 0x3fff_ffff] {
                assert_eq!(judge(&program, call, [0; 6]), errno(libc::ENOSYS), "{call}");
            }
            assert_eq!(judge(&program, bpf::X32_BIT | 1, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
            let traced = if emulator == Emulator::Uml { libc::SECCOMP_RET_ALLOW } else { errno(libc::EPERM) };
            assert_eq!(judged(libc::SYS_ptrace, 0), traced, "{emulator:?}");
        }
    }

    #[test]
    fn each_call_has_one_line_and_a_reason() {
        let all: Vec<_> = REFUSED.iter().chain(REFUSED_OF_MACHINE).collect();
        for (index, (call, why)) in all.iter().enumerate() {
            assert!(!why.is_empty(), "{call}");
            assert!(all[..index].iter().all(|(other, _)| other != call), "{call} twice");
        }
    }
}
