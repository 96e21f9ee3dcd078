//! Histories of VMs, SRs and the host, sampled all the time, for clients that draw curves as XenServer's do.
//!
//! One thread reads the pages of counters of plugged disks, the records of SRs and `/proc`; no disk process is asked. What
//! is kept is in memory, begins with the daemon, and is bounded by the crate `tapio-history`.

mod answer;
mod disks;
mod host;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tapio_history::{History, Kind, Layout, Sample, Source};
use uuid::Uuid;

pub(crate) use answer::register;

use crate::db::Db;
use crate::disks::Disks;
use disks::Totals;

/// Seconds between samples.
const STEP_S: u32 = 5;

/// Seconds between samples, for tests.
const STEP_VARIABLE: &str = "TAPIO_SAMPLE_S";

/// Of what a history is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Host,
    Vm(Uuid),
    Sr(Uuid),
}

/// What is recorded, and what the next sample is compared with.
#[derive(Debug, Default)]
struct State {
    histories: BTreeMap<Owner, History>,
    /// Of each VBD, at the last sample.
    before: HashMap<Uuid, Totals>,
}

/// Histories of all objects.
#[derive(Debug)]
pub struct Histories {
    db: Arc<Db>,
    disks: Disks,
    layout: Layout,
    state: Mutex<State>,
}

/// Values of one moment, by their owners.
type Samples = BTreeMap<Owner, Vec<Sample>>;

impl Histories {
    pub(crate) fn new(db: &Arc<Db>, disks: &Disks) -> Self {
        let step_s = std::env::var(STEP_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(STEP_S);
        Self {
            db: Arc::clone(db),
            disks: disks.clone(),
            layout: Layout::new(step_s, false),
            state: Mutex::default(),
        }
    }

    /// Takes a sample of everything.
    fn sample(&self) {
        let counters = self.disks.counters();
        let mut samples = Samples::new();
        samples.insert(Owner::Host, host::samples());
        for sr in self.db.all("SR") {
            let Ok(uuid) = sr.uuid() else { continue };
            let gauges = [
                ("size", "physical_size", "Bytes of the SR"),
                ("physical_utilisation", "physical_utilisation", "Bytes of the SR that are in use"),
                ("virtual_allocation", "virtual_allocation", "Bytes that the VDIs have for guests"),
            ];
            let gauges =
                gauges.map(|(name, field, doc)| sample((name, doc, "B"), Kind::Gauge, sr.int(field) as f64));
            samples.insert(Owner::Sr(uuid), gauges.into());
        }
        let mut state = self.state.lock();
        let step_s = f64::from(self.layout.step_s());
        disks::samples(&self.db, &counters, (&mut state.before, step_s), &mut samples);
        self.record(&mut state.histories, &samples);
    }

    fn record(&self, histories: &mut BTreeMap<Owner, History>, samples: &Samples) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        // What a VM's disks did is kept as long as the VM.
        histories.retain(|owner, _| match owner {
            Owner::Host => true,
            Owner::Vm(uuid) => self.db.by_uuid("VM", &uuid.to_string()).is_ok(),
            Owner::Sr(uuid) => self.db.by_uuid("SR", &uuid.to_string()).is_ok(),
        });
        let step_ms = u64::from(self.layout.step_s()) * 1000;
        for (owner, samples) in samples {
            let begun_ms = now_ms.saturating_sub(step_ms);
            let history =
                histories.entry(*owner).or_insert_with(|| History::new(self.layout.clone(), begun_ms));
            if history.update(now_ms, samples).is_err() {
                history.set_back(now_ms);
            }
        }
    }
}

/// One value; name, text for people and units.
fn sample(
    (name, doc, units): (impl Into<String>, &'static str, &'static str),
    kind: Kind,
    value: f64,
) -> Sample {
    let source = Source {
        name: name.into().into(),
        doc: doc.into(),
        units: units.into(),
        kind,
        min: 0.0,
        max: f64::INFINITY,
    };
    Sample { source, value }
}

/// Starts the thread that samples. It ends with the toolstack.
pub(crate) fn listen(histories: &Arc<Histories>) {
    let every = Duration::from_secs(u64::from(histories.layout.step_s()));
    let weak = Arc::downgrade(histories);
    let spawned = std::thread::Builder::new().name("histories".into()).spawn(move || run(&weak, every));
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread samples disks: /rrd_updates has no figures");
    }
}

fn run(histories: &Weak<Histories>, every: Duration) {
    while let Some(histories) = histories.upgrade() {
        histories.sample();
        drop(histories);
        std::thread::sleep(every);
    }
}
