//! The size of an SR's page pool, which the disks of the SR share.

use std::collections::BTreeMap;

use tapio_stat::pool::PAGES_MAX;

/// How large an SR's page pool is: in full rings of 32 requests.
pub(super) const POOL_RINGS: &str = "blkback-mem-pool-size-rings";
/// The same in pages, for hosts that need another size.
pub(super) const POOL_PAGES: &str = "mem-pool-pages";
/// Pages of a ring: 32 requests of 11 pages.
pub(super) const PAGES_PER_RING: u32 = 352;

/// Pages of an SR's pool as its `other_config` says; none where it says nothing.
///
/// # Errors
/// What cannot be, as a sentence.
pub(crate) fn pool_pages(other_config: &BTreeMap<String, String>) -> Result<Option<u32>, String> {
    if let Some(rings) = other_config.get(POOL_RINGS) {
        return match rings.as_str() {
            "2" => Ok(Some(2 * PAGES_PER_RING)),
            "4" => Ok(Some(4 * PAGES_PER_RING)),
            "8" => Ok(Some(8 * PAGES_PER_RING)),
            _ => Err(format!("{POOL_RINGS} is '{rings}'; 2, 4 or 8 is expected")),
        };
    }
    let Some(pages) = other_config.get(POOL_PAGES) else { return Ok(None) };
    let number = pages.parse().ok().filter(|pages| (1..=PAGES_MAX).contains(pages));
    number.map(Some).ok_or_else(|| format!("{POOL_PAGES} is '{pages}'; 1 to {PAGES_MAX} is expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_two_four_or_eight_rings() {
        for (rings, pages) in [("2", 704), ("4", 1408), ("8", 2816)] {
            assert_eq!(pool_pages(&map(&[(POOL_RINGS, rings)])), Ok(Some(pages)));
        }
        assert_eq!(2 * PAGES_PER_RING, tapio_stat::pool::PAGES_DEFAULT);
        assert_eq!(pool_pages(&map(&[])), Ok(None));
        for bad in ["0", "1", "3", "16", "", "eight", "-2", "2 "] {
            let why = pool_pages(&map(&[(POOL_RINGS, bad)])).expect_err(bad);
            assert!(why.contains("2, 4 or 8"), "{why}");
        }
        assert_eq!(pool_pages(&map(&[(POOL_PAGES, "100")])), Ok(Some(100)));
        assert_eq!(pool_pages(&map(&[(POOL_PAGES, "100"), (POOL_RINGS, "4")])), Ok(Some(1408)));
        assert!(pool_pages(&map(&[(POOL_PAGES, "0")])).is_err());
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }
}
