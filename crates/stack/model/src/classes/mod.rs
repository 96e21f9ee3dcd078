//! The classes, a file for each or for a few that belong together.

mod blob;
mod data_source;
mod event;
mod group;
mod guest;
mod host;
mod message;
mod network;
mod none;
mod pbd;
mod pool;
mod row;
mod secret;
mod session;
mod sm;
mod sr;
mod task;
mod vbd;
mod vdi;
mod vm;

use crate::table::Class;

/// Every class.
pub static CLASSES: &[&Class] = &[
    &session::SESSION_CLASS,
    &session::ROLE_CLASS,
    &task::TASK_CLASS,
    &event::EVENT_CLASS,
    &pool::POOL_CLASS,
    &host::HOST_CLASS,
    &host::HOST_METRICS_CLASS,
    &host::HOST_CPU_CLASS,
    &sr::SR_CLASS,
    &sm::SM_CLASS,
    &pbd::PBD_CLASS,
    &vdi::VDI_CLASS,
    &vbd::VBD_CLASS,
    &vbd::VBD_METRICS_CLASS,
    &vm::VM_CLASS,
    &guest::VM_METRICS_CLASS,
    &guest::VM_GUEST_METRICS_CLASS,
    &guest::CONSOLE_CLASS,
    &guest::CRASHDUMP_CLASS,
    &network::NETWORK_CLASS,
    &network::PIF_CLASS,
    &network::PIF_METRICS_CLASS,
    &network::VIF_CLASS,
    &network::VIF_METRICS_CLASS,
    &message::MESSAGE_CLASS,
    &secret::SECRET_CLASS,
    &blob::BLOB_CLASS,
    &sr::SR_STAT_CLASS,
    &sr::LVHD_CLASS,
    &sr::PROBE_RESULT_CLASS,
    &vdi::VDI_NBD_SERVER_INFO_CLASS,
    &data_source::DATA_SOURCE_CLASS,
    &group::APPLIANCE_CLASS,
    &group::VM_GROUP_CLASS,
    &group::VMSS_CLASS,
    &none::BOND,
    &none::CERTIFICATE,
    &none::CLUSTER,
    &none::CLUSTER_HOST,
    &none::DR_TASK,
    &none::DRIVER_VARIANT,
    &none::FEATURE,
    &none::GPU_GROUP,
    &none::HOST_CRASHDUMP,
    &none::HOST_DRIVER,
    &none::HOST_PATCH,
    &none::NETWORK_SRIOV,
    &none::OBSERVER,
    &none::PCI,
    &none::PGPU,
    &none::POOL_PATCH,
    &none::POOL_UPDATE,
    &none::PUSB,
    &none::PVS_CACHE_STORAGE,
    &none::PVS_PROXY,
    &none::PVS_SERVER,
    &none::PVS_SITE,
    &none::REPOSITORY,
    &none::SDN_CONTROLLER,
    &none::SUBJECT,
    &none::TUNNEL,
    &none::USB_GROUP,
    &none::VGPU,
    &none::VGPU_TYPE,
    &none::VLAN,
    &none::VMPP,
    &none::VTPM,
    &none::VUSB,
];

/// Classes of XenAPI that references in records name and that are not in the table: such a reference is always null.
pub static FOREIGN: &[&str] = &["user"];
