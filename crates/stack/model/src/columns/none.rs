//! Classes of which there are no objects here. Scripts list them all the same.

use super::{Column, Table, ro};

static UNNAMED: &[Column] = &[ro("uuid")];
static NAMED: &[Column] = &[ro("uuid"), ro("name-label"), ro("name-description")];

const fn table(name: &'static str, plural: &'static str, class: &'static str) -> Table {
    Table { name, plural, class, columns: UNNAMED, listed: &[], only: &[] }
}

const fn named(name: &'static str, plural: &'static str, class: &'static str) -> Table {
    Table { columns: NAMED, ..table(name, plural, class) }
}

pub(super) static BOND: Table = table("bond", "bonds", "Bond");
pub(super) static CERTIFICATE: Table = table("certificate", "certificates", "Certificate");
pub(super) static CLUSTER: Table = table("cluster", "clusters", "Cluster");
pub(super) static CLUSTER_HOST: Table = table("cluster-host", "hosts of clusters", "Cluster_host");
pub(super) static DRTASK: Table = table("drtask", "disaster recoveries", "DR_task");
pub(super) static FEATURE: Table = named("feature", "features", "Feature");
pub(super) static GPU_GROUP: Table = named("gpu-group", "groups of graphics processors", "GPU_group");
pub(super) static HOST_CRASHDUMP: Table = table("host-crashdump", "crash dumps of hosts", "host_crashdump");
pub(super) static HOSTDRIVER: Table = table("hostdriver", "drivers of hosts", "Host_driver");
pub(super) static HOSTDRIVER_VARIANT: Table =
    table("hostdriver-variant", "versions of drivers of hosts", "Driver_variant");
pub(super) static NETWORK_SRIOV: Table = table("network-sriov", "SR-IOV networks", "network_sriov");
pub(super) static OBSERVER: Table = named("observer", "receivers of traces", "Observer");
pub(super) static PATCH: Table = named("patch", "patches", "pool_patch");
pub(super) static PCI: Table = table("pci", "PCI devices", "PCI");
pub(super) static PGPU: Table = table("pgpu", "graphics processors", "PGPU");
pub(super) static PUSB: Table = table("pusb", "USB devices of hosts", "PUSB");
pub(super) static PVS_CACHE_STORAGE: Table =
    table("pvs-cache-storage", "caches of provisioning sites", "PVS_cache_storage");
pub(super) static PVS_PROXY: Table = table("pvs-proxy", "proxies of provisioning sites", "PVS_proxy");
pub(super) static PVS_SERVER: Table = table("pvs-server", "servers of provisioning sites", "PVS_server");
pub(super) static PVS_SITE: Table = named("pvs-site", "provisioning sites", "PVS_site");
pub(super) static REPOSITORY: Table = named("repository", "sources of updates", "Repository");
pub(super) static SDN_CONTROLLER: Table =
    table("sdn-controller", "controllers of networks", "SDN_controller");
pub(super) static SUBJECT: Table = table("subject", "subjects of a directory", "subject");
pub(super) static TUNNEL: Table = table("tunnel", "tunnels", "tunnel");
pub(super) static UPDATE: Table = named("update", "updates", "pool_update");
pub(super) static USB_GROUP: Table = named("usb-group", "groups of USB devices", "USB_group");
pub(super) static VGPU: Table = table("vgpu", "virtual graphics processors", "VGPU");
pub(super) static VGPU_TYPE: Table = table("vgpu-type", "kinds of virtual graphics processors", "VGPU_type");
pub(super) static VLAN: Table = table("vlan", "VLANs", "VLAN");
pub(super) static VTPM: Table = table("vtpm", "TPMs", "VTPM");
pub(super) static VUSB: Table = table("vusb", "USB devices of VMs", "VUSB");
