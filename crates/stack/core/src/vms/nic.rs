//! Network interfaces of guests: VIFs that are plugged.
//!
//! A network leads to the bridge of this host that its `bridge` names; Tapio makes no bridges. A network with PIFs
//! leads out of the host, and a VIF on it whose bridge is not there is refused. One without PIFs is internal to its
//! hosts: where its bridge is not there it has no members, so a VIF on it gets a device whose link is down, and its
//! record says why. The link of one that is locked is down, too: nothing here filters what it sends.
//!
//! A guest's memory knows its interfaces by their places, so the image of a guest says which it had
//! ([`super::memory`]), and whatever reads it is given just these.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_vm::{BridgeState, VifSpec, VmDriver};

use super::allowed::{is_live, refresh};
use super::running::Running;
use super::vbd::live_vm;
use super::{Call, Handlers, lookup};
use crate::args::Args;
use crate::basics::this_host;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::plan::{Permits, Plan};

/// How long `VIF.unplug` waits for the guest where `other_config:unplug-timeout` says nothing, in seconds.
const UNPLUG_SECONDS: u64 = 60;
/// Bytes of a frame where a VIF says nothing.
const MTU: u16 = 1500;
/// What the memory of a guest has in the place of an interface whose VIF is gone: its own address replaces it.
const NO_MAC: &str = "02:00:00:00:00:00";

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VIF.plug", plug_one);
    handlers.on("VIF.move", move_one);
    handlers.on("VIF.unplug", |call, args| unplug(call, args.text(0)?, false));
    handlers.on("VIF.unplug_force", |call, args| unplug(call, args.text(0)?, true));
}

/// A VIF as its driver needs it.
#[derive(Clone, Debug)]
pub(super) struct Nic {
    spec: VifSpec,
    /// The reference of its record, if it has one.
    vif: Option<String>,
    /// Why its link is down.
    trouble: Option<String>,
}

/// The place of a VIF.
///
/// # Errors
/// `INVALID_DEVICE`.
fn place(vif: &Object) -> Result<u8, ApiError> {
    let device = vif.text("device");
    device.parse().map_err(|_| ApiError::new("INVALID_DEVICE", [device]))
}

/// The bridge that a VIF on a network leads to, or why there is none.
///
/// # Errors
/// `HOST_CANNOT_ATTACH_NETWORK`.
fn bridge(
    call: &Call,
    driver: &dyn VmDriver,
    vif: &Object,
    network: &str,
) -> Result<Result<String, String>, ApiError> {
    let db = &call.part.db;
    let Ok(network) = db.get("network", network) else {
        return Ok(Err("its network is gone".to_owned()));
    };
    let mode = match vif.text("locking_mode") {
        "network_default" | "" => network.text("default_locking_mode"),
        own => own,
    };
    match mode {
        "disabled" => return Ok(Err("its locking mode is disabled".to_owned())),
        // Traffic that an administrator wants filtered does not pass unfiltered.
        "locked" => {
            return Ok(Err("its locking mode is locked, and addresses are not filtered here".to_owned()));
        }
        _ => {}
    }
    let (name, label) = (network.text("bridge"), network.text("name_label"));
    let is_internal = db.find("PIF", "network", &network.reference).is_empty();
    let why = match driver.bridge(name)? {
        _ if name.is_empty() => format!("network '{label}' names no bridge"),
        BridgeState::There => return Ok(Ok(name.to_owned())),
        BridgeState::Missing => format!("there is no bridge {name} of network '{label}' on this host"),
        BridgeState::Other(kind) => {
            let why = format!(
                "{name} of network '{label}' is no bridge of Linux (driver {kind}): make a bridge with {name} as its \
                 port, and connect VIF {} to the network of that bridge",
                vif.text("device")
            );
            return Err(refused(call, &network, &why));
        }
    };
    if is_internal {
        return Ok(Err(why));
    }
    let why = format!(
        "{why}: make the bridge (ip link add NAME type bridge), or connect VIF {} to another network (xe \
         network-create bridge=NAME)",
        vif.text("device")
    );
    Err(refused(call, &network, &why))
}

fn refused(call: &Call, network: &Object, why: &str) -> ApiError {
    let host = this_host(&call.part.db);
    ApiError::new("HOST_CANNOT_ATTACH_NETWORK", [&*host, &network.reference, why])
}

impl Nic {
    /// # Errors
    /// `INVALID_DEVICE`, `INVALID_VALUE`, `HOST_CANNOT_ATTACH_NETWORK`.
    fn of(call: &Call, driver: &dyn VmDriver, vm: &Object, vif: &Object) -> Result<Self, ApiError> {
        let position = place(vif)?;
        let mtu = match vif.int("MTU") {
            0 => MTU,
            mtu => u16::try_from(mtu)
                .map_err(|_| ApiError::new("INVALID_VALUE", ["MTU".to_owned(), mtu.to_string()]))?,
        };
        let (bridge, trouble) = match bridge(call, driver, vif, vif.text("network"))? {
            Ok(bridge) => (Some(bridge), None),
            Err(why) => (None, Some(format!("Its link is down: {why}."))),
        };
        let spec = VifSpec {
            vif: Some(vif.uuid()?),
            position,
            mac: vif.text("MAC").to_owned(),
            mtu,
            bridge,
            tap: tap(vm, position),
        };
        Ok(Self { spec, vif: Some(vif.reference.clone()), trouble })
    }

    /// One whose record is gone.
    fn without_record(vm: &Object, position: u8) -> Self {
        let spec = VifSpec {
            vif: None,
            position,
            mac: NO_MAC.to_owned(),
            mtu: MTU,
            bridge: None,
            tap: tap(vm, position),
        };
        Self { spec, vif: None, trouble: None }
    }
}

/// What the host's end of an interface is called.
fn tap(vm: &Object, position: u8) -> String {
    format!("tap{}.{position}", vm.int("domid").max(0))
}

/// The interfaces of a VM that is to start; none where its driver gives guests none.
///
/// # Errors
/// As [`Nic::of`].
pub(super) fn of_vm(call: &Call, driver: &dyn VmDriver, vm: &Object) -> Result<Vec<Nic>, ApiError> {
    if driver.check_vifs(vm.uuid()?).is_err() {
        return Ok(Vec::new());
    }
    let vifs = call.part.db.find("VIF", "VM", &vm.reference);
    vifs.iter().map(|vif| Nic::of(call, driver, vm, vif)).collect()
}

/// The interfaces at these places of a VM whose memory is to be read.
///
/// # Errors
/// As [`Nic::of`].
pub(super) fn at_places(
    call: &Call,
    driver: &dyn VmDriver,
    vm: &Object,
    places: impl IntoIterator<Item = u8>,
) -> Result<Vec<Nic>, ApiError> {
    let vifs = call.part.db.find("VIF", "VM", &vm.reference);
    let at = |position: u8| match vifs.iter().find(|vif| place(vif) == Ok(position)) {
        Some(vif) => Nic::of(call, driver, vm, vif),
        None => Ok(Nic::without_record(vm, position)),
    };
    places.into_iter().map(at).collect()
}

/// The interfaces of a guest that comes from another host: its places, and whether each leads to a network there.
///
/// # Errors
/// As [`Nic::of`]; `HOST_CANNOT_ATTACH_NETWORK` also of an internal network that the guest has there and not here.
pub(super) fn arriving(
    call: &Call,
    driver: &dyn VmDriver,
    vm: &Object,
    places: &BTreeMap<u8, bool>,
) -> Result<Vec<Nic>, ApiError> {
    let nics = at_places(call, driver, vm, places.keys().copied())?;
    let loses = |nic: &&Nic| nic.spec.bridge.is_none() && places.get(&nic.spec.position) == Some(&true);
    let Some((nic, vif)) = nics.iter().find(loses).and_then(|nic| Some((nic, nic.vif.as_ref()?))) else {
        return Ok(nics);
    };
    let network = call.part.db.get("network", call.part.db.get("VIF", vif)?.text("network"))?;
    let why = nic.trouble.as_deref().unwrap_or_default();
    Err(refused(call, &network, &format!("VIF {} would lose its network. {why}", nic.spec.position)))
}

/// Plugs interfaces into a VM that is being made, of which nothing is left should this fail. Their records are not
/// touched.
///
/// # Errors
/// The driver's.
pub(super) fn plug_all(driver: &dyn VmDriver, vm: &Object, nics: &[Nic]) -> Result<(), ApiError> {
    let uuid = vm.uuid()?;
    nics.iter().try_for_each(|nic| {
        driver.plug_vif(uuid, &nic.spec)?;
        if let Some(why) = &nic.trouble {
            tracing::warn!(vm = %uuid, vif = ?nic.spec.vif, "a network interface is not connected. {why}");
        }
        Ok(())
    })
}

/// Records that these are plugged.
///
/// # Errors
/// The store's.
pub(super) fn record_all(call: &Call, nics: &[Nic]) -> Result<(), ApiError> {
    if nics.is_empty() {
        return Ok(());
    }
    call.part.db.change(|change| {
        let known = nics.iter().filter_map(|nic| Some((nic.vif.as_ref()?, nic.trouble.as_deref())));
        known.into_iter().try_for_each(|(vif, trouble)| record_in(change, vif, true, trouble))
    })
}

/// Records whether a VIF is plugged, and why its link is down.
///
/// # Errors
/// The store's.
fn record_in(
    change: &mut Change<'_>,
    vif: &str,
    is_plugged: bool,
    trouble: Option<&str>,
) -> Result<(), ApiError> {
    let Ok(before) = change.get("VIF", vif) else { return Ok(()) };
    change.set("VIF", vif, "currently_attached", is_plugged)?;
    let code = i64::from(trouble.is_some()) * 5;
    if before.int("status_code") != code || trouble.is_some() {
        change.set("VIF", vif, "status_code", code)?;
        change.set("VIF", vif, "status_detail", Value::string(trouble.unwrap_or_default()))?;
    }
    refresh(change, "VIF", vif)
}

/// Records that a VM without a process has none plugged.
///
/// # Errors
/// The store's.
pub(super) fn all_gone(change: &mut Change<'_>, vm: &str) -> Result<(), ApiError> {
    let plugged = change.find("VIF", "VM", vm).into_iter().filter(|vif| vif.bool("currently_attached"));
    let plugged: Vec<_> = plugged.collect();
    plugged.iter().try_for_each(|vif| record_in(change, &vif.reference, false, None))
}

/// The step of a start that plugs interfaces and records it.
pub(super) fn step_of(
    call: &Call,
    driver: &Arc<dyn VmDriver>,
    vm: &Arc<Object>,
    nics: impl FnOnce() -> Result<Vec<Nic>, ApiError> + Send + 'static,
) -> Plan {
    let (this, driver, vm) = (call.clone(), Arc::clone(driver), Arc::clone(vm));
    let (again, reference) = (call.clone(), vm.reference.clone());
    let permit = Permits { vm: Some(reference.as_str().into()), sr: None };
    let subject = format!("VM {}", vm.text("uuid"));
    let run = move |_: &_| {
        let nics = nics()?;
        plug_all(&*driver, &vm, &nics)?;
        step("vm-start:vifs-plugged");
        record_all(&this, &nics)
    };
    // The driver's part goes with the VM.
    let undo = move |_: &_| again.part.db.change(|change| all_gone(change, &reference));
    Plan::leaf("plug its network interfaces", subject, permit, run).undone_by(undo)
}

fn plug_one(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (running, (vm, vif)) = Running::begin(call, "VIF", args.text(0)?, "plug", |change, vif| {
        let vm = live_vm(change, vif)?;
        if vif.bool("currently_attached") {
            return Err(ApiError::new("DEVICE_ALREADY_ATTACHED", [&vif.reference]));
        }
        lookup::driver(&call.part, &vm)?.check_vifs(vm.uuid()?)?;
        Ok((vm, change.get("VIF", &vif.reference)?))
    })?;
    let (uuid, driver) = (vm.uuid()?, lookup::driver(&call.part, &vm)?);
    let nic = Nic::of(call, &*driver, &vm, &vif)?;
    let (this, claim) = (call.clone(), running.claim());
    let work = move |_: &_| {
        plug_all(&*driver, &vm, std::slice::from_ref(&nic))?;
        step("vif-plug:plugged");
        // A forced end of the VM may have taken over: then the guest is gone, or another one.
        match claim.hold() {
            Some(_hold) => record_all(&this, std::slice::from_ref(&nic)),
            None => Err(super::allowed::bad_power_state(&vm, "Running")),
        }
    };
    run(call, "VIF.plug", "plug the network interface", uuid, &vif, work)?;
    Ok(Value::Void)
}

fn run(
    call: &Call,
    operation: &str,
    name: &'static str,
    vm: uuid::Uuid,
    vif: &Object,
    work: impl FnOnce(&crate::plan::Doing) -> Result<(), ApiError> + Send + 'static,
) -> Result<(), ApiError> {
    lookup::apply_limits(call);
    let permit = Permits { vm: Some(crate::db::reference_of(vm).as_str().into()), sr: None };
    let plan = Plan::leaf(name, format!("VIF {}", vif.text("uuid")), permit, work);
    call.part.plans.run(operation, plan, &call.progress)
}

fn unplug(call: &Call, reference: &str, force: bool) -> Result<Value, ApiError> {
    let (running, (vm, vif)) = Running::begin(call, "VIF", reference, "unplug", |change, vif| {
        let vm = live_vm(change, vif)?;
        if !vif.bool("currently_attached") {
            return Err(ApiError::new("DEVICE_ALREADY_DETACHED", [&vif.reference]));
        }
        Ok((vm, change.get("VIF", &vif.reference)?))
    })?;
    let (uuid, driver) = (vm.uuid()?, lookup::driver(&call.part, &vm)?);
    let position = place(&vif)?;
    let spec = VifSpec { vif: Some(vif.uuid()?), ..Nic::without_record(&vm, position).spec };
    let timeout = lookup::seconds(&[&vif, &vm], "unplug-timeout", UNPLUG_SECONDS);
    let (this, claim, record) = (call.clone(), running.claim(), vif.reference.clone());
    let work = move |_: &_| {
        let until: Instant = Instant::now() + timeout.min(Duration::from_secs(86_400));
        driver.unplug_vif(uuid, &spec, force, until)?;
        step("vif-unplug:unplugged");
        match claim.hold() {
            Some(_hold) => this.part.db.change(|change| record_in(change, &record, false, None)),
            None => Ok(()),
        }
    };
    let operation = if force { "VIF.unplug_force" } else { "VIF.unplug" };
    run(call, operation, "unplug the network interface", uuid, &vif, work)?;
    Ok(Value::Void)
}

/// Another network for a VIF; one that is plugged into a guest that runs stays plugged.
///
/// The host's end of the interface goes into the other bridge, then the record follows, with a note around both: a
/// daemon that finds the note does them again.
fn move_one(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, network) = (args.text(0)?, args.text(1)?);
    let (running, found) = Running::begin(call, "VIF", reference, "plug", |change, vif| {
        change.get("network", network)?;
        let vm = change.get("VM", vif.text("VM"))?;
        if is_live(&vm) && vif.bool("currently_attached") {
            return Ok(Some((vm, change.get("VIF", &vif.reference)?)));
        }
        change.set("VIF", &vif.reference, "network", network).map(|()| None)
    })?;
    let Some((vm, vif)) = found else { return Ok(Value::Void) };
    let driver = lookup::driver(&call.part, &vm)?;
    let position = place(&vif)?;
    let to = match bridge(call, &*driver, &vif, network)? {
        Ok(to) => to,
        Err(why) => return Err(refused(call, &*call.part.db.get("network", network)?, &why)),
    };
    if driver.vifs(vm.uuid()?)?.get(&position).is_none_or(|known| known.tap.is_none()) {
        let why = format!(
            "VIF {} is plugged without a link, and has no end on this host that could be connected: use vif-unplug, \
             vif-move and vif-plug",
            vif.text("uuid")
        );
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    call.part.db.change(|change| {
        change.put_note(moved_key(&vif), network);
        Ok(())
    })?;
    step("vif-move:noted");
    let spec =
        VifSpec { vif: Some(vif.uuid()?), bridge: Some(to), ..Nic::without_record(&vm, position).spec };
    let moved = driver.move_vif(vm.uuid()?, &spec);
    step("vif-move:moved");
    // A forced end of the VM may have taken over: then the guest is gone, or another one.
    let held = running.claim();
    let hold = held.hold();
    call.part.db.change(|change| {
        change.drop_note(moved_key(&vif));
        if moved.is_ok() && hold.is_some() {
            change.set("VIF", &vif.reference, "network", network)?;
            record_in(change, &vif.reference, true, None)?;
        }
        Ok(())
    })?;
    moved?;
    hold.map(|_| Value::Void).ok_or_else(|| super::allowed::bad_power_state(&vm, "Running"))
}

/// Names the note of a VIF that gets another network.
fn moved_key(vif: &Object) -> String {
    format!("machines/vif-move/{}", vif.text("uuid"))
}

/// What a daemon died in that connected a VIF to another network is done again; where that cannot be, it has the
/// network that it had.
fn finish_move(call: &Call, vm: &Object, vif: &Object, network: &str) -> Result<(), ApiError> {
    let moved: Result<bool, ApiError> = (|| {
        if !is_live(vm) {
            return Ok(false);
        }
        let driver = lookup::driver(&call.part, vm)?;
        let spec = Nic::without_record(vm, place(vif)?).spec;
        let connect = |network: &str| match bridge(call, &*driver, vif, network)? {
            Ok(to) => driver.move_vif(vm.uuid()?, &VifSpec { bridge: Some(to), ..spec.clone() }),
            Err(why) => Err(ApiError::new("OPERATION_NOT_ALLOWED", [why])),
        };
        if connect(network).is_ok() {
            return Ok(true);
        }
        connect(vif.text("network")).map(|()| false)
    })();
    if let Err(error) = &moved {
        tracing::warn!(vif = vif.text("uuid"), %error, "it is not known to which network this VIF is connected");
    }
    call.part.db.change(|change| {
        change.drop_note(moved_key(vif));
        if matches!(moved, Ok(true)) { change.set("VIF", &vif.reference, "network", network) } else { Ok(()) }
    })
}

/// Brings the records of a VM's VIFs in order with what its guest has, after a daemon died: what it had plugged and not
/// recorded is recorded, and what was unplugged, too.
///
/// # Errors
/// The driver's, the store's.
pub(super) fn recover(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let db = &call.part.db;
    let vifs = db.find("VIF", "VM", &vm.reference);
    if vifs.is_empty() {
        return Ok(());
    }
    for vif in &vifs {
        if let Some((_, network)) = db.notes(&moved_key(vif)).pop() {
            finish_move(call, vm, vif, &network)?;
        }
    }
    let driver = lookup::driver(&call.part, vm).ok().filter(|_| is_live(vm));
    let found = driver.map(|driver| driver.vifs(vm.uuid()?)).transpose()?.unwrap_or_default();
    let plugged: BTreeSet<String> = found.values().filter_map(|one| Some(one.vif?.to_string())).collect();
    let is_plugged = |vif: &Object| plugged.contains(vif.text("uuid"));
    let wrong = vifs.iter().filter(|vif| is_plugged(vif) != vif.bool("currently_attached"));
    let wrong: Vec<_> = wrong.collect();
    if wrong.is_empty() {
        return Ok(());
    }
    db.change(|change| {
        wrong.iter().try_for_each(|vif| record_in(change, &vif.reference, is_plugged(vif), None))
    })
}
