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
    /// The program that ends this host, with `-h now` or `-r now`; none: no client can.
    pub host_power: Option<PathBuf>,
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

/// VMs that start, end or move at a time without waiting for each other, if nothing else is configured.
pub const VMS_AT_A_TIME: usize = 4;
/// Disks that one VM plugs at a time, and the most that count in the rule below: `max-parallel-per-vm`.
pub const PER_VM: usize = 10;
/// Memory of the host that one more plug at a time takes while it lasts, in bytes, with room to spare: a thread of the
/// daemon and its part of a storage worker (docs/performance.md has the measurement). XenServer names 15 MB.
pub const PLUG_BYTES: u64 = 256 << 10;
/// The socket below the run directory where disks ask for room.
const ROOM_SOCKET: &str = "room";

impl Config {
    /// Where disks ask for room.
    pub fn room_socket(&self) -> PathBuf {
        self.run_dir.join(ROOM_SOCKET)
    }
}

/// The part of a host's memory that plugs may take.
const MEMORY_PART: u64 = 16;
/// Fewer would keep one VM from plugging its disks beside each other.
const POOL_MIN: usize = PER_VM;
/// More threads are no help.
const POOL_MAX: usize = 1_000;

/// `worker-pool-size` by XenServer's rule: `disks` of a VM on the average, at most 10, times the VMs that start, end or
/// move at a time. Bounded by a sixteenth of the host's memory.
pub fn worker_pool_size(disks: usize, vms: usize, memory: u64) -> usize {
    let fits = usize::try_from(memory / MEMORY_PART / PLUG_BYTES).unwrap_or(POOL_MAX);
    disks.clamp(1, PER_VM).saturating_mul(vms).min(fits).clamp(POOL_MIN, POOL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_multiplies_and_has_bounds() {
        let (gib, size) = (1_u64 << 30, worker_pool_size);
        assert_eq!(size(PER_VM, VMS_AT_A_TIME, 16 * gib), 40);
        assert_eq!((size(3, 25, 64 * gib), size(8, 125, 64 * gib)), (75, 1_000));
        assert_eq!(size(255, 4, 16 * gib), 40, "more than ten disks of a VM do not count");
        assert_eq!((size(1, 1, 16 * gib), size(10, 1_000_000, 0)), (POOL_MIN, POOL_MIN));
        assert_eq!(size(10, 25, gib / 2), 128, "a small host");
    }
}
