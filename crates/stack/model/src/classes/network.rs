//! Networks, and what is connected to them.

use super::row::*;
use crate::table::{Class, ClassKind, Enum, Role, Type};

const LOCKING_MODE: Type =
    Type::Enum(&Enum { name: "network_default_locking_mode", words: &["unlocked", "disabled"] });
const PURPOSE: Type = Type::Enum(&Enum { name: "network_purpose", words: &["nbd", "insecure_nbd"] });
const OPERATION: Type = Type::Enum(&Enum { name: "network_operations", words: &["attaching"] });
const IGMP_STATUS: Type =
    Type::Enum(&Enum { name: "pif_igmp_status", words: &["enabled", "disabled", "unknown"] });
const ADDRESS_TYPE: Type = Type::Enum(&Enum { name: "primary_address_type", words: &["IPv4", "IPv6"] });
const IPV6_MODE: Type =
    Type::Enum(&Enum { name: "ipv6_configuration_mode", words: &["None", "DHCP", "Static", "Autoconf"] });
const IP_MODE: Type = Type::Enum(&Enum { name: "ip_configuration_mode", words: &["None", "DHCP", "Static"] });
const VIF_LOCKING_MODE: Type = Type::Enum(&Enum {
    name: "vif_locking_mode",
    words: &["network_default", "locked", "unlocked", "disabled"],
});
const IPV4_MODE: Type = Type::Enum(&Enum { name: "vif_ipv4_configuration_mode", words: &["None", "Static"] });
const VIF_OPERATION: Type =
    Type::Enum(&Enum { name: "vif_operations", words: &["attach", "plug", "unplug"] });
const VIF_IPV6_MODE: Type =
    Type::Enum(&Enum { name: "vif_ipv6_configuration_mode", words: &["None", "Static"] });

/// The class `network`.
pub static NETWORK_CLASS: Class = Class {
    name: "network",
    doc: "A network that VMs can be on",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        runtime("VIFs", VIFS, "Virtual network interfaces").inverse("VIF", "network"),
        runtime("PIFs", PIFS, "Network interfaces").inverse("PIF", "network"),
        writable("MTU", INT, "Bytes of a frame").or_int(1500).set_by(Role::VmAdmin),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        creator("bridge", STRING, "Bridge on the hosts"),
        creator("managed", BOOL, "Whether the toolstack looks after it").or_bool(true),
        runtime("blobs", Type::Map(&STRING, &BLOB), "Binary blobs that belong to it"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(Role::VmOperator),
        runtime("default_locking_mode", LOCKING_MODE, "What interfaces may send by default"),
        runtime("assigned_ips", Type::Map(&VIF, &STRING), "Addresses that were given out"),
        runtime("purpose", Type::Set(&PURPOSE), "What it is for, as nbd"),
    ],
    messages: &[
        msg(
            "add_purpose",
            Role::PoolAdmin,
            "Makes it be for this; hosts serve NBD on networks that are for it",
        )
        .takes(&[p("self", NETWORK), p("value", PURPOSE)])
        .fails(&["NETWORK_INCOMPATIBLE_PURPOSES"]),
        msg("remove_purpose", Role::PoolAdmin, "Makes it be for this no longer")
            .takes(&[p("self", NETWORK), p("value", PURPOSE)]),
    ],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `PIF`.
pub static PIF_CLASS: Class = Class {
    name: "PIF",
    doc: "A network interface of a host",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("device", STRING, "Its name on the host"),
        runtime("network", NETWORK, "The network it leads to"),
        runtime("host", HOST, "The host"),
        runtime("MAC", STRING, "Its hardware address"),
        runtime("MTU", INT, "Bytes of a frame").or_int(1500),
        runtime("VLAN", INT, "Number of its VLAN; -1 for none").or_int(-1),
        runtime("metrics", PIF_METRICS, "Its measurements"),
        runtime("physical", BOOL, "Whether it is hardware"),
        runtime("currently_attached", BOOL, "Whether it is up").or_bool(true),
        runtime("ip_configuration_mode", IP_MODE, "Where its IPv4 address comes from"),
        runtime("IP", STRING, "Its IPv4 address"),
        runtime("netmask", STRING, "Its IPv4 netmask"),
        runtime("gateway", STRING, "Its IPv4 gateway"),
        runtime("DNS", STRING, "Name servers"),
        runtime("bond_slave_of", BOND, "Bond it belongs to"),
        runtime("bond_master_of", BONDS, "Bonds it stands for"),
        runtime("VLAN_master_of", VLAN, "VLAN it stands for"),
        runtime("VLAN_slave_of", VLANS, "VLANs on it"),
        runtime("management", BOOL, "Whether the host is managed by it"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("disallow_unplug", BOOL, "Whether it must stay up"),
        runtime("tunnel_access_PIF_of", TUNNELS, "Tunnels that begin here"),
        runtime("tunnel_transport_PIF_of", TUNNELS, "Tunnels that run over it"),
        runtime("ipv6_configuration_mode", IPV6_MODE, "Where its IPv6 addresses come from"),
        runtime("IPv6", STRING_SET, "Its IPv6 addresses"),
        runtime("ipv6_gateway", STRING, "Its IPv6 gateway"),
        runtime("primary_address_type", ADDRESS_TYPE, "Which of its addresses is used"),
        runtime("managed", BOOL, "Whether the toolstack looks after it").or_bool(true),
        runtime("properties", STRING_MAP, "Settings of the hardware"),
        runtime("capabilities", STRING_SET, "What the hardware can do"),
        runtime("igmp_snooping_status", IGMP_STATUS, "Whether multicast is filtered").or_text("unknown"),
        runtime("sriov_physical_PIF_of", NETWORK_SRIOVS, "SR-IOV networks on it"),
        runtime("sriov_logical_PIF_of", NETWORK_SRIOVS, "SR-IOV networks it stands for"),
        runtime("PCI", PCI, "Its PCI device"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `PIF_metrics`.
pub static PIF_METRICS_CLASS: Class = Class {
    name: "PIF_metrics",
    doc: "Measurements of a network interface of a host",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("io_read_kbs", FLOAT, "KiB read a second"),
        runtime("io_write_kbs", FLOAT, "KiB written a second"),
        runtime("carrier", BOOL, "Whether it has a link"),
        runtime("vendor_id", STRING, "Number of the maker"),
        runtime("vendor_name", STRING, "The maker"),
        runtime("device_id", STRING, "Number of the model"),
        runtime("device_name", STRING, "The model"),
        runtime("speed", INT, "Mbit/s"),
        runtime("duplex", BOOL, "Whether both ways work at once"),
        runtime("pci_bus_path", STRING, "Its place on the PCI bus"),
        runtime("last_updated", DATE_TIME, "When this was last brought up to date"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `VIF`.
pub static VIF_CLASS: Class = Class {
    name: "VIF",
    doc: "A network interface of a VM",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        allowed_operations(&VIF_OPERATION),
        current_operations(&VIF_OPERATION),
        creator("device", STRING, "Position in the VM: a number from 0").required(),
        creator("network", NETWORK, "The network it leads to").required(),
        creator("VM", VM, "The VM").required(),
        creator("MAC", STRING, "Its hardware address"),
        creator("MTU", INT, "Bytes of a frame").or_int(1500),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        creator("currently_attached", BOOL, "Whether it is plugged now"),
        runtime("status_code", INT, "Number of the last error of the device"),
        runtime("status_detail", STRING, "Text of the last error of the device"),
        runtime("runtime_properties", STRING_MAP, "What the running device tells").volatile(),
        writable("qos_algorithm_type", STRING, "How its use is limited"),
        writable("qos_algorithm_params", STRING_MAP, "Parameters of that limit"),
        runtime("qos_supported_algorithms", STRING_SET, "Limits there are"),
        runtime("metrics", VIF_METRICS, "Its measurements"),
        runtime("MAC_autogenerated", BOOL, "Whether the hardware address was drawn"),
        creator("locking_mode", VIF_LOCKING_MODE, "What it may send"),
        creator("ipv4_allowed", STRING_SET, "IPv4 addresses it may use"),
        creator("ipv6_allowed", STRING_SET, "IPv6 addresses it may use"),
        runtime("ipv4_configuration_mode", IPV4_MODE, "Where its IPv4 address comes from"),
        runtime("ipv4_addresses", STRING_SET, "IPv4 addresses the guest is told to use"),
        runtime("ipv4_gateway", STRING, "IPv4 gateway the guest is told to use"),
        runtime("ipv6_configuration_mode", VIF_IPV6_MODE, "Where its IPv6 address comes from"),
        runtime("ipv6_addresses", STRING_SET, "IPv6 addresses the guest is told to use"),
        runtime("ipv6_gateway", STRING, "IPv6 gateway the guest is told to use"),
    ],
    messages: &[
        msg("plug", Role::VmAdmin, "Plugs the interface into the running VM").takes(&[p("self", VIF)]).fails(
            &[
                "DEVICE_ALREADY_ATTACHED",
                "VM_BAD_POWER_STATE",
                "HOST_CANNOT_ATTACH_NETWORK",
                "VM_LACKS_FEATURE",
            ],
        ),
        msg("unplug", Role::VmAdmin, "Unplugs the interface from the running VM; the guest may refuse")
            .takes(&[p("self", VIF)])
            .fails(&["DEVICE_DETACH_REJECTED", "DEVICE_DETACH_TIMEOUT", "DEVICE_ALREADY_DETACHED"]),
        msg(
            "move",
            Role::VmAdmin,
            "Connects it to another network, also while it is plugged into a guest that runs",
        )
        .takes(&[p("self", VIF), p("network", NETWORK)])
        .fails(&[
            "HOST_CANNOT_ATTACH_NETWORK",
            "OPERATION_NOT_ALLOWED",
            "OTHER_OPERATION_IN_PROGRESS",
        ]),
        msg("unplug_force", Role::VmAdmin, "Unplugs the interface from its network, whatever the guest does")
            .takes(&[p("self", VIF)])
            .fails(&["DEVICE_ALREADY_DETACHED"]),
    ],
    constructor: Some(Role::VmAdmin),
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};

/// The class `VIF_metrics`.
pub static VIF_METRICS_CLASS: Class = Class {
    name: "VIF_metrics",
    doc: "Measurements of a network interface of a VM",
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
