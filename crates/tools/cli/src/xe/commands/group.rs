//! VMs that start and end together, VMs that are placed by a rule, and plans of snapshots.

use serde_json::{Value, json};

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[
    command(
        "appliance-create",
        &["name-label"],
        &["name-description"],
        "Makes an appliance: VMs that start and end together, in the order that each has. A VM is put into it by \
         vm-param-set appliance=UUID order=NUMBER start-delay=SECONDS",
        |s| {
            let appliance = s.text("VM_appliance.create", &[named(s)?.into()])?;
            s.print_uuid("VM_appliance", &appliance)
        },
    ),
    command("appliance-destroy", &["uuid"], &[], "Forgets an appliance; its VMs stay", |s| {
        let appliance = s.reference("VM_appliance", "uuid")?;
        s.long("VM_appliance.destroy", &[appliance.into()]).map(drop)
    }),
    command(
        "appliance-start",
        &["uuid"],
        &["paused"],
        "Starts the VMs of an appliance that are halted: the least order first",
        |s| {
            let appliance = s.reference("VM_appliance", "uuid")?;
            s.long("VM_appliance.start", &[appliance.into(), s.truth("paused", false)?.into()]).map(drop)
        },
    ),
    command(
        "appliance-shutdown",
        &["uuid"],
        &["force"],
        "Ends the VMs of an appliance that run: the greatest order first; --force does not ask their guests",
        |s| {
            let appliance = s.reference("VM_appliance", "uuid")?;
            let how = if s.truth("force", false)? { "hard_shutdown" } else { "clean_shutdown" };
            s.long(&format!("VM_appliance.{how}"), &[appliance.into()]).map(drop)
        },
    ),
    command(
        "vm-group-create",
        &["name-label", "placement"],
        &["name-description"],
        "Makes a group of VMs: placement anti_affinity has each VM start, and go when its host is evacuated or dies, on \
         the host that runs the fewest of the group; normal is no rule. A VM is put into it by vm-param-set \
         groups=UUID, and taken out by groups=",
        |s| {
            let mut record = named(s)?;
            record.insert("placement".into(), s.need("placement")?.replace('-', "_").into());
            let group = s.text("VM_group.create", &[record.into()])?;
            s.print_uuid("VM_group", &group)
        },
    ),
    command("vm-group-destroy", &["uuid"], &[], "Forgets a group of VMs; its VMs stay", |s| {
        let group = s.reference("VM_group", "uuid")?;
        s.long("VM_group.destroy", &[group.into()]).map(drop)
    }),
    command(
        "vmss-create",
        &["name-label", "type", "frequency"],
        &["name-description", "enabled", "schedule:", "retained-snapshots"],
        "Makes a plan of snapshots: type snapshot, checkpoint or snapshot_with_quiesce; frequency hourly, daily or \
         weekly; schedule:min=0|15|30|45, schedule:hour=0 to 23, schedule:days=Monday,Friday, by the host's local \
         time. It keeps retained-snapshots (7) of each VM, and destroys older ones. A VM is put into it by \
         vm-param-set snapshot-schedule=UUID",
        plan,
    ),
    command(
        "vmss-destroy",
        &["uuid"],
        &[],
        "Forgets a plan of snapshots; the snapshots that it took stay",
        |s| {
            let plan = s.reference("VMSS", "uuid")?;
            s.long("VMSS.destroy", &[plan.into()]).map(drop)
        },
    ),
    command(
        "vmss-run",
        &["uuid"],
        &[],
        "Takes the snapshots of a plan now, beside its times, and prints what was done (Tapio's own)",
        |s| {
            let plan = s.reference("VMSS", "uuid")?;
            print(&format!("{}\n", s.long("VMSS.snapshot_now", &[plan.into()])?))
        },
    ),
];

/// What every kind of group has.
fn named(session: &Session) -> Result<serde_json::Map<String, Value>> {
    let mut record = serde_json::Map::new();
    record.insert("name_label".into(), session.need("name-label")?.into());
    record.insert("name_description".into(), session.or("name-description", "").into());
    Ok(record)
}

fn plan(session: &Session) -> Result<()> {
    let mut record = named(session)?;
    record.insert("type".into(), session.need("type")?.into());
    record.insert("frequency".into(), session.need("frequency")?.into());
    record.insert("enabled".into(), json!(session.truth("enabled", true)?));
    record.insert("schedule".into(), session.map("schedule"));
    let retained = session.or("retained-snapshots", "7");
    let wrong = |_| Failure::other(format!("retained-snapshots: '{retained}' is no number of snapshots"));
    record.insert("retained_snapshots".into(), json!(retained.parse::<i64>().map_err(wrong)?));
    let plan = session.text("VMSS.create", &[record.into()])?;
    session.print_uuid("VMSS", &plan)
}
