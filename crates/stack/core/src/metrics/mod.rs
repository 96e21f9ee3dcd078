//! Figures of plugged disks and attached SRs, for programs that draw and alarm.
//!
//! They are read when they are asked for: nothing is sampled, and a disk process is not asked, its page of counters is
//! read. [`text`] is the form.

mod text;

use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_stat::{RequestKind, Snapshot, Stage, bucket_floor};

use crate::call::Handlers;
use crate::db::Db;
use crate::disks::{Disks, Note};
use crate::history::{self, Histories};
use text::{Kind, Text};

/// What the figures come from.
#[derive(Debug)]
pub struct Metrics {
    db: Arc<Db>,
    disks: Disks,
    histories: Arc<Histories>,
}

/// A disk, and its counters where its process has any.
type Disk = (Note, Option<Snapshot>);

impl Metrics {
    pub(crate) fn new(db: &Arc<Db>, disks: &Disks, histories: &Arc<Histories>) -> Self {
        Self { db: Arc::clone(db), disks: disks.clone(), histories: Arc::clone(histories) }
    }

    /// All figures.
    fn text(&self) -> String {
        let mut text = Text::default();
        let version = ("version", env!("CARGO_PKG_VERSION"));
        text.family("tapio_info", Kind::Gauge, "The version of the toolstack").value("", &[version], 1);
        self.tasks(&mut text);
        let sessions = self.db.count("session");
        text.family("tapio_sessions", Kind::Gauge, "Sessions of accounts").value("", &[], sessions);
        host(&mut text);
        self.histories(&mut text);
        self.srs(&mut text);
        self.vbds(&mut text);
        text.end()
    }

    fn tasks(&self, text: &mut Text) {
        let tasks = self.db.all("task");
        let mut family = text.family("tapio_tasks", Kind::Gauge, "Tasks that are known, by their status");
        for status in ["pending", "cancelling", "success", "failure", "cancelled"] {
            let count = tasks.iter().filter(|task| task.text("status") == status).count();
            family.value("", &[("status", status)], count);
        }
    }

    fn histories(&self, text: &mut Text) {
        let (sources, bytes) = self.histories.held();
        let help = "Data sources that are recorded over time";
        text.family("tapio_history_sources", Kind::Gauge, help).value("", &[], sources);
        let help = "Bytes of memory that their histories take";
        text.family("tapio_history_bytes", Kind::Gauge, help).value("", &[], bytes);
    }

    fn srs(&self, text: &mut Text) {
        let srs = self.db.all("SR");
        let mut family = text.family("tapio_sr_info", Kind::Gauge, "What an SR is called");
        for sr in &srs {
            let (name, kind) = (sr.text("name_label"), sr.text("type"));
            family.value("", &[("sr", sr.text("uuid")), ("name", name), ("type", kind)], 1);
        }
        for (name, field, help) in [
            ("tapio_sr_size_bytes", "physical_size", "Bytes of an SR"),
            ("tapio_sr_used_bytes", "physical_utilisation", "Bytes of an SR that are in use"),
            ("tapio_sr_virtual_bytes", "virtual_allocation", "Bytes that the VDIs of an SR have for guests"),
        ] {
            let mut family = text.family(name, Kind::Gauge, help);
            for sr in &srs {
                family.value("", &[("sr", sr.text("uuid"))], sr.int(field));
            }
        }
        let mut family = text.family("tapio_sr_vdis", Kind::Gauge, "VDIs of an SR");
        for sr in &srs {
            let count = self.db.find("VDI", "SR", &sr.reference).len();
            family.value("", &[("sr", sr.text("uuid"))], count);
        }
    }

    fn vbds(&self, text: &mut Text) {
        let mut disks = self.disks.counters();
        disks.sort_by_key(|(note, _)| note.spec.vbd);
        let mut family = text.family("tapio_vbd_info", Kind::Gauge, "Which disk of which VM a VBD is");
        for (note, _) in &disks {
            self.vbd_info(&mut family, note);
        }
        let mut family = text.family("tapio_vbd_up", Kind::Gauge, "Whether a disk process serves the VBD");
        for (note, counters) in &disks {
            let vbd = note.spec.vbd.to_string();
            family.value("", &[("vbd", &vbd)], u8::from(counters.is_some()));
        }
        let help = "Images in the chain of a disk, the leaf included";
        let mut family = text.family("tapio_vbd_chain_images", Kind::Gauge, help);
        for (note, _) in &disks {
            if let Some(chain) = &note.chain {
                family.value("", &[("vbd", &note.spec.vbd.to_string())], chain.layers.len());
            }
        }
        counts(text, &disks);
        for (name, help, of) in SINGLE {
            let mut family =
                text.family(name, if name.ends_with("_total") { Kind::Counter } else { Kind::Gauge }, help);
            for (vbd, counters) in served(&disks) {
                family.value("", &[("vbd", &vbd)], of(counters));
            }
        }
        let mut family = text.family(
            "tapio_vbd_delayed_seconds_total",
            Kind::Counter,
            "Time that requests waited for limits and pages",
        );
        for (vbd, counters) in served(&disks) {
            family.value("", &[("vbd", &vbd)], seconds(counters.delays.time_ns));
        }
        stages(text, &disks);
        latencies(text, &disks);
    }

    fn vbd_info(&self, family: &mut text::Family<'_>, note: &Note) {
        let name = |class: &str, uuid: &str| {
            let object = self.db.by_uuid(class, uuid);
            object.map(|object| object.text("name_label").to_owned()).unwrap_or_default()
        };
        let (vbd, vm) = (note.spec.vbd.to_string(), note.vm.to_string());
        let (vdi, sr) = (note.vdi_uuid.to_string(), note.sr.to_string());
        let record = self.db.by_uuid("VBD", &vbd);
        let device = record.as_ref().map_or("", |record| record.text("device"));
        let labels = [
            ("vbd", vbd.as_str()),
            ("vm", &vm),
            ("vm_name", &name("VM", &vm)),
            ("device", device),
            ("vdi", &vdi),
            ("vdi_name", &name("VDI", &vdi)),
            ("sr", &sr),
        ];
        family.value("", &labels, 1);
    }
}

/// Figures of the host itself, which its history has too.
fn host(text: &mut Text) {
    let samples = history::host_samples();
    let of = |name: &str| samples.iter().find(|sample| sample.source.name == name).map(|sample| sample.value);
    for (name, source, factor, help) in [
        ("tapio_host_memory_bytes", "memory_total_kib", 1024.0, "Memory of the host"),
        ("tapio_host_memory_free_bytes", "memory_free_kib", 1024.0, "Memory that is free, or could be"),
        ("tapio_host_load1", "loadavg", 1.0, "Load of the last minute"),
    ] {
        let mut family = text.family(name, Kind::Gauge, help);
        if let Some(value) = of(source) {
            family.value("", &[], value * factor);
        }
    }
    let help = "Time in which a processor worked";
    let mut family = text.family("tapio_host_cpu_seconds_total", Kind::Counter, help);
    for sample in &samples {
        let number = sample.source.name.strip_prefix("cpu").filter(|text| text.parse::<u32>().is_ok());
        if let Some(number) = number {
            family.value("", &[("cpu", number)], sample.value);
        }
    }
}

/// Reads a figure.
type Figure = fn(&Snapshot) -> u64;

/// Families of one figure a disk.
const SINGLE: [(&str, &str, Figure); 7] = [
    ("tapio_vbd_in_flight", "Requests that were taken and not answered yet", Snapshot::in_flight),
    ("tapio_vbd_waiting", "Requests that wait for limits or pages", |counters| counters.delays.waiting),
    ("tapio_vbd_delayed_requests_total", "Requests that had to wait for limits or pages", |counters| {
        counters.delays.requests
    }),
    ("tapio_vbd_full_total", "Times a request stayed with the guest for lack of room", |counters| {
        counters.poll.out_of_requests
    }),
    ("tapio_vbd_wakeups_total", "Sleeps of the disk's threads that ended", |counters| counters.poll.wakeups),
    ("tapio_vbd_low_memory", "Whether the disk answers from its reserve of memory", |counters| {
        u64::from(counters.low_memory)
    }),
    ("tapio_vbd_mirror_broken", "Whether the second side of the disk's mirror is lost", |counters| {
        u64::from(counters.mirror_lost)
    }),
];

fn served(disks: &[Disk]) -> impl Iterator<Item = (String, &Snapshot)> {
    disks.iter().filter_map(|(note, counters)| Some((note.spec.vbd.to_string(), counters.as_ref()?)))
}

/// Requests, bytes and errors by kind.
fn counts(text: &mut Text, disks: &[Disk]) {
    type Of = fn(&tapio_stat::KindCounts) -> u64;
    let families: [(&str, &str, Of); 3] = [
        ("tapio_vbd_requests_total", "Requests that were answered", |counts| counts.completed),
        ("tapio_vbd_bytes_total", "Bytes of requests that were answered", |counts| counts.bytes),
        ("tapio_vbd_errors_total", "Requests that were answered with an error", |counts| counts.errors),
    ];
    for (name, help, of) in families {
        let mut family = text.family(name, Kind::Counter, help);
        for (vbd, counters) in served(disks) {
            for kind in RequestKind::ALL {
                family.value("", &[("vbd", &vbd), ("kind", kind.name())], of(counters.kind(kind)));
            }
        }
    }
}

/// Time in each layer, of which a rate is the average number of requests there (Little's law).
fn stages(text: &mut Text, disks: &[Disk]) {
    let help = "Time that answered requests spent in a layer; its rate is the average queue size there";
    let mut family = text.family("tapio_vbd_stage_seconds_total", Kind::Counter, help);
    for (vbd, counters) in served(disks) {
        for stage in Stage::ALL.into_iter().filter(|stage| *stage != Stage::Total) {
            let sums = RequestKind::ALL.into_iter().filter_map(|kind| counters.histogram(kind, stage));
            let ns = sums.fold(0, |sum: u64, histogram| sum.saturating_add(histogram.sum_ns));
            family.value("", &[("vbd", &vbd), ("stage", stage.name())], seconds(ns));
        }
    }
}

/// Buckets of a page that end a bucket of the text, and those between them: from 16 us to 17 s, four times as long each
/// time. A thousand disks with every power of two would be a text of ten megabytes.
const BUCKET_ENDS: [usize; 11] = [14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34];

fn latencies(text: &mut Text, disks: &[Disk]) {
    let help = "From taking a request to its answer";
    let mut family = text.family("tapio_vbd_latency_seconds", Kind::Histogram, help);
    for (vbd, counters) in served(disks) {
        for kind in [RequestKind::Read, RequestKind::Write, RequestKind::Flush] {
            let Some(histogram) = counters.histogram(kind, Stage::Total) else { continue };
            let labels = [("vbd", vbd.as_str()), ("kind", kind.name())];
            for end in BUCKET_ENDS {
                let below =
                    histogram.counts.iter().take(end).fold(0, |sum: u64, count| sum.saturating_add(*count));
                let limit = seconds(bucket_floor(end)).to_string();
                family.value("_bucket", &[labels[0], labels[1], ("le", &limit)], below);
            }
            let count = histogram.count();
            family.value("_bucket", &[labels[0], labels[1], ("le", "+Inf")], count);
            family.value("_sum", &labels, seconds(histogram.sum_ns));
            family.value("_count", &labels, count);
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, metrics: &Arc<Metrics>) {
    let export = |call: &crate::call::Call<Metrics>, _: &_| -> Result<Value, ApiError> {
        Ok(Value::string(call.part.text()))
    };
    handlers.of(metrics).on("host.export_metrics", export);
}
