//! A guest that goes to another host of the pool, here: its memory is sent, its disks are given up, and one change of
//! its record makes it the other host's.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_model::ApiError;
use tapio_vm::VmState;

use super::arrival::{DiskLooks, Looks, disks_of, each, moved_to};
use super::plug::written;
use super::{Call, lookup, power};
use crate::basics::this_host;
use crate::db::{Change, Object};
use crate::storage::outgoing::leaves;
use crate::storage::relocate::becomes;

/// What the other host must know.
///
/// # Errors
/// The driver's; a disk has no process.
pub(crate) fn looks(call: &Call, vm: &Object) -> Result<Looks, ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    let platform = driver.made_as(vm.uuid()?)?;
    let vifs = driver.vifs(vm.uuid()?)?.into_iter().map(|(place, vif)| (place, vif.tap.is_some())).collect();
    let mut disks = BTreeMap::new();
    for disk in disks_of(call, vm)? {
        let uuid = disk.vbd();
        let known = call.part.disks.of_vbd(uuid);
        let known = known.ok_or_else(|| ApiError::internal(format!("VBD {uuid} has no disk process")))?;
        disks.insert(uuid, DiskLooks { len: known.size, sector_size: known.tuning.sector_size });
    }
    Ok(Looks { platform, disks, vifs })
}

/// Sends the memory into a socket. The guest is stopped then.
///
/// # Errors
/// The driver's, `TASK_CANCELLED`: the guest may be stopped all the same.
pub(crate) fn send(call: &Call, vm: &Object, to: OwnedFd) -> Result<(), ApiError> {
    let progress = &call.progress;
    let is_cancelled = || progress.is_cancelled();
    lookup::driver(&call.part, vm)?.migrate(vm.uuid()?, to, &is_cancelled, &|sent| progress.set(sent * 0.9))
}

/// Closes the disks that the guest writes, which has stopped, and gives them up.
///
/// # Errors
/// One of them does not end: [`go_on`] brings all back.
pub(crate) fn give_up_disks(call: &Call, vm: &Object) -> Result<(), ApiError> {
    each(&written(&disks_of(call, vm)?), |disk| disk.give_up())
}

/// The VM is another host's from now on, and each of these VDIs the other one beside it. This is the one change that
/// decides.
///
/// # Errors
/// The VM is not this host's any more; the store's: then it is not known before the next change is durable.
pub(crate) fn decide(
    call: &Call,
    vm: &Object,
    host: &str,
    note: &str,
    becoming: &[(String, String)],
) -> Result<(), ApiError> {
    let own = this_host(&call.part.db);
    call.part.db.change(|change: &mut Change<'_>| {
        let now = change.get("VM", &vm.reference)?;
        if super::arrival::place(&now) != ("Running", own.as_str()) {
            return Err(super::allowed::bad_power_state(&now, "Running"));
        }
        for (vdi, new) in becoming {
            becomes(change, vdi, new)?;
            leaves(change, &*change.get("VDI", vdi)?)?;
        }
        change.drop_note(note);
        moved_to(change, &now, host)
    })
}

/// The guest stays: its disks are brought back as far as they are away, and it goes on.
///
/// # Errors
/// A disk does not come back, also because the other host has it open still; the driver's.
pub(crate) fn go_on(call: &Call, vm: &Arc<Object>, note: &str) -> Result<(), ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    if driver.state(vm.uuid()?)? != VmState::Halted {
        lookup::apply_limits(call);
        let away: Vec<_> = disks_of(call, vm)?.into_iter().filter(|disk| !disk.is_served()).collect();
        // Each by itself: one that does not come back yet undoes no other.
        each(&away, |disk| disk.come_back())?;
        driver.unpause(vm.uuid()?)?;
    }
    call.part.db.change(|change| {
        change.drop_note(note);
        Ok(())
    })
}

/// What is left of a guest here that is another host's.
///
/// # Errors
/// The emulator does not end, a disk does not close.
pub(crate) fn leave(call: &Call, vm: &Object) -> Result<(), ApiError> {
    super::arrival::remove(call, vm)
}

/// Ends what there is of a VM of which the record says that it runs here, and whose guest is gone.
///
/// # Errors
/// The emulator does not end; the store's.
pub(crate) fn has_crashed(call: &Call, vm: &Arc<Object>) -> Result<(), ApiError> {
    let driver = lookup::driver(&call.part, vm)?;
    lookup::tell(&call.part, "VM_CRASHED", vm, "The VM was not running when the toolstack was started.");
    power::clear(call, vm, &driver, "finish shutdown")
}
