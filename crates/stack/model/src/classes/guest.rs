//! What belongs to a VM apart from its disks and interfaces.

use super::row::*;
use crate::table::{Class, ClassKind, Enum, Role, Type};

const TRISTATE: Type = Type::Enum(&Enum { name: "tristate_type", words: &["yes", "no", "unspecified"] });
const PROTOCOL: Type = Type::Enum(&Enum { name: "console_protocol", words: &["vt100", "rfb", "rdp"] });

/// The class `VM_metrics`.
pub static VM_METRICS_CLASS: Class = Class {
    name: "VM_metrics",
    doc: "Measurements of a VM",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("memory_actual", INT, "Bytes of memory it has"),
        runtime("VCPUs_number", INT, "Processors it has"),
        runtime("VCPUs_utilisation", Type::Map(&INT, &FLOAT), "Use of each processor, 0 to 1"),
        runtime("VCPUs_CPU", Type::Map(&INT, &INT), "Processor of the host each of its own is on"),
        runtime("VCPUs_params", STRING_MAP, "Parameters of its processors"),
        runtime("VCPUs_flags", Type::Map(&INT, &STRING_SET), "Flags of each processor"),
        runtime("state", STRING_SET, "What it does, as running or blocked"),
        runtime("start_time", DATE_TIME, "When it was started"),
        runtime("install_time", DATE_TIME, "When it was made"),
        runtime("last_updated", DATE_TIME, "When this was last brought up to date"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("hvm", BOOL, "Whether it has full hardware"),
        runtime("nested_virt", BOOL, "Whether the guest can run VMs itself"),
        runtime("nomigrate", BOOL, "Whether it cannot be moved"),
        runtime("current_domain_type", DOMAIN_TYPE, "Kind of domain it runs as").or_text("unspecified"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `VM_guest_metrics`.
pub static VM_GUEST_METRICS_CLASS: Class = Class {
    name: "VM_guest_metrics",
    doc: "What a guest tells of itself",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("os_version", STRING_MAP, "Operating system"),
        runtime("netbios_name", STRING_MAP, "Name in a Windows network"),
        runtime("PV_drivers_version", STRING_MAP, "Version of its drivers"),
        runtime("PV_drivers_up_to_date", BOOL, "Whether its drivers are current"),
        runtime("memory", STRING_MAP, "Memory as the guest sees it"),
        runtime("disks", STRING_MAP, "Disks as the guest sees them"),
        runtime("networks", STRING_MAP, "Addresses of the guest"),
        runtime("other", STRING_MAP, "Anything else the guest tells"),
        runtime("last_updated", DATE_TIME, "When this was last brought up to date"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("live", BOOL, "Whether the guest told it lately"),
        runtime("can_use_hotplug_vbd", TRISTATE, "Whether disks can be plugged while it runs")
            .or_text("unspecified"),
        runtime("can_use_hotplug_vif", TRISTATE, "Whether interfaces can be plugged while it runs")
            .or_text("unspecified"),
        runtime("PV_drivers_detected", BOOL, "Whether it has drivers for virtual devices"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `console`.
pub static CONSOLE_CLASS: Class = Class {
    name: "console",
    doc: "A console of a VM",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("protocol", PROTOCOL, "What is spoken on it"),
        runtime("location", STRING, "Where it is reached"),
        runtime("VM", VM, "The VM"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("port", INT, "TCP port, where it has one"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `crashdump`.
pub static CRASHDUMP_CLASS: Class = Class {
    name: "crashdump",
    doc: "The crash dump of a VM",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("VM", VM, "The VM"),
        runtime("VDI", VDI, "The disk it lies in"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
