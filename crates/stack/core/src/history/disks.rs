//! Figures of plugged disks, named as XenServer names them: of each VBD for its VM, and the sums of an SR for the host.

use std::collections::{BTreeMap, HashMap};

use tapio_history::{Kind, Sample};
use tapio_stat::{RequestKind, Snapshot, Stage};
use uuid::Uuid;

use super::{Owner, Samples, sample};
use crate::db::Db;
use crate::disks::Note;

/// Characters of an SR's UUID in the names of its figures.
const SR_CHARACTERS: usize = 8;

/// What the sums of an SR have at their ends.
pub(super) fn start_of(sr: Uuid) -> String {
    sr.to_string().chars().take(SR_CHARACTERS).collect()
}

/// The SR whose sum this source of a host is, by the start of its UUID.
pub(super) fn sr_in(source: &str) -> Option<&str> {
    let (_, start) = source.rsplit_once('_')?;
    let is_one = start.len() == SR_CHARACTERS && start.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_one.then_some(start)
}

/// What a disk did: since it began, or between two samples.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    bytes: [f64; 2],
    requests: [f64; 2],
    seconds: [f64; 2],
}

/// A disk at a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Process and time at which it began to count: another one counts from 0.
    counts: (u32, u64),
    totals: Totals,
}

/// Of a disk, or of all disks of an SR.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    /// Since the last sample.
    since: Totals,
    in_flight: f64,
    /// Mean microseconds of reads, of writes, of both; of an SR the greatest of its disks.
    latency_us: [f64; 3],
    /// Requests in the disk on the average; of an SR the greatest of its disks.
    queue: f64,
}

const READ_WRITE: [RequestKind; 2] = [RequestKind::Read, RequestKind::Write];

impl Totals {
    fn of(counters: &Snapshot) -> Self {
        let seconds =
            |kind| counters.histogram(kind, Stage::Total).map_or(0.0, |all| all.sum_ns as f64 / 1e9);
        Self {
            bytes: READ_WRITE.map(|kind| counters.kind(kind).bytes as f64),
            requests: READ_WRITE.map(|kind| counters.kind(kind).completed as f64),
            seconds: READ_WRITE.map(seconds),
        }
    }

    fn zip(self, other: Self, with: fn(f64, f64) -> f64) -> Self {
        let pair = |a: [f64; 2], b: [f64; 2]| [with(a[0], b[0]), with(a[1], b[1])];
        Self {
            bytes: pair(self.bytes, other.bytes),
            requests: pair(self.requests, other.requests),
            seconds: pair(self.seconds, other.seconds),
        }
    }

    /// None: its counters began again.
    fn since(self, before: Self) -> Option<Self> {
        let since = self.zip(before, |now, before| now - before);
        let parts = [since.bytes, since.requests, since.seconds];
        parts.as_flattened().iter().all(|part| *part >= 0.0).then_some(since)
    }
}

fn mean_us(seconds: f64, requests: f64) -> f64 {
    if requests > 0.0 { seconds * 1e6 / requests } else { 0.0 }
}

impl Figures {
    fn of(counters: &Snapshot, since: Totals, elapsed_s: f64) -> Self {
        let ([read_s, write_s], [reads, writes]) = (since.seconds, since.requests);
        Self {
            since,
            in_flight: counters.in_flight() as f64,
            latency_us: [
                mean_us(read_s, reads),
                mean_us(write_s, writes),
                mean_us(read_s + write_s, reads + writes),
            ],
            queue: (read_s + write_s) / elapsed_s,
        }
    }

    fn add(&mut self, disk: &Self) {
        let sum = |a, b| a + b;
        self.since = self.since.zip(disk.since, sum);
        self.in_flight += disk.in_flight;
        for (all, one) in self.latency_us.iter_mut().zip(disk.latency_us) {
            *all = all.max(one);
        }
        self.queue = self.queue.max(disk.queue);
    }

    /// `name` makes the name of a source of its key.
    fn put(&self, name: &dyn Fn(&str) -> String, samples: &mut Vec<Sample>) {
        let mib = self.since.bytes.map(|bytes| bytes / f64::from(1 << 20));
        let [reads, writes] = self.since.requests;
        let [read_us, write_us, us] = self.latency_us;
        let mut put =
            |key, doc, units, kind, value| samples.push(sample((name(key), doc, units), kind, value));
        put("io_throughput_read", "Data read", "MiB/s", Kind::Absolute, mib[0]);
        put("io_throughput_write", "Data written", "MiB/s", Kind::Absolute, mib[1]);
        put("io_throughput_total", "Data read and written", "MiB/s", Kind::Absolute, mib[0] + mib[1]);
        put("iops_read", "Reads", "requests/s", Kind::Absolute, reads);
        put("iops_write", "Writes", "requests/s", Kind::Absolute, writes);
        put("iops_total", "Reads and writes", "requests/s", Kind::Absolute, reads + writes);
        let waited = self.since.seconds[0] + self.since.seconds[1];
        put("iowait", "Time that requests took", "s/s", Kind::Absolute, waited);
        put("read_latency", "Mean time of a read", "μs", Kind::Gauge, read_us);
        put("write_latency", "Mean time of a write", "μs", Kind::Gauge, write_us);
        put("latency", "Mean time of a request", "μs", Kind::Gauge, us);
        put("inflight", "Requests that are not answered yet", "requests", Kind::Gauge, self.in_flight);
        put("avgqu_sz", "Requests at a time", "requests", Kind::Gauge, self.queue);
    }
}

/// What one disk has now: its counters, and its figures where it was there at the last sample.
fn of_disk(
    (vbd, chain, counters): (Uuid, Option<usize>, &Snapshot),
    (before, updated_ms, elapsed_s): (&HashMap<Uuid, Seen>, u64, f64),
    name: &dyn Fn(&str) -> String,
    samples: &mut Vec<Sample>,
) -> (Seen, Option<Figures>) {
    let seen = Seen { counts: (counters.pid, counters.created_unix_ns), totals: Totals::of(counters) };
    let last = before.get(&vbd);
    let begins = match last {
        Some(last) => last.counts != seen.counts,
        // The disk was plugged, or the daemon started, and then the history may go on.
        None => counters.created_unix_ns / 1_000_000 >= updated_ms,
    };
    let [read, write] = seen.totals.bytes;
    for (key, doc, value) in [("read", "Bytes read", read), ("write", "Bytes written", write)] {
        samples.push(Sample { begins, ..sample((name(key), doc, "B/s"), Kind::Derive, value) });
    }
    let chain = chain.map_or(f64::NAN, |images| images as f64);
    samples.push(sample((name("chain"), "Images in the chain of the disk", "images"), Kind::Gauge, chain));
    let is_lost = f64::from(u8::from(counters.mirror_lost));
    let doc = "1 while the second side of a mirror is lost";
    samples.push(sample((name("mirror_broken"), doc, ""), Kind::Gauge, is_lost));
    let since = last.filter(|_| !begins).and_then(|last| seen.totals.since(last.totals));
    (seen, since.map(|since| Figures::of(counters, since, elapsed_s)))
}

/// Adds the figures of all disks; `before` becomes what they have now. `updated_ms` answers when a history was last
/// updated. A disk that was not there at the last sample has
/// counters and no amounts yet.
pub(super) fn samples(
    db: &Db,
    disks: &[(Note, Option<Snapshot>)],
    (before, updated_ms, elapsed_s): (&mut HashMap<Uuid, Seen>, &dyn Fn(Owner) -> u64, f64),
    samples: &mut Samples,
) {
    let mut of_srs: BTreeMap<Uuid, Figures> = BTreeMap::new();
    let mut seen = HashMap::new();
    let mut low_memory = 0_u32;
    for (note, counters) in disks {
        let Some(counters) = counters else { continue };
        low_memory += u32::from(counters.low_memory);
        let Ok(vbd) = db.by_uuid("VBD", &note.spec.vbd.to_string()) else { continue };
        let device = vbd.text("device");
        if device.is_empty() {
            continue;
        }
        let owner = Owner::Vm(note.vm);
        let of_vm = samples.entry(owner).or_default();
        let name = |key: &str| format!("vbd_{device}_{key}");
        let disk = (note.spec.vbd, note.chain.as_ref().map(|chain| chain.layers.len()), counters);
        let (now, figures) = of_disk(disk, (before, updated_ms(owner), elapsed_s), &name, of_vm);
        seen.insert(note.spec.vbd, now);
        if let Some(figures) = figures {
            figures.put(&name, of_vm);
            of_srs.entry(note.sr).or_default().add(&figures);
        }
    }
    *before = seen;
    let of_host = samples.entry(Owner::Host).or_default();
    let source = ("Tapdisks_in_low_memory_mode", "Disks that answer from their reserve of memory", "disks");
    of_host.push(sample(source, Kind::Gauge, f64::from(low_memory)));
    for (sr, figures) in of_srs {
        let start = start_of(sr);
        let name = |key: &str| format!("{key}_{start}");
        let [read, write] = figures.since.bytes;
        // A sum of counters would go back when a disk is unplugged.
        of_host.push(sample((name("read"), "Bytes read", "B/s"), Kind::Absolute, read));
        of_host.push(sample((name("write"), "Bytes written", "B/s"), Kind::Absolute, write));
        figures.put(&name, of_host);
    }
}

#[cfg(test)]
mod tests {
    use tapio_stat::{BUCKETS, Histogram, KindCounts};

    use super::*;

    /// A disk that was made at this millisecond and has read so many times a sector, each in a millisecond.
    fn counters(created_ms: u64, reads: u64) -> Snapshot {
        let mut snapshot = Snapshot {
            pid: 1,
            minor: 0,
            created_unix_ns: created_ms * 1_000_000,
            image: String::new(),
            vbds: Vec::new(),
            rings: Vec::new(),
            queue_depth: 0,
            kinds: Default::default(),
            poll: Default::default(),
            latency: [[Histogram { counts: [0; BUCKETS], sum_ns: 0 }; tapio_stat::STAGES];
                tapio_stat::TIMED_KINDS],
            limits: Default::default(),
            delays: Default::default(),
            low_memory: false,
            mirror_lost: false,
        };
        snapshot.kinds[0] = KindCounts { submitted: reads, completed: reads, errors: 0, bytes: reads * 512 };
        snapshot.latency[0][Stage::Total as usize].sum_ns = reads * 1_000_000;
        snapshot
    }

    /// A sample of one disk: whether its counters began again, and reads since the last one.
    fn look(
        before: &mut HashMap<Uuid, Seen>,
        updated_ms: u64,
        counters: &Snapshot,
    ) -> (bool, Option<[f64; 2]>) {
        let (vbd, mut samples) = (Uuid::from_u128(1), Vec::new());
        let name = |key: &str| key.to_owned();
        let (seen, figures) =
            of_disk((vbd, Some(3), counters), (before, updated_ms, 5.0), &name, &mut samples);
        before.insert(vbd, seen);
        let of = |name: &str| samples.iter().find(|sample| sample.source.name == name).expect("it is there");
        assert_eq!(of("chain").value, 3.0);
        assert_eq!(of("read").value, seen.totals.bytes[0]);
        (of("read").begins, figures.map(|figures| [figures.since.requests[0], figures.latency_us[0].round()]))
    }

    #[test]
    fn amounts_are_those_of_one_process_between_two_samples() {
        let mut before = HashMap::new();
        assert_eq!(look(&mut before, 1_000, &counters(2_000, 10)), (true, None), "it was plugged");
        assert_eq!(look(&mut before, 5_000, &counters(2_000, 110)), (false, Some([100.0, 1_000.0])));
        assert_eq!(look(&mut before, 10_000, &counters(2_000, 110)), (false, Some([0.0, 0.0])));
        // Another process took its place, and has done more already.
        assert_eq!(look(&mut before, 15_000, &counters(12_000, 500)), (true, None));
        assert_eq!(look(&mut before, 20_000, &counters(12_000, 501)), (false, Some([1.0, 1_000.0])));
        // Counters that go back for no reason that is known make no figure either.
        assert_eq!(look(&mut before, 25_000, &counters(12_000, 400)), (false, None));
        // A daemon that starts: the history knows when it last saw this disk.
        before.clear();
        assert_eq!(look(&mut before, 25_000, &counters(12_000, 900)), (false, None));
        before.clear();
        assert_eq!(look(&mut before, 25_000, &counters(26_000, 900)), (true, None));
    }

    #[test]
    fn sums_of_an_sr_are_told_from_other_sources() {
        let sr = Uuid::from_u128(0xc671_32ec_0000_0000_0000_0000_0000_0001);
        assert_eq!(sr_in(&format!("read_latency_{}", start_of(sr))), Some("c67132ec"));
        for other in ["cpu_avg", "loadavg", "pool_task_count", "memory_free_kib", "cpu0"] {
            assert_eq!(sr_in(other), None, "{other}");
        }
    }
}
