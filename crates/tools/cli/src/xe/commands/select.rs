//! Which VMs and hosts a command is about.

use std::collections::BTreeMap;

use serde_json::Value;
use tapio_model::columns::table;

use crate::xe::error::{Failure, Result};
use crate::xe::generic::matching;
use crate::xe::objects::{Reach, View, find};
use crate::xe::session::Session;

/// The host that `host-uuid` names, or the one that decides for the pool.
pub(super) fn host(session: &Session) -> Result<String> {
    if session.arguments.get("host-uuid").is_some() {
        return session.reference("host", "host-uuid");
    }
    if let Some(name) = session.arguments.get("host") {
        return find(&session.client, "host", name);
    }
    host_of_pool(session)
}

/// The host that decides for the pool.
pub(super) fn host_of_pool(session: &Session) -> Result<String> {
    session.text("pool.get_master", &[pool(session)?.into()])
}

/// The only pool.
pub(super) fn pool(session: &Session) -> Result<String> {
    let pools = session.call("pool.get_all", &[])?;
    let pool = pools.as_array().and_then(|all| all.first()).and_then(Value::as_str);
    pool.map(str::to_owned).ok_or_else(|| Failure::other("the toolstack has no pool"))
}

/// The VMs that the command is about: `vm=` with a name or UUID, `uuid=`, or fields as in `vm-list`. More than one
/// needs `--multiple`. `own` are parameters of the command, which choose nothing. The host itself is never among them.
pub(super) fn machines(session: &Session, own: &[&str]) -> Result<Vec<String>> {
    choose(session, "vm", own, false)
}

/// As [`machines`], for commands that only look, or that may also be about the host's own VM (its control domain).
pub(super) fn machines_and_host(session: &Session, own: &[&str]) -> Result<Vec<String>> {
    choose(session, "vm", own, true)
}

/// As [`machines`], for objects of any table of VMs.
pub(super) fn of_table(session: &Session, name: &str, own: &[&str]) -> Result<Vec<String>> {
    choose(session, name, own, false)
}

fn choose(session: &Session, name: &str, own: &[&str], with_host: bool) -> Result<Vec<String>> {
    let table = table(name).ok_or_else(|| Failure::other(format!("there is no table {name}")))?;
    let view = View::new(&session.client, Reach::List);
    let filters = session.arguments.filters().filter(|(param, _)| {
        let base = param.split(':').next().unwrap_or(param);
        *param != "vm" && !own.contains(&base)
    });
    let filters: Vec<(&str, &str)> = filters.collect();
    let chosen = session.arguments.get("vm");
    if chosen.is_none() && filters.is_empty() && !session.truth("multiple", false)? {
        return Err(Failure::Missing("vm".into()));
    }
    let mut found = matching(&view, table, filters)?;
    let is_host =
        |record: &Value| record.get("is_control_domain").and_then(Value::as_bool).unwrap_or_default();
    found.retain(|(_, record)| with_host || !is_host(record));
    if let Some(wanted) = chosen {
        let is = |record: &Value, field: &str| record.get(field).and_then(Value::as_str) == Some(wanted);
        found.retain(|(_, record)| is(record, "uuid") || is(record, "name_label"));
    }
    let found: Vec<String> = found.into_iter().map(|(reference, _)| reference).collect();
    match found.len() {
        0 => Err(Failure::other(format!("No matching {} found", table.plural))),
        1 => Ok(found),
        _ if session.truth("multiple", false)? => Ok(found),
        count => Err(Failure::other(format!(
            "{count} {} match; give --multiple to do it to all of them, or a UUID",
            table.plural
        ))),
    }
}

/// Does something to each, and goes on after a failure; the first failure is answered.
pub(super) fn each(vms: &[String], mut what: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let mut failed = None;
    for vm in vms {
        if let Err(error) = what(vm) {
            failed = failed.or(Some(error));
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The VBDs of a VM of one type, by place.
pub(super) fn drives(session: &Session, vm: &str, kind: &str) -> Result<BTreeMap<u32, (String, Value)>> {
    let vbds = session.call("VM.get_VBDs", &[vm.into()])?;
    let mut drives = BTreeMap::new();
    for vbd in vbds.as_array().into_iter().flatten().filter_map(Value::as_str) {
        let record = session.call("VBD.get_record", &[vbd.into()])?;
        if record.get("type").and_then(Value::as_str) == Some(kind) {
            let place = record.get("userdevice").and_then(Value::as_str).and_then(|text| text.parse().ok());
            drives.insert(place.unwrap_or(u32::MAX), (vbd.to_owned(), record));
        }
    }
    Ok(drives)
}
