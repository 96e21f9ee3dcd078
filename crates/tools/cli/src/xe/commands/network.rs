//! Networks and network interfaces, in the shape that clients read.

use serde_json::{Value, json};

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "network-create",
        &["name-label"],
        &["name-description", "MTU", "bridge"],
        "Makes a network; 'bridge' names the bridge that the hosts have for it (ip link add NAME type bridge), without \
         which its VIFs have no link",
        create,
    ),
    command("network-destroy", &["uuid"], &[], "Forgets a network", |s| {
        let network = s.reference("network", "uuid")?;
        s.call("network.destroy", &[network.into()]).map(drop)
    }),
    command(
        "vif-create",
        &["vm-uuid", "device", "network-uuid"],
        &["mac", "mtu"],
        "Adds a network interface to a VM; 'device' is a number from 0, or autodetect; 'mac' random draws one",
        vif_create,
    ),
    command(
        "vif-plug",
        &["uuid"],
        &[],
        "Plugs a network interface into the running VM (of driver qemu): a tap in the bridge of its network",
        |s| on_vif(s, "VIF.plug"),
    ),
    command(
        "vif-move",
        &["uuid", "network-uuid"],
        &[],
        "Connects a network interface to another network; one of a guest that runs (of driver qemu) stays plugged",
        |s| {
            let (vif, network) = (s.reference("VIF", "uuid")?, s.reference("network", "network-uuid")?);
            s.long("VIF.move", &[vif.into(), network.into()]).map(drop)
        },
    ),
    command(
        "vif-unplug",
        &["uuid"],
        &["force"],
        "Unplugs a network interface from the running VM, whose guest is asked; with 'force' its network goes whatever \
         the guest does",
        |s| on_vif(s, if s.truth("force", false)? { "VIF.unplug_force" } else { "VIF.unplug" }),
    ),
    command("vif-destroy", &["uuid"], &[], "Removes a network interface from a VM", |s| {
        let vif = s.reference("VIF", "uuid")?;
        s.call("VIF.destroy", &[vif.into()]).map(drop)
    }),
];

fn on_vif(session: &Session, method: &str) -> Result<()> {
    let vif = session.reference("VIF", "uuid")?;
    session.long(method, &[vif.into()]).map(drop)
}

fn number(session: &Session, name: &str, otherwise: i64) -> Result<i64> {
    session.arguments.get(name).map_or(Ok(otherwise), |text| crate::xe::size::bytes(name, text))
}

fn create(session: &Session) -> Result<()> {
    let record = json!({
        "name_label": session.need("name-label")?,
        "name_description": session.or("name-description", ""),
        "MTU": number(session, "MTU", 1500)?,
        "bridge": session.or("bridge", ""),
        "other_config": {},
    });
    let network = session.text("network.create", &[record])?;
    session.print_uuid("network", &network)
}

fn vif_create(session: &Session) -> Result<()> {
    let vm = session.reference("VM", "vm-uuid")?;
    let network = session.reference("network", "network-uuid")?;
    let mtu = session.call("network.get_MTU", &[network.as_str().into()])?.as_i64().unwrap_or(1500);
    let device = match session.need("device")? {
        "autodetect" => {
            let free = session.call("VM.get_allowed_VIF_devices", &[vm.as_str().into()])?;
            let first = free.as_array().and_then(|free| free.first()).and_then(Value::as_str);
            first
                .map(str::to_owned)
                .ok_or_else(|| Failure::other("the VM has no position for another interface"))?
        }
        device => device.to_owned(),
    };
    let record = json!({
        "VM": vm,
        "network": network,
        "device": device,
        "MAC": session.or("mac", ""),
        "MTU": number(session, "mtu", mtu)?,
        "other_config": {},
    });
    let vif = session.text("VIF.create", &[record])?;
    session.print_uuid("VIF", &vif)
}
