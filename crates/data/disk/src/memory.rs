//! How much memory the process may take, and why never more.
//!
//! | part | bytes |
//! |---|---|
//! | the process: program, control threads, handshakes | 16 MiB |
//! | each thread of a disk: buffer pool | 32 MiB |
//! | each thread of a disk: requests, ring, 64 connections | 8 MiB |
//! | each remote export of its chain | 1 MiB |
//! | each VHD of its chain: table | 4 1/8 a block: 2.1 MiB a TiB of 2 MiB blocks |
//! | each VHD of its chain: bitmaps kept | 2304 x (bytes of a bitmap + 160): 1.5 MiB; a leaf that is written 10240: 6.6 MiB |
//! | a leaf that is written: order of its blocks, while it is opened | 8 a block: 4 MiB a TiB |
//!
//! A disk has as many threads as `--threads` says and as there is memory for, but always one. The sum is a bound, not
//! what is used: an idle disk takes less than a megabyte of it. Guest memory that a VM
//! shares by vhost-user is the guest's and counts there. With `--memory-max` a disk whose sum does not fit is
//! refused, and the kernel refuses the process more (`RLIMIT_DATA`).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, setrlimit};
use tapio_block::DiskOptions;
use tapio_control::{ControlError, Errno, Result};
use tapio_format::vhd::{BLOCK_LEN, FOOTER_LEN, Footer, HEADER_LEN, Header, layout};
use tapio_types::{Access, ImageKind, LayerSpec};

const MIB: u64 = 1 << 20;
/// Program, heap, and the stacks of the control threads and handshakes there may be.
const PROCESS_LEN: u64 = 16 * MIB;
/// A thread of a disk: the slab of requests, the ring, and what connections hold outside the pool.
const THREAD_LEN: u64 = 8 * MIB;
/// Connections, buffers and a thread that dials.
const REMOTE_LEN: u64 = MIB;
/// librbd's code and connections, stacks of its threads as far as they are used, and data in flight, which it copies.
const RBD_LEN: u64 = 64 * MIB;
/// Bitmaps kept: the cache, and those that requests in flight hold beside it.
const BITMAPS: u64 = 2048 + 256;
/// In a leaf that is written also those that are not on disk yet: each has a record in the intent log.
const BITMAPS_WRITTEN: u64 = 2048 + 2 * 4096;
/// A bitmap's place in the cache.
const BITMAP_ENTRY_LEN: u64 = 160;
/// Bytes a block of a table in memory, in eighths: its place, and whether it is whole.
const ENTRY_EIGHTHS: u64 = 33;
/// Bytes a block while a table is checked.
const ENTRY_CHECK_LEN: u64 = 8;

/// What the process may take, and what its disks have of it.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    max: Option<u64>,
    taken: Arc<AtomicU64>,
}

/// A disk's part; given back when dropped.
#[derive(Debug)]
pub struct Share {
    len: u64,
    taken: Arc<AtomicU64>,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.len, Ordering::AcqRel);
    }
}

impl Budget {
    /// Up to `max` bytes, held to by the kernel; without, what the group of processes may take that this one is in.
    ///
    /// # Errors
    /// Less than a disk needs; the kernel does not take the limit.
    pub fn new(max: Option<u64>) -> Result<Self> {
        let Some(max) = max else {
            return Ok(Self { max: limit_of_group(), taken: Arc::default() });
        };
        if max < PROCESS_LEN + THREAD_LEN {
            return Err(ControlError::new(
                Errno::EINVAL,
                format!("--memory-max {}: the process alone needs {} MiB", max / MIB, PROCESS_LEN / MIB),
            )
            .next("give at least 64 for a small disk"));
        }
        let limit = Rlimit { current: Some(max), maximum: Some(max) };
        setrlimit(Resource::Data, limit)
            .map_err(|error| ControlError::io("limiting memory", &error.into()))?;
        Ok(Self { max: Some(max), taken: Arc::default() })
    }

    /// Sets aside what as many threads take as there is memory for, up to `threads`; `len` says how much that is.
    ///
    /// # Errors
    /// `ENOMEM` when there is not enough left for one.
    pub fn take_for(&self, threads: usize, len: impl Fn(usize) -> u64) -> Result<(usize, Share)> {
        let found = (2..=threads).rev().find_map(|threads| Some((threads, self.take(len(threads)).ok()?)));
        found.map_or_else(|| Ok((1, self.take(len(1))?)), Ok)
    }

    /// Sets a part aside.
    ///
    /// # Errors
    /// `ENOMEM` when there is not as much left.
    pub fn take(&self, len: u64) -> Result<Share> {
        let before = self.taken.fetch_add(len, Ordering::AcqRel);
        let share = Share { len, taken: Arc::clone(&self.taken) };
        let Some(max) = self.max else { return Ok(share) };
        let sum = PROCESS_LEN.saturating_add(before).saturating_add(len);
        if sum <= max {
            return Ok(share);
        }
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        Err(ControlError::new(
            Errno::ENOMEM,
            format!(
                "the disk may need {} MiB, and of {} MiB that the process may take {} are spoken for",
                mib(len),
                mib(max),
                mib(PROCESS_LEN.saturating_add(before))
            ),
        )
        .next(format!("allow {} MiB with --memory-max, or start another process for it", mib(sum))))
    }
}

/// What the control group of the process allows, by version 2 of the interface.
fn limit_of_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = fs::read_to_string(format!("/sys/fs/cgroup/{path}/memory.max")).ok()?;
    limit.trim().parse().ok()
}

/// The most that a disk with these options, threads and images takes, leaf first. Images that cannot be read count
/// nothing: opening them says why.
pub fn disk_len(options: &DiskOptions, threads: usize, layers: &[LayerSpec], access: Access) -> u64 {
    let images = layers.iter().enumerate().map(|(index, layer)| match layer.kind {
        ImageKind::Raw => 0,
        ImageKind::Nbd => REMOTE_LEN,
        ImageKind::Rbd => RBD_LEN,
        ImageKind::Vhd => {
            let writes = index == 0 && access == Access::ReadWrite;
            table_of(layer).map_or(0, |(entries, block_len)| image_len(entries, block_len, writes))
        }
    });
    let thread = THREAD_LEN.saturating_add(options.pool_len as u64);
    images.fold(thread.saturating_mul(threads as u64), u64::saturating_add)
}

/// The most that a new leaf of a disk of `len` bytes takes.
pub fn new_leaf_len(len: u64) -> u64 {
    let entries = len.div_ceil(BLOCK_LEN.into());
    image_len(u32::try_from(entries).unwrap_or(u32::MAX), BLOCK_LEN, true)
}

fn image_len(entries: u32, block_len: u32, writes: bool) -> u64 {
    let entries = u64::from(entries);
    let check = if writes { entries * ENTRY_CHECK_LEN } else { 0 };
    let bitmaps = if writes { BITMAPS_WRITTEN } else { BITMAPS };
    let kept = bitmaps.min(entries) * (layout::bitmap_len(block_len) + BITMAP_ENTRY_LEN);
    entries * ENTRY_EIGHTHS / 8 + check + kept
}

/// Entries of a VHD's table and bytes of a block, from footer and header alone: the table is not read.
fn table_of(layer: &LayerSpec) -> Option<(u32, u32)> {
    let file = File::open(&layer.path).ok()?;
    let mut bytes = [0; FOOTER_LEN];
    // The copy at the beginning is enough for sizes, and a fixed disk has neither copy nor table.
    file.read_exact_at(&mut bytes, 0).ok()?;
    let (footer, _) = Footer::decode(&bytes).ok()?;
    let mut bytes = [0; HEADER_LEN];
    file.read_exact_at(&mut bytes, footer.data_offset).ok()?;
    let header = Header::decode(&bytes).ok()?;
    Some((header.entries_for(footer.current_len).ok()?, header.block_len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(max: u64) -> Budget {
        Budget { max: Some(max), taken: Arc::default() }
    }

    #[test]
    fn what_is_taken_is_given_back_and_never_more_than_there_is() {
        let budget = budget(PROCESS_LEN + 100 * MIB);
        let first = budget.take(60 * MIB).expect("there is room");
        let error = budget.take(60 * MIB).expect_err("there is none");
        assert_eq!(error.errno, Errno::ENOMEM);
        assert!(error.to_string().contains("60 MiB") && error.to_string().contains("136 MiB"), "{error}");
        drop(first);
        let _again = budget.take(100 * MIB).expect("it came back");
        assert!(budget.take(1).is_err());
    }

    #[test]
    fn without_a_limit_everything_fits() {
        let budget = Budget::default();
        assert!(budget.take(u64::MAX / 2).is_ok());
    }

    #[test]
    fn two_tebibytes_cost_what_the_table_above_says() {
        let entries = 1 << 20;
        let len = image_len(entries, 2 << 20, false);
        assert!((4 * MIB..6 * MIB).contains(&len), "{len}");
        let more = image_len(entries, 2 << 20, true) - len;
        assert!((13 * MIB..14 * MIB).contains(&more), "{more}");
        assert_eq!(new_leaf_len(2 << 40), image_len(entries, 2 << 20, true));
        let nothing = [LayerSpec { kind: ImageKind::Vhd, path: "/no/such/image.vhd".into() }];
        let options = DiskOptions::default();
        assert_eq!(disk_len(&options, 1, &nothing, Access::ReadWrite), 40 * MIB);
        assert_eq!(disk_len(&options, 4, &nothing, Access::ReadWrite), 160 * MIB);
    }

    #[test]
    fn a_disk_has_as_many_threads_as_there_is_memory_for_and_one_always() {
        let len = |threads| threads as u64 * 40 * MIB;
        let budget = budget(PROCESS_LEN + 100 * MIB);
        let (threads, share) = budget.take_for(4, len).expect("there is room for two");
        assert_eq!((threads, share.len), (2, 80 * MIB));
        let error = budget.take_for(4, len).expect_err("there is none for one");
        assert!(error.to_string().contains("may need 40 MiB"), "{error}");
        drop(share);
        assert_eq!(Budget::default().take_for(4, len).expect("no limit").0, 4);
    }

    #[test]
    fn a_table_is_measured_without_reading_it() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("a.vhd");
        tapio_format::vhd::offline::create(&path, &tapio_format::vhd::offline::Shape::Dynamic, 1 << 40, 0)
            .expect("made");
        let layer = LayerSpec { kind: ImageKind::Vhd, path };
        assert_eq!(table_of(&layer), Some((1 << 19, 2 << 20)));
        let len = disk_len(&DiskOptions::default(), 1, &[layer], Access::ReadOnly);
        assert!((43 * MIB..45 * MIB).contains(&len), "{len}");
    }
}
