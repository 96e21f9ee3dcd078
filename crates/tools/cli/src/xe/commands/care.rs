//! Care of SRs and disks: what moves, how images lie, how they are made anew.

use serde_json::{Value, json};

use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::printer::Cell;
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vdi-pool-migrate",
        &["uuid", "sr-uuid"],
        &["dest-img-format"],
        "Moves a VDI with its snapshots to another SR, also while a VM uses it; prints its new UUID",
        pool_migrate,
    ),
    command(
        "sr-evacuate",
        &["uuid", "destination-sr-uuid"],
        &[],
        "Moves all VDIs of an SR to another one, also while VMs use them; tells what stays, and why",
        evacuate,
    ),
    command(
        "vdi-convert",
        &["uuid", "allocation"],
        &[],
        "Makes a VDI thin (VHD) or thick (raw, all space taken), also while a VM uses it; prints its new UUID",
        convert,
    ),
    command(
        "vdi-fragmentation",
        &["uuid"],
        &[],
        "Shows how the image of a VDI lies on its storage",
        fragmentation,
    ),
    command(
        "vdi-defragment",
        &["uuid"],
        &[],
        "Makes the images of a VDI anew with their blocks in order, also while a VM uses it; prints its new UUID",
        defragment,
    ),
];

fn pool_migrate(session: &Session) -> Result<()> {
    let (vdi, sr) = (session.reference("VDI", "uuid")?, session.reference("SR", "sr-uuid")?);
    let options = match session.arguments.get("dest-img-format") {
        Some(format) => json!({ "dest-img-format": format }),
        None => json!({}),
    };
    let moved = session.long("VDI.pool_migrate", &[Value::from(vdi), sr.into(), options])?;
    session.print_uuid("VDI", &moved)
}

fn evacuate(session: &Session) -> Result<()> {
    let (from, to) = (session.reference("SR", "uuid")?, session.reference("SR", "destination-sr-uuid")?);
    session.long("SR.evacuate", &[from.into(), to.into()]).map(drop)
}

fn convert(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let made = session.long("VDI.convert", &[vdi.into(), session.need("allocation")?.into()])?;
    session.print_uuid("VDI", &made)
}

fn defragment(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let made = session.long("VDI.defragment", &[vdi.into()])?;
    session.print_uuid("VDI", &made)
}

/// Sizes are bytes; the share is of the places at which the next block could follow the one before and does not.
fn fragmentation(session: &Session) -> Result<()> {
    let vdi = session.reference("VDI", "uuid")?;
    let found = session.call("VDI.get_fragmentation", &[vdi.as_str().into()])?;
    let number =
        |name: &str| found.get(name).and_then(Value::as_str).and_then(|text| text.parse::<u64>().ok());
    let mut cells = vec![cell("uuid", session.need("uuid")?.into())];
    for name in ["block-size", "blocks", "runs", "runs-in-order", "file-size", "file-extents"] {
        cells.push(cell(name, number(name).map_or_else(|| json!("unknown"), |number| json!(number))));
    }
    let counts = (number("blocks"), number("runs"), number("runs-in-order"));
    cells.push(cell("out-of-order", json!(share(counts))));
    session.print_records(&[cells])
}

/// The share of blocks that do not follow the one before although they could.
fn share(counts: (Option<u64>, Option<u64>, Option<u64>)) -> String {
    let (Some(blocks), Some(runs), Some(least)) = counts else { return "unknown".to_owned() };
    let (extra, could) = (runs.saturating_sub(least), blocks.saturating_sub(least));
    if could == 0 { "0.0 %".to_owned() } else { format!("{:.1} %", extra as f64 * 100.0 / could as f64) }
}

fn cell(name: &str, value: Value) -> Cell {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Cell { name: name.to_owned(), qualifier: " ( RO)", text, value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_counts_what_could_follow_and_does_not() {
        assert_eq!(share((Some(100), Some(100), Some(1))), "100.0 %");
        assert_eq!(share((Some(101), Some(51), Some(1))), "50.0 %");
        assert_eq!(share((Some(10), Some(10), Some(10))), "0.0 %", "each block is alone on the disk");
        assert_eq!(share((None, Some(1), Some(1))), "unknown");
    }
}
