//! SRs are attached to this host and taken away.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_sm::{SrDriver, lease};
use uuid::Uuid;

use super::attached::Attached;
use super::notes::{self, Note};
use super::records::Alert;
use super::transaction::Transaction;
use super::work::{Names, Work};
use super::{Call, allowed, drivers, half_done, hot_plug, queues, reconcile, this_host};
use crate::operations::on_sr;
use crate::plan::steps::step;

/// Attaches an SR and remembers it.
///
/// # Errors
/// The driver's.
pub(super) fn attach(
    call: &Call,
    driver: &Arc<dyn SrDriver>,
    uuid: Uuid,
    reference: &str,
    config: &BTreeMap<String, String>,
) -> Result<Arc<Attached>, ApiError> {
    let mut config = drivers::given(&call.part.db, &**driver, config)?;
    if driver.origin().is_none() {
        among_hosts(call, reference, &mut config);
    }
    let names = Names { sr: reference, vdi: "", op: "plug" };
    let device = driver.attach(&Work::new(call), uuid, &config);
    let device = device.map_err(|error| names.translate(call, error))?;
    let attached = Arc::new(Attached::new(uuid, reference.to_owned(), &**driver, device));
    // Whether images of a move that was broken off become VDIs is found when both of its SRs are there.
    for note in notes::all(&call.part.db) {
        if let Note::Move(moving) = note
            && moving.to == reference
        {
            attached.keep_out(&moving.images);
        }
    }
    call.part.state().attached.insert(reference.to_owned(), Arc::clone(&attached));
    Ok(attached)
}

/// Tells a driver what this host is called among those that share the SR, and whether any do.
fn among_hosts(call: &Call, sr: &str, config: &mut BTreeMap<String, String>) {
    let db = &call.part.db;
    if let Ok(host) = db.get("host", &this_host(db)) {
        config.insert(lease::HOST.into(), format!("{} {}", host.text("uuid"), host.text("name_label")));
    }
    if db.get("SR", sr).is_ok_and(|sr| sr.bool("shared")) {
        config.insert(lease::SHARED.into(), "true".into());
    }
}

/// Takes an SR away that [`attach`] attached. It stays attached where that fails.
///
/// # Errors
/// The driver's.
pub(super) fn detach(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let names = Names { sr: &attached.reference, vdi: "", op: "unplug" };
    let ended = attached.end(|device| device.detach(&Work::new(call)));
    ended.map_err(|error| names.translate(call, error))?;
    call.part.state().attached.remove(&attached.reference);
    queues::restore(call, attached);
    Ok(())
}

/// Brings the records of a newly attached SR up to date, and sets the queues of its devices; that this fails does not
/// make it less attached.
pub(super) fn first_scan(call: &Call, attached: &Arc<Attached>) {
    if let Err(error) = reconcile::scan(call, attached) {
        let about = attached.uuid.to_string();
        let body = format!("SR {about} is attached, and what lies there could not be listed: {error}");
        Alert { name: "POST_ATTACH_SCAN_FAILED", priority: 2, class: "SR", about: &about }
            .post(&call.part.db, &body);
    }
    queues::apply(call, attached);
    hot_plug::watch(call, attached);
}

/// `PBD.plug`. Nothing happens where it is plugged already.
///
/// # Errors
/// `SR_UNKNOWN_DRIVER`, `HOST_OFFLINE`, `OTHER_OPERATION_IN_PROGRESS`, the driver's.
pub(super) fn plug(call: &Call, reference: &str) -> Result<(), ApiError> {
    let (db, storage) = (&call.part.db, &call.part);
    let pbd = db.get("PBD", reference)?;
    let host = pbd.text("host");
    if host != this_host(db) {
        return Err(ApiError::new("HOST_OFFLINE", [host]));
    }
    let sr = db.get("SR", pbd.text("SR"))?;
    if pbd.bool("currently_attached") && storage.state().attached.contains_key(&sr.reference) {
        return Ok(());
    }
    let driver = storage.driver(sr.text("type"))?;
    let operation = Transaction::enter(call, &[on_sr(&sr.reference, "plug")], |state| {
        let taken = state.attached.contains_key(&sr.reference);
        let params = || [sr.reference.as_str(), host, reference];
        if taken { Err(ApiError::new("PBD_EXISTS", params())) } else { Ok(()) }
    })?;
    let note = Note::PbdPlug { pbd: reference.to_owned() };
    operation.note(Some(&note), Some("pbd-plug:noted"))?;
    let attached = match attach(call, &driver, sr.uuid()?, &sr.reference, &pbd.map("device_config")) {
        Ok(attached) => attached,
        Err(error) => {
            operation.give_up(Some(&note));
            return Err(error);
        }
    };
    step("pbd-plug:attached");
    half_done::images(call, &attached);
    first_scan(call, &attached);
    let recorded = operation.commit(Some(&note), |change| {
        change.set("PBD", reference, "currently_attached", true)?;
        Note::PbdWanted { pbd: reference.to_owned() }.drop_from(change);
        allowed::refresh_all(storage, change, &sr.reference)
    });
    storage.collect_later(&sr.reference);
    recorded.inspect_err(|_| {
        if let Err(error) = detach(call, &attached) {
            tracing::warn!(sr = %attached.uuid, %error, "it stays mounted until the next start");
        }
    })
}

/// `PBD.unplug`. Nothing happens where it is not plugged.
///
/// # Errors
/// `VDI_IN_USE`, `OTHER_OPERATION_IN_PROGRESS`, the driver's.
pub(super) fn unplug(call: &Call, reference: &str) -> Result<(), ApiError> {
    let (db, storage) = (&call.part.db, &call.part);
    let pbd = db.get("PBD", reference)?;
    let sr = pbd.text("SR").to_owned();
    if pbd.text("host") != this_host(db) {
        return if pbd.bool("currently_attached") {
            Err(ApiError::new("HOST_OFFLINE", [pbd.text("host")]))
        } else {
            Ok(())
        };
    }
    let disks = db.find("VDI", "SR", &sr);
    let _no_collection = storage.hold_off(&sr);
    let operation = Transaction::enter(call, &[on_sr(&sr, "unplug")], |state| {
        match disks.iter().find(|vdi| state.use_of(&vdi.reference).is_some()) {
            Some(vdi) => Err(ApiError::new("VDI_IN_USE", [vdi.reference.as_str(), "unplug"])),
            None => Ok(()),
        }
    })?;
    let found = storage.state().attached.get(&sr).cloned();
    let note = Note::PbdUnplug { pbd: reference.to_owned() };
    if found.is_some() && pbd.bool("currently_attached") {
        operation.note(Some(&note), Some("pbd-unplug:noted"))?;
    }
    if let Some(attached) = found.filter(|_| pbd.bool("currently_attached")) {
        if let Err(error) = detach(call, &attached) {
            // It stays plugged: what hangs is attached by another process as soon as the storage answers.
            operation.give_up(Some(&note));
            return Err(error);
        }
        step("pbd-unplug:detached");
    }
    operation.commit(Some(&note), |change| {
        if pbd.bool("currently_attached") {
            change.set("PBD", reference, "currently_attached", false)?;
        }
        Note::PbdWanted { pbd: reference.to_owned() }.drop_from(change);
        allowed::refresh_all(storage, change, &sr)
    })
}

/// Fields of a new PBD.
pub(super) fn pbd_fields(
    host: &str,
    sr: &str,
    device_config: std::collections::BTreeMap<String, String>,
    is_attached: bool,
) -> Vec<(&'static str, Value)> {
    vec![
        ("host", Value::string(host)),
        ("SR", Value::string(sr)),
        ("device_config", Value::string_map(device_config)),
        ("currently_attached", Value::Bool(is_attached)),
    ]
}
