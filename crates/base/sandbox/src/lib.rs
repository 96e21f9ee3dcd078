//! What a process can give up for good, by the kernel's own means.
//!
//! ```text
//!   capability   privileges, users, groups: capset(2), setresuid(2), PR_SET_NO_NEW_PRIVS
//!   landlock     which files may be touched: landlock_restrict_self(2)
//!   bpf          which system calls may be made: seccomp(2)
//!   mounts       which files there are at all: unshare(2), mount(2), pivot_root(2)
//! ```
//!
//! This is mechanism alone: what a process gives up, and why, stands where its user is (`tapio-disk` for itself, the
//! drivers of VMs for guests).
//!
//! Functions that say so allocate nothing and make async-signal-safe calls only, so that a child may call them between
//! fork(2) and execve(2), whatever locks the other threads of its parent held.

pub mod bpf;
pub mod capability;
pub mod landlock;
pub mod mounts;
