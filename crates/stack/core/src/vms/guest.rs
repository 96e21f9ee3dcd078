//! What guests report of themselves: `VM_guest_metrics`, brought up to date while VMs run.
//!
//! The thread asks a guest soon after its VM has started, when its agent opens its port, and each minute. What does
//! not differ is not written. A guest may lie or not answer: it costs its own share of the time, and nothing else.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tapio_model::{ApiError, Value};
use tapio_vm::GuestFacts;
use uuid::Uuid;

use super::parallel::for_each;
use super::{Call, Vms, lookup};
use crate::basics::may_be_here;
use crate::db::{Change, Object};

/// How often a guest that answers is asked.
const EVERY: Duration = Duration::from_secs(60);
/// How soon one is asked whose VM has just started; doubled while no agent answers.
const SOON: Duration = Duration::from_secs(1);
/// How long a guest may take to answer.
const LIMIT: Duration = Duration::from_secs(4);
/// How often the thread looks whether its toolstack is still there.
const TURN: Duration = Duration::from_secs(1);

/// When a VM is asked next, and how long after that if no agent answers.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    pause: Duration,
}

/// The VMs whose guests are asked.
#[derive(Debug, Default)]
pub struct Guests {
    due: Mutex<BTreeMap<Uuid, Due>>,
    changed: Condvar,
}

impl Guests {
    /// A VM has started, or its agent has.
    pub fn expect(&self, vm: Uuid, at_once: bool) {
        let wait = if at_once { Duration::ZERO } else { SOON };
        self.due.lock().insert(vm, Due { at: Instant::now() + wait, pause: SOON });
        self.changed.notify_all();
    }

    /// Waits for VMs that are due, one turn at most.
    fn next(&self) -> Vec<Uuid> {
        let mut due = self.due.lock();
        let now = Instant::now();
        let first = due.values().map(|due| due.at).min().unwrap_or(now + TURN).min(now + TURN);
        if first > now {
            self.changed.wait_until(&mut due, first);
        }
        let now = Instant::now();
        due.iter().filter(|(_, due)| due.at <= now).map(|(vm, _)| *vm).collect()
    }

    fn asked(&self, vm: Uuid, result: Asked) {
        let mut all = self.due.lock();
        let Some(due) = all.get_mut(&vm) else { return };
        let pause = match result {
            Asked::Gone => {
                all.remove(&vm);
                return;
            }
            Asked::Answered => EVERY,
            Asked::Nothing => (due.pause * 2).min(EVERY),
        };
        *due = Due { at: Instant::now() + pause, pause };
    }
}

/// What came of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Answered,
    Nothing,
    /// The VM does not run.
    Gone,
}

/// Starts the thread. It ends with the toolstack.
pub fn spawn(vms: &Arc<Vms>) {
    let is_here = |vm: &Object| vm.text("power_state") == "Running" && may_be_here(&vms.db, vm);
    for vm in vms.db.all("VM").iter().filter(|vm| is_here(vm)) {
        if let Ok(uuid) = vm.uuid() {
            vms.guests.expect(uuid, true);
        }
    }
    let weak = Arc::downgrade(vms);
    if let Err(error) = thread::Builder::new().name("guests".into()).spawn(move || ask_all(&weak)) {
        tracing::error!(%error, "no thread asks guests what they are");
    }
}

fn ask_all(vms: &Weak<Vms>) {
    loop {
        let Some(vms) = vms.upgrade() else { return };
        let due = vms.guests.next();
        for_each(&due, |vm| {
            let result = ask(&vms, *vm).unwrap_or_else(|error| {
                tracing::debug!(%vm, %error, "a guest is not known");
                Asked::Nothing
            });
            vms.guests.asked(*vm, result);
        });
    }
}

fn ask(vms: &Arc<Vms>, uuid: Uuid) -> Result<Asked, ApiError> {
    let Ok(vm) = vms.db.by_uuid("VM", &uuid.to_string()) else { return Ok(Asked::Gone) };
    match vm.text("power_state") {
        "Running" => {}
        "Paused" => return Ok(Asked::Nothing),
        _ => return Ok(Asked::Gone),
    }
    let found = lookup::driver(vms, &vm)?.guest(uuid, Instant::now() + LIMIT);
    let facts = found.as_ref().ok().and_then(Option::as_ref);
    vms.db.change(|change| record(change, &vm, facts))?;
    Ok(if found?.is_some() { Asked::Answered } else { Asked::Nothing })
}

fn words<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    let told = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    told.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Numbers of the VM's interfaces, by their addresses of hardware.
fn devices(change: &Change<'_>, vm: &Object) -> BTreeMap<String, u32> {
    let vifs = change.find("VIF", "VM", &vm.reference).into_iter();
    let number =
        |vif: &Object| Some((vif.text("MAC").to_ascii_lowercase(), vif.text("device").parse().ok()?));
    vifs.filter_map(|vif| number(&vif)).collect()
}

/// The fields, as products of XenServer read them. Memory is in KiB.
fn fields(
    change: &Change<'_>,
    vm: &Object,
    facts: &GuestFacts,
) -> Vec<(&'static str, BTreeMap<String, String>)> {
    let mut version = facts.os_version.split('.');
    let (major, minor) = (version.next().unwrap_or_default(), version.next().unwrap_or_default());
    let name = if facts.os.is_empty() { "Linux" } else { facts.os.as_str() };
    let os = words([
        ("name", name),
        ("distro", &facts.distro),
        ("major", major),
        ("minor", minor),
        ("uname", &facts.kernel),
    ]);
    let mut agent = facts.version.split('.');
    let mut part =
        || agent.next().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit())).unwrap_or_default();
    let drivers = words([("major", part()), ("minor", part()), ("micro", part())]);
    let disks = facts.file_systems.iter().enumerate().map(|(at, disk)| {
        let used = disk.bytes.map_or_else(String::new, |(all, used)| format!(",{used}/{all}"));
        (at.to_string(), format!("{},{},{}{used}", disk.name, disk.mounted, disk.kind))
    });
    let flag = |is_set: bool| if is_set { "1" } else { "" };
    let other = words([
        ("agent", &facts.agent),
        ("agent-version", &facts.version),
        ("host-name", &facts.host_name),
        ("feature-quiesce", flag(facts.can_freeze)),
        ("feature-trim", flag(facts.can_trim)),
        ("feature-poweroff", "1"),
    ]);
    vec![
        ("os_version", os),
        ("PV_drivers_version", drivers),
        ("disks", disks.collect()),
        ("networks", facts.networks(&devices(change, vm))),
        ("other", other),
    ]
}

fn memory(facts: &GuestFacts) -> BTreeMap<String, String> {
    let text = |kib: u64| if kib == 0 { String::new() } else { kib.to_string() };
    words([("total", &text(facts.memory.0)), ("free", &text(facts.memory.1))])
}

/// Whether memory differs by more than a guest's ordinary coming and going: an eighth of it all.
fn memory_differs(known: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> bool {
    let number =
        |map: &BTreeMap<String, String>, key: &str| map.get(key).and_then(|text| text.parse::<u64>().ok());
    let (total, free) = (number(new, "total"), number(new, "free"));
    number(known, "total") != total
        || number(known, "free").unwrap_or(0).abs_diff(free.unwrap_or(0)) > total.unwrap_or(0) / 8
}

/// Writes down what a guest reports, if it differs; without an answer only that it gave none.
fn record(change: &mut Change<'_>, vm: &Object, facts: Option<&GuestFacts>) -> Result<(), ApiError> {
    let metrics = vm.text("guest_metrics");
    let Ok(known) = change.get("VM_guest_metrics", metrics) else { return Ok(()) };
    let Some(facts) = facts else {
        return if known.bool("live") {
            change.set("VM_guest_metrics", metrics, "live", false)
        } else {
            Ok(())
        };
    };
    let new = fields(change, vm, facts);
    let memory = memory(facts);
    let differs = !known.bool("live")
        || new.iter().any(|(name, map)| known.map(name) != *map)
        || memory_differs(&known.map("memory"), &memory);
    if !differs {
        return Ok(());
    }
    for (name, map) in new.into_iter().chain([("memory", memory)]) {
        change.set("VM_guest_metrics", metrics, name, Value::string_map(map))?;
    }
    for name in ["live", "PV_drivers_detected", "PV_drivers_up_to_date"] {
        change.set("VM_guest_metrics", metrics, name, true)?;
    }
    for name in ["can_use_hotplug_vbd", "can_use_hotplug_vif"] {
        let word = if name.ends_with("vbd") { "yes" } else { "no" };
        change.set("VM_guest_metrics", metrics, name, Value::string(word))?;
    }
    change.set("VM_guest_metrics", metrics, "last_updated", Value::DateTime(lookup::now()))
}

/// The guest has ended: it reports nothing, and has no addresses.
///
/// # Errors
/// The store's.
pub fn at_rest(change: &mut Change<'_>, vm: &Object) -> Result<(), ApiError> {
    let metrics = vm.text("guest_metrics");
    let Ok(known) = change.get("VM_guest_metrics", metrics) else { return Ok(()) };
    if known.bool("live") {
        change.set("VM_guest_metrics", metrics, "live", false)?;
    }
    if !known.map("networks").is_empty() {
        change.set("VM_guest_metrics", metrics, "networks", Value::string_map::<&str, &str>([]))?;
    }
    Ok(())
}

/// `VM.call_plugin`: `guest-agent-operation` `trim` discards what the guest's file systems do not use, `disk-stats`
/// answers what the guest's kernel has counted of its disks, as JSON.
pub(super) fn register(handlers: &mut super::Handlers<'_>) {
    handlers.on("VM.call_plugin", call_plugin);
}

/// How long a guest may take to discard.
const TRIM: Duration = Duration::from_secs(600);

fn call_plugin(call: &Call, args: &crate::args::Args) -> Result<Value, ApiError> {
    let (reference, plugin, function) = (args.text(0)?, args.text(1)?, args.text(2)?);
    if plugin != "guest-agent-operation" || !matches!(function, "trim" | "disk-stats") {
        let why = format!(
            "a guest can be asked for guest-agent-operation trim or disk-stats, not for {plugin} {function}"
        );
        return Err(ApiError::new("XENAPI_MISSING_PLUGIN", [why]));
    }
    let vm = call.part.db.get("VM", reference)?;
    super::allowed::refuse_special(&vm)?;
    if vm.text("power_state") != "Running" {
        return Err(super::allowed::bad_power_state(&vm, "Running"));
    }
    let driver = lookup::driver(&call.part, &vm)?;
    if function == "disk-stats" {
        let disks = driver.guest_disks(vm.uuid()?, Instant::now() + LIMIT)?;
        let text = serde_json::to_string(&disks);
        return text.map(Value::string).map_err(ApiError::internal);
    }
    let trimmed = driver.trim(vm.uuid()?, Instant::now() + TRIM)?;
    Ok(Value::string(trimmed.unwrap_or(0).to_string()))
}
