//! Virtual machines (VMs).

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, ReadOnly, VmAdmin, VmOperator, VmPowerAdmin};
use crate::table::{Class, ClassKind, Enum, Param, Role, Type};

const AFTER_EXIT: Type = Type::Enum(&Enum { name: "on_normal_exit", words: &["destroy", "restart"] });
const POWER_STATE: Type =
    Type::Enum(&Enum { name: "vm_power_state", words: &["Halted", "Paused", "Running", "Suspended"] });
const OPERATION: Type = Type::Enum(&Enum {
    name: "vm_operations",
    words: &[
        "snapshot",
        "clone",
        "copy",
        "create_template",
        "revert",
        "checkpoint",
        "snapshot_with_quiesce",
        "provision",
        "start",
        "start_on",
        "pause",
        "unpause",
        "clean_shutdown",
        "clean_reboot",
        "hard_shutdown",
        "power_state_reset",
        "hard_reboot",
        "suspend",
        "csvm",
        "resume",
        "resume_on",
        "pool_migrate",
        "migrate_send",
        "get_boot_record",
        "send_sysrq",
        "send_trigger",
        "query_services",
        "shutdown",
        "call_plugin",
        "changing_memory_live",
        "awaiting_memory_live",
        "changing_dynamic_range",
        "changing_static_range",
        "changing_memory_limits",
        "changing_shadow_memory",
        "changing_shadow_memory_live",
        "changing_VCPUs",
        "changing_VCPUs_live",
        "changing_NVRAM",
        "assert_operation_valid",
        "data_source_op",
        "update_allowed_operations",
        "make_into_template",
        "import",
        "export",
        "metadata_export",
        "reverting",
        "destroy",
        "create_vtpm",
    ],
});
const LIVE_MEMORY: [&str; 4] =
    ["MEMORY_CONSTRAINT_VIOLATION", "VM_BAD_POWER_STATE", "VM_LACKS_FEATURE", "OPERATION_NOT_ALLOWED"];
const AFTER_CRASH: Type = Type::Enum(&Enum {
    name: "on_crash_behaviour",
    words: &[
        "destroy",
        "coredump_and_destroy",
        "restart",
        "coredump_and_restart",
        "preserve",
        "rename_restart",
    ],
});
const AFTER_SOFTREBOOT: Type = Type::Enum(&Enum {
    name: "on_softreboot_behavior",
    words: &["soft_reboot", "destroy", "restart", "preserve"],
});

const MIGRATE_PARAMS: [Param; 7] = [
    p("vm", VM),
    p("dest", STRING_MAP),
    p("live", BOOL),
    opt("vdi_map", Type::Map(&VDI, &SR)),
    opt("vif_map", Type::Map(&VIF, &NETWORK)),
    opt("options", STRING_MAP),
    opt("vgpu_map", STRING_MAP),
];

const MIGRATE_ERRORS: [&str; 20] = [
    "VM_BAD_POWER_STATE",
    "VM_IS_TEMPLATE",
    "VM_IS_SNAPSHOT",
    "OPERATION_NOT_ALLOWED",
    "VDI_NOT_IN_MAP",
    "VIF_NOT_IN_MAP",
    "VDI_CBT_ENABLED",
    "VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION",
    "VDI_IS_ENCRYPTED",
    "VDI_IN_USE",
    "SR_DOES_NOT_SUPPORT_MIGRATION",
    "SUSPEND_IMAGE_NOT_ACCESSIBLE",
    "TOO_MANY_STORAGE_MIGRATES",
    "HOST_DISABLED",
    "DUPLICATE_VM",
    "DUPLICATE_MAC_SEED",
    "SR_FULL",
    "CANNOT_CONTACT_HOST",
    "VM_MIGRATE_FAILED",
    "TASK_CANCELLED",
];

/// What keeps a VM from being recovered from a database that was opened.
const RECOVER_ERRORS: &[&str] = &[
    "VM_IS_PART_OF_AN_APPLIANCE",
    "VM_REQUIRES_SR",
    "VDI_LOCATION_MISSING",
    "VM_TO_IMPORT_IS_NOT_NEWER_VERSION",
    "VM_BAD_POWER_STATE",
    "DUPLICATE_MAC_SEED",
];

/// The class `VM`.
pub static VM_CLASS: Class = Class {
    name: "VM",
    doc: "A virtual machine (VM), a template or a snapshot of one",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        creator("power_state", POWER_STATE, "Whether it runs"),
        writable("user_version", INT, "Number its creator gave it"),
        writable("is_a_template", BOOL, "Whether it is a template, from which VMs are made"),
        runtime("is_default_template", BOOL, "Whether it came with the toolstack"),
        creator("suspend_VDI", VDI, "Where its memory lies while it is suspended"),
        runtime("resident_on", HOST, "The host it runs on"),
        runtime("scheduled_to_be_resident_on", HOST, "The host it is about to run on"),
        writable("affinity", HOST, "The host it should run on").set_by(VmPowerAdmin),
        runtime("memory_overhead", INT, "Bytes of memory taken beside the guests"),
        creator("memory_target", INT, "Bytes of memory it should have now"),
        creator("memory_static_max", INT, "Most bytes of memory it can have").or_int(256 << 20),
        creator("memory_dynamic_max", INT, "Most bytes of memory while it runs").or_int(256 << 20),
        creator("memory_dynamic_min", INT, "Least bytes of memory while it runs").or_int(256 << 20),
        creator("memory_static_min", INT, "Least bytes of memory it can have"),
        writable("VCPUs_params", STRING_MAP, "Parameters of its processors"),
        creator("VCPUs_max", INT, "Most processors it can have").or_int(1),
        creator("VCPUs_at_startup", INT, "Processors it starts with").or_int(1),
        writable("actions_after_softreboot", AFTER_SOFTREBOOT, "What happens after a soft reboot"),
        writable("actions_after_shutdown", AFTER_EXIT, "What happens when the guest shuts down"),
        writable("actions_after_reboot", AFTER_EXIT, "What happens when the guest reboots")
            .or_text("restart"),
        creator("actions_after_crash", AFTER_CRASH, "What happens when the guest crashes").or_text("restart"),
        runtime("consoles", CONSOLES, "Its consoles").inverse("console", "VM"),
        runtime("VIFs", VIFS, "Virtual network interfaces").inverse("VIF", "VM"),
        runtime("VBDs", VBDS, "Its disks and drives").inverse("VBD", "VM"),
        runtime("VUSBs", VUSBS, "Its USB devices"),
        runtime("crash_dumps", CRASHDUMPS, "What it left when it crashed").inverse("crashdump", "VM"),
        runtime("VTPMs", VTPMS, "Its TPMs"),
        writable("PV_bootloader", STRING, "Program that finds its kernel"),
        writable("PV_kernel", STRING, "Kernel it boots, a file of the host in one of its `kernel-dirs`"),
        writable("PV_ramdisk", STRING, "Initial file system of that kernel"),
        writable("PV_args", STRING, "Command line of that kernel"),
        writable("PV_bootloader_args", STRING, "Arguments of the boot loader"),
        writable("PV_legacy_args", STRING, "Command line of older guests"),
        creator("HVM_boot_policy", STRING, "How it boots without a kernel of its own"),
        writable("HVM_boot_params", STRING_MAP, "From what it boots then"),
        creator("HVM_shadow_multiplier", FLOAT, "Memory for shadow page tables, as a factor").or_float(1.0),
        writable("platform", STRING_MAP, "Hardware it sees, and keys of its driver"),
        writable("PCI_bus", STRING, "PCI devices it gets"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("domid", INT, "Number of its domain; -1 when it does not run").or_int(-1),
        runtime("domarch", STRING, "Architecture it runs as"),
        creator("last_boot_CPU_flags", STRING_MAP, "Processor features it started with"),
        runtime("is_control_domain", BOOL, "Whether it is the host itself"),
        runtime("metrics", VM_METRICS, "Its measurements"),
        runtime("guest_metrics", VM_GUEST_METRICS, "What the guest tells of itself"),
        creator("last_booted_record", STRING, "What it was when it last started"),
        writable("recommendations", STRING, "Limits its maker recommends, as XML"),
        writable("xenstore_data", STRING_MAP, "What the guest reads about itself"),
        creator("ha_always_run", BOOL, "Whether it is restarted when it ends"),
        creator("ha_restart_priority", STRING, "When it is restarted after a host failed"),
        runtime("is_a_snapshot", BOOL, "Whether it is a snapshot"),
        runtime("snapshot_of", VM, "What it is a snapshot of"),
        runtime("snapshots", VMS, "Its snapshots").inverse("VM", "snapshot_of"),
        runtime("snapshot_time", DATE_TIME, "When the snapshot was taken"),
        runtime("transportable_snapshot_id", STRING, "Name of the snapshot elsewhere"),
        runtime("blobs", Type::Map(&STRING, &BLOB), "Binary blobs that belong to it"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(VmOperator),
        writable(
            "blocked_operations",
            Type::Map(&OPERATION, &STRING),
            "Operations that are refused, and the error each gives",
        ),
        runtime("snapshot_info", STRING_MAP, "How the snapshot was taken"),
        runtime("snapshot_metadata", STRING, "The VM as it was when the snapshot was taken"),
        runtime("parent", VM, "What it was made from"),
        runtime("children", VMS, "What was made from it").inverse("VM", "parent"),
        runtime("bios_strings", STRING_MAP, "Texts of the firmware"),
        creator("protection_policy", VMPP, "Kept for older clients"),
        creator("is_snapshot_from_vmpp", BOOL, "Kept for older clients"),
        creator("snapshot_schedule", VMSS, "When snapshots are taken"),
        creator("is_vmss_snapshot", BOOL, "Whether a schedule took this snapshot"),
        creator("appliance", VM_APPLIANCE, "The appliance it belongs to"),
        runtime("groups", VM_GROUPS, "The group by whose rule it is placed; there is one at most"),
        creator("start_delay", INT, "Seconds after its start before the next VM starts"),
        creator("shutdown_delay", INT, "Seconds after its end before the next VM ends"),
        creator("order", INT, "Its place when several VMs start"),
        runtime("VGPUs", VGPUS, "Its virtual graphics"),
        runtime("attached_PCIs", PCIS, "PCI devices it has"),
        writable("suspend_SR", SR, "Where its memory goes when it is suspended"),
        creator("version", INT, "Number of times it was recovered"),
        creator("generation_id", STRING, "Changes whenever the VM goes back in time").or_text("0:0"),
        writable("hardware_platform_version", INT, "Version of the virtual hardware it needs"),
        creator("has_vendor_device", BOOL, "Whether it shows a device for driver updates"),
        runtime("requires_reboot", BOOL, "Whether it must restart to take changes"),
        creator("reference_label", STRING, "Name of the template it was made from, in every language"),
        creator("domain_type", DOMAIN_TYPE, "Kind of domain").or_text("unspecified"),
        creator("NVRAM", STRING_MAP, "Its firmware's variables"),
        runtime("pending_guidances", Type::Set(&GUIDANCE), "What to do after updates"),
        runtime(
            "pending_guidances_recommended",
            Type::Set(&GUIDANCE),
            "What had better be done after updates",
        ),
        runtime("pending_guidances_full", Type::Set(&GUIDANCE), "What makes updates complete"),
    ],
    messages: &[
        msg(
            "migrate_send",
            VmPowerAdmin,
            "Moves a VM with its disks, snapshots and checkpoints to the host that 'dest' (host.migrate_receive) is \
             of, or, with the option 'copy', copies it to another pool; answers the VM there. Options: 'copy', \
             'force', 'rate' (bytes a second), 'timeout' (seconds for which a lost network is tried again; 300)",
        )
        .takes(&MIGRATE_PARAMS)
        .gives(VM)
        .fails(&MIGRATE_ERRORS),
        msg(
            "pool_migrate",
            VmPowerAdmin,
            "Moves a VM to another host of its pool while its guest runs; its disks are on SRs that both hosts have. \
             Options: 'force' (other processors), 'network' (over which its memory goes)",
        )
        .takes(&[p("vm", VM), p("host", HOST), opt("options", STRING_MAP)])
        .fails(&[
            "VM_BAD_POWER_STATE",
            "OPERATION_NOT_ALLOWED",
            "VM_REQUIRES_SR",
            "VM_LACKS_FEATURE",
            "HOST_OFFLINE",
            "HOST_DISABLED",
            "HOST_NOT_ENOUGH_FREE_MEMORY",
            "VM_HOST_INCOMPATIBLE_VERSION_MIGRATE",
            "VM_INCOMPATIBLE_WITH_THIS_HOST",
            "VM_MIGRATE_FAILED",
        ]),
        msg("assert_can_migrate", VmPowerAdmin, "Succeeds if migrate_send could begin")
            .takes(&MIGRATE_PARAMS)
            .fails(&MIGRATE_ERRORS),
        msg("snapshot", VmPowerAdmin, "Keeps the contents of its disks and its settings")
            .takes(&[p("vm", VM), p("new_name", STRING), opt("ignore_vdis", VDIS)])
            .gives(VM)
            .fails(&["VM_BAD_POWER_STATE", "SR_FULL", "OPERATION_NOT_ALLOWED"]),
        msg(
            "snapshot_with_quiesce",
            VmPowerAdmin,
            "Keeps the contents of its disks and its settings while its guest's agent holds the file systems still",
        )
        .takes(&[p("vm", VM), p("new_name", STRING)])
        .gives(VM)
        .fails(&[
            "VM_BAD_POWER_STATE",
            "SR_FULL",
            "OPERATION_NOT_ALLOWED",
            "VM_SNAPSHOT_WITH_QUIESCE_FAILED",
            "VM_SNAPSHOT_WITH_QUIESCE_TIMEOUT",
            "VM_SNAPSHOT_WITH_QUIESCE_PLUGIN_DEOS_NOT_RESPOND",
            "VM_SNAPSHOT_WITH_QUIESCE_NOT_SUPPORTED",
        ]),
        msg(
            "call_plugin",
            VmOperator,
            "Asks the guest's agent: plugin guest-agent-operation, function trim, discards what file systems do not use; \
             function disk-stats answers what the guest has counted of its disks, as JSON",
        )
        .takes(&[p("vm", VM), p("plugin", STRING), p("fn", STRING), p("args", STRING_MAP)])
        .gives(STRING)
        .fails(&["VM_BAD_POWER_STATE", "VM_LACKS_FEATURE", "XENAPI_MISSING_PLUGIN"]),
        msg("checkpoint", VmPowerAdmin, "Keeps the contents of its disks, its settings and its memory, all of one moment")
            .takes(&[p("vm", VM), p("new_name", STRING)])
            .gives(VM)
            .fails(&[
                "VM_BAD_POWER_STATE",
                "SR_FULL",
                "OPERATION_NOT_ALLOWED",
                "VM_LACKS_FEATURE",
                "VM_NO_SUSPEND_SR",
                "VM_CHECKPOINT_RESUME_FAILED",
            ]),
        msg(
            "revert",
            VmPowerAdmin,
            "Takes the VM back to its snapshot: disks, VIFs and settings; it is halted then, or suspended with the \
             memory of a checkpoint",
        )
        .takes(&[p("snapshot", VM)])
        .fails(&[
            "VM_BAD_POWER_STATE",
            "OPERATION_NOT_ALLOWED",
            "REVERT_ONLY_ALLOWED_ON_SNAPSHOT",
            "SR_FULL",
            "VM_REVERT_FAILED",
        ]),
        msg("clone", VmAdmin, "Makes a new VM like it, whose disks share what is the same")
            .takes(&[p("vm", VM), p("new_name", STRING)])
            .gives(VM)
            .fails(&["VM_BAD_POWER_STATE", "SR_FULL", "OPERATION_NOT_ALLOWED"]),
        msg("copy", VmAdmin, "Makes a new VM like it with copies of its disks")
            .takes(&[p("vm", VM), p("new_name", STRING), opt("sr", SR)])
            .gives(VM)
            .fails(&["VM_BAD_POWER_STATE", "SR_FULL", "OPERATION_NOT_ALLOWED"]),
        msg("provision", VmAdmin, "Makes the disks that its template asks for")
            .takes(&[p("vm", VM)])
            .fails(&["VM_BAD_POWER_STATE", "SR_FULL", "OPERATION_NOT_ALLOWED"]),
        msg("start", VmOperator, "Starts it")
            .takes(&[p("vm", VM), opt("start_paused", BOOL), opt("force", BOOL)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "VM_IS_TEMPLATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "HOST_DISABLED",
                "HOST_NOT_ENOUGH_FREE_MEMORY",
            ]),
        msg("start_on", VmPowerAdmin, "Starts it on this host")
            .takes(&[p("vm", VM), p("host", HOST), opt("start_paused", BOOL), opt("force", BOOL)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "VM_IS_TEMPLATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "HOST_DISABLED",
                "HOST_NOT_ENOUGH_FREE_MEMORY",
            ]),
        msg("pause", VmOperator, "Stops its processors").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg("unpause", VmOperator, "Lets its processors go on").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg(
            "restart_device_models",
            VmPowerAdmin,
            "Gives a guest a new emulator, on the same host: its VM is suspended and goes on at once",
        )
        .takes(&[p("self", VM)])
        .fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
            "VM_LACKS_FEATURE",
            "VM_NO_SUSPEND_SR",
            "HOST_DISABLED",
            "SR_FULL",
        ]),
        msg("suspend", VmOperator, "Writes its memory to a VDI of its suspend SR and ends it").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
            "VM_LACKS_FEATURE",
            "VM_NO_SUSPEND_SR",
            "SR_FULL",
        ]),
        msg("resume", VmOperator, "Lets a suspended VM go on from its memory")
            .takes(&[p("vm", VM), opt("start_paused", BOOL), opt("force", BOOL)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "VM_IS_TEMPLATE",
                "VM_HAS_NO_SUSPEND_VDI",
                "SUSPEND_IMAGE_NOT_ACCESSIBLE",
                "HOST_NOT_ENOUGH_FREE_MEMORY",
            ]),
        msg("resume_on", VmPowerAdmin, "Lets a suspended VM go on from its memory on this host")
            .takes(&[p("vm", VM), p("host", HOST), opt("start_paused", BOOL), opt("force", BOOL)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "VM_IS_TEMPLATE",
                "VM_HAS_NO_SUSPEND_VDI",
                "SUSPEND_IMAGE_NOT_ACCESSIBLE",
                "HOST_OFFLINE",
                "HOST_NOT_ENOUGH_FREE_MEMORY",
            ]),
        msg("clean_shutdown", VmOperator, "Asks the guest to shut down").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg("shutdown", VmOperator, "Asks the guest to shut down, and switches the VM off if it does not")
            .takes(&[p("vm", VM)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "VM_IS_TEMPLATE",
            ]),
        msg("hard_shutdown", VmOperator, "Switches it off; the memory of a suspended VM is thrown away").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg("clean_reboot", VmOperator, "Asks the guest to reboot").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg("hard_reboot", VmOperator, "Switches it off and on").takes(&[p("vm", VM)]).fails(&[
            "VM_BAD_POWER_STATE",
            "OTHER_OPERATION_IN_PROGRESS",
            "OPERATION_NOT_ALLOWED",
            "VM_IS_TEMPLATE",
        ]),
        msg("power_state_reset", PoolOperator, "Takes it for switched off, whatever is known of it")
            .takes(&[p("vm", VM)]),
        msg("set_VCPUs_max", VmAdmin, "Sets most processors it can have")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VM_BAD_POWER_STATE", "VALUE_NOT_SUPPORTED"]),
        msg("set_VCPUs_at_startup", VmAdmin, "Sets processors it starts with")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VM_BAD_POWER_STATE", "VALUE_NOT_SUPPORTED"]),
        msg("set_VCPUs_number_live", VmAdmin, "Gives it more processors while it runs, up to VCPUs_max")
            .takes(&[p("self", VM), p("nvcpu", INT)])
            .fails(&["VM_BAD_POWER_STATE", "INVALID_VALUE", "OPERATION_NOT_ALLOWED", "VM_LACKS_FEATURE"]),
        msg("set_memory", VmPowerAdmin, "Sets all its limits of memory, in bytes")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VM_BAD_POWER_STATE", "MEMORY_CONSTRAINT_VIOLATION"]),
        msg("set_memory_limits", VmPowerAdmin, "Sets its limits of memory, in bytes")
            .takes(&[
                p("self", VM),
                p("static_min", INT),
                p("static_max", INT),
                p("dynamic_min", INT),
                p("dynamic_max", INT),
            ])
            .fails(&["VM_BAD_POWER_STATE", "MEMORY_CONSTRAINT_VIOLATION"]),
        msg("set_memory_static_range", VmPowerAdmin, "Sets its limits of memory while it does not run")
            .takes(&[p("self", VM), p("min", INT), p("max", INT)])
            .fails(&["VM_BAD_POWER_STATE", "MEMORY_CONSTRAINT_VIOLATION"]),
        msg("set_memory_dynamic_range", VmPowerAdmin, "Sets its limits of memory while it runs; a guest that runs is told")
            .takes(&[p("self", VM), p("min", INT), p("max", INT)])
            .fails(&LIVE_MEMORY),
        msg("set_memory_target_live", VmPowerAdmin, "Tells a guest that runs how many bytes of memory it shall have")
            .takes(&[p("self", VM), p("target", INT)])
            .fails(&LIVE_MEMORY),
        msg("wait_memory_target_live", ReadOnly, "Returns when a guest that runs has the memory that it shall have")
            .takes(&[p("self", VM)])
            .fails(&["VM_BAD_POWER_STATE", "VM_MEMORY_TARGET_WAIT_TIMEOUT", "TASK_CANCELLED"]),
        msg("set_memory_static_min", VmPowerAdmin, "Sets one of its limits of memory")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VM_BAD_POWER_STATE", "MEMORY_CONSTRAINT_VIOLATION"]),
        msg("set_memory_static_max", VmPowerAdmin, "Sets one of its limits of memory")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VM_BAD_POWER_STATE", "MEMORY_CONSTRAINT_VIOLATION"]),
        msg("set_memory_dynamic_min", VmPowerAdmin, "Sets one of its limits of memory")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&LIVE_MEMORY),
        msg("set_memory_dynamic_max", VmPowerAdmin, "Sets one of its limits of memory")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&LIVE_MEMORY),
        msg(
            "set_bios_strings",
            VmAdmin,
            "Sets the texts that its firmware shows: keys as `bios-vendor` and `system-manufacturer`. Once only",
        )
        .takes(&[p("self", VM), p("value", STRING_MAP)])
        .fails(&["VM_BAD_POWER_STATE", "VM_BIOS_STRINGS_ALREADY_SET", "INVALID_VALUE"]),
        msg("copy_bios_strings", VmAdmin, "Has its firmware show the texts of a host's. Once only")
            .takes(&[p("vm", VM), p("host", HOST)])
            .fails(&["VM_BAD_POWER_STATE", "VM_BIOS_STRINGS_ALREADY_SET", "VALUE_NOT_SUPPORTED"]),
        msg("set_HVM_shadow_multiplier", VmPowerAdmin, "Sets the memory for shadow page tables, as a factor")
            .takes(&[p("self", VM), p("value", FLOAT)])
            .fails(&["VM_BAD_POWER_STATE", "VALUE_NOT_SUPPORTED"]),
        msg(
            "set_shadow_multiplier_live",
            VmPowerAdmin,
            "Sets the memory for shadow page tables of a VM that runs, as a factor",
        )
        .takes(&[p("self", VM), p("multiplier", FLOAT)])
        .fails(&["VM_BAD_POWER_STATE", "VALUE_NOT_SUPPORTED"]),
        msg("set_actions_after_crash", VmAdmin, "Says what happens when the guest crashes")
            .takes(&[p("self", VM), p("value", AFTER_CRASH)]),
        msg("set_ha_restart_priority", PoolOperator, "Says what happens to it when its host dies")
            .takes(&[p("self", VM), p("value", STRING)])
            .fails(&["INVALID_VALUE", "HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED", "OPERATION_NOT_ALLOWED"]),
        msg("set_ha_always_run", PoolOperator, "Says whether it is to run whenever a host can run it")
            .takes(&[p("self", VM), p("value", BOOL)])
            .fails(&["HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED", "OPERATION_NOT_ALLOWED"]),
        msg("assert_agile", ReadOnly, "Complains unless any host may start it")
            .takes(&[p("self", VM)])
            .fails(&["HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED", "OPERATION_NOT_ALLOWED"]),
        msg("set_appliance", PoolOperator, "Puts it into an appliance, or out of its own (the null reference)")
            .takes(&[p("self", VM), p("value", VM_APPLIANCE)])
            .fails(&["OPERATION_NOT_ALLOWED"]),
        msg("set_groups", VmAdmin, "Puts it into a group by whose rule it is placed, or (no group) out of its own")
            .takes(&[p("self", VM), p("value", VM_GROUPS)])
            .fails(&["OPERATION_NOT_ALLOWED", "TOO_MANY_GROUPS"]),
        msg("set_snapshot_schedule", PoolOperator, "Has a plan take its snapshots, or none (the null reference)")
            .takes(&[p("self", VM), p("value", VMSS)])
            .fails(&["OPERATION_NOT_ALLOWED"]),
        msg("set_order", PoolOperator, "Sets its place when several VMs start")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VALUE_NOT_SUPPORTED"]),
        msg("set_start_delay", PoolOperator, "Sets seconds after its start before the next VM starts")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VALUE_NOT_SUPPORTED"]),
        msg("set_shutdown_delay", PoolOperator, "Sets seconds after its end before the next VM ends")
            .takes(&[p("self", VM), p("value", INT)])
            .fails(&["VALUE_NOT_SUPPORTED"]),
        msg("get_allowed_VBD_devices", ReadOnly, "Places that are free for a disk")
            .takes(&[p("vm", VM)])
            .gives(STRING_SET)
            .sync(),
        msg("get_allowed_VIF_devices", ReadOnly, "Places that are free for a network interface")
            .takes(&[p("vm", VM)])
            .gives(STRING_SET)
            .sync(),
        msg("get_possible_hosts", ReadOnly, "Hosts it could start on").takes(&[p("vm", VM)]).gives(HOSTS),
        msg(
            "recover",
            ReadOnly,
            "In a session of VDI.open_database: makes it as it is there, with its disks here; force replaces a VM that \
             is not older. What it needs is decided in the session that it comes to (vm-admin)",
        )
        .takes(&[p("self", VM), p("session_to", SESSION), p("force", BOOL)])
        .fails(RECOVER_ERRORS),
        msg("assert_can_be_recovered", ReadOnly, "Fails where recover would, as far as SRs go")
            .takes(&[p("self", VM), p("session_to", SESSION)])
            .fails(&["VM_IS_PART_OF_AN_APPLIANCE", "VM_REQUIRES_SR"]),
        msg("get_SRs_required_for_recovery", ReadOnly, "SRs of its disks, in the database that was opened")
            .takes(&[p("self", VM), p("session_to", SESSION)])
            .gives(Type::Set(&SR)),
        msg("assert_can_boot_here", ReadOnly, "Fails where starting it there would fail")
            .takes(&[p("self", VM), p("host", HOST)])
            .fails(&["HOST_DISABLED", "HOST_NOT_ENOUGH_FREE_MEMORY", "VM_REQUIRES_SR", "VM_BAD_POWER_STATE"]),
        msg("assert_operation_valid", ReadOnly, "Fails where the operation is not allowed now")
            .takes(&[p("self", VM), p("op", OPERATION)])
            .fails(&[
                "VM_BAD_POWER_STATE",
                "OTHER_OPERATION_IN_PROGRESS",
                "OPERATION_NOT_ALLOWED",
                "VM_IS_TEMPLATE",
            ]),
        msg("update_allowed_operations", PoolAdmin, "Works out anew what can be done with it")
            .takes(&[p("self", VM)]),
        msg("get_data_sources", ReadOnly, "What is measured of it")
            .takes(&[p("self", VM)])
            .gives(Type::Set(&Type::Record("data_source")))
            .sync(),
        msg("query_data_source", ReadOnly, "The figure of the last whole step, a rate for what is counted")
            .takes(&[p("self", VM), p("data_source", STRING)])
            .gives(FLOAT)
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("record_data_source", VmAdmin, "Records again what was forgotten")
            .takes(&[p("self", VM), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("forget_data_source_archives", VmAdmin, "Drops what was recorded, and records it no more")
            .takes(&[p("self", VM), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("compute_memory_overhead", ReadOnly, "Bytes of memory it takes beside its own")
            .takes(&[p("vm", VM)])
            .gives(INT),
        msg("maximise_memory", ReadOnly, "Most bytes of memory it can have if it may take `total` in all")
            .takes(&[p("self", VM), p("total", INT), opt("approximate", BOOL)])
            .gives(INT)
            .fails(&["VALUE_NOT_SUPPORTED"]),
    ],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};
