//! Hosts, tasks, messages, secrets, accounts.

use serde_json::{Value, json};

use super::select::{host, pool};
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[
    command("host-enable", &[], &["host-uuid", "host"], "Lets VMs start on a host", |s| {
        on_host(s, "host.enable")
    }),
    command(
        "host-sm-dp-destroy",
        &["uuid", "dp"],
        &["allow-leak"],
        "Ends a datapath without a disk process; 'dp' is the UUID of its VBD or export. One in use is refused",
        |s| {
            let host = s.reference("host", "uuid")?;
            let leak = s.truth("allow-leak", false)?;
            s.long("host.sm_dp_destroy", &[host.into(), s.need("dp")?.into(), leak.into()]).map(drop)
        },
    ),
    command("host-disable", &[], &["host-uuid", "host"], "Lets no more VMs start on a host", |s| {
        on_host(s, "host.disable")
    }),
    command(
        "host-evacuate",
        &[],
        &["host-uuid", "host", "network-uuid", "batch-size"],
        "Moves all VMs of a host to others of its pool, batch-size at a time (10); guests that no host takes are asked to end",
        evacuate,
    ),
    command(
        "host-shutdown",
        &[],
        &["host-uuid", "host"],
        "Ends all VMs of a host that is disabled, and shuts it down",
        |s| on_host(s, "host.shutdown"),
    ),
    command(
        "host-reboot",
        &[],
        &["host-uuid", "host"],
        "Ends all VMs of a host that is disabled, and reboots it",
        |s| on_host(s, "host.reboot"),
    ),
    command(
        "host-get-vms-which-prevent-evacuation",
        &["uuid"],
        &[],
        "Lists the VMs that no other host could take now, or, on a host that is alone, that could not be asked to end",
        preventing,
    ),
    command(
        "host-get-sm-diagnostics",
        &["uuid"],
        &[],
        "Lists the disks that VMs of a host hold: VDI, SR, VM, device, mode",
        held_disks,
    ),
    command(
        "host-dmesg",
        &["uuid"],
        &[],
        "Prints the newest messages of a host's kernel (Linux; there may be no hypervisor below it)",
        |s| {
            let host = s.reference("host", "uuid")?;
            print(&s.long("host.dmesg", &[host.into()])?)
        },
    ),
    command(
        "host-get-system-status",
        &["filename"],
        &[],
        "Writes what support needs to know of this host to a new archive, without secrets: 'tapio bugreport'",
        system_status,
    ),
    command(
        "host-worker-pool",
        &[],
        &["host-uuid", "host", "vms", "set"],
        "Advises how many disks a host had better plug at a time, for so many VMs that start or end at a time (4); \
         set=true sets it",
        worker_pool,
    ),
    command(
        "host-call-plugin",
        &["host-uuid", "plugin", "fn"],
        &["args:"],
        "Calls a function that products know as a plugin's: 'trim' 'do_trim', 'coalesce-leaf' 'leaf-coalesce'",
        call_plugin,
    ),
    command(
        "host-compute-free-memory",
        &[],
        &["host-uuid", "host"],
        "Prints the memory that VMs could have",
        free_memory,
    ),
    command("task-cancel", &["uuid"], &[], "Asks a task to stop", |s| {
        let task = s.reference("task", "uuid")?;
        s.call("task.cancel", &[task.into()]).map(drop)
    }),
    command("task-destroy", &["uuid"], &[], "Forgets a task", |s| {
        let task = s.reference("task", "uuid")?;
        s.call("task.destroy", &[task.into()]).map(drop)
    }),
    command(
        "message-create",
        &["name", "priority", "body"],
        &["vm-uuid", "sr-uuid", "vdi-uuid", "host-uuid", "pool-uuid"],
        "Tells the administrator something about an object; the pool unless one is given",
        message_create,
    ),
    command("message-destroy", &["uuids"], &[], "Forgets messages; UUIDs with commas", message_destroy),
    command(
        "secret-create",
        &["value"],
        &["other-config:"],
        "Keeps a secret, which others then name by its UUID",
        secret_create,
    ),
    command("secret-destroy", &["uuid"], &[], "Forgets a secret", |s| {
        let secret = s.reference("secret", "uuid")?;
        s.call("secret.destroy", &[secret.into()]).map(drop)
    }),
    command(
        "user-password-change",
        &["old", "new"],
        &[],
        "Changes the password of the account that is logged in",
        |s| s.call("session.change_password", &[s.need("old")?.into(), s.need("new")?.into()]).map(drop),
    ),
];

fn on_host(session: &Session, method: &str) -> Result<()> {
    let host = host(session)?;
    session.long(method, &[host.into()]).map(drop)
}

fn preventing(session: &Session) -> Result<()> {
    let host = session.reference("host", "uuid")?;
    let found = session.call("host.get_vms_which_prevent_evacuation", &[host.into()])?;
    let mut lines = Vec::new();
    for (vm, error) in found.as_object().into_iter().flatten() {
        let words: Vec<&str> = error.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let uuid = session.text("VM.get_uuid", &[vm.as_str().into()])?;
        // Parameters that name the VM itself say nothing new.
        let words: Vec<&str> = words.into_iter().filter(|word| word != vm).collect();
        lines.push(format!("{uuid}: {}", words.join(", ")));
    }
    lines.sort();
    session.print_values(&lines.iter().map(String::as_str).collect::<Vec<_>>())
}

fn held_disks(session: &Session) -> Result<()> {
    let host = session.reference("host", "uuid")?;
    let all = |class: &str| session.call(&format!("{class}.get_all_records"), &[]);
    let (vms, vdis, srs) = (all("VM")?, all("VDI")?, all("SR")?);
    let mut lines = Vec::new();
    for vbd in all("VBD")?.as_object().into_iter().flatten().map(|(_, vbd)| vbd) {
        let of = |records: &Value, reference: &Value| records[reference.as_str().unwrap_or_default()].clone();
        let (vm, vdi) = (of(&vms, &vbd["VM"]), of(&vdis, &vbd["VDI"]));
        if vbd["currently_attached"] != true || vm["resident_on"] != host.as_str() || vdi.is_null() {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let sr = of(&srs, &vdi["SR"]);
        lines.push(format!(
            "{} of SR {}: VM {} ({}), device {}, {}",
            text(&vdi["uuid"]),
            text(&sr["uuid"]),
            text(&vm["uuid"]),
            text(&vm["name_label"]),
            text(&vbd["userdevice"]),
            text(&vbd["mode"])
        ));
    }
    lines.sort();
    session.print_values(&lines.iter().map(String::as_str).collect::<Vec<_>>())
}

fn system_status(session: &Session) -> Result<()> {
    let path = std::path::PathBuf::from(session.need("filename")?);
    let socket = session.client.socket().ok_or_else(|| {
        Failure::other("files of another host are not sent: run 'tapio bugreport' there, as root")
    })?;
    crate::bugreport::archive_of_host(path, socket)
}

fn evacuate(session: &Session) -> Result<()> {
    let network = match session.arguments.get("network-uuid") {
        Some(_) => session.reference("network", "network-uuid")?,
        None => "OpaqueRef:NULL".to_owned(),
    };
    let size = session.arguments.get("batch-size").unwrap_or("0");
    let size: u32 =
        size.parse().map_err(|_| Failure::other(format!("batch-size: '{size}' is no number of VMs")))?;
    let params = [host(session)?.into(), network.into(), size.to_string().into()];
    session.long("host.evacuate", &params).map(drop)
}

fn worker_pool(session: &Session) -> Result<()> {
    let vms = session.arguments.get("vms").unwrap_or("0");
    let vms: u32 = vms.parse().map_err(|_| Failure::other(format!("vms: '{vms}' is no number of VMs")))?;
    let host = host(session)?;
    let advice = session.call("host.advise_worker_pool", &[host.clone().into(), vms.to_string().into()])?;
    let of = |key: &str| advice[key].as_str().unwrap_or_default().to_owned();
    let lines = [
        "worker-pool-size",
        "advised",
        "vms-at-a-time",
        "disks-per-vm",
        "bytes-per-plug",
        "bytes-of-advised",
    ];
    let width = lines.iter().map(|key| key.len()).max().unwrap_or(0);
    let shown: Vec<String> = lines.iter().map(|key| format!("{key:>width$}: {}", of(key))).collect();
    session.print_values(&shown.iter().map(String::as_str).collect::<Vec<_>>())?;
    if session.arguments.get("set") == Some("true") {
        const KEY: &str = "worker-pool-size";
        session.call("host.remove_from_other_config", &[host.clone().into(), KEY.into()])?;
        session.call("host.add_to_other_config", &[host.into(), KEY.into(), of("advised").into()])?;
    }
    Ok(())
}

fn call_plugin(session: &Session) -> Result<()> {
    let (plugin, name) = (session.need("plugin")?, session.need("fn")?);
    let params = [host(session)?.into(), plugin.into(), name.into(), session.map("args")];
    let said = session.long("host.call_plugin", &params)?;
    session.print_values(&[&said])
}

fn free_memory(session: &Session) -> Result<()> {
    let bytes = session.call("host.compute_free_memory", &[host(session)?.into()])?;
    session.print_values(&[&bytes.to_string()])
}

fn message_create(session: &Session) -> Result<()> {
    let kinds = [
        ("vm-uuid", "VM"),
        ("sr-uuid", "SR"),
        ("vdi-uuid", "VDI"),
        ("host-uuid", "Host"),
        ("pool-uuid", "Pool"),
    ];
    let given =
        kinds.iter().find_map(|(param, class)| Some((*class, session.arguments.get(param)?.to_owned())));
    let (class, uuid) = match given {
        Some(given) => given,
        None => ("Pool", session.text("pool.get_uuid", &[pool(session)?.into()])?),
    };
    let priority = session.need("priority")?;
    let priority: i64 = priority
        .parse()
        .map_err(|_| Failure::other(format!("priority: '{priority}' is no number from 1 to 5")))?;
    let params: [Value; 5] = [
        session.need("name")?.into(),
        priority.into(),
        class.into(),
        uuid.into(),
        session.need("body")?.into(),
    ];
    let message = session.text("message.create", &params)?;
    session.print_uuid("message", &message)
}

fn message_destroy(session: &Session) -> Result<()> {
    let uuids = session.need("uuids")?.split(',').map(str::trim).filter(|uuid| !uuid.is_empty());
    let messages: Vec<String> = uuids.map(|uuid| session.by_uuid("message", uuid)).collect::<Result<_>>()?;
    session.call("message.destroy_many", &[json!(messages)]).map(drop)
}

fn secret_create(session: &Session) -> Result<()> {
    let record = json!({"value": session.need("value")?, "other_config": session.map("other-config")});
    let secret = session.text("secret.create", &[record])?;
    session.print_uuid("secret", &secret)
}
