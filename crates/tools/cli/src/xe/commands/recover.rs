//! Copies of the database on SRs, and VMs that come back from them.

use serde_json::Value;

use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::generic::{DATABASE, in_database};
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "sr-enable-database-replication",
        &["uuid"],
        &[],
        "Writes the database to a VDI of the SR (vdi-list type=Metadata), and again some seconds after each change: \
         another host that gets the SR can bring VMs back from it (vm-recover). It holds secrets, such as passwords of \
         storages",
        |session| on_sr(session, "SR.enable_database_replication"),
    ),
    command(
        "sr-disable-database-replication",
        &["uuid"],
        &[],
        "Removes the VDI with the database from the SR",
        |session| on_sr(session, "SR.disable_database_replication"),
    ),
    command(
        "vm-recover",
        &["uuid"],
        &["database:", "force"],
        "Makes a VM as it is in a database on an SR (database:vdi-uuid=VDI; vm-list database:vdi-uuid=VDI lists them), \
         with its disks here; --force replaces a VM that is not older. It must not run anywhere else",
        |session| recover(session, "VM"),
    ),
    command(
        "vm-assert-can-be-recovered",
        &["uuid"],
        &["database:"],
        "Fails if an SR is not attached that a VM of a database on an SR needs",
        |session| check(session, "VM"),
    ),
    command(
        "appliance-recover",
        &["uuid"],
        &["database:", "force"],
        "Makes an appliance with its VMs as they are in a database on an SR (database:vdi-uuid=VDI), as vm-recover does",
        |session| recover(session, "VM_appliance"),
    ),
    command(
        "appliance-assert-can-be-recovered",
        &["uuid"],
        &["database:"],
        "Fails if an SR is not attached that a VM of an appliance needs",
        |session| check(session, "VM_appliance"),
    ),
];

fn on_sr(session: &Session, method: &str) -> Result<()> {
    let sr = session.reference("SR", "uuid")?;
    session.long(method, &[sr.into()]).map(drop)
}

/// Calls a message of an object of the database, with our session as its second parameter.
fn there(session: &Session, class: &str, message: &str, more: &[Value]) -> Result<()> {
    in_database(session, session.need(DATABASE)?, |client| {
        let object = client.call(&format!("{class}.get_by_uuid"), &[session.need("uuid")?.into()])?;
        let mut params = vec![object, session.client.session().into()];
        params.extend_from_slice(more);
        client.call(&format!("{class}.{message}"), &params).map(drop)
    })
}

fn recover(session: &Session, class: &str) -> Result<()> {
    there(session, class, "recover", &[session.truth("force", false)?.into()])
}

fn check(session: &Session, class: &str) -> Result<()> {
    there(session, class, "assert_can_be_recovered", &[])
}
