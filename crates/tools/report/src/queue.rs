//! How many requests a layer of the data path holds on average, and what goes through it: the same figures for a block
//! layer (of a guest or of this host), a ring and a disk process.
//!
//! A layer adds up how long each request stayed with it. Over an interval, the growth of that sum divided by the length
//! of the interval is the average queue. The kernel has the sum in the eleventh field of `/sys/block/NAME/stat`, which
//! is what iostat's `aqu-sz` (`avgqu-sz` before version 12) is made of.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Bytes of the kernel's sector.
const SECTOR: f64 = 512.0;
const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * 1024.0;

/// What a kernel counts of a block device, in the words of its documentation. Sectors have 512 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCounters {
    /// Reads that ended.
    pub reads: u64,
    /// Sectors read.
    pub read_sectors: u64,
    /// Time that reads took together, in milliseconds.
    pub read_ms: u64,
    /// Writes that ended.
    pub writes: u64,
    /// Sectors written.
    pub write_sectors: u64,
    /// Time that writes took together, in milliseconds.
    pub write_ms: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Time with a request in flight, in milliseconds.
    pub busy_ms: u64,
    /// Requests times the time they took, in milliseconds.
    pub weighted_ms: u64,
}

impl BlockCounters {
    /// Reads `/sys/block/NAME/stat`; `None` for fewer than its first eleven fields.
    pub fn parse(text: &str) -> Option<Self> {
        let fields: Vec<u64> =
            text.split_ascii_whitespace().take(32).map_while(|field| field.parse().ok()).collect();
        let [
            reads,
            _,
            read_sectors,
            read_ms,
            writes,
            _,
            write_sectors,
            write_ms,
            in_flight,
            busy_ms,
            weighted_ms,
            ..,
        ] = fields.as_slice()
        else {
            return None;
        };
        Some(Self {
            reads: *reads,
            read_sectors: *read_sectors,
            read_ms: *read_ms,
            writes: *writes,
            write_sectors: *write_sectors,
            write_ms: *write_ms,
            in_flight: *in_flight,
            busy_ms: *busy_ms,
            weighted_ms: *weighted_ms,
        })
    }

    /// What went through in the `seconds` since `then`.
    pub fn flow(&self, then: &Self, seconds: f64) -> Flow {
        let grown = |now: u64, then: u64| now.saturating_sub(then) as f64;
        let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let each = |amount: f64, count: f64| if count > 0.0 { amount / count } else { 0.0 };
        let (reads, writes) = (grown(self.reads, then.reads), grown(self.writes, then.writes));
        let read = grown(self.read_sectors, then.read_sectors) * SECTOR;
        let written = grown(self.write_sectors, then.write_sectors) * SECTOR;
        Flow {
            read_per_s: per_second(reads),
            write_per_s: per_second(writes),
            read_mib_per_s: per_second(read / MIB),
            write_mib_per_s: per_second(written / MIB),
            request_kib: each((read + written) / KIB, reads + writes),
            queue: per_second(grown(self.weighted_ms, then.weighted_ms) / 1e3),
            read_await_ms: each(grown(self.read_ms, then.read_ms), reads),
            write_await_ms: each(grown(self.write_ms, then.write_ms), writes),
            in_flight: self.in_flight,
            util_percent: Some(per_second(grown(self.busy_ms, then.busy_ms) / 10.0)),
        }
    }
}

/// What goes through a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Flow {
    /// Requests that ended, a second.
    pub read_per_s: f64,
    /// See `read_per_s`.
    pub write_per_s: f64,
    /// Data, in units of 1048576 bytes a second.
    pub read_mib_per_s: f64,
    /// See `read_mib_per_s`.
    pub write_mib_per_s: f64,
    /// Mean length of a request, in units of 1024 bytes.
    pub request_kib: f64,
    /// Requests in the layer, on average.
    pub queue: f64,
    /// Mean time of a read in the layer and below it, in milliseconds.
    pub read_await_ms: f64,
    /// The same of writes.
    pub write_await_ms: f64,
    /// Requests in the layer at the end of the interval.
    pub in_flight: u64,
    /// Share of the interval with a request in the layer; `None` if nothing counts that.
    pub util_percent: Option<f64>,
}

/// A layer of a disk's data path.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Layer {
    /// `guest`, `ring`, `process` or `device`.
    pub layer: String,
    /// The device or image there.
    pub name: String,
    /// `None` if this layer is not known here: why is in `name`.
    #[serde(flatten)]
    pub flow: Option<Flow>,
}

/// The head of [`lines`].
pub const HEAD: &str =
    "DISK         LAYER      r/s      w/s   rMB/s   wMB/s    sz-K  aqu-sz r_await w_await  fly  %util NAME\n";

/// A line for each layer; times in milliseconds, sizes in KiB and MiB.
pub fn lines(disk: &str, layers: &[Layer]) -> String {
    let mut out = String::new();
    for (index, Layer { layer, name, flow }) in layers.iter().enumerate() {
        let disk = if index == 0 { disk } else { "" };
        // Writing to a string cannot fail, here and below.
        let _ = write!(out, "{disk:<12} {layer:<7}");
        match flow {
            Some(flow) => {
                let _ = write!(
                    out,
                    "{:7.1}  {:7.1} {:7.2} {:7.2} {:7.1} {:7.2} {:7.3} {:7.3} {:4}",
                    flow.read_per_s,
                    flow.write_per_s,
                    flow.read_mib_per_s,
                    flow.write_mib_per_s,
                    flow.request_kib,
                    flow.queue,
                    flow.read_await_ms,
                    flow.write_await_ms,
                    flow.in_flight
                );
                match flow.util_percent {
                    Some(util) => {
                        let _ = write!(out, " {util:6.1}");
                    }
                    None => out.push_str("      -"),
                }
            }
            None => {
                let _ = write!(out, "{:>76}", "-");
            }
        }
        let _ = writeln!(out, " {name}");
    }
    out
}

/// The block device of this host that a file lies on, or that a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    /// As the kernel names it: `sda1`.
    pub name: String,
    stat: PathBuf,
}

impl HostDevice {
    /// By a file, a directory or a device; `None` if its storage is no block device, as with network file systems.
    pub fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        if found.file_type().is_block_device() {
            return Self::of_number(found.rdev());
        }
        Self::of_number(found.dev()).or_else(|| Self::of_mount(found.dev()))
    }

    fn of_number(number: u64) -> Option<Self> {
        let (major, minor) = (libc::major(number), libc::minor(number));
        let dir = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        Some(Self { name: dir.file_name()?.to_str()?.to_owned(), stat: dir.join("stat") })
    }

    /// File systems as btrfs have numbers of their own: the list of mounts names their device.
    fn of_mount(number: u64) -> Option<Self> {
        let text = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let source = source_of(&text, &format!("{}:{}", libc::major(number), libc::minor(number)))?;
        let found = fs::metadata(source).ok().filter(|found| found.file_type().is_block_device())?;
        Self::of_number(found.rdev())
    }

    /// The NUMA node of the device, or of the first device that it is made of; `None` if the host has but one or the
    /// device is of none.
    pub fn numa_node(&self) -> Option<usize> {
        let mut dir = self.stat.parent()?.to_path_buf();
        let below = fs::read_dir(dir.join("slaves")).ok().and_then(|mut slaves| slaves.next()?.ok());
        if let Some(below) = below {
            dir = fs::canonicalize(below.path()).ok()?;
        }
        let node = |dir: &Path| fs::read_to_string(dir.join("numa_node")).ok()?.trim().parse::<usize>().ok();
        dir.ancestors().take_while(|dir| dir.starts_with("/sys/devices")).find_map(node)
    }

    /// What it has counted so far.
    pub fn read(&self) -> Option<BlockCounters> {
        BlockCounters::parse(&fs::read_to_string(&self.stat).ok()?)
    }
}

/// What is mounted under this number, from the text of `/proc/PID/mountinfo`.
fn source_of<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    // NUMBER PARENT DEVICE ROOT MOUNT OPTIONS [MORE...] - KIND SOURCE OPTIONS
    let of = |line: &'a str| {
        let (mount, source) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == number).then(|| source.split(' ').nth(1)).flatten()
    };
    mounts.lines().find_map(of).filter(|source| source.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_iostat() {
        // Two readings ten seconds apart, as iostat -x would have them.
        let then = BlockCounters::parse(" 100 0 800 50 10 0 80 9 0 60 70 0 0 0 0 0 0").expect("fields");
        let now = BlockCounters::parse(" 1100 0 8800 1050 60 0 1080 109 3 6160 9670").expect("eleven fields");
        let flow = now.flow(&then, 10.0);
        assert_eq!((flow.read_per_s, flow.write_per_s), (100.0, 5.0));
        assert!((flow.read_mib_per_s - 8000.0 * 512.0 / MIB / 10.0).abs() < 1e-9);
        assert!((flow.queue - 0.96).abs() < 1e-9, "{flow:?}");
        assert_eq!((flow.read_await_ms, flow.write_await_ms, flow.in_flight), (1.0, 2.0, 3));
        assert_eq!(flow.util_percent, Some(61.0));
        assert!((flow.request_kib - 9000.0 * 0.5 / 1050.0).abs() < 1e-9);
        assert_eq!(then.flow(&now, 10.0).queue, 0.0, "counters that go back");
        assert_eq!(now.flow(&then, 0.0).queue, 0.0, "no time");
        for bad in ["", "1 2 3", "1 0 800 50 10 0 80 9 0 60 x"] {
            assert_eq!(BlockCounters::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn layers_stand_side_by_side() {
        let flow = Flow { read_per_s: 5479.0, queue: 0.71, util_percent: None, ..Flow::default() };
        let layers = [
            Layer { layer: "guest".into(), name: "no agent answers".into(), flow: None },
            Layer { layer: "process".into(), name: "vhd:/a".into(), flow: Some(flow) },
        ];
        let text = lines("xvda", &layers);
        let found: Vec<_> = text.lines().collect();
        assert!(
            found[0].starts_with("xvda         guest") && found[0].ends_with("- no agent answers"),
            "{text}"
        );
        assert!(
            found[1].starts_with("             process 5479.0") && found[1].ends_with("- vhd:/a"),
            "{text}"
        );
        // Names begin below the word of the head.
        let at = HEAD.find("NAME").expect("a column");
        assert_eq!((found[0].find("no agent"), found[1].find("vhd:")), (Some(at), Some(at)), "{HEAD}{text}");
    }

    #[test]
    fn mounts_without_a_number_of_a_device_have_a_source() {
        let mounts = "36 35 0:44 /@ / rw,relatime shared:1 - btrfs /dev/sda2 rw,ssd\n\
                      37 35 0:45 / /srv rw - nfs4 server:/export rw\n";
        assert_eq!(source_of(mounts, "0:44"), Some("/dev/sda2"));
        assert_eq!(source_of(mounts, "0:45"), None, "a server is no device");
        assert_eq!(source_of(mounts, "0:4"), None);
    }
}
