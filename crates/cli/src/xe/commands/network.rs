//! Networks and network interfaces, in the shape that clients read.

use serde_json::json;

use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command("network-create", &["name-label"], &["name-description", "MTU"], "Makes a network", create),
    command("network-destroy", &["uuid"], &[], "Forgets a network", |s| {
        let network = s.reference("network", "uuid")?;
        s.call("network.destroy", &[network.into()]).map(drop)
    }),
    command(
        "vif-create",
        &["vm-uuid", "device", "network-uuid"],
        &["mac", "mtu"],
        "Gives a machine a network interface",
        vif_create,
    ),
    command("vif-destroy", &["uuid"], &[], "Takes a network interface from a machine", |s| {
        let vif = s.reference("VIF", "uuid")?;
        s.call("VIF.destroy", &[vif.into()]).map(drop)
    }),
];

fn number(session: &Session, name: &str, otherwise: i64) -> Result<i64> {
    session.arguments.get(name).map_or(Ok(otherwise), |text| crate::xe::size::bytes(name, text))
}

fn create(session: &Session) -> Result<()> {
    let record = json!({
        "name_label": session.need("name-label")?,
        "name_description": session.or("name-description", ""),
        "MTU": number(session, "MTU", 1500)?,
        "other_config": {},
    });
    let network = session.text("network.create", &[record])?;
    session.print_uuid("network", &network)
}

fn vif_create(session: &Session) -> Result<()> {
    let mac = session.or("mac", "");
    let record = json!({
        "VM": session.reference("VM", "vm-uuid")?,
        "network": session.reference("network", "network-uuid")?,
        "device": session.need("device")?,
        "MAC": if mac == "random" { "" } else { mac },
        "MTU": number(session, "mtu", 1500)?,
        "other_config": {},
    });
    let vif = session.text("VIF.create", &[record])?;
    session.print_uuid("VIF", &vif)
}
