//! VMs that move: to another SR, to another host of the pool, to another pool.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::select::machines;
use super::{Command, command};
use crate::xe::arguments::Connection;
use crate::xe::client::Client;
use crate::xe::error::{Failure, Result};
use crate::xe::objects::find;
use crate::xe::session::{Session, object};

const OPTIONAL: &[&str] = &[
    "vm",
    "uuid",
    "host",
    "host-uuid",
    "live",
    "force",
    "compress",
    "copy",
    "remote-master",
    "remote-username",
    "remote-password",
    "remote-password-file",
    "remote-fingerprint",
    "remote-network",
    "destination-sr-uuid",
    "vdi:",
    "vif:",
    "rate",
    "timeout",
];

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vm-migrate",
        &[],
        OPTIONAL,
        "Moves a VM with its disks, snapshots and checkpoints to another pool (remote-master), to another host, or its \
         disks to other SRs; vdi:UUID=SR and vif:UUID=NETWORK map what goes where, --copy leaves the VM and prints the \
         UUID of the new one",
        migrate,
    ),
    command(
        "host-motions",
        &[],
        &["host-uuid", "host"],
        "Prints the motions of VMs that a host knows of, in both directions, and how far each is",
        motions,
    ),
    command(
        "host-motion-end",
        &["motion", "outcome"],
        &[],
        "Ends a motion to this host whose sender is gone for good: outcome=commit makes the VM here, outcome=abort \
         removes what came. The sender must never come back with the VM",
        end,
    ),
];

/// The names of parameters that choose no VM.
const OWN: &[&str] = &[
    "host",
    "host-uuid",
    "live",
    "force",
    "compress",
    "copy",
    "remote-master",
    "remote-username",
    "remote-password",
    "remote-password-file",
    "remote-fingerprint",
    "remote-network",
    "destination-sr-uuid",
    "vdi",
    "vif",
    "rate",
    "timeout",
];

fn motions(session: &Session) -> Result<()> {
    let host = super::select::host(session)?;
    let told = session.call("host.get_motions", &[host.into()])?;
    let lines = told.as_object().into_iter().flatten();
    let lines: Vec<String> =
        lines.map(|(motion, how)| format!("{motion}: {}", how.as_str().unwrap_or_default())).collect();
    session.print_values(&lines.iter().map(String::as_str).collect::<Vec<_>>())
}

fn end(session: &Session) -> Result<()> {
    let outcome = session.need("outcome")?;
    if !matches!(outcome, "commit" | "abort") {
        return Err(Failure::other(format!("outcome is commit or abort, not '{outcome}'")));
    }
    let params = [session.need("motion")?.into(), outcome.into(), json!({})];
    session.long("host.receive_motion", &params).map(drop)
}

fn migrate(session: &Session) -> Result<()> {
    // By its UUID a template is found too.
    let chosen = match session.arguments.get("uuid") {
        Some(uuid) => vec![session.by_uuid("VM", uuid)?],
        None => machines(session, OWN)?,
    };
    let [vm] = chosen.as_slice() else {
        return Err(Failure::other(format!("{} VMs are chosen; one moves at a time", chosen.len())));
    };
    match session.arguments.get("remote-master") {
        Some(_) => to_pool(session, vm),
        None => within(session, vm),
    }
}

fn text(value: &Value, name: &str) -> String {
    value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn options(session: &Session) -> Result<BTreeMap<String, String>> {
    let mut options = BTreeMap::new();
    for name in ["force", "copy", "compress"] {
        if session.arguments.get(name).is_some() {
            options.insert(name.to_owned(), session.truth(name, false)?.to_string());
        }
    }
    if session.arguments.get("rate").is_some() {
        options.insert("rate".to_owned(), session.size("rate")?.to_string());
    }
    if let Some(timeout) = session.arguments.get("timeout") {
        options.insert("timeout".to_owned(), timeout.to_owned());
    }
    Ok(options)
}

/// The disks of a VM: reference and UUID.
fn disks(session: &Session, vm: &str) -> Result<Vec<(String, String)>> {
    let vbds = session.call("VM.get_VBDs", &[vm.into()])?;
    let mut disks = Vec::new();
    for vbd in vbds.as_array().into_iter().flatten() {
        let record = session.call("VBD.get_record", std::slice::from_ref(vbd))?;
        let is_empty = record.get("empty").and_then(Value::as_bool) == Some(true);
        if text(&record, "type") == "CD" || is_empty {
            continue;
        }
        let vdi = text(&record, "VDI");
        let uuid = session.text("VDI.get_uuid", &[vdi.as_str().into()])?;
        disks.push((vdi, uuid));
    }
    Ok(disks)
}

/// The SRs that disks are mapped to, by the references of the disks. `client` knows the SRs.
fn vdi_map(
    session: &Session,
    vm: &str,
    client: &Client,
    otherwise: impl Fn(&str) -> Result<String>,
) -> Result<BTreeMap<String, String>> {
    let mut named = session.arguments.map("vdi");
    let mut map = BTreeMap::new();
    for (vdi, uuid) in disks(session, vm)? {
        let sr = match named.remove(&uuid) {
            Some(sr) => find(client, "SR", &sr)?,
            None => otherwise(&vdi)?,
        };
        map.insert(vdi, sr);
    }
    // Disks of snapshots, and memory.
    for (uuid, sr) in named {
        map.insert(session.by_uuid("VDI", &uuid)?, find(client, "SR", &sr)?);
    }
    Ok(map)
}

/// Within the pool: to another host, or to other SRs of the same one.
fn within(session: &Session, vm: &str) -> Result<()> {
    let host = match (session.arguments.get("host-uuid"), session.arguments.get("host")) {
        (None, None) => session.text("VM.get_resident_on", &[vm.into()])?,
        _ => super::select::host(session)?,
    };
    let host = if host == tapio_model::NULL_REF { super::select::host(session)? } else { host };
    let sr = session.arguments.get("destination-sr-uuid");
    if sr.is_none() && session.arguments.map("vdi").is_empty() {
        let params = [vm.into(), host.into(), object(&options(session)?)];
        return session.long("VM.pool_migrate", &params).map(drop);
    }
    let map = vdi_map(session, vm, &session.client, |vdi| match sr {
        Some(sr) => find(&session.client, "SR", sr),
        None => session.text("VDI.get_SR", &[vdi.into()]),
    })?;
    let dest = json!({ "host": host });
    let params = [vm.into(), dest, json!(true), object(&map), json!({}), object(&options(session)?)];
    session.long("VM.migrate_send", &params).map(drop)
}

/// A login at the pool that receives.
fn remote(session: &Session) -> Result<Client> {
    let given = |name: &str| session.arguments.get(name).map(str::to_owned);
    let connection = Connection {
        server: given("remote-master"),
        user: given("remote-username"),
        password: given("remote-password"),
        password_file: given("remote-password-file").map(Into::into),
        fingerprint: given("remote-fingerprint"),
        quiet: session.client.is_quiet(),
        ..Connection::default()
    };
    Client::connect(&connection)
}

fn first(value: &Value) -> Option<String> {
    value.as_array()?.first()?.as_str().map(str::to_owned)
}

fn to_pool(session: &Session, vm: &str) -> Result<()> {
    let client = remote(session)?;
    let sent = send(session, vm, &client);
    client.end();
    sent
}

fn send(session: &Session, vm: &str, client: &Client) -> Result<()> {
    let call = |method: &str, params: &[Value]| client.call(method, params);
    let host = match session.arguments.get("host").or_else(|| session.arguments.get("host-uuid")) {
        Some(host) => find(client, "host", host)?,
        None => {
            let pool = first(&call("pool.get_all", &[])?);
            let pool = pool.ok_or_else(|| Failure::other("the other toolstack has no pool"))?;
            call("pool.get_master", &[pool.into()])?.as_str().unwrap_or_default().to_owned()
        }
    };
    let network = match session.arguments.get("remote-network") {
        Some(network) => find(client, "network", network)?,
        None => tapio_model::NULL_REF.to_owned(),
    };
    let own = super::select::host_of_pool(session)?;
    let print = session.text("host.get_fingerprint", &[own.into()])?;
    let asked = [host.as_str().into(), network.into(), json!({ "source-fingerprint": print })];
    let srs = call("SR.get_all_records", &[])?;
    let sr = session.arguments.get("destination-sr-uuid").map(|sr| find(client, "SR", sr)).transpose()?;
    let roomy = roomy(client, &host, &srs)?;
    let vdis = vdi_map(session, vm, client, |_| {
        let none = || {
            Failure::other("the other host has no SR for disks: name one by destination-sr-uuid or vdi:UUID")
        };
        sr.clone().or_else(|| roomy.clone()).ok_or_else(none)
    })?;
    let vifs = vif_map(session, vm, client)?;
    let (live, options) = (session.truth("live", true)?, options(session)?);
    let dest = call("host.migrate_receive", &asked)?;
    let params = [vm.into(), dest, json!(live), object(&vdis), object(&vifs), object(&options)];
    let there = session.long("VM.migrate_send", &params)?;
    if options.get("copy").is_some_and(|copy| copy == "true") {
        let uuid = call("VM.get_uuid", &[there.into()])?;
        return session.print_values(&[uuid.as_str().unwrap_or_default()]);
    }
    Ok(())
}

/// The SR of a host with most room: a shared one if there is one.
fn roomy(client: &Client, host: &str, srs: &Value) -> Result<Option<String>> {
    let pbds = client.call("PBD.get_all_records", &[])?;
    let attached = pbds.as_object().into_iter().flatten().filter(|(_, pbd)| {
        text(pbd, "host") == host && pbd.get("currently_attached").and_then(Value::as_bool) == Some(true)
    });
    let number = |sr: &Value, name: &str| match sr.get(name) {
        Some(Value::String(text)) => text.parse::<i64>().unwrap_or_default(),
        Some(number) => number.as_i64().unwrap_or_default(),
        None => 0,
    };
    let known = attached.filter_map(|(_, pbd)| {
        let reference = text(pbd, "SR");
        let sr = srs.get(&reference)?;
        let able = sr.get("allowed_operations").and_then(Value::as_array)?;
        let can = able.iter().any(|word| word.as_str() == Some("vdi_create"));
        let is_shared = sr.get("shared").and_then(Value::as_bool) == Some(true);
        let free = number(sr, "physical_size") - number(sr, "physical_utilisation");
        (can && text(sr, "content_type") != "iso").then_some((is_shared, free, reference))
    });
    Ok(known.max().map(|(_, _, reference)| reference))
}

/// The networks of VIFs: as they are named, or those of the same name.
fn vif_map(session: &Session, vm: &str, client: &Client) -> Result<BTreeMap<String, String>> {
    let named = session.arguments.map("vif");
    let mut map = BTreeMap::new();
    let vifs = session.call("VM.get_VIFs", &[vm.into()])?;
    for vif in vifs.as_array().into_iter().flatten().filter_map(Value::as_str) {
        let record = session.call("VIF.get_record", &[vif.into()])?;
        let network = match named.get(&text(&record, "uuid")) {
            Some(network) => Some(find(client, "network", network)?),
            None => {
                let name = session.text("network.get_name_label", &[text(&record, "network").into()])?;
                let found = client.call("network.get_by_name_label", &[name.into()])?;
                first(&found)
            }
        };
        if let Some(network) = network {
            map.insert(vif.to_owned(), network);
        }
    }
    Ok(map)
}
