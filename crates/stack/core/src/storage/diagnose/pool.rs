//! Page pools that bound the speed of their disks. The 6.1 guide's recipe: all rings are full while the pool reads
//! `( 704, 704 )`; a larger pool serves their requests, and costs memory that other SRs could have.

use std::fmt::Write;

use tapio_stat::Snapshot;
use tapio_stat::pool::{PAGES_MAX, PoolInfo};
use uuid::Uuid;

use super::super::pool::{PAGES_PER_RING, POOL_PAGES, POOL_RINGS};
use super::Finding;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// A pool whose disks wait for pages. `disks` is what those of its disks have counted that are known; `available` are
/// the bytes of memory that the host has left.
pub fn exhausted(pool: &PoolInfo, disks: &[Snapshot], available: u64) -> Option<Finding> {
    let waiting = pool.disks.iter().filter(|disk| disk.waits_for > 0).count();
    // A disk that got nothing for a while does not count as waiting at each moment.
    let is_full =
        pool.used == pool.pages && matches!(full_of(disks), (full, count) if full == count && count > 0);
    if waiting == 0 && !is_full {
        return None;
    }
    let (used, pages, members) = (pool.used, pool.pages, pool.disks.len());
    let wanted: u64 = pool.disks.iter().map(|disk| u64::from(disk.waits_for)).sum();
    let mut detail = format!(
        "( {pages}, {used} ): {used} of {pages} pages are in use, {waiting} of {members} disks wait for {wanted}{}",
        rings(disks)
    );
    let sr = pool.name.get(..36).and_then(|name| Uuid::parse_str(name).ok());
    detail.push_str(&larger(pages, sr, available));
    let found = Finding::new("pool-exhausted", &pool.name, detail);
    Some(match sr {
        Some(sr) => found.of_sr(sr),
        None => found,
    })
}

/// Rings that are full, and all.
fn full_of(disks: &[Snapshot]) -> (usize, usize) {
    let rings = || disks.iter().flat_map(|disk| &disk.rings).map(|ring| ring.state);
    (rings().filter(|ring| ring.used() >= ring.size).count(), rings().count())
}

/// How full the rings are that the disks are reached by, and how many of their requests have pages.
fn rings(disks: &[Snapshot]) -> String {
    let (full, count) = full_of(disks);
    if count == 0 {
        return String::new();
    }
    let rings = || disks.iter().flat_map(|disk| &disk.rings).map(|ring| ring.state);
    let slots: u64 = rings().map(|ring| u64::from(ring.size)).sum();
    // The rings of a disk are read at one instant, and those of others at another: no more than there is room for.
    let requests: u64 = rings().map(|ring| u64::from(ring.used().min(ring.size))).sum();
    let served: u64 = disks.iter().map(|disk| disk.in_flight().saturating_sub(disk.delays.waiting)).sum();
    let mut text = format!("; {full} of {count} rings are full");
    let _ = write!(text, " ({requests} of {slots} requests), {served} requests are in flight");
    if full < count {
        text.push_str(": it may be a burst, look again");
    }
    text
}

/// The next larger pool, how it is set, and what it costs.
fn larger(pages: u32, sr: Option<Uuid>, available: u64) -> String {
    let rings = [2, 4, 8].into_iter().find(|rings| rings * PAGES_PER_RING > pages);
    let (setting, next) = match rings {
        Some(rings) => (format!("{POOL_RINGS}={rings}"), rings * PAGES_PER_RING),
        None => {
            let next = pages.saturating_mul(2).min(PAGES_MAX);
            if next <= pages {
                return format!("; {PAGES_MAX} pages are the most: spread the disks over more SRs");
            }
            (format!("{POOL_PAGES}={next}"), next)
        }
    };
    let bytes = |pages: u32| u64::from(pages.max(1)) * PAGE;
    let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
    let of = sr.map_or_else(|| "SR".to_owned(), |sr| sr.to_string());
    format!(
        "; 'xe sr-param-set uuid={of} other-config:{setting}' makes it {next} pages, which take up to {:.2} MiB in \
         place of {:.2} MiB: the {:.0} MiB that the host has left are enough for the pools of {} SRs of that size, in \
         place of {}",
        mib(bytes(next)),
        mib(bytes(pages)),
        mib(available),
        available / bytes(next),
        available / bytes(pages),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_stat::pool::PoolDisk;
    use tapio_stat::{DiskName, DiskStats, RequestKind, RingUse, ShmRoot};
    use tapio_types::RingState;

    const GIB: u64 = 1 << 30;

    fn pool(pages: u32, waits_for: u32) -> PoolInfo {
        let disk = PoolDisk { pid: 1, minor: 0, held: pages, waits_for };
        PoolInfo { name: format!("{}-x", Uuid::nil()), pages, used: pages, disks: vec![disk] }
    }

    /// A disk with a ring of 32 requests, of which `used` have no answer; of these the disk has taken `taken`.
    fn disk(used: u32, taken: u64) -> Snapshot {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let root = ShmRoot::new(dir.path());
        let name = DiskName { pid: std::process::id(), minor: 0, page: None };
        let stats = DiskStats::create(&root, &name).expect("created");
        (0..taken).for_each(|_| stats.submitted(RequestKind::Write, 11 * PAGE));
        let read = || tapio_stat::disks(&root).expect("listed")[0].read().expect("a page");
        let state = RingState { size: 32, req_prod: 100 + used, rsp_prod: 100, ..RingState::default() };
        Snapshot { rings: vec![RingUse { state, request_ns: 0 }], ..read() }
    }

    #[test]
    fn a_pool_whose_disks_wait_is_too_small() {
        assert_eq!(exhausted(&pool(704, 0), &[], GIB), None);
        assert_eq!(exhausted(&pool(704, 0), &[disk(32, 32), disk(31, 31)], GIB), None);
        assert!(exhausted(&pool(704, 0), &[disk(32, 32), disk(32, 31)], GIB).is_some(), "the guide's recipe");
        let found = exhausted(&pool(704, 11), &[], GIB).expect("it waits");
        assert_eq!((found.kind, found.sr), ("pool-exhausted", Some(Uuid::nil())));
        let says = |text: &str| assert!(found.detail.contains(text), "{}", found.detail);
        says("( 704, 704 )");
        says("1 of 1 disks wait for 11;");
        says("other-config:blkback-mem-pool-size-rings=4' makes it 1408 pages");
        says("up to 5.50 MiB in place of 2.75 MiB");
        says(
            "1024 MiB that the host has left are enough for the pools of 186 SRs of that size, in place of 372",
        );
        assert!(!found.detail.contains("rings are"), "{}", found.detail);
    }

    /// Five VMs that write 1408 KiB at a time: 32 requests of 11 pages each, of which 64 together have pages.
    #[test]
    fn the_guides_five_vms_have_full_rings() {
        let taken = [13, 13, 13, 13, 12];
        let mut guide = pool(704, 0);
        guide.disks = taken
            .iter()
            .map(|taken| PoolDisk { pid: 1, minor: *taken, held: taken * 11, waits_for: 11 })
            .collect();
        let disks: Vec<Snapshot> = taken.iter().map(|taken| disk(32, u64::from(*taken))).collect();
        let said = |disks: &[Snapshot]| exhausted(&guide, disks, GIB).expect("they wait").detail;
        let full = said(&disks);
        assert!(
            full.contains("( 704, 704 ): 704 of 704 pages are in use, 5 of 5 disks wait for 55"),
            "{full}"
        );
        assert!(
            full.contains("5 of 5 rings are full (160 of 160 requests), 64 requests are in flight;"),
            "{full}"
        );
        assert!(!full.contains("burst"), "{full}");
        let some = said(&[disk(32, 13), disk(7, 7)]);
        assert!(
            some.contains("1 of 2 rings are full (39 of 64 requests), 20 requests are in flight"),
            "{some}"
        );
        assert!(some.contains("it may be a burst, look again"), "{some}");
    }

    #[test]
    fn the_next_size_is_named_up_to_the_most() {
        let said = |pages: u32| exhausted(&pool(pages, 1), &[], GIB).expect("it waits").detail;
        assert!(said(1408).contains("rings=8' makes it 2816"), "{}", said(1408));
        assert!(said(2816).contains("mem-pool-pages=5632'"), "{}", said(2816));
        assert!(said(100).contains("rings=2'"), "{}", said(100));
        assert!(said(PAGES_MAX).contains("are the most"), "{}", said(PAGES_MAX));
    }
}
