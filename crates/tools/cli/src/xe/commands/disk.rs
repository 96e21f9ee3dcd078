//! Virtual disks.

use serde_json::{Value, json};

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vdi-create",
        &["sr-uuid", "name-label", "virtual-size"],
        &[
            "name-description",
            "type",
            "sharable",
            "read-only",
            "sm-config:",
            "other-config:",
            "xenstore-data:",
            "tags",
        ],
        "Makes a VDI; sizes as 10GiB",
        create,
    ),
    command(
        "vdi-introduce",
        &["uuid", "sr-uuid", "type", "location"],
        &[
            "name-label",
            "name-description",
            "sharable",
            "read-only",
            "managed",
            "other-config:",
            "xenstore-data:",
            "sm-config:",
        ],
        "Makes an image known that lies in the SR already",
        introduce,
    ),
    command("vdi-destroy", &["uuid"], &[], "Destroys a VDI with its contents", |s| on_disk(s, "VDI.destroy")),
    command("vdi-forget", &["uuid"], &[], "Forgets a VDI and leaves its image", |s| on_disk(s, "VDI.forget")),
    command(
        "vdi-unlock",
        &["uuid"],
        &["force"],
        "Releases a VDI that counts as in use by VBDs or exports without a disk process; any other use is refused",
        |s| on_disk(s, "VDI.release"),
    ),
    command(
        "vdi-generate-config",
        &["host-uuid", "uuid"],
        &[],
        "Prints what attaches a VDI by way of a host where there is no toolstack: the call vdi_attach_from_config of \
         XenServer's storage manager",
        |s| {
            let (host, vdi) = (s.reference("host", "host-uuid")?, s.reference("VDI", "uuid")?);
            s.print_values(&[&s.text("VDI.generate_config", &[host.into(), vdi.into()])?])
        },
    ),
    command("vdi-update", &["uuid"], &[], "Brings a VDI up to date from its storage", |s| {
        on_disk(s, "VDI.update")
    }),
    command("vdi-resize", &["uuid", "disk-size"], &["online"], "Makes a VDI longer", resize),
    command("vdi-enable-cbt", &["uuid"], &[], "Tracks changed blocks of a VDI from now on", |s| {
        on_disk(s, "VDI.enable_cbt")
    }),
    command("vdi-disable-cbt", &["uuid"], &[], "Tracks changed blocks of a VDI no longer", |s| {
        on_disk(s, "VDI.disable_cbt")
    }),
    command(
        "vdi-data-destroy",
        &["uuid"],
        &[],
        "Removes the data of a snapshot and keeps what is known of its changed blocks",
        |s| on_disk(s, "VDI.data_destroy"),
    ),
    command(
        "vdi-list-changed-blocks",
        &["vdi-from-uuid", "vdi-to-uuid"],
        &[],
        "Prints which blocks of 64 KiB changed from a VDI to a later one, in base64",
        list_changed_blocks,
    ),
    command(
        "vdi-snapshot",
        &["uuid"],
        &["driver-params-"],
        "Keeps the contents of now as a new, read-only VDI",
        snapshot,
    ),
    command(
        "vdi-clone",
        &["uuid"],
        &["driver-params-", "new-name-label", "new-name-description"],
        "Makes a new VDI that shares what is the same",
        clone,
    ),
    command(
        "vdi-copy",
        &["uuid"],
        &["sr-uuid", "base-vdi-uuid", "into-vdi-uuid"],
        "Copies the contents, or what the base does not have, into a new VDI or an existing one",
        copy,
    ),
];

fn on_disk(session: &Session, method: &str) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    session.long(method, &[vdi.into()]).map(drop)
}

/// The type of a disk as people or the toolstack write it.
fn disk_type(text: &str) -> String {
    text.to_ascii_lowercase().replace([' ', '-'], "_")
}

fn tags(session: &Session) -> Value {
    let tags = session.or("tags", "").split(',').map(str::trim).filter(|tag| !tag.is_empty());
    Value::Array(tags.map(Value::from).collect())
}

fn create(session: &Session) -> Result<()> {
    let record = json!({
        "name_label": session.need("name-label")?,
        "name_description": session.or("name-description", ""),
        "SR": session.reference("SR", "sr-uuid")?,
        "virtual_size": session.size("virtual-size")?,
        "type": disk_type(session.or("type", "user")),
        "sharable": session.truth("sharable", false)?,
        "read_only": session.truth("read-only", false)?,
        "other_config": session.map("other-config"),
        "xenstore_data": session.map("xenstore-data"),
        "sm_config": session.map("sm-config"),
        "tags": tags(session),
    });
    let vdi = session.long("VDI.create", &[record])?;
    session.print_uuid("VDI", &vdi)
}

fn introduce(session: &Session) -> Result<()> {
    let params = [
        session.need("uuid")?.into(),
        session.or("name-label", "").into(),
        session.or("name-description", "").into(),
        session.reference("SR", "sr-uuid")?.into(),
        disk_type(session.need("type")?).into(),
        session.truth("sharable", false)?.into(),
        session.truth("read-only", false)?.into(),
        session.map("other-config"),
        session.need("location")?.into(),
        session.map("xenstore-data"),
        session.map("sm-config"),
        session.truth("managed", true)?.into(),
    ];
    let vdi = session.long("VDI.introduce", &params)?;
    session.print_uuid("VDI", &vdi)
}

fn resize(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let size = session.size("disk-size")?;
    let method = if session.truth("online", false)? { "VDI.resize_online" } else { "VDI.resize" };
    session.long(method, &[vdi.into(), size.into()]).map(drop)
}

fn snapshot(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let made = session.long("VDI.snapshot", &[vdi.into(), session.map("driver-params")])?;
    session.print_uuid("VDI", &made)
}

fn clone(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let made = session.long("VDI.clone", &[vdi.into(), session.map("driver-params")])?;
    if let Some(name) = session.arguments.get("new-name-label") {
        session.call("VDI.set_name_label", &[made.as_str().into(), name.into()])?;
    }
    if let Some(text) = session.arguments.get("new-name-description") {
        session.call("VDI.set_name_description", &[made.as_str().into(), text.into()])?;
    }
    session.print_uuid("VDI", &made)
}

fn list_changed_blocks(session: &Session) -> Result<()> {
    let vdis = [session.reference("VDI", "vdi-from-uuid")?, session.reference("VDI", "vdi-to-uuid")?];
    let listed = session.text("VDI.list_changed_blocks", &vdis.map(Value::from))?;
    session.print_values(&[&listed])
}

fn copy(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    if session.arguments.get("sr-uuid").is_none() && session.arguments.get("into-vdi-uuid").is_none() {
        return Err(Failure::Missing("sr-uuid or into-vdi-uuid".into()));
    }
    let params = [
        vdi.into(),
        session.optional("SR", "sr-uuid")?.into(),
        session.optional("VDI", "base-vdi-uuid")?.into(),
        session.optional("VDI", "into-vdi-uuid")?.into(),
    ];
    let made = session.long("VDI.copy", &params)?;
    session.print_uuid("VDI", &made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_they_are_printed() {
        assert_eq!(disk_type("User"), "user");
        assert_eq!(disk_type("HA statefile"), "ha_statefile");
        assert_eq!(disk_type("redo-log"), "redo_log");
    }
}
