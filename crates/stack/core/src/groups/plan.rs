//! Plans of snapshots as clients make and change them.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF, Value};

use super::schedule::{CLASS, SEEN, Schedule};
use super::{Busy, Groups, turn};
use crate::args::{Args, text_in};
use crate::call::{Call, HandlersOf};
use crate::dates;
use crate::db::{Change, Object};

/// Most snapshots of a VM that a plan keeps: each makes the chain of a disk longer.
const RETAINED_MAX: i64 = 10;

pub(super) fn register(handlers: &mut HandlersOf<'_, Groups>) {
    handlers.on("VMSS.create", create);
    handlers.on("VMSS.destroy", destroy);
    handlers.on("VMSS.snapshot_now", |call, args| turn::now(&call.part, args.text(0)?).map(Value::String));
    handlers.on("VMSS.get_alerts", alerts);
    handlers.on("VMSS.set_enabled", |call, args| set(call, args, "enabled"));
    handlers.on("VMSS.set_type", |call, args| set(call, args, "type"));
    handlers.on("VMSS.set_retained_snapshots", |call, args| set(call, args, "retained_snapshots"));
    handlers.on("VMSS.set_frequency", |call, args| set(call, args, "frequency"));
    handlers.on("VMSS.set_schedule", |call, args| set(call, args, "schedule"));
    handlers.on("VMSS.add_to_schedule", |call, args| {
        let (key, value) = (args.text(1)?, args.text(2)?);
        edit(call, args.text(0)?, |schedule| match schedule.insert(key.to_owned(), value.to_owned()) {
            Some(_) => Err(ApiError::new("MAP_DUPLICATE_KEY", [CLASS, "schedule", args.text(0)?, key])),
            None => Ok(()),
        })
    });
    handlers.on("VMSS.remove_from_schedule", |call, args| {
        let key = args.text(1)?;
        edit(call, args.text(0)?, |schedule| {
            schedule.remove(key);
            Ok(())
        })
    });
}

fn check(retained: i64, frequency: &str, schedule: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if !(1..=RETAINED_MAX).contains(&retained) {
        let why = format!("{retained} (1 to {RETAINED_MAX} is possible)");
        return Err(ApiError::new("INVALID_VALUE", ["retained_snapshots".to_owned(), why]));
    }
    Schedule::of(frequency, schedule).map(drop)
}

fn check_record(plan: &Object) -> Result<(), ApiError> {
    check(plan.int("retained_snapshots"), plan.text("frequency"), &plan.map("schedule"))
}

/// A plan that was made or changed counts from now on.
fn begin(change: &mut Change<'_>, reference: &str) -> Result<(), ApiError> {
    change.set(CLASS, reference, SEEN, Value::DateTime(dates::now()))
}

fn create(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let record = args.record()?;
    let schedule = record.get("schedule").map(Value::to_string_map).unwrap_or_default();
    let retained = record.get("retained_snapshots").and_then(Value::as_int).unwrap_or(7);
    check(retained, text_in(record, "frequency"), &schedule)?;
    let fields: Vec<(&str, Value)> =
        record.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    call.part.db.change(|change| {
        let reference = change.create(CLASS, &fields)?;
        begin(change, &reference)?;
        Ok(Value::String(reference))
    })
}

/// Its snapshots stay; nothing removes them any more.
fn destroy(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let _busy = Busy::begin(&call.part, CLASS, reference, "destroy")?;
    call.part.db.change(|change| {
        change.get(CLASS, reference)?;
        for vm in change.find("VM", "snapshot_schedule", reference) {
            change.set("VM", &vm.reference, "snapshot_schedule", NULL_REF)?;
        }
        change.destroy(CLASS, reference)
    })?;
    Ok(Value::Void)
}

fn set(call: &Call<Groups>, args: &Args, field: &str) -> Result<Value, ApiError> {
    let (reference, value) = (args.text(0)?, args.value(1)?.clone());
    call.part.db.change(|change| {
        change.set(CLASS, reference, field, value)?;
        check_record(&*change.get(CLASS, reference)?)?;
        begin(change, reference)?;
        Ok(Value::Void)
    })
}

fn edit(
    call: &Call<Groups>,
    reference: &str,
    how: impl FnOnce(&mut BTreeMap<String, String>) -> Result<(), ApiError>,
) -> Result<Value, ApiError> {
    call.part.db.change(|change| {
        let mut schedule = change.get(CLASS, reference)?.map("schedule");
        how(&mut schedule)?;
        change.set(CLASS, reference, "schedule", Value::string_map(schedule))?;
        check_record(&*change.get(CLASS, reference)?)?;
        begin(change, reference)?;
        Ok(Value::Void)
    })
}

fn alerts(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let plan = call.part.db.get(CLASS, args.text(0)?)?;
    let since = dates::now() - args.int(1)?.clamp(0, 1 << 20) * 3600;
    let is_of = |message: &Object| {
        let Value::DateTime(at) = message.get("timestamp") else { return false };
        message.text("cls") == CLASS && message.text("obj_uuid") == plan.text("uuid") && *at >= since
    };
    let all = call.part.db.all("message");
    let found = all.iter().filter(|message| is_of(message));
    Ok(Value::strings(found.map(|one| format!("{}: {}", one.text("name"), one.text("body")))))
}
