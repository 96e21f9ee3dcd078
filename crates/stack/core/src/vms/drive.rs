//! CD drives: they are there whether they have a medium or not, and their media change while the VM runs.
//!
//! A note says that a medium is on its way in or out; the change after which the record says where it is drops the
//! note. A daemon that finds one looks whether the disk of the medium is plugged.

use std::time::Instant;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_vm::DiskSpec;

use super::allowed::{is_live, refresh};
use super::plug::{Disk, Timeout, disk_spec};
use super::running::Running;
use super::vbd::{check_vdi, put_in};
use super::{Call, Handlers, Vms, devices, lookup};
use crate::args::Args;
use crate::db::{Change, Object};
use crate::disks::Phase;
use crate::plan::steps::step;

/// How long a guest and the storage may take to give a medium up, in seconds.
const EJECT_SECONDS: u64 = 60;

/// Notes of media on their way.
const NOTES: &str = "machines/medium/";

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VBD.insert", insert);
    handlers.on("VBD.eject", eject);
}

/// The CD drives of a VM, as its driver needs them.
///
/// # Errors
/// `INVALID_DEVICE`.
pub fn of_vm(vms: &Vms, vm: &Object) -> Result<Vec<DiskSpec>, ApiError> {
    let vbds = vms.db.find("VBD", "VM", &vm.reference).into_iter();
    vbds.filter(|vbd| vbd.text("type") == "CD").map(|vbd| disk_spec(&vbd)).collect()
}

fn refuse_fixed(vbd: &Object) -> Result<(), ApiError> {
    if vbd.text("type") == "CD" {
        return Ok(());
    }
    Err(ApiError::new("VBD_NOT_REMOVABLE_MEDIA", [&vbd.reference]))
}

fn note_of(vbd: &Object) -> String {
    format!("{NOTES}{}", vbd.reference)
}

/// The drive has no medium, and is plugged if its VM runs and `is_plugged`.
fn set_empty(change: &mut Change<'_>, vbd: &Object, is_plugged: bool) -> Result<(), ApiError> {
    let reference = &vbd.reference;
    let device =
        if is_plugged { devices::name(devices::place(vbd.text("userdevice"))?) } else { String::new() };
    change.drop_note(note_of(vbd));
    change.set("VBD", reference, "VDI", Value::string(NULL_REF))?;
    change.set("VBD", reference, "empty", true)?;
    change.set("VBD", reference, "currently_attached", is_plugged)?;
    change.set("VBD", reference, "device", Value::string(device))?;
    refresh(change, "VBD", reference)
}

fn insert(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, vdi) = (args.text(0)?, args.text(1)?);
    let (running, (vbd, medium)) = Running::begin(call, "VBD", reference, "insert", |change, vbd| {
        refuse_fixed(vbd)?;
        if !vbd.bool("empty") {
            return Err(ApiError::new("VBD_NOT_EMPTY", [&vbd.reference]));
        }
        let medium = check_vdi(change, vdi, true)?;
        if vbd.bool("currently_attached") {
            change.put_note(note_of(vbd), "");
        }
        change.set("VBD", reference, "VDI", Value::string(vdi))?;
        change.set("VBD", reference, "empty", false)?;
        refresh(change, "VBD", reference)?;
        Ok((change.get("VBD", &vbd.reference)?, medium))
    })?;
    if !vbd.bool("currently_attached") {
        return Ok(Value::Void);
    }
    step("vbd-insert:noted");
    let put = put_in(call, &vbd, medium, running.claim());
    step("vbd-insert:plugged");
    call.part.db.change(|change| match put {
        Ok(()) => {
            change.drop_note(note_of(&vbd));
            Ok(())
        }
        Err(_) => set_empty(change, &vbd, true),
    })?;
    put.map(|()| Value::Void)
}

fn eject(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let (running, (vm, vbd)) = Running::begin(call, "VBD", reference, "eject", |change, vbd| {
        refuse_fixed(vbd)?;
        if vbd.bool("empty") {
            return Err(ApiError::new("VBD_IS_EMPTY", [&vbd.reference]));
        }
        if vbd.bool("currently_attached") {
            change.put_note(note_of(vbd), "");
        }
        Ok((change.get("VM", vbd.text("VM"))?, change.get("VBD", &vbd.reference)?))
    })?;
    let is_plugged = vbd.bool("currently_attached");
    if is_plugged && is_live(&vm) {
        step("vbd-eject:noted");
        let timeout = lookup::seconds(&[&vbd, &vm], "unplug-timeout", EJECT_SECONDS);
        lookup::apply_limits(call);
        let vdi = call.part.db.get("VDI", vbd.text("VDI"))?;
        let disk = Disk::claimed(call, &vbd, vdi, running.claim())?;
        let plan = disk.unplug(false, Timeout::Until(Instant::now() + timeout));
        if let Err(error) = call.part.plans.run("VBD.eject", plan, &call.progress) {
            call.part.db.change(|change| {
                change.drop_note(note_of(&vbd));
                Ok(())
            })?;
            return Err(error);
        }
        step("vbd-eject:ejected");
    }
    call.part.db.change(|change| set_empty(change, &vbd, is_plugged))?;
    Ok(Value::Void)
}

/// Media that were on their way when a daemon ended: those whose disk is plugged are in their drive, the others are
/// not. The disks have been recovered before.
///
/// # Errors
/// The store's.
pub fn recover(vms: &Vms) -> Result<(), ApiError> {
    for (key, _) in vms.db.notes(NOTES) {
        vms.db.change(|change| {
            change.drop_note(&key);
            let Ok(vbd) = change.get("VBD", key.trim_start_matches(NOTES)) else { return Ok(()) };
            let note = vms.disks.of_vbd(vbd.uuid()?);
            let is_in =
                vbd.bool("currently_attached") && note.is_some_and(|note| note.phase == Phase::Running);
            if is_in {
                return Ok(());
            }
            let vm = change.get("VM", vbd.text("VM"))?;
            set_empty(change, &vbd, is_live(&vm))
        })?;
    }
    Ok(())
}
