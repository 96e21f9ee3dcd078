//! The classes, a file for each or for a few that belong together.

mod blob;
mod data_source;
mod event;
mod guest;
mod host;
mod message;
mod network;
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
    &message::MESSAGE_CLASS,
    &secret::SECRET_CLASS,
    &blob::BLOB_CLASS,
    &sr::SR_STAT_CLASS,
    &sr::PROBE_RESULT_CLASS,
    &vdi::VDI_NBD_SERVER_INFO_CLASS,
    &data_source::DATA_SOURCE_CLASS,
];

/// Classes of XenAPI that references in records name and that have no objects here: such a reference is always null,
/// such a set always empty.
pub static FOREIGN: &[&str] = &[
    "Bond",
    "Certificate",
    "DR_task",
    "Feature",
    "PCI",
    "PGPU",
    "PUSB",
    "Repository",
    "VGPU",
    "VIF_metrics",
    "VLAN",
    "VMPP",
    "VMSS",
    "VM_appliance",
    "VTPM",
    "VUSB",
    "host_crashdump",
    "host_patch",
    "network_sriov",
    "pool_update",
    "subject",
    "tunnel",
    "user",
];
