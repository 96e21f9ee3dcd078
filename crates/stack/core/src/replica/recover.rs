//! VMs are brought back from an opened database. The call comes in the session of that, and names the session of the
//! pool that the VMs come to.

use std::collections::BTreeSet;
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Role, Value};

use super::Replicas;
use crate::call::{Args, Call, HandlersOf};
use crate::db::{Change, Db, Object};
use crate::roles;
use crate::vms::{Vms, archive};

pub(super) fn register(handlers: &mut HandlersOf<'_, Replicas>) {
    handlers.on("VM.recover", |call, args| {
        let (view, to) = sides(call, args, "VM.recover")?;
        let vm = alone(&view, args.text(0)?)?;
        check(&view, &to.part, std::slice::from_ref(&vm))?;
        archive::recover(&to, &view, &[vm], args.bool(2)?, &|_, _| Ok(())).map(|_| Value::Void)
    });
    handlers.on("VM.assert_can_be_recovered", |call, args| {
        let (view, to) = sides(call, args, "VM.assert_can_be_recovered")?;
        check(&view, &to.part, &[alone(&view, args.text(0)?)?]).map(|()| Value::Void)
    });
    handlers.on("VM.get_SRs_required_for_recovery", |call, args| {
        let (view, _) = sides(call, args, "VM.get_SRs_required_for_recovery")?;
        Ok(Value::strings(required(&view, &[view.get("VM", args.text(0)?)?])))
    });
    handlers.on("VM_appliance.recover", |call, args| {
        let (view, to) = sides(call, args, "VM_appliance.recover")?;
        let (appliance, vms) = group(&view, args.text(0)?)?;
        check(&view, &to.part, &vms)?;
        if vms.is_empty() {
            to.part.db().change(|change| put_appliance(change, &appliance, &[]))?;
            return Ok(Value::Void);
        }
        let then = |change: &mut Change<'_>, made: &[String]| put_appliance(change, &appliance, made);
        archive::recover(&to, &view, &vms, args.bool(2)?, &then).map(|_| Value::Void)
    });
    handlers.on("VM_appliance.assert_can_be_recovered", |call, args| {
        let (view, to) = sides(call, args, "VM_appliance.assert_can_be_recovered")?;
        let (_, vms) = group(&view, args.text(0)?)?;
        check(&view, &to.part, &vms).map(|()| Value::Void)
    });
    handlers.on("VM_appliance.get_SRs_required_for_recovery", |call, args| {
        let (view, _) = sides(call, args, "VM_appliance.get_SRs_required_for_recovery")?;
        let (_, vms) = group(&view, args.text(0)?)?;
        Ok(Value::strings(required(&view, &vms)))
    });
}

/// The database that was opened, and a call in the session that the second parameter names.
fn sides(call: &Call<Replicas>, args: &Args, message: &str) -> Result<(Arc<Db>, Call<Vms>), ApiError> {
    let sessions = &call.part.sessions;
    let view = sessions.peek(&call.caller.session).and_then(|session| session.view().cloned());
    let view = view.ok_or_else(|| {
        let why = "this session is of no database that was opened: call it in a session of VDI.open_database";
        ApiError::new("OPERATION_NOT_ALLOWED", [why])
    })?;
    let to = args.text(1)?;
    let session = sessions.enter(to)?;
    session.admit(sessions.review())?;
    if session.view().is_some() || session.is_plugins() || session.motion().is_some() {
        return Err(ApiError::new("SESSION_INVALID", [to]));
    }
    let caller = session.caller();
    roles::check(&caller, Role::VmAdmin, message)?;
    let part = Arc::clone(&call.part.vms);
    Ok((view, Call { part, caller, progress: Arc::clone(&call.progress) }))
}

/// A VM that is in no appliance.
fn alone(view: &Db, vm: &str) -> Result<Arc<Object>, ApiError> {
    let vm = view.get("VM", vm)?;
    let appliance = vm.text("appliance");
    if view.get("VM_appliance", appliance).is_ok() {
        return Err(ApiError::new("VM_IS_PART_OF_AN_APPLIANCE", [vm.reference.as_str(), appliance]));
    }
    Ok(vm)
}

fn group(view: &Db, appliance: &str) -> Result<(Arc<Object>, Vec<Arc<Object>>), ApiError> {
    let appliance = view.get("VM_appliance", appliance)?;
    let vms = view.find("VM", "appliance", &appliance.reference);
    Ok((appliance, vms))
}

/// SRs of the disks of VMs, and of the memory of those that are suspended.
fn required(view: &Db, vms: &[Arc<Object>]) -> BTreeSet<String> {
    let mut srs = BTreeSet::new();
    for vm in vms {
        let disks = view.find("VBD", "VM", &vm.reference).into_iter().filter(|vbd| vbd.text("type") != "CD");
        let mut vdis: Vec<String> = disks.map(|vbd| vbd.text("VDI").to_owned()).collect();
        if vm.text("power_state") == "Suspended" {
            vdis.push(vm.text("suspend_VDI").to_owned());
        }
        srs.extend(vdis.iter().filter_map(|vdi| Some(view.get("VDI", vdi).ok()?.text("SR").to_owned())));
    }
    srs
}

/// The SRs of VMs are attached here.
fn check(view: &Db, vms: &Vms, wanted: &[Arc<Object>]) -> Result<(), ApiError> {
    let db = vms.db();
    for vm in wanted {
        for sr in required(view, std::slice::from_ref(vm)) {
            let uuid = view.get("SR", &sr)?.text("uuid").to_owned();
            let here = db.by_uuid("SR", &uuid);
            let is_attached = |sr: &Arc<Object>| {
                db.find("PBD", "SR", &sr.reference).iter().any(|pbd| pbd.bool("currently_attached"))
            };
            if !here.is_ok_and(|sr| is_attached(&sr)) {
                return Err(ApiError::new("VM_REQUIRES_SR", [vm.reference.as_str(), &sr]));
            }
        }
    }
    Ok(())
}

/// The appliance with its UUID, made where there is none, and these VMs in it.
fn put_appliance(change: &mut Change<'_>, then: &Object, vms: &[String]) -> Result<(), ApiError> {
    let uuid = then.text("uuid");
    let here = match change.by_uuid("VM_appliance", uuid) {
        Ok(here) => here.reference.clone(),
        Err(_) => {
            let fields =
                ["uuid", "name_label", "name_description"].map(|field| (field, then.get(field).clone()));
            change.create("VM_appliance", &fields)?
        }
    };
    debug_assert_ne!(here, NULL_REF);
    vms.iter().try_for_each(|vm| change.set("VM", vm, "appliance", here.as_str()))
}
