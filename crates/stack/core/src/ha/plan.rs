//! How many hosts of a pool may fail at a time.

/// The most hosts that may fail at a time so that all VMs still have memory, whichever hosts these are. `hosts` is
/// the memory of each host, `vms` that of each protected VM, in bytes. Of so many hosts those with the most memory
/// fail; the VMs are put on the rest one after the other, the largest first, each where most is free.
pub(super) fn failures(hosts: &[u64], vms: &[u64]) -> usize {
    let mut hosts = hosts.to_vec();
    hosts.sort_unstable();
    let mut vms = vms.to_vec();
    vms.sort_unstable_by(|a, b| b.cmp(a));
    (0..hosts.len()).rev().find(|failed| fits(&hosts[..hosts.len() - failed], &vms)).unwrap_or(0)
}

fn fits(hosts: &[u64], vms: &[u64]) -> bool {
    let mut free = hosts.to_vec();
    vms.iter().all(|needed| match free.iter_mut().max() {
        Some(most) if *most >= *needed => {
            *most -= needed;
            true
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::failures;

    #[test]
    fn the_largest_hosts_fail_first() {
        assert_eq!(failures(&[8, 8, 8], &[]), 2);
        assert_eq!(failures(&[8, 8, 8], &[4, 4, 4]), 1);
        assert_eq!(failures(&[8, 8, 8], &[4, 4]), 2);
        assert_eq!(failures(&[2, 16], &[4]), 0);
        assert_eq!(failures(&[16, 16], &[4]), 1);
        // Enough in all, but no host has room for one of them.
        assert_eq!(failures(&[8, 8, 8], &[5, 5, 5]), 0);
        assert_eq!(failures(&[], &[]), 0);
    }
}
