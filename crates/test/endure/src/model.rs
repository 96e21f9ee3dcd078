//! What a disk has to hold, sector by sector.
//!
//! Every write has a number. A sector holds the number of its last write, 0 for zeroes, and the bytes follow from the
//! disk, the number and the sector: a sector that is not what it should be usually says what it is. A write that was
//! not answered, or answered with an error, may be there or not: its number stands beside the known one until a read
//! has shown which it is. From then on that is what the sector has to hold.
//!
//! What was answered survives the end of a process, flushed or not: it is in the page cache or the intent log. Only a
//! power cut may take what no flush covered, and there is none here. The model notes what a flush covered all the
//! same: a finding says so, because it tells apart two kinds of defect.
//!
//! A discarded sector reads as zeroes or as before, and stays as it was read. Of an encrypted VHD only whole blocks are
//! discarded, with their ciphertext in place: what was read as zeroes may be what it was before when the process was
//! killed, once, unless the sector was written or zeroed since, or the disk closed in order.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use crate::random::mix;

/// Bytes of a sector.
pub const SECTOR_LEN: u64 = 512;

/// A range of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl Range {
    /// Its first byte.
    pub const fn offset(self) -> u64 {
        self.first * SECTOR_LEN
    }

    /// Its bytes.
    pub const fn len(self) -> u64 {
        self.count * SECTOR_LEN
    }

    const fn overlaps(self, other: Self) -> bool {
        self.first < other.first + other.count && other.first < self.first + self.count
    }

    fn sectors(self) -> std::ops::Range<u64> {
        self.first..self.first + self.count
    }
}

/// The content of a disk.
#[derive(Clone, Debug)]
pub struct Model {
    /// Makes the contents of different disks differ.
    disk: u16,
    sectors: Vec<u32>,
    /// What else a sector may hold.
    unsure: HashMap<u64, Vec<u32>>,
    /// Sectors of a block, where blocks are discarded as a whole and come back when the process is killed.
    block: Option<u64>,
    /// What a discarded sector may hold again when the process is killed.
    returning: HashMap<u64, Vec<u32>>,
    /// Ranges that requests use just now.
    busy: Vec<Range>,
    /// The number of the last write.
    written: u32,
    /// Writes below this number were flushed.
    flushed: u32,
    /// Writes that have no answer yet.
    unanswered: Vec<u32>,
    /// The first write of each step of the schedule.
    steps: Vec<(u32, u64)>,
    /// What became of requests, the latest last.
    history: VecDeque<Event>,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
struct Event {
    step: u64,
    range: Range,
    number: u32,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Wrote,
    Zeroed,
    MaybeWrote,
    MaybeZeroed,
    Read,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, last) = (self.number, self.range.first + self.range.count - 1);
        write!(f, "step {}, sectors {} to {last}: ", self.step, self.range.first)?;
        match self.what {
            What::Wrote => write!(f, "write {number} was answered"),
            What::Zeroed => write!(f, "zeroes ({number}) were answered"),
            What::MaybeWrote => write!(f, "write {number} failed or was not answered"),
            What::MaybeZeroed => write!(f, "zeroes ({number}) failed, or it was a discard"),
            What::Read => write!(f, "read and found as it should be"),
        }
    }
}

/// Requests whose fate is remembered.
const HISTORY_MAX: usize = 100_000;

/// Requests that a finding shows.
const HISTORY_SHOWN: usize = 16;

/// Fills a sector with what write `number` leaves there.
pub fn fill(disk: u16, number: u32, sector: u64, into: &mut [u8]) {
    if number == 0 {
        into.fill(0);
        return;
    }
    let key = mix(u64::from(disk) << 48 ^ u64::from(number) << 16) ^ sector;
    for (index, word) in into.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let value = match index {
            0 => MARK | u64::from(disk) << 32 | u64::from(number),
            1 => sector,
            _ => mix(key.wrapping_add(index as u64)),
        };
        *word = value.to_le_bytes();
    }
}

/// The first two bytes of every sector that was written, at the upper end of a word.
const MARK: u64 = 0x7a10 << 48;

/// What a sector says of itself.
fn describe(bytes: &[u8]) -> String {
    let word = |index: usize| u64::from_le_bytes(bytes.as_chunks::<8>().0[index]);
    if bytes.iter().all(|byte| *byte == 0) {
        return "zeroes".into();
    }
    let (head, sector) = (word(0), word(1));
    if head & (0xffff << 48) != MARK {
        let head: Vec<String> = bytes.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        return format!("bytes that no write here has ({}...)", head.join(" "));
    }
    let (disk, number) = ((head >> 32) as u16, head as u32);
    let mut whole = vec![0; bytes.len()];
    fill(disk, number, sector, &mut whole);
    let torn = if whole == bytes { "" } else { ", torn" };
    format!("write {number} of disk {disk} to sector {sector}{torn}")
}

impl Model {
    /// An empty disk of `len` bytes.
    pub fn new(disk: u16, len: u64) -> Self {
        let sectors = vec![0; (len / SECTOR_LEN) as usize];
        Self {
            disk,
            sectors,
            unsure: HashMap::new(),
            block: None,
            returning: HashMap::new(),
            busy: Vec::new(),
            written: 0,
            flushed: 0,
            unanswered: Vec::new(),
            steps: Vec::new(),
            history: VecDeque::new(),
        }
    }

    /// Discards are those of an encrypted VHD with blocks of so many sectors.
    pub const fn encrypted(mut self, block: u64) -> Self {
        self.block = Some(block);
        self
    }

    /// Sectors of the disk.
    pub const fn count(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The disk has become larger.
    pub fn grow(&mut self, len: u64) {
        self.sectors.resize((len / SECTOR_LEN) as usize, 0);
    }

    /// A step of the schedule begins.
    pub fn step(&mut self, step: u64) {
        self.steps.push((self.written + 1, step));
    }

    /// Takes a range for a request, unless another has some of it.
    pub fn take(&mut self, range: Range) -> bool {
        let is_free = !self.busy.iter().any(|busy| busy.overlaps(range));
        if is_free {
            self.busy.push(range);
        }
        is_free
    }

    /// The request that had taken the range is over.
    pub fn release(&mut self, range: Range) {
        self.busy.retain(|busy| *busy != range);
    }

    fn remember(&mut self, range: Range, number: u32, what: What) {
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        let step = self.steps.last().map_or(0, |(_, step)| *step);
        self.history.push_back(Event { step, range, number, what });
    }

    /// The number of a new write.
    pub fn begin_write(&mut self) -> u32 {
        self.written += 1;
        self.unanswered.push(self.written);
        self.written
    }

    /// Write `number` (which may have been of zeroes) was answered well.
    pub fn wrote(&mut self, range: Range, number: u32, zeroes: bool) {
        self.unanswered.retain(|other| *other != number);
        self.remember(range, number, if zeroes { What::Zeroed } else { What::Wrote });
        for sector in range.sectors() {
            self.sectors[sector as usize] = if zeroes { 0 } else { number };
            self.unsure.remove(&sector);
            self.returning.remove(&sector);
        }
    }

    /// Write `number` had no good answer: each sector of it may be there or not.
    pub fn maybe_wrote(&mut self, range: Range, number: u32, zeroes: bool) {
        self.unanswered.retain(|other| *other != number);
        self.remember(range, number, if zeroes { What::MaybeZeroed } else { What::MaybeWrote });
        let value = if zeroes { 0 } else { number };
        for sector in range.sectors() {
            let others = self.unsure.entry(sector).or_default();
            if self.sectors[sector as usize] != value && !others.contains(&value) {
                others.push(value);
            }
        }
    }

    /// Discard `number` was answered, well or not.
    pub fn discarded(&mut self, range: Range, number: u32) {
        let Some(block) = self.block else { return self.maybe_wrote(range, number, true) };
        // The last block may be shorter.
        let end = range.first + range.count;
        let last = if end == self.count() { end } else { end / block * block };
        let first = range.first.next_multiple_of(block).min(last);
        for sector in first..last {
            let known = [self.sectors[sector as usize]];
            let others = self.unsure.get(&sector).map_or(&[][..], Vec::as_slice);
            let returning = self.returning.entry(sector).or_default();
            for value in known.iter().chain(others) {
                if *value != 0 && !returning.contains(value) {
                    returning.push(*value);
                }
            }
        }
        self.maybe_wrote(Range { first, count: last - first }, number, true);
    }

    /// The process was killed, and no request is in flight.
    pub fn killed(&mut self) {
        for (sector, values) in std::mem::take(&mut self.returning) {
            let known = self.sectors[sector as usize];
            let others = self.unsure.entry(sector).or_default();
            for value in values {
                if value != known && !others.contains(&value) {
                    others.push(value);
                }
            }
        }
    }

    /// The disk was closed in order: nothing comes back any more.
    pub fn closed(&mut self) {
        self.returning.clear();
    }

    /// What a flush that begins now covers, for [`Model::flush`].
    pub fn begin_flush(&self) -> u32 {
        self.unanswered.iter().min().copied().unwrap_or(self.written + 1)
    }

    /// A flush was answered.
    pub fn flush(&mut self, covered: u32) {
        self.flushed = self.flushed.max(covered);
    }

    /// Compares what was read, and takes note of what became of uncertain writes. The first sector that differs is an
    /// error in words.
    pub fn read(&mut self, range: Range, bytes: &[u8]) -> Result<(), String> {
        let sector_len = SECTOR_LEN as usize;
        if bytes.len() as u64 != range.len() {
            return Err(format!("a read of {} bytes returned {}", range.len(), bytes.len()));
        }
        let mut want = [0; SECTOR_LEN as usize];
        for (sector, found) in range.sectors().zip(bytes.chunks_exact(sector_len)) {
            let known = self.sectors[sector as usize];
            fill(self.disk, known, sector, &mut want);
            if found == want {
                self.unsure.remove(&sector);
                continue;
            }
            let others = self.unsure.remove(&sector).unwrap_or_default();
            let seen = others.iter().find(|other| {
                fill(self.disk, **other, sector, &mut want);
                found == want
            });
            match seen {
                Some(number) => self.sectors[sector as usize] = *number,
                None => return Err(self.differs(sector, known, &others, found)),
            }
        }
        self.remember(range, 0, What::Read);
        Ok(())
    }

    fn differs(&self, sector: u64, known: u32, others: &[u32], found: &[u8]) -> String {
        let expected = match known {
            0 => "zeroes".to_string(),
            number => {
                let flushed = if number < self.flushed { "flushed" } else { "answered, not flushed" };
                format!("write {number} ({flushed}, at step {})", self.step_of(number))
            }
        };
        let or = match others {
            [] => String::new(),
            others => format!(", or one of the uncertain writes {others:?}"),
        };
        let mut text = format!(
            "sector {sector} of disk {} (byte {}) holds {}; it should hold {expected}{or}",
            self.disk,
            sector * SECTOR_LEN,
            describe(found)
        );
        let here = Range { first: sector, count: 1 };
        let mut events: Vec<&Event> = self
            .history
            .iter()
            .rev()
            .filter(|event| event.range.overlaps(here))
            .take(HISTORY_SHOWN)
            .collect();
        events.reverse();
        for event in events {
            text.push_str(&format!("\n    {event}"));
        }
        text
    }

    fn step_of(&self, number: u32) -> u64 {
        let before = self.steps.partition_point(|(first, _)| *first <= number);
        before.checked_sub(1).map_or(0, |index| self.steps[index].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range { first: 2, count: 2 };

    fn bytes(disk: u16, number: u32, range: Range) -> Vec<u8> {
        let mut bytes = vec![0; range.len() as usize];
        for (sector, into) in range.sectors().zip(bytes.chunks_exact_mut(SECTOR_LEN as usize)) {
            fill(disk, number, sector, into);
        }
        bytes
    }

    fn written() -> (Model, u32) {
        let mut model = Model::new(1, 16 * SECTOR_LEN);
        model.step(5);
        let number = model.begin_write();
        model.wrote(RANGE, number, false);
        (model, number)
    }

    #[test]
    fn an_answered_write_has_to_be_there() {
        let (mut model, number) = written();
        assert_eq!(model.read(RANGE, &bytes(1, number, RANGE)), Ok(()));
        let said = model.read(RANGE, &bytes(1, 0, RANGE)).unwrap_err();
        assert!(said.contains("sector 2 of disk 1") && said.contains("holds zeroes"), "{said}");
        assert!(said.contains("write 1 (answered, not flushed, at step 5)"), "{said}");
        let covered = model.begin_flush();
        model.flush(covered);
        let said = model.read(RANGE, &bytes(1, 9, RANGE)).unwrap_err();
        assert!(said.contains("write 9 of disk 1 to sector 2") && said.contains("(flushed, "), "{said}");
        let mut torn = bytes(1, number, RANGE);
        torn[600] ^= 1;
        let said = model.read(RANGE, &torn).unwrap_err();
        assert!(said.contains("sector 3") && said.contains("torn"), "{said}");
    }

    #[test]
    fn an_uncertain_write_is_old_or_new_until_it_was_read() {
        let (mut model, first) = written();
        let second = model.begin_write();
        model.maybe_wrote(RANGE, second, false);
        // One sector has it, the other has not.
        let mut found = bytes(1, first, RANGE);
        found[..512].copy_from_slice(&bytes(1, second, RANGE)[..512]);
        assert_eq!(model.read(RANGE, &found), Ok(()));
        assert_eq!(model.read(RANGE, &found), Ok(()));
        assert!(model.read(RANGE, &bytes(1, second, RANGE)).is_err());
        assert!(model.read(RANGE, &bytes(1, first, RANGE)).is_err());
    }

    /// A disk with one block of four sectors and one of two; all are written.
    fn encrypted() -> (Model, u32, Range) {
        let mut model = Model::new(1, 6 * SECTOR_LEN).encrypted(4);
        let (number, all) = (model.begin_write(), Range { first: 0, count: 6 });
        model.wrote(all, number, false);
        (model, number, all)
    }

    #[test]
    fn what_was_discarded_stays_as_it_was_read_until_the_process_is_killed() {
        let (mut model, number, all) = encrypted();
        let discard = model.begin_write();
        model.discarded(all, discard);
        let (before, zeroes) = (bytes(1, number, all), bytes(1, 0, all));
        assert_eq!(model.read(all, &zeroes), Ok(()));
        assert!(model.clone().read(all, &before).is_err(), "without a kill");
        let mut closed = model.clone();
        closed.closed();
        closed.killed();
        assert!(closed.read(all, &before).is_err(), "after an orderly end");
        let mut zeroed = model.clone();
        let promise = zeroed.begin_write();
        zeroed.wrote(all, promise, true);
        zeroed.killed();
        assert!(zeroed.read(all, &before).is_err(), "after zeroes that were promised");
        model.killed();
        assert_eq!(model.clone().read(all, &zeroes), Ok(()));
        assert_eq!(model.read(all, &before), Ok(()));
        model.killed();
        assert!(model.read(all, &zeroes).is_err(), "it was read since");
    }

    #[test]
    fn part_of_an_encrypted_block_is_not_discarded() {
        let (mut model, number, all) = encrypted();
        let discard = model.begin_write();
        model.discarded(Range { first: 1, count: 5 }, discard);
        let mut found = bytes(1, number, all);
        assert_eq!(model.clone().read(all, &found), Ok(()));
        found[4 * 512..].fill(0);
        assert_eq!(model.clone().read(all, &found), Ok(()), "the short last block is whole");
        found[3 * 512..].fill(0);
        assert!(model.read(all, &found).is_err());
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_began() {
        let mut model = Model::new(0, 16 * SECTOR_LEN);
        let (first, second) = (model.begin_write(), model.begin_write());
        model.wrote(RANGE, second, true);
        assert_eq!(model.begin_flush(), first);
    }

    #[test]
    fn a_range_is_used_by_one_request_at_a_time() {
        let mut model = Model::new(0, 16 * SECTOR_LEN);
        assert!(model.take(RANGE));
        assert!(!model.take(Range { first: 3, count: 4 }) && model.take(Range { first: 4, count: 4 }));
        model.release(RANGE);
        assert!(model.take(Range { first: 0, count: 4 }));
    }
}
