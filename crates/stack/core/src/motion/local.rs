//! A VM that stays on its host: disks of it change their SR, also while it runs.

use std::collections::BTreeMap;

use tapio_model::ApiError;

use super::Call;
use super::check::{OP, Wish, disks_of};
use crate::storage::relocate::{Wish as Move, relocate, with_snapshots};
use crate::vms::running::Running;

/// The VDIs of each pair of SRs.
pub(super) type Moves = BTreeMap<(String, String), Vec<String>>;

/// What moves.
///
/// # Errors
/// `OPERATION_NOT_ALLOWED`, `VDI_NOT_IN_MAP`, `VM_IS_SNAPSHOT`, `HANDLE_INVALID`.
pub(super) fn check(call: &Call, wish: &Wish) -> Result<Moves, ApiError> {
    wish.stays_in_pool()?;
    let db = &call.part.db;
    let vm = &wish.vm;
    if vm.bool("is_control_domain") {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the host itself stays"]));
    }
    if vm.bool("is_a_snapshot") {
        return Err(ApiError::new("VM_IS_SNAPSHOT", [vm.reference.as_str(), OP]));
    }
    let mut all = disks_of(db, &vm.reference);
    if !vm.is_null("suspend_VDI") && wish.sr_of(vm.text("suspend_VDI")).is_some() {
        all.push(vm.text("suspend_VDI").to_owned());
    }
    let mut pairs = Vec::new();
    for vdi in all {
        let to = wish.sr_of(&vdi).ok_or_else(|| ApiError::new("VDI_NOT_IN_MAP", [vdi.as_str()]))?;
        pairs.push((vdi.clone(), to.to_owned()));
    }
    moves_of(call, pairs)
}

/// VDIs with the SRs that they go to, as pairs of SRs; with each go its snapshots.
///
/// # Errors
/// `HANDLE_INVALID`.
pub(super) fn moves_of(
    call: &Call,
    pairs: impl IntoIterator<Item = (String, String)>,
) -> Result<Moves, ApiError> {
    let (db, storage) = (&call.part.db, call.to(&call.part.storage));
    let mut moves = Moves::new();
    for (vdi, to) in pairs {
        db.get("SR", &to)?;
        let from = db.get("VDI", &vdi)?.text("SR").to_owned();
        if from != to {
            let group = moves.entry((from, to)).or_default();
            for vdi in with_snapshots(&storage, &vdi)? {
                if !group.contains(&vdi) {
                    group.push(vdi);
                }
            }
        }
    }
    Ok(moves)
}

/// Moves the disks; the VM is the same.
///
/// # Errors
/// As [`check`], and those of `VDI.pool_migrate`: disks that were moved before stay where they are then.
pub(super) fn move_disks(call: &Call, wish: &Wish) -> Result<String, ApiError> {
    let vms = call.to(&call.part.vms);
    let (_running, ()) = Running::begin(&vms, "VM", &wish.vm.reference, OP, |_, _| Ok(()))?;
    let moves = check(call, wish)?;
    move_all(call, &moves)?;
    Ok(wish.vm.reference.clone())
}

/// Moves the VDIs of a VM that is held.
///
/// # Errors
/// Those of `VDI.pool_migrate`: disks that were moved before stay where they are then.
pub(super) fn move_all(call: &Call, moves: &Moves) -> Result<(), ApiError> {
    let storage = call.to(&call.part.storage);
    let count = moves.len().max(1) as f64;
    for (at, ((_, to), vdis)) in moves.iter().enumerate() {
        let part = (at as f64 / count, (at + 1) as f64 / count);
        relocate(&storage, vdis, &Move { to, shape: None, part })?;
    }
    Ok(())
}
