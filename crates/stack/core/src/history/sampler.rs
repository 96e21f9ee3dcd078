//! Takes a sample of everything, at the end of each step.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tapio_history::{History, Kind, Layout};
use uuid::Uuid;

use super::disks::{self, Seen};
use super::{Histories, Owner, SOURCES_MAX, Samples, Shared, files, host, sample};
use crate::db::Db;

/// The key of the pool's `other-config` with which VMs have histories of the least and the greatest too.
const ALL_FUNCTIONS: &str = "create_min_max_in_new_VM_RRDs";

/// What the next sample is compared with.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// When the last sample was taken.
    at: Option<Instant>,
    /// Each VBD.
    disks: HashMap<Uuid, Seen>,
    /// Whether it was said that no more sources are recorded.
    is_full: bool,
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Starts the thread.
pub(super) fn start(histories: &Arc<Histories>) {
    let step_ms = u64::from(histories.layout.step_s()) * 1000;
    let weak = Arc::downgrade(histories);
    // A history that is read from its file in the middle of a sample would hide what was sampled.
    let spawned = std::thread::Builder::new().name("histories".into()).spawn(move || {
        if let Some(histories) = weak.upgrade() {
            files::load(&histories);
        }
        run(&weak, step_ms);
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread samples disks: /rrd_updates has no figures");
    }
}

fn run(histories: &Weak<Histories>, step_ms: u64) {
    let mut before = Before::default();
    while let Some(histories) = histories.upgrade() {
        histories.sample(&mut before);
        drop(histories);
        // Steps end at the same times on every host; a clock that is set makes one sample early or late.
        std::thread::sleep(Duration::from_millis(step_ms - now_ms() % step_ms));
    }
}

/// Sizes of an SR that is attached; of one that is not nothing is known.
fn sizes(db: &Db, samples: &mut Samples) {
    for sr in db.all("SR") {
        let Ok(uuid) = sr.uuid() else { continue };
        if !db.find("PBD", "SR", &sr.reference).iter().any(|pbd| pbd.bool("currently_attached")) {
            continue;
        }
        let gauges = [
            ("size", "physical_size", "Bytes of the SR"),
            ("physical_utilisation", "physical_utilisation", "Bytes of the SR that are in use"),
            ("virtual_allocation", "virtual_allocation", "Bytes that the VDIs have for guests"),
        ];
        let gauges =
            gauges.map(|(name, field, doc)| sample((name, doc, "B"), Kind::Gauge, sr.int(field) as f64));
        samples.insert(Owner::Sr(uuid), gauges.into());
    }
}

impl Histories {
    /// Takes a sample of everything.
    pub(super) fn sample(&self, before: &mut Before) {
        let counters = self.disks.counters();
        let now_ms = now_ms();
        let mut samples = Samples::new();
        let mut of_host = host::samples();
        for (source, class) in [
            (("pool_task_count", "Tasks that are known", "tasks"), "task"),
            (("pool_session_count", "Sessions of accounts", "sessions"), "session"),
        ] {
            of_host.push(sample(source, Kind::Gauge, self.db.count(class) as f64));
        }
        samples.insert(Owner::Host, of_host);
        sizes(&self.db, &mut samples);
        let now = Instant::now();
        // A disk that was there at the last sample has figures, so there was one.
        let elapsed_s = before.at.map_or(f64::NAN, |at| (now - at).as_secs_f64());
        let updated_ms = |owner| self.of(owner).map_or(0, |history: Shared| history.lock().updated_ms());
        disks::samples(&self.db, &counters, (&mut before.disks, &updated_ms, elapsed_s), &mut samples);
        before.at = Some(now);
        self.forget_objects();
        self.record(samples, now_ms, &mut before.is_full);
    }

    /// Drops the histories of objects that are gone: what a VM's disks did is kept as long as the VM. The host has sums
    /// of SRs, which go with the SR.
    fn forget_objects(&self) {
        let owners: Vec<Owner> = self.list().into_iter().map(|(owner, _)| owner).collect();
        let gone: Vec<Owner> = owners.into_iter().filter(|owner| owner.object(&self.db).is_none()).collect();
        let mut all = self.all.lock();
        for owner in &gone {
            all.remove(owner);
        }
        drop(all);
        if gone.iter().any(|owner| matches!(owner, Owner::Sr(_))) {
            self.forget_sums();
        }
    }

    /// Drops the host's sums of SRs that are gone.
    pub(super) fn forget_sums(&self) {
        let srs = self.db.all("SR");
        let left: BTreeSet<String> =
            srs.iter().filter_map(|sr| sr.uuid().ok()).map(disks::start_of).collect();
        if let Some(host) = self.of(Owner::Host) {
            let is_gone = |name: &str| disks::sr_in(name).is_some_and(|start| !left.contains(start));
            host.lock().remove(&is_gone);
        }
    }

    /// The layout of a history that begins.
    fn layout_of(&self, owner: Owner) -> Layout {
        let pool = self.db.all("pool").into_iter().next();
        let is_set =
            |key| pool.is_some_and(|pool| pool.map("other_config").get(key).is_some_and(|is| is == "true"));
        match owner {
            Owner::Vm(_) => Layout::new(self.layout.step_s(), is_set(ALL_FUNCTIONS)),
            _ => self.layout.clone(),
        }
    }

    fn begun(&self, owner: Owner, now_ms: u64) -> Shared {
        if let Some(history) = self.of(owner) {
            return history;
        }
        let step_ms = u64::from(self.layout.step_s()) * 1000;
        let history = History::new(self.layout_of(owner), now_ms.saturating_sub(step_ms));
        let history = Arc::new(Mutex::new(history));
        self.all.lock().insert(owner, Arc::clone(&history));
        history
    }

    fn record(&self, samples: Samples, now_ms: u64, is_full: &mut bool) {
        let count: usize = self.list().iter().map(|(_, history)| history.lock().count()).sum();
        let mut room = SOURCES_MAX.saturating_sub(count);
        let mut left_out = 0;
        for (owner, mut samples) in samples {
            let history = self.begun(owner, now_ms);
            let mut history = history.lock();
            samples.retain(|sample| {
                let is_known = history.has(&sample.source.name);
                let fits = is_known || room > 0;
                room -= usize::from(!is_known && fits);
                left_out += usize::from(!fits);
                fits
            });
            if history.update(now_ms, &samples).is_err() {
                history.set_back(now_ms);
            }
        }
        if left_out > 0 && !*is_full {
            tracing::warn!("{SOURCES_MAX} data sources are recorded, and {left_out} more are not");
        }
        *is_full = left_out > 0;
    }
}
