//! Groups of VMs: those that start and end together, those that are placed by a rule, and those that are snapshotted by
//! a plan.

use super::row::*;
use crate::table::{Class, ClassKind, Enum, Role, Type};

const APPLIANCE_OPERATION: Type = Type::Enum(&Enum {
    name: "vm_appliance_operation",
    words: &["start", "clean_shutdown", "hard_shutdown", "shutdown"],
});

/// The class `VM_appliance`.
pub static APPLIANCE_CLASS: Class = Class {
    name: "VM_appliance",
    doc: "VMs that start and end together, in the order that each of them has (VM.order)",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        runtime("allowed_operations", Type::Set(&APPLIANCE_OPERATION), "What can be done with it"),
        current_operations(&APPLIANCE_OPERATION),
        runtime("VMs", VMS, "Its VMs").inverse("VM", "appliance"),
    ],
    messages: &[
        msg(
            "start",
            Role::PoolOperator,
            "Starts its halted VMs: those of the least VM.order first and beside each other, the next ones after \
             VM.start_delay; a VM that does not start keeps those behind it from starting",
        )
        .takes(&[p("self", VM_APPLIANCE), opt("paused", BOOL)])
        .fails(&FAILS),
        msg(
            "clean_shutdown",
            Role::PoolOperator,
            "Ends its running VMs by their guests: those of the greatest VM.order first, the next ones after \
             VM.shutdown_delay",
        )
        .takes(&[p("self", VM_APPLIANCE)])
        .fails(&FAILS),
        msg("hard_shutdown", Role::PoolOperator, "Ends its running VMs at once, in the same order")
            .takes(&[p("self", VM_APPLIANCE)])
            .fails(&FAILS),
        msg(
            "shutdown",
            Role::PoolOperator,
            "Ends its running VMs by their guests, by force where they do not end in time; in the same order",
        )
        .takes(&[p("self", VM_APPLIANCE)])
        .fails(&FAILS),
        msg(
            "recover",
            Role::ReadOnly,
            "In a session of VDI.open_database: makes it and its VMs as they are there, as VM.recover does",
        )
        .takes(&[p("self", VM_APPLIANCE), p("session_to", SESSION), p("force", BOOL)])
        .fails(&["VM_REQUIRES_SR", "VDI_LOCATION_MISSING", "VM_TO_IMPORT_IS_NOT_NEWER_VERSION"]),
        msg("assert_can_be_recovered", Role::ReadOnly, "Fails where recover would, as far as SRs go")
            .takes(&[p("self", VM_APPLIANCE), p("session_to", SESSION)])
            .fails(&["VM_REQUIRES_SR"]),
        msg(
            "get_SRs_required_for_recovery",
            Role::ReadOnly,
            "SRs of its VMs' disks, in the database that was opened",
        )
        .takes(&[p("self", VM_APPLIANCE), p("session_to", SESSION)])
        .gives(Type::Set(&SR)),
    ],
    constructor: Some(Role::PoolOperator),
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

const FAILS: [&str; 3] = ["OPERATION_PARTIALLY_FAILED", "OTHER_OPERATION_IN_PROGRESS", "TASK_CANCELLED"];

const PLACEMENT: Type = Type::Enum(&Enum { name: "placement_policy", words: &["anti_affinity", "normal"] });

/// The class `VM_group`.
pub static VM_GROUP_CLASS: Class = Class {
    name: "VM_group",
    doc: "VMs that are placed on hosts by a common rule",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        creator(
            "placement",
            PLACEMENT,
            "anti_affinity: a VM goes to the host that runs the fewest of the group, if it can; normal: no rule",
        )
        .or_text("normal"),
        runtime("VMs", VMS, "Its VMs").inverse("VM", "groups"),
    ],
    messages: &[],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

const KIND: Type =
    Type::Enum(&Enum { name: "vmss_type", words: &["snapshot", "checkpoint", "snapshot_with_quiesce"] });
const FREQUENCY: Type = Type::Enum(&Enum { name: "vmss_frequency", words: &["hourly", "daily", "weekly"] });

/// The class `VMSS`.
pub static VMSS_CLASS: Class = Class {
    name: "VMSS",
    doc: "A plan of snapshots: when those of its VMs are taken, and how many of each VM are kept",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people; snapshots have it in their names"),
        writable("name_description", STRING, "What it is, for people"),
        writable("enabled", BOOL, "Whether snapshots are taken by it").or_bool(true),
        writable(
            "type",
            KIND,
            "Snapshots as of a power cut, with the memory of VMs that run, or while their agents hold the guests still",
        )
        .required(),
        writable("retained_snapshots", INT, "How many of a VM are kept, 1 to 10: older ones are destroyed")
            .or_int(7),
        writable("frequency", FREQUENCY, "How often").required(),
        writable(
            "schedule",
            STRING_MAP,
            "When, by the host's local time: 'min' 0, 15, 30 or 45; 'hour' 0 to 23 (daily, weekly); 'days' as \
             'Monday,Friday' (weekly). What is left away is 0 and Monday",
        ),
        runtime("last_run_time", DATE_TIME, "When it last took snapshots"),
        runtime("counts_from", DATE_TIME, "What was due before is past for it (Tapio's own)"),
        runtime("VMs", VMS, "Its VMs").inverse("VM", "snapshot_schedule"),
    ],
    messages: &[
        msg(
            "snapshot_now",
            Role::PoolOperator,
            "Takes a snapshot of each of its VMs now and removes those that are too many; says what was done",
        )
        .takes(&[p("vmss", VMSS)])
        .gives(STRING)
        .fails(&["OPERATION_PARTIALLY_FAILED", "OTHER_OPERATION_IN_PROGRESS"]),
        msg("get_alerts", Role::PoolOperator, "Messages about it of so many hours up to now")
            .takes(&[p("vmss", VMSS), p("hours_from_now", INT)])
            .gives(STRING_SET)
            .sync(),
    ],
    constructor: Some(Role::PoolOperator),
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
