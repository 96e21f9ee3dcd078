//! `tapio disk debug` and `tapio disk ring`: what XenServer's kernel modules showed of a disk, as text.
//!
//! The first has the lines of blktap's `debug` file, the second those of blkback's `io_ring`, so that the diagnosis of
//! XenServer's storage guide can be followed word by word. Both come from the disk's process and from shared memory.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use tapio_control::command as ask;
use tapio_control::{
    ControlError, DiskInfo, DiskReport, DiskReports, Errno, FrontEntry, OwnClient, ProcessState,
    RequestReport, RunDir, VbdState, processes,
};
use tapio_stat::pool::{POOL_PAGE_LEN, PoolInfo, pools};
use tapio_stat::{RingUse, ShmRoot, Snapshot, VbdId, disks, ring_text};

use super::REPLY_TIMEOUT;
use tapio_report::failure::{Result, print};

/// The device number that blktap's disks had on most hosts. There is no such device here.
const MAJOR: u32 = 253;

/// Which disks.
#[derive(Debug, Args)]
pub struct Chosen {
    /// Only the disk of this minor number
    minor: Option<u16>,
    /// Only disks of this process
    #[arg(short, long)]
    pid: Option<i32>,
}

/// Bits of `flags`.
mod flag {
    pub const DEVICE: u32 = 1 << 4;
    pub const CLOSED: u32 = 1 << 5;
    pub const SHUTDOWN_REQUESTED: u32 = 1 << 8;
}

/// All that is printed of a disk.
struct Seen {
    report: DiskReport,
    /// `None` without an image.
    info: Option<DiskInfo>,
    fronts: Vec<FrontEntry>,
    pool: Option<PoolInfo>,
}

/// Prints every disk as blktap's `debug` file did.
pub fn run(run: &RunDir, chosen: &Chosen) -> Result<()> {
    let pools = pools(&ShmRoot::from_env()).unwrap_or_default();
    let mut seen = Vec::new();
    for process in processes(run)? {
        let ProcessState::Live { pid } = process.state else { continue };
        if chosen.pid.is_some_and(|chosen| chosen != pid) {
            continue;
        }
        // Foreign, or it ended between the two questions.
        let Ok(mut client) = OwnClient::connect(run, process.id) else { continue };
        seen.extend(look(&mut client, pid, chosen.minor, &pools)?);
    }
    if seen.is_empty() {
        return missing(chosen);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    print(&seen.iter().map(|seen| text(seen, now)).collect::<Vec<_>>().join("\n"))
}

fn missing(chosen: &Chosen) -> Result<()> {
    if chosen.minor.is_none() && chosen.pid.is_none() {
        return Ok(());
    }
    Err(ControlError::new(Errno::ENODEV, "no process of ours has such a disk")
        .next("'tapio disk list' shows the disks there are"))
}

fn look(client: &mut OwnClient, pid: i32, minor: Option<u16>, pools: &[PoolInfo]) -> Result<Vec<Seen>> {
    let entries = client.call(&ask::List {}, &[], REPLY_TIMEOUT)?;
    let mut seen = Vec::new();
    for entry in entries.into_iter().filter(|entry| minor.is_none_or(|minor| minor == entry.minor)) {
        let minor = entry.minor;
        let asked = client.call(&ask::Stats { minor: Some(minor) }, &[], REPLY_TIMEOUT);
        let report = match asked {
            Ok(DiskReports::One(report)) => *report,
            Ok(DiskReports::All(_)) => continue,
            // It was detached between the two questions.
            Err(error) if error.errno == Errno::ENODEV || error.errno == Errno::EINVAL => continue,
            Err(error) => return Err(error),
        };
        let info = client.call(&ask::DiskInfo { minor }, &[], REPLY_TIMEOUT).ok();
        let of_pool = |disk: &tapio_stat::pool::PoolDisk| {
            i32::try_from(disk.pid) == Ok(pid) && disk.minor == u32::from(minor)
        };
        let pool = pools.iter().find(|pool| pool.disks.iter().any(of_pool)).cloned();
        seen.push(Seen { report, info, fronts: entry.fronts, pool });
    }
    Ok(seen)
}

/// One disk, at this time since 1970. Writing to a string cannot fail.
fn text(seen: &Seen, now: Duration) -> String {
    let Seen { report, info, fronts, pool } = seen;
    let is_open = report.counters.is_some();
    let mut flags = if is_open { flag::DEVICE } else { flag::CLOSED };
    if report.state == VbdState::Closing {
        flags |= flag::SHUTDOWN_REQUESTED;
    }
    let name = report.images.first().map_or("", |image| image.image.as_str());
    let mut out =
        format!("tap {MAJOR}:{} name:'{}' flags:{flags:#08x}\n", report.minor, name.escape_default());
    let (pool, pages, free) = match pool {
        Some(pool) => (pool.name.as_str(), pool.pages, pool.pages.saturating_sub(pool.used)),
        None => ("-", 0, 0),
    };
    let _ = writeln!(out, "pool:{pool} pages:{pages} free:{free}");
    if let Some(info) = info {
        let stopped = !matches!(report.state, VbdState::Running);
        let waiting = report.counters.as_ref().map_or(0, |counters| counters.delays.waiting);
        let _ = writeln!(out, "disk capacity:{} sector size:{}", info.sectors, info.sector_size);
        // There is no queue of the kernel whose flags could be shown.
        let _ = writeln!(
            out,
            "queue flags:{:#x} plugged:0 stopped:{} empty:{}",
            0,
            u8::from(stopped),
            u8::from(waiting == 0)
        );
        let openers: u32 = fronts.iter().map(|front| front.connections).sum();
        let _ = writeln!(out, "bdev openers:{openers} closed:{}", u8::from(!is_open));
    }
    let _ = writeln!(out, "begin pending:{}", report.in_flight);
    for (index, request) in report.requests.iter().enumerate() {
        out.push_str(&request_line(index, request, now));
    }
    if (report.requests.len() as u64) < report.in_flight {
        let rest = report.in_flight - report.requests.len() as u64;
        let _ = writeln!(out, "# {rest} more: in the image layer, in queues of other threads, or not timed");
    }
    out.push_str("end pending\n");
    out
}

fn request_line(index: usize, request: &RequestReport, now: Duration) -> String {
    // blktap's own two letters, and those of what it did not have.
    let op = match request.op.as_str() {
        "read" => 'R',
        "write" => 'W',
        "flush" => 'F',
        "discard" => 'D',
        "write-zeroes" => 'Z',
        _ => '?',
    };
    let begun = now.saturating_sub(Duration::from_micros(request.age_us));
    format!(
        "{index:02}: usr_idx:{index:02} op:{op} nr_pages:{:02} time:{}.{:09} sector:{} age:{:.3}ms\n",
        request.len.div_ceil(POOL_PAGE_LEN),
        begun.as_secs(),
        begun.subsec_micros(),
        request.start / 512,
        request.age_us as f64 / 1e3
    )
}

/// Prints where the rings of disks stand, as blkback's `io_ring` files did.
pub fn rings(chosen: &Chosen) -> Result<()> {
    let root = ShmRoot::from_env();
    let files = disks(&root)
        .map_err(|error| ControlError::io(format_args!("cannot list {}", root.pages().display()), &error))?;
    let mut seen: Vec<Snapshot> = files.iter().filter_map(|file| file.read().ok()).collect();
    seen.retain(|disk| chosen.minor.is_none_or(|minor| disk.minor == u32::from(minor)));
    seen.retain(|disk| chosen.pid.is_none_or(|pid| i32::try_from(disk.pid) == Ok(pid)));
    if seen.is_empty() {
        return missing(chosen);
    }
    print(&seen.iter().map(rings_of).collect::<String>())
}

fn rings_of(disk: &Snapshot) -> String {
    let one = |(VbdId { domid, devid }, ring): (VbdId, &RingUse)| {
        let (bytes, len) = ring_text(&ring.state);
        // The checksum in front is for programs.
        let lines = String::from_utf8_lossy(bytes.get(8..len).unwrap_or_default()).into_owned();
        format!("vbd-{domid}-{devid} (pid {} minor {})\n{lines}", disk.pid, disk.minor)
    };
    disk.vbds.iter().copied().zip(&disk.rings).map(one).collect()
}

#[cfg(test)]
mod tests {
    use tapio_control::ImageReport;
    use tapio_stat::{DiskName, DiskStats, VbdPages};
    use tapio_types::RingState;

    use super::*;

    fn stats() -> DiskStats {
        DiskStats::private(&DiskName { pid: 7, minor: 3, page: None }).expect("memory")
    }

    fn seen() -> Seen {
        let request = RequestReport { op: "read".into(), start: 4096, len: 32_768, age_us: 174_141 };
        let image = ImageReport { image: "vhd:/a".into(), sectors_read: 0, sectors_written: 0 };
        let disks = Vec::new();
        Seen {
            report: DiskReport {
                minor: 3,
                state: VbdState::Running,
                counters: Some(stats().view().snapshot()),
                in_flight: 1,
                stuck: 0,
                dropped: 0,
                requests: vec![request],
                images: vec![image],
                beside: Vec::new(),
                blkif: Vec::new(),
                room: None,
            },
            info: Some(DiskInfo { sectors: 16_777_216, sector_size: 512, info: 0 }),
            fronts: Vec::new(),
            pool: Some(PoolInfo { name: "sr".into(), pages: 704, used: 8, disks }),
        }
    }

    #[test]
    fn a_disk_has_the_lines_of_the_guide() {
        let now = Duration::new(1_347_902_537, 0);
        let expected = "\
tap 253:3 name:'vhd:/a' flags:0x000010
pool:sr pages:704 free:696
disk capacity:16777216 sector size:512
queue flags:0x0 plugged:0 stopped:0 empty:1
bdev openers:0 closed:0
begin pending:1
00: usr_idx:00 op:R nr_pages:08 time:1347902536.000825859 sector:8 age:174.141ms
end pending
";
        assert_eq!(text(&seen(), now), expected);
        let mut more = seen();
        more.report.in_flight = 3;
        assert!(text(&more, now).contains("# 2 more"), "{}", text(&more, now));
    }

    #[test]
    fn a_disk_without_an_image_has_fewer() {
        let mut closed = seen();
        closed.report = DiskReport {
            counters: None,
            in_flight: 0,
            requests: Vec::new(),
            images: Vec::new(),
            state: VbdState::Closing,
            ..closed.report
        };
        (closed.info, closed.pool) = (None, None);
        let expected =
            "tap 253:3 name:'' flags:0x000120\npool:- pages:0 free:0\nbegin pending:0\nend pending\n";
        assert_eq!(text(&closed, Duration::ZERO), expected);
    }

    #[test]
    fn rings_are_printed_without_the_checksum() {
        let mut stats = stats();
        let pages = VbdPages::private(VbdId { domid: 1, devid: 51712 }).expect("memory");
        let slot = stats.add_vbd(pages).expect("room");
        let at = 23_392;
        let ring = RingState {
            size: 32,
            req_prod: at,
            req_cons: at,
            req_event: at + 1,
            rsp_prod: at,
            rsp_pvt: at,
            rsp_event: at + 1,
        };
        stats.ring_now(slot, &ring, 1);
        let expected = "\
vbd-1-51712 (pid 7 minor 3)
nr_ents 32
req prod 23392 cons 23392 event 23393
rsp prod 23392 pvt 23392 event 23393
";
        assert_eq!(rings_of(&stats.view().snapshot()), expected);
    }
}
