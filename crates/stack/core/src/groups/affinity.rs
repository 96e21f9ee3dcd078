//! Groups by whose rule VMs are placed, and the message about one whose VMs a single failure of a host would end.
//!
//! Which host a VM goes to is decided in [`crate::pool::apart`].

use std::collections::BTreeSet;

use tapio_model::{ApiError, Value};

use super::Groups;
use crate::args::Args;
use crate::call::{Call, HandlersOf};
use crate::db::Object;
use crate::pool::apart::{CLASS, broken};

/// The message about a group, as XenServer's clients know it: of class `Pool`, with this body.
const BROKEN: &str = "ALL_RUNNING_VMS_IN_ANTI_AFFINITY_GRP_ON_SINGLE_HOST";

pub(super) fn register(handlers: &mut HandlersOf<'_, Groups>) {
    handlers.on("VM_group.create", |call, args| {
        let given = args.record()?.iter().map(|(name, value)| (name.as_str(), value.clone()));
        call.part.db.create(CLASS, &given.collect::<Vec<_>>()).map(Value::String)
    });
    handlers.on("VM_group.destroy", destroy);
    handlers.on("VM.set_groups", put);
}

fn destroy(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let group = args.text(0)?;
    call.part.db.change(|change| {
        change.get(CLASS, group)?;
        for vm in change.find("VM", "groups", group) {
            change.set("VM", &vm.reference, "groups", Value::Set(Vec::new()))?;
        }
        change.destroy(CLASS, group)
    })?;
    Ok(Value::Void)
}

fn put(call: &Call<Groups>, args: &Args) -> Result<Value, ApiError> {
    let vm = args.text(0)?;
    let groups: BTreeSet<&str> =
        args.value(1)?.as_set().unwrap_or_default().iter().filter_map(Value::as_str).collect();
    call.part.db.change(|change| {
        let record = change.get("VM", vm)?;
        if ["is_control_domain", "is_a_template", "is_a_snapshot"].iter().any(|field| record.bool(field)) {
            let name = record.text("name_label");
            let why =
                format!("{name} is the host itself, a template or a snapshot: these are placed on no host");
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        for group in &groups {
            change.get(CLASS, group)?;
        }
        if groups.len() > 1 {
            return Err(ApiError::bare("TOO_MANY_GROUPS"));
        }
        change.set("VM", vm, "groups", Value::strings(groups))
    })?;
    Ok(Value::Void)
}

/// One look, on the host that decides: tells of groups that are broken since the last one, and takes back what is not
/// so any more. A message that a client destroyed does not come again.
pub(super) fn watch(groups: &Groups) -> Result<(), ApiError> {
    let db = &groups.db;
    let mut told = groups.broken.lock();
    if !groups.pool.decides() {
        *told = None;
        return Ok(());
    }
    let lives = |host: &Object| {
        db.get("host_metrics", host.text("metrics")).is_ok_and(|metrics| metrics.bool("live"))
    };
    let mut now = BTreeSet::new();
    let found = broken(db);
    // Where there is one host, VMs cannot be on two.
    if !found.is_empty() && db.all("host").iter().filter(|host| lives(host)).count() > 1 {
        for one in found {
            let host = db.get("host", &one.host)?;
            let (group, host) = (one.group.text("uuid"), host.text("uuid"));
            now.insert(format!(
                "<body><message>Breach on VM anti-affinity rules</message><VM_group>{group}</VM_group>\
                 <host>{host}</host></body>"
            ));
        }
    }
    let before = told.as_ref();
    if before == Some(&now) {
        return Ok(());
    }
    let messages = db.find("message", "name", BROKEN);
    for message in messages.iter().filter(|message| !now.contains(message.text("body"))) {
        db.destroy("message", &message.reference)?;
    }
    let pool = db.all("pool").first().map(|pool| pool.text("uuid").to_owned()).unwrap_or_default();
    for body in &now {
        let is_known = before.is_some_and(|before| before.contains(body))
            || messages.iter().any(|message| message.text("body") == body);
        if !is_known {
            crate::tell(db, BROKEN, 3, "Pool", &pool, body)?;
        }
    }
    *told = Some(now);
    Ok(())
}
