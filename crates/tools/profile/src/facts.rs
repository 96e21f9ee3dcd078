//! What the kernel says of a device, from sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Layers below a device that are looked at: a partition of an array of volumes of disks is four.
const LAYERS_MAX: usize = 16;

/// A software RAID or a volume that the device is, or lies on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// The kernel's name.
    pub name: String,
    /// `raid0`, `raid1`, `mapped`, `loop`, `partition` or `disk`.
    pub kind: String,
    /// Bytes that follow each other on one member.
    pub chunk: Option<u64>,
    /// Members that hold data side by side.
    pub members: Option<u64>,
}

/// What the kernel says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The kernel's name of a block device.
    pub device: Option<String>,
    /// The disk's own name of itself.
    pub model: Option<String>,
    /// Whether it says that it rotates. Virtual disks often say so and do not.
    pub rotational: Option<bool>,
    /// The scheduler in use.
    pub scheduler: Option<String>,
    /// Those that can be used.
    pub schedulers: Vec<String>,
    /// Requests that the scheduler keeps.
    pub nr_requests: Option<u64>,
    /// KiB that are read ahead.
    pub read_ahead_kb: Option<u64>,
    /// Bytes of the sector that requests are made of.
    pub logical_block: Option<u64>,
    /// Bytes that the device writes at once.
    pub physical_block: Option<u64>,
    /// The best size of small requests: the chunk of a stripe.
    pub io_min: Option<u64>,
    /// The best size of large requests: the width of a stripe.
    pub io_opt: Option<u64>,
    /// The most bytes of one discard; 0 if it takes none.
    pub discard_max: Option<u64>,
    /// The most bytes of one request that writes zeroes; 0 if it takes none.
    pub write_zeroes_max: Option<u64>,
    /// `write back` if data may be lost without a flush.
    pub write_cache: Option<String>,
    /// The device and what it lies on, topmost first.
    pub layers: Vec<Layer>,
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// The directory of a block device below `sys`.
pub fn directory(sys: &Path, numbers: (u32, u32)) -> PathBuf {
    let link = sys.join(format!("dev/block/{}:{}", numbers.0, numbers.1));
    fs::canonicalize(&link).unwrap_or(link)
}

/// The directory of the disk that a partition lies on; the same for a whole disk.
pub fn disk(directory: &Path) -> PathBuf {
    match directory.join("partition").exists() {
        true => directory.parent().unwrap_or(directory).to_path_buf(),
        false => directory.to_path_buf(),
    }
}

/// The scheduler in use, and all, of a line as `none [mq-deadline]`.
pub fn schedulers(line: &str) -> (Option<String>, Vec<String>) {
    let mut chosen = None;
    let word = |word: &str| {
        let plain = word.trim_start_matches('[').trim_end_matches(']').to_owned();
        if word.starts_with('[') {
            chosen = Some(plain.clone());
        }
        plain
    };
    let all: Vec<String> = line.split_whitespace().map(word).collect();
    (chosen.or_else(|| all.first().filter(|_| all.len() == 1).cloned()), all)
}

impl Facts {
    /// What sysfs, mounted at `sys`, says of a device.
    pub fn of(sys: &Path, numbers: (u32, u32)) -> Self {
        let own = directory(sys, numbers);
        let disk = disk(&own);
        let queue = disk.join("queue");
        let number = |file: &str| number(&queue.join(file));
        let (scheduler, schedulers) = schedulers(&text(&queue.join("scheduler")).unwrap_or_default());
        Self {
            device: own.file_name().map(|name| name.to_string_lossy().into_owned()),
            model: text(&disk.join("device/model")),
            rotational: number("rotational").map(|number| number != 0),
            scheduler,
            schedulers,
            nr_requests: number("nr_requests"),
            read_ahead_kb: number("read_ahead_kb"),
            logical_block: number("logical_block_size"),
            physical_block: number("physical_block_size"),
            io_min: number("minimum_io_size"),
            io_opt: number("optimal_io_size"),
            discard_max: number("discard_max_bytes"),
            write_zeroes_max: number("write_zeroes_max_bytes"),
            write_cache: text(&queue.join("write_cache")),
            layers: layers(&own),
        }
    }

    /// Chunk and members of the uppermost stripe, as the kernel has them.
    pub fn stripe(&self) -> Option<(u64, u64)> {
        let known = self.layers.iter().find_map(|layer| Some((layer.chunk?, layer.members?)));
        // Volumes of device-mapper and controllers have only their limits.
        let (min, opt) = (self.io_min.unwrap_or(0), self.io_opt.unwrap_or(0));
        let told = (min >= 4096 && opt > min && opt.is_multiple_of(min)).then(|| (min, opt / min.max(1)));
        known.filter(|(_, members)| *members > 1).or(told)
    }

    /// Members of the uppermost mirror.
    pub fn mirror(&self) -> Option<u64> {
        self.layers.iter().find(|layer| layer.kind == "raid1").and_then(|layer| layer.members)
    }
}

/// Members of an array that hold different data.
fn data_members(level: &str, disks: u64) -> Option<u64> {
    Some(match level {
        "raid0" | "raid1" => disks,
        "raid4" | "raid5" => disks.checked_sub(1)?,
        "raid6" => disks.checked_sub(2)?,
        "raid10" => disks / 2,
        _ => return None,
    })
}

fn layers(own: &Path) -> Vec<Layer> {
    let mut found: Vec<Layer> = Vec::new();
    let mut next = vec![own.to_path_buf()];
    while let Some(directory) = next.pop() {
        let Some(name) = directory.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            continue;
        };
        if found.len() >= LAYERS_MAX || found.iter().any(|layer| layer.name == name) {
            continue;
        }
        let mut layer = Layer { name, kind: "disk".to_owned(), chunk: None, members: None };
        let is_there = |file: &str| directory.join(file).exists();
        if let Some(level) = text(&directory.join("md/level")) {
            layer.members =
                number(&directory.join("md/raid_disks")).and_then(|disks| data_members(&level, disks));
            layer.chunk = number(&directory.join("md/chunk_size")).filter(|chunk| *chunk > 0);
            layer.kind = level;
        } else if is_there("dm") {
            layer.kind = "mapped".to_owned();
        } else if is_there("loop") {
            layer.kind = "loop".to_owned();
        } else if is_there("partition") {
            layer.kind = "partition".to_owned();
            next.push(disk(&directory));
        }
        found.push(layer);
        let below = fs::read_dir(directory.join("slaves"));
        let mut below: Vec<PathBuf> = below
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| fs::canonicalize(entry.path()).ok())
            .collect();
        below.sort();
        next.extend(below.into_iter().rev());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_known_by_their_files_and_volumes_by_their_limits() {
        let sys = tempfile::tempdir().expect("a directory");
        let made = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().expect("below")).expect("made");
            fs::write(path, text).expect("written");
        };
        made("block/md0/md/level", "raid5\n");
        made("block/md0/md/raid_disks", "4\n");
        made("block/md0/md/chunk_size", "65536\n");
        made("block/md0/queue/scheduler", "none\n");
        made("block/sda/queue/scheduler", "mq-deadline [bfq] none\n");
        made("block/sda/queue/rotational", "1\n");
        made("block/sda/sda1/partition", "1\n");
        made("block/dm-0/dm/name", "striped\n");
        made("block/dm-0/queue/minimum_io_size", "65536\n");
        made("block/dm-0/queue/optimal_io_size", "196608\n");
        made("dev/block/none", "");
        let link = |from: &str, to: &str| {
            let to = sys.path().join(to);
            fs::create_dir_all(to.parent().expect("below")).expect("made");
            std::os::unix::fs::symlink(sys.path().join(from), to).expect("linked");
        };
        link("block/sda/sda1", "block/md0/slaves/sda1");
        link("block/md0", "dev/block/9:0");
        link("block/sda/sda1", "dev/block/8:1");
        link("block/dm-0", "dev/block/253:0");
        let array = Facts::of(sys.path(), (9, 0));
        assert_eq!(array.stripe(), Some((65536, 3)));
        let kinds: Vec<_> = array.layers.iter().map(|layer| layer.kind.as_str()).collect();
        assert_eq!(kinds, ["raid5", "partition", "disk"]);
        let part = Facts::of(sys.path(), (8, 1));
        assert_eq!((part.scheduler.as_deref(), part.schedulers.len()), (Some("bfq"), 3));
        assert_eq!((part.rotational, part.stripe(), part.mirror()), (Some(true), None, None));
        assert_eq!(Facts::of(sys.path(), (253, 0)).stripe(), Some((65536, 3)));
        assert_eq!(Facts::of(sys.path(), (1, 1)).layers.len(), 1, "a device that is not there");
        assert_eq!(schedulers("none").0.as_deref(), Some("none"));
    }
}
