//! Classes of XenAPI of which there are no objects here. Clients list them all the same: each listing is empty, and no
//! UUID or reference is known.

use super::row::*;
use crate::table::{Class, ClassKind, Field, Role};

const UNNAMED: &[Field] = &[runtime("uuid", STRING, "Unique and lasting name")];

const NAMED: &[Field] = &[
    runtime("uuid", STRING, "Unique and lasting name"),
    runtime("name_label", STRING, "Name for people"),
    runtime("name_description", STRING, "What it is, for people"),
];

const fn none(name: &'static str, doc: &'static str, fields: &'static [Field]) -> Class {
    Class {
        name,
        doc,
        kind: ClassKind::Objects,
        fields,
        messages: &[],
        constructor: None,
        setter_role: Role::PoolOperator,
        reader_role: Role::ReadOnly,
        persistent: false,
    }
}

pub(super) static BOND: Class =
    none("Bond", "Network interfaces of a host that work as one; there is none here", UNNAMED);
pub(super) static CERTIFICATE: Class =
    none("Certificate", "A certificate of a host or of its trusted peers; there is none here", UNNAMED);
pub(super) static CLUSTER: Class =
    none("Cluster", "A cluster of hosts below shared storage; there is none here", UNNAMED);
pub(super) static CLUSTER_HOST: Class =
    none("Cluster_host", "A host's part in a cluster; there is none here", UNNAMED);
pub(super) static DR_TASK: Class =
    none("DR_task", "A disaster recovery in progress; there is none here", UNNAMED);
pub(super) static DRIVER_VARIANT: Class =
    none("Driver_variant", "A version of a driver of a host; there is none here", UNNAMED);
pub(super) static FEATURE: Class =
    none("Feature", "An experimental feature of a host; there is none here", NAMED);
pub(super) static GPU_GROUP: Class =
    none("GPU_group", "Graphics processors that can stand for each other; there is none here", NAMED);
pub(super) static HOST_CRASHDUMP: Class =
    none("host_crashdump", "What a host left when it crashed; there is none here", UNNAMED);
pub(super) static HOST_DRIVER: Class =
    none("Host_driver", "A driver of a host with several versions; there is none here", UNNAMED);
pub(super) static HOST_PATCH: Class =
    none("host_patch", "A patch on a host, in the way of older versions; there is none here", NAMED);
pub(super) static NETWORK_SRIOV: Class = none(
    "network_sriov",
    "A network on virtual functions of a network interface; there is none here",
    UNNAMED,
);
pub(super) static OBSERVER: Class = none("Observer", "A receiver of traces; there is none here", NAMED);
pub(super) static PCI: Class = none("PCI", "A device on the PCI bus of a host; there is none here", UNNAMED);
pub(super) static PGPU: Class = none("PGPU", "A graphics processor of a host; there is none here", UNNAMED);
pub(super) static POOL_PATCH: Class =
    none("pool_patch", "A patch of the pool, in the way of older versions; there is none here", NAMED);
pub(super) static POOL_UPDATE: Class =
    none("pool_update", "An update of the pool's hosts; there is none here", NAMED);
pub(super) static PUSB: Class = none("PUSB", "A USB device of a host; there is none here", UNNAMED);
pub(super) static PVS_CACHE_STORAGE: Class = none(
    "PVS_cache_storage",
    "Where a host keeps what it read from a provisioning site; there is none here",
    UNNAMED,
);
pub(super) static PVS_PROXY: Class =
    none("PVS_proxy", "A cache between a VM and a provisioning site; there is none here", UNNAMED);
pub(super) static PVS_SERVER: Class =
    none("PVS_server", "A server of a provisioning site; there is none here", UNNAMED);
pub(super) static PVS_SITE: Class =
    none("PVS_site", "Servers that provide disks over the network; there is none here", NAMED);
pub(super) static REPOSITORY: Class = none("Repository", "A source of updates; there is none here", NAMED);
pub(super) static SDN_CONTROLLER: Class =
    none("SDN_controller", "A controller of the pool's networks; there is none here", UNNAMED);
pub(super) static SUBJECT: Class =
    none("subject", "A user or group of a directory that may log in; there is none here", UNNAMED);
pub(super) static TUNNEL: Class =
    none("tunnel", "A network that runs through another; there is none here", UNNAMED);
pub(super) static USB_GROUP: Class =
    none("USB_group", "USB devices that can stand for each other; there is none here", NAMED);
pub(super) static VGPU: Class =
    none("VGPU", "A virtual graphics processor of a VM; there is none here", UNNAMED);
pub(super) static VGPU_TYPE: Class =
    none("VGPU_type", "A kind of virtual graphics processor; there is none here", UNNAMED);
pub(super) static VLAN: Class =
    none("VLAN", "A tagged network on a network interface; there is none here", UNNAMED);
pub(super) static VMPP: Class =
    none("VMPP", "A plan of backups, in the way of older versions; there is none here", NAMED);
pub(super) static VTPM: Class = none("VTPM", "A TPM of a VM; there is none here", UNNAMED);
pub(super) static VUSB: Class = none("VUSB", "A USB device of a VM; there is none here", UNNAMED);
