//! Hosts.

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, ReadOnly, VmAdmin, VmOperator, VmPowerAdmin};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const UPDATES_APPLIED: Type =
    Type::Enum(&Enum { name: "latest_synced_updates_applied_state", words: &["yes", "no", "unknown"] });
const DISPLAY: Type = Type::Enum(&Enum {
    name: "host_display",
    words: &["enabled", "disable_on_reboot", "disabled", "enable_on_reboot"],
});
const OPERATION: Type = Type::Enum(&Enum {
    name: "host_allowed_operations",
    words: &[
        "provision",
        "evacuate",
        "shutdown",
        "reboot",
        "power_on",
        "vm_start",
        "vm_resume",
        "vm_migrate",
        "apply_updates",
        "enable",
    ],
});
const NUMA_POLICY: Type =
    Type::Enum(&Enum { name: "host_numa_affinity_policy", words: &["any", "best_effort", "default_policy"] });

const CERTIFICATE_ERRORS: &[&str] = &[
    "HOST_OFFLINE",
    "SERVER_CERTIFICATE_INVALID",
    "SERVER_CERTIFICATE_CHAIN_INVALID",
    "SERVER_CERTIFICATE_KEY_INVALID",
    "SERVER_CERTIFICATE_KEY_MISMATCH",
    "SERVER_CERTIFICATE_EXPIRED",
    "SERVER_CERTIFICATE_NOT_VALID_YET",
];
const ENDS_HOST: [&str; 3] = ["HOST_OFFLINE", "HOST_NOT_DISABLED", "OPERATION_NOT_ALLOWED"];

/// The class `host`.
pub static HOST_CLASS: Class = Class {
    name: "host",
    doc: "A physical computer that runs VMs",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        runtime("memory_overhead", INT, "Bytes of memory taken beside the guests"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        runtime("API_version_major", INT, "Version of this interface, first number"),
        runtime("API_version_minor", INT, "Version of this interface, second number"),
        runtime("API_version_vendor", STRING, "Vendor of this interface"),
        runtime("API_version_vendor_implementation", STRING_MAP, "What the maker tells about it"),
        runtime("enabled", BOOL, "Whether VMs may be started here").or_bool(true),
        creator("software_version", STRING_MAP, "Versions of what runs here"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        creator("capabilities", STRING_SET, "Kinds of guests it can run"),
        runtime("cpu_configuration", STRING_MAP, "How its processors are set up"),
        runtime("sched_policy", STRING, "How processors are shared"),
        runtime("supported_bootloaders", STRING_SET, "Boot loaders there are"),
        runtime("resident_VMs", VMS, "VMs that run here").inverse("VM", "resident_on"),
        writable("logging", STRING_MAP, "Where its log goes"),
        runtime("PIFs", PIFS, "Network interfaces").inverse("PIF", "host"),
        writable("suspend_image_sr", SR, "Where memory goes when VMs are suspended"),
        writable("crash_dump_sr", SR, "Where crash dumps go"),
        runtime("crashdumps", HOST_CRASHDUMPS, "Its own crash dumps"),
        runtime("patches", HOST_PATCHS, "Kept for older clients"),
        runtime("updates", POOL_UPDATES, "Updates that were applied"),
        runtime("PBDs", PBDS, "Storage it is connected to").inverse("PBD", "host"),
        runtime("host_CPUs", HOST_CPUS, "Its processors").inverse("host_cpu", "host"),
        runtime("cpu_info", STRING_MAP, "What its processors are"),
        writable("hostname", STRING, "Its name in the network"),
        writable("address", STRING, "Its address in the network"),
        runtime("metrics", HOST_METRICS, "Its measurements"),
        runtime("license_params", STRING_MAP, "Kept for older clients"),
        runtime("ha_statefiles", STRING_SET, "Disks that high availability keeps its state in"),
        runtime("ha_network_peers", STRING_SET, "Hosts it sees"),
        runtime("blobs", Type::Map(&STRING, &BLOB), "Binary blobs that belong to it"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(VmOperator),
        runtime("external_auth_type", STRING, "Directory of users it asks"),
        runtime("external_auth_service_name", STRING, "Name of that directory"),
        runtime("external_auth_configuration", STRING_MAP, "How that directory is reached"),
        runtime("edition", STRING, "Kept for older clients"),
        writable("license_server", STRING_MAP, "Kept for older clients"),
        runtime("bios_strings", STRING_MAP, "Texts of the firmware"),
        runtime("power_on_mode", STRING, "How it is switched on from afar"),
        runtime("power_on_config", STRING_MAP, "Parameters of that"),
        creator("local_cache_sr", SR, "SR that caches others here"),
        runtime("chipset_info", STRING_MAP, "What its chipset can do"),
        runtime("PCIs", PCIS, "Its PCI devices"),
        runtime("PGPUs", PGPUS, "Its graphics devices"),
        runtime("PUSBs", PUSBS, "Its USB devices"),
        creator("ssl_legacy", BOOL, "Whether it accepts outdated TLS"),
        writable("guest_VCPUs_params", STRING_MAP, "Parameters for all guests' processors"),
        writable("display", DISPLAY, "Whether it shows a console of its own"),
        runtime(
            "virtual_hardware_platform_versions",
            Type::Set(&INT),
            "Versions of virtual hardware it offers",
        ),
        runtime("control_domain", VM, "The VM that stands for the host itself"),
        runtime("updates_requiring_reboot", POOL_UPDATES, "Updates that wait for a restart"),
        runtime("features", FEATURES, "Features it has"),
        creator("iscsi_iqn", STRING, "Its iSCSI name"),
        creator("multipathing", BOOL, "Whether storage is reached by several paths"),
        creator("uefi_certificates", STRING, "Certificates for secure boot"),
        runtime("certificates", CERTIFICATES, "Certificates it shows"),
        runtime("editions", STRING_SET, "Kept for older clients"),
        runtime("pending_guidances", Type::Set(&GUIDANCE), "What to do after updates"),
        runtime("tls_verification_enabled", BOOL, "Whether it checks certificates of other hosts"),
        runtime("last_software_update", DATE_TIME, "When it was last updated"),
        runtime("https_only", BOOL, "Whether it refuses plain HTTP"),
        runtime("latest_synced_updates_applied", UPDATES_APPLIED, "Whether it has the newest updates")
            .or_text("unknown"),
        runtime("numa_affinity_policy", NUMA_POLICY, "How memory is placed near processors")
            .or_text("default_policy"),
        runtime(
            "pending_guidances_recommended",
            Type::Set(&GUIDANCE),
            "What had better be done after updates",
        ),
        runtime("pending_guidances_full", Type::Set(&GUIDANCE), "What makes updates complete"),
        runtime("last_update_hash", STRING, "Checksum of the last update"),
    ],
    messages: &[
        msg("disable", PoolOperator, "Lets no more VMs start on this host").takes(&[p("host", HOST)]),
        msg("enable", PoolOperator, "Lets VMs start on this host").takes(&[p("host", HOST)]),
        msg(
            "migrate_receive",
            VmPowerAdmin,
            "Prepares this host to receive a VM from another pool; answers what VM.migrate_send takes as 'dest'. \
             Options: 'source-fingerprint' is the certificate's of the host that sends (host.get_fingerprint)",
        )
        .takes(&[p("host", HOST), p("network", NETWORK), opt("options", STRING_MAP)])
        .gives(STRING_MAP)
        .fails(&["HOST_CANNOT_ATTACH_NETWORK", "INTERFACE_HAS_NO_IP", "HOST_DISABLED", "HOST_OFFLINE"]),
        msg(
            "receive_motion",
            VmAdmin,
            "One step of a motion of a VM to this host, for the host that sends; as pool-admin 'commit' or 'abort' of \
             one whose sender is gone (Tapio's own)",
        )
        .takes(&[p("motion", STRING), p("step", STRING), p("args", STRING_MAP)])
        .gives(STRING_MAP)
        .fails(&["HANDLE_INVALID", "OPERATION_NOT_ALLOWED", "DUPLICATE_VM", "DUPLICATE_MAC_SEED", "SR_FULL"]),
        msg(
            "receive_guest",
            VmAdmin,
            "One step of a guest's way to this host, for the host of its pool that it runs on (Tapio's own)",
        )
        .takes(&[p("vm", STRING), p("step", STRING), p("args", STRING_MAP)])
        .gives(STRING_MAP)
        .fails(&[
            "HANDLE_INVALID",
            "OPERATION_NOT_ALLOWED",
            "VM_REQUIRES_SR",
            "HOST_DISABLED",
            "HOST_NOT_ENOUGH_FREE_MEMORY",
            "SR_FULL",
        ]),
        msg(
            "get_motions",
            PoolOperator,
            "Motions of VMs that this host knows of, in both directions, and how far each is (Tapio's own)",
        )
        .takes(&[p("host", HOST)])
        .gives(STRING_MAP)
        .sync(),
        msg(
            "get_fingerprint",
            ReadOnly,
            "The fingerprint (SHA-256) of the certificate that this host shows (Tapio's own)",
        )
        .takes(&[p("host", HOST)])
        .gives(STRING)
        .fails(&["HOST_OFFLINE"])
        .sync(),
        msg(
            "get_server_certificate",
            ReadOnly,
            "The certificate that this host shows, and the authorities above it, as PEM",
        )
        .takes(&[p("host", HOST)])
        .gives(STRING)
        .fails(&["HOST_OFFLINE"])
        .sync(),
        msg(
            "install_server_certificate",
            PoolAdmin,
            "Has a host show a certificate with this key (both as PEM, the key without a password); new connections get it. \
             The chain is the authorities above it, or empty",
        )
        .takes(&[
            p("host", HOST),
            p("certificate", STRING),
            p("private_key", STRING),
            p("certificate_chain", STRING),
        ])
        .fails(CERTIFICATE_ERRORS)
        .sync(),
        msg("reset_server_certificate", PoolAdmin, "Has a host show a new certificate that is signed by itself")
            .takes(&[p("host", HOST)])
            .fails(&["HOST_OFFLINE"])
            .sync(),
        msg("refresh_server_certificate", PoolAdmin, "As reset_server_certificate")
            .takes(&[p("host", HOST)])
            .fails(&["HOST_OFFLINE"])
            .sync(),
        msg(
            "emergency_reset_server_certificate",
            PoolAdmin,
            "As reset_server_certificate, of the host that is asked: it may not be reached as a host of its pool",
        )
        .sync(),
        msg("destroy", PoolOperator, "Forgets a host of the pool that does not live any more")
            .takes(&[p("self", HOST)])
            .fails(&["HOST_IS_LIVE", "HOST_HAS_RESIDENT_VMS", "OPERATION_NOT_ALLOWED"]),
        msg(
            "evacuate",
            PoolOperator,
            "Moves all VMs of this host to others of its pool while their guests run, some at a time, over a network if \
             one is named; a guest that no host takes is asked to end",
        )
        .takes(&[p("host", HOST), opt("network", NETWORK), opt("evacuate_batch_size", INT)])
        .fails(&[
            "HOST_OFFLINE",
            "VALUE_NOT_SUPPORTED",
            "VM_SHUTDOWN_TIMEOUT",
            "VM_BAD_POWER_STATE",
            "VM_MIGRATE_FAILED",
        ]),
        msg(
            "assert_can_evacuate",
            PoolOperator,
            "Whether all VMs of this host could move to others of its pool now; of a host that is alone: could be asked \
             to end",
        )
        .takes(&[p("host", HOST)])
        .fails(&["CANNOT_EVACUATE_HOST"]),
        msg(
            "get_vms_which_prevent_evacuation",
            ReadOnly,
            "VMs that no other host of the pool could take now, with the error that each would give: their guests would be \
             asked to end. Of a host that is alone: VMs whose guests could not be asked to end",
        )
        .takes(&[p("self", HOST)])
        .gives(Type::Map(&VM, &STRING_SET))
        .sync(),
        msg(
            "shutdown",
            PoolOperator,
            "Ends all VMs of this host, which must be disabled, and shuts it down by the program of tapiod's host-power",
        )
        .takes(&[p("host", HOST)])
        .fails(&ENDS_HOST),
        msg("reboot", PoolOperator, "Ends all VMs of this host, which must be disabled, and reboots it by that program")
            .takes(&[p("host", HOST)])
            .fails(&ENDS_HOST),
        msg(
            "advise_worker_pool",
            ReadOnly,
            "Steps at a time by XenServer's rule, for so many VMs that start or end at a time, beside those that are set \
             (Tapio's own)",
        )
        .takes(&[p("host", HOST), opt("vms", INT)])
        .gives(STRING_MAP)
        .fails(&["HOST_OFFLINE", "VALUE_NOT_SUPPORTED"])
        .sync(),
        msg(
            "is_in_emergency_mode",
            ReadOnly,
            "Whether it cannot reach the host that decides: never, it is that host",
        )
        .gives(BOOL)
        .sync(),
        msg("list_methods", ReadOnly, "Names of all messages").gives(STRING_SET).sync(),
        msg("call_plugin", PoolAdmin, "Calls a function that products know as a plugin's")
            .takes(&[p("host", HOST), p("plugin", STRING), p("fn", STRING), p("args", STRING_MAP)])
            .gives(STRING)
            .fails(&[
                "XENAPI_MISSING_PLUGIN",
                "XENAPI_PLUGIN_FAILURE",
                "SR_NOT_ATTACHED",
                "SR_HAS_NO_PBDS",
                "SR_OPERATION_NOT_SUPPORTED",
            ]),
        msg("get_data_sources", ReadOnly, "What is measured of it")
            .takes(&[p("host", HOST)])
            .gives(Type::Set(&Type::Record("data_source")))
            .sync(),
        msg("query_data_source", ReadOnly, "The figure of the last whole step, a rate for what is counted")
            .takes(&[p("host", HOST), p("data_source", STRING)])
            .gives(FLOAT)
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("record_data_source", PoolOperator, "Records again what was forgotten")
            .takes(&[p("host", HOST), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("forget_data_source_archives", PoolOperator, "Drops what was recorded, and records it no more")
            .takes(&[p("host", HOST), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg(
            "export_metrics",
            ReadOnly,
            "Figures of disks and SRs of this host, as Prometheus text (Tapio's own)",
        )
        .gives(STRING)
        .sync(),
        msg(
            "export_history",
            ReadOnly,
            "What was measured of VMs, SRs and the host over time, as XML or JSON (Tapio's own): 'updates', or a class",
        )
        .takes(&[p("class", STRING), p("options", STRING_MAP)])
        .gives(STRING)
        .fails(&["INVALID_VALUE", "UUID_INVALID", "VALUE_NOT_SUPPORTED"])
        .sync(),
        msg(
            "diagnose",
            PoolOperator,
            "Looks for what is wrong with a host, its SRs and disk processes; answers findings as JSON (Tapio's own)",
        )
        .takes(&[p("host", HOST)])
        .gives(STRING)
        .fails(&["HOST_OFFLINE"]),
        msg(
            "sm_dp_destroy",
            PoolOperator,
            "Ends a datapath, which is named by the UUID of its VBD or export, that has no disk process; one in use is \
             refused. 'allow_leak' must be false: nothing is left behind",
        )
        .takes(&[p("host", HOST), p("dp", STRING), p("allow_leak", BOOL)])
        .fails(&["HOST_OFFLINE", "VDI_IN_USE", "INVALID_VALUE", "VALUE_NOT_SUPPORTED"]),
        msg("end_stray_disk", PoolOperator, "Ends a disk process that no VBD has (Tapio's own)")
            .takes(&[p("host", HOST), p("pid", INT)])
            .fails(&["HOST_OFFLINE", "INVALID_VALUE"]),
        msg("dmesg", PoolOperator, "The newest messages of the host's kernel, at most 1 MiB, as its dmesg shows them")
            .takes(&[p("host", HOST)])
            .gives(STRING)
            .fails(&["OPERATION_NOT_ALLOWED"]),
        msg("get_servertime", ReadOnly, "The time of the host, UTC")
            .takes(&[p("host", HOST)])
            .gives(DATE_TIME)
            .sync(),
        msg("get_server_localtime", ReadOnly, "The time of the host, in its zone")
            .takes(&[p("host", HOST)])
            .gives(DATE_TIME)
            .sync(),
        msg("compute_free_memory", ReadOnly, "Bytes of memory that guests could have")
            .takes(&[p("host", HOST)])
            .gives(INT),
        msg("compute_memory_overhead", ReadOnly, "Bytes of memory that guests cannot have")
            .takes(&[p("host", HOST)])
            .gives(INT),
    ],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `host_metrics`.
pub static HOST_METRICS_CLASS: Class = Class {
    name: "host_metrics",
    doc: "Measurements of a host",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("memory_total", INT, "Bytes of memory"),
        runtime("memory_free", INT, "Bytes of memory that are free"),
        runtime("live", BOOL, "Whether the host answers"),
        runtime("last_updated", DATE_TIME, "When this was last brought up to date"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `host_cpu`.
pub static HOST_CPU_CLASS: Class = Class {
    name: "host_cpu",
    doc: "A processor of a host",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("host", HOST, "The host"),
        runtime("number", INT, "Its number, from 0"),
        runtime("vendor", STRING, "Vendor of the processor"),
        runtime("speed", INT, "Speed in MHz"),
        runtime("modelname", STRING, "Its model, for people"),
        runtime("family", INT, "Its family"),
        runtime("model", INT, "Its model, as a number"),
        runtime("stepping", STRING, "Its stepping"),
        runtime("flags", STRING, "Its features, as the kernel lists them"),
        runtime("features", STRING, "Its features, as numbers"),
        runtime("utilisation", FLOAT, "Its use, 0 to 1").volatile(),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
