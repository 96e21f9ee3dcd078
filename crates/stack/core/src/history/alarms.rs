//! Messages to the administrator when a figure crosses a threshold.
//!
//! Thresholds are in `other-config:perfmon` of a VM, an SR, a host, and of the pool for those of all objects that have
//! none of their own. Some are there without it: [`BUILT_IN`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tapio_history::alarm::{Variable, Watch, parse};
use tapio_model::Value;

use super::{Histories, Owner, disks};
use crate::dates;
use crate::db::Object;
use crate::tell;

/// The key of `other-config`.
const KEY: &str = "perfmon";

/// Name of all these messages.
const ALARM: &str = "ALARM";

/// Looks at the figures every so many steps.
const STEPS: u64 = 6;

/// A variable of SRs: the share of its bytes that are in use.
const ROOM: &str = "physical_utilisation";

/// A variable of SRs: what all disks on this host move, in MiB/s.
const THROUGHPUT: &str = "sr_io_throughput_total_per_host";

/// A threshold that is there if none of its name is configured.
struct BuiltIn {
    name: &'static str,
    level: f64,
    period_s: u32,
    priority: i64,
}

/// Of each disk of a VM, as `vbd_DEVICE_NAME`: a chain that is about to be full (31 images), requests that take longer
/// than a second, a mirror without its second side. Of an SR: nine tenths of its room in use.
const BUILT_IN: [BuiltIn; 4] = [
    BuiltIn { name: "chain", level: 24.0, period_s: 0, priority: 3 },
    BuiltIn { name: "latency", level: 1_000_000.0, period_s: 60, priority: 3 },
    BuiltIn { name: "mirror_broken", level: 0.5, period_s: 0, priority: 2 },
    BuiltIn { name: ROOM, level: 0.9, period_s: 0, priority: 2 },
];

impl BuiltIn {
    fn variable(&self) -> Variable {
        let mut variable = Variable::new(self.name, self.level);
        (variable.period_s, variable.priority) = (self.period_s, self.priority);
        variable
    }

    /// Whether it is one of each disk.
    fn is_of_disks(name: &str) -> bool {
        name != ROOM && BUILT_IN.iter().any(|built_in| built_in.name == name)
    }
}

/// What is known between two looks.
#[derive(Debug, Default)]
struct Alarms {
    /// Documents that were read.
    read: HashMap<String, Vec<Variable>>,
    watches: BTreeMap<(Owner, String), Watch>,
}

/// Of a record; documents that are no thresholds are reported once.
fn configured(read: &mut HashMap<String, Vec<Variable>>, object: &Object, what: &str) -> Vec<Variable> {
    let Some(text) = object.map("other_config").remove(KEY) else { return Vec::new() };
    if let Some(variables) = read.get(&text) {
        return variables.clone();
    }
    let variables = parse(&text).unwrap_or_else(|wrong| {
        tracing::warn!("{what}: other-config:{KEY} is not used: {wrong}");
        Vec::new()
    });
    read.insert(text, variables.clone());
    variables
}

/// Thresholds of an object: its own, those of the pool, those that are built in; the first of a name counts.
fn of_owner(owner: Owner, own: Vec<Variable>, pool: &[Variable], devices: &[&str]) -> Vec<Variable> {
    let built_in = BUILT_IN.iter().map(BuiltIn::variable);
    let fits = |variable: &Variable| match owner {
        Owner::Host => false,
        Owner::Sr(_) => variable.name == ROOM,
        Owner::Vm(_) => BuiltIn::is_of_disks(&variable.name),
    };
    let common = pool.iter().cloned().chain(built_in).filter(fits);
    let mut named: BTreeMap<String, Variable> = BTreeMap::new();
    for variable in own.into_iter().chain(common) {
        named.entry(variable.name.clone()).or_insert(variable);
    }
    let mut variables = Vec::new();
    for variable in named.into_values() {
        if !(matches!(owner, Owner::Vm(_)) && BuiltIn::is_of_disks(&variable.name)) {
            variables.push(variable);
            continue;
        }
        // One for each disk, so that the message says which.
        for device in devices {
            let name = format!("vbd_{device}_{}", variable.name);
            let mut of_disk = Variable::new(&name, variable.level);
            (of_disk.period_s, of_disk.inhibit_s) = (variable.period_s, variable.inhibit_s);
            (of_disk.sense, of_disk.priority) = (variable.sense, variable.priority);
            variables.push(of_disk);
        }
    }
    variables
}

impl Alarms {
    fn look(&mut self, histories: &Histories, now_s: i64) {
        // A document that is used no more is not kept for long.
        if self.read.len() > 1000 {
            self.read.clear();
        }
        let pool = histories.db.all("pool").into_iter().next();
        let pool = pool.map_or_else(Vec::new, |pool| configured(&mut self.read, &pool, "the pool"));
        let all = histories.list();
        self.watches.retain(|(owner, _), _| all.iter().any(|(here, _)| here == owner));
        for (owner, shared) in all {
            let Some(object) = owner.object(&histories.db) else { continue };
            let own = configured(&mut self.read, &object, &owner.to_string());
            let values: Vec<(Variable, f64)> = {
                let history = shared.lock();
                let devices: Vec<&str> = history
                    .sources()
                    .filter_map(|source| source.name.strip_prefix("vbd_")?.strip_suffix("_chain"))
                    .collect();
                let variables = of_owner(owner, own, &pool, &devices);
                let room = history.mean(ROOM, 0) / history.mean("size", 0);
                let value = |variable: &Variable| match (owner, variable.name.as_str()) {
                    (Owner::Sr(_), ROOM) => room,
                    _ => variable.value(&history),
                };
                variables
                    .into_iter()
                    .map(|variable| {
                        let value = value(&variable);
                        (variable, value)
                    })
                    .collect()
            };
            for (variable, value) in values {
                let value = match owner {
                    Owner::Sr(uuid) if variable.name == THROUGHPUT => {
                        let source = format!("io_throughput_total_{}", disks::start_of(uuid));
                        let host = histories.of(Owner::Host);
                        host.map_or(f64::NAN, |host| host.lock().mean(&source, variable.period_s))
                    }
                    _ => value,
                };
                self.judge(histories, (owner, &object), &variable, (value, now_s));
            }
        }
    }

    fn judge(
        &mut self,
        histories: &Histories,
        (owner, object): (Owner, &Object),
        variable: &Variable,
        (value, now_s): (f64, i64),
    ) {
        let key = (owner, variable.name.clone());
        let watch = match self.watches.get(&key) {
            Some(watch) => *watch,
            // Nothing was reported, or by an earlier daemon.
            None if variable.is_crossed(value) => last_told(histories, object, variable, now_s),
            None => Watch::default(),
        };
        let watch = self.watches.entry(key).or_insert(watch);
        if !watch.is_due(variable, value, now_s) {
            return;
        }
        let class = match owner {
            Owner::Host => "Host",
            Owner::Vm(_) => "VM",
            Owner::Sr(_) => "SR",
        };
        let (uuid, body) = (object.text("uuid"), variable.body(value));
        match tell(&histories.db, ALARM, variable.priority, class, uuid, &body) {
            Ok(_) => *watch = Watch::told(now_s),
            // It is tried again at the next look.
            Err(error) => tracing::warn!("{owner}: no message that {} is {value}: {error}", variable.name),
        }
    }
}

/// What an earlier daemon reported within the inhibit period.
fn last_told(histories: &Histories, object: &Object, variable: &Variable, now_s: i64) -> Watch {
    let mark = variable.mark();
    let told = histories.db.find("message", "name", ALARM).into_iter().filter_map(|message| {
        let is_it = message.text("obj_uuid") == object.text("uuid") && message.text("body").contains(&mark);
        match message.get("timestamp") {
            Value::DateTime(at_s) if is_it => Some(*at_s),
            _ => None,
        }
    });
    let last = told.max().filter(|at_s| now_s - at_s < i64::from(variable.inhibit_s));
    last.map_or_else(Watch::default, Watch::told)
}

/// Starts the thread that looks.
pub(super) fn start(histories: &Arc<Histories>) {
    let every = Duration::from_secs(u64::from(histories.layout.step_s()) * STEPS);
    let weak = Arc::downgrade(histories);
    let spawned = std::thread::Builder::new().name("alarms".into()).spawn(move || {
        let mut alarms = Alarms::default();
        loop {
            std::thread::sleep(every);
            let Some(histories) = weak.upgrade() else { return };
            alarms.look(&histories, dates::now());
        }
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread looks at thresholds: there are no messages of them");
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tapio_history::{History, Kind};
    use uuid::Uuid;

    use super::*;
    use crate::config::Config;
    use crate::db::Db;
    use crate::disks::Disks;

    fn names(variables: &[Variable]) -> Vec<(&str, f64)> {
        variables.iter().map(|variable| (variable.name.as_str(), variable.level)).collect()
    }

    #[test]
    fn thresholds_of_an_object_come_before_those_of_the_pool_and_those_that_are_built_in() {
        let vm = Owner::Vm(Uuid::from_u128(1));
        let pool = [Variable::new("latency", 500.0), Variable::new("chain", 10.0), Variable::new(ROOM, 0.5)];
        let own = vec![Variable::new("chain", 5.0), Variable::new("cpu_usage", 0.75)];
        let found = of_owner(vm, own, &pool, &["xvda", "xvdb"]);
        let expected = [
            ("vbd_xvda_chain", 5.0),
            ("vbd_xvdb_chain", 5.0),
            ("cpu_usage", 0.75),
            ("vbd_xvda_latency", 500.0),
            ("vbd_xvdb_latency", 500.0),
            ("vbd_xvda_mirror_broken", 0.5),
            ("vbd_xvdb_mirror_broken", 0.5),
        ];
        assert_eq!(names(&found), expected);
        let sr = Owner::Sr(Uuid::from_u128(2));
        assert_eq!(names(&of_owner(sr, Vec::new(), &pool, &[])), [(ROOM, 0.5)]);
        assert_eq!(names(&of_owner(sr, Vec::new(), &[], &[])), [(ROOM, 0.9)]);
        assert!(of_owner(Owner::Host, Vec::new(), &pool, &[]).is_empty());
    }

    #[test]
    fn a_crossing_makes_one_message_also_across_daemons() {
        let dir = tempfile::tempdir().expect("a directory");
        let config = Config {
            run_dir: dir.path().join("run"),
            state_dir: dir.path().join("state"),
            mount_dir: dir.path().join("mount"),
            worker_pool_size: 1,
            per_vm_parallel: 1,
            polling: (0, 0),
            host_power: None,
            log_socket: None,
        };
        let db = Arc::new(Db::default());
        crate::basics::start(&db).expect("a pool and a host");
        let histories = Histories::new(&config, &db, &Disks::new(&config));
        // At the beginning of a step.
        let begin = dates::now() / 60 * 60;
        let mut history = History::new(histories.layout.clone(), begin as u64 * 1000);
        let load = |load| [super::super::sample(("loadavg", "Load", ""), Kind::Gauge, load)];
        history.update(begin as u64 * 1000 + 10_000, &load(5.0)).expect("later");
        let history = Arc::new(Mutex::new(history));
        histories.all.lock().insert(Owner::Host, Arc::clone(&history));
        let set = |text: &str| {
            let config = Value::string_map([(KEY, text)]);
            db.set("host", &crate::basics::this_host(&db), "other_config", config).expect("set");
        };
        let told = || db.find("message", "name", ALARM).len();
        let mut alarms = Alarms::default();
        set("<config>");
        alarms.look(&histories, begin);
        assert_eq!(told(), 0, "a document that is none is not used");
        set(
            "<config><variable><name value='loadavg'/><alarm_trigger_level value='2'/><alarm_trigger_period \
             value='0'/><alarm_priority value='1'/></variable></config>",
        );
        alarms.look(&histories, begin);
        alarms.look(&histories, begin + 30);
        assert_eq!(told(), 1);
        let message = &db.find("message", "name", ALARM)[0];
        assert_eq!((message.text("cls"), message.int("priority")), ("Host", 1));
        assert!(message.text("body").starts_with("value: 5.000000\nconfig:\n"), "{}", message.text("body"));
        // Another daemon reads what the first one told.
        let mut next = Alarms::default();
        next.look(&histories, begin + 60);
        assert_eq!(told(), 1);
        // Back, and beyond again: within the inhibit period, and behind it.
        history.lock().update(begin as u64 * 1000 + 20_000, &load(0.0)).expect("later");
        next.look(&histories, begin + 90);
        history.lock().update(begin as u64 * 1000 + 30_000, &load(9.0)).expect("later");
        next.look(&histories, begin + 120);
        assert_eq!(told(), 1);
        next.look(&histories, begin + 3700);
        assert_eq!(told(), 2);
        let mut late = Alarms::default();
        late.look(&histories, begin + 9000);
        assert_eq!(told(), 3, "what is so old is told again");
    }
}
