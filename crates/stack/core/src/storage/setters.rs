//! Setters that mean more than their field.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Value};

use super::attached::Attached;
use super::pool::{POOL_RINGS, pool_pages};
use super::transaction::Transaction;
use super::vdi::{Subject, not_in_use, not_plugged};
use super::work::{Names, Work};
use super::{Call, Handlers, collect, queues};
use crate::args::Args;
use crate::db::Object;
use crate::operations::{on_sr, on_vdi};

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.set_shared", set_shared);
    handlers.on("SR.set_other_config", set_other_config);
    handlers.on("SR.add_to_other_config", add_to_other_config);
    handlers.on("SR.remove_from_other_config", remove_from_other_config);
    handlers.on("SR.set_physical_size", set_physical_size);
    handlers.on("VDI.set_name_label", |call, args| rename(call, args, "name_label"));
    handlers.on("VDI.set_name_description", |call, args| rename(call, args, "name_description"));
    handlers.on("VDI.set_read_only", |call, args| set_unused(call, args, "read_only"));
    handlers.on("VDI.set_sharable", |call, args| set_unused(call, args, "sharable"));
    handlers.on("VDI.set_on_boot", set_on_boot);
    handlers.on("VDI.set_allow_caching", set_allow_caching);
}

/// Names a VDI or describes it; a storage that keeps names is told.
fn rename(call: &Call, args: &Args, field: &'static str) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.text(1)?);
    let db = &call.part.db;
    let before = db.get("VDI", reference)?;
    db.set("VDI", reference, field, value)?;
    let attached = call.part.state().attached.get(before.text("SR")).cloned();
    let keeps_names = |attached: &Arc<Attached>| {
        attached.origin.is_some() || attached.info.capabilities.contains(&"VDI_UPDATE")
    };
    let Some(attached) = attached.filter(keeps_names) else {
        return Ok(Value::Void);
    };
    let now = db.get("VDI", reference)?;
    let (uuid, name, text) = (now.uuid()?, now.text("name_label"), now.text("name_description"));
    let told = attached.with(|sr| sr.rename(&Work::new(call), uuid, name, text));
    told.map_err(|error| {
        if let Err(error) = db.set("VDI", reference, field, before.text(field)) {
            tracing::warn!(%error, "the name of a VDI is not what its storage says");
        }
        Names { sr: &attached.reference, vdi: reference, op: "update" }.translate(call, error)
    })?;
    Ok(Value::Void)
}

fn set_shared(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, shared) = (args.text(0)?, args.bool(1)?);
    let db = &call.part.db;
    let sr = db.get("SR", reference)?;
    let driver = call.part.driver(sr.text("type"))?;
    if shared && !driver.info().is_shareable {
        let host = super::this_host(db);
        return Err(ApiError::new("SR_NOT_SHARABLE", [reference, &host]));
    }
    db.change(|change| {
        let pbds = change.find("PBD", "SR", reference);
        if let (false, [_, second, ..]) = (shared, &pbds[..]) {
            return Err(ApiError::new("SR_HAS_MULTIPLE_PBDS", [second.reference.as_str()]));
        }
        change.set("SR", reference, "shared", shared)
    })?;
    Ok(Value::Void)
}

fn set_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, fresh) = (args.text(0)?, args.map(1)?);
    change_other_config(call, reference, |_, _| Ok(fresh))
}

fn add_to_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (key, value) = (args.text(1)?, args.text(2)?);
    change_other_config(call, args.text(0)?, |sr, mut map| {
        if map.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(ApiError::new("MAP_DUPLICATE_KEY", ["SR", "other_config", sr.text("uuid"), key]));
        }
        Ok(map)
    })
}

fn remove_from_other_config(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let key = args.text(1)?;
    change_other_config(call, args.text(0)?, |_, mut map| {
        map.remove(key);
        Ok(map)
    })
}

/// Refuses settings of the garbage collection that are no numbers, and a size of the page pool that cannot be: they
/// would be noticed at the next collection or plug only.
fn change_other_config(
    call: &Call,
    reference: &str,
    change_map: impl FnOnce(&Object, BTreeMap<String, String>) -> Result<BTreeMap<String, String>, ApiError>,
) -> Result<Value, ApiError> {
    let is_about_queues = call.part.db.change(|change| {
        let sr = change.get("SR", reference)?;
        let (before, fresh) = (sr.map("other_config"), change_map(&sr, sr.map("other_config"))?);
        let is_new = before.get(POOL_RINGS) != fresh.get(POOL_RINGS);
        if let (true, Err(why)) = (is_new, pool_pages(&fresh)) {
            let value = fresh.get(POOL_RINGS).cloned().unwrap_or_default();
            let params = [format!("other_config:{POOL_RINGS}"), value, why];
            return Err(ApiError::new("VALUE_NOT_SUPPORTED", params));
        }
        crate::rings::check_rings(&before, &fresh)?;
        collect::check_settings(&fresh)?;
        let is_about_queues = queues::differ(&before, &fresh);
        if is_about_queues {
            queues::check_settings(&fresh)?;
        }
        change.set("SR", reference, "other_config", Value::string_map(fresh))?;
        Ok(is_about_queues)
    })?;
    call.part.collect_as_set(reference);
    if is_about_queues && let Ok(attached) = call.part.attached(reference) {
        queues::apply(call, &attached);
    }
    Ok(Value::Void)
}

fn set_physical_size(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, size) = (args.text(0)?, args.int(1)?);
    if size < 0 {
        return Err(ApiError::new("INVALID_VALUE", ["physical_size".to_owned(), size.to_string()]));
    }
    call.part.db.set("SR", reference, "physical_size", size)?;
    Ok(Value::Void)
}

/// A field that decides how the VDI is opened: not while it is.
fn set_unused(call: &Call, args: &Args, field: &'static str) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.bool(1)?);
    let db = &call.part.db;
    let vdi = db.get("VDI", reference)?;
    if vdi.bool(field) == value {
        return Ok(Value::Void);
    }
    not_plugged(db, reference, field)?;
    let targets = [on_sr(vdi.text("SR"), "update"), on_vdi(reference, "set")];
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, reference, field))?;
    operation.commit(None, |change| change.set("VDI", reference, field, value))?;
    Ok(Value::Void)
}

fn set_on_boot(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.text(1)?);
    let subject = Subject::find_at_all(call, reference)?;
    if value == subject.vdi.text("on_boot") {
        return Ok(Value::Void);
    }
    subject.sr.needs("VDI_RESET_ON_BOOT")?;
    not_plugged(&call.part.db, reference, "set_on_boot")?;
    let targets = [on_sr(&subject.sr.reference, "vdi_set_on_boot"), on_vdi(reference, "set_on_boot")];
    let operation = Transaction::enter(call, &targets, |state| not_in_use(state, reference, "set_on_boot"))?;
    operation.commit(None, |change| change.set("VDI", reference, "on_boot", value))?;
    Ok(Value::Void)
}

/// A cache on local storage needs a driver that has one.
fn set_allow_caching(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.bool(1)?);
    let vdi = call.part.db.get("VDI", reference)?;
    if value {
        call.part.attached(vdi.text("SR"))?.needs("SR_CACHING")?;
    }
    call.part.db.set("VDI", reference, "allow_caching", value)?;
    Ok(Value::Void)
}
