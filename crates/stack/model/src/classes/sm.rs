//! Storage drivers.

use super::row::*;
use crate::table::{Class, ClassKind, Role, Type};

/// The class `SM`.
pub static SM_CLASS: Class = Class {
    name: "SM",
    doc: "A driver for a type of storage repository",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("name_label", STRING, "Name for people"),
        runtime("name_description", STRING, "What it is, for people"),
        runtime("type", STRING, "SR type it serves"),
        runtime("vendor", STRING, "Vendor of the driver"),
        runtime("copyright", STRING, "Whose it is"),
        runtime("version", STRING, "Its version"),
        runtime("required_api_version", STRING, "Version of the storage interface it speaks"),
        runtime("configuration", STRING_MAP, "Keys of device_config, with a sentence on each"),
        runtime("capabilities", STRING_SET, "What it can do"),
        runtime("features", Type::Map(&STRING, &INT), "What it can do, with the version of each ability"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("driver_filename", STRING, "The program"),
        runtime("required_cluster_stack", STRING_SET, "Cluster stacks it needs"),
        runtime(
            "supported_image_formats",
            STRING_SET,
            "Formats of images that it makes; the first is the default",
        ),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
