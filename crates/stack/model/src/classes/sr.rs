//! Storage repositories, and what a probe finds.

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, ReadOnly, VmOperator, VmPowerAdmin};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const OPERATION: Type = Type::Enum(&Enum {
    name: "storage_operations",
    words: &[
        "scan",
        "destroy",
        "forget",
        "plug",
        "unplug",
        "update",
        "vdi_create",
        "vdi_introduce",
        "vdi_destroy",
        "vdi_resize",
        "vdi_clone",
        "vdi_snapshot",
        "vdi_mirror",
        "vdi_enable_cbt",
        "vdi_disable_cbt",
        "vdi_data_destroy",
        "vdi_list_changed_blocks",
        "vdi_set_on_boot",
        "pbd_create",
        "pbd_destroy",
    ],
});
const HEALTH: Type = Type::Enum(&Enum { name: "sr_health", words: &["healthy", "recovering"] });

/// What keeps the database from being copied to an SR.
const REPLICA_ERRORS: &[&str] =
    &["SR_OPERATION_NOT_SUPPORTED", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "SR_FULL"];

/// The class `SR`.
pub static SR_CLASS: Class = Class {
    name: "SR",
    doc: "A storage repository: a place for disks",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        creator("name_label", STRING, "Name for people"),
        creator("name_description", STRING, "What it is, for people"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        runtime("VDIs", VDIS, "Its disks").inverse("VDI", "SR"),
        runtime("PBDs", PBDS, "The hosts it is connected to, and how").inverse("PBD", "SR"),
        runtime("virtual_allocation", INT, "Sum of the virtual sizes of its disks, in bytes"),
        runtime("physical_utilisation", INT, "Bytes in use"),
        creator("physical_size", INT, "Bytes there are"),
        creator("type", STRING, "Driver, as ext"),
        creator("content_type", STRING, "What it is meant for: user, iso"),
        runtime("shared", BOOL, "Whether several hosts can use it at once"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(VmOperator),
        writable("sm_config", STRING_MAP, "What the storage driver notes"),
        runtime("blobs", Type::Map(&STRING, &BLOB), "Binary blobs that belong to it"),
        runtime("local_cache_enabled", BOOL, "Whether it caches other SRs"),
        runtime("introduced_by", DR_TASK, "The disaster recovery task that introduced it"),
        runtime("clustered", BOOL, "Whether a cluster manages it"),
        runtime("is_tools_sr", BOOL, "Whether it holds the guest tools"),
    ],
    messages: &[
        msg(
            "create",
            PoolOperator,
            "Makes an SR on storage whose contents it replaces, and connects the host to it",
        )
        .takes(&[
            p("host", HOST),
            p("device_config", STRING_MAP),
            p("physical_size", INT),
            p("name_label", STRING),
            p("name_description", STRING),
            p("type", STRING),
            p("content_type", STRING),
            p("shared", BOOL),
            opt("sm_config", STRING_MAP),
        ])
        .gives(SR)
        .fails(&["SR_UNKNOWN_DRIVER", "SR_NOT_SHARABLE"]),
        msg("introduce", PoolOperator, "Makes an SR known that lies on some storage already")
            .takes(&[
                p("uuid", STRING),
                p("name_label", STRING),
                p("name_description", STRING),
                p("type", STRING),
                p("content_type", STRING),
                p("shared", BOOL),
                opt("sm_config", STRING_MAP),
            ])
            .gives(SR)
            .fails(&["SR_UNKNOWN_DRIVER", "SR_UUID_EXISTS", "UUID_INVALID"]),
        msg("make", PoolOperator, "Makes an SR and answers its UUID; SR.create is the newer message")
            .takes(&[
                p("host", HOST),
                p("device_config", STRING_MAP),
                p("physical_size", INT),
                p("name_label", STRING),
                p("name_description", STRING),
                p("type", STRING),
                p("content_type", STRING),
                opt("sm_config", STRING_MAP),
            ])
            .gives(STRING)
            .fails(&["SR_UNKNOWN_DRIVER"]),
        msg("destroy", PoolOperator, "Destroys an SR with all it holds").takes(&[p("sr", SR)]).fails(&[
            "SR_HAS_NO_PBDS",
            "SR_HAS_MULTIPLE_PBDS",
            "SR_NOT_EMPTY",
            "SR_INDESTRUCTIBLE",
            "SR_NOT_ATTACHED",
        ]),
        msg("forget", PoolOperator, "Forgets an SR and leaves what it holds")
            .takes(&[p("sr", SR)])
            .fails(&["SR_HAS_PBD"]),
        msg("update", PoolOperator, "Brings sizes up to date")
            .takes(&[p("sr", SR)])
            .fails(&["SR_NOT_ATTACHED", "SR_HAS_NO_PBDS"]),
        msg("get_supported_types", ReadOnly, "Types of SR there are drivers for").gives(STRING_SET).sync(),
        msg("scan", VmPowerAdmin, "Looks what lies there, and brings the disks up to date")
            .takes(&[p("sr", SR)])
            .fails(&["SR_NOT_ATTACHED", "SR_HAS_NO_PBDS"]),
        msg(
            "collect_garbage",
            PoolOperator,
            "Begins a garbage collection, and says what it will do and why the rest stays (Tapio's own)",
        )
        .takes(&[p("sr", SR), opt_bool("dry_run", false)])
        .gives(STRING_SET)
        .fails(&["SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "SR_OPERATION_NOT_SUPPORTED"]),
        msg(
            "evacuate",
            PoolOperator,
            "Moves all disks to another SR, also while VMs use them; names what stays and why (Tapio's own)",
        )
        .takes(&[p("sr", SR), p("destination", SR)])
        .fails(&["SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "OPERATION_NOT_ALLOWED", "SR_NOT_EVACUATED"]),
        msg(
            "get_forecast",
            ReadOnly,
            "How its use grew of late, and when it will be full at that rate (Tapio's own)",
        )
        .takes(&[p("sr", SR)])
        .gives(STRING_MAP),
        msg(
            "diagnose",
            PoolOperator,
            "Looks for what is wrong with an SR and changes nothing; answers findings as JSON (Tapio's own)",
        )
        .takes(&[p("sr", SR)])
        .gives(STRING)
        .fails(&["SR_NOT_ATTACHED", "SR_HAS_NO_PBDS"]),
        msg("probe", PoolOperator, "Looks for SRs, or for what is missing in device_config; answers XML")
            .takes(&[
                p("host", HOST),
                p("device_config", STRING_MAP),
                p("type", STRING),
                opt("sm_config", STRING_MAP),
            ])
            .gives(STRING)
            .fails(&["SR_UNKNOWN_DRIVER"]),
        msg("probe_ext", PoolOperator, "Looks for SRs, or for what is missing in device_config")
            .takes(&[
                p("host", HOST),
                p("device_config", STRING_MAP),
                p("type", STRING),
                opt("sm_config", STRING_MAP),
            ])
            .gives(Type::Set(&Type::Record("probe_result")))
            .fails(&["SR_UNKNOWN_DRIVER"]),
        msg("get_data_sources", ReadOnly, "What is measured of it")
            .takes(&[p("sr", SR)])
            .gives(Type::Set(&Type::Record("data_source")))
            .sync(),
        msg("query_data_source", ReadOnly, "The figure of the last whole step, a rate for what is counted")
            .takes(&[p("sr", SR), p("data_source", STRING)])
            .gives(FLOAT)
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("record_data_source", PoolOperator, "Records again what was forgotten")
            .takes(&[p("sr", SR), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("forget_data_source_archives", PoolOperator, "Drops what was recorded, and records it no more")
            .takes(&[p("sr", SR), p("data_source", STRING)])
            .fails(&["INVALID_VALUE"])
            .sync(),
        msg("set_shared", PoolOperator, "Says whether several hosts can use it")
            .takes(&[p("sr", SR), p("value", BOOL)])
            .fails(&["SR_NOT_SHARABLE"]),
        msg("set_name_label", PoolOperator, "Names it").takes(&[p("sr", SR), p("value", STRING)]),
        msg("set_name_description", PoolOperator, "Describes it").takes(&[p("sr", SR), p("value", STRING)]),
        msg("set_virtual_allocation", PoolAdmin, "For storage plugins: sum of the sizes of its disks")
            .takes(&[p("self", SR), p("value", INT)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_physical_utilisation", PoolAdmin, "For storage plugins: bytes that are used of it")
            .takes(&[p("self", SR), p("value", INT)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_physical_size", PoolOperator, "Says how large it is")
            .takes(&[p("self", SR), p("value", INT)])
            .sync(),
        msg(
            "assert_can_host_ha_statefile",
            PoolOperator,
            "Fails where high availability could not keep its state there",
        )
        .takes(&[p("sr", SR)])
        .fails(&["SR_OPERATION_NOT_SUPPORTED"]),
        msg(
            "assert_supports_database_replication",
            PoolOperator,
            "Fails where the database could not be copied there",
        )
        .takes(&[p("sr", SR)])
        .fails(REPLICA_ERRORS),
        msg(
            "enable_database_replication",
            PoolOperator,
            "Makes a VDI of type metadata there, and writes the database to it some seconds after each change",
        )
        .takes(&[p("sr", SR)])
        .fails(REPLICA_ERRORS),
        msg("disable_database_replication", PoolOperator, "Removes the VDI with the database")
            .takes(&[p("sr", SR)])
            .fails(&["VDI_IN_USE"]),
    ],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `sr_stat`.
pub static SR_STAT_CLASS: Class = Class {
    name: "sr_stat",
    doc: "Sizes and health of a storage repository",
    kind: ClassKind::Shape,
    fields: &[
        runtime("uuid", Type::Option(&STRING), "Unique and lasting name of the SR, where it has one"),
        runtime("name_label", STRING, "Its name"),
        runtime("name_description", STRING, "What it is"),
        runtime("free_space", INT, "Bytes that are free"),
        runtime("total_space", INT, "Bytes there are"),
        runtime("clustered", BOOL, "Whether a cluster manages it"),
        runtime("health", HEALTH, "Whether it is well"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: false,
};

/// The class `LVHD`, of which there are no objects.
pub static LVHD_CLASS: Class = Class {
    name: "LVHD",
    doc: "What is done to SRs of logical volumes alone",
    kind: ClassKind::Objects,
    fields: &[runtime("uuid", STRING, "Unique and lasting name")],
    messages: &[msg(
        "enable_thin_provisioning",
        Role::PoolAdmin,
        "Makes VDIs thin that are made from now on in an SR that is attached on this host; those that are there stay as \
         they are. Sizes in bytes, 0 for the driver's own. Another host that has it attached is asked itself",
    )
    .takes(&[p("host", HOST), p("SR", SR), p("initial_allocation", INT), p("allocation_quantum", INT)])
    .gives(STRING)
    .fails(&["SR_OPERATION_NOT_SUPPORTED", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "HOST_OFFLINE", "INVALID_VALUE"])],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: false,
};

/// The class `probe_result`.
pub static PROBE_RESULT_CLASS: Class = Class {
    name: "probe_result",
    doc: "One thing that a probe found",
    kind: ClassKind::Shape,
    fields: &[
        runtime("configuration", STRING_MAP, "A device_config that reaches it"),
        runtime("complete", BOOL, "Whether that is all that is needed"),
        runtime("sr", Type::Option(&Type::Record("sr_stat")), "The SR that was found there"),
        runtime("extra_info", STRING_MAP, "Anything else worth knowing"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: false,
};
