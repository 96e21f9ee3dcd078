//! Disks and CD drives of VMs, found by the VM rather than by UUID.

use serde_json::{Value, json};
use tapio_model::NULL_REF;
use tapio_model::columns::{Table, table};

use super::one;
use crate::xe::commands::drive;
use crate::xe::commands::select::{drives, machines, machines_and_host, pool};
use crate::xe::error::{Failure, Result};
use crate::xe::generic::{chosen, matching};
use crate::xe::objects::{Reach, View};
use crate::xe::printer;
use crate::xe::session::{Session, print};

fn named_table(name: &str) -> Result<&'static Table> {
    table(name).ok_or_else(|| Failure::other(format!("there is no table {name}")))
}

/// For each disk its VBD and its VDI.
pub(super) fn list(session: &Session, kind: &str) -> Result<()> {
    let vms = machines_and_host(session, &["vbd-params", "vdi-params"])?;
    list_of(session, &vms, kind)
}

/// The same for VMs, templates or snapshots that are known already.
pub(in crate::xe::commands) fn list_of(session: &Session, vms: &[String], kind: &str) -> Result<()> {
    let (drive_table, disk_table) = (named_table("vbd")?, named_table("vdi")?);
    let params = |name: &str, otherwise: &str| session.arguments.get(name).unwrap_or(otherwise).to_owned();
    let drive_params = chosen(drive_table, Some(&params("vbd-params", "uuid,vm-name-label,userdevice")))?;
    let disk_params = params("vdi-params", "uuid,name-label,sr-name-label,virtual-size");
    let disk_params = chosen(disk_table, Some(&disk_params))?;
    let view = View::new(&session.client, Reach::Single);
    let plain = !session.arguments.minimal && !session.arguments.json;
    let mut all = Vec::new();
    for vm in vms {
        for (number, (vbd, record)) in drives(session, vm, kind)?.into_values().enumerate() {
            let mut tables = vec![(
                "VBD",
                view.cells(drive_table, &vbd, &record, &|column| drive_params.contains(&column.name))?,
            )];
            let vdi = record.get("VDI").and_then(Value::as_str).unwrap_or(NULL_REF);
            if let Some(record) = view.record("VDI", vdi)? {
                let cells =
                    view.cells(disk_table, vdi, &record, &|column| disk_params.contains(&column.name))?;
                tables.push(("VDI", cells));
            }
            for (what, cells) in tables {
                if plain {
                    print(&format!("{kind} {number} {what}:\n{}", printer::records(&[cells])))?;
                } else {
                    all.push(cells);
                }
            }
        }
    }
    if plain { Ok(()) } else { session.print_records(&all) }
}

/// The disk at the place that `device` names: a number, or the name it has in the guest.
fn at_device(session: &Session, vm: &str) -> Result<(String, Value)> {
    let device = session.need("device")?;
    let found = drives(session, vm, "Disk")?.into_values().find(|(_, record)| {
        let is = |field: &str| record.get(field).and_then(Value::as_str) == Some(device);
        is("userdevice") || is("device")
    });
    found.ok_or_else(|| Failure::other(format!("the VM has no disk at {device}")))
}

pub(super) fn add(session: &Session) -> Result<()> {
    let vm = one(machines(session, &["disk-size", "device", "sr-uuid"])?)?;
    let sr = match session.arguments.get("sr-uuid") {
        Some(uuid) => session.by_uuid("SR", uuid)?,
        None => session.text("pool.get_default_SR", &[pool(session)?.into()])?,
    };
    if sr == NULL_REF {
        return Err(Failure::other("the pool has no default SR; give sr-uuid=..."));
    }
    let record = json!({
        "name_label": "Created by xe",
        "name_description": "",
        "SR": sr,
        "virtual_size": session.size("disk-size")?,
        "type": "user",
        "sharable": false,
        "read_only": false,
        "other_config": {},
    });
    let vdi = session.long("VDI.create", &[record])?;
    let device = session.need("device")?;
    let made = drive::make(session, &vm, &vdi, device, "Disk", "RW", &[drive::OWNER]);
    if let Err(error) = made {
        // Nothing is left of it; what matters is why.
        let _ = session.long("VDI.destroy", &[vdi.into()]);
        return Err(error);
    }
    Ok(())
}

pub(super) fn remove(session: &Session) -> Result<()> {
    let vm = one(machines(session, &["device"])?)?;
    let (vbd, record) = at_device(session, &vm)?;
    session.long("VBD.destroy", &[vbd.into()])?;
    match record.get("VDI").and_then(Value::as_str) {
        Some(vdi) if vdi != NULL_REF => session.long("VDI.destroy", &[vdi.into()]).map(drop),
        _ => Ok(()),
    }
}

/// The medium of this name.
fn medium(session: &Session) -> Result<String> {
    let name = session.need("cd-name")?;
    let view = View::new(&session.client, Reach::List);
    let found = media(&view, [("name-label", name)])?;
    match found.as_slice() {
        [(only, _)] => Ok(only.clone()),
        [] => Err(Failure::other(format!("no CD is named '{name}'; 'xe cd-list' shows those there are"))),
        several => Err(Failure::other(format!("{} CDs are named '{name}'", several.len()))),
    }
}

/// Disks of SRs that hold media.
fn media<'a>(
    view: &View<'_>,
    filters: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Vec<(String, Value)>> {
    let mut found = matching(view, named_table("vdi")?, filters)?;
    let srs = view.records("SR")?;
    found.retain(|(_, record)| {
        let sr = record.get("SR").and_then(Value::as_str).and_then(|sr| srs.get(sr));
        let is = |field: &str| sr.and_then(|sr| sr.get(field)).and_then(Value::as_str) == Some("iso");
        is("content_type") || is("type")
    });
    Ok(found)
}

pub(super) fn cds(session: &Session) -> Result<()> {
    let table = named_table("vdi")?;
    let chosen = chosen(table, Some(session.or("params", "uuid,name-label")))?;
    let view = View::new(&session.client, Reach::List);
    let found = media(&view, session.arguments.filters())?;
    let cells = found
        .iter()
        .map(|(vdi, record)| view.cells(table, vdi, record, &|column| chosen.contains(&column.name)))
        .collect::<Result<Vec<_>>>()?;
    session.print_records(&cells)
}

pub(super) fn cd_add(session: &Session) -> Result<()> {
    let vm = one(machines(session, &["cd-name", "device"])?)?;
    let vdi = medium(session)?;
    drive::make(session, &vm, &vdi, session.need("device")?, "CD", "RO", &[]).map(drop)
}

pub(super) fn cd_remove(session: &Session) -> Result<()> {
    let vm = one(machines(session, &["cd-name"])?)?;
    let vdi = medium(session)?;
    let drive = drives(session, &vm, "CD")?
        .into_values()
        .find(|(_, record)| record.get("VDI").and_then(Value::as_str) == Some(&vdi));
    let (vbd, _) = drive.ok_or_else(|| Failure::other("no drive of the VM has this CD"))?;
    session.long("VBD.destroy", &[vbd.into()]).map(drop)
}

/// The only drive that is empty, or is not.
fn only_drive(session: &Session, vm: &str, empty: bool) -> Result<String> {
    let mut found: Vec<String> = drives(session, vm, "CD")?
        .into_values()
        .filter(|(_, record)| record.get("empty").and_then(Value::as_bool) == Some(empty))
        .map(|(vbd, _)| vbd)
        .collect();
    let state = if empty { "empty CD drive" } else { "CD drive with a medium" };
    match (found.pop(), found.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => Err(Failure::other(format!("the VM has no {state}"))),
        (_, more) => Err(Failure::other(format!(
            "the VM has {} of: {state}; use vbd-eject or vbd-insert with the UUID",
            more + 1
        ))),
    }
}

pub(super) fn cd_eject(session: &Session) -> Result<()> {
    let vm = one(machines(session, &[])?)?;
    let vbd = only_drive(session, &vm, false)?;
    session.long("VBD.eject", &[vbd.into()]).map(drop)
}

pub(super) fn cd_insert(session: &Session) -> Result<()> {
    let vm = one(machines(session, &["cd-name"])?)?;
    let vbd = only_drive(session, &vm, true)?;
    session.long("VBD.insert", &[vbd.into(), medium(session)?.into()]).map(drop)
}
