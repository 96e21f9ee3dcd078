//! A simulated file: what its readers see, and what would survive a power cut.

use std::collections::HashMap;
use std::rc::Rc;

use tapio_types::Span;

use super::random::Random;

const PAGE_LEN: u64 = 4096;

type Page = Rc<[u8; PAGE_LEN as usize]>;

/// The content of a file at one moment. Cheap to copy: pages are shared until they are written.
#[derive(Clone, Debug, Default)]
pub struct Durable {
    pages: HashMap<u64, Page>,
    len: u64,
}

impl Durable {
    /// A file with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        let mut file = Self { pages: HashMap::new(), len: bytes.len() as u64 };
        file.write(0, bytes);
        file
    }

    /// Bytes in all.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `into` from `at`; what lies past the end reads as zero.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let place = at + done as u64;
            let within = (place % PAGE_LEN) as usize;
            let count = (PAGE_LEN as usize - within).min(into.len() - done);
            let piece = &mut into[done..done + count];
            match self.pages.get(&(place / PAGE_LEN)) {
                Some(page) => piece.copy_from_slice(&page[within..within + count]),
                None => piece.fill(0),
            }
            done += count;
        }
    }

    /// Writes `from` at `at`, growing the file.
    pub fn write(&mut self, at: u64, from: &[u8]) {
        self.len = self.len.max(at + from.len() as u64);
        let mut done = 0;
        while done < from.len() {
            let place = at + done as u64;
            let within = (place % PAGE_LEN) as usize;
            let count = (PAGE_LEN as usize - within).min(from.len() - done);
            let page = self.pages.entry(place / PAGE_LEN).or_insert_with(|| Rc::new([0; PAGE_LEN as usize]));
            Rc::make_mut(page)[within..within + count].copy_from_slice(&from[done..done + count]);
            done += count;
        }
    }

    /// How much from the beginning of `span` is kept alike: pages that are there, or a hole.
    pub fn data_run(&self, span: Span) -> (u64, bool) {
        let end = span.start + span.len;
        let is_data = |place: u64| self.pages.contains_key(&(place / PAGE_LEN));
        let first = is_data(span.start);
        let mut at = (span.start / PAGE_LEN + 1) * PAGE_LEN;
        while at < end && is_data(at) == first {
            at += PAGE_LEN;
        }
        (at.min(end) - span.start, first)
    }

    /// Makes a range inside the file read as zero.
    pub fn zero(&mut self, at: u64, len: u64) {
        let end = (at + len).min(self.len);
        let mut place = at;
        while place < end {
            let within = place % PAGE_LEN;
            let count = (PAGE_LEN - within).min(end - place);
            if count == PAGE_LEN {
                self.pages.remove(&(place / PAGE_LEN));
            } else if let Some(page) = self.pages.get_mut(&(place / PAGE_LEN)) {
                Rc::make_mut(page)[within as usize..(within + count) as usize].fill(0);
            }
            place += count;
        }
    }

    /// Cuts or grows the file; new bytes read as zero.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.zero(len, self.len - len);
        }
        self.len = len;
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.read(0, &mut bytes);
        bytes
    }
}

/// A change that is done, as far as a reader can see, but not flushed.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Write { at: u64, data: Rc<[u8]> },
    Zero { at: u64, len: u64 },
    SetLen(u64),
}

impl Change {
    fn apply(&self, to: &mut Durable) {
        match self {
            Self::Write { at, data } => to.write(*at, data),
            Self::Zero { at, len } => to.zero(*at, *len),
            Self::SetLen(len) => to.set_len(*len),
        }
    }
}

/// A file of a simulated host.
#[derive(Clone, Debug, Default)]
pub struct SimFile {
    /// What a reader sees.
    pub(super) seen: Durable,
    /// What a power cut leaves for sure.
    pub(super) safe: Durable,
    /// What came since, in order.
    pub(super) pending: Vec<Change>,
}

impl SimFile {
    /// A file whose bytes are all safe.
    pub fn new(bytes: &[u8]) -> Self {
        let content = Durable::new(bytes);
        Self { seen: content.clone(), safe: content, pending: Vec::new() }
    }

    /// What a reader sees.
    pub const fn content(&self) -> &Durable {
        &self.seen
    }

    pub(super) fn change(&mut self, change: Change) {
        change.apply(&mut self.seen);
        self.pending.push(change);
    }

    /// The first `count` pending changes are safe.
    pub(super) fn flushed(&mut self, count: usize) {
        for change in self.pending.drain(..count) {
            change.apply(&mut self.safe);
        }
    }

    /// The file's server was restarted, and this is what was left.
    pub(super) fn restart(&mut self, left: Durable) {
        *self = Self { seen: left.clone(), safe: left, pending: Vec::new() };
    }

    /// What is left after a power cut, as chance has it.
    ///
    /// The disk writes `sector_len` bytes as one: each such piece of a write is there or not.
    pub(super) fn cut(&self, sector_len: u64, random: &mut Random) -> Durable {
        let mut left = self.safe.clone();
        let is_metadata = |change: &Change| !matches!(change, Change::Write { .. });
        let metadata = self.pending.iter().filter(|change| is_metadata(change)).count() as u64;
        let mut metadata_left = random.below(metadata + 1);
        let keep = random.below(4);
        for change in &self.pending {
            if let Change::Write { at, data } = change {
                let mut done = 0;
                while done < data.len() {
                    let place = at + done as u64;
                    let len = ((sector_len - place % sector_len) as usize).min(data.len() - done);
                    let sector = &data[done..done + len];
                    done += len;
                    // All, none, or any: the corners are worth more than their share.
                    let survives = match keep {
                        0 => false,
                        1 => true,
                        _ => random.chance(1, 2),
                    };
                    // A write into a range whose growth was lost has no place to be.
                    if survives && place + sector.len() as u64 <= left.len() {
                        left.write(place, sector);
                    }
                }
            } else if metadata_left > 0 {
                metadata_left -= 1;
                change.apply(&mut left);
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use tapio_types::SECTOR_LEN;

    use super::*;

    #[test]
    fn what_was_flushed_survives_every_cut_and_the_rest_is_old_or_new() {
        for seed in 0..500 {
            let mut file = SimFile::new(&[1; 4096]);
            file.change(Change::Write { at: 0, data: Rc::from([2; 1024]) });
            file.flushed(1);
            file.change(Change::Write { at: 512, data: Rc::from([3; 1024]) });
            let left = file.cut(SECTOR_LEN, &mut Random::new(seed)).bytes();
            assert_eq!(left[..512], [2; 512]);
            assert!(left[512..1024] == [2; 512] || left[512..1024] == [3; 512]);
            assert!(left[1024..1536] == [1; 512] || left[1024..1536] == [3; 512]);
            assert_eq!(left[1536..], [1; 2560]);
        }
    }

    #[test]
    fn a_long_sector_is_old_or_new_as_a_whole() {
        for seed in 0..500 {
            let mut file = SimFile::new(&[1; 8192]);
            file.change(Change::Write { at: 0, data: Rc::from([2; 8192]) });
            let left = file.cut(4096, &mut Random::new(seed)).bytes();
            for sector in left.chunks_exact(4096) {
                assert!(*sector == [1; 4096] || *sector == [2; 4096]);
            }
        }
    }

    #[test]
    fn growth_that_is_lost_takes_what_was_written_there_with_it() {
        for seed in 0..200 {
            let mut file = SimFile::new(&[1; 512]);
            file.change(Change::SetLen(1024));
            file.change(Change::Write { at: 512, data: Rc::from([3; 512]) });
            let left = file.cut(SECTOR_LEN, &mut Random::new(seed));
            assert!(left.len() == 512 || left.len() == 1024);
        }
    }
}
