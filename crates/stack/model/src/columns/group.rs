//! Groups of VMs.

use super::{Show, Table, ro, rw};

pub(super) static APPLIANCE: Table = Table {
    name: "appliance",
    plural: "appliances",
    class: "VM_appliance",
    columns: &[
        ro("uuid"),
        rw("name-label"),
        rw("name-description"),
        ro("VMs").of("VMs/uuid"),
        ro("allowed-operations"),
        ro("current-operations").shown(Show::Values),
    ],
    listed: &[],
    only: &[],
};

pub(super) static VM_GROUP: Table = Table {
    name: "vm-group",
    plural: "groups of VMs",
    class: "VM_group",
    columns: &[
        ro("uuid"),
        rw("name-label"),
        rw("name-description"),
        ro("placement"),
        ro("VMs").of("VMs/uuid"),
    ],
    listed: &[],
    only: &[],
};

pub(super) static VMSS: Table = Table {
    name: "vmss",
    plural: "plans of snapshots",
    class: "VMSS",
    columns: &[
        ro("uuid"),
        rw("name-label"),
        rw("name-description"),
        rw("enabled"),
        rw("type"),
        rw("retained-snapshots"),
        rw("frequency"),
        rw("schedule"),
        ro("last-run-time"),
        ro("VMs").of("VMs/uuid"),
    ],
    listed: &[],
    only: &[],
};
