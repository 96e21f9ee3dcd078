//! What is known of VMs, snapshots, hosts and the pool, beyond their fields.

use serde_json::{Value, json};
use tapio_model::columns::{Table, table};

use super::machine::disks;
use super::select::{host, machines, machines_and_host, pool};
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::generic::chosen;
use crate::xe::objects::{Reach, View};
use crate::xe::printer::Cell;
use crate::xe::session::{Session, print};
use crate::xe::size;

pub(super) static COMMANDS: &[Command] = &[
    command("vm-vif-list", &[], &["vm", "multiple", "params"], "Lists the network interfaces of VMs", vifs),
    command("vm-crashdump-list", &[], &["vm", "multiple"], "Lists the crash dumps of VMs", crashdumps),
    command(
        "vm-is-bios-customized",
        &[],
        &["vm", "multiple"],
        "Says whether the firmware of VMs shows texts of their own",
        is_bios_customized,
    ),
    command(
        "vm-copy-bios-strings",
        &["host-uuid"],
        &["vm", "multiple"],
        "Has the firmware of halted VMs show the texts of a host's (maker, product, serial numbers), for software that is \
         bound to them; once only for each VM",
        copy_bios_strings,
    ),
    command(
        "vm-memory-shadow-multiplier-set",
        &["multiplier"],
        &["vm", "multiple"],
        "Sets the memory for shadow page tables of VMs, as a factor of at least 1; no driver here needs any",
        shadow_multiplier,
    ),
    command(
        "vm-compute-maximum-memory",
        &["total"],
        &["vm", "multiple", "approximate"],
        "Prints the most memory that VMs can have if each may take 'total' in all",
        maximum_memory,
    ),
    command(
        "vm-memory-target-set",
        &["target"],
        &["vm", "multiple"],
        "Sets both limits of memory while running to one size; a guest that runs is told to have as much, and \
         vm-memory-target-wait waits until it has",
        |s| memory_target(s, "target"),
    ),
    command("vm-memory-balloon", &["target"], &["vm", "multiple"], "The same as vm-memory-target-set", |s| {
        memory_target(s, "target")
    }),
    command(
        "vm-memory-target-wait",
        &[],
        &["vm", "multiple"],
        "Waits until guests that run have the memory that they shall have (memory-dynamic-max), to 1 MiB; fails after \
         256 s, as with a guest without a balloon driver. It can be cancelled (task-cancel)",
        |s| {
            super::select::each(&super::select::machines(s, &[])?, |vm| {
                s.long("VM.wait_memory_target_live", &[vm.into()]).map(drop)
            })
        },
    ),
    command(
        "snapshot-disk-list",
        &[],
        &["uuid", "snapshot-uuid", "vbd-params", "vdi-params"],
        "Lists the disks of a snapshot",
        snapshot_disks,
    ),
    command(
        "snapshot-reset-powerstate",
        &["uuid"],
        &["force"],
        "Sets the power state of a snapshot to halted, whatever it was",
        |s| {
            let snapshot = s.reference("VM", "uuid")?;
            if !s.truth("force", false)? {
                return Err(Failure::other(
                    "it is done with --force alone: what it was is not known after it",
                ));
            }
            s.long("VM.power_state_reset", &[snapshot.into()]).map(drop)
        },
    ),
    command(
        "diagnostic-vm-status",
        &["uuid"],
        &[],
        "Shows a VM, whether its disks can be attached, and which hosts it could start on",
        vm_status,
    ),
    command("host-cpu-info", &[], &["uuid"], "Shows the processors of a host", |s| {
        cpu_info(s, "host", &|_| true)
    }),
    command("host-get-cpu-features", &[], &["uuid"], "Shows the features of a host's processors", |s| {
        cpu_info(s, "host", &|key| key.starts_with("features") || key == "flags")
    }),
    command("pool-get-cpu-features", &[], &["uuid"], "Shows the features that all hosts have", |s| {
        cpu_info(s, "pool", &|key| key.starts_with("features") || key == "flags")
    }),
    command(
        "host-compute-memory-overhead",
        &[],
        &["host-uuid", "host"],
        "Prints the memory that VMs cannot have",
        |s| {
            let bytes = s.call("host.compute_memory_overhead", &[host(s)?.into()])?;
            s.print_values(&[&bytes.to_string()])
        },
    ),
    command(
        "host-is-in-emergency-mode",
        &[],
        &[],
        "Prints whether the host cannot reach the one that decides for the pool",
        |s| {
            let mode = s.call("host.is_in_emergency_mode", &[])?;
            s.print_values(&[&mode.to_string()])
        },
    ),
    command("pool-sync-database", &[], &[], "Returns when every change made before is durable", |s| {
        s.call("pool.sync_database", &[]).map(drop)
    }),
    command("session-subject-identifier-list", &[], &[], "Lists the accounts that are logged in", |s| {
        let all = s.call("session.get_all_subject_identifiers", &[])?;
        let record = |account: &Value| vec![cell("subject-identifier", " ( RO)", account)];
        s.print_records(&all.as_array().into_iter().flatten().map(record).collect::<Vec<_>>())
    }),
    command(
        "session-subject-identifier-logout",
        &["subject-identifier"],
        &[],
        "Ends all sessions of an account",
        |s| {
            let account = s.need("subject-identifier")?;
            s.call("session.logout_subject_identifier", &[account.into()]).map(drop)
        },
    ),
    command(
        "session-subject-identifier-logout-all",
        &[],
        &[],
        "Ends the sessions of all accounts but root's",
        |s| {
            let all = s.call("session.get_all_subject_identifiers", &[])?;
            for account in all.as_array().into_iter().flatten() {
                s.call("session.logout_subject_identifier", std::slice::from_ref(account))?;
            }
            Ok(())
        },
    ),
    command(
        "message-destroy-all",
        &[],
        &["before", "after", "priority"],
        "Forgets all messages, or those of a time or a priority; times as 20260131T12:00:00Z",
        forget_messages,
    ),
];

fn named_table(name: &str) -> Result<&'static Table> {
    table(name).ok_or_else(|| Failure::other(format!("there is no table {name}")))
}

fn cell(name: &str, qualifier: &'static str, value: &Value) -> Cell {
    let text = crate::xe::objects::text(value, tapio_model::Type::Any, "; ");
    Cell { name: name.to_owned(), qualifier, text, value: value.clone() }
}

/// The objects that a field of a VM names.
fn of_vm(session: &Session, vm: &str, field: &str) -> Result<Vec<String>> {
    let found = session.call(&format!("VM.get_{field}"), &[vm.into()])?;
    Ok(found.as_array().into_iter().flatten().filter_map(|one| Some(one.as_str()?.to_owned())).collect())
}

fn vifs(session: &Session) -> Result<()> {
    let table = named_table("vif")?;
    let params = session.or("params", "uuid,device,MAC,network-uuid,network-name-label,vm-name-label");
    let chosen = chosen(table, Some(params))?;
    let view = View::new(&session.client, Reach::Single);
    let mut records = Vec::new();
    for vm in machines(session, &["params"])? {
        for vif in of_vm(session, &vm, "VIFs")? {
            let Some(record) = view.record("VIF", &vif)? else { continue };
            records.push(view.cells(table, &vif, &record, &|column| chosen.contains(&column.name))?);
        }
    }
    session.print_records(&records)
}

fn crashdumps(session: &Session) -> Result<()> {
    let mut records = Vec::new();
    for vm in machines(session, &[])? {
        let of = session.call("VM.get_uuid", &[vm.as_str().into()])?;
        for dump in of_vm(session, &vm, "crash_dumps")? {
            let record = session.call("crashdump.get_record", &[dump.as_str().into()])?;
            let vdi = record.get("VDI").cloned().unwrap_or_default();
            let vdi = session.call("VDI.get_uuid", &[vdi])?;
            records.push(vec![
                cell("uuid", " ( RO)", &record["uuid"]),
                cell("vm-uuid", " ( RO)", &of),
                cell("vdi-uuid", " ( RO)", &vdi),
            ]);
        }
    }
    session.print_records(&records)
}

fn is_bios_customized(session: &Session) -> Result<()> {
    for vm in machines(session, &[])? {
        let texts = session.call("VM.get_bios_strings", &[vm.into()])?;
        let is_set = texts.as_object().is_some_and(|texts| !texts.is_empty());
        print(if is_set {
            "This VM is BIOS-customized.\n"
        } else {
            "The BIOS strings of this VM have not yet been set.\n"
        })?;
    }
    Ok(())
}

fn copy_bios_strings(session: &Session) -> Result<()> {
    let host = session.by_uuid("host", session.need("host-uuid")?)?;
    super::select::each(&machines(session, &["host-uuid"])?, |vm| {
        session.call("VM.copy_bios_strings", &[vm.into(), host.as_str().into()]).map(drop)
    })
}

fn shadow_multiplier(session: &Session) -> Result<()> {
    let text = session.need("multiplier")?;
    let number: f64 = text
        .parse()
        .map_err(|_| Failure::other(format!("multiplier is a number such as 1.5, not '{text}'")))?;
    super::select::each(&machines(session, &["multiplier"])?, |vm| {
        let runs = session.text("VM.get_power_state", &[vm.into()])? == "Running";
        let message = if runs { "VM.set_shadow_multiplier_live" } else { "VM.set_HVM_shadow_multiplier" };
        session.call(message, &[vm.into(), number.into()]).map(drop)
    })
}

fn maximum_memory(session: &Session) -> Result<()> {
    let total = session.size("total")?;
    let approximate = session.truth("approximate", false)?;
    for vm in machines(session, &["total", "approximate"])? {
        let most = session.call("VM.maximise_memory", &[vm.into(), total.into(), approximate.into()])?;
        session.print_values(&[&most.to_string()])?;
    }
    Ok(())
}

fn memory_target(session: &Session, param: &str) -> Result<()> {
    let target = size::bytes(param, session.need(param)?)?;
    super::select::each(&machines_and_host(session, &[param])?, |vm| {
        let params = [vm.into(), target.into(), target.into()];
        session.long("VM.set_memory_dynamic_range", &params).map(drop)
    })
}

fn snapshot_disks(session: &Session) -> Result<()> {
    let uuid = session.arguments.get("snapshot-uuid").or_else(|| session.arguments.get("uuid"));
    let uuid = uuid.ok_or_else(|| Failure::Missing("uuid".into()))?;
    let snapshot = session.by_uuid("VM", uuid)?;
    disks::list_of(session, &[snapshot], "Disk")
}

fn vm_status(session: &Session) -> Result<()> {
    let vm = session.reference("VM", "uuid")?;
    let view = View::new(&session.client, Reach::Single);
    let (vms, vbds, hosts) = (named_table("vm")?, named_table("vbd")?, named_table("host")?);
    let gone = || Failure::Api("HANDLE_INVALID".into(), vec!["VM".into(), vm.clone()]);
    let record = view.record("VM", &vm)?.ok_or_else(gone)?;
    let shown = ["uuid", "name-label", "power-state", "possible-hosts"];
    session.print_records(&[view.cells(vms, &vm, &record, &|column| shown.contains(&column.name))?])?;
    print("Checking to see whether disks are attachable\n")?;
    let shown =
        ["uuid", "userdevice", "device", "vdi-uuid", "empty", "mode", "type", "storage-lock", "attachable"];
    for vbd in of_vm(session, &vm, "VBDs")? {
        let Some(record) = view.record("VBD", &vbd)? else { continue };
        session.print_records(&[view.cells(vbds, &vbd, &record, &|column| shown.contains(&column.name))?])?;
    }
    print("Checking to see whether VM can boot on each host\n")?;
    for (host, record) in view.records("host")? {
        let shown = |name: &str| ["uuid", "name-label"].contains(&name);
        let mut cells = view.cells(hosts, &host, &record, &|column| shown(column.name))?;
        let params = [vm.as_str().into(), host.as_str().into()];
        let why = match session.call("VM.assert_can_boot_here", &params) {
            Ok(_) => "OK".to_owned(),
            Err(Failure::Api(code, _)) => code,
            Err(error) => return Err(error),
        };
        cells.push(cell("can-boot", " ( RO)", &json!(why)));
        session.print_records(&[cells])?;
    }
    Ok(())
}

fn cpu_info(session: &Session, class: &str, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    let object = match (session.arguments.get("uuid"), class) {
        (Some(uuid), _) => session.by_uuid(class, uuid)?,
        (None, "pool") => pool(session)?,
        (None, _) => host(session)?,
    };
    let info = session.call(&format!("{class}.get_cpu_info"), &[object.into()])?;
    let pairs = info.as_object().into_iter().flatten().filter(|(key, _)| wanted(key));
    session.print_records(&[pairs.map(|(key, value)| cell(key, "", value)).collect()])
}

/// The letters of a time that sort as the times do: `20260131T12:34:56Z` and `2026-01-31T12:34:56Z` are one.
fn sortable(name: &str, time: &str) -> Result<String> {
    let plain: String = time.chars().filter(|letter| !matches!(letter, '-' | ':' | 'Z')).collect();
    let is_time = plain.len() == 15
        && plain
            .bytes()
            .enumerate()
            .all(|(at, byte)| if at == 8 { byte == b'T' } else { byte.is_ascii_digit() });
    if is_time {
        return Ok(plain);
    }
    Err(Failure::other(format!("{name}: '{time}' is no time in UTC, as 20260131T12:34:56Z")))
}

fn forget_messages(session: &Session) -> Result<()> {
    let limit = |name: &str| session.arguments.get(name).map(|time| sortable(name, time)).transpose();
    let (before, after) = (limit("before")?, limit("after")?);
    let priority = session.arguments.get("priority").map(|text| {
        let wrong = |_| Failure::other(format!("priority: '{text}' is no number from 1 to 5"));
        text.parse::<i64>().map_err(wrong)
    });
    let priority = priority.transpose()?;
    let all = session.call("message.get_all_records", &[])?;
    let mut chosen = Vec::new();
    for (message, record) in all.as_object().into_iter().flatten() {
        let at = sortable("timestamp", record["timestamp"].as_str().unwrap_or_default())?;
        let is_chosen = before.as_ref().is_none_or(|limit| at < *limit)
            && after.as_ref().is_none_or(|limit| at > *limit)
            && priority.is_none_or(|wanted| record["priority"].as_i64() == Some(wanted));
        if is_chosen {
            chosen.push(message.as_str());
        }
    }
    session.call("message.destroy_many", &[json!(chosen)]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_both_spellings_are_compared() {
        let read = |time: &str| sortable("before", time);
        assert_eq!(read("20260131T12:34:56Z"), read("2026-01-31T12:34:56Z"));
        assert!(read("20260131T12:34:56Z").expect("good") < read("20260201T00:00:00Z").expect("good"));
        for bad in ["", "yesterday", "2026-01-31", "20260131 12:34:56Z"] {
            assert!(matches!(read(bad), Err(Failure::Other(text)) if text.contains("no time")), "{bad}");
        }
    }
}
