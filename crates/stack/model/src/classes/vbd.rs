//! Disks and drives of VMs.

use super::row::*;
use crate::Role::{VmAdmin, VmOperator};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const OPERATION: Type = Type::Enum(&Enum {
    name: "vbd_operations",
    words: &["attach", "eject", "insert", "plug", "unplug", "unplug_force", "pause", "unpause"],
});
const MODE: Type = Type::Enum(&Enum { name: "vbd_mode", words: &["RO", "RW"] });
const TYPE: Type = Type::Enum(&Enum { name: "vbd_type", words: &["CD", "Disk", "Floppy"] });

/// The class `VBD`.
pub static VBD_CLASS: Class = Class {
    name: "VBD",
    doc: "A disk or drive of a VM",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        creator("VM", VM, "The VM").required(),
        creator("VDI", VDI, "The disk; none for an empty drive"),
        creator("device", STRING, "Name of the device where it is plugged"),
        writable("userdevice", STRING, "Position in the VM: a number from 0, or autodetect")
            .or_text("autodetect"),
        writable("bootable", BOOL, "Whether the VM boots from it"),
        creator("mode", MODE, "Whether the guest may write").or_text("RW"),
        writable("type", TYPE, "What the guest takes it for").or_text("Disk"),
        writable("unpluggable", BOOL, "Whether it may be unplugged while the VM runs").or_bool(true),
        runtime("storage_lock", BOOL, "Whether the storage has locked it").volatile(),
        creator("empty", BOOL, "Whether the drive is empty"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        creator("currently_attached", BOOL, "Whether it is plugged now"),
        runtime("status_code", INT, "Number of the last error of the device"),
        runtime("status_detail", STRING, "Text of the last error of the device"),
        runtime("runtime_properties", STRING_MAP, "What the running device tells").volatile(),
        writable("qos_algorithm_type", STRING, "How its use is limited"),
        writable("qos_algorithm_params", STRING_MAP, "Parameters of that limit"),
        runtime("qos_supported_algorithms", STRING_SET, "Limits there are"),
        runtime("metrics", VBD_METRICS, "Its measurements"),
    ],
    messages: &[
        msg("eject", VmOperator, "Takes the medium out of a drive")
            .takes(&[p("vbd", VBD)])
            .fails(&["VBD_NOT_REMOVABLE_MEDIA", "VBD_IS_EMPTY"]),
        msg("insert", VmOperator, "Puts a medium into a drive")
            .takes(&[p("vbd", VBD), p("vdi", VDI)])
            .fails(&["VBD_NOT_REMOVABLE_MEDIA", "VBD_NOT_EMPTY"]),
        msg("plug", VmAdmin, "Plugs the disk into the running VM").takes(&[p("self", VBD)]).fails(&[
            "DEVICE_ALREADY_ATTACHED",
            "VM_BAD_POWER_STATE",
            "VDI_IN_USE",
        ]),
        msg("unplug", VmAdmin, "Unplugs the disk from the running VM; the guest may refuse. A 'timeout' (ours) ends it after so many seconds")
            .takes(&[p("self", VBD), opt("timeout", INT)])
            .fails(&[
                "DEVICE_DETACH_REJECTED",
                "DEVICE_DETACH_TIMEOUT",
                "DEVICE_ALREADY_DETACHED",
                "VBD_NOT_UNPLUGGABLE",
            ]),
        msg("unplug_force", VmAdmin, "Unplugs the disk from the running VM without asking the guest")
            .takes(&[p("self", VBD)])
            .fails(&["DEVICE_ALREADY_DETACHED", "VBD_NOT_UNPLUGGABLE"]),
        msg("pause", VmAdmin, "Closes the images of a plugged disk; the guest's requests wait. Gives a token for 'unpause'")
            .takes(&[p("self", VBD)])
            .gives(STRING)
            .fails(&["VM_BAD_POWER_STATE", "DEVICE_NOT_ATTACHED", "VBD_IS_EMPTY", "OPERATION_NOT_ALLOWED"]),
        msg("unpause", VmAdmin, "Lets a paused disk go on. An empty token stands for the one of the pause")
            .takes(&[p("self", VBD), p("token", STRING)])
            .fails(&["VM_BAD_POWER_STATE", "DEVICE_NOT_ATTACHED", "VBD_IS_EMPTY", "OPERATION_NOT_ALLOWED"]),
        msg("assert_attachable", VmAdmin, "Fails where plugging it would fail")
            .takes(&[p("self", VBD)])
            .fails(&["VDI_IN_USE", "SR_NOT_ATTACHED"]),
        msg("set_mode", VmAdmin, "Says whether the guest may write")
            .takes(&[p("self", VBD), p("value", MODE)])
            .fails(&["VM_BAD_POWER_STATE"]),
    ],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `VBD_metrics`.
pub static VBD_METRICS_CLASS: Class = Class {
    name: "VBD_metrics",
    doc: "Measurements of a disk of a VM; its numbers are in the metrics now",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("io_read_kbs", FLOAT, "KiB read a second"),
        runtime("io_write_kbs", FLOAT, "KiB written a second"),
        runtime("last_updated", DATE_TIME, "When this was last brought up to date"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};
