//! What the daemon was told.

use std::path::PathBuf;

/// Settings of a toolstack.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sockets of disk processes and guests, pid files; empty after a reboot. `/run/tapio`.
    pub run_dir: PathBuf,
    /// What must survive a reboot: the store, keys, accounts. `/var/lib/tapio`.
    pub state_dir: PathBuf,
    /// SRs are mounted below it. `/run/sr-mount`.
    pub mount_dir: PathBuf,
    /// Steps at a time on this host (`worker-pool-size`).
    pub worker_pool_size: usize,
    /// Steps at a time for one VM.
    pub per_vm_parallel: usize,
    /// Longest spin of a disk's thread in microseconds, and least idle share of the host for it in percent, if
    /// neither VBD nor SR set it.
    pub polling: (u32, u8),
    /// Where disk processes send their lines; none: to the system's log.
    pub log_socket: Option<PathBuf>,
}

/// Longest spin if none is configured, in microseconds. XenServer has 8000; but waking up costs tens of
/// microseconds, and a disk whose requests are milliseconds apart would give a whole processor to save these.
pub const POLLING_US: u32 = 1_000;
/// Least idle share of the host for it, in percent.
pub const POLLING_IDLE: u8 = 50;
