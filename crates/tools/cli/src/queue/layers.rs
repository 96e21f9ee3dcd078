//! What each layer of a disk's data path counted.

use std::path::Path;
use std::time::Instant;

use tapio_report::queue::{BlockCounters, Flow, HostDevice, Layer};
use tapio_stat::{DiskFile, FileState, RequestKind, RingUse, ShmRoot, Snapshot, Stage, VbdId, disks};
use tapio_types::{ImageKind, parse_type_and_path};

/// Kinds whose time the disk process counts.
const TIMED: [RequestKind; 3] = [RequestKind::Read, RequestKind::Write, RequestKind::Flush];

/// The guest's own counters of a disk, or why there are none.
pub type OfGuest = Result<BlockCounters, String>;

/// All counters of a disk at one moment; each was read at a time of its own.
#[derive(Clone, Debug)]
struct Reading {
    guest: Option<(OfGuest, Instant)>,
    disk: Option<(Snapshot, Instant)>,
    device: Option<(BlockCounters, Instant)>,
}

/// A disk that is watched.
#[derive(Debug)]
pub struct Watched {
    /// As the guest or, without one, this host calls it.
    pub name: String,
    /// Under which numbers its disk process publishes it; of a disk without a guest, by its process.
    pub which: Which,
    file: Option<DiskFile>,
    device: Option<HostDevice>,
    last: Option<Reading>,
}

/// How a disk is found among those that publish counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Of a guest.
    Vbd(VbdId),
    /// Of this host.
    Disk {
        /// Process.
        pid: u32,
        /// Minor number.
        minor: u32,
    },
}

impl Which {
    fn is(self, disk: &Snapshot) -> bool {
        match self {
            Self::Vbd(id) => disk.vbds.contains(&id),
            Self::Disk { pid, minor } => (disk.pid, disk.minor) == (pid, minor),
        }
    }

    /// The ring of the guest, or the first of the disk.
    fn ring(self, disk: &Snapshot) -> Option<RingUse> {
        match self {
            Self::Vbd(id) => disk.ring_use(id),
            Self::Disk { .. } => disk.rings.first().copied(),
        }
    }
}

/// The file or device of an image of this host.
fn device_of(image: &str) -> Option<HostDevice> {
    let layer = parse_type_and_path(image).ok()?;
    matches!(layer.kind, ImageKind::Raw | ImageKind::Vhd).then(|| HostDevice::of(Path::new(&layer.path)))?
}

impl Watched {
    pub fn new(name: String, which: Which) -> Self {
        Self { name, which, file: None, device: None, last: None }
    }

    /// The image that is served, as `type:/path`.
    fn image(&self) -> String {
        let disk = self.last.as_ref().and_then(|last| last.disk.as_ref());
        disk.map_or_else(String::new, |(disk, _)| disk.image.clone())
    }

    fn read(&mut self, root: &ShmRoot, guest: Option<(OfGuest, Instant)>) -> Reading {
        let which = self.which;
        // What an ended process counted stays readable in a file that is open.
        let served = self.file.as_ref().filter(|file| file.state() == FileState::Linked);
        let current = served.and_then(|file| file.read().ok()).filter(|disk| which.is(disk));
        let disk = current.or_else(|| {
            // Plugged only now, or by another process.
            let found = disks(root).ok()?;
            let (file, disk) = found.into_iter().find_map(|file| {
                let disk = file.read().ok().filter(|disk| which.is(disk))?;
                Some((file, disk))
            })?;
            (self.file, self.device) = (Some(file), device_of(&disk.image));
            Some(disk)
        });
        let disk = disk.map(|disk| (disk, Instant::now()));
        let changed = disk.as_ref().is_some_and(|(disk, _)| disk.image != self.image());
        if changed {
            // A snapshot, or a move to another storage.
            self.device = disk.as_ref().and_then(|(disk, _)| device_of(&disk.image));
        }
        let device = self.device.as_ref().and_then(HostDevice::read);
        Reading { guest, disk, device: device.map(|device| (device, Instant::now())) }
    }

    /// Reads all counters, and gives the layers since the last reading; without one, nothing.
    pub fn sample(&mut self, root: &ShmRoot, guest: Option<(OfGuest, Instant)>) -> Option<Vec<Layer>> {
        let now = self.read(root, guest);
        let then = self.last.replace(now.clone())?;
        let device = self.device.as_ref().map(|device| device.name.clone());
        Some(layers(self.which, &then, &now, device))
    }
}

fn layers(which: Which, then: &Reading, now: &Reading, device: Option<String>) -> Vec<Layer> {
    let mut layers = Vec::new();
    let layer = |layer: &str, name: String, flow: Option<Flow>| Layer { layer: layer.to_owned(), name, flow };
    match (&then.guest, &now.guest) {
        (_, None) => {}
        (Some((Ok(then), since)), Some((Ok(now), at))) => {
            layers.push(layer("guest", "its block layer".into(), Some(now.flow(then, seconds(*since, *at)))));
        }
        (_, Some((Err(why), _))) => layers.push(layer("guest", why.clone(), None)),
        (_, Some((Ok(_), _))) => layers.push(layer("guest", "known from the next sample on".into(), None)),
    }
    match (&then.disk, &now.disk) {
        // Another process counts anew.
        (Some((then, since)), Some((now, at))) if then.created_unix_ns == now.created_unix_ns => {
            let seconds = seconds(*since, *at);
            let process = process(then, now, seconds);
            if let (Some(then), Some(now)) = (which.ring(then), which.ring(now)) {
                let name = format!("{} slots", now.state.size);
                layers.push(layer("ring", name, Some(ring(&then, &now, seconds, &process))));
            }
            layers.push(layer("process", now.image.clone(), Some(process)));
        }
        (_, Some((now, _))) => layers.push(layer("process", now.image.clone(), None)),
        (_, None) => layers.push(layer("process", "no disk process serves it".into(), None)),
    }
    match (&then.device, &now.device) {
        (Some((then, since)), Some((now, at))) => {
            let flow = now.flow(then, seconds(*since, *at));
            layers.push(layer("device", device.unwrap_or_default(), Some(flow)));
        }
        _ => layers.push(layer("device", "no block device of this host".into(), None)),
    }
    layers
}

fn seconds(since: Instant, at: Instant) -> f64 {
    at.saturating_duration_since(since).as_secs_f64()
}

/// Requests and data of a ring are those of the disk process; its queue counts requests from when the process saw them
/// in the ring until the guest could see the answer.
fn ring(then: &RingUse, now: &RingUse, seconds: f64, process: &Flow) -> Flow {
    let grown_s = now.request_ns.saturating_sub(then.request_ns) as f64 / 1e9;
    let per_request_ms = match process.read_per_s + process.write_per_s {
        rate if rate > 0.0 && seconds > 0.0 => grown_s / (rate * seconds) * 1e3,
        _ => 0.0,
    };
    let of = |rate: f64| if rate > 0.0 { per_request_ms } else { 0.0 };
    Flow {
        queue: if seconds > 0.0 { grown_s / seconds } else { 0.0 },
        read_await_ms: of(process.read_per_s),
        write_await_ms: of(process.write_per_s),
        in_flight: now.state.used().into(),
        util_percent: None,
        ..*process
    }
}

/// From the disk's histograms, which have the whole time of each request.
fn process(then: &Snapshot, now: &Snapshot, seconds: f64) -> Flow {
    let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
    let time_ns =
        |kind: RequestKind| match (now.histogram(kind, Stage::Total), then.histogram(kind, Stage::Total)) {
            (Some(now), Some(then)) => now.sum_ns.saturating_sub(then.sum_ns) as f64,
            _ => 0.0,
        };
    let counts = |kind: RequestKind| {
        let (now, then) = (now.kind(kind), then.kind(kind));
        let grown = |now: u64, then: u64| now.saturating_sub(then) as f64;
        (grown(now.completed, then.completed), grown(now.bytes, then.bytes))
    };
    let ((reads, read), (writes, written)) = (counts(RequestKind::Read), counts(RequestKind::Write));
    let each = |amount: f64, count: f64| if count > 0.0 { amount / count } else { 0.0 };
    let mib = f64::from(1 << 20);
    Flow {
        read_per_s: per_second(reads),
        write_per_s: per_second(writes),
        read_mib_per_s: per_second(read / mib),
        write_mib_per_s: per_second(written / mib),
        request_kib: each((read + written) / 1024.0, reads + writes),
        queue: per_second(TIMED.map(time_ns).iter().sum::<f64>() / 1e9),
        read_await_ms: each(time_ns(RequestKind::Read) / 1e6, reads),
        write_await_ms: each(time_ns(RequestKind::Write) / 1e6, writes),
        in_flight: now.in_flight(),
        util_percent: None,
    }
}

#[cfg(test)]
mod tests {
    use tapio_stat::{DiskName, DiskStats, Stages, VbdPages};
    use tapio_types::RingState;

    use super::*;

    #[test]
    fn every_layer_has_its_own_queue() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let root = ShmRoot::new(dir.path());
        let mut stats = DiskStats::create(&root, &DiskName::of_this_process(3)).expect("created");
        let image = dir.path().join("a.raw");
        std::fs::write(&image, [0; 512]).expect("written");
        stats.set_image(&format!("aio:{}", image.display()));
        let id = VbdId { domid: 5, devid: 51712 };
        let pages = VbdPages::create(&root, std::process::id(), 3, id, false).expect("pages");
        let slot = stats.add_vbd(pages).expect("room");
        let mut watched = Watched::new("xvda".into(), Which::Vbd(id));
        let guest = |reads: u64, weighted_ms: u64| {
            Some((
                Ok(BlockCounters { reads, weighted_ms, read_sectors: reads * 8, ..BlockCounters::default() }),
                Instant::now(),
            ))
        };
        let then = watched.read(&root, guest(0, 0));
        // A second with one request after the other: 0.96 of it in the guest, 0.71 in the disk process.
        let of_ring = |ends: (u32, u32)| RingState {
            size: 32,
            req_prod: ends.0,
            rsp_prod: ends.1,
            ..RingState::default()
        };
        stats.ring(slot, &of_ring((1, 0)), 1_000_000_000);
        stats.ring(slot, &of_ring((1, 1)), 1_850_000_000);
        let stages = Stages { kernel_ns: 7_100_000, ..Stages::default() };
        for _ in 0..100 {
            stats.submitted(RequestKind::Read, 4096);
            stats.completed(RequestKind::Read, 4096, &stages, true);
        }
        let now = watched.read(&root, guest(100, 960));
        // As if each had been read a second after the other.
        let later = |at: &Instant| *at + std::time::Duration::from_secs(1);
        let now = Reading {
            guest: now.guest.map(|(guest, _)| (guest, later(&then.guest.as_ref().expect("read").1))),
            disk: now.disk.map(|(disk, _)| (disk, later(&then.disk.as_ref().expect("read").1))),
            device: None,
        };
        let layers = layers(Which::Vbd(id), &then, &now, None);
        let queue: Vec<_> = layers
            .iter()
            .map(|layer| (layer.layer.as_str(), layer.flow.map(|flow| (flow.queue * 100.0).round() / 100.0)))
            .collect();
        assert_eq!(
            queue,
            [("guest", Some(0.96)), ("ring", Some(0.85)), ("process", Some(0.71)), ("device", None)]
        );
        let flow = layers[2].flow.expect("known");
        assert_eq!((flow.read_per_s, flow.request_kib, flow.in_flight), (100.0, 4.0, 0));
        assert!((flow.read_await_ms - 7.1).abs() < 1e-9, "{flow:?}");
        assert_eq!(layers[0].flow.map(|flow| flow.request_kib), Some(4.0));
        // Another process under the same numbers: nothing can be compared.
        drop(stats);
        let gone = watched.sample(&root, None);
        assert_eq!(gone, None, "the first sample compares with nothing");
        let gone = watched.sample(&root, None).expect("a second one");
        assert_eq!(gone[0].name, "no disk process serves it");
    }
}
