//! `allowed_operations` and `current_operations` of SRs and VDIs.

use tapio_model::{ApiError, Value};
use tapio_types::Access;

use super::attached::Attached;
use super::state::StorageState;
use super::{Storage, tracking};
use crate::db::{Change, Object};

/// Operations of an attached SR, with the capability each needs.
const OF_ATTACHED_SR: &[(&str, &str)] = &[
    ("scan", ""),
    ("update", ""),
    ("unplug", ""),
    ("destroy", ""),
    ("pbd_create", ""),
    ("vdi_create", "VDI_CREATE"),
    ("vdi_introduce", ""),
    ("vdi_destroy", "VDI_DELETE"),
    ("vdi_resize", "VDI_RESIZE"),
    ("vdi_clone", "VDI_CLONE"),
    ("vdi_snapshot", "VDI_SNAPSHOT"),
    ("vdi_enable_cbt", "VDI_CONFIG_CBT"),
    ("vdi_disable_cbt", "VDI_CONFIG_CBT"),
    ("vdi_data_destroy", "VDI_CONFIG_CBT"),
    ("vdi_list_changed_blocks", "VDI_CONFIG_CBT"),
    ("vdi_set_on_boot", "VDI_RESET_ON_BOOT"),
];

/// Operations of an SR that is not attached.
const OF_DETACHED_SR: &[&str] = &["plug", "forget", "pbd_create", "pbd_destroy"];

/// Makes the two fields true for an SR or a VDI; an object that is gone is left alone.
///
/// # Errors
/// The database's.
pub(super) fn refresh(
    storage: &Storage,
    change: &mut Change<'_>,
    class: &'static str,
    reference: &str,
) -> Result<(), ApiError> {
    let Ok(object) = change.get(class, reference) else { return Ok(()) };
    let mut words = match class {
        "SR" => of_sr(&storage.state(), &object),
        _ => of_vdi(&storage.state(), &object),
    };
    words.retain(|word| storage.operations.could_begin(class, reference, word));
    let allowed = Value::strings(words);
    if object.get("allowed_operations") != &allowed {
        change.set(class, reference, "allowed_operations", allowed)?;
    }
    storage.operations.show(change, class, reference)
}

/// [`refresh`] of an SR and of all its VDIs.
///
/// # Errors
/// The database's.
pub(super) fn refresh_all(storage: &Storage, change: &mut Change<'_>, sr: &str) -> Result<(), ApiError> {
    refresh(storage, change, "SR", sr)?;
    for vdi in change.find("VDI", "SR", sr) {
        refresh(storage, change, "VDI", &vdi.reference)?;
    }
    Ok(())
}

fn of_sr(state: &StorageState, sr: &Object) -> Vec<&'static str> {
    match state.attached.get(&sr.reference) {
        Some(attached) => {
            let can = |needs: &str| needs.is_empty() || attached.can(needs);
            OF_ATTACHED_SR.iter().filter(|(_, needs)| can(needs)).map(|(word, _)| *word).collect()
        }
        None => OF_DETACHED_SR.to_vec(),
    }
}

fn of_vdi(state: &StorageState, vdi: &Object) -> Vec<&'static str> {
    let Some(attached) = state.attached.get(vdi.text("SR")) else { return vec!["forget"] };
    if !vdi.bool("managed") {
        return vec!["update"];
    }
    let in_use = state.use_of(&vdi.reference);
    let is_there = !vdi.bool("missing");
    let tracks = is_there && attached.can("VDI_CONFIG_CBT");
    let can_list = tracks && vdi.bool("cbt_enabled");
    if tracking::has_data(vdi).is_err() {
        let words = [("destroy", attached.can("VDI_DELETE")), ("list_changed_blocks", can_list)];
        let words = words.into_iter().filter(|(_, is_possible)| *is_possible).map(|(word, _)| word);
        return words.chain(["forget", "update"]).collect();
    }
    let is_trackable = tracks && tracking::is_trackable(vdi).is_ok();
    let can_resize = can_resize(attached, in_use).is_ok();
    let can_fork = is_there && !state.is_shared_by_a_writer(&vdi.reference);
    let words = [
        ("clone", can_fork && attached.can("VDI_CLONE")),
        ("copy", is_there && in_use != Some(Access::ReadWrite)),
        ("resize", is_there && can_resize),
        ("resize_online", is_there && can_resize && attached.can("VDI_RESIZE_ONLINE")),
        ("snapshot", can_fork && attached.can("VDI_SNAPSHOT")),
        ("destroy", in_use.is_none() && attached.can("VDI_DELETE")),
        ("forget", in_use.is_none()),
        ("update", true),
        ("generate_config", is_there && attached.origin.is_none() && attached.can("VDI_GENERATE_CONFIG")),
        ("enable_cbt", is_trackable),
        ("disable_cbt", is_trackable),
        ("data_destroy", tracks && in_use.is_none() && tracking::is_reducible(vdi).is_ok()),
        ("list_changed_blocks", can_list),
        ("set_on_boot", in_use.is_none() && attached.can("VDI_RESET_ON_BOOT")),
    ];
    words.into_iter().filter(|(_, is_possible)| *is_possible).map(|(word, _)| word).collect()
}

/// Why a VDI that is used so cannot be resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoResize {
    /// The driver cannot.
    Unsupported,
    /// Not while it is used so.
    InUse,
}

/// Whether a VDI can be resized while it is used so: readers would not hear of it, a writer does where the driver can.
///
/// # Errors
/// Why not.
pub(super) fn can_resize(attached: &Attached, in_use: Option<Access>) -> Result<(), NoResize> {
    match in_use {
        _ if !attached.can("VDI_RESIZE") => Err(NoResize::Unsupported),
        None => Ok(()),
        Some(Access::ReadWrite) if attached.can("VDI_RESIZE_ONLINE") => Ok(()),
        Some(_) => Err(NoResize::InUse),
    }
}
