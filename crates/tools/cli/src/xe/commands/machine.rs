//! VMs, templates and snapshots.

pub(super) mod disks;

use std::io::{BufRead, IsTerminal, Write};

use serde_json::{Value, json};

use super::select::{drives, each, machines, machines_and_host, of_table};
use super::{Command, command, drive};
use crate::xe::error::{Failure, Result};
use crate::xe::objects::find;
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vm-install",
        &["new-name-label"],
        &["template", "template-uuid", "sr-uuid", "new-name-description"],
        "Makes a VM from a template; its disks go to the SR that is given, or as the template says",
        install,
    ),
    command(
        "vm-create",
        &["name-label"],
        &["name-description", "memory", "VCPUs"],
        "Makes an empty VM",
        create,
    ),
    command("vm-start", &[], &["vm", "multiple", "on", "paused", "force"], "Starts VMs", |s| {
        begin(s, "VM.start")
    }),
    command(
        "vm-shutdown",
        &[],
        &["vm", "multiple", "force"],
        "Asks guests to shut down; --force switches VMs off",
        |s| power(s, "VM.clean_shutdown", "VM.hard_shutdown"),
    ),
    command(
        "vm-reboot",
        &[],
        &["vm", "multiple", "force"],
        "Asks guests to reboot; --force switches VMs off and on",
        |s| power(s, "VM.clean_reboot", "VM.hard_reboot"),
    ),
    command("vm-pause", &[], &["vm", "multiple"], "Stops the processors of VMs", |s| {
        power(s, "VM.pause", "VM.pause")
    }),
    command("vm-unpause", &[], &["vm", "multiple"], "Lets the processors of VMs go on", |s| {
        power(s, "VM.unpause", "VM.unpause")
    }),
    command(
        "vm-suspend",
        &[],
        &["vm", "multiple"],
        "Writes the memory of VMs to their suspend SR and ends them",
        |s| power(s, "VM.suspend", "VM.suspend"),
    ),
    command(
        "vm-resume",
        &[],
        &["vm", "multiple", "on", "paused", "force"],
        "Lets suspended VMs go on from their memory",
        |s| begin(s, "VM.resume"),
    ),
    command(
        "vm-restart-device-models",
        &[],
        &["vm", "multiple"],
        "Gives running VMs new emulators on the same host: each is suspended and goes on at once, with its memory and disks",
        |s| power(s, "VM.restart_device_models", "VM.restart_device_models"),
    ),
    command(
        "vm-checkpoint",
        &["new-name-label"],
        &["vm", "new-name-description"],
        "Keeps the contents of its disks, its settings and its memory",
        |s| like(s, "vm", "VM.checkpoint"),
    ),
    command(
        "vm-reset-powerstate",
        &["force"],
        &["vm", "multiple"],
        "Sets the power state of VMs to halted, whatever it was",
        |s| power(s, "VM.power_state_reset", "VM.power_state_reset"),
    ),
    command(
        "vm-clone",
        &["new-name-label"],
        &["vm", "new-name-description"],
        "Makes a VM like it, whose disks share what is the same",
        |s| like(s, "vm", "VM.clone"),
    ),
    command(
        "vm-copy",
        &["new-name-label"],
        &["vm", "sr-uuid", "new-name-description"],
        "Makes a VM like it, with copies of its disks",
        |s| like(s, "vm", "VM.copy"),
    ),
    command(
        "vm-snapshot",
        &["new-name-label"],
        &["vm", "new-name-description", "ignore-vdi-uuids"],
        "Keeps the contents of its disks and its settings",
        snapshot,
    ),
    command(
        "vm-snapshot-with-quiesce",
        &["new-name-label"],
        &["vm", "new-name-description"],
        "The same while the guest's agent holds the file systems still",
        |s| like(s, "vm", "VM.snapshot_with_quiesce"),
    ),
    command(
        "vm-call-plugin",
        &["vm-uuid", "plugin", "fn"],
        &["args:"],
        "Asks the guest's agent: 'guest-agent-operation' 'trim' discards what its file systems do not use, 'disk-stats' \
         prints what it has counted of its disks",
        call_plugin,
    ),
    command("vm-destroy", &["uuid"], &[], "Removes a VM and leaves its disks", |s| destroy(s, "uuid")),
    command("vm-uninstall", &[], &["vm", "multiple", "force"], "Destroys VMs with their disks", |s| {
        let chosen = machines(s, &["force"])?;
        uninstall(s, &chosen)
    }),
    command("vm-memory-set", &["memory"], &["vm", "multiple"], "Sets the memory of VMs", |s| {
        memory(s, "VM.set_memory", &["memory"])
    }),
    command(
        "vm-memory-limits-set",
        &["static-min", "static-max", "dynamic-min", "dynamic-max"],
        &["vm", "multiple"],
        "Sets the limits of memory of VMs",
        |s| memory(s, "VM.set_memory_limits", &["static-min", "static-max", "dynamic-min", "dynamic-max"]),
    ),
    command(
        "vm-memory-static-range-set",
        &["min", "max"],
        &["vm", "multiple"],
        "Sets the limits of memory while halted",
        |s| memory(s, "VM.set_memory_static_range", &["min", "max"]),
    ),
    command(
        "vm-memory-dynamic-range-set",
        &["min", "max"],
        &["vm", "multiple"],
        "Sets the limits of memory while running; a guest that runs is told to have 'max', at most its memory-static-max",
        |s| memory(s, "VM.set_memory_dynamic_range", &["min", "max"]),
    ),
    command(
        "vm-vcpu-hotplug",
        &["new-vcpus"],
        &["vm", "multiple"],
        "Gives VMs that run more processors: as many as 'new-vcpus', at most VCPUs-max, which is set while they are \
         halted. The guest's kernel takes them; if it leaves them offline: echo 1 \
         >/sys/devices/system/cpu/cpuN/online. None is taken away while a VM runs. VMs of driver qemu",
        vcpus,
    ),
    command(
        "vm-compute-memory-overhead",
        &[],
        &["vm", "multiple"],
        "Prints the memory that VMs take beside their guests' memory",
        overhead,
    ),
    command(
        "vm-disk-list",
        &[],
        &["vm", "multiple", "vbd-params", "vdi-params"],
        "Lists the disks of VMs",
        |s| disks::list(s, "Disk"),
    ),
    command(
        "vm-cd-list",
        &[],
        &["vm", "multiple", "vbd-params", "vdi-params"],
        "Lists the CD drives of VMs",
        |s| disks::list(s, "CD"),
    ),
    command(
        "vm-disk-add",
        &["disk-size", "device"],
        &["vm", "sr-uuid"],
        "Makes a disk and attaches it to a VM",
        disks::add,
    ),
    command(
        "vm-disk-remove",
        &["device"],
        &["vm"],
        "Detaches a disk from a VM and destroys it",
        disks::remove,
    ),
    command(
        "vm-cd-add",
        &["cd-name", "device"],
        &["vm"],
        "Attaches a CD drive with a medium to a VM",
        disks::cd_add,
    ),
    command(
        "vm-cd-remove",
        &["cd-name"],
        &["vm"],
        "Detaches the drive with this medium from a VM",
        disks::cd_remove,
    ),
    command("vm-cd-eject", &[], &["vm"], "Takes the medium out of the only CD drive", disks::cd_eject),
    command(
        "vm-cd-insert",
        &["cd-name"],
        &["vm"],
        "Puts a medium into the only empty CD drive",
        disks::cd_insert,
    ),
    command("cd-list", &[], &["params", "FIELD"], "Lists media for CD drives", disks::cds),
    command(
        "template-uninstall",
        &["template-uuid"],
        &["force"],
        "Destroys a template with its disks",
        |s| {
            let template = s.reference("VM", "template-uuid")?;
            uninstall(s, &[template])
        },
    ),
    command(
        "snapshot-revert",
        &["snapshot-uuid"],
        &[],
        "Takes a VM back to its snapshot: disks, VIFs and settings; the VM is halted then, or suspended if the snapshot \
         has memory",
        |s| {
            let snapshot = s.reference("VM", "snapshot-uuid")?;
            s.long("VM.revert", &[snapshot.into()]).map(drop)
        },
    ),
    command("snapshot-destroy", &["uuid"], &[], "Forgets a snapshot and leaves its disks", |s| {
        destroy(s, "uuid")
    }),
    command("snapshot-uninstall", &["uuid"], &["force"], "Destroys a snapshot with its disks", |s| {
        let snapshot = s.reference("VM", "uuid")?;
        uninstall(s, &[snapshot])
    }),
    command(
        "snapshot-clone",
        &["uuid", "new-name-label"],
        &["new-name-description"],
        "Makes a template from a snapshot",
        |s| like(s, "snapshot", "VM.clone"),
    ),
    command(
        "snapshot-copy",
        &["uuid", "new-name-label"],
        &["sr-uuid", "new-name-description"],
        "Makes a template from a snapshot, with copies of its disks",
        |s| like(s, "snapshot", "VM.copy"),
    ),
];

/// Parameters of commands that name the new VM.
const NEW: [&str; 3] = ["new-name-label", "new-name-description", "sr-uuid"];

fn one(mut found: Vec<String>) -> Result<String> {
    match (found.pop(), found.len()) {
        (Some(only), 0) => Ok(only),
        (_, more) => {
            Err(Failure::other(format!("{} VMs match, and this is done to one at a time", more + 1)))
        }
    }
}

fn named(session: &Session, vm: &str) -> Result<()> {
    match session.arguments.get("new-name-description") {
        Some(text) => session.call("VM.set_name_description", &[vm.into(), text.into()]).map(drop),
        None => Ok(()),
    }
}

fn create(session: &Session) -> Result<()> {
    let memory = match session.arguments.get("memory") {
        Some(_) => session.size("memory")?,
        None => 256 << 20,
    };
    let cpus = session.or("VCPUs", "1");
    let cpus: i64 =
        cpus.parse().map_err(|_| Failure::other(format!("VCPUs: '{cpus}' is no number of processors")))?;
    let record = json!({
        "name_label": session.need("name-label")?,
        "name_description": session.or("name-description", ""),
        "memory_static_min": memory,
        "memory_static_max": memory,
        "memory_dynamic_min": memory,
        "memory_dynamic_max": memory,
        "VCPUs_max": cpus,
        "VCPUs_at_startup": cpus,
    });
    let vm = session.text("VM.create", &[record])?;
    session.print_uuid("VM", &vm)
}

fn install(session: &Session) -> Result<()> {
    let template = match (session.arguments.get("template-uuid"), session.arguments.get("template")) {
        (Some(uuid), _) => session.by_uuid("VM", uuid)?,
        (None, Some(name)) => find(&session.client, "VM", name)?,
        (None, None) => return Err(Failure::Missing("template".into())),
    };
    let sr = session.arguments.get("sr-uuid");
    if let Some(uuid) = sr {
        // A wrong one is found before anything is made.
        session.by_uuid("SR", uuid)?;
    }
    let vm = session.long("VM.clone", &[template.into(), session.need("new-name-label")?.into()])?;
    let finish = || -> Result<()> {
        named(session, &vm)?;
        if let Some(uuid) = sr {
            placed(session, &vm, uuid)?;
        }
        session.long("VM.provision", &[vm.as_str().into()])?;
        let is_template = session.call("VM.get_is_a_template", &[vm.as_str().into()])?;
        if is_template == Value::Bool(true) {
            session.call("VM.set_is_a_template", &[vm.as_str().into(), false.into()])?;
        }
        Ok(())
    };
    if let Err(error) = finish() {
        // Nothing is left of it; what matters is why.
        let _ = session.long("VM.destroy", &[vm.as_str().into()]);
        return Err(error);
    }
    session.print_uuid("VM", &vm)
}

/// Lets the disks that the template asks for be made in this SR.
fn placed(session: &Session, vm: &str, sr: &str) -> Result<()> {
    let config = session.call("VM.get_other_config", &[vm.into()])?;
    let Some(disks) = config.get("disks").and_then(Value::as_str) else { return Ok(()) };
    session.call("VM.remove_from_other_config", &[vm.into(), "disks".into()])?;
    let params = [vm.into(), "disks".into(), with_sr(disks, sr).into()];
    session.call("VM.add_to_other_config", &params).map(drop)
}

/// The list of disks with this SR for each.
fn with_sr(disks: &str, sr: &str) -> String {
    let mut text = String::new();
    let mut rest = disks;
    while let Some((before, after)) = rest.split_once(" sr=") {
        let quote = after.chars().next().unwrap_or('"');
        let end = after.get(1..).and_then(|inner| inner.find(quote)).map_or(after.len(), |at| at + 2);
        text.push_str(&format!("{before} sr=\"{sr}\""));
        rest = &after[end..];
    }
    text + rest
}

/// Starts or resumes VMs.
fn begin(session: &Session, method: &str) -> Result<()> {
    let chosen = machines(session, &["on", "paused", "force"])?;
    let (paused, force) = (session.truth("paused", false)?, session.truth("force", false)?);
    let on = session.arguments.get("on").map(|host| find(&session.client, "host", host)).transpose()?;
    each(&chosen, |vm| {
        let started = match &on {
            None => session.long(method, &[vm.into(), paused.into(), force.into()]),
            Some(host) => session.long(
                &format!("{method}_on"),
                &[vm.into(), host.as_str().into(), paused.into(), force.into()],
            ),
        };
        started.map(drop)
    })
}

fn power(session: &Session, asked: &str, forced: &str) -> Result<()> {
    let chosen = machines(session, &["force"])?;
    let method = if session.truth("force", false)? { forced } else { asked };
    each(&chosen, |vm| session.long(method, &[vm.into()]).map(drop))
}

fn like(session: &Session, table: &str, method: &str) -> Result<()> {
    let vm = one(of_table(session, table, &NEW)?)?;
    let mut params: Vec<Value> = vec![vm.into(), session.need("new-name-label")?.into()];
    if method == "VM.copy" {
        params.push(session.optional("SR", "sr-uuid")?.into());
    }
    let made = session.long(method, &params)?;
    named(session, &made)?;
    session.print_uuid("VM", &made)
}

fn snapshot(session: &Session) -> Result<()> {
    let own = ["new-name-label", "new-name-description", "ignore-vdi-uuids"];
    let vm = one(machines(session, &own)?)?;
    let ignored = session.or("ignore-vdi-uuids", "");
    let ignored = ignored.split(',').map(str::trim).filter(|uuid| !uuid.is_empty());
    let ignored: Vec<String> = ignored.map(|uuid| session.by_uuid("VDI", uuid)).collect::<Result<_>>()?;
    let params = [vm.into(), session.need("new-name-label")?.into(), json!(ignored)];
    let made = session.long("VM.snapshot", &params)?;
    named(session, &made)?;
    session.print_uuid("VM", &made)
}

fn call_plugin(session: &Session) -> Result<()> {
    let vm = session.by_uuid("VM", session.need("vm-uuid")?)?;
    let (plugin, name) = (session.need("plugin")?, session.need("fn")?);
    let params = [vm.into(), plugin.into(), name.into(), session.map("args")];
    let said = session.long("VM.call_plugin", &params)?;
    session.print_values(&[&said])
}

fn destroy(session: &Session, param: &str) -> Result<()> {
    let vm = session.reference("VM", param)?;
    session.long("VM.destroy", &[vm.into()]).map(drop)
}

fn uninstall(session: &Session, chosen: &[String]) -> Result<()> {
    let mut disks = Vec::new();
    let mut told = String::from("The following items are about to be destroyed\n");
    let title = |session: &Session, class: &str, reference: &str| -> Result<String> {
        let record = session.call(&format!("{class}.get_record"), &[reference.into()])?;
        let field = |name: &str| record.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(format!("{class:<3}: {} ({})\n", field("uuid"), field("name_label")))
    };
    for vm in chosen {
        told.push_str(&title(session, "VM", vm)?);
        for (_, record) in drives(session, vm, "Disk")?.into_values() {
            // A disk that was attached to the VM by `vbd-create` was there before it, and stays.
            if record.get("other_config").and_then(|config| config.get(drive::OWNER)).is_none() {
                continue;
            }
            let vdi = record.get("VDI").and_then(Value::as_str).unwrap_or(tapio_model::NULL_REF);
            let shared = |field: &str| -> Result<bool> {
                Ok(session.call(&format!("VDI.get_{field}"), &[vdi.into()])? == Value::Bool(true))
            };
            if vdi != tapio_model::NULL_REF && !shared("sharable")? && !shared("read_only")? {
                told.push_str(&title(session, "VDI", vdi)?);
                disks.push(vdi.to_owned());
            }
        }
    }
    if !session.truth("force", false)? && !is_confirmed(&told)? {
        return Err(Failure::other("nothing was destroyed; --force does not ask"));
    }
    for vm in chosen {
        let is_snapshot = session.call("VM.get_is_a_snapshot", &[vm.as_str().into()])? == Value::Bool(true);
        if !is_snapshot && session.text("VM.get_power_state", &[vm.as_str().into()])? != "Halted" {
            session.long("VM.hard_shutdown", &[vm.as_str().into()])?;
        }
        session.long("VM.destroy", &[vm.as_str().into()])?;
    }
    for disk in &disks {
        session.long("VDI.destroy", &[disk.as_str().into()])?;
    }
    print("All objects destroyed\n")
}

fn is_confirmed(told: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::other("standard input is no terminal, so there is no question; give --force"));
    }
    print(&format!("{told}Type 'yes' to continue\n"))?;
    // A prompt that stays in a buffer is none.
    let _ = std::io::stdout().flush();
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    Ok(read.is_ok() && answer.trim() == "yes")
}

fn memory(session: &Session, method: &str, sizes: &[&str]) -> Result<()> {
    let chosen = machines(session, sizes)?;
    let sizes: Vec<i64> = sizes.iter().map(|name| session.size(name)).collect::<Result<_>>()?;
    each(&chosen, |vm| {
        let mut params = vec![Value::from(vm)];
        params.extend(sizes.iter().map(|size| Value::from(*size)));
        session.call(method, &params).map(drop)
    })
}

fn vcpus(session: &Session) -> Result<()> {
    let text = session.need("new-vcpus")?;
    let wrong = |_| Failure::other(format!("new-vcpus: '{text}' is no number of processors"));
    let count: i64 = text.parse().map_err(wrong)?;
    each(&machines(session, &["new-vcpus"])?, |vm| {
        session.long("VM.set_VCPUs_number_live", &[vm.into(), count.into()]).map(drop)
    })
}

fn overhead(session: &Session) -> Result<()> {
    let chosen = machines_and_host(session, &[])?;
    let bytes: Vec<String> = chosen
        .iter()
        .map(|vm| Ok(session.call("VM.compute_memory_overhead", &[vm.as_str().into()])?.to_string()))
        .collect::<Result<_>>()?;
    session.print_values(&bytes.iter().map(String::as_str).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_of_templates_are_placed() {
        let disks = r#"<provision><disk device="0" size="1" sr="" bootable="true"/><disk sr='x' device="1"/></provision>"#;
        assert_eq!(
            with_sr(disks, "S"),
            r#"<provision><disk device="0" size="1" sr="S" bootable="true"/><disk sr="S" device="1"/></provision>"#
        );
        assert_eq!(with_sr("<provision/>", "S"), "<provision/>");
        assert_eq!(with_sr("<disk sr=", "S"), "<disk sr=\"S\"");
    }
}
