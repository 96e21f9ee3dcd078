//! Disk processes, VBDs, page pools.

use tapio_stat::pool::PoolInfo;

use super::super::Call;
use super::Finding;

pub(super) fn find(call: &Call) -> Vec<Finding> {
    let disks = &call.part.disks;
    let mut found = Vec::new();
    for (process, vbd) in disks.stray() {
        let detail = format!("process {} was started for VBD {vbd}, which has no such disk", process.pid);
        found.push(Finding::new("process-leaked", process.pid, detail));
    }
    for note in disks.dead() {
        // Another process takes its place: that is no finding.
        if disks.is_paused(note.spec.vbd) {
            continue;
        }
        let detail = format!("VDI {} of VM {}", note.vdi_uuid, note.vm);
        found.push(Finding::new("process-dead", note.spec.vbd, detail).of_sr(note.sr));
    }
    found.extend(disks.pools().iter().filter_map(exhausted));
    found
}

/// A pool whose disks wait for pages.
pub fn exhausted(pool: &PoolInfo) -> Option<Finding> {
    let waiting = pool.disks.iter().filter(|disk| disk.waits_for > 0).count();
    if waiting == 0 {
        return None;
    }
    let (used, pages) = (pool.used, pool.pages);
    let detail =
        format!("( {used}, {pages} ): {used} of {pages} pages are in use, {waiting} disks wait for some");
    Some(Finding::new("pool-exhausted", &pool.name, detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_stat::pool::PoolDisk;

    #[test]
    fn a_pool_whose_disks_wait_is_too_small() {
        let disk = |waits_for| PoolDisk { pid: 1, minor: 0, held: 704, waits_for };
        let pool = |waits| PoolInfo { name: "a".into(), pages: 704, used: 704, disks: vec![disk(waits)] };
        assert_eq!(exhausted(&pool(0)), None);
        let found = exhausted(&pool(11)).expect("it waits");
        assert_eq!(found.kind, "pool-exhausted");
        assert!(found.detail.starts_with("( 704, 704 )"), "{found:?}");
    }
}
