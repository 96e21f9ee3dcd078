//! Care of SRs and disks: what moves.

use serde_json::{Value, json};

use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[command(
    "vdi-pool-migrate",
    &["uuid", "sr-uuid"],
    &["dest-img-format"],
    "Moves a VDI with its snapshots to another SR, also while a VM uses it; prints its new UUID",
    pool_migrate,
)];

fn pool_migrate(session: &Session) -> Result<()> {
    let (vdi, sr) = (session.reference("VDI", "uuid")?, session.reference("SR", "sr-uuid")?);
    let options = match session.arguments.get("dest-img-format") {
        Some(format) => json!({ "dest-img-format": format }),
        None => json!({}),
    };
    let moved = session.long("VDI.pool_migrate", &[Value::from(vdi), sr.into(), options])?;
    session.print_uuid("VDI", &moved)
}
