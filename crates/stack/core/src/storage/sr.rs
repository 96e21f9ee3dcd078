//! SRs are made, taken in, forgotten and destroyed.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::worker::is_unfinished;
use tapio_sm::{DriverInfo, Origin};
use uuid::Uuid;

use super::attached::Attached;
use super::notes::{NewSr, Note};
use super::retry::{self, Job};
use super::transaction::Transaction;
use super::work::{Names, Work};
use super::{Call, Handlers, allowed, drivers, pbd, plug, queues, reconcile, records, scan, this_host};
use crate::args::Args;
use crate::db::{Change, reference_of};
use crate::operations::on_sr;
use crate::plan::steps::step;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.create", create);
    handlers.on("SR.make", make);
    handlers.on("SR.introduce", introduce);
    handlers.on("SR.forget", forget);
    handlers.on("SR.destroy", destroy);
    handlers.on("SR.scan", scan_sr);
    handlers.on("SR.update", update);
}

/// The host must be this one.
///
/// # Errors
/// `HANDLE_INVALID`, `HOST_OFFLINE`.
pub(super) fn check_host(call: &Call, host: &str) -> Result<(), ApiError> {
    call.part.db.get("host", host)?;
    if host == this_host(&call.part.db) { Ok(()) } else { Err(ApiError::new("HOST_OFFLINE", [host])) }
}

fn size(args: &Args, at: usize) -> Result<u64, ApiError> {
    let size = args.int(at)?;
    u64::try_from(size)
        .map_err(|_| ApiError::new("INVALID_VALUE", ["physical_size".to_owned(), size.to_string()]))
}

fn create(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (db, storage) = (&call.part.db, &call.part);
    let host = args.text(0)?;
    check_host(call, host)?;
    let (mut config, bytes) = (args.map(1)?, size(args, 2)?);
    let driver = storage.driver(args.text(5)?)?;
    take_allocation(driver.info(), &mut config, &args.map(8)?);
    let shared = args.bool(7)?;
    if shared && !driver.info().is_shareable {
        let why = format!("an SR of type {} belongs to one host", driver.info().sr_type);
        return Err(ApiError::new("VALUE_NOT_SUPPORTED", ["shared", "true", why.as_str()]));
    }
    let uuid = Uuid::new_v4();
    let reference = reference_of(uuid);
    let operation = Transaction::enter(call, &[on_sr(&reference, "plug")], |_| Ok(()))?;
    let mut new = NewSr {
        uuid,
        host: host.to_owned(),
        name_label: args.text(3)?.to_owned(),
        name_description: args.text(4)?.to_owned(),
        kind: driver.info().sr_type.to_owned(),
        content_type: args.text(6)?.to_owned(),
        shared,
        device_config: BTreeMap::new(),
        sm_config: args.map(8)?,
        physical_size: i64::try_from(bytes).unwrap_or(i64::MAX),
    };
    let keeps_records = driver.origin().is_some_and(Origin::calls_api);
    let made = |change: &mut Change<'_>| {
        new.device_config = drivers::without_passwords(change, &config)?;
        if keeps_records {
            record_early(change, &new)?;
        }
        Ok(Note::SrCreate(new.clone()))
    };
    operation.note_made(made, "sr-create:noted")?;
    let names = Names { sr: &reference, vdi: "", op: "create" };
    let made = drivers::given(db, &*driver, &new.device_config).and_then(|config| {
        let (name_label, name_description) = (new.name_label.clone(), new.name_description.clone());
        let asked = tapio_sm::NewSr { config, size: bytes, name_label, name_description };
        if let Some(wanted) = driver.make(&Work::part(call, 0.0, 0.8), uuid, &asked)? {
            new.device_config = drivers::amended(&new.device_config, wanted);
            db.change(|change| Note::SrCreate(new.clone()).put(change))?;
        }
        step("sr-create:made");
        plug::attach(call, &driver, uuid, &reference, &among(&new))
    });
    let note = Note::SrCreate(new.clone());
    let attached = match made {
        Ok(attached) => attached,
        // It is not known how far the storage came: it is finished or undone once that answers, as after a kill.
        Err(error) if is_unfinished(&error) => {
            operation.give_up(None);
            retry::later(call, &reference, create_job(new));
            return Err(names.translate(call, error));
        }
        Err(error) => {
            operation.give_up(Some(&note));
            if let Err(error) = db.change(|change| forget_new(change, &new)) {
                tracing::warn!(%error, "secrets of an SR that was not made stay");
            }
            return Err(names.translate(call, error));
        }
    };
    step("sr-create:attached");
    record_new(&operation, &note, &new, &attached, call)?;
    plug::first_scan(call, &attached);
    Ok(Value::String(reference))
}

/// How an SR gives space may stand in `sm_config`, as XenServer has it; drivers are told by `device_config`.
fn take_allocation(
    info: &DriverInfo,
    config: &mut BTreeMap<String, String>,
    sm_config: &BTreeMap<String, String>,
) {
    for key in ["allocation", "initial-allocation", "allocation-quantum", "allocation-quantum-max"] {
        let told = sm_config.get(key).or_else(|| sm_config.get(&key.replace('-', "_")));
        if let Some(value) = told
            && info.configuration.iter().any(|(known, _)| *known == key)
        {
            config.entry(key.to_owned()).or_insert_with(|| value.clone());
        }
    }
}

/// Makes the records of an SR that is attached.
///
/// # Errors
/// The store's; then it is detached.
fn record_new(
    operation: &Transaction<'_>,
    note: &Note,
    new: &NewSr,
    attached: &Attached,
    call: &Call,
) -> Result<(), ApiError> {
    let sizes = attached.measure(&Work::new(call));
    let recorded = operation.commit(Some(note), |change| {
        if change.get("SR", &attached.reference).is_err() {
            let reference = change.create("SR", &fields_of(new))?;
            let config = new.device_config.clone();
            change.create("PBD", &plug::pbd_fields(&new.host, &reference, config, true))?;
        }
        for pbd in change.find("PBD", "SR", &attached.reference) {
            change.set("PBD", &pbd.reference, "currently_attached", true)?;
        }
        attached.record(change, sizes, 0)
    });
    recorded.inspect_err(|_| {
        if let Err(error) = plug::detach(call, attached) {
            tracing::warn!(sr = %new.uuid, %error, "it stays mounted until the next start");
        }
    })
}

/// Makes the records of an SR that is not made yet, for a driver that changes them meanwhile.
fn record_early(change: &mut Change<'_>, new: &NewSr) -> Result<(), ApiError> {
    let reference = change.create("SR", &fields_of(new))?;
    change.create("PBD", &plug::pbd_fields(&new.host, &reference, new.device_config.clone(), false))?;
    Ok(())
}

/// Removes what the database has of an SR that was not made.
fn forget_new(change: &mut Change<'_>, new: &NewSr) -> Result<(), ApiError> {
    let reference = reference_of(new.uuid);
    if change.get("SR", &reference).is_ok() {
        remove_records(change, &reference)?;
    }
    drop_config_secrets(change, &new.device_config)
}

/// Finishes or undoes the making of an SR, until that is done.
pub(super) fn create_job(new: NewSr) -> Job {
    Job::noted(Note::SrCreate(new.clone()), move |call| finish_create(call, &new))
}

/// The `device_config` of an SR that has no record yet, which says whether hosts share it.
fn among(new: &NewSr) -> BTreeMap<String, String> {
    let mut config = new.device_config.clone();
    if new.shared {
        config.insert(tapio_sm::lease::SHARED.into(), "true".into());
    }
    config
}

/// What a killed daemon began is finished where the storage was made, and forgotten where it was not.
///
/// # Errors
/// The storage does not answer, or the store's: nothing is known, and it is to be tried again.
fn finish_create(call: &Call, new: &NewSr) -> Result<(), ApiError> {
    let note = Note::SrCreate(new.clone());
    let reference = reference_of(new.uuid);
    let operation = Transaction::enter(call, &[on_sr(&reference, "plug")], |_| Ok(()))?;
    let is_recorded = call.part.db.get("SR", &reference).is_ok();
    let is_attached =
        call.part.db.find("PBD", "SR", &reference).iter().any(|pbd| pbd.bool("currently_attached"));
    if is_recorded && (is_attached || call.part.state().attached.contains_key(&reference)) {
        return operation.commit(Some(&note), |_| Ok(()));
    }
    let driver = call.part.driver(&new.kind)?;
    match plug::attach(call, &driver, new.uuid, &reference, &among(new)) {
        Ok(attached) => {
            record_new(&operation, &note, new, &attached, call)?;
            plug::first_scan(call, &attached);
            Ok(())
        }
        Err(error) if is_unfinished(&error) => Err(error),
        Err(error) => {
            tracing::info!(sr = %new.uuid, %error, "an SR that was about to be made is not there");
            operation.commit(Some(&note), |change| forget_new(change, new))
        }
    }
}

/// Removes the secrets of a `device_config` that no PBD has.
fn drop_config_secrets(change: &mut Change<'_>, config: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let pbds = change.all("PBD");
    let named =
        |uuid: &str| pbds.iter().any(|pbd| pbd.map("device_config").values().any(|value| value == uuid));
    for (_, uuid) in config.iter().filter(|(key, uuid)| key.ends_with("_secret") && !named(uuid)) {
        let reference = change.all("secret").into_iter().find(|secret| secret.text("uuid") == uuid);
        if let Some(secret) = reference {
            change.destroy("secret", &secret.reference)?;
        }
    }
    Ok(())
}

fn fields_of(new: &NewSr) -> Vec<(&'static str, Value)> {
    vec![
        ("uuid", Value::string(new.uuid.to_string())),
        ("name_label", Value::string(&new.name_label)),
        ("name_description", Value::string(&new.name_description)),
        ("type", Value::string(&new.kind)),
        ("content_type", Value::string(&new.content_type)),
        ("shared", Value::Bool(new.shared)),
        ("sm_config", Value::string_map(new.sm_config.clone())),
        ("physical_size", Value::Int(new.physical_size)),
    ]
}

fn make(call: &Call, args: &Args) -> Result<Value, ApiError> {
    check_host(call, args.text(0)?)?;
    let driver = call.part.driver(args.text(5)?)?;
    let config = drivers::given(&call.part.db, &*driver, &args.map(1)?)?;
    let uuid = Uuid::new_v4();
    let names = Names { sr: &reference_of(uuid), vdi: "", op: "make" };
    let made = driver.create(&Work::new(call), uuid, &config, size(args, 2)?);
    made.map_err(|error| names.translate(call, error))?;
    Ok(Value::string(uuid.to_string()))
}

fn introduce(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let text = args.text(0)?;
    let uuid = match text {
        "" => Uuid::new_v4(),
        _ => Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", ["SR", text]))?,
    };
    let driver = call.part.driver(args.text(3)?)?;
    let shared = args.bool(5)?;
    if shared && !driver.info().is_shareable {
        let why = format!("an SR of type {} belongs to one host", driver.info().sr_type);
        return Err(ApiError::new("VALUE_NOT_SUPPORTED", ["shared", "true", why.as_str()]));
    }
    let new = NewSr {
        uuid,
        host: String::new(),
        name_label: args.text(1)?.to_owned(),
        name_description: args.text(2)?.to_owned(),
        kind: driver.info().sr_type.to_owned(),
        content_type: args.text(4)?.to_owned(),
        shared,
        device_config: BTreeMap::new(),
        sm_config: args.map(6)?,
        physical_size: 0,
    };
    let reference = call.part.db.change(|change| {
        if change.get("SR", &reference_of(uuid)).is_ok() {
            return Err(ApiError::new("SR_UUID_EXISTS", [uuid.to_string()]));
        }
        let reference = change.create("SR", &fields_of(&new))?;
        allowed::refresh(&call.part, change, "SR", &reference)?;
        Ok(reference)
    })?;
    Ok(Value::String(reference))
}

/// Removes the records of an SR, of its PBDs and its VDIs, and what points at it.
///
/// # Errors
/// The database's.
pub(super) fn remove_records(change: &mut Change<'_>, sr: &str) -> Result<(), ApiError> {
    for vdi in change.find("VDI", "SR", sr) {
        records::remove(change, &vdi.reference)?;
    }
    for known in change.find("PBD", "SR", sr) {
        pbd::remove(change, &known.reference)?;
    }
    for pool in change.all("pool") {
        for field in ["default_SR", "suspend_image_SR", "crash_dump_SR"] {
            if pool.text(field) == sr {
                change.set("pool", &pool.reference, field, NULL_REF)?;
            }
        }
    }
    for host in change.all("host") {
        for field in ["suspend_image_sr", "crash_dump_sr"] {
            if host.text(field) == sr {
                change.set("host", &host.reference, field, NULL_REF)?;
            }
        }
    }
    change.destroy("SR", sr)
}

fn forget(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    call.part.db.get("SR", reference)?;
    let operation = Transaction::enter(call, &[on_sr(reference, "forget")], |_| Ok(()))?;
    operation.commit(None, |change| {
        let attached = |pbd: &std::sync::Arc<crate::db::Object>| pbd.bool("currently_attached");
        if change.find("PBD", "SR", reference).iter().any(attached) {
            return Err(ApiError::new("SR_HAS_PBD", [reference]));
        }
        remove_records(change, reference)
    })?;
    Ok(Value::Void)
}

fn destroy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (db, storage) = (&call.part.db, &call.part);
    let reference = args.text(0)?;
    let sr = db.get("SR", reference)?;
    if sr.map("other_config").get("indestructible").is_some_and(|value| value == "true") {
        return Err(ApiError::new("SR_INDESTRUCTIBLE", [reference]));
    }
    let pbds = db.find("PBD", "SR", reference);
    if let [_, second, ..] = &pbds[..] {
        return Err(ApiError::new("SR_HAS_MULTIPLE_PBDS", [second.reference.as_str()]));
    }
    let attached = storage.attached(reference)?;
    let _no_collection = storage.hold_off(reference);
    let operation = Transaction::enter(call, &[on_sr(reference, "destroy")], |_| Ok(()))?;
    // What lies there decides, not what the database believes.
    reconcile::scan(call, &attached)?;
    if db.find("VDI", "SR", reference).iter().any(|vdi| records::keeps_sr(vdi)) {
        return Err(ApiError::bare("SR_NOT_EMPTY"));
    }
    let note = Note::SrDestroy { sr: reference.to_owned() };
    operation.note(Some(&note), Some("sr-destroy:noted"))?;
    if let Err(error) = erase(call, &attached) {
        // What was begun is finished once the storage answers.
        let is_unfinished = is_unfinished(&error);
        operation.give_up((!is_unfinished).then_some(&note));
        if is_unfinished {
            retry::later(call, reference, destroy_job(reference.to_owned()));
        }
        return Err(error);
    }
    step("sr-destroy:erased");
    operation.commit(Some(&note), |change| remove_records(change, reference))?;
    Ok(Value::Void)
}

fn erase(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let names = Names { sr: &attached.reference, vdi: "", op: "destroy" };
    attached.end(|device| device.erase(&Work::new(call))).map_err(|error| names.translate(call, error))?;
    call.part.state().attached.remove(&attached.reference);
    queues::restore(call, attached);
    Ok(())
}

/// Finishes the destruction of an SR, until that is done.
pub(super) fn destroy_job(sr: String) -> Job {
    Job::noted(Note::SrDestroy { sr: sr.clone() }, move |call| finish_destroy(call, &sr))
}

/// An SR was being destroyed when the daemon was killed or its storage hung: that goes on where the storage is still
/// there. One that has got a VDI since is in use again, and stays.
///
/// # Errors
/// The storage does not answer, or the store's: nothing is known, and it is to be tried again.
fn finish_destroy(call: &Call, reference: &str) -> Result<(), ApiError> {
    let (db, storage) = (&call.part.db, &call.part);
    let note = Note::SrDestroy { sr: reference.to_owned() };
    let _no_collection = storage.hold_off(reference);
    let operation = Transaction::enter(call, &[on_sr(reference, "destroy")], |_| Ok(()))?;
    let Ok(sr) = db.get("SR", reference) else { return operation.commit(Some(&note), |_| Ok(())) };
    if db.find("VDI", "SR", reference).iter().any(|vdi| records::keeps_sr(vdi)) {
        tracing::warn!(sr = sr.text("uuid"), "an SR that was being destroyed has a VDI again, and stays");
        return operation.commit(Some(&note), |_| Ok(()));
    }
    let known = storage.state().attached.get(reference).cloned();
    let pbd = db.find("PBD", "SR", reference).into_iter().next();
    if let Some(attached) = known {
        erase(call, &attached)?;
    } else if let Some(pbd) = pbd {
        let driver = storage.driver(sr.text("type"))?;
        match plug::attach(call, &driver, sr.uuid()?, reference, &pbd.map("device_config")) {
            Ok(attached) => erase(call, &attached)?,
            Err(error) if is_unfinished(&error) => return Err(error),
            Err(error) => {
                tracing::info!(sr = sr.text("uuid"), %error, "an SR that was being destroyed is gone");
            }
        }
    }
    operation.commit(Some(&note), |change| {
        for pbd in change.find("PBD", "SR", reference) {
            change.set("PBD", &pbd.reference, "currently_attached", false)?;
        }
        remove_records(change, reference)
    })
}

fn scan_sr(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let attached = call.part.attached(args.text(0)?)?;
    scan::scan(call, &attached).map(|()| Value::Void)
}

fn update(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let attached = call.part.attached(reference)?;
    let operation = Transaction::enter(call, &[on_sr(reference, "update")], |_| Ok(()))?;
    let stat = attached.with(|sr| sr.stat(&Work::new(call)));
    let names = Names { sr: reference, vdi: "", op: "update" };
    stat.map_err(|error| names.translate(call, error))?;
    let sizes = attached.measure(&Work::new(call));
    operation.commit(None, |change| attached.record(change, sizes, 0))?;
    Ok(Value::Void)
}
