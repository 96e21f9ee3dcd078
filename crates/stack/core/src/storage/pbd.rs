//! Messages of class PBD.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF, Value};

use super::transaction::Transaction;
use super::{Call, Handlers, allowed, drivers, plug};
use crate::args::{Args, text_in};
use crate::operations::on_sr;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("PBD.create", create);
    handlers.on("PBD.destroy", destroy);
    handlers.on("PBD.plug", |call, args| plug::plug(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("PBD.unplug", |call, args| plug::unplug(call, args.text(0)?).map(|()| Value::Void));
    handlers.on("PBD.set_device_config", set_device_config);
}

fn create(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (db, record) = (&call.part.db, args.record()?);
    let (sr, host) = (text_in(record, "SR"), text_in(record, "host"));
    db.get("SR", sr)?;
    db.get("host", host)?;
    let config = record.get("device_config").map(Value::to_string_map).unwrap_or_default();
    let other = record.get("other_config").cloned().unwrap_or_else(|| Value::Map(BTreeMap::new()));
    let operation = Transaction::enter(call, &[on_sr(sr, "pbd_create")], |_| Ok(()))?;
    let made = operation.commit(None, |change| {
        change.get("SR", sr)?;
        let known = change.find("PBD", "SR", sr).into_iter().find(|pbd| pbd.text("host") == host);
        if let Some(known) = known {
            return Err(ApiError::new("PBD_EXISTS", [sr, host, known.reference.as_str()]));
        }
        let config = drivers::without_passwords(change, &config)?;
        let mut fields = plug::pbd_fields(host, sr, config, false);
        fields.push(("other_config", other));
        change.create("PBD", &fields)
    })?;
    Ok(Value::String(made))
}

fn destroy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let pbd = call.part.db.get("PBD", reference)?;
    let operation = Transaction::enter(call, &[on_sr(pbd.text("SR"), "pbd_destroy")], |_| Ok(()))?;
    operation.commit(None, |change| {
        detached(&*change.get("PBD", reference)?)?;
        remove(change, reference)
    })?;
    Ok(Value::Void)
}

/// Removes the record of a PBD that is not attached, and its secrets.
///
/// # Errors
/// The database's.
pub(super) fn remove(change: &mut crate::db::Change<'_>, pbd: &str) -> Result<(), ApiError> {
    drivers::drop_secrets(change, pbd)?;
    super::notes::Note::PbdWanted { pbd: pbd.to_owned() }.drop_from(change);
    change.destroy("PBD", pbd)
}

fn detached(pbd: &crate::db::Object) -> Result<(), ApiError> {
    if pbd.bool("currently_attached") {
        let what = format!("PBD {} is attached: unplug it first (pbd-unplug)", pbd.text("uuid"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [what]));
    }
    Ok(())
}

fn set_device_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, config) = (args.text(0)?, args.map(1)?);
    let pbd = call.part.db.get("PBD", reference)?;
    let sr = pbd.text("SR").to_owned();
    if sr == NULL_REF {
        return Err(ApiError::new("HANDLE_INVALID", ["SR", NULL_REF]));
    }
    let operation = Transaction::enter(call, &[on_sr(&sr, "pbd_create")], |_| Ok(()))?;
    operation.commit(None, |change| {
        detached(&*change.get("PBD", reference)?)?;
        let kept = drivers::without_passwords(change, &config)?;
        drivers::drop_secrets(change, reference)?;
        change.set("PBD", reference, "device_config", Value::string_map(kept))?;
        allowed::refresh(&call.part, change, "SR", &sr)
    })?;
    Ok(Value::Void)
}
