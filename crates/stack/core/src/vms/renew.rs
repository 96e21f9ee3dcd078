//! A guest gets a new emulator: its VM is suspended and goes on at once, on the same host.
//!
//! Both are what they are by themselves, with a note around them: a daemon that finds the note lets a VM go on that is
//! suspended. A kill leaves the VM running or suspended with its memory, as one in a suspend or a resume does.

use std::sync::Arc;

use tapio_model::{ApiError, Value};

use super::running::Running;
use super::{Call, Handlers, Vms, power, suspend};
use crate::db::{Change, Object};
use crate::plan::steps::step;

/// Notes of a VM that is suspended to go on.
const RENEWED: &str = "renew";

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.restart_device_models", |call, args| renew(call, args.text(0)?).map(|()| Value::Void));
}

fn renew(call: &Call, reference: &str) -> Result<(), ApiError> {
    let begin = |change: &mut Change<'_>, vm: &Object| {
        // It would not go on here.
        power::assert_enabled(change, call)?;
        let vm = suspend::about_to_stop(call, change, vm)?;
        change.put_note(power::note_key(RENEWED, &vm), &vm.reference);
        Ok(vm)
    };
    let (_running, vm) = Running::begin(call, "VM", reference, "suspend", begin)?;
    step("vm-renew:noted");
    let renewed = suspend::put_to_rest(call, &vm).and_then(|()| {
        step("vm-renew:suspended");
        go_on(call, &vm)
    });
    drop_note(call, &vm);
    renewed
}

fn go_on(call: &Call, vm: &Object) -> Result<(), ApiError> {
    let published = power::numbers_below(&call.part);
    let vm = call.part.db.change(|change| {
        let vm = change.get("VM", &vm.reference)?;
        suspend::about_to_go_on(call, change, &vm, published)
    })?;
    suspend::wake(call, &vm, false)
}

/// What comes of it is known to the client, or to the log.
fn drop_note(call: &Call, vm: &Object) {
    forget(&call.part, power::note_key(RENEWED, vm), vm.text("uuid"));
}

fn forget(vms: &Vms, key: String, vm: &str) {
    let dropped = vms.db.change(|change| {
        change.drop_note(key);
        Ok(())
    });
    if let Err(error) = dropped {
        tracing::warn!(vm, %error, "the next start lets this VM go on if it is suspended then");
    }
}

/// Waits for the SRs of all that a VM needs to go on.
fn wait_for_storage(vms: &Vms, vm: &Object) {
    let vbds = vms.db.find("VBD", "VM", &vm.reference);
    let vdis = vbds.iter().map(|vbd| vbd.text("VDI")).chain([vm.text("suspend_VDI")]);
    for vdi in vdis.filter_map(|vdi| vms.db.get("VDI", vdi).ok()) {
        vms.storage.wait_until_recovered(vdi.text("SR"));
    }
}

/// Lets VMs go on that a daemon had suspended for this, each in a thread of its own: memory takes its time. What is
/// left of their suspends and resumes is in order.
pub(super) fn recover(vms: &Arc<Vms>) {
    for (key, reference) in vms.db.notes(&format!("machines/{RENEWED}/")) {
        let Ok(vm) = vms.db.get("VM", &reference) else {
            forget(vms, key, &reference);
            continue;
        };
        let own = Arc::clone(vms);
        let going_on = move || {
            let call = Call::own(&own);
            if vm.text("power_state") == "Suspended" {
                wait_for_storage(&own, &vm);
                match suspend::resume(&call, &vm.reference, false) {
                    Ok(_) => {
                        tracing::info!(vm = vm.text("uuid"), "a VM that was to get a new emulator goes on");
                    }
                    Err(error) => {
                        tracing::warn!(vm = vm.text("uuid"), %error, "a VM that was to get a new emulator is suspended");
                    }
                }
            }
            drop_note(&call, &vm);
        };
        if let Err(error) = std::thread::Builder::new().name("vm-renew".to_owned()).spawn(going_on) {
            tracing::error!(%error, "a VM that was to get a new emulator waits for the next start");
        }
    }
}
