//! What has a disk open.

use serde_json::Value;
use tapio_model::columns::table;

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::objects::{Reach, View};
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] =
    &[command("diagnostic-vdi-status", &["uuid"], &[], "Shows a VDI and the drives that have it", run)];

fn run(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let view = View::new(&session.client, Reach::Single);
    let of = |name: &str| table(name).ok_or_else(|| Failure::other(format!("there is no table {name}")));
    let (disks, drives) = (of("vdi")?, of("vbd")?);
    let gone = || Failure::Api("HANDLE_INVALID".into(), vec!["VDI".into(), vdi.clone()]);
    let record = view.record("VDI", &vdi)?.ok_or_else(gone)?;
    let shown =
        ["uuid", "name-label", "sr-uuid", "sharable", "read-only", "managed", "missing", "storage-lock"];
    session.print_records(&[view.cells(disks, &vdi, &record, &|column| shown.contains(&column.name))?])?;
    let (mut active, mut idle) = (Vec::new(), Vec::new());
    let vbds = record.get("VBDs").and_then(Value::as_array).cloned().unwrap_or_default();
    for vbd in vbds.iter().filter_map(Value::as_str) {
        let Some(record) = view.record("VBD", vbd)? else { continue };
        let shown = ["uuid", "vm-uuid", "vm-name-label", "device", "userdevice", "mode"];
        let cells = view.cells(drives, vbd, &record, &|column| shown.contains(&column.name))?;
        let attached = record.get("currently_attached").and_then(Value::as_bool) == Some(true);
        if attached { &mut active } else { &mut idle }.push(cells);
    }
    for (title, drives) in [("Active VBDs:", active), ("Inactive VBDs:", idle)] {
        if !session.arguments.minimal && !session.arguments.json {
            print(&format!("{title}\n"))?;
        }
        session.print_records(&drives)?;
    }
    Ok(())
}
