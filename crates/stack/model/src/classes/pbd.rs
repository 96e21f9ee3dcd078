//! Connections of hosts to storage repositories.

use super::row::*;
use crate::Role::PoolOperator;
use crate::table::{Class, ClassKind, Role};

/// The class `PBD`.
pub static PBD_CLASS: Class = Class {
    name: "PBD",
    doc: "The connection of a host to a storage repository",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        creator("host", HOST, "The host").required(),
        creator("SR", SR, "The storage repository").required(),
        creator("device_config", STRING_MAP, "How this host reaches the storage"),
        runtime("currently_attached", BOOL, "Whether it is attached there now"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[
        msg("plug", PoolOperator, "Attaches the SR to the host")
            .takes(&[p("self", PBD)])
            .fails(&["SR_UNKNOWN_DRIVER", "SR_ATTACH_FAILED"]),
        msg("unplug", PoolOperator, "Detaches the SR from the host")
            .takes(&[p("self", PBD)])
            .fails(&["VDI_IN_USE", "SR_DEVICE_IN_USE"]),
        msg("set_device_config", PoolOperator, "Changes how the host reaches the storage")
            .takes(&[p("self", PBD), p("value", STRING_MAP)]),
    ],
    constructor: Some(Role::PoolOperator),
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
