//! Pages of a guest that stay mapped (`feature-persistent`).
//!
//! The guest uses the same ones again and again, so that after a while nothing is mapped for a request any more, and
//! nothing is copied either.

use std::collections::HashMap;
use std::io;

use tapio_xen::{Domain, GrantRef, Mapped, Rights};

/// Pages of a ring that stay mapped, at most: three times what an ordinary ring of one page can name.
pub const PERSISTENT_MAX: usize = 1056;

#[derive(Debug)]
struct Page {
    grant: GrantRef,
    mapped: Mapped,
    /// Requests that use it now.
    users: u32,
    /// Used since the hand passed it.
    recent: bool,
}

/// What happened in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PersistentCounts {
    /// Pages that were mapped already.
    pub hits: u64,
    /// Pages that had to be mapped.
    pub misses: u64,
    /// Mappings that were evicted for others.
    pub evictions: u64,
}

/// The table of a ring. What was not used for a while goes when there is no room: a hand goes round, passes over what
/// was used since it came by last, and takes the first that was not.
#[derive(Debug)]
pub struct PersistentPages {
    pages: Vec<Page>,
    places: HashMap<GrantRef, u32>,
    hand: usize,
    max: usize,
    /// What happened.
    pub counts: PersistentCounts,
}

/// A page in use: its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse(u32);

impl PersistentPages {
    /// None yet, at most `max`.
    pub fn new(max: usize) -> Self {
        Self {
            pages: Vec::new(),
            places: HashMap::new(),
            hand: 0,
            max: max.max(1),
            counts: PersistentCounts::default(),
        }
    }

    /// A page for a request: where it is. To be given back by [`PersistentPages::put`]. `None` where the table is full
    /// of pages in use: the request maps its own.
    ///
    /// # Errors
    /// The guest does not grant it, or not for writing.
    pub fn get(&mut self, domain: &Domain, grant: GrantRef) -> io::Result<Option<(InUse, *mut u8)>> {
        if let Some(place) = self.places.get(&grant) {
            let page = &mut self.pages[*place as usize];
            page.users += 1;
            page.recent = true;
            self.counts.hits += 1;
            return Ok(Some((InUse(*place), page.mapped.as_ptr())));
        }
        self.counts.misses += 1;
        let victim = if self.pages.len() < self.max { None } else { Some(self.victim()) };
        if victim == Some(None) {
            return Ok(None);
        }
        let mapped = domain.map(&[grant], Rights::Write)?;
        let base = mapped.as_ptr();
        let page = Page { grant, mapped, users: 1, recent: true };
        let place = match victim.flatten() {
            None => {
                self.pages.push(page);
                self.pages.len() - 1
            }
            Some(place) => {
                let old = std::mem::replace(&mut self.pages[place], page);
                self.places.remove(&old.grant);
                self.counts.evictions += 1;
                place
            }
        };
        self.places.insert(grant, place as u32);
        Ok(Some((InUse(place as u32), base)))
    }

    /// A page that no request uses, after at most two rounds of the hand.
    fn victim(&mut self) -> Option<usize> {
        for _ in 0..2 * self.pages.len() {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.pages.len();
            let page = &mut self.pages[place];
            if page.users == 0 && !std::mem::take(&mut page.recent) {
                return Some(place);
            }
        }
        None
    }

    /// A request does not need a page any more.
    pub fn put(&mut self, page: InUse) {
        if let Some(page) = self.pages.get_mut(page.0 as usize) {
            page.users = page.users.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_xen::double::{DoubleVm, Guest};

    #[test]
    fn pages_stay_until_others_need_the_place() {
        let vm = DoubleVm::new(16).unwrap();
        let domain = Domain::Double(Guest::of(&vm, 5).unwrap());
        let grants: Vec<GrantRef> = (0..8).map(|page| vm.grant(page, Rights::Write, 0).unwrap()).collect();
        let mut table = PersistentPages::new(4);
        let (first, base) = table.get(&domain, grants[0]).unwrap().unwrap();
        let (again, same) = table.get(&domain, grants[0]).unwrap().unwrap();
        assert_eq!((first, base), (again, same));
        assert_eq!(table.counts, PersistentCounts { hits: 1, misses: 1, evictions: 0 });
        assert!(vm.revoke(grants[0]).is_err(), "it is mapped");
        table.put(again);
        // The first page is in use all the time, the others come and go.
        for grant in &grants[1..] {
            let (page, _) = table.get(&domain, *grant).unwrap().unwrap();
            table.put(page);
        }
        assert_eq!((table.pages.len(), table.counts.evictions), (4, 4));
        let (_, still) = table.get(&domain, grants[0]).unwrap().unwrap();
        assert_eq!(still, base);
        // Full of pages in use: nothing goes, and nothing is mapped.
        let mut full = PersistentPages::new(2);
        let held: Vec<_> =
            grants[..2].iter().map(|grant| full.get(&domain, *grant).unwrap().unwrap().0).collect();
        assert_eq!(full.get(&domain, grants[2]).unwrap(), None);
        full.put(held[0]);
        assert!(full.get(&domain, grants[2]).unwrap().is_some());
        drop((table, full));
        for grant in grants {
            vm.revoke(grant).expect("nothing is mapped any more");
        }
    }

    #[test]
    fn a_page_for_reading_alone_is_refused() {
        let vm = DoubleVm::new(2).unwrap();
        let domain = Domain::Double(Guest::of(&vm, 5).unwrap());
        let grant = vm.grant(0, Rights::Read, 0).unwrap();
        let mut table = PersistentPages::new(4);
        assert!(table.get(&domain, grant).is_err());
        assert!(table.get(&domain, GrantRef(4000)).is_err());
        assert!(table.pages.is_empty());
    }
}
