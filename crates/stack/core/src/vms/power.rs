//! VMs are started, stopped, and held.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_vm::{
    BOOT_ORDER, FIRMWARE, FIRMWARE_TEXT, MADE, MEMORY_MAX, ShutdownKind, VCPU_MASK, VCPUS_MAX, VmDriver,
    VmSpec,
};

use super::allowed::{bad_power_state, refresh, refuse_special};
use super::plug::{Disk, Timeout, record};
use super::running::Running;

use super::{Call, Handlers, Vms, balloon, console, devices, drive, guest, lookup, made, memory, nic};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::plan::{Permits, Plan};

/// How long a guest that was asked may take to end, in seconds, where `other_config:shutdown-timeout` says nothing.
const SHUTDOWN_SECONDS: u64 = 300;
/// How long one that was not asked may.
const HARD: Duration = Duration::from_secs(30);
/// How long the disks of a VM that has ended may take, all together.
const DISKS: Duration = Duration::from_secs(60);
/// How long each of them may at least, once it is its turn.
const DISK: Duration = Duration::from_secs(5);

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.start", |call, args| start(call, args.text(0)?, args.bool(1)?));
    handlers.on("VM.start_on", start_on);
    handlers.on("VM.pause", pause);
    handlers.on("VM.unpause", unpause);
    handlers.on("VM.clean_shutdown", |call, args| end(call, args, "clean_shutdown"));
    handlers.on("VM.hard_shutdown", |call, args| end(call, args, "hard_shutdown"));
    handlers.on("VM.shutdown", |call, args| end(call, args, "shutdown"));
    handlers.on("VM.clean_reboot", |call, args| reboot(call, args, "clean_reboot"));
    handlers.on("VM.hard_reboot", |call, args| reboot(call, args, "hard_reboot"));
    handlers.on("VM.power_state_reset", power_state_reset);
}

/// The key of a note about a VM. Keys of this part begin as those of earlier versions, whose notes are read.
pub(super) fn note_key(operation: &str, vm: &Object) -> String {
    format!("machines/{operation}/{}", vm.text("uuid"))
}

/// What the driver gets to know of a VM.
pub fn spec(vm: &Object) -> Result<VmSpec, ApiError> {
    let path = |field: &str| Some(vm.text(field)).filter(|text| !text.is_empty()).map(PathBuf::from);
    let mut platform = vm.map("platform");
    // Clients that know no driver put such keys where they may put anything.
    for (key, value) in vm.map("other_config") {
        if key.starts_with("sim-") {
            platform.entry(key).or_insert(value);
        }
    }
    let inner = [
        ("HVM_boot_params", "order", BOOT_ORDER),
        ("HVM_boot_params", "firmware", FIRMWARE),
        ("VCPUs_params", "mask", VCPU_MASK),
    ];
    for (field, key, inner) in inner {
        platform.remove(inner);
        platform.extend(vm.map(field).remove(key).map(|value| (inner.to_owned(), value)));
    }
    platform.retain(|key, _| !key.starts_with(FIRMWARE_TEXT));
    let texts = vm.map("bios_strings").into_iter();
    platform.extend(texts.map(|(key, text)| (format!("{FIRMWARE_TEXT}{key}"), text)));
    MADE.iter().for_each(|key| drop(platform.remove(*key)));
    platform.insert(VCPUS_MAX.to_owned(), vm.int("VCPUs_max").to_string());
    platform.insert(MEMORY_MAX.to_owned(), (most_memory(vm) >> 20).to_string());
    Ok(VmSpec {
        uuid: vm.uuid()?,
        name: vm.text("name_label").to_owned(),
        memory: u64::try_from(vm.int("memory_dynamic_max").max(vm.int("memory_static_min"))).unwrap_or(0),
        vcpus: u32::try_from(vm.int("VCPUs_at_startup").max(1)).unwrap_or(1),
        kernel: path("PV_kernel"),
        ramdisk: path("PV_ramdisk"),
        kernel_args: vm.text("PV_args").to_owned(),
        platform,
        drives: Vec::new(),
    })
}

/// The most bytes of memory that its emulator has.
pub(super) fn most_memory(vm: &Object) -> u64 {
    u64::try_from(vm.int("memory_dynamic_max").max(vm.int("memory_static_max"))).unwrap_or(0)
}

/// What the driver gets to know of a VM whose memory comes: how it was made says the memory, and not its record, which
/// may be a later one.
pub(super) fn spec_for_memory(vm: &Object) -> Result<VmSpec, ApiError> {
    let mut spec = spec(vm)?;
    MADE.iter().for_each(|key| drop(spec.platform.remove(*key)));
    Ok(spec)
}

fn start_on(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(1)?)?;
    if host.reference != this_host(&call.part.db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    start(call, args.text(0)?, args.bool(2)?)
}

fn start(call: &Call, reference: &str, start_paused: bool) -> Result<Value, ApiError> {
    let published = numbers_below(&call.part);
    let (_running, vm) = Running::begin(call, "VM", reference, "start", |change, vm| {
        refuse_special(vm)?;
        if vm.text("power_state") != "Halted" {
            return Err(bad_power_state(vm, "Halted"));
        }
        assert_enabled(change, call)?;
        if vm.int("VCPUs_at_startup") < 1 {
            return Err(ApiError::new("VM_NO_VCPUS", [&vm.reference]));
        }
        announce(change, vm, published, "start")
    })?;
    boot(call, &vm, "VM.start", start_paused)?;
    Ok(Value::Void)
}

/// Whether VMs may start on this host.
///
/// # Errors
/// `HOST_DISABLED`.
pub(super) fn assert_enabled(change: &Change<'_>, call: &Call) -> Result<(), ApiError> {
    let host = change.get("host", &this_host(&call.part.db))?;
    if host.bool("enabled") { Ok(()) } else { Err(ApiError::new("HOST_DISABLED", [&host.reference])) }
}

/// Writes down that a VM is about to start: a daemon that finds this ends what was begun. `what` begins the note.
/// `published` is the highest domain number that disks of this host have, because another toolstack may be there. A
/// domain of Xen has no number before Xen has given it one: clients would take ours for another domain's.
pub(super) fn announce(
    change: &mut Change<'_>,
    vm: &Object,
    published: u32,
    what: &str,
) -> Result<Arc<Object>, ApiError> {
    let taken = change.all("VM").iter().map(|other| other.int("domid")).max().unwrap_or(0);
    let taken = taken.max(i64::from(published));
    change.put_note(note_key(what, vm), &vm.reference);
    if lookup::driver_name(vm) != "xen" {
        change.set("VM", &vm.reference, "domid", taken + 1)?;
    }
    change.get("VM", &vm.reference)
}

/// The highest number that a VM of another driver than Xen's must not have: those of disks that are published
/// here, and those that Xen gives (below `DOMID_FIRST_RESERVED`) where there is one.
pub(super) fn numbers_below(vms: &Vms) -> u32 {
    const FIRST_RESERVED: u32 = 0x7ff0;
    let has_xen = vms.driver("xen").is_some_and(|driver| driver.check().is_ok());
    vms.disks.domid_max().max(if has_xen { FIRST_RESERVED } else { 0 })
}

/// Starts a VM that was [`announce`]d.
fn boot(call: &Call, vm: &Arc<Object>, operation: &str, start_paused: bool) -> Result<(), ApiError> {
    step("vm-start:noted");
    let begun = boot_steps(call, vm, operation, start_paused);
    if begun.is_err() {
        // All steps are undone; what cannot be written now is done by the next start.
        let ended = call.part.db.change(|change| {
            change.drop_note(note_key("start", vm));
            change.set("VM", &vm.reference, "domid", -1)
        });
        if let Err(error) = ended {
            tracing::warn!(vm = vm.text("uuid"), %error, "a failed start could not be written down");
        }
        forget_guest(call, vm);
    }
    begun
}

/// What a guest begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin<'a> {
    /// Its kernel or its disks; it runs then, unless it is to begin paused.
    Boot {
        /// It does not run yet.
        start_paused: bool,
    },
    /// The memory image with this reference; it is paused then.
    Memory(&'a str),
}

/// Makes a VM with its disks; all or nothing.
///
/// # Errors
/// The driver's, those of plugs.
pub(super) fn build(
    call: &Call,
    vm: &Arc<Object>,
    operation: &str,
    origin: Origin<'_>,
) -> Result<Arc<dyn VmDriver>, ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    assert_can_boot(&call.part, vm)?;
    lookup::apply_limits(call);
    let spec = match origin {
        Origin::Boot { .. } => spec(vm)?,
        Origin::Memory(_) => spec_for_memory(vm)?,
    };
    let spec = VmSpec { drives: drive::of_vm(&call.part, vm)?, ..spec };
    let uuid = spec.uuid;
    let mut plugs = Vec::new();
    for vbd in call.part.db.find("VBD", "VM", &vm.reference) {
        if vbd.bool("empty") {
            let name = devices::name(devices::place(vbd.text("userdevice"))?);
            record(call, &vbd.reference, Some(&name), None)?;
            continue;
        }
        plugs.push(Disk::of(call, &vbd)?.plug());
    }
    // What the image says of the guest's network interfaces is known once its head was read.
    let places: Arc<OnceLock<Vec<u8>>> = Arc::default();
    let nics = match origin {
        Origin::Boot { .. } => nic::of_vm(call, &*driver, vm)?,
        Origin::Memory(_) => Vec::new(),
    };
    if matches!(origin, Origin::Memory(_)) || !nics.is_empty() {
        let (this, of, record) = (call.clone(), Arc::clone(&driver), Arc::clone(vm));
        let places = Arc::clone(&places);
        plugs.push(nic::step_of(call, &driver, vm, move || match places.get() {
            Some(places) => nic::at_places(&this, &*of, &record, places.iter().copied()),
            None => Ok(nics),
        }));
    }
    let permit = Permits { vm: Some(vm.reference.as_str().into()), sr: None };
    let subject = format!("VM {uuid}");
    let (create, undo, last) = (Arc::clone(&driver), Arc::clone(&driver), Arc::clone(&driver));
    let saved = match origin {
        Origin::Memory(image) => Some((call.clone(), image.to_owned())),
        Origin::Boot { .. } => None,
    };
    let mut steps = vec![
        Plan::leaf("create the VM", &subject, permit.clone(), move |_| {
            match &saved {
                None => create.create(&spec)?,
                Some((call, image)) => {
                    let head = memory::head(call, image)?;
                    let _ = places.set(head.places().collect());
                    create.create_saved(&spec, &head.machine)?;
                }
            }
            step("vm-start:created");
            Ok(())
        })
        .undone_by(move |_| undo.shutdown(uuid, ShutdownKind::Hard, Instant::now() + HARD)),
        Plan::Parallel(plugs),
    ];
    match origin {
        Origin::Boot { start_paused: true } => {}
        Origin::Boot { start_paused: false } => {
            steps.push(Plan::leaf("let it run", &subject, permit, move |_| {
                step("vm-start:plugged");
                last.unpause(uuid)
            }));
        }
        Origin::Memory(image) => {
            let (this, image) = (call.clone(), image.to_owned());
            steps.push(Plan::leaf("read its memory", &subject, permit, move |_| {
                memory::load(&this, &*last, uuid, &image)
            }));
        }
    }
    call.part.plans.run(operation, Plan::Serial(steps), &call.progress)?;
    Ok(driver)
}

fn boot_steps(call: &Call, vm: &Arc<Object>, operation: &str, start_paused: bool) -> Result<(), ApiError> {
    let driver = build(call, vm, operation, Origin::Boot { start_paused })?;
    step("vm-start:running");
    let state = if start_paused { "Paused" } else { "Running" };
    let recorded = call.part.db.change(|change| {
        change.drop_note(note_key("start", vm));
        let priority = change.get("VM", &vm.reference)?.text("ha_restart_priority") == "restart";
        change.set("VM", &vm.reference, "ha_always_run", priority)?;
        record_live(change, call, vm, &*driver, state)
    });
    recorded.inspect(|()| balloon::follow(call, vm, &*driver)).inspect_err(|_| {
        if let Err(error) = clear(call, vm, &driver, "VM.start") {
            tracing::warn!(vm = vm.text("uuid"), %error, "a VM that could not be recorded is not removed completely");
        }
    })
}

/// Writes down that a VM is there, and what is known of it.
///
/// # Errors
/// The store's.
pub(super) fn record_live(
    change: &mut Change<'_>,
    call: &Call,
    vm: &Object,
    driver: &dyn VmDriver,
    state: &str,
) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    change.set("VM", &vm.reference, "power_state", Value::string(state))?;
    change.set("VM", &vm.reference, "resident_on", Value::string(this_host(&call.part.db)))?;
    if let Some(domid) = driver.domid(uuid) {
        change.set("VM", &vm.reference, "domid", i64::from(domid))?;
    }
    console::record(change, vm, driver)?;
    set_metrics(change, vm, state)?;
    call.part.guests.expect(uuid, false);
    refresh(change, "VM", &vm.reference)
}

/// Writes down that a guest that came from another host runs here.
///
/// # Errors
/// The store's.
pub(super) fn record_arrived(
    change: &mut Change<'_>,
    call: &Call,
    vm: &Object,
    driver: &dyn VmDriver,
) -> Result<(), ApiError> {
    change.set("VM", &vm.reference, "power_state", Value::string("Running"))?;
    if let Some(domid) = driver.domid(vm.uuid()?) {
        change.set("VM", &vm.reference, "domid", i64::from(domid))?;
    }
    console::record(change, vm, driver)?;
    call.part.guests.expect(vm.uuid()?, false);
    refresh(change, "VM", &vm.reference)
}

/// Whether this host can run it now.
///
/// # Errors
/// Its driver's; `HOST_NOT_ENOUGH_FREE_MEMORY`.
pub fn assert_can_boot(vms: &Vms, vm: &Object) -> Result<(), ApiError> {
    let driver = lookup::driver(vms, vm)?;
    driver.check()?;
    // Xen has memory of its own, of which it says itself whether it suffices.
    if matches!(driver.name(), "sim" | "xen") { Ok(()) } else { enough_memory(vm) }
}

fn enough_memory(vm: &Object) -> Result<(), ApiError> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    let (Some(kib), needed) = (kib, spec(vm)?.memory) else { return Ok(()) };
    if kib.saturating_mul(1024) < needed {
        return Err(ApiError::new(
            "HOST_NOT_ENOUGH_FREE_MEMORY",
            [needed.to_string(), kib.saturating_mul(1024).to_string()],
        ));
    }
    Ok(())
}

fn set_metrics(change: &mut Change<'_>, vm: &Object, state: &str) -> Result<(), ApiError> {
    let metrics = vm.text("metrics");
    if change.get("VM_metrics", metrics).is_err() {
        return Ok(());
    }
    let runs = !matches!(state, "Halted" | "Suspended");
    let now = Value::DateTime(lookup::now());
    if runs {
        change.set("VM_metrics", metrics, "start_time", now.clone())?;
    }
    change.set("VM_metrics", metrics, "last_updated", now)?;
    change.set(
        "VM_metrics",
        metrics,
        "memory_actual",
        if runs { vm.int("memory_dynamic_max") } else { 0 },
    )?;
    change.set("VM_metrics", metrics, "VCPUs_number", if runs { vm.int("VCPUs_at_startup") } else { 0 })?;
    change.set("VM_metrics", metrics, "state", Value::strings(runs.then_some("running")))
}

fn end(call: &Call, args: &Args, operation: &'static str) -> Result<Value, ApiError> {
    let (running, vm) = begin_end(call, args.text(0)?, operation)?;
    stop(call, &running, &vm, operation, None)?;
    Ok(Value::Void)
}

/// Ends a VM by asking its guest, at most until `until`, and by force where that does not end it, or something else is
/// being done with the VM. One that is suspended stays so.
///
/// # Errors
/// Those of `VM.hard_shutdown`.
pub(super) fn shut_down_until(call: &Call, reference: &str, until: Instant) -> Result<(), ApiError> {
    if call.part.db.get("VM", reference)?.text("power_state") == "Suspended" {
        return Ok(());
    }
    let asked = begin_end(call, reference, "shutdown")
        .and_then(|(running, vm)| stop(call, &running, &vm, "shutdown", Some(until)));
    match asked {
        Err(error) if error.code == "OTHER_OPERATION_IN_PROGRESS" => shut_down(call, reference),
        asked => asked,
    }
}

/// Ends a VM by asking its guest.
///
/// # Errors
/// Those of `VM.clean_shutdown`.
pub(super) fn shut_down_clean(call: &Call, reference: &str) -> Result<(), ApiError> {
    let (running, vm) = begin_end(call, reference, "clean_shutdown")?;
    stop(call, &running, &vm, "clean_shutdown", None)
}

/// Ends a VM that runs, without asking its guest.
///
/// # Errors
/// Those of `VM.hard_shutdown`.
pub(super) fn shut_down(call: &Call, reference: &str) -> Result<(), ApiError> {
    let (running, vm) = begin_end(call, reference, "hard_shutdown")?;
    stop(call, &running, &vm, "hard_shutdown", None)
}

fn begin_end(
    call: &Call,
    reference: &str,
    operation: &'static str,
) -> Result<(Running, Arc<Object>), ApiError> {
    let check = |change: &mut Change<'_>, vm: &Object, _: bool| {
        refuse_special(vm)?;
        let asks_guest = operation.starts_with("clean");
        match vm.text("power_state") {
            "Running" => {}
            "Paused" if !asks_guest => {}
            "Suspended" if matches!(operation, "hard_shutdown" | "shutdown") => {}
            _ => return Err(bad_power_state(vm, "Running")),
        }
        change.put_note(note_key("shutdown", vm), &vm.reference);
        // It is asked for: high availability leaves it alone until it is started again.
        change.set("VM", &vm.reference, "ha_always_run", false)?;
        change.get("VM", &vm.reference)
    };
    // Disks of the VM that hang in a plug or an unplug must not keep it from ending.
    if operation.starts_with("hard") {
        return Running::begin_by_force(call, "VM", reference, operation, check);
    }
    Running::begin(call, "VM", reference, operation, |change, vm| check(change, vm, false))
}

/// Ends a guest, as the operation says, and unplugs its disks. It is asked for no longer than `until`, if there is one.
fn stop(
    call: &Call,
    running: &Running,
    vm: &Arc<Object>,
    operation: &str,
    until: Option<Instant>,
) -> Result<(), ApiError> {
    step("vm-shutdown:noted");
    if vm.text("power_state") == "Suspended" {
        return halted(call, vm);
    }
    let driver = lookup::driver(&call.part, vm)?;
    let uuid = vm.uuid()?;
    let timeout = lookup::seconds(&[vm], "shutdown-timeout", SHUTDOWN_SECONDS);
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout = left.map_or(timeout, |left| left.min(timeout));
    // A guest that does not answer may be ended by force meanwhile, and be started again.
    if matches!(operation, "clean_shutdown" | "clean_reboot" | "shutdown") {
        // A guest that waits for its disk does not end.
        super::pause::unpause_all(call, vm);
    }
    let clean =
        |timeout| running.waiting(|| driver.shutdown(uuid, ShutdownKind::Clean, Instant::now() + timeout));
    let hard = || driver.shutdown(uuid, ShutdownKind::Hard, Instant::now() + HARD);
    let paused = vm.text("power_state") == "Paused";
    let ended = match operation {
        "clean_shutdown" | "clean_reboot" => clean(timeout),
        "shutdown" if !paused => clean(timeout).or_else(|error| {
            if !running.is_mine() {
                return Err(error);
            }
            tracing::info!(vm = %uuid, %error, "the guest did not end when asked");
            hard()
        }),
        _ => hard(),
    };
    if let Err(error) = ended {
        if running.is_mine() {
            call.part.db.change(|change| {
                change.drop_note(note_key("shutdown", vm));
                Ok(())
            })?;
        }
        return Err(error);
    }
    step("vm-shutdown:ended");
    take_disks(call, vm, &format!("VM.{operation}"));
    step("vm-shutdown:unplugged");
    halted(call, vm)
}

/// Unplugs all disks of a guest that has ended. The rest are unplugged even if one cannot be.
pub fn take_disks(call: &Call, vm: &Object, operation: &str) {
    lookup::apply_limits(call);
    let timeout = Timeout::Shared(Instant::now() + DISKS, DISK);
    let mut plans = Vec::new();
    for vbd in call.part.db.find("VBD", "VM", &vm.reference) {
        let is_known = vbd.uuid().is_ok_and(|uuid| call.part.disks.of_vbd(uuid).is_some());
        if !vbd.bool("empty") && (vbd.bool("currently_attached") || is_known) {
            match Disk::of(call, &vbd) {
                Ok(disk) => plans.push(disk.unplug(true, timeout).best_effort()),
                Err(error) => tracing::warn!(vbd = vbd.text("uuid"), %error, "a disk stays"),
            }
        } else if vbd.bool("currently_attached")
            && let Err(error) = record(call, &vbd.reference, None, None)
        {
            tracing::warn!(vbd = vbd.text("uuid"), %error, "a drive stays");
        }
    }
    // No client may cancel this: a guest that has ended shall not keep its disks.
    let progress: Arc<dyn crate::progress::Progress> = Arc::new(Uncancelled(Arc::clone(&call.progress)));
    if let Err(error) = call.part.plans.run(operation, Plan::Parallel(plans), &progress) {
        tracing::warn!(vm = vm.text("uuid"), %error, "disks stay");
    }
}

struct Uncancelled(Arc<dyn crate::progress::Progress>);

impl crate::progress::Progress for Uncancelled {
    fn is_cancelled(&self) -> bool {
        false
    }

    fn set(&self, fraction: f64) {
        self.0.set(fraction);
    }

    fn task(&self) -> Option<&str> {
        self.0.task()
    }
}

/// Writes down that a VM is halted. Memory that it was suspended with goes.
///
/// # Errors
/// The store's.
pub fn halted(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let image = call.part.db.change(|change| {
        change.drop_note(note_key("shutdown", vm));
        change.drop_note(note_key("start", vm));
        let was_suspended = change.get("VM", &vm.reference)?.text("power_state") == "Suspended";
        at_rest(change, vm, "Halted")?;
        if was_suspended { made::leave_image(change, &vm.reference) } else { Ok(None) }
    })?;
    step("vm-shutdown:halted");
    forget_guest(call, vm);
    if let Some(image) = image {
        made::discard(call, &image);
    }
    Ok(())
}

/// Its disks are no reason any more to end its guest when this host loses a shared SR.
fn forget_guest(call: &Call, vm: &Object) {
    if let Ok(uuid) = vm.uuid() {
        tapio_sm::lease::forget_guest(&call.part.config.run_dir, uuid);
    }
}

/// A VM has no process any more: it is halted or suspended.
///
/// # Errors
/// The store's.
pub(super) fn at_rest(change: &mut Change<'_>, vm: &Object, state: &str) -> Result<(), ApiError> {
    change.set("VM", &vm.reference, "power_state", Value::string(state))?;
    change.set("VM", &vm.reference, "resident_on", Value::string(NULL_REF))?;
    change.set("VM", &vm.reference, "domid", -1)?;
    for console in change.find("console", "VM", &vm.reference) {
        change.destroy("console", &console.reference)?;
    }
    set_metrics(change, vm, state)?;
    guest::at_rest(change, vm)?;
    nic::all_gone(change, &vm.reference)?;
    refresh(change, "VM", &vm.reference)
}

/// Whatever there is of a VM goes, and the record says so.
///
/// # Errors
/// The emulator does not end, or the store fails.
pub fn clear(call: &Call, vm: &Object, driver: &Arc<dyn VmDriver>, operation: &str) -> Result<(), ApiError> {
    driver.shutdown(vm.uuid()?, ShutdownKind::Hard, Instant::now() + HARD)?;
    take_disks(call, vm, operation);
    halted(call, vm)
}

fn reboot(call: &Call, args: &Args, operation: &'static str) -> Result<Value, ApiError> {
    let (running, vm) = begin_end(call, args.text(0)?, operation)?;
    stop(call, &running, &vm, operation, None)?;
    restart(call, &vm, operation)?;
    Ok(Value::Void)
}

/// Starts a VM again that has just ended, within the operation that ended it.
///
/// # Errors
/// As starting it.
pub fn restart(call: &Call, vm: &Object, operation: &str) -> Result<(), ApiError> {
    let published = numbers_below(&call.part);
    let vm = call.part.db.change(|change| {
        let vm = change.get("VM", &vm.reference)?;
        announce(change, &vm, published, "start")
    })?;
    boot(call, &vm, &format!("VM.{operation}"), false)
}

fn pause(call: &Call, args: &Args) -> Result<Value, ApiError> {
    hold(call, args.text(0)?, "pause", "Running", "Paused")
}

fn unpause(call: &Call, args: &Args) -> Result<Value, ApiError> {
    hold(call, args.text(0)?, "unpause", "Paused", "Running")
}

fn hold(
    call: &Call,
    reference: &str,
    operation: &'static str,
    from: &str,
    to: &str,
) -> Result<Value, ApiError> {
    let (_running, vm) = Running::begin(call, "VM", reference, operation, |change, vm| {
        refuse_special(vm)?;
        if vm.text("power_state") != from {
            return Err(bad_power_state(vm, from));
        }
        change.get("VM", &vm.reference)
    })?;
    let driver = lookup::driver(&call.part, &vm)?;
    let uuid = vm.uuid()?;
    if operation == "pause" { driver.pause(uuid) } else { driver.unpause(uuid) }?;
    call.part.db.change(|change| {
        change.set("VM", reference, "power_state", Value::string(to))?;
        refresh(change, "VM", reference)
    })?;
    Ok(Value::Void)
}

/// A VM that ran on a host that died is not there any more: its record says so. None of its disks is here.
///
/// # Errors
/// `OTHER_OPERATION_IN_PROGRESS`, the store's.
pub(crate) fn lost(vms: &Arc<Vms>, reference: &str) -> Result<(), ApiError> {
    let call = Call::own(vms);
    let (_running, vm) = Running::begin(&call, "VM", reference, "power_state_reset", |change, vm| {
        change.get("VM", &vm.reference)
    })?;
    for vbd in vms.db.find("VBD", "VM", reference).iter().filter(|vbd| vbd.bool("currently_attached")) {
        record(&call, &vbd.reference, None, None)?;
    }
    want_again(&call, &vm)?;
    halted(&call, &vm)
}

/// High availability starts a VM that its host lost again, wherever that is possible. A shutdown that a client asked
/// for, and a start, take that back.
pub(super) fn want_again(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let db = &call.part.db;
    if vm.text("ha_restart_priority").is_empty() || !db.all("pool").iter().any(|pool| pool.bool("ha_enabled"))
    {
        return Ok(());
    }
    db.set("VM", &vm.reference, "ha_always_run", true)
}

/// Starts a VM here.
///
/// # Errors
/// Those of `VM.start`.
pub(crate) fn start_here(vms: &Arc<Vms>, reference: &str) -> Result<(), ApiError> {
    start(&Call::own(vms), reference, false).map(drop)
}

fn power_state_reset(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let check = |change: &mut Change<'_>, vm: &Object, _: bool| {
        refuse_special(vm)?;
        change.get("VM", &vm.reference)
    };
    let (_running, vm) = Running::begin_by_force(call, "VM", args.text(0)?, "power_state_reset", check)?;
    let driver = lookup::driver(&call.part, &vm)?;
    clear(call, &vm, &driver, "VM.power_state_reset")?;
    Ok(Value::Void)
}
