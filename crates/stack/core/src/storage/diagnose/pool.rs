//! Page pools that bound the speed of their disks. The 6.1 guide's recipe: requests wait in full rings while the pool
//! reads `( 704, 704 )`; a larger pool serves them, and costs memory that other SRs could have.

use tapio_stat::pool::{PAGES_MAX, PoolInfo};
use uuid::Uuid;

use super::super::pool::{PAGES_PER_RING, POOL_PAGES, POOL_RINGS};
use super::Finding;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// A pool whose disks wait for pages.
pub fn exhausted(pool: &PoolInfo) -> Option<Finding> {
    let waiting = pool.disks.iter().filter(|disk| disk.waits_for > 0).count();
    if waiting == 0 {
        return None;
    }
    let (used, pages, disks) = (pool.used, pool.pages, pool.disks.len());
    let wanted: u64 = pool.disks.iter().map(|disk| u64::from(disk.waits_for)).sum();
    let mut detail = format!(
        "( {used}, {pages} ): {used} of {pages} pages are in use, {waiting} of {disks} disks wait for {wanted}"
    );
    let sr = pool.name.get(..36).and_then(|name| Uuid::parse_str(name).ok());
    detail.push_str(&larger(pages, sr));
    let found = Finding::new("pool-exhausted", &pool.name, detail);
    Some(match sr {
        Some(sr) => found.of_sr(sr),
        None => found,
    })
}

/// The next larger pool, how it is set, and what it costs.
fn larger(pages: u32, sr: Option<Uuid>) -> String {
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
    let mib = |pages: u32| u64::from(pages) as f64 * PAGE as f64 / 1_048_576.0;
    let of = sr.map_or_else(|| "SR".to_owned(), |sr| sr.to_string());
    format!(
        "; 'xe sr-param-set uuid={of} other-config:{setting}' makes it {next} pages, {:.2} MiB in place of {:.2} MiB: \
         the host has memory for as many fewer pools of other SRs",
        mib(next),
        mib(pages)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_stat::pool::PoolDisk;

    fn pool(pages: u32, waits_for: u32) -> PoolInfo {
        let disk = PoolDisk { pid: 1, minor: 0, held: pages, waits_for };
        PoolInfo { name: format!("{}-x", Uuid::nil()), pages, used: pages, disks: vec![disk] }
    }

    #[test]
    fn a_pool_whose_disks_wait_is_too_small() {
        assert_eq!(exhausted(&pool(704, 0)), None);
        let found = exhausted(&pool(704, 11)).expect("it waits");
        assert_eq!((found.kind, found.sr), ("pool-exhausted", Some(Uuid::nil())));
        let says = |text: &str| assert!(found.detail.contains(text), "{}", found.detail);
        says("( 704, 704 )");
        says("1 of 1 disks wait for 11");
        says(
            "other-config:blkback-mem-pool-size-rings=4' makes it 1408 pages, 5.50 MiB in place of 2.75 MiB",
        );
    }

    #[test]
    fn the_next_size_is_named_up_to_the_most() {
        let said = |pages: u32| exhausted(&pool(pages, 1)).expect("it waits").detail;
        assert!(said(1408).contains("rings=8' makes it 2816"), "{}", said(1408));
        assert!(said(2816).contains("mem-pool-pages=5632'"), "{}", said(2816));
        assert!(said(100).contains("rings=2'"), "{}", said(100));
        assert!(said(PAGES_MAX).contains("are the most"), "{}", said(PAGES_MAX));
    }
}
