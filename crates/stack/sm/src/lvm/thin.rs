//! How much of a disk its volume has: all of it, or what it holds and a little more.
//!
//! An SR has a default, from `device_config` or `sm_config`. A VDI that was made with another has it as tags of its
//! volume, so that it moves with the disk and no database is asked. Other storage managers pass over such tags.

use tapio_types::{ApiError, parse_bytes};

use super::group::Volume;
use super::metadata::Allocation;
use super::size;
use crate::errors;
use crate::traits::Config;

/// A volume becomes longer by this at a time, where nothing else is wanted.
const QUANTUM: u64 = 64 << 20;
/// And by this at most, unless a disk needs more at once.
const QUANTUM_MAX: u64 = 4 << 30;
/// A volume that is going to be written has so much ahead at most, and less where little is free. A disk that writes as
/// fast as it can has not written that before its first growth is over.
const FIRST_MAX: u64 = 512 << 20;

const ALLOCATION: &str = "allocation";
const INITIAL: &str = "initial-allocation";
const STEP: &str = "allocation-quantum";
const STEP_MAX: &str = "allocation-quantum-max";

/// Keys of `device_config`, for the descriptions of drivers.
pub(crate) const KEYS: [(&str, &str); 4] = [
    (ALLOCATION, "thick (default): a disk has all of its space at once; thin: it gets more as it is written"),
    (INITIAL, "bytes of data that a thin disk has space for at once, as 1GiB (default 0)"),
    (STEP, "bytes by which a thin disk becomes longer at least, as 256MiB (default 64MiB)"),
    (STEP_MAX, "bytes by which it becomes longer at most, while it is written fast (default 4GiB)"),
];

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) allocation: Option<Allocation>,
    initial: Option<u64>,
    quantum: Option<u64>,
    quantum_max: Option<u64>,
}

/// What counts for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Provision {
    pub(crate) is_thin: bool,
    /// Bytes of data that the volume always has space for.
    pub(crate) initial: u64,
    /// Bytes by which it becomes longer at least.
    pub(crate) quantum: u64,
    /// And at most, unless it needs more at once.
    pub(crate) quantum_max: u64,
}

/// A value, by its name or by the same with underlines, as older clients say it.
fn value<'a>(config: &'a Config, key: &str) -> Option<&'a str> {
    let value = config.get(key).or_else(|| config.get(&key.replace('-', "_")));
    value.map(String::as_str).filter(|value| !value.is_empty())
}

impl Wanted {
    /// What `config`, which is the map called `whose`, asks for.
    ///
    /// # Errors
    /// `number`: a word or a size that is none.
    pub(crate) fn read(config: &Config, whose: &str, number: u16) -> Result<Self, ApiError> {
        let failed = |key: &str, why: String| errors::fail(number, format_args!("{whose}:{key}: {why}"));
        let size = |key: &str, least: u64| match value(config, key).map(parse_bytes) {
            None => Ok(None),
            Some(Ok(bytes)) if bytes < least => Err(failed(key, format!("{bytes} bytes: at least {least}"))),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(why)) => Err(failed(key, why)),
        };
        let allocation = match value(config, ALLOCATION) {
            None => None,
            Some(word) => Some(
                Allocation::of_word(word)
                    .ok_or_else(|| failed(ALLOCATION, format!("'{word}': thick or thin")))?,
            ),
        };
        Ok(Self {
            allocation,
            initial: size(INITIAL, 0)?,
            quantum: size(STEP, size::EXTENT)?,
            quantum_max: size(STEP_MAX, size::EXTENT)?,
        })
    }

    /// As tags of a volume.
    pub(crate) fn tags(&self) -> Vec<String> {
        let allocation = self.allocation.map(|allocation| format!("{ALLOCATION}={}", allocation.word()));
        let size = |key: &str, bytes: Option<u64>| bytes.map(|bytes| format!("{key}={bytes}"));
        let sizes = [(INITIAL, self.initial), (STEP, self.quantum), (STEP_MAX, self.quantum_max)]
            .map(|(key, bytes)| size(key, bytes));
        [allocation].into_iter().chain(sizes).flatten().collect()
    }

    /// What the tags of a volume ask for.
    pub(crate) fn of(volume: &Volume) -> Self {
        let of = |key: &str| {
            let mut values = volume.tags.iter().filter_map(|tag| tag.strip_prefix(key)?.strip_prefix('='));
            values.next()
        };
        Self {
            allocation: of(ALLOCATION).and_then(Allocation::of_word),
            initial: of(INITIAL).and_then(|text| text.parse().ok()),
            quantum: of(STEP).and_then(|text| text.parse().ok()),
            quantum_max: of(STEP_MAX).and_then(|text| text.parse().ok()),
        }
    }

    /// This, and for what is not asked for the default.
    pub(crate) fn over(&self, default: Provision) -> Provision {
        Provision {
            is_thin: self.allocation.map_or(default.is_thin, |wanted| wanted == Allocation::Thin),
            initial: self.initial.unwrap_or(default.initial),
            quantum: self.quantum.unwrap_or(default.quantum),
            quantum_max: self.quantum_max.unwrap_or(default.quantum_max),
        }
    }
}

impl Provision {
    /// Of an SR of this allocation.
    pub(crate) fn of_sr(allocation: Allocation, wanted: &Wanted) -> Self {
        let default = Self {
            is_thin: allocation == Allocation::Thin,
            initial: 0,
            quantum: QUANTUM,
            quantum_max: QUANTUM_MAX,
        };
        wanted.over(default)
    }

    /// Of a volume that is as short as it may be, for a disk of `virtual_size` bytes.
    pub(crate) fn least(&self, virtual_size: u64) -> u64 {
        let full = size::full(virtual_size);
        let initial = self.initial.min(virtual_size);
        if self.is_thin { size::full(initial).max(size::empty()).min(full) } else { full }
    }

    /// Of a volume that is going to be written, whose image takes `holds` bytes now and shall have `room` ahead
    /// ([`Self::first_room`]).
    pub(crate) fn len_written(&self, virtual_size: u64, holds: u64, room: u64) -> u64 {
        let full = size::full(virtual_size);
        if !self.is_thin {
            return full;
        }
        size::rounded(holds.saturating_add(room)).max(self.least(virtual_size)).min(full)
    }

    /// What a disk has ahead before anything is known of how it is written, if `free` bytes are there for `disks`: a
    /// sixteenth of its share. An idle disk keeps it until it is snapshotted or detached.
    pub(crate) fn first_room(&self, free: u64, disks: usize) -> u64 {
        let share = free / 16 / u64::try_from(disks.max(1)).unwrap_or(u64::MAX);
        FIRST_MAX.min(self.quantum_max).min(share).max(self.quantum)
    }

    /// Of a volume of `len` bytes that shall have `wanted`, and becomes longer by `step` at least.
    pub(crate) fn longer(&self, virtual_size: u64, len: u64, (wanted, step): (u64, u64)) -> u64 {
        let step = step.max(self.quantum);
        size::rounded(wanted.max(len.saturating_add(step))).min(size::full(virtual_size)).max(len)
    }

    /// By how much it becomes longer at most, if `free` bytes are there for `disks` that grow: a quarter of its share,
    /// so that the others, those of other hosts too, and snapshots still find room.
    pub(crate) fn step_max(&self, free: u64, disks: usize) -> u64 {
        let share = free / 4 / u64::try_from(disks.max(1)).unwrap_or(u64::MAX);
        self.quantum_max.min(share).max(self.quantum)
    }
}

/// A volume that shall become longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Bytes that it has.
    pub(crate) len: u64,
    /// Bytes that it needs, and those that it gets if there is enough for all.
    pub(crate) needs: u64,
    pub(crate) goal: u64,
}

/// How long each becomes when `free` bytes are there for all of them: as they should be, else as they need, else all
/// get the same.
pub(crate) fn allot(free: u64, growths: &[Growth]) -> Vec<u64> {
    let sum = |to: fn(&Growth) -> u64| {
        growths.iter().fold(0_u64, |sum, growth| sum.saturating_add(to(growth).saturating_sub(growth.len)))
    };
    if sum(|growth| growth.goal) <= free {
        return growths.iter().map(|growth| growth.goal).collect();
    }
    let mut left = free;
    let mut all: Vec<u64> = growths.iter().map(|growth| growth.len).collect();
    // Those that need least come first: what they leave is for the others.
    let mut order: Vec<usize> = (0..growths.len()).collect();
    order.sort_by_key(|index| growths[*index].needs.saturating_sub(growths[*index].len));
    for (done, index) in order.iter().enumerate() {
        let growth = &growths[*index];
        let share = (left / size::EXTENT).div_ceil((growths.len() - done) as u64) * size::EXTENT;
        let more = growth.needs.saturating_sub(growth.len).min(share).min(left / size::EXTENT * size::EXTENT);
        all[*index] = growth.len + more;
        left -= more;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn config(pairs: &[(&str, &str)]) -> Config {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_asked_for_is_read_kept_as_tags_and_refused_by_name() {
        let asked = config(&[
            ("allocation", "thin"),
            ("initial_allocation", "1GiB"),
            ("allocation-quantum", "8M"),
            ("allocation_quantum_max", "1GiB"),
        ]);
        let wanted = Wanted::read(&asked, "sm_config", 66).unwrap();
        let volume = Volume { tags: wanted.tags(), ..Volume::default() };
        assert_eq!(Wanted::of(&volume), wanted);
        assert_eq!(
            wanted.over(Provision::of_sr(Allocation::Thick, &Wanted::default())),
            Provision { is_thin: true, initial: 1 << 30, quantum: 8 * MIB, quantum_max: 1 << 30 }
        );
        assert!(Wanted::default().tags().is_empty());
        for (bad, says) in [
            (("allocation", "xlvhd"), "thick or thin"),
            (("initial-allocation", "much"), "number"),
            (("allocation-quantum", "1M"), "at least 4194304"),
        ] {
            let error = Wanted::read(&config(&[bad]), "device_config", 1).unwrap_err();
            assert!(error.to_string().contains(says) && error.to_string().contains(bad.0), "{error}");
        }
        let odd = Volume { tags: vec!["hidden".into(), "allocation=".into()], ..Volume::default() };
        assert_eq!(Wanted::of(&odd), Wanted::default());
    }

    #[test]
    fn a_thin_volume_begins_small_and_is_never_longer_than_its_disk() {
        let thin = Provision { is_thin: true, initial: 0, quantum: 64 * MIB, quantum_max: 1 << 30 };
        let disk = 1 << 30;
        assert_eq!(thin.least(disk), 8 * MIB);
        assert_eq!(thin.len_written(disk, 6 * MIB, 64 * MIB), 72 * MIB);
        assert_eq!(thin.longer(disk, 72 * MIB, (73 * MIB, 0)), 136 * MIB);
        assert_eq!(thin.longer(disk, 72 * MIB, (73 * MIB, 128 * MIB)), 200 * MIB);
        assert_eq!(thin.longer(disk, 72 * MIB, (300 * MIB, 128 * MIB)), 300 * MIB);
        assert_eq!(thin.longer(disk, 72 * MIB, (u64::MAX - 1, 0)), size::full(disk));
        assert_eq!(thin.step_max(64 << 30, 4), 1 << 30, "as the setting says");
        assert_eq!(thin.step_max(4 << 30, 4), 256 * MIB, "a part of what is free");
        assert_eq!(thin.step_max(0, 0), 64 * MIB, "the quantum");
        assert_eq!(thin.len_written(8 * MIB, 6 * MIB, 64 * MIB), size::full(8 * MIB));
        assert_eq!(thin.first_room(1 << 40, 10), 512 * MIB, "plenty");
        assert_eq!(thin.first_room(32 << 30, 10), 204 * MIB + (4 * MIB) / 5, "a part of what is free");
        assert_eq!(thin.first_room(0, 0), 64 * MIB, "the quantum");
        assert_eq!(Provision { quantum_max: 128 * MIB, ..thin }.first_room(1 << 40, 1), 128 * MIB);
        let with_initial = Provision { initial: 256 * MIB, ..thin };
        assert_eq!(with_initial.least(disk), size::full(256 * MIB));
        assert_eq!(with_initial.least(64 * MIB), size::full(64 * MIB));
        let thick = Provision { is_thin: false, ..thin };
        assert_eq!((thick.least(disk), thick.len_written(disk, 0, 0)), (size::full(disk), size::full(disk)));
    }

    #[test]
    fn what_is_left_of_a_full_group_is_shared() {
        let growth = |len, needs, goal| Growth { len: len * MIB, needs: needs * MIB, goal: goal * MIB };
        let all = [growth(8, 16, 72), growth(8, 40, 72)];
        let lens = |free: u64| -> Vec<u64> { allot(free * MIB, &all).iter().map(|len| len / MIB).collect() };
        assert_eq!(lens(128), [72, 72]);
        assert_eq!(lens(127), [16, 40], "what they need");
        assert_eq!(lens(24), [16, 24], "the first has what it needs");
        assert_eq!(lens(12), [16, 12]);
        assert_eq!(lens(4), [12, 8]);
        assert_eq!(lens(3), [8, 8]);
        assert_eq!(allot(0, &[]), Vec::<u64>::new());
    }
}
