//! The system calls that the process makes, as data: one line each, with its reason.
//!
//! A call that is not here ends the process (see `filter`). A new feature of the process adds lines;
//! `strace -f` of the feature's test shows which. What is needed for one feature only belongs to that feature's scope.

use libc::c_long;

/// The threads that may make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every thread.
    Process,
    /// Every thread but data threads, which meet guests and clients, and those that they start: these get `EPERM`.
    Control,
}

/// Which arguments are allowed. Only the low half of an argument is looked at: each is an `int` or a set of flags.
#[derive(Clone, Copy, Debug)]
pub enum ArgumentRule {
    /// All.
    Any,
    /// Argument `index` is one of these; otherwise the call fails with `errno`.
    OneOf { index: u8, values: &'static [u32], errno: i32 },
    /// Argument `index` has none of these bits; otherwise the call fails with `errno`.
    Without { index: u8, bits: u32, errno: i32 },
    /// Argument `index` has all of these bits; otherwise the call fails with `errno`.
    With { index: u8, bits: u32, errno: i32 },
    /// Argument `index` is the number of this process; otherwise the call fails with `errno`.
    Own { index: u8, errno: i32 },
    /// None: the call fails with `errno`, and its caller knows another way.
    Never { errno: i32 },
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its number.
    pub call: c_long,
    /// Its name.
    pub name: &'static str,
    /// The threads that may make it.
    pub scope: Scope,
    /// With what.
    pub arguments: ArgumentRule,
    /// Why.
    pub why: &'static str,
}

const fn rule(call: c_long, name: &'static str, why: &'static str) -> Rule {
    Rule { call, name, scope: Scope::Process, arguments: ArgumentRule::Any, why }
}

impl Rule {
    const fn by(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    const fn only(self, arguments: ArgumentRule) -> Self {
        Self { arguments, ..self }
    }
}

/// A call by its name in the libc crate.
macro_rules! call {
    ($number:ident, $name:literal, $why:literal) => {
        rule(libc::$number, $name, $why)
    };
}

const FAMILIES: &[u32] = &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32];
const FAMILIES_OF_DEVICES: &[u32] =
    &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32];
const EXEC: u32 = libc::PROT_EXEC as u32;
/// Options of prctl that change nothing but the calling thread's name and timer slack.
const PRCTLS: &[u32] = &[libc::PR_SET_NAME as u32, libc::PR_GET_NAME as u32, libc::PR_SET_TIMERSLACK as u32];
/// Harmless requests to a descriptor, by `asm/ioctls.h` and `linux/fs.h`.
const IOCTLS: &[u32] = &[
    0x5421,      // FIONBIO: blocking mode
    0x541b,      // FIONREAD: bytes waiting
    0x5401,      // TCGETS: whether it is a terminal
    0x8008_1272, // BLKGETSIZE64: bytes of a block device
    0x1268,      // BLKSSZGET: its logical block
    0x127b,      // BLKPBSZGET: its physical block
    0x1277,      // BLKDISCARD
    0x127f,      // BLKZEROOUT
    // Of /dev/xen/gntdev and /dev/xen/evtchn, by xen/gntdev.h and xen/evtchn.h.
    0x0018_4700, // IOCTL_GNTDEV_MAP_GRANT_REF: pages of a guest
    0x0010_4701, // IOCTL_GNTDEV_UNMAP_GRANT_REF
    0x0004_4703, // IOCTL_GNTDEV_SET_MAX_GRANTS
    0x0010_4708, // IOCTL_GNTDEV_GRANT_COPY: a batch of data
    0x0008_4501, // IOCTL_EVTCHN_BIND_INTERDOMAIN: a ring's event channel
    0x0004_4503, // IOCTL_EVTCHN_UNBIND
    0x0004_4504, // IOCTL_EVTCHN_NOTIFY
];

/// The calls, those of every request first.
pub const RULES: &[Rule] =
    &[
        // The data path.
        call!(SYS_io_uring_enter, "io_uring_enter", "every batch of operations"),
        call!(SYS_pread64, "pread64", "files in memory; images while they are opened"),
        call!(SYS_pwrite64, "pwrite64", "files in memory; images while they are opened"),
        call!(SYS_preadv, "preadv", "as pread64, scattered"),
        call!(SYS_pwritev, "pwritev", "as pwrite64, scattered"),
        call!(SYS_sendmsg, "sendmsg", "replies of NBD; messages of vhost-user"),
        call!(SYS_recvmsg, "recvmsg", "messages with descriptors: control socket, vhost-user"),
        call!(SYS_read, "read", "event counters, sockets of handshakes, /proc/stat"),
        call!(SYS_write, "write", "event counters, log lines"),
        call!(SYS_readv, "readv", "sockets"),
        call!(SYS_writev, "writev", "sockets, panic messages"),
        call!(SYS_sendto, "sendto", "handshakes, answers, the system's log"),
        call!(SYS_recvfrom, "recvfrom", "handshakes, requests"),
        call!(SYS_sendmmsg, "sendmmsg", "the library asks for the address of a host"),
        call!(SYS_madvise, "madvise", "giving memory back at rest"),
        call!(SYS_fallocate, "fallocate", "offline repairs while an image is opened"),
        call!(SYS_fsync, "fsync", "as fallocate"),
        call!(SYS_fdatasync, "fdatasync", "as fallocate"),
        call!(SYS_fadvise64, "fadvise64", "reading images while they are opened"),
        call!(SYS_io_uring_register, "io_uring_register", "chunks of the buffer pool come and go"),
        call!(SYS_io_uring_setup, "io_uring_setup", "a ring for a disk that is opened").by(Scope::Control),
        // Waiting and time.
        call!(SYS_futex, "futex", "locks and channels between threads"),
        call!(SYS_ppoll, "ppoll", "waiting on sockets"),
        call!(SYS_epoll_create1, "epoll_create1", "waiting on sockets"),
        call!(SYS_epoll_ctl, "epoll_ctl", "waiting on sockets"),
        call!(SYS_epoll_pwait, "epoll_pwait", "waiting on sockets"),
        call!(SYS_eventfd2, "eventfd2", "event counters"),
        call!(SYS_signalfd4, "signalfd4", "being asked to end").by(Scope::Control),
        call!(SYS_timerfd_create, "timerfd_create", "timers of services").by(Scope::Control),
        call!(SYS_timerfd_settime, "timerfd_settime", "timers of services"),
        call!(SYS_clock_gettime, "clock_gettime", "the clock, where the kernel has no faster way"),
        call!(SYS_clock_getres, "clock_getres", "the clock"),
        call!(SYS_gettimeofday, "gettimeofday", "time stamps, where the kernel has no faster way"),
        call!(SYS_nanosleep, "nanosleep", "short waits of the control side"),
        call!(SYS_clock_nanosleep, "clock_nanosleep", "short waits of the control side"),
        call!(SYS_sched_yield, "sched_yield", "locks"),
        call!(SYS_restart_syscall, "restart_syscall", "the kernel's own, after a stop"),
        // Files.
        call!(SYS_openat, "openat", "images, logs, statistics; which ones is Landlock's business"),
        call!(SYS_openat2, "openat2", "as openat"),
        call!(SYS_close, "close", "everything opened"),
        call!(SYS_close_range, "close_range", "everything opened"),
        call!(SYS_statx, "statx", "what a file is, what O_DIRECT asks for"),
        call!(SYS_newfstatat, "newfstatat", "what a file is"),
        call!(SYS_fstat, "fstat", "what a file is"),
        call!(SYS_fstatfs, "fstatfs", "whether a file is in memory"),
        call!(SYS_statfs, "statfs", "whether a file is in memory"),
        call!(SYS_lseek, "lseek", "lengths, holes"),
        call!(SYS_ftruncate, "ftruncate", "images, logs, statistics"),
        call!(SYS_flock, "flock", "one writer, one owner of a number"),
        call!(SYS_mknodat, "mknodat", "the pipes by which disks at one page pool wake each other")
            .only(ArgumentRule::OneOf { index: 2, values: &[libc::S_IFIFO | 0o600], errno: libc::EPERM }),
        call!(SYS_faccessat, "faccessat", "whether a file is there"),
        call!(SYS_faccessat2, "faccessat2", "whether a file is there"),
        call!(SYS_readlinkat, "readlinkat", "paths of parents"),
        call!(SYS_getdents64, "getdents64", "directories of sockets, numbers and statistics"),
        call!(SYS_getcwd, "getcwd", "relative paths"),
        call!(SYS_mkdirat, "mkdirat", "directories of logs and statistics"),
        call!(SYS_unlinkat, "unlinkat", "sockets, logs and statistics at their end"),
        call!(SYS_renameat, "renameat", "statistics and logs that replace older ones"),
        call!(SYS_renameat2, "renameat2", "statistics and logs that replace older ones"),
        call!(SYS_fchmod, "fchmod", "permissions of a socket or a file of statistics"),
        call!(SYS_fchmodat, "fchmodat", "permissions of a socket"),
        call!(SYS_fcntl, "fcntl", "copies of descriptors, blocking mode"),
        call!(SYS_dup, "dup", "copies of descriptors"),
        call!(SYS_dup3, "dup3", "leaving the terminal"),
        call!(SYS_pipe2, "pipe2", "event channels").by(Scope::Control),
        call!(SYS_memfd_create, "memfd_create", "requests in flight, shared with a guest").by(Scope::Control),
        call!(SYS_ioctl, "ioctl", "sizes of block devices, blocking mode, pages and events of Xen guests")
            .only(ArgumentRule::OneOf { index: 1, values: IOCTLS, errno: libc::ENOTTY }),
        // Memory.
        call!(SYS_mmap, "mmap", "memory of all kinds, never to be executed").only(ArgumentRule::Without {
            index: 2,
            bits: EXEC,
            errno: libc::EACCES,
        }),
        call!(SYS_mprotect, "mprotect", "stacks of threads, never to be executed")
            .only(ArgumentRule::Without { index: 2, bits: EXEC, errno: libc::EACCES }),
        call!(SYS_munmap, "munmap", "memory that goes"),
        call!(SYS_mremap, "mremap", "memory that grows"),
        call!(SYS_brk, "brk", "memory"),
        call!(SYS_mlock, "mlock", "memory of requests"),
        call!(SYS_munlock, "munlock", "memory of requests"),
        call!(SYS_msync, "msync", "memory shared with files"),
        call!(SYS_mincore, "mincore", "the allocator, while a panic is printed"),
        call!(SYS_membarrier, "membarrier", "the library, when threads come"),
        // Sockets.
        call!(SYS_socket, "socket", "front ends, the system's log, other storages")
            .only(ArgumentRule::OneOf { index: 0, values: FAMILIES, errno: libc::EAFNOSUPPORT }),
        call!(SYS_socketpair, "socketpair", "threads that talk").only(ArgumentRule::OneOf {
            index: 0,
            values: FAMILIES,
            errno: libc::EAFNOSUPPORT,
        }),
        call!(SYS_connect, "connect", "the system's log, other storages"),
        call!(SYS_bind, "bind", "front ends, the control socket").by(Scope::Control),
        call!(SYS_listen, "listen", "front ends, the control socket").by(Scope::Control),
        call!(SYS_accept4, "accept4", "clients").by(Scope::Control),
        call!(SYS_shutdown, "shutdown", "clients that are cut off"),
        call!(SYS_getsockopt, "getsockopt", "the user of a client, what went wrong"),
        call!(SYS_setsockopt, "setsockopt", "TCP without delay, with keep-alives"),
        call!(SYS_getsockname, "getsockname", "the port that was given"),
        call!(SYS_getpeername, "getpeername", "the address of a client"),
        // Threads and the process.
        call!(SYS_clone, "clone", "threads; never a process").only(ArgumentRule::With {
            index: 0,
            bits: libc::CLONE_THREAD as u32,
            errno: libc::EPERM,
        }),
        // Its flags are in memory, where a filter cannot see them. Libraries fall back to clone.
        call!(SYS_clone3, "clone3", "the library asks first")
            .only(ArgumentRule::Never { errno: libc::ENOSYS }),
        call!(SYS_set_robust_list, "set_robust_list", "threads"),
        call!(SYS_rseq, "rseq", "threads"),
        call!(SYS_gettid, "gettid", "threads"),
        call!(SYS_getpid, "getpid", "names of files, log lines"),
        call!(SYS_getuid, "getuid", "users that may connect"),
        call!(SYS_geteuid, "geteuid", "users that may connect"),
        call!(SYS_getgid, "getgid", "the library"),
        call!(SYS_getegid, "getegid", "the library"),
        call!(SYS_sched_getaffinity, "sched_getaffinity", "threads: their stacks"),
        call!(SYS_prctl, "prctl", "names of threads").only(ArgumentRule::OneOf {
            index: 0,
            values: PRCTLS,
            errno: libc::EPERM,
        }),
        call!(SYS_seccomp, "seccomp", "data threads allow themselves less"),
        call!(SYS_prlimit64, "prlimit64", "threads: their stacks"),
        call!(SYS_getrandom, "getrandom", "identities"),
        call!(SYS_uname, "uname", "the library"),
        call!(SYS_sysinfo, "sysinfo", "the library"),
        call!(SYS_umask, "umask", "sockets for their owner alone").by(Scope::Control),
        call!(SYS_exit, "exit", "threads end"),
        call!(SYS_exit_group, "exit_group", "the process ends"),
        // Signals.
        call!(SYS_rt_sigaction, "rt_sigaction", "stack overflows are reported"),
        call!(SYS_rt_sigprocmask, "rt_sigprocmask", "threads"),
        call!(SYS_rt_sigreturn, "rt_sigreturn", "the end of a signal's handler"),
        call!(SYS_sigaltstack, "sigaltstack", "stack overflows are reported"),
        call!(SYS_kill, "kill", "whether a process is there: signal 0 alone").only(ArgumentRule::OneOf {
            index: 1,
            values: &[0],
            errno: libc::EPERM,
        }),
        call!(SYS_tgkill, "tgkill", "panics end this process")
            .only(ArgumentRule::Own { index: 0, errno: libc::EPERM }),
    ];

/// What a process that may attach local block devices (`--devices`) makes besides, or more freely; these lines come
/// before the others. Data threads serve such devices and may make all of these calls too.
pub const RULES_OF_DEVICES: &[Rule] = &[
    call!(SYS_mount, "mount", "FUSE"),
    call!(SYS_umount2, "umount2", "FUSE"),
    call!(SYS_ioctl, "ioctl", "loop, nbd and ublk devices are set up by it"),
    call!(SYS_io_uring_setup, "io_uring_setup", "a ring for the commands of ublk"),
    call!(SYS_unshare, "unshare", "a thread whose waiting must not keep descriptors open")
        .only(ArgumentRule::OneOf { index: 0, values: &[libc::CLONE_FILES as u32], errno: libc::EPERM }),
    call!(SYS_socket, "socket", "as of every process, and netlink for the kernel's NBD client")
        .only(ArgumentRule::OneOf { index: 0, values: FAMILIES_OF_DEVICES, errno: libc::EAFNOSUPPORT }),
    call!(SYS_mknodat, "mknodat", "device nodes where no other program makes them"),
];

/// Calls that newer architectures do not have: libraries use others there.
#[cfg(target_arch = "x86_64")]
pub const RULES_OF_MACHINE: &[Rule] = &[
    call!(SYS_poll, "poll", "waiting on sockets"),
    call!(SYS_epoll_wait, "epoll_wait", "waiting on sockets"),
    call!(SYS_open, "open", "as openat"),
    call!(SYS_stat, "stat", "what a file is"),
    call!(SYS_lstat, "lstat", "what a file is"),
    call!(SYS_access, "access", "whether a file is there"),
    call!(SYS_readlink, "readlink", "paths of parents"),
    call!(SYS_mkdir, "mkdir", "directories of logs and statistics"),
    call!(SYS_rmdir, "rmdir", "directories of statistics at their end"),
    call!(SYS_unlink, "unlink", "sockets, logs and statistics at their end"),
    call!(SYS_rename, "rename", "statistics and logs that replace older ones"),
    call!(SYS_chmod, "chmod", "permissions of a socket"),
    call!(SYS_dup2, "dup2", "leaving the terminal"),
    call!(SYS_time, "time", "time stamps"),
    call!(SYS_arch_prctl, "arch_prctl", "threads"),
];

/// What the threads of librbd make besides, or more freely (`--rbd`); data threads start them, so these may make all of
/// these calls too. Its code is in memory before the filter is there.
pub const RULES_OF_RBD: &[Rule] = &[
    call!(SYS_pipe2, "pipe2", "threads that move messages wake each other by pipes"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_epoll_create, "epoll_create", "the same threads wait on sockets"),
];

/// Calls that newer architectures do not have: none here.
#[cfg(not(target_arch = "x86_64"))]
pub const RULES_OF_MACHINE: &[Rule] = &[];

/// Names of calls that are refused, for the log.
pub fn name_of(call: i32) -> &'static str {
    const NAMES: &[(c_long, &str)] = &[
        (libc::SYS_execve, "execve"),
        (libc::SYS_execveat, "execveat"),
        (libc::SYS_ptrace, "ptrace"),
        (libc::SYS_process_vm_readv, "process_vm_readv"),
        (libc::SYS_process_vm_writev, "process_vm_writev"),
        (libc::SYS_mount, "mount"),
        (libc::SYS_umount2, "umount2"),
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_setns, "setns"),
        (libc::SYS_bpf, "bpf"),
        (libc::SYS_keyctl, "keyctl"),
        (libc::SYS_init_module, "init_module"),
        (libc::SYS_finit_module, "finit_module"),
        (libc::SYS_setresuid, "setresuid"),
        (libc::SYS_capset, "capset"),
        (libc::SYS_linkat, "linkat"),
        (libc::SYS_symlinkat, "symlinkat"),
        (libc::SYS_fchownat, "fchownat"),
        (libc::SYS_copy_file_range, "copy_file_range"),
        (libc::SYS_pidfd_getfd, "pidfd_getfd"),
        (libc::SYS_perf_event_open, "perf_event_open"),
        (libc::SYS_userfaultfd, "userfaultfd"),
    ];
    let rules = RULES
        .iter()
        .chain(RULES_OF_MACHINE)
        .chain(RULES_OF_DEVICES)
        .chain(RULES_OF_RBD)
        .map(|rule| (rule.call, rule.name));
    NAMES
        .iter()
        .copied()
        .chain(rules)
        .find(|(number, _)| *number == c_long::from(call))
        .map_or("unknown", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_has_one_line_and_a_reason() {
        let all: Vec<&Rule> = RULES.iter().chain(RULES_OF_MACHINE).collect();
        for (index, rule) in all.iter().enumerate() {
            assert!(!rule.why.is_empty(), "{}", rule.name);
            assert!(all[..index].iter().all(|other| other.call != rule.call), "{} twice", rule.name);
        }
    }

    #[test]
    fn nothing_that_makes_or_spies_on_processes_is_allowed() {
        let forbidden = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_getfd,
            libc::SYS_bpf,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_init_module,
            libc::SYS_capset,
            libc::SYS_setresuid,
        ];
        for call in forbidden {
            assert!(RULES.iter().chain(RULES_OF_MACHINE).all(|rule| rule.call != call), "{call}");
        }
        assert_eq!(name_of(libc::SYS_execve as i32), "execve");
        assert_eq!(name_of(-1), "unknown");
    }
}
