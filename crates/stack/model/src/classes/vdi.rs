//! Virtual disks.

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, ReadOnly, VmAdmin, VmOperator};
use crate::table::{Class, ClassKind, Enum, Param, Role, Type};

const ON_BOOT: Type = Type::Enum(&Enum { name: "on_boot", words: &["reset", "persist"] });
const OPERATION: Type = Type::Enum(&Enum {
    name: "vdi_operations",
    words: &[
        "clone",
        "copy",
        "resize",
        "resize_online",
        "snapshot",
        "mirror",
        "destroy",
        "forget",
        "update",
        "force_unlock",
        "generate_config",
        "enable_cbt",
        "disable_cbt",
        "data_destroy",
        "list_changed_blocks",
        "set_on_boot",
        "blocked",
    ],
});
const TYPE: Type = Type::Enum(&Enum {
    name: "vdi_type",
    words: &[
        "system",
        "user",
        "ephemeral",
        "suspend",
        "crashdump",
        "ha_statefile",
        "metadata",
        "redo_log",
        "rrd",
        "pvs_cache",
        "cbt_metadata",
    ],
});

/// What a record is introduced with.
const RECORD: &[Param] = &[
    p("uuid", STRING),
    p("name_label", STRING),
    p("name_description", STRING),
    p("SR", SR),
    p("type", TYPE),
    p("sharable", BOOL),
    p("read_only", BOOL),
    p("other_config", STRING_MAP),
    p("location", STRING),
    opt("xenstore_data", STRING_MAP),
    opt("sm_config", STRING_MAP),
    opt_bool("managed", true),
    opt("virtual_size", INT),
    opt("physical_utilisation", INT),
    opt("metadata_of_pool", POOL),
    opt("is_a_snapshot", BOOL),
    opt("snapshot_time", DATE_TIME),
    opt("snapshot_of", VDI),
];

/// What refuses to move a disk, or ends that.
const MOVE_ERRORS: &[&str] = &[
    "VDI_IN_USE",
    "VDI_MISSING",
    "VDI_NOT_MANAGED",
    "VDI_INCOMPATIBLE_TYPE",
    "VDI_CBT_ENABLED",
    "VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION",
    "SR_OPERATION_NOT_SUPPORTED",
    "SR_NOT_ATTACHED",
    "SR_HAS_NO_PBDS",
    "SR_FULL",
    "MIRROR_FAILED",
];

/// The class `VDI`.
/// What refuses to begin or to end the tracking of changed blocks.
const TRACKING_ERRORS: [&str; 7] = [
    "SR_OPERATION_NOT_SUPPORTED",
    "VDI_MISSING",
    "SR_NOT_ATTACHED",
    "SR_HAS_NO_PBDS",
    "OPERATION_NOT_ALLOWED",
    "VDI_INCOMPATIBLE_TYPE",
    "VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION",
];

pub static VDI_CLASS: Class = Class {
    name: "VDI",
    doc: "A virtual disk",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        creator("name_label", STRING, "Name for people"),
        creator("name_description", STRING, "What it is, for people"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        creator("SR", SR, "Where it lies").required(),
        runtime("VBDs", VBDS, "The VMs that have it").inverse("VBD", "VDI"),
        runtime("crash_dumps", CRASHDUMPS, "Crash dumps that lie in it").inverse("crashdump", "VDI"),
        creator("virtual_size", INT, "Bytes the guest sees").required(),
        runtime("physical_utilisation", INT, "Bytes it takes in the SR"),
        creator("type", TYPE, "What it is used for").or_text("user"),
        creator("sharable", BOOL, "Whether several VMs may write to it"),
        creator("read_only", BOOL, "Whether it is read-only"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("storage_lock", BOOL, "Whether the storage has locked it").volatile(),
        runtime("location", STRING, "Its name in the SR"),
        runtime("managed", BOOL, "Whether it is a disk of its own; false for what only carries others")
            .or_bool(true),
        runtime("missing", BOOL, "Whether the last scan did not find it"),
        runtime("parent", VDI, "The image it is based on"),
        writable("xenstore_data", STRING_MAP, "What the guest reads about it"),
        writable("sm_config", STRING_MAP, "What the storage driver notes"),
        runtime("is_a_snapshot", BOOL, "Whether it is a snapshot"),
        runtime("snapshot_of", VDI, "What it is a snapshot of"),
        runtime("snapshots", VDIS, "Its snapshots").inverse("VDI", "snapshot_of"),
        runtime("snapshot_time", DATE_TIME, "When the snapshot was taken"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(VmOperator),
        runtime("allow_caching", BOOL, "Whether a local cache may hold parts of it"),
        runtime("on_boot", ON_BOOT, "What happens to it when its VM starts").or_text("persist"),
        runtime("metadata_of_pool", POOL, "The pool whose metadata it holds"),
        runtime("metadata_latest", BOOL, "Whether the metadata it holds is the newest"),
        runtime("is_tools_iso", BOOL, "Whether it is the image with the guest tools"),
        runtime("cbt_enabled", BOOL, "Whether changed blocks are tracked"),
    ],
    messages: &[
        msg("snapshot", VmAdmin, "Keeps its contents of now as a new, read-only disk")
            .takes(&[p("vdi", VDI), opt("driver_params", STRING_MAP)])
            .gives(VDI)
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "SR_FULL", "VDI_IN_USE"]),
        msg("clone", VmAdmin, "Makes a new disk of its contents that shares what is the same")
            .takes(&[p("vdi", VDI), opt("driver_params", STRING_MAP)])
            .gives(VDI)
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "SR_FULL", "VDI_IN_USE"]),
        msg("resize", VmAdmin, "Makes it longer").takes(&[p("vdi", VDI), p("size", INT)]).fails(&[
            "SR_OPERATION_NOT_SUPPORTED",
            "VDI_IN_USE",
            "VDI_TOO_LARGE",
        ]),
        msg("resize_online", VmAdmin, "Makes it longer while it is used; VDI.resize does the same")
            .takes(&[p("vdi", VDI), p("size", INT)])
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "VDI_TOO_LARGE"]),
        msg("introduce", VmAdmin, "Makes an image known that lies in the SR already")
            .takes(RECORD)
            .gives(VDI)
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "UUID_INVALID", "LOCATION_NOT_UNIQUE"]),
        msg("db_introduce", PoolAdmin, "For storage plugins: a record of what they made")
            .takes(RECORD)
            .gives(VDI)
            .fails(&["PERMISSION_DENIED"]),
        msg("db_forget", PoolAdmin, "For storage plugins: forgets the record of what they removed")
            .takes(&[p("vdi", VDI)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_managed", PoolAdmin, "For storage plugins: whether it is a disk of its own")
            .takes(&[p("self", VDI), p("value", BOOL)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_missing", PoolAdmin, "For storage plugins: whether its image was not found")
            .takes(&[p("self", VDI), p("value", BOOL)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_virtual_size", PoolAdmin, "For storage plugins: bytes the guest sees")
            .takes(&[p("self", VDI), p("value", INT)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_physical_utilisation", PoolAdmin, "For storage plugins: bytes it takes in the SR")
            .takes(&[p("self", VDI), p("value", INT)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_is_a_snapshot", PoolAdmin, "For storage plugins: whether it is a snapshot")
            .takes(&[p("self", VDI), p("value", BOOL)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_snapshot_of", PoolAdmin, "For storage plugins: what it is a snapshot of")
            .takes(&[p("self", VDI), p("value", VDI)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_snapshot_time", PoolAdmin, "For storage plugins: when the snapshot was taken")
            .takes(&[p("self", VDI), p("value", DATE_TIME)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_cbt_enabled", PoolAdmin, "For storage plugins: whether changed blocks are tracked")
            .takes(&[p("self", VDI), p("value", BOOL)])
            .fails(&["PERMISSION_DENIED"]),
        msg("set_metadata_of_pool", PoolAdmin, "For storage plugins: the pool whose metadata it holds")
            .takes(&[p("self", VDI), p("value", POOL)])
            .fails(&["PERMISSION_DENIED"]),
        msg(
            "open_database",
            PoolOperator,
            "Opens the database that a VDI of type metadata holds; answers a session in which its objects are read",
        )
        .takes(&[p("self", VDI)])
        .gives(SESSION)
        .fails(&["COULD_NOT_IMPORT_DATABASE", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "VDI_IN_USE"]),
        msg("update", VmAdmin, "Brings it up to date from the storage")
            .takes(&[p("vdi", VDI)])
            .fails(&["SR_OPERATION_NOT_SUPPORTED"]),
        msg(
            "copy",
            VmAdmin,
            "Copies its contents, or what it holds that another does not, into a new disk or an existing one",
        )
        .takes(&[p("vdi", VDI), opt("sr", SR), opt("base_vdi", VDI), opt("into_vdi", VDI)])
        .gives(VDI)
        .fails(&["VDI_READONLY", "VDI_TOO_SMALL", "VDI_NOT_SPARSE", "SR_FULL"]),
        msg(
            "pool_migrate",
            VmAdmin,
            "Moves it and its snapshots to another SR, also while a VM uses it; answers the disk there",
        )
        .takes(&[p("vdi", VDI), p("sr", SR), opt("options", STRING_MAP)])
        .gives(VDI)
        .fails(MOVE_ERRORS),
        msg(
            "convert",
            VmAdmin,
            "Makes its images anew in its SR, also while a VM uses it: 'thin' as VHD, 'thick' as a raw image whose \
             space is taken at once; answers the disk that takes its place (Tapio's own)",
        )
        .takes(&[p("vdi", VDI), p("allocation", STRING)])
        .gives(VDI)
        .fails(MOVE_ERRORS),
        msg(
            "defragment",
            VmAdmin,
            "Makes its images anew in its SR with their blocks in order, also while a VM uses it; answers the disk that \
             takes its place (Tapio's own)",
        )
        .takes(&[p("vdi", VDI)])
        .gives(VDI)
        .fails(MOVE_ERRORS),
        msg(
            "release",
            PoolOperator,
            "Gives up its uses by VBDs and exports that have no disk process; any other use is refused (Tapio's own)",
        )
        .takes(&[p("vdi", VDI)])
        .fails(&["OPERATION_NOT_ALLOWED", "VDI_IN_USE"]),
        msg(
            "get_fragmentation",
            ReadOnly,
            "How its image lies on its storage: blocks, runs of blocks that are in order, the fewest runs there can \
             be, extents of the file (Tapio's own)",
        )
        .takes(&[p("vdi", VDI)])
        .gives(STRING_MAP)
        .fails(&["VDI_MISSING", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS"]),
        msg("forget", VmAdmin, "Forgets it and leaves its image")
            .takes(&[p("vdi", VDI)])
            .fails(&["VDI_IN_USE"]),
        msg("enable_cbt", VmAdmin, "Tracks changed blocks from now on, also while it is used")
            .takes(&[p("self", VDI)])
            .fails(&TRACKING_ERRORS),
        msg("disable_cbt", VmAdmin, "Tracks changed blocks no longer, also while it is used")
            .takes(&[p("self", VDI)])
            .fails(&TRACKING_ERRORS),
        msg(
            "data_destroy",
            VmAdmin,
            "Removes the data of a snapshot and keeps what is known of its changed blocks",
        )
        .takes(&[p("self", VDI)])
        .fails(&[
            "SR_OPERATION_NOT_SUPPORTED",
            "VDI_MISSING",
            "SR_NOT_ATTACHED",
            "SR_HAS_NO_PBDS",
            "OPERATION_NOT_ALLOWED",
            "VDI_INCOMPATIBLE_TYPE",
            "VDI_NO_CBT_METADATA",
            "VDI_IN_USE",
            "VDI_IS_A_PHYSICAL_DEVICE",
        ]),
        msg(
            "list_changed_blocks",
            VmOperator,
            "The blocks of 64 KiB that changed from one disk or snapshot to a later one, in base64: a bit for each, \
             the first block in the highest bit of the first byte",
        )
        .takes(&[p("vdi_from", VDI), p("vdi_to", VDI)])
        .gives(STRING)
        .fails(&[
            "SR_OPERATION_NOT_SUPPORTED",
            "VDI_MISSING",
            "SR_NOT_ATTACHED",
            "SR_HAS_NO_PBDS",
            "VDI_NO_CBT_METADATA",
            "VDI_IN_USE",
        ]),
        msg(
            "get_nbd_info",
            VmAdmin,
            "Where it can be read by NBD while the session is open: an address of each network that is for NBD",
        )
        .takes(&[p("self", VDI)])
        .gives(Type::Set(&Type::Record("vdi_nbd_server_info")))
        .fails(&[
            "VDI_INCOMPATIBLE_TYPE",
            "VDI_IN_USE",
            "VDI_MISSING",
            "VDI_NOT_MANAGED",
            "SR_NOT_ATTACHED",
            "SR_HAS_NO_PBDS",
        ]),
        msg("generate_config", VmAdmin, "What attaches it by way of this host where there is no database: the call vdi_attach_from_config of XenServer's \
             storage manager, as XML-RPC; passwords are left out")
            .takes(&[p("host", HOST), p("vdi", VDI)])
            .gives(STRING)
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "HOST_OFFLINE", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS"]),
        msg("set_name_label", VmAdmin, "Names it").takes(&[p("self", VDI), p("value", STRING)]),
        msg("set_name_description", VmAdmin, "Describes it").takes(&[p("self", VDI), p("value", STRING)]),
        msg("set_sharable", VmAdmin, "Says whether several VMs may write to it")
            .takes(&[p("self", VDI), p("value", BOOL)]),
        msg("set_read_only", VmAdmin, "Says whether it is read-only")
            .takes(&[p("self", VDI), p("value", BOOL)]),
        msg("set_on_boot", VmAdmin, "Says what happens to it when its VM starts")
            .takes(&[p("self", VDI), p("value", ON_BOOT)])
            .fails(&["SR_OPERATION_NOT_SUPPORTED", "VDI_IN_USE"]),
        msg("set_allow_caching", VmAdmin, "Says whether a local cache may hold parts of it")
            .takes(&[p("self", VDI), p("value", BOOL)]),
    ],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `vdi_nbd_server_info`.
pub static VDI_NBD_SERVER_INFO_CLASS: Class = Class {
    name: "vdi_nbd_server_info",
    doc: "A place where a disk can be read by NBD",
    kind: ClassKind::Shape,
    fields: &[
        runtime("exportname", STRING, "Name to ask the server for"),
        runtime("address", STRING, "Address of the server"),
        runtime("port", INT, "Its TCP port"),
        runtime("cert", STRING, "Its certificate, as PEM"),
        runtime("subject", STRING, "A name the certificate is valid for"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: false,
};
