//! Which granules of a disk are in a set: a bitmap in chunks, so that an almost empty one costs next to nothing.

use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_types::Span;

/// Bytes that one bit stands for.
pub const GRANULE_LEN: u64 = 64 << 10;
/// Words of a chunk, which covers 2 GiB of a disk.
const WORDS: usize = 512;
const BITS: u64 = WORDS as u64 * 64;
/// The longest disk, in bytes: beyond it the bitmap would need more than 128 MiB.
const DISK_LEN_MAX: u64 = 64 << 40;

#[derive(Debug, Default)]
struct Chunk {
    /// Made at the first bit that is set.
    words: Option<Box<[u64; WORDS]>>,
    count: u64,
}

/// A set of granules.
#[derive(Debug, Default)]
pub struct Granules {
    chunks: Vec<Chunk>,
    /// Granules of the disk; the last one may be cut short by its end.
    granules: u64,
    count: u64,
}

/// The bits `from..to` of a word; `to` is at most 64.
const fn mask(from: u64, to: u64) -> u64 {
    (u64::MAX >> (64 - (to - from))) << from
}

impl Granules {
    /// An empty set for a disk of `len` bytes.
    ///
    /// # Errors
    /// The disk is longer than 64 TiB.
    pub fn new(len: u64) -> Result<Self> {
        if len > DISK_LEN_MAX {
            let detail =
                format!("a disk of {len} bytes is longer than the {DISK_LEN_MAX} that are kept track of");
            return Err(FormatError::new(FormatErrorKind::Unsupported, detail));
        }
        let granules = len.div_ceil(GRANULE_LEN);
        let chunks = (0..granules.div_ceil(BITS)).map(|_| Chunk::default()).collect();
        Ok(Self { chunks, granules, count: 0 })
    }

    /// Granules in the set.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The granules that `span` touches.
    fn touched(&self, span: Span) -> std::ops::Range<u64> {
        if span.is_empty() {
            return 0..0;
        }
        let end = span.start.saturating_add(span.len).div_ceil(GRANULE_LEN).min(self.granules);
        span.start / GRANULE_LEN..end
    }

    /// Calls `each` with every word that `range` reaches into, as `(chunk, word, mask)`, until it says no.
    fn words(range: std::ops::Range<u64>, mut each: impl FnMut(usize, usize, u64) -> bool) {
        let mut at = range.start;
        while at < range.end {
            let until = (at / 64 * 64 + 64).min(range.end);
            let bits = mask(at % 64, (until - 1) % 64 + 1);
            if !each((at / BITS) as usize, (at % BITS / 64) as usize, bits) {
                return;
            }
            at = until;
        }
    }

    /// Puts every granule that `span` touches into the set.
    pub fn insert(&mut self, span: Span) {
        let range = self.touched(span);
        let (chunks, count) = (&mut self.chunks, &mut self.count);
        Self::words(range, |chunk, word, bits| {
            let chunk = &mut chunks[chunk];
            let words = chunk.words.get_or_insert_with(|| Box::new([0; WORDS]));
            let new = u64::from((bits & !words[word]).count_ones());
            words[word] |= bits;
            chunk.count += new;
            *count += new;
            true
        });
    }

    /// Takes every granule that `span` touches out of the set.
    pub fn remove(&mut self, span: Span) {
        let range = self.touched(span);
        let (chunks, count) = (&mut self.chunks, &mut self.count);
        Self::words(range, |chunk, word, bits| {
            let chunk = &mut chunks[chunk];
            if let Some(words) = &mut chunk.words {
                let gone = u64::from((bits & words[word]).count_ones());
                words[word] &= !bits;
                chunk.count -= gone;
                *count -= gone;
            }
            true
        });
    }

    /// Whether every granule that `span` touches is in the set.
    pub fn has_all(&self, span: Span) -> bool {
        let mut all = true;
        Self::words(self.touched(span), |chunk, word, bits| {
            all = self.chunks[chunk].words.as_ref().is_some_and(|words| words[word] & bits == bits);
            all
        });
        all
    }

    /// The first run of granules of the set at or after byte `from`, at most `len_max` bytes of it; it does not
    /// reach past `disk_len`.
    pub fn next_run(&self, from: u64, len_max: u64, disk_len: u64) -> Option<Span> {
        let start = self.next(from.div_ceil(GRANULE_LEN))?;
        let most = (len_max / GRANULE_LEN).max(1);
        let mut end = start + 1;
        while end < self.granules && end - start < most && self.has(end) {
            end += 1;
        }
        let (start, end) = (start * GRANULE_LEN, (end * GRANULE_LEN).min(disk_len));
        (start < end).then(|| Span::new(start, end - start))
    }

    fn has(&self, granule: u64) -> bool {
        let chunk = &self.chunks[(granule / BITS) as usize];
        chunk
            .words
            .as_ref()
            .is_some_and(|words| words[(granule % BITS / 64) as usize] >> (granule % 64) & 1 == 1)
    }

    fn next(&self, from: u64) -> Option<u64> {
        let mut at = from;
        while at < self.granules {
            let chunk = &self.chunks[(at / BITS) as usize];
            let Some(words) = chunk.words.as_ref().filter(|_| chunk.count > 0) else {
                at = (at / BITS + 1) * BITS;
                continue;
            };
            let word = words[(at % BITS / 64) as usize] >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros()));
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Moves everything that is in `other` here. The two are of one disk.
    pub fn absorb(&mut self, other: &mut Self) {
        for (mine, theirs) in self.chunks.iter_mut().zip(&mut other.chunks) {
            if std::mem::take(&mut theirs.count) == 0 {
                continue;
            }
            let Some(from) = &mut theirs.words else { continue };
            let into = mine.words.get_or_insert_with(|| Box::new([0; WORDS]));
            let mut count = 0;
            for (into, from) in into.iter_mut().zip(from.iter_mut()) {
                *into |= std::mem::take(from);
                count += u64::from(into.count_ones());
            }
            self.count += count - mine.count;
            mine.count = count;
        }
        other.count = 0;
    }

    /// Empties the set; the chunks that were used stay.
    pub fn clear(&mut self) {
        for chunk in &mut self.chunks {
            if std::mem::take(&mut chunk.count) > 0
                && let Some(words) = &mut chunk.words
            {
                words.fill(0);
            }
        }
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tapio_ring::sim::Random;

    use super::*;

    const G: u64 = GRANULE_LEN;

    #[test]
    fn it_does_what_a_plain_set_does() {
        // Across three chunks, the last of which is short and ends inside a granule.
        let len = (2 * BITS + 70) * G + 512;
        let last = 2 * BITS + 70;
        let mut random = Random::new(7);
        let (mut set, mut plain) = (Granules::new(len).unwrap(), BTreeSet::new());
        let (mut other, mut other_plain) = (Granules::new(len).unwrap(), BTreeSet::new());
        for _ in 0..3000 {
            let near = [0, BITS, 2 * BITS][random.below(3) as usize];
            let first = (near + random.below(200)).saturating_sub(100).min(last);
            let start = first * G + random.below(G);
            let span = Span::new(start, (1 + random.below(80 * G)).min(len.saturating_sub(start).max(1)));
            let touched = span.start / G..=((span.start + span.len - 1) / G).min(last);
            match random.below(6) {
                0 | 1 => {
                    set.insert(span);
                    plain.extend(touched);
                }
                2 | 3 => {
                    set.remove(span);
                    plain.retain(|granule| !touched.contains(granule));
                }
                4 => {
                    other.insert(span);
                    other_plain.extend(touched);
                }
                _ if random.chance(1, 20) => {
                    set.absorb(&mut other);
                    plain.append(&mut other_plain);
                    assert_eq!(other.count(), 0);
                }
                _ if random.chance(1, 200) => {
                    set.clear();
                    plain.clear();
                }
                _ => {
                    let all = touched.clone().all(|granule| plain.contains(&granule));
                    assert_eq!(set.has_all(span), all, "{span:?}");
                    let run = set.next_run(first * G, 4 * G, len).map(|run| run.start / G);
                    assert_eq!(run, plain.range(first..).next().copied());
                }
            }
            assert_eq!(set.count(), plain.len() as u64);
            assert_eq!(other.count(), other_plain.len() as u64);
        }
    }

    #[test]
    fn a_run_ends_with_the_disk_and_at_its_limit() {
        let len = 10 * G + 512;
        let mut set = Granules::new(len).unwrap();
        set.insert(Span::new(2 * G, 9 * G));
        assert_eq!(set.next_run(0, 4 * G, len), Some(Span::new(2 * G, 4 * G)));
        assert_eq!(set.next_run(8 * G, 16 * G, len), Some(Span::new(8 * G, 2 * G + 512)));
        assert_eq!(set.next_run(11 * G, 16 * G, len), None);
        assert!(Granules::new(u64::MAX).is_err());
        assert!(Granules::new(0).unwrap().next_run(0, G, 0).is_none());
    }
}
